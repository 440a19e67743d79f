"""Shared by the readers: errors, numbers from text, the choice of node features, labels, edges to a ``GraphBatch``."""

from __future__ import annotations

import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from .._common.check import Argument, NamingError
from ..graphs.batch import GraphBatch

FEATURES = ("label", "attribute", "attribute+label", "degree")
PAPER_FEATURES = {"ENZYMES": "attribute+label", "OHSU": "degree", "Peking_1": "degree"}
WIDEST_ONE_HOT = 65536
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
    """

    graphs: GraphBatch
    names: list[str]
    classes: list[str] | None
    features: str | list[dict[str, Any]] | None
    num_attributes: int
    tasks: list[str] | None = None
    unused: Sequence[str] = ()
    weighted: bool | None = False

    @property
    def widths(self) -> list[int]:
        """Widths of the groups of columns of ``x``, in order: the measured numbers, then each one-hot code."""
        if isinstance(self.features, list):
            codes = [len(item["categories"]) for item in self.features if "categories" in item]
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
        raise DatasetError(f"{where} cannot be parsed ({one_line(error)}); correct it or get it again") from error


def check_is_regular(path: Path) -> None:
    """Refuse a pipe, at which reading would wait for ever."""
    if path.exists() and not path.is_file():
        raise DatasetError(f"{path} is no regular file")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_numbers(
    stream: IO[bytes] | BufferedIOBase,
    where: str,
    dtype: DTypeLike,
    *,
    columns: int | None = None,
    missing: bool = False,
) -> np.ndarray:
    """Read comma-separated numbers without a header: ``[lines, columns]``, contiguous by columns, maybe read-only.

    Args:
        where: what error messages call it.
        dtype: int32, float32 or float64; a number that does not fit, or is infinite, is an error.
        columns: how many there must be; None for any number.
        missing: whether an empty field is a NaN (float64 only) rather than an error.
    """
    import pandas

    with reading(where), np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        try:
            table = pandas.read_csv(stream, header=None, dtype=dtype, skipinitialspace=True).to_numpy()
            wrong = not _are_numbers(table, missing)
        except (ValueError, OverflowError):
            wrong = True
        if wrong:
            stream.seek(0)
            raise DatasetError(f"{where}{_first_wrong_line(stream, dtype, missing)}; correct it or get the file again")
    if columns is not None and table.shape[1] != columns:
        raise DatasetError(f"{where} must have {columns} comma-separated column(s), got {table.shape[1]}; get it again")
    return table


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


def node_features(
    features: object,
    name: str,
    path: Path,
    dtype: torch.dtype,
    readers: Mapping[str, tuple[str, Callable[[], np.ndarray]]],
) -> tuple[Tensor | None, int, str, list[str]]:
    """The node features of a set by name; what is not chosen is not read.

    Args:
        features: one of ``FEATURES``, maybe with spans, or None for the paper's choice: its exceptions are
            ``PAPER_FEATURES``; otherwise labels where the set has them, else attributes, else degrees.
        readers: of ``"label"`` and ``"attribute"``, in this order, those that the set has: where it is, and what reads
            it as ``[N, k]``.

    Returns:
        ``x [N, d]``, attributes first, or None for the degree; how many of its columns are attributes; the choice as a
        ``features`` argument, to read other files alike; and the parts of the set that are not used.
    """
    features, spans = without_spans(features)
    if features is None:
        features = PAPER_FEATURES.get(name) or next(iter(readers), "degree")
    possible = [choice for choice in FEATURES if choice == "degree" or {*choice.split("+")} <= readers.keys()]
    if not isinstance(features, str) or features not in possible:
        raise impossible("features", features, f"{path}; choose one of: {', '.join(possible)}")
    unused = [part for part in readers if part not in features]
    blocks: list[Tensor] = []
    width = 0
    if "attribute" in features:
        blocks.append(torch.tensor(readers["attribute"][1](), dtype=dtype))
        width = blocks[0].shape[1]
    if "label" in features:
        where, read = readers["label"]
        code, spans = _one_hot(read(), where, dtype, spans)
        blocks.append(code)
        features += f"[{_shown(spans)}]"
    return torch.cat(blocks, dim=1) if blocks else None, width, features, unused


def without_spans(features: object) -> tuple[object, Spans | None]:
    """``"label[1..37]"`` is ``"label"`` and ``[(1, 37)]``; ``"label"`` is itself and None."""
    match = _WITH_SPANS.fullmatch(features) if isinstance(features, str) else None
    if match is None:
        return features, None
    return match[1], [(int(low), int(high)) for low, high in re.findall(_SPAN, match[2])]


def _shown(spans: Spans) -> str:
    return ",".join(f"{low}..{high}" for low, high in spans)


def _one_hot(labels: np.ndarray, where: str, dtype: torch.dtype, spans: Spans | None) -> tuple[Tensor, Spans]:
    """One-hot code of integer labels ``[N, k]``, each column ``high - low + 1`` wide, side by side: ``[N, widths]``.

    The labels that have columns are those in ``spans``; None for those from the smallest to the largest that occur.
    """
    occur = list(zip(labels.min(axis=0).tolist(), labels.max(axis=0).tolist(), strict=True))
    spans = occur if spans is None else spans
    inside = [low <= least <= most <= high for (low, high), (least, most) in zip(spans, occur, strict=False)]
    if len(spans) != len(occur) or not all(inside):
        raise DatasetError(f"{where} holds labels {_shown(occur)}, but features only have columns for {_shown(spans)}")
    lowest, highest = np.array(spans, np.int64).T
    widths = highest - lowest + 1
    if widths.sum() > WIDEST_ONE_HOT:
        raise DatasetError(
            f"{where} holds labels {_shown(spans)}, too many for a one-hot code; use ", Argument("features", "degree")
        )
    x = torch.zeros(len(labels), int(widths.sum()), dtype=dtype)
    first = np.cumsum(widths) - widths
    return x.scatter_(1, torch.from_numpy(labels - lowest + first), 1), spans


def class_labels(values: np.ndarray) -> tuple[Tensor, list[str]]:
    """Map labels ``[G]``, whole numbers, to int64 classes ``0..C-1`` in their sorted order; with their names."""
    found, y = np.unique(values, return_inverse=True)
    return torch.from_numpy(y.astype(np.int64)), [str(int(value)) for value in found]


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
