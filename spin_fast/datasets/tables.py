"""Tables of edges and nodes, CSV or Parquet: ``load_folder`` describes them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._common import check
from .._common.check import Argument
from ..graphs.batch import GraphBatch
from ..graphs.convert import Parts, library
from .columns import LEAVE_OUT, Column, Words, as_categories, as_task, holds_words, shown, task_of, text_of
from .common import DatasetError, Folder, impossible, reading
from .options import LABEL, WEIGHT, Label, ReadOptions, chosen, folder_of, numbers_first, with_labels

_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_NO_VALUES = (np.ndarray, list, tuple, Mapping, bytes)

_T = TypeVar("_T")


def find(path: Path, name: str) -> list[Path]:
    return [file for suffix in _SUFFIXES if (file := path / f"{name}{suffix}").is_file()]


class Table:
    """A table whose columns of names are text, and whose errors name file, row and column."""

    def __init__(self, path: Path, texts: Sequence[str], *, needed: int) -> None:
        """``texts`` are the columns of names; the first ``needed`` of them must be there and filled in."""
        import pandas

        self.path = path
        with reading(str(path)), warnings.catch_warnings():
            if path.suffix == ".parquet":
                library("pyarrow", str(path))
                frame = pandas.read_parquet(path)
                self.frame = frame.reset_index(drop=frame.index.name is None)  # a named index is a column
            else:
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                try:
                    self.frame = pandas.read_csv(
                        path,
                        dtype=dict.fromkeys(texts, "str"),
                        index_col=False,
                        keep_default_na=False,
                        na_values=[""],
                        skip_blank_lines=False,  # so that rows tell lines
                        skipinitialspace=True,
                        low_memory=False,
                    )
                except pandas.errors.ParserWarning as error:
                    more = "has more fields in its lines than names of columns in its first line"
                    raise DatasetError(f"{path} {more}") from error
        for column in {*texts} & {*self.frame.columns}:
            self.as_text(column)
        for column in texts[:needed]:
            self.require(column, "; the first line must name them")
        for column in texts[:needed]:
            self.codes(column)

    def where(self, row: int, column: str) -> str:
        return f"{self.path}, {self.row(row)}, column {column!r}"

    def row(self, row: int) -> str:
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
        """Refuse words that features do not list; the message counts all nodes that have one."""
        column = words.column.name
        positions, values = self.distinct(column)
        rows = np.array([words.is_strange(value) for value in values], bool)[positions]
        if rows.any():
            row, graphs = int(rows.argmax()), self.frame["graph"][rows].nunique()
            raise DatasetError(
                f"{self.where(row, column)} {words.strange(self.frame[column][row])}; {rows.sum():,} node(s) in "
                f"{graphs:,} graph(s) have such words: {LEAVE_OUT}"
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


def open_table(path: Path, name: str, texts: Sequence[str], *, needed: int) -> Table | None:
    found = find(path, name)
    if len(found) > 1:
        raise DatasetError(f"{path} holds {' and '.join(file.name for file in found)}; keep one of them")
    return Table(found[0], texts, needed=needed) if found else None


def open_graphs(path: Path, label: Label) -> Table | None:
    """The table of graphs; a label that is a class may be any text."""
    return open_table(path, "graphs", ("graph", label) if isinstance(label, str) else ("graph",), needed=1)


def load(path: Path, options: ReadOptions) -> Folder:
    features, label, dtype, edge_weight = options.features, options.label, options.dtype, options.edge_weight
    columns = chosen(features)
    categorical = [column.name for column in columns or [] if column.categories not in ("any", "number")]
    edges = open_table(path, "edges", ("graph", "source", "target"), needed=3)
    nodes = open_table(path, "nodes", ("graph", "node", *categorical), needed=2)
    listed = open_graphs(path, label)
    assert edges is not None
    first = listed or nodes or edges
    graph_names = _graph_names(first, unique=listed is not None)
    batch, row, edge_index = _number_nodes(edges, nodes, graph_names, str(first.path))
    x = None
    if columns is None:
        columns = [] if nodes is None else nodes.features()
    if columns:
        if nodes is None:
            raise impossible("features", features, f"{path}, which has no table of nodes; leave it out")
        x, columns = features_of(nodes, columns, dtype)
        x = x[row]
    weight = None
    if edge_weight is not None and (edge_weight in edges.frame or edge_weight != WEIGHT):
        weight = torch.from_numpy(edges.numbers(edge_weight, dtype)).to(dtype)
    parts = Parts(edge_index, batch, len(graph_names), x, None, weight)
    graphs = GraphBatch._from_parts(parts, dtype, options.edge_options)
    read = folder_of(graphs, [str(name) for name in graph_names], columns, weight is not None)
    if listed is not None and label is not None:
        return with_labels(read, listed.labels(label), options, listed.path)
    if label not in (None, LABEL):
        raise impossible("label", label, f"{path}, which has no table of graphs; leave it out")
    return read


def _graph_names(table: Table, *, unique: bool) -> Any:
    """The names of the graphs in order of appearance, a pandas Index."""
    import pandas

    names = pandas.Index(table.categories("graph")[pandas.unique(table.codes("graph"))])
    if len(names) == 0:
        raise DatasetError(f"{table.path} lists no graphs")
    if unique and len(names) < len(table.frame):
        row = int(table.frame["graph"].duplicated().to_numpy().argmax())
        raise DatasetError(f"{table.where(row, 'graph')} repeats {table.frame['graph'][row]!r}")
    return names


def _number_nodes(edges: Table, nodes: Table | None, graph_names: Any, of: str) -> tuple[Tensor, Tensor, Tensor]:
    """Number the nodes by graph, in the order of their table, or else of their first edge.

    A node is known by its graph and its name: one key of both. ``of`` is the file that lists the graphs.

    Returns:
        The graph of each node ``[N]``, ascending; its row in the table of nodes; ``edge_index [2, E]``.
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
    return torch.from_numpy(graph[by_graph]), torch.from_numpy(by_graph), torch.from_numpy(np.stack(edge_index))


def _rounded(column: Any, numbers: np.ndarray) -> int | None:
    """The first row of a column of integers that is another number in ``numbers``; they may be categories."""
    if column.dtype.kind == "f":
        return None
    for row in np.flatnonzero(np.abs(numbers) >= 2**24):  # smaller ones are exact
        text = str(column[row]).strip()
        if re.fullmatch(r"[+-]?\d+", text) and int(text) != int(numbers[row]):
            return int(row)
    return None


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
            values = nodes.numbers(column.name, dtype)
            block = torch.from_numpy(values).to(dtype)[:, None]
            if (row := _rounded(nodes.frame[column.name], block[:, 0].numpy())) is not None:
                wider = " use float64," if dtype == torch.float32 else ""
                raise DatasetError(
                    f"{nodes.where(row, column.name)} holds {nodes.frame[column.name][row]}, which "
                    f"{check.shown(dtype)} would round;{wider} leave the column out by ",
                    Argument("features"),
                    ", or, ",
                    *as_categories(column.name),
                )
        else:
            codes, column = nodes.words(column)
            block = column.code(codes, dtype)
        blocks.append(block)
        settled.append(column)
    return torch.cat(blocks, dim=1), settled
