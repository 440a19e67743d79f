"""Parquet files with a row per graph: ``load_folder`` describes them; and how such files are made of graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._common import check, files
from .._common.check import Argument
from ..graphs.batch import GraphBatch
from ..graphs.convert import Parts, library
from .columns import Column, Words, as_task, task_of, text_of
from .common import DatasetError, Folder, check_is_regular, reading
from .options import LABEL, WEIGHT, ReadOptions, chosen, folder_of, numbers_first, sorted_classes, with_labels
from .reader import Reader

ROWS = 1 << 16  # graphs that are read or written at once, where no one says how many
FEW_ROWS = 256  # the same, to look at the first of them
BUFFER_BYTES = 1 << 18  # of each column, so that a row group is not in memory as a whole
_NO_FEATURES = ("graph", "num_nodes", "source", "target", WEIGHT, LABEL)

Where = Callable[[str, int], str]  # a column, and the number of a row among those that are being read


class _Part(NamedTuple):
    """Some rows of a file as flat arrays."""

    where: Where
    names: list[str] | None
    num_nodes: np.ndarray  # [rows]
    num_edges: np.ndarray  # [rows]
    ends: Tensor  # [2, edges] source and target, numbered in each graph
    weight: Tensor | None
    blocks: dict[str, Tensor]  # of each column [N, width], or of words their numbers [N]
    labels: list[Any] | None


class ParquetReader(Reader):
    """The rows of files in turn; the columns of the first decide what is read."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.paths = [path] if path.is_file() else sorted(path.glob("*.parquet"), key=lambda file: file.name)
        first = self.paths[0]
        self.parquet = library("pyarrow.parquet", str(path))
        self.arrow, self.compute = library("pyarrow", str(path)), library("pyarrow.compute", str(path))
        self.path, self.options = path, options
        with self._open(first) as file:
            schema = file.schema_arrow
        has = [*schema.names]
        others = {*_NO_FEATURES, options.edge_weight, options.label if isinstance(options.label, str) else None}
        lists = [field.name for field in schema if self._is_list(field.type) and field.name not in others]
        columns = chosen(options.features)
        if columns is None:
            columns = [Column(name, "any") for name in lists]
        self.needed = ["source", "target", *(column.name for column in columns)]
        if "num_nodes" in has:
            self.needed.append("num_nodes")
        elif not columns:
            self.needed += lists[:1]
        self.sized_by = next((name for name in self.needed[2:] if name in lists), None)
        if "graph" in has:
            self.needed.append("graph")
        weight, label = options.edge_weight, options.label
        self.weight = weight if weight in has or weight != WEIGHT else None
        if self.weight is not None:
            self.needed.append(self.weight)
        self.label = None if label == LABEL and LABEL not in has else label
        self.needed += [self.label] if isinstance(self.label, str) else self.label or []
        self.needed = [*dict.fromkeys(self.needed)]
        self._check_columns(first, has)
        self.columns = numbers_first([self._settled(column, first, schema.field(column.name)) for column in columns])
        if "num_nodes" not in has and self.sized_by is None:
            raise DatasetError(f"{first} must have the column 'num_nodes', or one with a list of a value for each node")
        self.words = {column.name: Words(column) for column in self.columns if not column.is_number}
        kinds = {column.name: schema.field(column.name).type.value_type for column in columns}
        self.vectors = [column.name for column in self.columns if self._is_list(kinds[column.name])]
        self.widths: dict[str, int] = {}
        self.is_looked_through = False

    @cached_property
    def num_rows(self) -> list[int]:
        """Of each file."""
        sizes = []
        for path in self.paths:
            with self._open(path) as file:
                sizes.append(file.metadata.num_rows)
        return sizes

    def __len__(self) -> int:
        return sum(self.num_rows)

    def read(self) -> Folder:
        return next(self._read_rows(0, None, None))

    def _read(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        self._look_through()
        return self._read_rows(begin, end, num_graphs)

    def _open(self, path: Path) -> Any:
        check_is_regular(path)
        with reading(str(path)):
            return self.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES)

    def _check_columns(self, path: Path, has: list[str]) -> None:
        for column in self.needed:
            if has.count(column) != 1:
                shown = ", ".join(map(repr, has))
                times = "the column" if column not in has else "one column"
                raise DatasetError(f"{path} must have {times} {column!r}, got {shown}")
        read = {"graph": True, WEIGHT: self.options.edge_weight == WEIGHT, LABEL: self.options.label == LABEL}
        for column, is_read in read.items():
            if is_read and column in has and column not in self.needed:
                raise DatasetError(f"{path} has the column {column!r}, and {self.paths[0]} has not; all must have it")

    def _is_list(self, kind: Any) -> bool:
        types = self.arrow.types
        return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)

    def _is_number(self, kind: Any) -> bool:
        types = self.arrow.types
        tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
        return any(test(kind) for test in tests)

    def _is_text(self, kind: Any) -> bool:
        types = self.arrow.types
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return types.is_string(kind) or types.is_large_string(kind)

    def _settled(self, column: Column, path: Path, field: Any) -> Column:
        """The column with its kind, by the type that it has in the first file."""
        kind = field.type.value_type if self._is_list(field.type) else None
        if column.categories == "any":
            column = column._replace(categories="auto" if kind is not None and self._is_text(kind) else "number")
        if kind is not None and self._is_list(kind):
            fits = column.is_number and self._is_number(kind.value_type)
        else:
            fits = kind is not None and (self._is_number(kind) or (not column.is_number and self._is_text(kind)))
        if not fits:
            wanted = "numbers, or vectors of them," if column.is_number else "words"
            raise DatasetError(
                f"{path}, column {column.name!r} must hold in each row a list of {wanted} to be a feature, got "
                f"{field.type}; name the columns to use by ",
                Argument("features"),
            )
        return column

    def _batches(
        self, columns: list[str], num_rows: int, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[Any, Where]]:
        """Yield the rows ``begin`` to ``end`` of all files, at most so many at a time; other row groups are skipped."""
        low, high = begin, sys.maxsize if end is None else end  # counted from the first row of the file at hand
        for number, path in enumerate(self.paths):
            if high <= 0:
                return
            if end is not None and self.num_rows[number] <= low:
                low, high = low - self.num_rows[number], high - self.num_rows[number]
                continue
            with self._open(path) as file, reading(str(path)):
                self._check_columns(path, [*file.schema_arrow.names])
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                bounds = [*pairwise(accumulate(sizes, initial=0))]
                groups = [group for group, (first, last) in enumerate(bounds) if first < high and low < last]
                row = bounds[groups[0]][0] if groups else 0
                for batch in file.iter_batches(num_rows, row_groups=groups, columns=columns) if groups else ():
                    first, last = max(low - row, 0), min(high - row, len(batch))
                    if first < last:
                        yield batch.slice(first, last - first), partial(_where, path, row + first)
                    row += len(batch)
                    if row >= high:
                        break
                low, high = low - sum(sizes), high - sum(sizes)

    def _look_through(self) -> None:
        """Learn, before the graphs are read, how wide vectors are, and which words and classes options do not list."""
        if self.is_looked_through:
            return
        self.is_looked_through = True
        for name in self.vectors:
            for rows, where in self._batches([name], FEW_ROWS):
                sizes, values = self._list(rows, name, where)
                if len(values):
                    self._numbers(values, name, partial(_of_value, where, name, sizes))
                    break
        columns = [column.name for column in self.columns if column.categories == "auto"]
        label = self.label if isinstance(self.label, str) and self.options.classes is None else None
        classes: dict[str | None, Callable[[], str]] = {}
        looked_through = columns if label is None else [*columns, label]
        if not looked_through:
            return
        for rows, where in self._batches(looked_through, ROWS):
            for name in columns:
                sizes, values = self._list(rows, name, where)
                self._codes(values, name, partial(_of_value, where, name, sizes))
            if label is not None:
                of = partial(where, label)
                for value, place in self._each(rows.column(label), lambda value, at: (text_of(value), at), of)[1]:
                    classes.setdefault(value, place)
        settled = {name: self.words[name].settled(f"{self.path}, column")[1] for name in columns}
        self.columns = [settled.get(column.name, column) for column in self.columns]
        self.words |= {name: Words(column) for name, column in settled.items()}
        known = [name for name in classes if name is not None]
        if known and None in classes:
            raise self._unlabelled(classes[None](), known)
        if known:
            self.options = self.options._replace(classes=sorted_classes({*known}, self.path))

    def _read_rows(self, begin: int, end: int | None, num_graphs: int | None) -> Iterator[Folder]:
        """Read the graphs ``begin`` to ``end``, or all from ``begin``; ``num_graphs`` at a time, or all at once."""
        held: list[_Part] = []
        rows = 0
        for batch, where in self._batches(self.needed, min(num_graphs or ROWS, ROWS), begin, end):
            done = 0
            while done < len(batch):
                some = batch.slice(done, None if num_graphs is None else num_graphs - rows)
                held.append(self._part(some, partial(_further, where, done)))
                done += len(some)
                rows += len(some)
                if rows == num_graphs:
                    read = self._joined(held, begin)
                    begin, held, rows = begin + rows, [], 0
                    yield read
                    del read  # which need not be in memory when the next are read
        if held:
            yield self._joined(held, begin)
        elif begin == 0:
            raise DatasetError(f"{self.path} holds no graphs: it has no rows")

    def _part(self, rows: Any, where: Where) -> _Part:
        num_edges, source = self._ends(rows, "source", where)
        same, target = self._ends(rows, "target", where)
        if (wrong := num_edges != same).any():
            row = int(wrong.argmax())
            raise DatasetError(f"{where('target', row)} must have as many entries as 'source', got {same[row]}")
        num_nodes = self._num_nodes(rows, where)
        for name, end in (("source", source), ("target", target)):
            below = np.repeat(num_nodes, num_edges)
            if (wrong := (end.numpy() < 0) | (end.numpy() >= below)).any():
                edge = int(wrong.argmax())
                row = _row_of(num_edges, edge)
                raise DatasetError(
                    f"{where(name, row)} names node {int(end[edge])}, and the graph has {num_nodes[row]}, "
                    "numbered from 0; correct it"
                )
        blocks = {}
        for column in self.columns:
            sizes, values = self._list(rows, column.name, where)
            if (wrong := sizes != num_nodes).any():
                row = int(wrong.argmax())
                raise DatasetError(
                    f"{where(column.name, row)} must have a value for each of the {num_nodes[row]} nodes of the graph, "
                    f"got {sizes[row]}; correct it, or name the columns to use by ",
                    Argument("features"),
                )
            of_value = partial(_of_value, where, column.name, sizes)
            make = self._numbers if column.is_number else self._codes
            blocks[column.name] = make(values, column.name, of_value)
        weight = None
        if self.weight is not None:
            sizes, values = self._list(rows, self.weight, where)
            if (wrong := sizes != num_edges).any():
                row = int(wrong.argmax())
                raise DatasetError(f"{where(self.weight, row)} must have as many entries as 'source', got {sizes[row]}")
            if self._is_list(values.type):
                raise DatasetError(f"{where(self.weight, 0)} must be a list of numbers, got {values.type}")
            weight = self._numbers(values, self.weight, partial(_of_value, where, self.weight, sizes))[:, 0]
        names = self._names(rows.column("graph"), where) if "graph" in self.needed else None
        wide = torch.promote_types(source.dtype, target.dtype)
        ends = torch.stack([source.to(wide), target.to(wide)])
        return _Part(where, names, num_nodes, num_edges, ends, weight, blocks, self._labels(rows, where))

    def _list(self, rows: Any, name: str, where: Where) -> tuple[np.ndarray, Any]:
        """The number of values in each row of a column of lists, and all of them."""
        column = rows.column(name)
        if not self._is_list(column.type):
            raise DatasetError(f"{where(name, 0)} must be a list, got {column.type}")
        if column.null_count:
            raise DatasetError(f"{where(name, _first_null(column))} is empty; fill it in")
        sizes = self.compute.list_value_length(column).to_numpy().astype(np.int64)
        values = column.flatten()
        if values.null_count:
            raise DatasetError(f"{_of_value(where, name, sizes, _first_null(values))} has a gap; fill it in")
        return sizes, values

    def _ends(self, rows: Any, name: str, where: Where) -> tuple[np.ndarray, Tensor]:
        """Node numbers, int32 where the file has no wider ones."""
        sizes, values = self._list(rows, name, where)
        types = self.arrow.types
        if not types.is_integer(values.type) and len(values):
            raise DatasetError(f"{where(name, 0)} must be a list of integers, got {values.type}")
        is_wide = values.type in (self.arrow.int64(), self.arrow.uint32(), self.arrow.uint64())
        wanted = self.arrow.int64() if is_wide else self.arrow.int32()
        with reading(where(name, 0)):
            return sizes, torch.from_numpy(values.cast(wanted).to_numpy(zero_copy_only=False).copy())

    def _num_nodes(self, rows: Any, where: Where) -> np.ndarray:
        if "num_nodes" not in self.needed:
            assert self.sized_by is not None
            return self._list(rows, self.sized_by, where)[0]
        column = rows.column("num_nodes")
        if not self.arrow.types.is_integer(column.type):
            raise DatasetError(f"{where('num_nodes', 0)} must be an integer, got {column.type}")
        if column.null_count:
            raise DatasetError(f"{where('num_nodes', _first_null(column))} is empty; fill it in")
        with reading(where("num_nodes", 0)):
            numbers = column.cast(self.arrow.int64()).to_numpy()
        if (wrong := (numbers < 0) | (numbers >= 2**40)).any():
            row = int(wrong.argmax())
            bound = "at least 0" if numbers[row] < 0 else "below 2**40"
            raise DatasetError(f"{where('num_nodes', row)} must be {bound}, got {numbers[row]}")
        return numbers

    def _numbers(self, values: Any, name: str, where: Callable[[int], str]) -> Tensor:
        """``[n, width]`` of the dtype asked for; what it would round or cannot hold is an error."""
        count, width = len(values), 1
        if self._is_list(values.type):
            widths = self.compute.list_value_length(values).to_numpy()
            if len(widths) or self.arrow.types.is_fixed_size_list(values.type):
                self.widths.setdefault(name, int(widths[0]) if len(widths) else values.type.list_size)
            width = self.widths.get(name, 0)
            if (wrong := widths != width).any():
                first = int(wrong.argmax())
                raise DatasetError(f"{where(first)} must hold vectors of {width} numbers, got one of {widths[first]}")
            values = values.flatten()
            if values.null_count:
                raise DatasetError(f"{where(_first_null(values) // width)} has a gap; fill it in")
        if not self._is_number(values.type):
            raise DatasetError(f"{where(0)} must hold numbers, got {values.type}")
        if self.arrow.types.is_decimal(values.type) or self.arrow.types.is_null(values.type):
            values = values.cast(self.arrow.float64())
        given = values.to_numpy(zero_copy_only=False)
        dtype = np.float32 if self.options.dtype == torch.float32 else np.float64
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = given.astype(dtype)
        kind = check.shown(self.options.dtype)
        if (wrong := ~np.isfinite(numbers)).any():
            first = int(wrong.argmax())
            raise DatasetError(f"{where(first // max(width, 1))} must be finite as {kind}, got {given[first]}")
        if given.dtype.kind in "iu" and (wrong := _is_rounded(numbers, given)).any():
            first = int(wrong.argmax())
            wider = " use float64," if dtype == np.float32 else ""
            argument = Argument("edge_weight" if name == self.weight else "features")
            raise DatasetError(
                f"{where(first // max(width, 1))} holds {given[first]}, which {kind} would round;{wider} or leave the "
                "column out by ",
                argument,
            )
        return torch.from_numpy(numbers).view(count, width)

    def _codes(self, values: Any, name: str, where: Callable[[int], str]) -> Tensor:
        """``[n]`` the number of each word."""
        positions, numbers = self._each(values, self.words[name].number, where)
        return torch.from_numpy(np.array(numbers, np.int64)[positions])

    def _each(
        self, values: Any, function: Callable[[Any, Callable[[], str]], Any], where: Callable[[int], str]
    ) -> tuple[np.ndarray, list[Any]]:
        """``[n]`` positions in a list of ``function(value, where)`` of each distinct value; None is a missing one."""
        if self.arrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()  # which may list values that do not occur
        if not self._is_number(values.type) and not self._is_text(values.type):
            raise DatasetError(f"{where(0)} must be a number or text, got {values.type}")
        coded = values.dictionary_encode(null_encoding="encode")
        positions = coded.indices.to_numpy()

        def first(number: int) -> str:
            return where(int((positions == number).argmax()))

        distinct = enumerate(coded.dictionary.to_pylist())
        return positions, [function(value, partial(first, number)) for number, value in distinct]

    def _names(self, column: Any, where: Where) -> list[str]:
        if self.arrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not self._is_number(column.type) and not self._is_text(column.type):
            raise DatasetError(f"{where('graph', 0)} must be a number or text, got {column.type}")
        names = self.compute.utf8_trim_whitespace(column.cast(self.arrow.large_string()))
        empty = self.compute.fill_null(self.compute.equal(names, ""), True).to_numpy(zero_copy_only=False)
        if empty.any():
            raise DatasetError(f"{where('graph', int(empty.argmax()))} is empty; fill it in")
        return names.to_pylist()

    def _labels(self, rows: Any, where: Where) -> list[Any] | None:
        """The class of each graph or None, or for each of its tasks 0, 1 or NaN."""
        if self.label is None:
            return None
        if not isinstance(self.label, str):
            tasks = [self._each(rows.column(name), task_of, partial(where, name)) for name in self.label]
            return np.stack([np.array(labels, np.float64)[positions] for positions, labels in tasks], axis=1).tolist()
        of = partial(where, self.label)
        positions, names = self._each(rows.column(self.label), lambda value, _: text_of(value), of)
        return np.array(names, object)[positions].tolist()

    def _labels_of(self, parts: list[_Part]) -> list[Any] | None:
        labels = [label for part in parts for label in part.labels or []]
        if not isinstance(self.label, str) or None not in labels:
            return labels if self.label is not None else None
        if {*labels} == {None} and not (self.is_looked_through and self.options.classes):  # others may have labels
            return None
        part = next(part for part in parts if None in (part.labels or []))
        raise self._unlabelled(part.where(self.label, (part.labels or []).index(None)), labels)

    def _unlabelled(self, where: str, labels: list[Any]) -> DatasetError:
        assert isinstance(self.label, str)
        return DatasetError(
            f"{where} is empty; fill in all, leave such graphs out, ",
            *as_task(self.label, labels),
            "or read no labels by ",
            Argument("label", None),
        )

    def _joined(self, parts: list[_Part], done: int) -> Folder:
        """The graphs of some parts, before which ``done`` graphs have been read."""
        num_nodes, num_edges = (
            torch.from_numpy(np.concatenate(sizes))
            for sizes in ([part.num_nodes for part in parts], [part.num_edges for part in parts])
        )
        dtype = self.options.dtype
        first = num_nodes.cumsum(0) - num_nodes
        batch = torch.arange(len(num_nodes)).repeat_interleave(num_nodes)
        ends = torch.cat([part.ends for part in parts], dim=1)
        is_wide = max(len(batch), ends.shape[1]) >= 2**31
        edge_index = (ends + first.repeat_interleave(num_edges)).to(torch.int64 if is_wide else ends.dtype)
        blocks, columns, measured = [], [], 0
        for column in self.columns:
            pieces = [part.blocks[column.name] for part in parts]
            block = torch.cat([piece for piece in pieces if len(piece)] or pieces[:1])
            if column.is_number:
                measured += block.shape[1]
            else:
                places, column = self.words[column.name].settled(f"{self.path}, column")
                block = column.code(places[block.numpy()], dtype)
            blocks.append(block)
            columns.append(column)
        x = torch.cat(blocks, dim=1) if blocks else None
        weights = [part.weight for part in parts if part.weight is not None]
        arrays = Parts(edge_index, batch, len(num_nodes), x, None, torch.cat(weights) if weights else None)
        graphs = GraphBatch._from_parts(arrays, dtype, self.options.edge_options)
        names = [name for part in parts for name in part.names or []]
        names = names or [str(number) for number in range(done, done + len(graphs))]
        read = folder_of(graphs, names, columns, self.weight is not None)._replace(num_attributes=measured)
        return with_labels(read, self._labels_of(parts), self.options, self.path)


