"""Shared by the readers: errors, numbers from text, the choice of node features, labels, edges to a ``GraphBatch``."""

from __future__ import annotations

import lzma
import re
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from .._common.check import Argument, NamingError
from ..graphs.batch import GraphBatch

FEATURES = ("label", "attribute", "attribute+label", "degree")
PAPER_FEATURES = {"ENZYMES": "attribute+label", "OHSU": "degree", "Peking_1": "degree"}
WIDEST_ONE_HOT = 65536
BLOCK_NUMBERS = 1 << 17  # that are looked through or skipped at a time
Spans = list[tuple[int, int]]  # of each column of node labels the smallest and the largest that have a column of x

_SPAN = r"(-?\d+)\.\.(-?\d+)"
_WITH_SPANS = re.compile(rf"((?:attribute\+)?label)\[({_SPAN}(?:,{_SPAN})*)\]")


class DatasetError(NamingError, ValueError):
    """A data set cannot be used; the message is one line that names the file and says what to do.

    Attributes:
        argument: the argument of ``load`` that is impossible for the set, such as ``"features"``, if that is what is
            wrong.
    """

    def __init__(self, *parts: str | Argument, argument: str | None = None) -> None:
        super().__init__(*parts)
        self.argument = argument


def impossible(argument: str, value: object, where: str) -> DatasetError:
    return DatasetError(Argument(argument, value), f" is impossible for {where}", argument=argument)


