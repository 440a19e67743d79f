"""A user's own graphs: a folder with TU text, GraphML, or tables of nodes and edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import _check
from ..graphs import Arcs
from . import graphml, tables, tu
from ._common import DatasetError, Folder, class_number
from .tables import WEIGHT, Features

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ARCS = ("undirected", "coalesce", "self_loops")  # rows come in any order: nothing to say about that


def holds_graphs(path: Path) -> bool:
    """Whether a folder holds GraphML files or tables, by their names."""
    return path.is_dir() and (any(path.glob("*.graphml")) or bool(tables.find(path, "edges")))


def names(root: Path) -> list[str]:
    """The folders of GraphML files or tables under ``root``."""
    return sorted(path.name for path in root.glob("*") if holds_graphs(path))


def load_folder(
    path: str | Path,
    *,
    features: Features = None,
    classes: Sequence[str] | None = None,
    edge_weight: str | None = WEIGHT,
    dtype: torch.dtype = torch.float32,
    **arcs: Unpack[Arcs],
) -> Folder:
    """Read graphs of your own from a folder of TU text, of GraphML files, or with tables of edges and nodes.

    *TU text*: ``NAME_A.txt``, ``NAME_graph_indicator.txt`` and so on, in the folder or in its ``raw/``, or in a zip;
    ``NAME_graph_labels.txt`` may be missing. Graphs are called ``"1"`` to ``"G"``.

    *GraphML*: one file per graph, ``*.graphml``, in the order of their names, which name the graphs. Node attributes
    are the features. The label is the graph's attribute ``label``, or stands in a table ``graphs``.

    *Tables*: CSV with a header (``.csv``, ``.csv.gz``) or Parquet (``.parquet``), rows in any order. Graphs and nodes
    have any text as names, of CSV without the blanks around it; nodes of different graphs may share one.

    - ``edges``: columns ``graph``, ``source``, ``target``, and maybe ``weight``; others are not read.
    - ``nodes``: columns ``graph``, ``node``, and any others: the features, which must be numbers. Without this table
      the nodes are those that edges name, with the degree as feature.
    - ``graphs``: columns ``graph`` and maybe ``label``, any text; others are not read. It says which graphs there are,
      in which order. Without this table the graphs are those of ``nodes``, in order of appearance, without labels.

    Arcs are taken as they are: an edge of a table, or of a GraphML file with ``edgedefault="directed"``, is one arc
    from source to target, an edge of a GraphML file with ``edgedefault="undirected"`` is two; a line ``i, j`` of TU
    text is the arc from ``j`` to ``i``, and repeated ones are kept once.

    Args:
        path: the folder, or a zip of a TU set.
        features: for GraphML and tables the node attributes (columns) to use, one name or several, in that order; None
            for all of them, those of GraphML in alphabetical order, or the degree where there are none. For TU text as
            in :func:`load`. ``"degree"`` for the degree in any case.
        classes: the names of the classes, in the order of their numbers: those of an earlier reading, so that the same
            class gets the same number. None for those that occur, in sorted order.
        edge_weight: the column of ``edges``, or the edge attribute, that holds the weights; ``"weight"`` may be
            missing. None leaves weights out. TU text has none.
        dtype: float32 or float64, of features and weights.
        **arcs: ``undirected``, ``coalesce`` and ``self_loops`` as in ``GraphBatch.from_edge_index``:
            ``undirected=True`` says that each edge is listed once, in either direction, and adds its reverse.
            Undirected GraphML files have it already.

    Returns:
        The graphs with the names of graphs and classes. ``graphs.y`` is None where there are no labels.

    Raises:
        DatasetError: names the file, the line and column, and what is wrong with it. ImportError: says what to install.
    """
    path = Path(path).expanduser()
    _check_arguments(features, classes, dtype, arcs)
    kind = _kind(path)
    if kind == "tu":
        return _load_tu(path, features, classes, dtype, arcs)
    if kind == "tables":
        return tables.load(path, features, classes, edge_weight, dtype, arcs)
    (folder,) = graphml.load(path, None, features, classes, True, edge_weight, dtype, arcs)
    return folder


def iter_folder(
    path: str | Path,
    num_graphs: int,
    *,
    features: Features = None,
    classes: Sequence[str] | None = None,
    edge_weight: str | None = WEIGHT,
    dtype: torch.dtype = torch.float32,
    **arcs: Unpack[Arcs],
) -> Iterator[Folder]:
    """Read as :func:`load_folder` does, ``num_graphs`` graphs at a time, for folders that do not fit in memory.

    Of GraphML files only so many are read at a time; they have labels only if ``classes`` says what classes there are.
    Other formats are read as a whole first.
    """
    path = Path(path).expanduser()
    _check.integer("num_graphs", num_graphs, 1)
    _check_arguments(features, classes, dtype, arcs)
    if _kind(path) == "graphml":
        return graphml.load(path, num_graphs, features, classes, classes is not None, edge_weight, dtype, arcs)
    whole = load_folder(path, features=features, classes=classes, edge_weight=edge_weight, dtype=dtype, **arcs)
    return (
        whole._replace(graphs=whole.graphs[begin : begin + num_graphs], names=whole.names[begin : begin + num_graphs])
        for begin in range(0, len(whole.names), num_graphs)
    )


def _check_arguments(features: Features, classes: Sequence[str] | None, dtype: torch.dtype, arcs: Arcs) -> None:
    if dtype not in _check.FLOATS:
        raise TypeError(f"dtype must be float32 or float64, got {dtype}")
    for name, value in (("features", [features] if isinstance(features, str) else features), ("classes", classes)):
        if value is None:
            continue
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise TypeError(f"{name} must be a list of names (str), got {value!r}")
        if len(set(value)) < max(len(value), 1):
            raise ValueError(f"{name} must be different names, at least one, got {value!r}")
    check_arcs(arcs)


def check_arcs(arcs: Arcs) -> None:
    if unknown := arcs.keys() - _ARCS:
        raise TypeError(f"{min(unknown)} is no option of reading a folder; those for arcs are {', '.join(_ARCS)}")


def _kind(path: Path) -> str:
    """Which format a folder has: ``"tu"``, ``"graphml"`` or ``"tables"``."""
    if path.is_file() and path.suffix == ".zip":
        return "tu"
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise DatasetError(f"{path} {what}; name a folder with graphs, or a zip of a TU set")
    found = {
        "tu": [*path.glob("*_A.txt"), *path.glob("raw/*_A.txt")],
        "graphml": [*path.glob("*.graphml")],
        "tables": tables.find(path, "edges"),
    }
    kinds = [kind for kind, files in found.items() if files]
    if len(kinds) != 1:
        held = (
            f"holds several formats ({', '.join(found[kind][0].name for kind in kinds)})"
            if kinds
            else f"holds no graphs (it holds {_some(path)})"
        )
        raise DatasetError(f"{path} {held}; it must hold NAME_A.txt, *.graphml, or edges.csv (.csv.gz, .parquet)")
    return kinds[0]


def _some(path: Path) -> str:
    return ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"


def _load_tu(path: Path, features: Features, classes: Sequence[str] | None, dtype: torch.dtype, arcs: Arcs) -> Folder:
    if path.is_dir():
        markers = [*path.glob("*_A.txt"), *path.glob("raw/*_A.txt")]
        found = sorted({file.name.removesuffix("_A.txt") for file in markers})
        if len(found) > 1:
            raise DatasetError(f"{path} holds several sets, {', '.join(found)}; put each into a folder of its own")
        files = tu.Files(markers[0].parent, found[0])
    else:
        files = tu.Files(path, path.name.removesuffix(".zip"))
    read = tu.read(files, features=features, dtype=dtype)
    graphs = read.graphs
    if arcs:
        batch = torch.arange(len(graphs)).repeat_interleave(graphs.num_nodes_per_graph)
        x = None if read.features == "degree" else graphs.x
        graphs = tables.build(graphs.edge_index, x, batch, len(graphs), None, dtype, arcs, y=graphs.y)
    return _in_classes(read._replace(graphs=graphs), classes, files.where("graph_labels"))


def _in_classes(read: Folder, classes: Sequence[str] | None, where: str) -> Folder:
    """Number the classes as ``classes`` has them."""
    if classes is None or read.classes is None:
        return read
    assert read.graphs.y is not None
    number = torch.tensor([class_number(name, classes, where) for name in read.classes])
    return read._replace(graphs=replace(read.graphs, y=number[read.graphs.y]), classes=list(classes))