def _where(path: Path, begin: int, column: str, row: int) -> str:
    return f"{path}, row {begin + row}, column {column!r}"


def _further(where: Where, begin: int, column: str, row: int) -> str:
    """The place of a row behind ``begin`` others."""
    return where(column, begin + row)


def _of_value(where: Where, column: str, sizes: np.ndarray, value: int) -> str:
    """The place of a value among those of all lists in a column."""
    return where(column, _row_of(sizes, value))


def _row_of(sizes: np.ndarray, value: int) -> int:
    return int(np.searchsorted(sizes.cumsum(), value, side="right"))


def _first_null(column: Any) -> int:
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())


def _is_rounded(numbers: np.ndarray, integers: np.ndarray) -> np.ndarray:
    fits = np.abs(numbers) < 2.0 ** (8 * integers.itemsize - (integers.dtype.kind == "i"))
    return ~fits | (np.where(fits, numbers, 0).astype(integers.dtype) != integers)


def write_parquet(graphs: GraphBatch | Folder | Iterable[GraphBatch | Folder], path: str | Path) -> None:
    """Write graphs to a Parquet file with a row per graph, which :func:`load_folder` and :func:`iter_folder` read.

    Its columns are ``num_nodes``, ``source`` and ``target``; ``x``, in each row a list of the features of each node,
    where graphs have features; ``weight``, where they have weights; and of labels ``label``, or a column for each task.
    A :class:`Folder` adds ``graph``, the names of the graphs, and has the names of classes and tasks; those of others
    are their numbers. The file is written under a temporary name and renamed.

    Reading it gives the graphs that were written, bit by bit: with ``dtype`` and, of tasks, ``label`` as they were;
    with ``classes``, unless all occur and are in sorted order, as numbers are; and with edges in the order of
    ``GraphBatch.from_edge_index``.

    Args:
        graphs: one batch; or several that are alike, each written before the next is asked for.
        path: the file, ``*.parquet``.

    Raises:
        OSError: the file cannot be written; names it. ImportError: says what to install. TypeError, ValueError: what
            are no graphs, graphs that differ or whose features or weights are not finite, labels that are neither
            classes nor tasks, a wrong name.
    """
    path = Path(path).expanduser()
    if path.suffix != ".parquet":
        raise ValueError(f"path must end with .parquet, got {path}")
    parquet = library("pyarrow.parquet", str(path))
    chunks = [graphs] if isinstance(graphs, GraphBatch | Folder) else graphs
    files.check_writable(path)
    with files.replacing(path) as temporary:
        writer = None
        try:
            for number, chunk in enumerate(chunks):
                folder = Folder(chunk, [], None, None, 0) if isinstance(chunk, GraphBatch) else chunk
                if not isinstance(folder, Folder):
                    raise TypeError(f"graphs must be GraphBatches or Folders, got {type(chunk).__name__}")
                for begin in range(0, len(folder.graphs), ROWS) or (0,):
                    table = _table(folder, begin, begin + ROWS, is_named=isinstance(chunk, Folder))
                    writer = writer or parquet.ParquetWriter(temporary, table.schema)
                    if table.schema != writer.schema:
                        kinds = [
                            ", ".join(f"{field.name}: {field.type}" for field in of)
                            for of in (writer.schema, table.schema)
                        ]
                        raise ValueError(
                            f"graphs must be alike, got columns {kinds[0]} and in chunk {number} {kinds[1]}"
                        )
                    writer.write_table(table)
            if writer is None:
                raise ValueError("graphs must hold at least one GraphBatch, got none")
        finally:
            if writer is not None:
                writer.close()


