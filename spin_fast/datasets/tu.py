"""TU sets in their official text layout (``NAME_A.txt``, ``NAME_graph_indicator.txt``, ...), zipped or unpacked."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
import torch
from numpy.typing import DTypeLike

from .._common.indexing import offsets
from .common import DatasetError, Folder, assemble, check_is_regular, class_labels, node_features, read_numbers, reading

PARTS = ("A", "graph_indicator", "graph_labels", "node_labels", "node_attributes")


def locate(name: str, root: Path) -> Path | None:
    """The zip or the folder that holds the set ``name`` (or should: its folder may turn out to be empty), or None."""
    folder, marker = root / name, f"{name}_A.txt"
    for archive in (root / f"{name}.zip", folder / f"{name}.zip"):
        if archive.is_file():
            return archive
    for place in (folder, folder / "raw", root):
        if (place / marker).is_file():
            return place
    return folder if folder.is_dir() else None


def names(root: Path) -> list[str]:
    """The TU sets under ``root``, wherever ``locate`` finds them."""
    found = {path.name.removesuffix("_A.txt") for path in root.glob("*_A.txt")}
    for path in [*root.glob("*.zip"), *root.glob("*/*.zip"), *root.glob("*/*_A.txt"), *root.glob("*/raw/*_A.txt")]:
        name = path.name.removesuffix("_A.txt").removesuffix(".zip")
        place = locate(name, root)
        with suppress(DatasetError):
            if place is not None and Files(place, name).has("A"):
                found.add(name)
    return sorted(found)


class Files:
    """The text files of one set, in a folder or anywhere in a zip, by the part of their name after ``NAME_``."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        with reading(str(path)):
            if path.is_dir():
                self.members = {file.name: str(file) for file in path.iterdir()}
            else:
                with zipfile.ZipFile(path) as archive:
                    members = archive.namelist()
                self.members = {PurePosixPath(member).name: member for member in members}
                for part in PARTS:
                    same = [member for member in members if PurePosixPath(member).name == f"{name}_{part}.txt"]
                    if len(same) > 1:
                        raise DatasetError(f"{path} holds {' and '.join(same)}; keep one of them")

    def where(self, part: str) -> str:
        return f"{self.path}{'/' if self.path.is_dir() else ':'}{self.name}_{part}.txt"

    def has(self, part: str) -> bool:
        return f"{self.name}_{part}.txt" in self.members

    def require(self, *parts: str) -> None:
        for part in parts:
            if not self.has(part):
                raise DatasetError(
                    f"{self.path} holds no {self.name}_{part}.txt (it holds {self.some()}); "
                    "get the set in TU text layout"
                )

    def some(self) -> str:
        """A few of the files, for messages."""
        return ", ".join(sorted(self.members)[:5]) or "nothing"

    @contextmanager
    def open(self, part: str) -> Iterator[IO[bytes]]:
        member = self.members[f"{self.name}_{part}.txt"]
        if self.path.is_dir():
            check_is_regular(Path(member))
            with Path(member).open("rb") as file:
                yield file
        else:
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as stream:
                yield stream

    def read(self, part: str, dtype: DTypeLike, columns: int | None = None, lines: int | None = None) -> np.ndarray:
        """Read a file as ``[lines, columns]`` of ``dtype``; None accepts any number of them."""
        where = self.where(part)
        with reading(where), self.open(part) as stream:
            table = read_numbers(stream, where, dtype, columns=columns)
        if lines is not None and len(table) != lines:
            raise DatasetError(
                f"{where} must have one line per node, {lines} as in {self.name}_graph_indicator.txt, "
                f"got {len(table)}; get the set again"
            )
        return table


