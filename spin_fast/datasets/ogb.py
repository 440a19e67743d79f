"""Molecule sets of the Open Graph Benchmark, from its raw files (``raw/*.csv.gz``, ``split/scaffold/*.csv.gz``)."""

from __future__ import annotations

import csv
import gzip
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._common.indexing import offsets
from ..graphs.batch import GraphBatch
from ..graphs.convert import library
from .common import DatasetError, assemble, read_numbers, reading
from .splits import Split

# The classification sets: what they are called in the address, and what OGB scores them by.
SETS = {
    "ogbg-molhiv": ("hiv", "rocauc"),
    "ogbg-molpcba": ("pcba", "ap"),
    "ogbg-molbace": ("bace", "rocauc"),
    "ogbg-molbbbp": ("bbbp", "rocauc"),
    "ogbg-molclintox": ("clintox", "rocauc"),
    "ogbg-molmuv": ("muv", "ap"),
    "ogbg-molsider": ("sider", "rocauc"),
    "ogbg-moltox21": ("tox21", "rocauc"),
    "ogbg-moltoxcast": ("toxcast", "rocauc"),
    "ogbg-molchembl": ("chembl", "rocauc"),
}
OTHERS = {
    "ogbg-molesol": "a regression set",
    "ogbg-molfreesolv": "a regression set",
    "ogbg-mollipo": "a regression set",
    "ogbg-ppa": "a set of another layout",
    "ogbg-code2": "a set of another layout",
}
_OTHER_TASKS = {"ogbn-": "a set for classifying nodes", "ogbl-": "a set for predicting links"}
FILES = (
    *(f"raw/{part}.csv.gz" for part in ("num-node-list", "num-edge-list", "graph-label", "node-feat", "edge")),
    *(f"split/scaffold/{part}.csv.gz" for part in ("train", "valid", "test")),
)


def owns(name: str) -> bool:
    """Whether ``name`` is a name of OGB's (``ogbg-molhiv``; the folder's ``ogbg_molhiv`` will do)."""
    return name.startswith(("ogbg-", "ogbg_"))


def locate(name: str, root: Path) -> Path | None:
    """The folder ``root/ogbg_molhiv`` or ``root/ogbg-molhiv`` of the set ``ogbg-molhiv``, or None."""
    if not owns(name):
        return None
    places = (root / f"ogbg{mark}{name[5:]}" for mark in "_-")
    return next((place for place in places if place.is_dir()), None)


def names(root: Path) -> list[str]:
    return sorted({f"ogbg-{path.parents[1].name[5:]}" for path in root.glob("ogbg[_-]*/raw/edge.csv.gz")})


def load(path: str | Path, *, dtype: torch.dtype = torch.float32) -> GraphBatch:
    """Read the folder of one ``ogbg-mol*`` set, with both directions of each bond and OGB's integer atom features.

    ``y`` is int64 ``[G]`` for one fully labelled task of whole numbers, otherwise ``[G, T]`` of ``dtype``, NaN where a
    label is missing.
    """
    raw = Path(path) / "raw"
    nodes_of, edges_of = _read(raw, "num-node-list")[:, 0], _read(raw, "num-edge-list")[:, 0]
    labels = _read(raw, "graph-label", np.float64)
    if not (np.isnan(labels) | (labels == np.round(labels))).all():
        raise DatasetError(
            f"{raw / 'graph-label.csv.gz'} holds real numbers: a regression set, and only classes can be learnt"
        )
    atoms, bonds = _read(raw, "node-feat"), _read(raw, "edge", columns=2)
    for file, got, want, of in (
        ("num-edge-list", len(edges_of), len(nodes_of), "one line per line of num-node-list"),
        ("graph-label", len(labels), len(nodes_of), "one line per line of num-node-list"),
        ("node-feat", len(atoms), nodes_of.sum(), "as many lines as num-node-list says"),
        ("edge", len(bonds), edges_of.sum(), "as many lines as num-edge-list says"),
    ):
        if got != want:
            raise DatasetError(f"{raw / file}.csv.gz must have {of}, {want}, got {got}; get the set again")
    size = np.repeat(nodes_of, edges_of)[:, None]
    wrong = (bonds < 0) | (bonds >= size)
    if wrong.any():
        line = int(wrong.any(axis=1).argmax())
        raise DatasetError(
            f"{raw / 'edge.csv.gz'}, line {line + 1} names node {bonds[line][wrong[line]][0]}, "
            f"but its graph has the nodes 0..{size[line, 0] - 1}; get the set again"
        )
    ptr = offsets(torch.tensor(nodes_of))
    edges = (bonds + np.repeat(ptr[:-1].numpy(), edges_of)[:, None]).T
    whole = labels.shape[1] == 1 and bool((labels == np.round(labels)).all())
    y = torch.tensor(labels[:, 0], dtype=torch.int64) if whole else torch.tensor(labels, dtype=dtype)
    return assemble(edges, ptr, torch.tensor(atoms, dtype=dtype), y, undirected=True)


