"""SubtreeLinear against a loop over the keys of nodes; in files; in chunks; and what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import random_graphs
from torch import Tensor

from spin_fast import GraphBatch, PowerFeatures, reference, training
from spin_fast.nn import GraphModel, SubtreeLinear

COLUMNS = 64  # so few that patterns share them


@pytest.fixture
def graphs() -> GraphBatch:
    return random_graphs([5, 0, 3, 9, 1, 1], dtype=torch.float32, signs=True)


def new_model(out_features: int = 3, **options) -> SubtreeLinear:
    """Weights for every second column."""
    model = SubtreeLinear(3, out_features, COLUMNS // 2, num_hops=2, num_columns=COLUMNS, **options)
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(value.shape, generator=generator).double() for name, value in model.state_dict().items()}
    model.load_state_dict(state | {"columns": torch.arange(1, COLUMNS, 2)})
    return model


def looped(model: SubtreeLinear, graphs: GraphBatch, x: Tensor | None = None) -> Tensor:
    """Scores by a loop over graphs, from the keys of the reference implementation as Python's integers."""
    keys = reference.subtree_keys(graphs.indptr, graphs.indices, graphs.x if x is None else x, 2)
    table = dict(zip(model.columns.tolist(), model.weight.detach(), strict=True))
    scores = []
    for begin, end in zip(graphs.ptr[:-1].tolist(), graphs.ptr[1:].tolist(), strict=True):
        counts = Counter(key % 2**64 % COLUMNS for key in keys[:, begin:end].flatten().tolist())
        values = torch.tensor(list(counts.values()), dtype=torch.float64)
        order = {"l1": 1, "l2": 2}.get(model.config["norm"])
        size = torch.linalg.vector_norm(values, order) if order and len(values) else 1.0
        parts = [count / size * table[column] for column, count in counts.items() if column in table]
        scores.append(sum(parts, model.bias.detach()))
    return torch.stack(scores)


@pytest.mark.parametrize("norm", ["l1", "l2", None])
def test_scores_of_counts(graphs: GraphBatch, norm: str | None, backend: str) -> None:
    model = new_model(norm=norm)
    torch.testing.assert_close(model(graphs), looped(model, graphs), rtol=1e-12, atol=1e-12)
    assert torch.equal(model(graphs)[1], model.bias)  # no nodes
    torch.testing.assert_close(model.float()(graphs), looped(new_model(norm=norm), graphs).float())


def test_only_the_columns_named_are_compared(graphs: GraphBatch) -> None:
    model = new_model(features=[2])
    torch.testing.assert_close(model(graphs), looped(model, graphs, graphs.x[:, 2:]))
    assert torch.equal(model(replace(graphs, x=graphs.x * torch.tensor([7.0, 0.0, 1.0]))), model(graphs))
    alone = new_model(features=[])  # what is left are the edges
    assert torch.equal(alone(replace(graphs, x=torch.rand_like(graphs.x))), alone(graphs))


def test_chunks_and_neighbours_change_no_bit(graphs: GraphBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    expected = training.predict_proba(model, graphs)
    torch.testing.assert_close(expected, looped(model, graphs).softmax(1))
    for size in (4000, 1):
        monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", size)
        assert torch.equal(training.predict_proba(model, graphs), expected)
    order = [4, 2, 2, 0]
    assert torch.equal(training.predict_proba(model, graphs[order]), expected[order])
    assert training.predict_proba(model, graphs[:0]).shape == (0, 3)
    model.multilabel = True
    torch.testing.assert_close(training.predict_proba(model, graphs), looped(model, graphs).sigmoid())


def test_weights_have_gradients(graphs: GraphBatch) -> None:
    model = new_model()
    model(graphs)[:, 1].sum().backward()
    assert model.bias.grad.tolist() == [0, 6, 0]
    assert (model.weight.grad[:, 0] == 0).all()
    assert (model.weight.grad[:, 1] > 0).any()


def test_files_keep_every_bit(graphs: GraphBatch, tmp_path: Path) -> None:
    model = new_model(edge_types=True, seed=5, norm=None, features=[0, 2])
    model.multilabel = False
    typed = replace(graphs, edge_weight=(torch.arange(graphs.num_edges) % 3).float())
    training.save_checkpoint(tmp_path / "x", model, dataset="some")
    loaded, metadata = training.load_checkpoint(tmp_path / "x")
    assert isinstance(loaded, SubtreeLinear)
    assert metadata == {"dataset": "some", "multilabel": False}
    assert (loaded.config, loaded.multilabel, loaded.operator) == (model.config, False, None)
    assert torch.equal(training.predict_proba(loaded, typed), training.predict_proba(model, typed))
    with pytest.raises(ValueError, match="graphs must have edge weights, the types of edges, where edge_types is True"):
        training.predict_proba(loaded, graphs)


def test_what_is_wrong_is_named(graphs: GraphBatch, tmp_path: Path) -> None:
    for arguments, options, error, message in (
        ((-1, 2, 1), {}, ValueError, "in_features must be at least 0, got -1"),
        ((3, 0, 1), {}, ValueError, "out_features must be at least 1, got 0"),
        ((3, 2, 0), {}, ValueError, "num_weights must be at least 1, got 0"),
        ((3, 2, 9), {"num_columns": 8}, ValueError, "num_weights must be at most 8, the number of columns, got 9"),
        ((3, 2, 1), {"num_columns": 2**31 + 1}, ValueError, r"num_columns must be at most 2\*\*31, got 2147483649"),
        ((3, 2, 1), {"num_hops": 1.5}, TypeError, "num_hops must be an int, got float"),
        ((3, 2, 1), {"norm": "max"}, ValueError, "norm must be one of l1, l2 or None, got 'max'"),
        ((3, 2, 1), {"features": [3]}, ValueError, r"features must be less than 3, the number of columns, got \[3\]"),
    ):
        with pytest.raises(error, match=message):
            SubtreeLinear(*arguments, **options)
    model, wider = new_model(), random_graphs([3], num_features=5)
    for call in (lambda: model(wider), lambda: training.predict_proba(model, wider)):
        with pytest.raises(ValueError, match="graphs must have 3 features as the model, got 5"):
            call()
    with pytest.raises(TypeError, match="model must be a GraphClassifier, as features are given, got SubtreeLinear"):
        training.predict(model, PowerFeatures.from_graphs(graphs, 2))
    with pytest.raises(ValueError, match="operator must be left out, as SubtreeLinear has none, got 'sym'"):
        training.predict_proba(model, graphs, "sym")
    with pytest.raises(ValueError, match="operator must be left out"):
        training.save_checkpoint(tmp_path / "x", model, operator="sym")
    with pytest.raises(TypeError, match=r"model must be a SPIN, SubtreeLinear, .* got GraphModel"):
        training.save_checkpoint(tmp_path / "x", GraphModel())
