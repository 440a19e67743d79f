"""GraphML files, one per graph: ``load_folder`` describes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch

from .._common import check
from .._common.check import Argument
from ..graphs import convert
from ..graphs.batch import EdgeOptions, GraphBatch
from .columns import MOST_CATEGORIES, Column, Words, as_task, holds_words, task_of, text_of
from .common import DatasetError, Folder, check_is_regular, one_line, reading
from .options import (
    LABEL,
    WEIGHT,
    ReadOptions,
    chosen,
    folder_of,
    numbers_first,
    sorted_classes,
    warn_of_unread,
    with_labels,
)
from .reader import Reader, with_weights
from .tables import Table, open_graphs


def _classes(labels: list[Any], label: str, files: list[Path], *, required: bool = False) -> list[str] | None:
    """The class of each file, or None if no file has one, unless they are ``required``."""
    missing = [file for file, name in zip(files, labels, strict=True) if name is None]
    if not missing:
        return labels
    if required or len(missing) < len(files):
        why = "but other files have" if len(missing) < len(files) else "and classes are given"
        raise DatasetError(
            f"{missing[0]} has no graph attribute {label!r}, {why}; label all, ",
            *as_task(label, labels),
            "or read no labels by ",
            Argument("label", None),
        )
    return None


def _labels_of_files(table: Table, label: str | Sequence[str], files: list[Path]) -> dict[str, Any] | None:
    """Labels by the stem of the file, which the table may name with or without its suffix."""
    if (labels := table.labels(label)) is None:
        return None
    stems = [str(name).removesuffix(".graphml") for name in table.frame["graph"]]
    if len({*stems}) < len(stems):
        row = next(row for row, stem in enumerate(stems) if stem in stems[:row])
        raise DatasetError(f"{table.where(row, 'graph')} repeats {stems[row]!r}")
    known = {file.stem for file in files}
    for row, stem in enumerate(stems):
        if stem not in known:
            raise DatasetError(f"{table.where(row, 'graph')} names {stem!r}, but there is no file {stem}.graphml")
    if lacking := sorted(known - {*stems}):
        raise DatasetError(f"{table.path} has no label for {lacking[0]}.graphml; label all files or none")
    return dict(zip(stems, labels, strict=True))


class GraphMLReader(Reader):
    """Reads files in turn; the first with nodes decides on features, the first with edges on weights."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self.options = path, options
        self.files = sorted(path.glob("*.graphml"), key=lambda file: file.name)
        label = options.label
        self.label_names = [label] if isinstance(label, str) else label or ()
        self.table = None if label is None else open_graphs(path, label)
        self.other_columns = [] if self.table is None else [name for name in self.table.frame if name != "graph"]
        if self.table is not None and not {*self.label_names} & {*self.table.frame} and label != LABEL:
            self.table = None  # it lists other things: the files have them, or none has
        self.of_table = None if self.table is None or label is None else _labels_of_files(self.table, label, self.files)
        self.columns = chosen(options.features)
        self.found: list[str] = []  # attributes of the first file with nodes
        self.strict: set[str] = set()  # attributes that turned out to be words, and have to remain so
        self.words: dict[str, Words] = {}
        self.graph_attributes: set[str] = set()
        self.weighted = None if options.edge_weight == WEIGHT else options.edge_weight is not None
        self.undirected = check.flag("undirected", options.edge_options.get("undirected", False))
        self.is_looked_through = False

    def __len__(self) -> int:
        return len(self.files)

    def read(self) -> Folder:
        read = self._graphs(self.files)
        self._check_label()
        return self._labelled(*read, self.files)

    def _read(self, begin: int, end: int | None, num_graphs: int) -> Iterator[Folder]:
        if not self.is_looked_through:
            self._look_through()
            self.is_looked_through = True
        files = self.files[begin:end]
        for first in range(0, len(files), num_graphs):
            some = files[first : first + num_graphs]
            yield self._labelled(*self._graphs(some), some)

    def _look_through(self) -> None:
        """Learn, before graphs are read, the kinds of features and weights, and the words and classes that occur.

        It goes no further than to what options do not tell.
        """
        label = self.options.label if self.options.classes is None else None
        labels: list[Any] = []
        for file in self.files:
            is_known = self.columns is not None and self.weighted is not None
            is_known = is_known and not any(column.categories in ("any", "auto") for column in self.columns or ())
            if self.of_table is None and not isinstance(self.options.label, str):
                is_known = is_known and self.graph_attributes >= {*self.label_names}
            if is_known and (self.of_table is not None or not isinstance(label, str)):
                break
            graph = self._parse(file)
            labels.append(self._labels(graph, file))
            self._settle(graph, file)
            self._number_words(graph, file)
        else:
            self._check_label()
        settled = {name: words.settled("node attribute")[1] for name, words in self.words.items()}
        self.columns = self.columns and [settled.get(column.name, column) for column in self.columns]
        self.words = {}
        if isinstance(label, str):
            names = _classes(labels, label, self.files) if self.of_table is None else [*self.of_table.values()]
            where = self.path if self.table is None or self.of_table is None else self.table.path
            if names is not None:
                self.options = self.options._replace(classes=sorted_classes({*names}, where))

    def _check_label(self) -> None:
        """Check that some file has each attribute with labels; that for classes may be missing by its default name."""
        lacking = [name for name in self.label_names if name not in self.graph_attributes]
        if lacking and self.of_table is None and self.options.label != LABEL:
            beside = f", its table of graphs {_listed(self.other_columns)}" if self.other_columns else ""
            raise DatasetError(
                f"{self.path} has no file with the graph attribute {lacking[0]!r}; they have "
                f"{_listed(sorted(self.graph_attributes))}{beside}"
            )

    def _labelled(self, graphs: GraphBatch, labels: Any, nodes: list[str], files: list[Path]) -> Folder:
        read = folder_of(graphs, [file.stem for file in files], self.columns or [], self.weighted)
        read = read._replace(nodes=nodes)
        where = self.path
        if self.table is not None and self.of_table is not None:
            labels, where = [self.of_table[name] for name in read.names], self.table.path
        elif isinstance(self.options.label, str):
            required = self.is_looked_through and self.options.classes is not None  # others may have labels
            labels = _classes(labels, self.options.label, files, required=required)
        return with_labels(read, labels, self.options, where)

    def _graphs(self, files: list[Path]) -> tuple[GraphBatch, list[Any], list[str]]:
        """The graphs of some files, their labels, and the names of their nodes."""
        parts: list[Any] = []
        labels: list[Any] = []
        nodes: list[str] = []
        for file in files:
            graph = self._parse(file)
            nodes += map(str, graph)
            labels.append(self._labels(graph, file))
            self._settle(graph, file)
            decided = self.columns is not None and self.weighted is not None
            parts.append(self._convert(graph, file) if decided else graph)
        graphs = _joined(
            [
                part if isinstance(part, GraphBatch) else self._convert(part, file)
                for part, file in zip(parts, files, strict=True)
            ]
        )
        return (self._code(graphs) if self.columns else graphs), labels, nodes

    def _labels(self, graph: Any, file: Path) -> Any:
        """The name of its class or None, or a number for each task, NaN for missing."""
        self.graph_attributes |= graph.graph.keys() - {"node_default", "edge_default"}  # which networkx adds
        label = self.options.label
        if isinstance(label, str):
            return text_of(graph.graph.get(label))
        where = partial("{}: graph attribute {!r}".format, file)
        return [task_of(graph.graph.get(name), partial(where, name)) for name in label or ()]

    def _parse(self, file: Path) -> Any:
        networkx = convert.library("networkx", "GraphML")
        check_is_regular(file)
        with reading(str(file)):
            _check_elements(file)
            try:
                graph = networkx.read_graphml(file)
            except (networkx.NetworkXError, KeyError, AttributeError, TypeError) as error:
                raise DatasetError(f"{file} is no GraphML file that networkx reads ({one_line(error)})") from error
        for kind, all_data in ("node_default", graph.nodes.data()), ("edge_default", graph.edges.data()):
            default = {name: value for name, value in graph.graph.get(kind, {}).items() if value != "None"}  # empty
            for *_, data in all_data if default else ():
                data.update(default | data)
        return graph

    def _settle(self, graph: Any, file: Path) -> None:
        """Decide on features and weights by the first graph that has any; all others must agree."""
        if self.options.features is None and len(graph):
            found = sorted({name for _, data in graph.nodes(data=True) for name in data})
            if self.columns is None:
                self.columns, self.found = [Column(name, "any") for name in found], found
            elif self.found != found:
                raise DatasetError(
                    f"{file} has the node attributes {_listed(found)}, files before it {_listed(self.found)}; "
                    "name those to use by ",
                    Argument("features"),
                )
        if self.columns and len(graph):
            self.columns = numbers_first([self._kind(column, graph, file) for column in self.columns])
        if self.options.edge_weight == WEIGHT and graph.number_of_edges():
            weighted = any(WEIGHT in data for *_, data in graph.edges(data=True))
            if self.weighted is None:
                self.weighted = weighted
                warn_of_unread(file, {name for *_, data in graph.edges(data=True) for name in data} - {WEIGHT, "id"})
            elif self.weighted != weighted:
                has, have = ("has", "have none") if weighted else ("has no", "have")
                raise DatasetError(
                    f"{file} {has} edge weights, files before it {have}; edge_weight=None leaves weights out"
                )

    def _kind(self, column: Column, graph: Any, file: Path) -> Column:
        """Numbers or words, as the first file with nodes has it."""
        if column.categories == "any":
            values = {node: value for node, value in graph.nodes(data=column.name) if value is not None}
            places = [f"node {node!r}" for node in values]
            words = holds_words(
                column.name,
                [*values.values()],
                np.array([isinstance(value, str) for value in values.values()], bool),
                lambda k: f"{file}: node attribute {column.name!r} of {places[k]}",
                places.__getitem__,
            )
            if words:
                self.strict.add(column.name)
            column = column._replace(categories="auto" if words else "number")
        return column

    def _number_words(self, graph: Any, file: Path) -> None:
        for column in self.columns or []:
            if column.is_number or column.categories == "any":
                continue
            if column.name not in self.words:
                self.words[column.name] = Words(column, strict=column.name in self.strict)
            words = self.words[column.name]
            for node, data in graph.nodes(data=True):
                if column.name in data:  # which from_networkx says otherwise
                    where = partial("{}: node attribute {!r} of node {!r}".format, file, column.name, node)
                    data[column.name] = words.number(data[column.name], where)
            if len(words.numbers) > MOST_CATEGORIES:
                words.settled(f"{file}: node attribute")

    def _code(self, graphs: GraphBatch) -> GraphBatch:
        """Words one-hot, in the place of numbers for them."""
        blocks, columns = [], []
        for values, column in zip(graphs.x.T, self.columns or [], strict=True):
            if column.is_number or column.categories == "any":
                blocks.append(values[:, None])
                columns.append(column._replace(categories="number"))
                continue
            words = self.words.get(column.name, Words(column))
            positions, settled = words.settled("node attribute")
            blocks.append(settled.code(positions[values.numpy().astype(np.int64)], graphs.x.dtype))
            columns.append(settled)
        self.columns = columns
        return replace(graphs, x=torch.cat(blocks, dim=1))

    def _convert(self, graph: Any, file: Path) -> GraphBatch:
        dtype, edge_options = self.options.dtype, self.options.edge_options
        edge_options = edge_options | EdgeOptions(undirected=self.undirected and graph.is_directed())
        self._number_words(graph, file)
        x = [column.name for column in self.columns or []] or None
        weight = self.options.edge_weight if self.weighted else None
        try:
            graphs = GraphBatch.from_networkx([graph], x=x, edge_weight=weight, dtype=dtype, **edge_options)
        except (TypeError, ValueError) as error:
            reason = one_line(error).replace(" of graph 0", "")
            raise DatasetError(
                f"{file}: {reason}; correct it, or name what to use by ", Argument("features")
            ) from error
        if x is not None and not bool(graphs.x.isfinite().all()):
            row, column = (~graphs.x.isfinite()).nonzero()[0].tolist()
            raise DatasetError(
                f"{file}: attribute {x[column]!r} of node {[*graph][row]!r} must be finite, "
                f"got {graphs.x[row, column]}; correct it, or name what to use by ",
                Argument("features"),
            )
        if graphs.edge_weight is not None and not bool(graphs.edge_weight.isfinite().all()):
            raise DatasetError(f"{file}: edge attribute {weight!r} must be finite; correct it")
        return graphs


