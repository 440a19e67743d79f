"""GraphML files, one per graph: ``load_folder`` describes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from .. import _check, _convert
from .._arrays import offsets
from ..graphs import Arcs, GraphBatch
from ._common import DatasetError, Folder, labelled, one_line, reading
from .tables import WEIGHT, Features, Table, columns_of, labels_of, open_table


def load(
    path: Path,
    num_graphs: int | None,
    features: Features,
    classes: Sequence[str] | None,
    with_labels: bool,
    edge_weight: str | None,
    dtype: torch.dtype,
    arcs: Arcs,
) -> Iterator[Folder]:
    """The graphs of a folder of GraphML files, ``num_graphs`` at a time or all at once."""
    files = sorted(path.glob("*.graphml"), key=lambda file: file.name)
    table = open_table(path, "graphs", ("graph", "label"), needed=1) if with_labels else None
    of_table = None if table is None else _labels_of_files(table, files)
    reader = _GraphML(features, edge_weight, dtype, arcs)
    for begin in range(0, len(files), num_graphs or len(files)):
        some = files[begin : begin + (num_graphs or len(files))]
        graphs, of_graphs = reader.read(some)
        names = [file.stem for file in some]
        labels, where = of_graphs, str(path)
        if table is not None and of_table is not None:
            labels, where = [of_table[name] for name in names], str(table.path)
        missing = [file for file, label in zip(some, labels, strict=True) if label is None]
        if with_labels and missing and len(missing) < len(some):
            raise DatasetError(f"{missing[0]} has no graph attribute 'label', but other files have; label all or none")
        known = [label for label in labels if label is not None] if with_labels and not missing else None
        graphs, named = labelled(graphs, known, classes, where)
        width = 0 if reader.chosen == "degree" else graphs.num_features
        yield Folder(graphs, names, named, reader.chosen or "degree", width, weighted=reader.weighted)


def _labels_of_files(table: Table, files: list[Path]) -> dict[str, str] | None:
    """Labels by the stem of the file, which the table may name with or without its suffix."""
    labels = labels_of(table)
    if labels is None:
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


class _GraphML:
    """Reads files one after the other; features and weights are those of the first file that has nodes and edges."""

    def __init__(self, features: Features, edge_weight: str | None, dtype: torch.dtype, arcs: Arcs) -> None:
        self.chosen: str | list[str] | None = None if features is None else columns_of(features, [])
        self.all_attributes = features is None
        self.edge_weight, self.weighted = edge_weight, None if edge_weight == WEIGHT else edge_weight is not None
        self.dtype, self.undirected = dtype, arcs.get("undirected", False)
        self.arcs = arcs.copy()
        self.arcs.pop("undirected", None)
        _check.flag("undirected", self.undirected)

    def read(self, files: list[Path]) -> tuple[GraphBatch, list[str | None]]:
        batches: dict[int, GraphBatch] = {}
        waiting: dict[int, Any] = {}  # empty graphs, which any features and weights would suit
        labels = []
        for number, file in enumerate(files):
            graph = self._parse(file)
            label = graph.graph.get("label")
            labels.append(None if label is None else str(label))
            self._settle(graph, file)
            if self.chosen is None or self.weighted is None:
                waiting[number] = graph
            else:
                batches[number] = self._convert(graph, file)
        for number, graph in waiting.items():
            batches[number] = self._convert(graph, files[number])
        return _joined([batches[number] for number in range(len(files))]), labels

    def _parse(self, file: Path) -> Any:
        networkx = _convert.library("networkx", "GraphML")
        with reading(str(file)):
            _check_elements(file)
            try:
                return networkx.read_graphml(file)
            except (networkx.NetworkXError, KeyError, AttributeError) as error:
                raise DatasetError(f"{file} is no GraphML file that networkx reads ({one_line(error)})") from error

    def _settle(self, graph: Any, file: Path) -> None:
        """Take features and weights from the first graph that has any; compare them with those of the others."""
        if self.all_attributes and len(graph):
            found: str | list[str] = sorted({name for _, data in graph.nodes(data=True) for name in data}) or "degree"
            if self.chosen is None:
                self.chosen = found
            elif self.chosen != found:
                raise DatasetError(
                    f"{file} has the node attributes {_listed(found)}, files before it {_listed(self.chosen)}; "
                    "name those to use by features"
                )
        if self.edge_weight == WEIGHT and graph.number_of_edges():
            weighted = any(WEIGHT in data for *_, data in graph.edges(data=True))
            if self.weighted is None:
                self.weighted = weighted
            elif self.weighted != weighted:
                has, have = ("has", "have none") if weighted else ("has no", "have")
                raise DatasetError(
                    f"{file} {has} edge weights, files before it {have}; edge_weight=None leaves weights out"
                )

    def _convert(self, graph: Any, file: Path) -> GraphBatch:
        arcs = self.arcs
        if self.undirected and graph.is_directed():
            arcs = Arcs(undirected=True, **arcs)
        x = None if self.chosen in (None, "degree") else self.chosen
        weight = self.edge_weight if self.weighted else None
        if x is not None and not len(graph):
            none = torch.empty(0, dtype=torch.int64)
            return GraphBatch(
                ptr=offsets(torch.zeros(1, dtype=torch.int64)),
                indptr=offsets(none),
                indices=none,
                x=torch.empty(0, len(x), dtype=self.dtype),
                edge_weight=None if weight is None else torch.empty(0, dtype=self.dtype),
            )
        try:
            graphs = GraphBatch.from_networkx([graph], x=x, edge_weight=weight, dtype=self.dtype, **arcs)
        except (TypeError, ValueError) as error:
            reason = one_line(error).replace(" of graph 0", "")
            raise DatasetError(f"{file}: {reason}; correct it, or name what to use by features") from error
        if not bool(graphs.x.isfinite().all()):
            row, column = (~graphs.x.isfinite()).nonzero()[0].tolist()
            raise DatasetError(
                f"{file}: attribute {x[column]!r} of node {[*graph][row]!r} must be finite, "  # type: ignore[index]
                f"got {graphs.x[row, column]}; correct it, or name what to use by features"
            )
        if graphs.edge_weight is not None and not bool(graphs.edge_weight.isfinite().all()):
            raise DatasetError(f"{file}: edge attribute {weight!r} must be finite; correct it")
        return graphs


def _joined(parts: list[GraphBatch]) -> GraphBatch:
    """One batch, where merging repeated arcs may have made weights of some graphs: those of the others are 1."""
    if any(part.edge_weight is not None for part in parts):
        parts = [
            part if part.edge_weight is not None else replace(part, edge_weight=part.x.new_ones(part.num_arcs))
            for part in parts
        ]
    return GraphBatch.concatenate(parts)


def _check_elements(file: Path) -> None:
    """Refuse what networkx would mend in silence: it reads the first graph, and adds the nodes that only edges name."""
    try:
        elements = [(element.tag.rpartition("}")[2], element) for element in ElementTree.parse(file).iter()]
    except ElementTree.ParseError as error:
        line, column = error.position
        raise DatasetError(
            f"{file}, line {line}, column {column + 1} is not XML ({one_line(error)}); correct it"
        ) from error
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


def _listed(features: str | list[str]) -> str:
    return "none" if isinstance(features, str) else ", ".join(features)
