"""Graphs that are read when they are asked for: some at a time, all or one of several equal ranges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from .._common import check
from .._common.check import ArgumentTypeError, ArgumentValueError
from ..graphs.batch import GraphBatch
from .common import Folder
from .options import ReadOptions

Shard = tuple[int, int]  # (3, 16): the third of 16, counted from 1


def range_of_shard(shard: Shard, num_graphs: int) -> tuple[int, int]:
    """The graphs ``begin`` to ``end`` of ``shard``, so that those of all shards are all graphs, in order."""
    if not isinstance(shard, tuple | list) or len(shard) != 2:
        raise ArgumentTypeError("shard", "be a pair such as (3, 16), the third of 16", shard)
    number, of = (check.integer("shard", value, 1) for value in shard)
    if number > of:
        raise ArgumentValueError("shard", "be one of those there are, counted from 1", shard)
    return num_graphs * (number - 1) // of, num_graphs * number // of


def cuts_of(begin: int, end: int, num_graphs: int) -> list[int]:
    """Where chunks of ``num_graphs`` graphs begin and end: ``2, 7, 2 -> [2, 4, 6, 7]``."""
    return [*range(begin, end, num_graphs), end]


def with_weights(graphs: GraphBatch) -> GraphBatch:
    """The graphs, whose weights are 1 if they have none."""
    if graphs.edge_weight is not None:
        return graphs
    return replace(graphs, edge_weight=graphs.x.new_ones(graphs.num_edges))


class Reader(ABC):
    """The graphs of a data set, which are read when they are asked for; ``len(reader)`` is their number.

    Attributes:
        options: what is read, where it is not the whole.
    """

    options = ReadOptions()

    @property
    def whole(self) -> Folder | None:
        """All graphs, where they can only be read as a whole, which is then done; otherwise None."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self) -> Folder:
        """Read all graphs at once."""

    def chunks(self, num_graphs: int, shard: Shard | None = None) -> Iterator[Folder]:
        """Read ``num_graphs`` graphs at a time; arguments and errors are those of :func:`iter_folder`."""
        check.integer("num_graphs", num_graphs, 1)
        begin, end = (0, None) if shard is None else range_of_shard(shard, len(self))
        if end is None or begin < end:
            return map(self._alike, self._read(begin, end, num_graphs))
        firsts = map(self._alike, self._read(0, 1, 1))
        return (first.between(0, 0) for first in firsts)

    def _alike(self, read: Folder) -> Folder:
        """A chunk that has weights if others may have some, which repeated edges get as their sum."""
        if self.options.edge_options.get("coalesce") != "sum":
            return read
        return read._replace(graphs=with_weights(read.graphs))

    @abstractmethod
    def _read(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        """Read the graphs ``begin`` to ``end``, at least one; None for all from ``begin``."""


class Whole(Reader):
    """Graphs that have been read."""

    def __init__(self, whole: Folder) -> None:
        self._whole = whole

    @property
    def whole(self) -> Folder:
        return self._whole

    def __len__(self) -> int:
        return len(self._whole.graphs)

    def read(self) -> Folder:
        return self._whole

    def _read(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        end = len(self) if end is None else end
        for first in range(begin, end, num_graphs) or (begin,):
            yield self._whole.between(first, min(first + num_graphs, end))


class OrderedReader(Reader):
    """Read some graphs at a time where the files have all graphs in order; otherwise all."""

    @abstractmethod
    def _can_cut(self) -> bool: ...

    @abstractmethod
    def _cut(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        """Do what ``_read`` does, where graphs are in order."""

    @cached_property
    def whole(self) -> Folder | None:
        return None if self._can_cut() else self.read()

    def _read(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        if self.whole is not None:
            return Whole(self.whole)._read(begin, end, num_graphs)
        return self._cut(begin, end, num_graphs)
