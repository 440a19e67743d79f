"""A training epoch and a prediction pass, SPIN against PyG's GIN and GCN of the same depth, width and batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from spin_fast import SPIN, GraphBatch, PowerFeatures, training

from .plugin import RunRace

pytest.importorskip("torch_geometric", reason="the rivals are PyG's GIN and GCN: install torch_geometric")

from torch_geometric.loader import DataLoader

from . import rivals

DEPTH = 3
WIDTH = 32
BATCH_SIZE = 128

Contenders = dict[str, Callable[[], object]]


@pytest.fixture
def shape(dataset: str, graphs: GraphBatch) -> tuple[int, int, int, int]:
    """Features, width, classes and depth of the models."""
    if graphs.y is None or graphs.y.is_floating_point() or graphs.y.dim() != 1:
        pytest.skip(f"{dataset} has not one class per graph")
    return graphs.num_features, WIDTH, int(graphs.y.max()) + 1, DEPTH


@pytest.fixture
def spins(shape: tuple[int, int, int, int]) -> dict[str, SPIN]:
    """SPIN-att, which the ratios refer to, and SPIN-sum."""
    torch.manual_seed(0)
    return {"SPIN-att": SPIN(*shape, attention=True), "SPIN-sum": SPIN(*shape, attention=False)}


def adam(model: nn.Module) -> torch.optim.Adam:
    """The optimiser that ``spin_fast.training.fit`` has, for all."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def test_training_epoch(race: RunRace, dataset: str, graphs: GraphBatch, shape: tuple, spins: dict[str, SPIN]) -> None:
    """One epoch in random order; our features, and the batches of the rivals' second setting, are made beforehand."""
    features, ids, order = PowerFeatures.from_graphs(graphs, DEPTH), torch.arange(len(graphs)), torch.Generator()
    contenders: Contenders = {
        name: partial(training.train_epoch, model, adam(model), features, ids, BATCH_SIZE, order)
        for name, model in spins.items()
    }
    for family, make in rivals.MODELS.items():
        data = rivals.data_list(graphs, family)
        loader = DataLoader(data, BATCH_SIZE, shuffle=True)
        mixed = [data[i] for i in torch.randperm(len(data)).tolist()]
        for form in rivals.FORMS:
            batches = rivals.collated(mixed, BATCH_SIZE, form)
            contenders |= {
                f"{family} {form}, DataLoader": train_rival(make(*shape), partial(rivals.loaded, loader, form)),
                f"{family} {form}, collated": train_rival(make(*shape), partial(rivals.shuffled, batches)),
            }
    race("training epoch", dataset, contenders)


def train_rival(model: rivals.Classifier, batches: Callable[[], Iterable[rivals.Inputs]]) -> Callable[[], float]:
    """An epoch of a rival; ``batches`` starts the epoch's iterator."""
    optimizer = adam(model)
    return lambda: rivals.train_epoch(model, optimizer, batches())


def test_prediction(race: RunRace, dataset: str, graphs: GraphBatch, shape: tuple, spins: dict[str, SPIN]) -> None:
    """Class scores of all graphs, in order. All forms and settings of one rival must give the same."""
    features = PowerFeatures.from_graphs(graphs, DEPTH)
    contenders: Contenders = {
        name: partial(training.predict, model, features, None, BATCH_SIZE) for name, model in spins.items()
    }
    for family, make in rivals.MODELS.items():
        model = make(*shape)
        data = rivals.data_list(graphs, family)
        loader = DataLoader(data, BATCH_SIZE)
        expected = None
        for form in rivals.FORMS:
            batches = rivals.collated(data, BATCH_SIZE, form)
            passes = {
                f"{family} {form}, DataLoader": predict_rival(model, partial(rivals.loaded, loader, form)),
                f"{family} {form}, collated": partial(rivals.predict, model, batches),
            }
            for predict in passes.values():
                expected = predict() if expected is None else expected
                torch.testing.assert_close(predict(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
            contenders |= passes
    race("prediction", dataset, contenders)


def predict_rival(model: rivals.Classifier, batches: Callable[[], Iterable[rivals.Inputs]]) -> Callable[[], Tensor]:
    """A prediction pass of a rival; ``batches`` starts the pass's iterator."""
    return lambda: rivals.predict(model, batches())
