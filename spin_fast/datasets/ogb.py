"""Molecule sets of the Open Graph Benchmark, from its raw files (``raw/*.csv.gz``, ``split/scaffold/*.csv.gz``)."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..graphs.convert import library
from .common import DatasetError, Folder, Numbers, assemble, reading
from .reader import Reader, cuts_of
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


class OgbReader(Reader):
    """Read the folder of one ``ogbg-mol*`` set, with both directions of each bond and OGB's integer atom features.

    ``y`` is int64 ``[G]`` for one fully labelled task of whole numbers, otherwise ``[G, T]`` of ``dtype``, NaN where a
    label is missing.

    What there is of each graph is read at once, atoms and bonds only of some graphs. Those before the first graph of a
    shard are skipped, which takes as long as to read them; those after the last graph are not looked at.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self._raw, self._dtype = Path(path) / "raw", dtype
        num_nodes, num_edges = (_read(self._raw, f"num-{of}-list", columns=1)[:, 0] for of in ("node", "edge"))
        labels = _read(self._raw, "graph-label", np.float64)
        if not (np.isnan(labels) | (labels == np.round(labels))).all():
            raise DatasetError(
                f"{self._raw / 'graph-label.csv.gz'} holds real numbers: a regression set, and only classes can be "
                "learnt"
            )
        for file, got in (("num-edge-list", len(num_edges)), ("graph-label", len(labels))):
            self._check(file, got, len(num_nodes), "one line per line of num-node-list")
        for file, sizes in (("num-node-list", num_nodes), ("num-edge-list", num_edges)):
            if (wrong := sizes < 0).any():
                line = int(wrong.argmax())
                raise DatasetError(f"{self._raw / file}.csv.gz, line {line + 1} must be at least 0, got {sizes[line]}")
        self._node_ptr, self._edge_ptr = (np.append(0, sizes.cumsum()) for sizes in (num_nodes, num_edges))
        whole = labels.shape[1] == 1 and bool((labels == np.round(labels)).all())
        self._y = torch.tensor(labels[:, 0], dtype=torch.int64) if whole else torch.tensor(labels, dtype=dtype)
        self._classes = list(map(str, range(int(self._y.max()) + 1))) if whole else None

    def __len__(self) -> int:
        return len(self._y)

    def read(self) -> Folder:
        (read,) = self._read(0, None, len(self))
        return read

    def _read(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        cuts = cuts_of(begin, len(self) if end is None else end, num_graphs)
        atoms = self._lines("node-feat", None, self._node_ptr, cuts, "num-node-list")
        bonds = self._lines("edge", 2, self._edge_ptr, cuts, "num-edge-list")
        for first, last in pairwise(cuts):
            yield self._graphs(first, last, next(atoms), next(bonds))

    def _graphs(self, first: int, last: int, atoms: np.ndarray, bonds: np.ndarray) -> Folder:
        """The graphs ``first`` to ``last`` from their atoms and bonds."""
        ptr = self._node_ptr[first : last + 1] - self._node_ptr[first]
        num_edges = np.diff(self._edge_ptr[first : last + 1])
        size = np.repeat(np.diff(ptr), num_edges)[:, None]
        wrong = (bonds < 0) | (bonds >= size)
        if wrong.any():
            line = int(wrong.any(axis=1).argmax())
            raise DatasetError(
                f"{self._raw / 'edge.csv.gz'}, line {self._edge_ptr[first] + line + 1} names node "
                f"{bonds[line][wrong[line]][0]}, but its graph has the nodes 0..{size[line, 0] - 1}; get the set again"
            )
        edges = (bonds + np.repeat(ptr[:-1], num_edges)[:, None]).T
        x = torch.tensor(atoms, dtype=self._dtype)
        graphs = assemble(edges, torch.from_numpy(ptr), x, self._y[first:last], undirected=True)
        return Folder(graphs, list(map(str, range(first, last))), self._classes, None, 0)

    def _lines(
        self, file: str, columns: int | None, ptr: np.ndarray, cuts: list[int], sizes: str
    ) -> Iterator[np.ndarray]:
        """The lines of each chunk; the whole file must have as many as its ``sizes`` add up to."""
        with _opened(self._raw, file, columns=columns) as lines:
            for last, table in zip(cuts[1:], lines.between(ptr[cuts]), strict=True):
                if last == len(self) or lines.num_read < ptr[last]:
                    for _ in lines.blocks():
                        pass
                    self._check(file, lines.num_read, ptr[-1], f"as many lines as {sizes} says")
                yield table

    def _check(self, file: str, got: int, want: int, of: str) -> None:
        if got != want:
            raise DatasetError(f"{self._raw / file}.csv.gz must have {of}, {want}, got {got}; get the set again")


@contextmanager
def _opened(
    folder: Path, file: str, dtype: type = np.int32, *, columns: int | None = None, missing: bool = False
) -> Iterator[Numbers]:
    path = folder / f"{file}.csv.gz"
    with reading(str(path)), gzip.open(path) as stream:
        yield Numbers(stream, str(path), dtype, columns=columns, missing=missing)


def _read(folder: Path, file: str, dtype: type = np.int32, *, columns: int | None = None) -> np.ndarray:
    with _opened(folder, file, dtype, columns=columns, missing=dtype is np.float64) as lines:
        return lines.read()


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
