"""Tables of edges and nodes, CSV or Parquet: ``load_folder`` describes them."""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._common import check
from .._common.check import Argument
from ..graphs.batch import GraphBatch
from ..graphs.convert import Parts, library
from .columns import LEAVE_OUT, Column, Words, as_categories, as_task, holds_words, shown, task_of, text_of
from .common import DatasetError, Folder, Lines, block_lines, impossible, reading
from .options import (
    LABEL,
    WEIGHT,
    Label,
    ReadOptions,
    chosen,
    folder_of,
    numbers_first,
    sorted_classes,
    warn_of_unread,
    with_labels,
)
from .parquet import BUFFER_BYTES
from .reader import OrderedReader, cuts_of

_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_NO_VALUES = (np.ndarray, list, tuple, Mapping, bytes)
_NUMBERS = {np.dtype(np.int64), np.dtype(np.float64)}  # of a column with both pandas makes float64

_T = TypeVar("_T")


def find(path: Path, name: str) -> list[Path]:
    return [file for suffix in _SUFFIXES if (file := path / f"{name}{suffix}").is_file()]


class Table:
    """Rows of a table, whose columns of names are text, and whose errors name file, row and column."""

    def __init__(self, path: Path, frame: Any, first: int, texts: Sequence[str], *, needed: int) -> None:
        """``texts`` are the columns of names; the first ``needed`` of them must be there and filled in.

        ``first`` is the number of rows before those in ``frame``, a pandas DataFrame.
        """
        self.path, self.frame, self.first = path, frame, first
        if self.frame.columns.has_duplicates:
            repeated = self.frame.columns[self.frame.columns.duplicated()][0]
            raise DatasetError(f"{path} must have one column {repeated!r}, got several; rename or drop them")
        for column in {*texts} & {*self.frame.columns}:
            self.as_text(column)
        for column in texts[:needed]:
            self.require(column, "; the first line must name them")
        for column in texts[:needed]:
            self.codes(column)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.frame.shape)

    def where(self, row: int, column: str) -> str:
        return f"{self.path}, {self.row(row)}, column {column!r}"

    def row(self, row: int) -> str:
        row += self.first
        return f"row {row}" if self.path.suffix == ".parquet" else f"line {row + 2}"

    def values(self, column: str) -> Any:
        """A column; values that Parquet may hold and that are neither numbers nor text are an error."""
        self.require(column)
        values = self.frame[column]
        if values.dtype == object:
            wrong = values.map(lambda value: isinstance(value, _NO_VALUES)).to_numpy(bool)
            if wrong.any():
                row = int(wrong.argmax())
                raise DatasetError(f"{self.where(row, column)} must be a number or text, got {shown(values[row])}")
        return values

    def distinct(self, column: str) -> tuple[np.ndarray, list[Any]]:
        """``[rows]`` positions in a list of the distinct values, with None for what is missing."""
        import pandas

        positions, values = pandas.factorize(self.values(column), use_na_sentinel=False)
        missing = pandas.isna(values)
        if values.dtype.kind != "f":  # as an object, 0.1 of float32 is 0.10000000149011612
            values = values.astype("object")
        return positions, [None if no else value for value, no in zip(values.to_numpy(), missing, strict=True)]

    def each(self, column: str, function: Callable[[Any, Callable[[], str]], _T]) -> tuple[np.ndarray, list[_T]]:
        """The same with ``function(value, where)`` of each distinct value; ``where()`` names its first place."""
        positions, values = self.distinct(column)

        def where(number: int) -> str:
            return self.where(int((positions == number).argmax()), column)

        return positions, [function(value, partial(where, number)) for number, value in enumerate(values)]

    def as_text(self, column: str) -> None:
        """Turn a column into text, as a pandas Categorical."""
        import pandas

        positions, values = self.distinct(column)
        names = pandas.Index([text_of(value) for value in values], dtype="str")
        codes, categories = pandas.factorize(names, sort=True)
        self.frame[column] = pandas.Categorical.from_codes(codes[positions], categories)

    def features(self) -> list[Column]:
        """All columns but those of names; one without a name, as pandas writes its index, is an error."""
        for number, column in enumerate(self.frame):
            if not str(column).strip() or column == f"Unnamed: {number}":  # as pandas reads it
                raise DatasetError(
                    f"{self.path}, column {number + 1} has no name; leave it out, as by to_csv(index=False)"
                )
        return [Column(column, "any") for column in self.frame if column not in ("graph", "node")]

    def require(self, column: str, hint: str = "") -> None:
        if column not in self.frame:
            has = ", ".join(map(repr, self.frame.columns))
            if len(self.frame.columns) == 1 and (found := [mark for mark in ";\t|" if mark in self.frame.columns[0]]):
                hint += f"; columns must be separated by commas, not by {found[0]!r}"
            raise DatasetError(f"{self.path} must have the column {column!r}, got {has}{hint}")

    def codes(self, column: str) -> np.ndarray:
        """``[rows]`` the number of each name in ``categories``."""
        codes = self.frame[column].cat.codes.to_numpy()
        if (codes < 0).any():
            raise DatasetError(f"{self.where(int((codes < 0).argmax()), column)} is empty; fill it in")
        return codes

    def categories(self, column: str) -> Any:
        return self.frame[column].cat.categories

    def numbered(self, column: str, names: Any, of: str) -> np.ndarray:
        """``[rows]`` the position in ``names``, a pandas Index, of each name in a column."""
        numbers = names.get_indexer(self.categories(column))[self.codes(column)]
        if (numbers < 0).any():
            row = int((numbers < 0).argmax())
            raise DatasetError(f"{self.where(row, column)} names {self.frame[column][row]!r}, which {of} does not list")
        return numbers.astype(np.int64)

    def parsed(self, column: str) -> np.ndarray:
        """``[rows]`` float64, NaN for what is missing or no number."""
        import pandas

        values = self.values(column)
        if values.dtype.kind in "mM" or isinstance(values.dtype, pandas.PeriodDtype):  # which would become numbers
            return np.full(len(values), np.nan)
        return pandas.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)

    def numbers(self, column: str, dtype: torch.dtype) -> np.ndarray:
        """``[rows]`` float64, finite in ``dtype``, too."""
        import pandas

        numbers, values = self.parsed(column), self.frame[column]
        if (wrong := np.isnan(numbers)).any():
            row = int(wrong.argmax())
            empty = pandas.isna(values[row]) or text_of(values[row]) is None
            got = "is empty; fill it in" if empty else f"must be a number, got {shown(values[row])}"
            raise DatasetError(f"{self.where(row, column)} {got}")
        if (wrong := ~torch.from_numpy(numbers.copy()).to(dtype).isfinite().numpy()).any():
            row, kind = int(wrong.argmax()), str(dtype).removeprefix("torch.")
            raise DatasetError(f"{self.where(row, column)} must be finite as {kind}, got {values[row]}")
        return numbers.copy()  # pandas may give a view that must not be written to

    def holds_words(self, column: str) -> bool:
        """Whether the values that are there are text other than numbers."""
        import pandas

        values = self.values(column).dropna()
        if values.dtype.kind in "biuf" or pandas.api.types.infer_dtype(values.astype("object")) != "string":
            return False
        text = values.astype("object").str.strip()
        text = text[text != ""]
        number = (pandas.to_numeric(text, errors="coerce").notna() | (text.str.lower() == "nan")).to_numpy()
        return holds_words(
            column,
            text.to_numpy(),
            ~number,
            lambda k: self.where(int(text.index[k]), column),
            lambda k: self.row(int(text.index[k])),
        )

    def words(self, column: Column) -> tuple[np.ndarray, Column]:
        """``[rows]`` the position of each word in the categories, and the column with these."""
        words = Words(column)
        if words.listed:
            self._check_words(words)
        positions, numbers = self.each(column.name, words.number)
        places, column = words.settled(f"{self.path}, column")
        return places[np.array(numbers, np.int64)[positions]], column

    def _check_words(self, words: Words) -> None:
        """Refuse words that features do not list; the message counts the nodes that have one."""
        column = words.column.name
        positions, values = self.distinct(column)
        rows = np.array([words.is_strange(value) for value in values], bool)[positions]
        if rows.any():
            row, graphs = int(rows.argmax()), self.frame["graph"]
            raise DatasetError(
                f"{self.where(row, column)} {words.strange(self.frame[column][row])}; {rows.sum():,} node(s) in "
                f"{graphs[rows].nunique():,} of the {graphs.nunique():,} graph(s) read have such words: {LEAVE_OUT}"
            )

    def labels(self, label: str | Sequence[str]) -> list[Any] | None:
        """The class of each graph, or 0, 1 or NaN for each of its tasks; None where there are no classes."""
        if not isinstance(label, str):
            tasks = [self.each(column, task_of) for column in label]
            return np.stack([np.array(labels, np.float64)[positions] for positions, labels in tasks], axis=1).tolist()
        if label == LABEL and LABEL not in self.frame:
            return None
        self.require(label)
        labels = self.frame[label]
        empty = labels.isna().to_numpy()
        if empty.all():
            return None
        if empty.any():
            more = f", and {empty.sum() - 1:,} more of {len(empty):,} graphs have no label" if empty.sum() > 1 else ""
            raise DatasetError(
                f"{self.where(int(empty.argmax()), label)} is empty{more}; fill in all, leave such graphs out of every "
                "table, ",
                *as_task(label, [*labels.dropna()]),
                "or read no labels by ",
                Argument("label", None),
            )
        return [str(name) for name in labels]