def _read(folder: Path, file: str, dtype: type = np.int32, columns: int | None = None) -> np.ndarray:
    path = folder / f"{file}.csv.gz"
    with reading(str(path)), gzip.open(path) as stream:
        return read_numbers(stream, str(path), dtype, columns=columns, missing=dtype is np.float64)


def smiles(path: str | Path, graph: int) -> str | None:
    """The SMILES of a molecule, from ``mapping/mol.csv.gz``; None without that file."""
    file = Path(path) / "mapping" / "mol.csv.gz"
    if not file.is_file():
        return None
    with reading(str(file)), gzip.open(file, "rt", newline="", encoding="utf-8") as lines:
        return next(islice(csv.DictReader(lines), graph, None), {}).get("smiles")


def scaffold_split(path: str | Path, num_graphs: int) -> Split:
    """OGB's own split, which has each of ``num_graphs`` once."""
    folder = Path(path) / "split" / "scaffold"
    parts = [_read(folder, part, columns=1)[:, 0].astype(np.int64) for part in ("train", "valid", "test")]
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_graphs)):
        raise DatasetError(
            f"{folder} must name each of the {num_graphs} graphs once, got {sum(map(len, parts))} entries; "
            "load the whole set or get it again"
        )
    return Split(*map(torch.from_numpy, parts))


def metric(name: str) -> str:
    """What OGB scores the set ``name`` by: ``"rocauc"`` or ``"ap"``; ``"rocauc"`` for a set of one's own."""
    name = official(name)
    return SETS[name][1] if name in SETS else "rocauc"


def download_name(name: str) -> str:
    """What the zip of the set ``name`` is called."""
    if (name := official(name)) not in SETS:
        raise DatasetError(f"OGB has no classification set {name!r}; it has {', '.join(SETS)}")
    return SETS[name][0]


def official(name: str) -> str:
    """The name with OGB's hyphens; a DatasetError if that set is not for classifying graphs, or of another layout."""
    name = name.replace("_", "-")
    kind = OTHERS.get(name) or next((kind for start, kind in _OTHER_TASKS.items() if name.startswith(start)), None)
    if kind is not None:
        raise DatasetError(f"{name} is {kind}, which is not read; choose one of {', '.join(SETS)}")
    return name


def evaluator(name: str) -> Any:
    """OGB's own ``Evaluator`` of the set ``name``.

    ``evaluator("ogbg-molhiv").eval({"y_true": y[:, None], "y_pred": score[:, None]})`` returns ``{"rocauc": ...}``:
    both are ``[graphs, tasks]`` (torch or numpy), a score is higher for class 1, and NaN labels are passed over.

    Raises:
        ImportError: the package ogb is not installed. DatasetError: OGB has no such set.
    """
    if not owns(name):
        raise DatasetError(f"OGB scores no set {name!r}; use accuracy, or a name such as ogbg-molhiv")
    return library("ogb.graphproppred", f"the score of {name}").Evaluator(name.replace("_", "-"))
