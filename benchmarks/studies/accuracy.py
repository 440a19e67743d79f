"""Accuracy at equal settings: SPINs and a GIN, trained alike. Apart from the races, since it takes minutes.

    python -m spin_fast.benchmarks.studies.accuracy --root DIR --results DIR

All have the settings below, chosen once and tuned for none of them; no BatchNorm, no dropout, no weight decay.
Each seed has its own stratified split 80/10/10, the same for all. The epoch is selected by validation accuracy,
of equal ones by the lower validation loss; the test graphs are seen once. The time is that of the training passes,
with one thread, and of SPIN's precomputation; the GIN's batches are collated by PyG's DataLoader, since training in
random order needs new ones in every epoch.

Every run is kept as it ends, in DIR/accuracy.json; started again, the program goes on from there.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.loader import DataLoader

from spin_fast import SPIN, GraphBatch, PowerFeatures, datasets, training

from ..harness import epochs
from ..harness.epochs import DEPTH, LEARNING_RATE, WIDTH, Epoch
from ..rivals import gnn
from . import study
from .study import Scores, Study, TrainingRun

DATASETS = ("PROTEINS", "NCI1", "IMDB-BINARY")
JOINT = "SPIN-sum, joint rows"
MODELS = ("SPIN-att", "SPIN-sum", JOINT, "GIN")
SEEDS = (0, 1, 2)
EPOCHS = 200
BATCH_SIZE = 32
SETTINGS = {
    "width": WIDTH,
    "depth": DEPTH,
    "batch size": BATCH_SIZE,
    "epochs": EPOCHS,
    "optimiser": "Adam",
    "learning rate": LEARNING_RATE,
}


class Learner(NamedTuple):
    """A model, what trains it for an epoch, and its class scores of some graphs."""

    model: nn.Module
    epoch: Epoch
    predict: Callable[[Tensor], Tensor]


def spin(name: str, graphs: GraphBatch, train: Tensor, shape: tuple[int, int, int, int]) -> Learner:
    """SPIN, the precomputation included."""
    model = SPIN(*shape, attention=name == "SPIN-att", branches="joint" if name == JOINT else "hops")
    features = PowerFeatures.from_graphs(graphs, DEPTH)
    return Learner(model, epochs.ours(model, features, BATCH_SIZE, train), partial(training.predict, model, features))


def gin(graphs: GraphBatch, train: Tensor, shape: tuple[int, int, int, int]) -> Learner:
    """PyG's GIN with CSR products, which are the faster form of these data sets."""
    model, data = gnn.gin(*shape), gnn.data_list(graphs, "GIN")
    loader = DataLoader([data[i] for i in train.tolist()], BATCH_SIZE, shuffle=True)

    def predict(ids: Tensor) -> Tensor:
        return gnn.predict(model, gnn.collated([data[i] for i in ids.tolist()], len(ids), "CSR"))

    return Learner(model, epochs.of(model, partial(gnn.loaded, loader, "CSR")), predict)


def train(name: str, graphs: GraphBatch, split: datasets.Split, seed: int) -> Scores:
    """Train, select, test."""
    assert graphs.y is not None
    shape = graphs.num_features, WIDTH, int(graphs.y.max()) + 1, DEPTH
    torch.manual_seed(seed)
    start = time.process_time()
    if name == "GIN":
        learner = gin(graphs, split.train, shape)
        seconds = 0.0  # its graphs lie ready in PyG's own form
    else:
        learner = spin(name, graphs, split.train, shape)
        seconds = time.process_time() - start
    best, best_epoch, state = (-1.0, 0.0), 0, learner.model.state_dict()
    for number in range(EPOCHS):
        start = time.process_time()
        learner.epoch()
        seconds += time.process_time() - start
        logits, y = learner.predict(split.validation), graphs.y[split.validation]
        score = training.accuracy(logits, y), -training.loss_of(logits, y).item()
        if score > best:
            best, best_epoch, state = score, number + 1, copy.deepcopy(learner.model.state_dict())
    learner.model.load_state_dict(state)
    test = training.accuracy(learner.predict(split.test), graphs.y[split.test])
    return {"test": test, "validation": best[0], "best_epoch": best_epoch, "seconds": seconds}


def runs(names: Sequence[str], root: str | None) -> dict[str, TrainingRun]:
    """By data set, model and seed."""
    load = cache(partial(datasets.load, root=root))

    def run(dataset: str, model: str, seed: int) -> Scores:
        graphs = load(dataset)
        assert graphs.y is not None
        return train(model, graphs, datasets.find(dataset, root).split(graphs.y, seed=seed), seed)

    return {
        f"{dataset}/{model}/{seed}": partial(run, dataset, model, seed)
        for dataset in names
        for model in MODELS
        for seed in SEEDS
    }


def times(done: dict[str, Scores]) -> study.Columns:
    """Seconds of training, and over those of SPIN-att."""
    seconds = {words: statistics.mean(one["seconds"] for one in group) for words, group in study.by_words(done).items()}
    return {
        "training, s": {words: f"{value:.1f}" for words, value in seconds.items()},
        f"/ {MODELS[0]}": {words: f"{value / seconds[words[0], MODELS[0]]:.2f}" for words, value in seconds.items()},
    }


def study_of(names: Sequence[str]) -> Study:
    made = Study("", "", ("input", "model"), SETTINGS, partial(runs, names), plotted=False, columns=times)
    return made._replace(title=f"accuracy at equal settings: {made.described_settings}")


def main() -> None:
    parser = study.parser(
        "accuracy", "Train SPINs and a GIN at equal settings, and write a table of their test accuracies."
    )
    parser.add_argument("--datasets", default=",".join(DATASETS), help="comma-separated (default: %(default)s)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")
    names, known = options.datasets.split(","), datasets.names(options.root)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    study.carry_out("accuracy", {"accuracy": study_of(names)}, parser, options)


if __name__ == "__main__":
    main()
