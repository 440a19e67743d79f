"""Graphs that are read when they are asked for: some at a time, all or one of several equal ranges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from .._common import check
from .._common.check import ArgumentTypeError, ArgumentValueError
from .common import Folder

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


class Reader(ABC):
    """The graphs of a data set, which are read when they are asked for; ``len(reader)`` is their number."""

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
        if shard is None:
            return self._read(0, None, num_graphs)
        begin, end = range_of_shard(shard, len(self))
        if begin < end:
            return self._read(begin, end, num_graphs)
        return (first._replace(graphs=first.graphs[:0], names=[]) for first in self._read(0, 1, 1))

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
        graphs, names = self._whole.graphs, self._whole.names
        end = len(self) if end is None else end
        for first in range(begin, end, num_graphs) or (begin,):
            some = slice(first, min(first + num_graphs, end))
            yield self._whole._replace(graphs=graphs[some], names=names[some])