class Rows(Lines[Table]):
    """The rows of a CSV or Parquet file; ``texts`` and ``needed`` are those of :class:`Table`.

    Args:
        dtypes: of columns of a CSV file, since some rows do not tell what all of them are.

    Attributes:
        found: what pandas has taken columns of a CSV file for.
    """

    def __init__(
        self, path: Path, texts: Sequence[str], *, needed: int, dtypes: Mapping[str, Any] | None = None
    ) -> None:
        import pandas

        self.found: dict[str, set[Any]] = defaultdict(set)
        self._path, self._texts, self._needed = path, texts, needed
        self._is_parquet = path.suffix == ".parquet"
        with reading(str(path)):
            if self._is_parquet:
                self._arrow = library("pyarrow", str(path))
                self._file = library("pyarrow.parquet", str(path)).ParquetFile(path, buffer_size=BUFFER_BYTES)
                self._held = self._file.schema_arrow.empty_table()
                self._batches = self._file.iter_batches(block_lines(self._held))
            else:
                self._file = pandas.read_csv(
                    path,
                    dtype={**(dtypes or {}), **dict.fromkeys(texts, "str")},
                    index_col=False,
                    keep_default_na=False,
                    na_values=[""],
                    skip_blank_lines=False,  # so that rows tell lines
                    skipinitialspace=True,
                    low_memory=False,
                    iterator=True,
                )
                self._none = self._file.read(0)

    def close(self) -> None:
        self._file.close()

    def read(self, lines: int | None = None) -> Table:
        with reading(str(self._path)):
            frame = self._parquet_frame(lines) if self._is_parquet else self._csv_frame(lines)
        first, self.num_read = self.num_read, self.num_read + len(frame)
        return Table(self._path, frame, first, self._texts, needed=self._needed)

    def _parquet_frame(self, rows: int | None) -> Any:
        rows = sys.maxsize if rows is None else rows
        held, number = [self._held], len(self._held)
        while number < rows and (batch := next(self._batches, None)) is not None:
            held.append(self._arrow.Table.from_batches([batch]))
            number += len(batch)
        table = self._arrow.concat_tables(held)
        self._held = table.slice(min(rows, number))
        frame = table.slice(0, rows).to_pandas()
        return frame.reset_index(drop=frame.index.name is None)  # a named index is a column

    def _csv_frame(self, rows: int | None) -> Any:
        import pandas

        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            try:
                frame = self._none.copy() if rows == 0 else self._file.read(rows)
            except StopIteration:
                return self._none.copy()
            except pandas.errors.ParserWarning as error:
                more = "has more fields in its lines than names of columns in its first line"
                raise DatasetError(f"{self._path} {more}") from error
        frame.index = pandas.RangeIndex(len(frame))
        for column, dtype in frame.dtypes.items() if len(frame) else ():
            self.found[column].add(dtype)
        return frame


