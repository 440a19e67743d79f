"""A user's own graphs: a folder with TU text, GraphML, or tables of nodes and edges; a ``.nel`` file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..graphs.batch import EdgeOptions
from . import graphml, nel, parquet, tables, tu
from .common import DatasetError, Folder, impossible
from .options import LABEL, WEIGHT, Features, Label, ReadOptions, with_edges
from .reader import Reader, Shard, Whole

if TYPE_CHECKING:
    from typing_extensions import Unpack


_FILES = {".zip": "tu", ".nel": "nel", ".parquet": "parquet"}


def holds_graphs(path: Path) -> bool:
    """Whether a folder holds GraphML files or tables, by their names."""
    return path.is_dir() and (any(path.glob("*.graphml")) or bool(tables.find(path, "edges")))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*") if holds_graphs(path))


def load_folder(
    path: str | Path,
    *,
    features: Features = None,
    classes: Sequence[str] | None = None,
    label: Label = LABEL,
    edge_weight: str | None = WEIGHT,
    dtype: torch.dtype = torch.float32,
    **edge_options: Unpack[EdgeOptions],
) -> Folder:
    """Read graphs of your own from a folder of TU text, of GraphML files, or with tables of edges and nodes.

    *Tables*: CSV with a header (``.csv``, ``.csv.gz``) or Parquet (``.parquet``), rows in any order. Graphs and nodes
    have any text as names; nodes of different graphs may share one.

    - ``edges``: columns ``graph``, ``source``, ``target``, and maybe ``weight``; others are not read.
    - ``nodes``: columns ``graph``, ``node``, and any others: the features. A column of numbers is a column of ``x``, a
      column of words, such as ``C``, ``N`` and ``O``, is one-hot. Without this table the nodes are those that edges
      name, with the degree as feature.
    - ``graphs``: columns ``graph`` and maybe ``label``, any text; others are read if ``label`` names them. It says
      which graphs there are, in which order. Without this table the graphs are those of ``nodes``, in order of
      appearance, without labels.

    *GraphML*: one file per graph, ``*.graphml``, in the order of their names, which name the graphs. Node attributes
    are the features, those of type ``string`` as words. The label is the graph's attribute ``label``, or stands in a
    table ``graphs``.

    *TU text*: ``NAME_A.txt``, ``NAME_graph_indicator.txt`` and so on, in the folder or in its ``raw/``, or in a zip;
    ``NAME_graph_labels.txt`` may be missing. Graphs are called ``"1"`` to ``"G"``.

    *Parquet with a row per graph*: a file ``.parquet``, or a folder of such files, in the order of their names, with
    the columns

    - ``source`` and ``target``: lists of integers, the nodes of each edge, numbered from 0 in their graph;
    - ``num_nodes``: an integer; to be left out where there are features;
    - ``graph``, the name of the graph, any text or number; without it graphs are called ``"0"`` to ``"G-1"``;
    - ``weight``: maybe, a list with a number per edge;
    - any others with a list per graph, a value per node: the features, as those of ``nodes`` above. A value may be a
      vector, a list of as many numbers in all rows, which becomes as many columns of ``x``;
    - ``label``: as in ``graphs`` above. Other columns are read if ``label`` names them.

    :func:`write_parquet` makes such files.

    A ``.nel`` file is read, too, without its weights, as :func:`load` does; its graphs are called ``"0"`` to ``"G-1"``.

    Names and words are taken without the blanks around them; where that leaves nothing, nothing is filled in.

    Edges are taken as listed: a row of ``edges``, or an edge of a GraphML file with ``edgedefault="directed"``, is one
    directed edge from source to target, an edge of a GraphML file with ``edgedefault="undirected"`` is two; a line
    ``i, j`` of TU text is the directed edge from ``j`` to ``i``, and repeated ones are kept once.

    Args:
        path: the folder, a zip of a TU set, or a ``.nel`` or ``.parquet`` file.
        features: for GraphML, tables and Parquet the node attributes (columns) to use, one or several, numbers first
            and otherwise in that order; None for all of them, those of GraphML in alphabetical order, or the degree
            where there are none. An item is a name, of numbers or of words; ``{"column": name}``, of numbers alone; or
            ``{"column": name, "categories": [...]}`` for a one-hot code of just these words, or, with ``"auto"``, of
            those that occur, in sorted order, numbers too. A word that is none of them is an error, unless None is
            among the categories: then it is 0 in all of their columns. What was read is in ``Folder.features``, to read
            other files alike. For TU text and ``.nel`` as in :func:`load`.
            ``"degree"`` for the degree in any case.
        classes: the names of the classes, in the order of their numbers: those of an earlier reading, so that the same
            class gets the same number. None for those that occur, in sorted order.
        label: the column of ``graphs`` or of Parquet, or the graph attribute of GraphML, with the class of each graph;
            ``"label"`` may be missing. A list of names for binary tasks side by side, 0 or 1 or empty: ``y`` ``[G, T]``
            of ``dtype`` with NaN for missing. None reads no labels. Those of TU text and ``.nel`` have no names.
        edge_weight: the column of ``edges`` or of Parquet, or the edge attribute, that holds the weights; ``"weight"``
            may be missing, and a ``UserWarning`` then names what else edges of tables and GraphML have. None leaves
            weights out. TU text has none.
        dtype: float32 or float64, of features and weights.
        **edge_options: ``undirected``, ``coalesce`` and ``self_loops`` as in ``GraphBatch.from_edge_index``:
            ``undirected=True`` says that each edge is listed once, in either direction, and adds its reverse.
            Undirected GraphML files have it already.

    Returns:
        The graphs with the names of graphs and of classes or tasks. ``graphs.y`` is None where there are no labels.

    Raises:
        DatasetError: names the file, the line and column, and what is wrong with it. ImportError: says what to install.
    """
    return open_folder(Path(path), ReadOptions(features, classes, label, edge_weight, dtype, edge_options)).read()


def iter_folder(
    path: str | Path,
    num_graphs: int,
    *,
    features: Features = None,
    classes: Sequence[str] | None = None,
    label: Label = LABEL,
    edge_weight: str | None = WEIGHT,
    dtype: torch.dtype = torch.float32,
    shard: Shard | None = None,
    **edge_options: Unpack[EdgeOptions],
) -> Iterator[Folder]:
    """Read as :func:`load_folder` does, ``num_graphs`` graphs at a time, for folders that do not fit in memory.

    Of Parquet files with a row per graph, of GraphML files, of tables and of TU text only so many graphs are read at a
    time. Before that, all labels and words of Parquet and GraphML are looked through, unless ``classes`` and
    ``features`` list them; tables and the files of TU text always are, and a table of graphs is kept. ``.nel`` files
    are read as a whole first, and so are tables and TU text whose nodes or edges are not in the order of the graphs.

    Several machines may share the graphs: with ``shard=(3, 16)`` each reads a sixteenth, this one the third. All have
    the same classes and columns. Row groups and files outside of it are not read, but to be looked through; of text the
    lines before it have to be read.

    With :meth:`spin_fast.PowerFeatures.from_chunks` neither the graphs nor their powers are ever in memory at once. So
    that chunks are alike, all of them have weights with ``coalesce="sum"``, which are 1 where no edge is repeated.

    Args:
        path: as in :func:`load_folder`.
        num_graphs: of a chunk; the last one may have fewer.
        shard: ``(i, n)``: of ``G`` graphs those from ``G * (i - 1) // n`` to ``G * i // n``, where ``i`` is 1 to ``n``;
            None for all. If that is none, one chunk without graphs.
        features, classes, label, edge_weight, dtype, **edge_options: as in :func:`load_folder`.
    """
    options = ReadOptions(features, classes, label, edge_weight, dtype, edge_options)
    return open_folder(Path(path), options).chunks(num_graphs, shard)


def open_folder(path: Path, options: ReadOptions) -> Reader:
    """What reads the graphs that :func:`load_folder` reads, some at a time."""
    path = path.expanduser()
    options.check()
    kind = kind_of(path)
    if kind == "graphml":
        return graphml.GraphMLReader(path, options)
    if kind == "parquet":
        return parquet.ParquetReader(path, options)
    if kind == "tables":
        return tables.TablesReader(path, options)
    if options.label not in (None, LABEL):
        raise impossible("label", options.label, f"{path}, whose labels have no names; leave it out")
    if options.edge_weight not in (None, WEIGHT):
        raise impossible("edge_weight", options.edge_weight, f"{path}, whose edges have no named weights; leave it out")
    if kind == "tu":
        return tu.TUReader(_files_of(path), options)
    classes = None if options.label is None else options.classes
    read = nel.read(path, features=options.features, dtype=options.dtype, classes=classes)
    if options.label is None:
        read = read._replace(graphs=replace(read.graphs, y=None), classes=None)
    return Whole(with_edges(read, options))


def kind_of(path: Path) -> str:
    """Which format a folder has: ``"tu"``, ``"graphml"``, ``"tables"``, ``"parquet"`` or ``"nel"``."""
    if path.is_file() and path.suffix in _FILES:
        return _FILES[path.suffix]
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise DatasetError(f"{path} {what}; name a folder with graphs, a zip of a TU set, or a .nel or .parquet file")
    found = {
        "tu": [*path.glob("*_A.txt"), *path.glob("raw/*_A.txt")],
        "graphml": [*path.glob("*.graphml")],
        "tables": tables.find(path, "edges"),
    }
    kinds = [kind for kind, files in found.items() if files]
    if not kinds and any(path.glob("*.parquet")):
        return "parquet"
    if len(kinds) != 1:
        for suffix in () if kinds else (".nel", ".zip"):
            if sets := sorted(path.glob(f"*{suffix}")):
                raise DatasetError(f"{path} is a folder of {suffix} files; name one of them, such as {sets[0]}")
        held = (
            f"holds several formats ({', '.join(found[kind][0].name for kind in kinds)})"
            if kinds
            else f"holds no graphs (it holds {tu.Files(path, '').some()})"
        )
        raise DatasetError(
            f"{path} {held}; it must hold NAME_A.txt, *.graphml, edges.csv (.csv.gz, .parquet), or else *.parquet"
        )
    return kinds[0]


def _files_of(path: Path) -> tu.Files:
    if path.is_file():
        files = tu.Files(path, path.name.removesuffix(".zip"))
        if not files.has("A") and any(name.endswith(".nel") for name in files.members):
            raise DatasetError(f"{path} holds a .nel file; unpack it, and name that")
        return files
    markers = [*path.glob("*_A.txt"), *path.glob("raw/*_A.txt")]
    found = sorted({file.name.removesuffix("_A.txt") for file in markers})
    if len(found) > 1:
        raise DatasetError(f"{path} holds several sets, {', '.join(found)}; put each into a folder of its own")
    return tu.Files(markers[0].parent, found[0])