class Folder(NamedTuple):
    """Graphs with the names that their files have for graphs, classes and features.

    Attributes:
        graphs: the graphs; ``y`` int64 ``[G]`` in ``0..C-1``, or of several tasks ``[G, T]`` with NaN for missing, or
            None where the files have no labels.
        names: the name of each graph.
        classes: the name of each class, ``classes[y[g]]`` that of graph ``g``; None without labels, or of tasks.
        features: what the columns of ``x`` are made of, to be passed as ``features`` where other files are to be read
            alike: ``"label[1..37]"`` has a column for each of the labels 1 to 37, whichever occur. Of tables and
            GraphML it is a list, in JSON values: ``{"column": "mass"}`` is a column of numbers, ``{"column": "element",
            "categories": ["C", "N", "O"]}`` one of words, with a column of ``x`` for each. None for a set that leaves
            no choice.
        num_attributes: how many leading columns of ``x`` are measured numbers, which it makes sense to standardise; the
            others are codes (one-hot node labels, OGB's atom features) or counts (degrees).
        tasks: the names of binary tasks; None for classes, or where the files have no names.
        unused: the node data of a TU set that are not among the features: ``"label"``, ``"attribute"``.
        weighted: whether the files have edge weights; None where they have no edges. ``coalesce`` may make weights of
            its own.
        nodes: the name of each node, in the order of ``graphs``, of tables and GraphML; None where nodes have none.
    """

    graphs: GraphBatch
    names: list[str]
    classes: list[str] | None
    features: str | list[dict[str, Any]] | None
    num_attributes: int
    tasks: list[str] | None = None
    unused: Sequence[str] = ()
    weighted: bool | None = False
    nodes: list[str] | None = None

    def between(self, begin: int, end: int) -> Folder:
        """The graphs ``begin`` to ``end - 1``."""
        begin, end, _ = slice(begin, end).indices(len(self.graphs))
        some, own = slice(begin, end), slice(*self.graphs.ptr[[begin, end]].tolist())
        nodes = None if self.nodes is None else self.nodes[own]
        return self._replace(graphs=self.graphs[some], names=self.names[some], nodes=nodes)

    @property
    def widths(self) -> list[int]:
        """Widths of the groups of columns of ``x``, in order: the measured numbers, then each one-hot code."""
        if isinstance(self.features, list):
            codes = [sum(word is not None for word in item.get("categories", ())) for item in self.features]
        else:
            codes = [high - low + 1 for low, high in without_spans(self.features)[1] or []]
        others = self.graphs.num_features - self.num_attributes - sum(codes)
        return [width for width in (self.num_attributes, *codes, others) if width]


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn the errors of a missing, damaged or unparsable file into a ``DatasetError`` that names ``where``."""
    try:
        yield
    except DatasetError:
        raise
    except FileNotFoundError as error:
        raise DatasetError(f"{where} does not exist; the set is incomplete, get it again") from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise DatasetError(f"{where} cannot be read ({one_line(error)}); get the file again") from error
    except RuntimeError as error:  # zipfile: a method that it does not know, a password
        raise DatasetError(f"{where} cannot be unpacked ({one_line(error)}); unpack it by hand") from error
    except (ValueError, OverflowError) as error:
        raise_if_interrupted(error)
        raise DatasetError(f"{where} cannot be parsed ({one_line(error)}); correct it or get it again") from error


def raise_if_interrupted(error: Exception) -> None:
    """Raise the KeyboardInterrupt of which pandas makes this error; other errors of a stream it raises as they are."""
    if "Calling read(nbytes) on source failed" in str(error):
        raise KeyboardInterrupt from error


def check_is_regular(path: Path) -> None:
    """Refuse a pipe, at which reading would wait for ever."""
    if path.exists() and not path.is_file():
        raise DatasetError(f"{path} is no regular file")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Table(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


_Read = TypeVar("_Read", bound=_Table)


class Lines(ABC, Generic[_Read]):
    """The lines of a file, of which some are read at a time.

    Attributes:
        num_read: how many lines have been read.
    """

    num_read = 0

    @abstractmethod
    def read(self, lines: int | None = None) -> _Read:
        """Read so many further lines, fewer at the end, or all."""

    def blocks(self, lines: int = sys.maxsize) -> Iterator[_Read]:
        """Read so many further lines, or all, in blocks that take little memory."""
        most = block_lines(self.read(0))
        while lines > 0 and (table := self.read(min(lines, most))).shape[0]:
            lines -= table.shape[0]
            yield table

    def skip(self, lines: int) -> None:
        """Read so many lines for nothing."""
        for _ in self.blocks(lines):
            pass

    def between(self, ptr: Sequence[int] | np.ndarray) -> Iterator[_Read]:
        """Read, of a file at its beginning, the lines from each entry of ``ptr`` to the next."""
        self.skip(int(ptr[0]))
        for begin, end in pairwise(ptr):
            yield self.read(int(end - begin))


class Numbers(Lines[np.ndarray]):
    """Comma-separated numbers without a header.

    Args:
        where: what error messages call the stream.
        dtype: int32, float32 or float64; a number that does not fit, or is infinite, is an error.
        columns: how many there must be; None for any number.
        missing: whether an empty field is a NaN (float64 only) rather than an error.
    """

    def __init__(
        self,
        stream: IO[bytes] | BufferedIOBase,
        where: str,
        dtype: DTypeLike,
        *,
        columns: int | None = None,
        missing: bool = False,
    ) -> None:
        self._stream, self._where = stream, where
        self._dtype, self._columns, self._missing = np.dtype(dtype), columns, missing
        self._lines: Any = None
        self._none = np.empty((0, columns or 0), self._dtype)

    def read(self, lines: int | None = None) -> np.ndarray:
        """Read so many further lines, fewer at the end, or all: ``[lines, columns]``, by columns, maybe read-only."""
        import pandas

        where, missing = self._where, self._missing
        with reading(where), np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            try:
                if self._lines is None:
                    self._lines = pandas.read_csv(
                        self._stream, header=None, dtype=self._dtype, skipinitialspace=True, iterator=True
                    )
                    self._none = self._lines.read(0).to_numpy()
                table = self._lines.read(lines).to_numpy() if lines != 0 else self._none
                wrong = not _are_numbers(table, missing)
            except StopIteration:
                return self._none
            except (ValueError, OverflowError) as error:
                raise_if_interrupted(error)
                wrong = True
            if wrong:
                self._stream.seek(0)
                told = _first_wrong_line(self._stream, self._dtype, missing)
                raise DatasetError(f"{where}{told}; correct it or get the file again")
        if self._columns not in (None, table.shape[1]):
            raise DatasetError(
                f"{where} must have {self._columns} comma-separated column(s), got {table.shape[1]}; get it again"
            )
        self.num_read += len(table)
        return table


def block_lines(table: _Table) -> int:
    """How many lines as wide as those of a table a block has."""
    return max(BLOCK_NUMBERS // max(table.shape[1], 1), 1)


def _are_numbers(values: np.ndarray, missing: bool) -> bool:
    if values.dtype.kind != "f":
        return True
    return not bool((np.isinf(values) if missing else ~np.isfinite(values)).any())


def _first_wrong_line(stream: IO[bytes] | BufferedIOBase, dtype: DTypeLike, missing: bool) -> str:
    """Name the first line that pandas cannot read, since pandas does not."""
    number = np.dtype(dtype)
    convert = int if number.kind == "i" else float
    width = 0
    for position, line in enumerate(stream, 1):
        fields = line.strip().split(b",") if line.strip() else []
        width = width or len(fields)
        try:
            values = np.array([convert(field) for field in fields if field.strip() or not missing], number)
            fits = len(fields) in (0, width) and _are_numbers(values, missing)
        except (ValueError, OverflowError):
            fits = False
        if not fits:
            text = line.decode("ascii", "replace").strip()[:40]
            return f", line {position} must hold {width} {number} number(s) between commas, got {text!r}"
    return " does not hold numbers between commas" if width else " is empty"


class NodeData(NamedTuple):
    """The node data of a set that become features.

    Attributes:
        parts: of ``"attribute"`` and ``"label"`` those whose columns ``x`` has, in order; none for the degree.
        spans: of labels; None for those that occur, as long as these are not known.
        unused: what else the set has.
    """

    parts: list[str]
    spans: Spans | None
    unused: list[str]

    @classmethod
    def chosen(cls, features: object, name: str, path: Path, has: Sequence[str]) -> NodeData:
        """By one of ``FEATURES``, maybe with spans, or None for the paper's choice.

        That is labels where the set has them, else attributes, else degrees, but for ``PAPER_FEATURES``.
        """
        features, spans = without_spans(features)
        if features is None:
            features = PAPER_FEATURES.get(name) or next(iter(has), "degree")
        possible = [choice for choice in FEATURES if choice == "degree" or {*choice.split("+")} <= {*has}]
        if not isinstance(features, str) or features not in possible:
            raise impossible("features", features, f"{path}; choose one of: {', '.join(possible)}")
        parts = [part for part in features.split("+") if part != "degree"]
        return cls(parts, spans, [part for part in has if part not in parts])

    @property
    def features(self) -> str:
        """The choice as a ``features`` argument, to read other files alike."""
        told = "+".join(self.parts) or "degree"
        return f"{told}[{_shown(self.spans)}]" if self.spans and "label" in self.parts else told

    def settled(self, lowest: np.ndarray, highest: np.ndarray, where: str) -> NodeData:
        """With the spans of all labels, of which these occur."""
        occur = list(zip(lowest.tolist(), highest.tolist(), strict=True))
        spans = occur if self.spans is None else self.spans
        inside = [low <= least <= most <= high for (low, high), (least, most) in zip(spans, occur, strict=False)]
        if len(spans) != len(occur) or not all(inside):
            raise DatasetError(
                f"{where} holds labels {_shown(occur)}, but features only have columns for {_shown(spans)}"
            )
        if sum(high - low + 1 for low, high in spans) > WIDEST_ONE_HOT:
            raise DatasetError(
                f"{where} holds labels {_shown(spans)}, too many for a one-hot code; use ",
                Argument("features", "degree"),
            )
        return self._replace(spans=spans)

    def columns(self, tables: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor | None:
        """The columns ``x [N, d]`` of some nodes, of which ``tables`` has the parts; None for the degree."""
        blocks = [
            _one_hot(table, self.spans or [], dtype) if part == "label" else torch.tensor(table, dtype=dtype)
            for part, table in zip(self.parts, tables, strict=True)
        ]
        return torch.cat(blocks, dim=1) if blocks else None


def without_spans(features: object) -> tuple[object, Spans | None]:
    """``"label[1..37]"`` is ``"label"`` and ``[(1, 37)]``; ``"label"`` is itself and None."""
    match = _WITH_SPANS.fullmatch(features) if isinstance(features, str) else None
    if match is None:
        return features, None
    return match[1], [(int(low), int(high)) for low, high in re.findall(_SPAN, match[2])]


def _shown(spans: Spans) -> str:
    return ",".join(f"{low}..{high}" for low, high in spans)


def _one_hot(labels: np.ndarray, spans: Spans, dtype: torch.dtype) -> Tensor:
    """One-hot code of integer labels ``[N, k]``, each column as wide as its span, side by side: ``[N, widths]``."""
    lowest, highest = np.array(spans, np.int64).T
    widths = highest - lowest + 1
    x = torch.zeros(len(labels), int(widths.sum()), dtype=dtype)
    first = np.cumsum(widths) - widths
    return x.scatter_(1, torch.from_numpy(labels - lowest + first), 1)


def class_labels(values: np.ndarray, classes: Sequence[str] | None, where: str) -> tuple[Tensor, list[str]]:
    """Map labels ``[G]``, whole numbers, to int64 classes; these and their names, if None those that occur, sorted."""
    found, y = np.unique(values, return_inverse=True)
    names = [str(int(value)) for value in found]
    return class_numbers(names, classes or names, where)[torch.from_numpy(y)], list(classes or names)


def class_numbers(labels: Sequence[str], classes: Sequence[str], where: str | Path) -> Tensor:
    """The number of the class of each label, int64."""
    number = {name: position for position, name in enumerate(classes)}
    if unknown := sorted({*labels} - number.keys()):
        known = ", ".join(map(repr, classes))
        raise DatasetError(f"{where} has the class {unknown[0]!r}, which is none of {known}")
    return torch.tensor([number[label] for label in labels], dtype=torch.int64)


def assemble(
    edges: np.ndarray,
    ptr: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    *,
    undirected: bool = False,
    dtype: torch.dtype = torch.float32,
) -> GraphBatch:
    """Build a ``GraphBatch`` from directed edges in any order; repeated edges are merged.

    Args:
        edges: ``[2, E]`` integer, the node that gathers and the one that it gathers from, numbered from 0 over all
            graphs.
        ptr: ``[G + 1]`` int64, node offsets of the graphs.
        x: ``[N, d]`` node features, or None for the degree: ``[N, 1]`` of ``dtype``, the edges per row after merging,
            a self-loop counting 1.
        y: labels, first axis ``G``, or None.
        undirected: add the reverse of each edge.
        dtype: of the degree.
    """
    from scipy.sparse import coo_array

    num_nodes = int(ptr[-1])
    shape = (num_nodes, num_nodes)
    if undirected:
        edges = np.concatenate([edges, edges[::-1]], axis=1)
    narrow = np.int32 if max(num_nodes, edges.shape[1]) < 2**31 else np.int64
    rows, columns = edges.astype(narrow, copy=False)
    # The values of the pattern are never read: they may wrap where an edge is repeated more than 127 times.
    pattern = coo_array((np.ones(len(rows), np.int8), (rows, columns)), shape=shape).tocsr()
    indptr, indices = torch.from_numpy(pattern.indptr), torch.from_numpy(pattern.indices)
    if x is None:
        x = indptr.diff().to(dtype).unsqueeze(1)
    return GraphBatch(ptr, indptr, indices, x, y)