def _joined(parts: list[GraphBatch]) -> GraphBatch:
    """One batch; where coalescing gave some graphs weights, the weights of the others are 1."""
    if any(part.edge_weight is not None for part in parts):
        parts = [with_weights(part) for part in parts]
    return GraphBatch.concatenate(parts)


def _check_elements(file: Path) -> None:
    """Refuse what networkx repairs silently: it reads the first graph only, and adds nodes that only edges name."""
    try:
        elements = [(element.tag.rpartition("}")[2], element) for element in ElementTree.parse(file).iter()]
    except ElementTree.ParseError as error:
        line, column = error.position
        raise DatasetError(
            f"{file}, line {line}, column {column + 1} is not XML ({one_line(error)}); correct it"
        ) from error
    except LookupError as error:
        raise DatasetError(f"{file} cannot be read ({one_line(error)}); save it as UTF-8") from error
    if sum(kind == "graph" for kind, _ in elements) > 1:
        raise DatasetError(f"{file} holds several graphs; write each to a file of its own")
    nodes: set[str | None] = set()
    for kind, element in elements:
        if kind == "node":
            node = element.get("id")
            if node is None or node in nodes:
                wrong = "has a node without an id" if node is None else f"repeats node {node!r}"
                raise DatasetError(f"{file} {wrong}; correct it")
            nodes.add(node)
    for kind, element in elements:
        if kind == "edge" and not nodes >= (ends := {element.get("source"), element.get("target")}):
            (node, *_) = ends - nodes
            what = "lacks an end" if node is None else f"names node {node!r}, which the file does not list"
            raise DatasetError(f"{file} has an edge that {what}; correct it")


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
