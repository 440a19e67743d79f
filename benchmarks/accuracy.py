"""Accuracy at equal settings: SPIN-att, SPIN-sum and GIN, trained alike. Apart from the races, since it takes minutes.

    python -m spin_fast.benchmarks.accuracy --root DIR --results DIR

All three have the settings below, chosen once and tuned for none of them; no BatchNorm, no dropout, no weight decay.
Each seed has its own stratified split 80/10/10, the same for all three. The epoch is selected by validation accuracy,
of equal ones by the lower validation loss; the test graphs are seen once. The time is that of the training passes,
with one thread, and of SPIN's precomputation; the GIN's batches are collated by PyG's DataLoader, since training in
random order needs new ones in every epoch.

Every run is written as it ends, to DIR/accuracy.json; started again, the program goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch_geometric.loader import DataLoader

from spin_fast import SPIN, GraphBatch, PowerFeatures, datasets, training

from . import epochs, report, rivals
from .epochs import DEPTH, LEARNING_RATE, WIDTH, Epoch

DATASETS = ("PROTEINS", "NCI1", "IMDB-BINARY")
MODELS = ("SPIN-att", "SPIN-sum", "GIN")
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

Run = dict[str, Any]


class Learner(NamedTuple):
    """A model, what trains it for an epoch, and its class scores of some graphs."""

    model: nn.Module
    epoch: Epoch
    predict: Callable[[Tensor], Tensor]


def spin(graphs: GraphBatch, train: Tensor, shape: tuple[int, int, int, int], attention: bool) -> Learner:
    """SPIN, the precomputation included."""
    model, features = SPIN(*shape, attention=attention), PowerFeatures.from_graphs(graphs, DEPTH)
    return Learner(model, epochs.ours(model, features, BATCH_SIZE, train), partial(training.predict, model, features))


def gin(graphs: GraphBatch, train: Tensor, shape: tuple[int, int, int, int]) -> Learner:
    """PyG's GIN with CSR products, which are the faster form of these data sets."""
    model, data = rivals.gin(*shape), rivals.data_list(graphs, "GIN")
    loader = DataLoader([data[i] for i in train.tolist()], BATCH_SIZE, shuffle=True)

    def predict(ids: Tensor) -> Tensor:
        return rivals.predict(model, rivals.collated([data[i] for i in ids.tolist()], len(ids), "CSR"))

    return Learner(model, epochs.of(model, partial(rivals.loaded, loader, "CSR")), predict)


def run(name: str, graphs: GraphBatch, split: datasets.Split, seed: int, advance: Callable[[], None]) -> Run:
    """Train, select, test."""
    assert graphs.y is not None
    shape = graphs.num_features, WIDTH, int(graphs.y.max()) + 1, DEPTH
    torch.manual_seed(seed)
    start = time.process_time()
    if name == "GIN":
        learner = gin(graphs, split.train, shape)
        seconds = 0.0  # its graphs lie ready in PyG's own form
    else:
        learner = spin(graphs, split.train, shape, attention=name == "SPIN-att")
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
        advance()
    learner.model.load_state_dict(state)
    test = training.accuracy(learner.predict(split.test), graphs.y[split.test])
    return {"test": test, "validation": best[0], "best_epoch": best_epoch, "seconds": seconds}


def table(runs: dict[str, Run]) -> report.Table:
    """Mean and standard deviation over the seeds that are there."""
    blocks: list[Sequence[tuple[str, ...]]] = []
    for dataset in dict.fromkeys(key.split("/")[0] for key in runs):
        block: list[tuple[str, ...]] = []
        times: list[float] = []
        for model in MODELS:
            of_model = [result for key, result in runs.items() if key.startswith(f"{dataset}/{model}/")]
            if not of_model:
                continue
            tests, validations = ([100 * result[part] for result in of_model] for part in ("test", "validation"))
            times.append(statistics.mean(result["seconds"] for result in of_model))
            block.append(
                (
                    "" if block else dataset,
                    model,
                    f"{statistics.mean(tests):.1f} ± {statistics.stdev(tests) if len(tests) > 1 else 0:.1f}",
                    f"{statistics.mean(validations):.1f}",
                    f"{times[-1]:.1f}",
                    f"{times[-1] / times[0]:.2f}",
                    str(len(of_model)),
                )
            )
        blocks.append(block)
    headers = ("input", "model", "test accuracy, %", "validation, %", "training, s", "/ SPIN-att", "seeds")
    settings = ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
    return report.Table(f"accuracy at equal settings: {settings}", headers, blocks, left=2)


def main() -> None:
    """Run what is missing, and write ``accuracy.json`` and ``accuracy.md``."""
    parser = argparse.ArgumentParser(
        prog="python -m spin_fast.benchmarks.accuracy",
        description="Train SPIN-att, SPIN-sum and GIN at equal settings, and write a table of their test accuracies.",
        epilog="Started again with the same --results, it goes on where it was stopped.",
    )
    parser.add_argument("--root", help="folder of the data sets (default: $SPIN_FAST_DATA, else data)")
    parser.add_argument("--datasets", default=",".join(DATASETS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("."), metavar="DIR", help="default: the current folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")
    arguments.results.mkdir(parents=True, exist_ok=True)
    file = arguments.results / "accuracy.json"
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"settings": SETTINGS, "runs": {}}
    if kept["settings"] != SETTINGS:
        parser.error(f"{file} was made with other settings; move it away")
    runs: dict[str, Run] = kept["runs"]
    names = arguments.datasets.split(",")
    known = datasets.names(arguments.root)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    with Progress() as progress:
        task = progress.add_task("", total=len(names) * len(MODELS) * len(SEEDS) * EPOCHS)
        for dataset in names:
            graphs = datasets.load(dataset, arguments.root)
            assert graphs.y is not None
            for model in MODELS:
                for seed in SEEDS:
                    key = f"{dataset}/{model}/{seed}"
                    progress.update(task, description=key)
                    if key in runs:
                        progress.advance(task, EPOCHS)
                        continue
                    split = datasets.split(dataset, graphs.y, arguments.root, seed=seed)
                    runs[key] = run(model, graphs, split, seed, partial(progress.advance, task))
                    part = file.with_suffix(".part")
                    part.write_text(json.dumps({"settings": SETTINGS, "machine": report.machine(), "runs": runs}))
                    part.replace(file)
    session = report.Session(counted=[table(runs)])
    print(report.terminal(session))
    (arguments.results / "accuracy.md").write_text(report.markdown(session, report.machine()))
    print(f"written: {file}, {file.with_suffix('.md')}")


if __name__ == "__main__":
    main()