def _file_of(path: Path, name: str) -> Path | None:
    found = find(path, name)
    if len(found) > 1:
        raise DatasetError(f"{path} holds {' and '.join(file.name for file in found)}; keep one of them")
    return found[0] if found else None


def open_graphs(path: Path, label: Label) -> Table | None:
    """The table of graphs; a label that is a class may be any text."""
    if (file := _file_of(path, "graphs")) is None:
        return None
    with closing(Rows(file, ("graph", label) if isinstance(label, str) else ("graph",), needed=1)) as rows:
        return rows.read()


class _Known(NamedTuple):
    """What has to be known of all graphs before any of them is read."""

    names: Any  # of the graphs, a pandas Index
    ptr: dict[str, np.ndarray]  # [G + 1], rows of each table
    dtypes: dict[str, dict[str, Any]]  # of the columns of each table
    columns: list[Column]  # that become features
    can_cut: bool  # whether rows are in the order of the graphs, and some tell what columns hold


class TablesReader(OrderedReader):
    """Read tables, some graphs at a time where the rows of nodes and of edges are in the order of the graphs.

    Otherwise all are read, also where a column holds words in some rows and numbers in others, which is mostly an
    error. Before graphs are read some at a time, all tables are read through: that tells how many rows each graph has,
    and what the columns hold. The table of graphs is kept.
    """

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._columns = chosen(options.features)
        words = [column.name for column in self._columns or [] if column.categories not in ("any", "number")]
        self._open: dict[str, Callable[..., Rows]] = {}  # by the name of the table
        if nodes := _file_of(path, "nodes"):
            self._open["nodes"] = partial(Rows, nodes, ("graph", "node", *words), needed=2)
        elif self._columns:
            raise impossible("features", options.features, f"{path}, which has no table of nodes; leave it out")
        edges = _file_of(path, "edges")
        assert edges is not None
        self._open["edges"] = partial(Rows, edges, ("graph", "source", "target"), needed=3)
        self._listed, self._labels = open_graphs(path, options.label), None
        self._lister = self._listed.path if self._listed else nodes or edges
        if self._listed is None and options.label not in (None, LABEL):
            raise impossible("label", options.label, f"{path}, which has no table of graphs; leave it out")
        if self._listed is not None and options.label is not None:
            self._labels = self._listed.labels(options.label)
        if self._labels is not None and isinstance(options.label, str) and options.classes is None:
            options = options._replace(classes=sorted_classes({*self._labels}, self._lister))
        self.options = options
        if options.edge_weight == WEIGHT:
            with closing(self._open["edges"]()) as rows:
                columns = map(str, rows.read(0).frame.columns)
            read = ("graph", "source", "target", WEIGHT)
            warn_of_unread(edges, [name for name in columns if name not in read and not name.startswith("Unnamed: ")])

    def __len__(self) -> int:
        return len(self._known.names)

    def _can_cut(self) -> bool:
        return self._known.can_cut

    def read(self) -> Folder:
        tables = {}
        for name, opened in self._open.items():
            with closing(opened()) as rows:
                tables[name] = rows.read()
        names = _graph_names(self._listed or next(iter(tables.values())), unique=self._listed is not None)
        return self._graphs(tables, names, self._columns, self._labels)

    def _cut(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        known = self._known
        cuts = cuts_of(begin, len(self) if end is None else end, num_graphs)
        with ExitStack() as stack:
            tables = {}
            for name, opened in self._open.items():
                rows = stack.enter_context(closing(opened(dtypes=known.dtypes[name])))
                tables[name] = rows.between(known.ptr[name][cuts])
            for first, last in pairwise(cuts):
                labels = None if self._labels is None else self._labels[first:last]
                names = known.names[first:last]
                yield self._graphs({name: next(of) for name, of in tables.items()}, names, known.columns, labels)

    def _graphs(
        self, tables: dict[str, Table], names: Any, columns: list[Column] | None, labels: list[Any] | None
    ) -> Folder:
        """The graphs of these names from all of their rows."""
        nodes, edges = tables.get("nodes"), tables["edges"]
        dtype, edge_weight = self.options.dtype, self.options.edge_weight
        batch, row, edge_index, named = _number_nodes(edges, nodes, names, str(self._lister))
        x = None
        if columns is None:
            columns = [] if nodes is None else nodes.features()
        if nodes is not None and columns:
            x, columns = features_of(nodes, columns, dtype)
            x = x[row]
        weight = None
        if edge_weight is not None and (edge_weight in edges.frame or edge_weight != WEIGHT):
            weight = _exact(edges, edge_weight, dtype, "or rename the column to leave it out")
        parts = Parts(edge_index, batch, len(names), x, None, weight)
        graphs = GraphBatch._from_parts(parts, dtype, self.options.edge_options)
        read = folder_of(graphs, [str(name) for name in names], columns, weight is not None)
        return with_labels(read._replace(nodes=named), labels, self.options, self._lister)

    @cached_property
    def _known(self) -> _Known:
        names = None if self._listed is None else _graph_names(self._listed, unique=True)
        ptr, dtypes, features, can_cut = {}, {}, [], True
        for name, opened in self._open.items():
            found, num_rows = [], []  # the graph of each range of rows, and how many these are
            with closing(opened()) as rows:
                header = rows.read(0)
                columns = [] if name == "edges" else header.features() if self._columns is None else self._columns
                seen = [_Seen(column) for column in columns]
                for table in rows.blocks():
                    for of in seen:
                        of.look(table)
                    if names is not None:
                        table.numbered("graph", names, str(self._lister))  # refuses other graphs
                    graph = table.codes("graph")
                    first = np.flatnonzero(np.append(True, graph[1:] != graph[:-1]))
                    found.append(table.categories("graph")[graph[first]])
                    num_rows.append(np.diff(first, append=len(graph)))
            named = header.categories("graph").append(found)
            if names is None:
                names = named.unique()
                _check_some(names, self._lister)
            number = names.get_indexer(named)
            sizes = np.bincount(number, np.concatenate([*num_rows, []]), len(names)).astype(np.int64)
            ptr[name] = np.append(0, sizes.cumsum())
            dtypes[name] = {column: kind for column, (kind, *others) in rows.found.items() if not others}
            dtypes[name] |= {column: np.float64 for column, kinds in rows.found.items() if kinds == _NUMBERS}
            unclear = rows.found.keys() - dtypes[name].keys()
            features += [of.settled() for of in seen]
            read = [column.name for column in columns] if name == "nodes" else [self.options.edge_weight]
            is_clear = all(len(of.kinds) < 2 for of in seen) and unclear.isdisjoint(read)
            can_cut = can_cut and is_clear and not (number[1:] < number[:-1]).any()
        return _Known(names, ptr, dtypes, numbers_first(features), can_cut)


class _Seen:
    """What rows that have been looked at hold in a column that becomes features."""

    def __init__(self, column: Column) -> None:
        self.words = Words(column)
        self.kinds: set[bool] = set()  # whether some rows hold words

    def look(self, nodes: Table) -> None:
        column = self.words.column
        if column.categories not in ("any", "auto"):
            return
        is_word = column.categories == "auto" or nodes.holds_words(column.name)
        self.kinds.add(is_word)
        if is_word:
            nodes.each(column.name, self.words.number)
            self.words.settled(f"{nodes.path}, column")  # refuses too many

    def settled(self) -> Column:
        column = self.words.column
        if column.categories == "any" and True not in self.kinds:
            return column._replace(categories="number")
        return column if column.is_number or self.words.listed else self.words.settled("")[1]


def _graph_names(table: Table, *, unique: bool) -> Any:
    """The names of the graphs in order of appearance, a pandas Index."""
    import pandas

    names = pandas.Index(table.categories("graph")[pandas.unique(table.codes("graph"))])
    _check_some(names, table.path)
    if unique and len(names) < len(table.frame):
        row = int(table.frame["graph"].duplicated().to_numpy().argmax())
        raise DatasetError(f"{table.where(row, 'graph')} repeats {table.frame['graph'][row]!r}")
    return names


def _check_some(names: Any, path: Path) -> None:
    if len(names) == 0:
        raise DatasetError(f"{path} lists no graphs")


def _number_nodes(
    edges: Table, nodes: Table | None, graph_names: Any, of: str
) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Number the nodes by graph, in the order of their table, or else of their first edge.

    A node is known by its graph and its name: one key of both. ``of`` is the file that lists the graphs.

    Returns:
        The graph of each node ``[N]``, ascending; its row in the table of nodes; ``edge_index [2, E]``; the name of
        each node.
    """
    import pandas

    names = edges.categories("source").union(edges.categories("target"))
    if nodes is not None:
        names = names.union(nodes.categories("node"))

    def keys_of(table: Table, columns: Sequence[str]) -> list[np.ndarray]:
        graph = table.numbered("graph", graph_names, of)
        return [graph * len(names) + table.numbered(column, names, of) for column in columns]

    ends = keys_of(edges, ("source", "target"))
    if nodes is None:
        keys = pandas.unique(np.stack(ends, axis=1).ravel())
    else:
        (keys,) = keys_of(nodes, ("node",))
    graph = keys // max(len(names), 1)
    by_graph = np.argsort(graph, kind="stable")
    known = pandas.Index(keys)
    if nodes is not None and known.has_duplicates:
        row = int(known.duplicated().argmax())
        node, name = nodes.frame["node"][row], nodes.frame["graph"][row]
        raise DatasetError(f"{nodes.where(row, 'node')} repeats node {node!r} of graph {name!r}")
    number = np.empty(len(keys), np.int64)
    number[by_graph] = np.arange(len(keys))
    edge_index = []
    for column, end in zip(("source", "target"), ends, strict=True):
        position = known.get_indexer(end)
        if (position < 0).any():
            assert nodes is not None
            row = int((position < 0).argmax())
            name, node = edges.frame["graph"][row], edges.frame[column][row]
            raise DatasetError(
                f"{edges.where(row, column)} names node {node!r}, which {nodes.path} does not list for graph {name!r}"
            )
        edge_index.append(number[position])
    named = np.array(names.tolist(), object)[keys[by_graph] % max(len(names), 1)].tolist()
    return torch.from_numpy(graph[by_graph]), torch.from_numpy(by_graph), torch.from_numpy(np.stack(edge_index)), named


def _exact(table: Table, name: str, dtype: torch.dtype, *instead: Any) -> Tensor:
    """``[rows]`` numbers of a column; integers that would be rounded, maybe categories, are an error."""
    values, column = torch.from_numpy(table.numbers(name, dtype)).to(dtype), table.frame[name]
    large = values.abs() >= 2**24  # smaller ones are exact
    for row in large.nonzero().flatten().tolist() if column.dtype.kind != "f" else ():
        text = str(column[row]).strip()
        if re.fullmatch(r"[+-]?\d+", text) and int(text) != int(values[row]):
            wider = " use float64," if dtype == torch.float32 else ""
            raise DatasetError(
                f"{table.where(row, name)} holds {column[row]}, which {check.shown(dtype)} would round;{wider} ",
                *instead,
            )
    return values


def features_of(nodes: Table, columns: list[Column], dtype: torch.dtype) -> tuple[Tensor, list[Column]]:
    """``[rows, d]`` of the columns of a table, numbers first, and these columns with their categories."""
    columns = [
        column._replace(categories="auto" if nodes.holds_words(column.name) else "number")
        if column.categories == "any"
        else column
        for column in columns
    ]
    blocks, settled = [], []
    for column in numbers_first(columns):
        if column.is_number:
            instead = ("leave the column out by ", Argument("features"), ", or, ", *as_categories(column.name))
            block = _exact(nodes, column.name, dtype, *instead)[:, None]
        else:
            codes, column = nodes.words(column)
            block = column.code(codes, dtype)
        blocks.append(block)
        settled.append(column)
    return torch.cat(blocks, dim=1), settled
