"""TU sets in their official text layout (``NAME_A.txt``, ``NAME_graph_indicator.txt``, ...), zipped or unpacked."""

from __future__ import annotations

import copy
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from .common import (
    DatasetError,
    Folder,
    NodeData,
    Numbers,
    assemble,
    block_lines,
    check_is_regular,
    class_labels,
    reading,
)
from .options import ReadOptions, with_edges
from .reader import OrderedReader, cuts_of

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

    @contextmanager
    def numbers(self, part: str, dtype: DTypeLike, columns: int | None = None) -> Iterator[Numbers]:
        """The lines of a file, ``columns`` or any number of numbers in each."""
        where = self.where(part)
        with reading(where), self.open(part) as stream:
            yield Numbers(stream, where, dtype, columns=columns)


class _Known(NamedTuple):
    """What has to be known of all graphs before any of them is read."""

    node_ptr: np.ndarray  # [G + 1]
    edge_ptr: np.ndarray  # [G + 1], lines of the file of edges
    in_order: bool  # whether these lines are in the order of the graphs
    y: Tensor | None
    classes: list[str] | None
    node_data: NodeData


class TUReader(OrderedReader):
    """Read one TU set, some graphs at a time where the lines of ``NAME_A.txt`` are in the order of the graphs.

    Otherwise all are read. Before graphs are read some at a time, all files are read through: that tells how large the
    graphs are, which node labels occur, and that nothing is wrong. Then the lines before the first graph are skipped,
    which takes as long as to read them.

    A line ``i, j`` of ``NAME_A.txt`` is the entry of row ``i``, column ``j``: ``i`` gathers from ``j``. The official
    files list both directions of an undirected edge; a set that does not is a set of directed graphs. Repeated edges
    are kept once.

    Args:
        first_name: the name of the first graph, which is a number.
    """

    def __init__(self, files: Files, options: ReadOptions, *, first_name: int = 1) -> None:
        files.require("A", "graph_indicator")
        has = [part for part in ("label", "attribute") if files.has(f"node_{part}s")]
        self._node_data = NodeData.chosen(options.features, files.name, files.path, has)
        self.options, self._files, self._first_name = options, files, first_name
        self._tables: dict[str, np.ndarray] | None = None  # of the files that are kept as a whole

    def __len__(self) -> int:
        return len(self._known.node_ptr) - 1

    def _can_cut(self) -> bool:
        return self._known.in_order

    def read(self) -> Folder:
        at_once = copy.copy(self)
        at_once._tables = {}
        (read,) = at_once._cut(0, None, sys.maxsize)
        return read

    def _cut(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        known = self._known
        cuts = cuts_of(begin, len(self) if end is None else end, num_graphs)
        edges = self._lines("A", known.edge_ptr[cuts])
        parts = [self._lines(f"node_{part}s", known.node_ptr[cuts]) for part in known.node_data.parts]
        for (first, last), ends, *tables in zip(pairwise(cuts), edges, *parts, strict=True):
            yield self._graphs(first, last, ends, tables)

    def _graphs(self, first: int, last: int, ends: np.ndarray, tables: Sequence[np.ndarray]) -> Folder:
        """The graphs ``first`` to ``last`` from their edges and node data."""
        node_ptr, y, data = self._known.node_ptr, self._known.y, self._known.node_data
        dtype = self.options.dtype
        graphs = assemble(
            ends.T - int(1 + node_ptr[first]),
            torch.from_numpy(node_ptr[first : last + 1] - node_ptr[first]),
            data.columns(tables, dtype),
            None if y is None else y[first:last],
            dtype=dtype,
        )
        names = [str(self._first_name + graph) for graph in range(first, last)]
        num_attributes = tables[0].shape[1] if "attribute" in data.parts else 0
        read = Folder(graphs, names, self._known.classes, data.features, num_attributes, unused=data.unused)
        return with_edges(read, self.options)

    @cached_property
    def _known(self) -> _Known:
        files = self._files
        num_nodes, values = self._sizes_and_labels()
        node_ptr = np.append(0, num_nodes.cumsum())
        data = self._node_data
        for part in data.parts:
            where, lines, lowest, highest = files.where(f"node_{part}s"), 0, [], []
            for table in self._lines(f"node_{part}s"):
                lines += len(table)
                lowest.append(table.min(axis=0))
                highest.append(table.max(axis=0))
            if lines != node_ptr[-1]:
                raise DatasetError(
                    f"{where} must have one line per node, {node_ptr[-1]} as in {files.name}_graph_indicator.txt, "
                    f"got {lines}; get the set again"
                )
            if part == "label":
                data = data.settled(np.min(lowest, axis=0), np.max(highest, axis=0), where)
        y, classes = None, None
        if values is not None:
            y, classes = class_labels(values, self.options.classes, files.where("graph_labels"))
        num_edges, in_order = self._num_edges(node_ptr)
        edge_ptr = np.append(0, num_edges.cumsum())
        return _Known(node_ptr, edge_ptr, in_order, y, classes, data)

    def _sizes_and_labels(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The number of nodes of each graph, and the classes ``[G]`` as the file has them."""
        files, where = self._files, self._files.where("graph_indicator")
        line, last = 0, 1
        found = []
        for block in self._lines("graph_indicator"):
            graph = block[:, 0]
            if len(falling := np.flatnonzero(graph < np.append(last, graph[:-1]))):
                raise DatasetError(
                    f"{where}, line {line + falling[0] + 1} goes down to graph {graph[falling[0]]}; "
                    "sort the nodes by graph, from 1"
                )
            found.append(np.unique(graph, return_counts=True))
            line, last = line + len(graph), int(graph[-1])
        values = None
        if self.options.label is not None and files.has("graph_labels"):
            with files.numbers("graph_labels", np.float64) as lines:
                values = _graph_labels(lines.read(), files, last)
        elif last > line:
            raise DatasetError(
                f"{where} has {line:,} nodes, but numbers graphs up to {last:,}; number them 1, 2, 3, ..."
            )
        num_nodes = np.zeros(last, np.int64)
        for graphs, counts in found:
            num_nodes[graphs - 1] += counts
        return num_nodes, values

    def _num_edges(self, node_ptr: np.ndarray) -> tuple[np.ndarray, bool]:
        """The number of lines of each graph, each edge inside one graph; and whether they are in order."""
        files, where = self._files, self._files.where("A")
        num_edges = np.zeros(len(node_ptr) - 1, np.int64)
        line, last, in_order = 0, 0, True
        for edges in self._lines("A"):
            if edges.min() < 1 or edges.max() > node_ptr[-1]:
                wrong = (edges < 1) | (edges > node_ptr[-1])
                number = int(wrong.any(axis=1).argmax())
                raise DatasetError(
                    f"{where}, line {line + number + 1} names node {edges[number][wrong[number]][0]}, but "
                    f"{files.name}_graph_indicator.txt has the nodes 1..{node_ptr[-1]}; one of them is wrong, get the "
                    "set again"
                )
            first = int(np.searchsorted(node_ptr, edges.min() - 1, "right")) - 1
            past = int(np.searchsorted(node_ptr, edges.max() - 1, "right"))
            graph = np.repeat(np.arange(first, past), np.diff(node_ptr[first : past + 1]))
            row, column = graph[edges.T - int(1 + node_ptr[first])]
            if (crossing := row != column).any():
                number = int(crossing.argmax())
                i, j = edges[number]
                raise DatasetError(
                    f"{where}, line {line + number + 1} joins node {i} of graph {row[number] + 1} to node {j} of graph "
                    f"{column[number] + 1}; an edge must stay in its graph, correct it or get the set again"
                )
            num_edges[first:past] += np.bincount(row - first, minlength=past - first)
            in_order = in_order and last <= row[0] and not (row[1:] < row[:-1]).any()
            line, last = line + len(edges), row[-1]
        return num_edges, in_order

    def _lines(self, part: str, ptr: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """The lines of a file in blocks, or those from each entry of ``ptr`` to the next."""
        kind, columns = {
            "A": ("int32", 2),
            "graph_indicator": ("int32", 1),
            "node_labels": ("int32", None),
            "node_attributes": (str(self.options.dtype).removeprefix("torch."), None),
        }[part]
        if self._tables is None:
            with self._files.numbers(part, kind, columns) as lines:
                yield from lines.blocks() if ptr is None else lines.between(ptr)
            return
        if part not in self._tables:
            with self._files.numbers(part, kind, columns) as lines:
                self._tables[part] = lines.read()
        table = self._tables[part]
        if ptr is None:
            ptr = np.arange(0, len(table) + (most := block_lines(table)), most)
        for begin, end in pairwise(ptr):
            yield table[begin:end]


def _graph_labels(labels: np.ndarray, files: Files, num_graphs: int) -> np.ndarray:
    """The classes ``[G]`` as the file has them."""
    where = files.where("graph_labels")
    if labels.shape[1] != 1 or (labels != np.round(labels)).any():
        kind = f"{labels.shape[1]} columns" if labels.shape[1] != 1 else "real numbers"
        raise DatasetError(f"{where} holds {kind}, not one class per graph; choose a classification set")
    if (large := np.abs(labels[:, 0]) >= 2**53).any():  # where float64 merges integers
        raise DatasetError(f"{where}, line {int(large.argmax()) + 1} must hold a class below 2**53; number them anew")
    if len(labels) != num_graphs:
        raise DatasetError(
            f"{where} has {len(labels)} lines, but {files.name}_graph_indicator.txt ends with graph {num_graphs}; "
            "one of them is cut short, get the set again"
        )
    return labels[:, 0]