def _table(folder: Folder, begin: int, end: int, *, is_named: bool) -> Any:
    """Some graphs as a table of Arrow."""
    arrow = library("pyarrow", "Parquet")
    graphs = folder.graphs[begin:end].cpu()
    for name, values in ("x", graphs.x), ("edge_weight", graphs.edge_weight):
        if values is not None and not bool(values.isfinite().all()):
            raise ValueError(f"{name} must be finite, since no other values can be read again")
    edge_ptr = graphs.indptr[graphs.ptr].long()
    first = graphs.ptr[:-1].repeat_interleave(edge_ptr.diff())

    def lists(ptr: Tensor, values: Any) -> Any:
        return arrow.LargeListArray.from_arrays(ptr.numpy(), values)

    columns = {"graph": arrow.array(folder.names[begin:end], arrow.string())} if is_named else {}
    columns["num_nodes"] = arrow.array(graphs.num_nodes_per_graph.numpy())
    for name, nodes in zip(("source", "target"), graphs.edge_index, strict=True):
        columns[name] = lists(edge_ptr, arrow.array((nodes - first).to(nodes.dtype).numpy()))
    if graphs.edge_weight is not None:
        columns[WEIGHT] = lists(edge_ptr, arrow.array(graphs.edge_weight.detach().numpy()))
    if graphs.num_features:
        values = arrow.array(graphs.x.detach().flatten().numpy())
        columns["x"] = lists(graphs.ptr, arrow.FixedSizeListArray.from_arrays(values, graphs.num_features))
    for name, values in _label_columns(graphs.y, folder).items():
        if name in columns:
            raise ValueError(f"tasks must not be called {name!r}, as another column is")
        columns[name] = values
    return arrow.table(columns)


def _label_columns(y: Tensor | None, folder: Folder) -> dict[str, Any]:
    """The class of each graph, or the columns of tasks, in which NaN is missing."""
    arrow = library("pyarrow", "Parquet")
    if y is None:
        return {}
    if y.dim() == 1 and not y.dtype.is_floating_point:
        if folder.classes is None:
            return {LABEL: arrow.array(y.numpy())}
        return {LABEL: arrow.array([folder.classes[number] for number in y.tolist()], arrow.string())}
    if y.dim() != 2 or not bool(((y == 0) | (y == 1) | y.isnan()).all()):
        raise ValueError(
            f"y must be classes [G], or tasks [G, T] of 0, 1 and NaN, got {check.shown(y.dtype)} {[*y.shape]}"
        )
    names = folder.tasks or [f"task_{number}" for number in range(y.shape[1])]
    return {
        name: arrow.array(values.float().numpy(), arrow.float32(), from_pandas=True)
        for name, values in zip(names, y.T, strict=True)
    }