def read(
    files: Files, *, features: object = None, dtype: torch.dtype = torch.float32, with_labels: bool = True
) -> Folder:
    """Read one TU set; ``NAME_graph_labels.txt`` may be missing.

    A line ``i, j`` of ``NAME_A.txt`` is the entry of row ``i``, column ``j``: ``i`` gathers from ``j``. The official
    files list both directions of an undirected edge; a set that does not is a set of directed graphs. Repeated edges
    are kept once.
    """
    files.require("A", "graph_indicator")
    graph = files.read("graph_indicator", np.int32, columns=1)[:, 0]
    if len(falling := np.flatnonzero(np.diff(graph, prepend=1) < 0)):
        line = falling[0] + 1
        raise DatasetError(
            f"{files.where('graph_indicator')}, line {line} goes down to graph {graph[line - 1]}; "
            "sort the nodes by graph, from 1"
        )
    values = _graph_labels(files, graph) if with_labels and files.has("graph_labels") else None
    if values is None and graph[-1] > len(graph):
        raise DatasetError(
            f"{files.where('graph_indicator')} has {len(graph):,} nodes, but numbers graphs up to {graph[-1]:,}; "
            "number them 1, 2, 3, ..."
        )
    num_graphs = int(graph[-1]) if values is None else len(values)
    readers = {
        part: (files.where(f"node_{part}s"), partial(files.read, f"node_{part}s", kind, lines=len(graph)))
        for part, kind in (("label", "int32"), ("attribute", str(dtype).removeprefix("torch.")))
        if files.has(f"node_{part}s")
    }
    x, width, features, unused = node_features(features, files.name, files.path, dtype, readers)
    ptr = offsets(torch.from_numpy(np.bincount(graph - 1, minlength=num_graphs)))
    y, classes = (None, None) if values is None else class_labels(values)
    graphs = assemble(_edges(files, graph), ptr, x, y, dtype=dtype)
    names = [str(g + 1) for g in range(num_graphs)]
    return Folder(graphs, names, classes, features, width, unused=unused)


def _graph_labels(files: Files, graph: np.ndarray) -> np.ndarray:
    """The classes ``[G]`` as the file has them."""
    where = files.where("graph_labels")
    labels = files.read("graph_labels", np.float64)
    if labels.shape[1] != 1 or (labels != np.round(labels)).any():
        kind = f"{labels.shape[1]} columns" if labels.shape[1] != 1 else "real numbers"
        raise DatasetError(f"{where} holds {kind}, not one class per graph; choose a classification set")
    if (large := np.abs(labels[:, 0]) >= 2**53).any():  # where float64 merges integers
        raise DatasetError(f"{where}, line {int(large.argmax()) + 1} must hold a class below 2**53; number them anew")
    if len(labels) != graph[-1]:
        raise DatasetError(
            f"{where} has {len(labels)} lines, but {files.name}_graph_indicator.txt ends with graph {graph[-1]}; "
            "one of them is cut short, get the set again"
        )
    return labels[:, 0]


def _edges(files: Files, graph: np.ndarray) -> np.ndarray:
    """Rows and columns of the directed edges, ``[2, E]``, numbered from 0, each inside one graph."""
    edges, where = files.read("A", np.int32, columns=2), files.where("A")
    if edges.min() < 1 or edges.max() > len(graph):
        wrong = (edges < 1) | (edges > len(graph))
        line = int(wrong.any(axis=1).argmax())
        node = edges[line][wrong[line]][0]
        raise DatasetError(
            f"{where}, line {line + 1} names node {node}, but {files.name}_graph_indicator.txt has the nodes "
            f"1..{len(graph)}; one of them is wrong, get the set again"
        )
    ends = edges.T - 1
    crossing = graph[ends[0]] != graph[ends[1]]
    if crossing.any():
        line = int(crossing.argmax())
        (i, j), (g, h) = edges[line], graph[edges[line] - 1]
        raise DatasetError(
            f"{where}, line {line + 1} joins node {i} of graph {g} to node {j} of graph {h}; an edge must stay in its "
            "graph, correct it or get the set again"
        )
    return ends
