"""Evaluate a rival as ``spin-fast evaluate`` does SPIN: the same folds, selection by validation, and final models.

    python -m spin_fast.benchmarks.rivals.evaluate GIN PROTEINS --root DIR --settings 16 --out DIR

Writes ``evaluation.json``, which :class:`spin_fast.selection.Evaluation` reads, after each fold.

The grids are those of Errica et al. (2020; ``config_*.yml`` of https://github.com/diningphil/gnn-comparison), reduced:
at most 200 epochs with a patience of 50 (DeepSets 500 and 100; DiffPool and ECC 100 and 25) for 1,000 to 5,000 with
500; no learning rate below 1e-4, with which so few epochs learn little, but a higher one; DiffPool with batches of 32
for 8; ECC with Adam for SGD, and with its smaller width. They have no GCN, whose grid is made like the GIN's. Those of
the forests and of the SVM are ours; the histograms of LTP are those of its paper's code, whose default is among them.

"GIN, searched" has the training settings, widths and degrees of :func:`spin_fast.selection.spaces.family`, and is
searched by successive halving as that is.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sklearn.model_selection import ParameterGrid, ParameterSampler

from spin_fast import GraphBatch, datasets
from spin_fast.cli._metric import metric_of
from spin_fast.selection import Evaluation, Settings, Trial, evaluate, spaces

from . import columns, networks

SEARCHED = "GIN, searched"
BUDGETS = (11, 33, None)  # of 100 epochs, as of the product
LIBRARIES = ("torch", "torch-geometric", "scikit-learn")


def gin_space() -> dict[str, Sequence[Any]]:
    """What SPIN's space and a GIN have in common, and the GIN's own architecture."""
    own: dict[str, Sequence[Any]] = {"num_layers": [1, 2, 3, 4, 5], "train_eps": [False, True]}
    own |= {"readout": ["sum", "mean"], "dropout": [0.0, 0.2], "schedule": ["cosine"]}
    known = {field.name for field in fields(networks.GIN)} - own.keys()
    return {name: values for name, values in spaces.family().items() if name in known} | own


def _grid(made: type, **values: Sequence[Any]) -> tuple[type, Mapping[str, Sequence[Any]]]:
    return made, values


SMALL, SHORT = {"hidden_features": [32, 64]}, {"epochs": [100], "patience": [25]}
GRIDS = {
    "DeepSets": _grid(
        networks.DeepSets,
        hidden_features=[32, 128, 256],
        batch_size=[32, 128],
        learning_rate=[1e-3, 1e-2, 1e-1],
        weight_decay=[1e-4, 1e-3, 1e-2],
        epochs=[500],
        patience=[100],
    ),
    "GIN": _grid(
        networks.GIN,
        **SMALL,
        num_layers=[1, 2, 4],
        train_eps=[False, True],
        readout=["sum", "mean"],
        dropout=[0.0, 0.5],
        batch_size=[32, 128],
        learning_rate=[1e-2],
        schedule=["step"],
    ),
    SEARCHED: _grid(networks.GIN, **gin_space()),
    "GCN": _grid(
        networks.GCN,
        **SMALL,
        num_layers=[1, 2, 4],
        readout=["sum", "mean"],
        dropout=[0.0, 0.5],
        learning_rate=[1e-3, 1e-2],
        schedule=["step"],
    ),
    "GraphSAGE": _grid(
        networks.GraphSAGE,
        **SMALL,
        num_layers=[3, 5],
        aggregation=["sum", "max", "mean"],
        learning_rate=[1e-4, 1e-3, 1e-2],
    ),
    "DGCNN": _grid(
        networks.DGCNN,
        **SMALL,
        num_layers=[2, 3, 4],
        quantile=[0.6, 0.9],
        learning_rate=[1e-4, 1e-3],
        batch_size=[50],
    ),
    "DiffPool": _grid(networks.DiffPool, batch_size=[32], learning_rate=[1e-4, 1e-3], **SHORT),
    "ECC": _grid(
        networks.ECC,
        hidden_features=[32],
        num_layers=[2, 3],
        dropout=[0.05, 0.25],
        learning_rate=[1e-3, 1e-2],
        **SHORT,
    ),
    "WL": _grid(columns.WeisfeilerLehman, num_hops=[1, 2, 3, 4, 5], C=[10.0**power for power in range(-3, 4)]),
    "LTP": _grid(columns.LTP, num_bins=[30, 50, 70, 100], log_degree=[False, True]),
    "forest": _grid(columns.Forest, min_samples_leaf=[1, 2, 4, 8]),
    "fingerprints": _grid(columns.Forest, min_samples_leaf=[1, 2, 4, 8], num_trees=[100]),
}


def grid(kind: str, number: int | None = None, *, seed: int = 0, one_hot: bool = False) -> list[Settings]:
    """The settings of a rival: all, or ``number`` drawn of them; networks may encode categories as SPIN does."""
    made, values = GRIDS[kind]
    values = {**values, "one_hot": [one_hot]} if issubclass(made, networks.Network) else values
    every = ParameterGrid(values)
    chosen = every if number is None or number >= len(every) else ParameterSampler(values, number, random_state=seed)
    return [made(**settings) for settings in chosen]


def molecules(source: datasets.Source, graphs: GraphBatch) -> GraphBatch:
    """Fingerprints in the place of the graphs of a set of OGB.

    Raises:
        DatasetError: the set has no SMILES, or RDKit is not installed.
    """
    import pandas

    path = None if source.path is None else source.path / "mapping" / "mol.csv.gz"
    if path is None or not path.is_file() or graphs.y is None:
        raise datasets.DatasetError(f"{source.name} has no SMILES (mapping/mol.csv.gz) to make fingerprints of")
    if find_spec("rdkit") is None:
        raise datasets.DatasetError("fingerprints need RDKit, which is not installed")
    return columns.fingerprints(pandas.read_csv(path)["smiles"].tolist(), graphs.y)


def splits_of(source: datasets.Source, y: torch.Tensor) -> list[datasets.Split]:
    """The official split, or the published folds, or ten of our own."""
    if source.has_official_split:
        return [source.split(y)]
    try:
        return source.published_splits(len(y))
    except datasets.NoPublishedSplits:
        return datasets.stratified_folds(y, 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m spin_fast.benchmarks.rivals.evaluate",
        description="Evaluate a rival by folds, as spin-fast evaluate does SPIN.",
    )
    parser.add_argument("kind", choices=GRIDS)
    parser.add_argument("dataset")
    parser.add_argument("--root", help="folder of the data sets (default: $SPIN_FAST_DATA, else data)")
    parser.add_argument("--settings", type=int, metavar="N", help="at most so many, drawn from the grid (default: all)")
    parser.add_argument("--folds", type=int, metavar="K", help="only the first so many (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="final models of each fold (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="default: the current folder")
    parser.add_argument("--resume", action="store_true", help="go on after the folds that are done")
    options = parser.parse_args()
    file = options.out / "evaluation.json"
    if file.exists() and not options.resume:
        parser.error(f"{file} exists; add --resume to go on, or choose another folder")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")
    try:
        source = datasets.find(options.dataset, options.root)
        graphs = source.read().graphs
        if graphs.y is None:
            parser.error(f"{source.title} has no labels")
        parts = splits_of(source, graphs.y)
        metric_name, metric = metric_of(source, None, None)
        graphs = molecules(source, graphs) if options.kind == "fingerprints" else graphs
    except datasets.DatasetError as error:
        parser.error(str(error))

    def on_trial(fold: int, trial: Trial) -> None:
        score = "diverged" if trial.trained is None else f"validation {trial.trained.validation:.4f}"
        print(f"fold {fold}: {score}, {trial.seconds:.1f} s, {trial.settings}", flush=True)

    found = evaluate(
        graphs,
        parts[: options.folds],
        grid(options.kind, options.settings, one_hot=source.has_official_split),
        metric=metric,
        num_runs=options.runs,
        budgets=BUDGETS if options.kind == SEARCHED else (None,),
        n_jobs=options.jobs,
        about={
            "dataset": source.title,
            "space": options.kind,
            "metric": metric_name,
            "libraries": {name: version(name) for name in LIBRARIES},
        },
        resume_from=Evaluation.load(file) if file.exists() else None,
        on_fold=lambda evaluation: evaluation.save(file),
        on_trial=on_trial,
    )
    mean, deviation = found.mean_and_std()
    print(f"{options.kind} on {source.title}: {metric_name} {100 * mean:.1f} ± {100 * deviation:.1f}; {file}")


if __name__ == "__main__":
    main()
