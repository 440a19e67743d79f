"""Data sets by name or path: where each is looked for, and what reads it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._common import check
from ..graphs.batch import EdgeOptions, GraphBatch
from . import citation, digits, downloads, folder, nel, ogb, tu
from . import splits as _splits
from .citation import NodeDataset
from .columns import LABEL, Features, Label
from .common import DatasetError, Folder
from .folder import load_folder
from .splits import Split
from .synthetic import csl, erdos_renyi, power_law, random_regular

if TYPE_CHECKING:
    from typing_extensions import Unpack

BUILT_IN: dict[str, Callable[..., GraphBatch]] = {
    "digits": digits.load,
    "erdos-renyi": partial(erdos_renyi, p=(0.05, 0.1)),
    "random-regular": partial(random_regular, degree=(3, 4)),
    "power-law": partial(power_law, num_graphs=1000, num_nodes=100, mean_degree=6.0, exponent=(2.3, 4.0)),
}
_STAND_IN: dict[str, Callable[..., GraphBatch]] = {"CSL": csl}  # for the files of that name
_BUILT_IN_ATTRIBUTES = {"digits": 3, "erdos-renyi": 50}


def load(
    name: str | Path = "digits",
    root: str | Path | None = None,
    *,
    features: Features = None,
    label: Label = LABEL,
    dtype: torch.dtype = torch.float32,
    download: bool = False,
    **edge_options: Unpack[EdgeOptions],
) -> GraphBatch:
    """Load a data set.

    Args:
        name: a built-in set, or what the files under ``root`` are called; a ``.nel`` file goes before a zip. Or the
            path of a folder of your own graphs: a name with a separator in it, or else, where there is no such set, of
            a folder that exists.
        root: the folder of the files; None for ``$SPIN_FAST_DATA``, or else ``data`` and the cache.
        features: of TU and ``.nel`` sets: ``"label"``, ``"attribute"``, ``"attribute+label"``, ``"degree"``, or None
            for the paper's choice; ``"label[1..37]"`` has a column for each of these labels, not only from the smallest
            to the largest that occur. Of your own graphs as in :func:`load_folder`.
        label: of your own graphs, as in :func:`load_folder`; to be left out for other sets.
        dtype: float32 or float64, of the features.
        download: get the set from its official site if it is not there yet, as :func:`download` does. Files that were
            downloaded are compared at every loading with what they were then.
        **edge_options: ``undirected``, ``coalesce`` and ``self_loops`` as in :func:`load_folder`, for your own graphs
            alone: the edges of a set by name are known.

    Returns:
        The graphs with features ``x`` ``[N, d]`` and labels ``y``: int64 ``[G]`` in ``0..C-1``, or for OGB sets with
        several tasks or missing labels ``[G, T]`` of ``dtype`` with NaN for missing. Your own graphs may have none.

    Raises:
        DatasetError: there is no such set, or its files are wrong; one line that says which and what to do.
    """
    return read(name, root, features=features, label=label, dtype=dtype, download=download, **edge_options).graphs


def read(
    name: str | Path = "digits",
    root: str | Path | None = None,
    *,
    features: Features = None,
    label: Label = LABEL,
    dtype: torch.dtype = torch.float32,
    download: bool = False,
    **edge_options: Unpack[EdgeOptions],
) -> Folder:
    """Load a data set as :func:`load` does, with what its files call graphs and classes.

    Classes are called as in the files of TU and ``.nel`` sets and of your own graphs, ``"-1"`` and ``"1"`` perhaps; of
    other sets by their numbers. The graphs of a set by name are called by their numbers, from 0.
    """
    check.flag("download", download)
    if (path := own_folder(name, root)) is not None:
        return load_folder(path, features=features, label=label, dtype=dtype, **edge_options)
    name = str(name)
    folder.check_edge_options(edge_options)
    found = None if name in BUILT_IN else _locate(name, root)
    if name.lower() == "cora" and (found is None or found[0] is tu):
        raise DatasetError(f"{name} is one graph whose nodes have labels, not a set of graphs: take datasets.cora()")
    if found is None and name not in (*BUILT_IN, *_STAND_IN) and not download:
        raise _unknown(name, root)  # before its arguments: it may be the mistyped path of a folder
    _refuse_edge_options(name, edge_options)
    if label != LABEL:
        raise DatasetError(
            f"label={label!r} is impossible for {name}, which is no folder of your own; leave it out", argument="label"
        )
    if name in BUILT_IN:
        _refuse_features(name, features)
        return _numbered(BUILT_IN[name](dtype=dtype), _BUILT_IN_ATTRIBUTES.get(name, 0))
    if found is None and name in _STAND_IN:
        if features not in (None, "degree"):
            raise DatasetError(
                f"features={features!r} is impossible for {name}, which has no labels or attributes",
                argument="features",
            )
        return _numbered(_STAND_IN[name](dtype=dtype), 0)
    if found is None:
        _download_to(name, root)
        found = _locate(name, root)
    if found is None:
        raise _unknown(name, root)
    source, path = found
    downloads.check(path)
    if source is ogb:
        _refuse_features(name, features)
        return _numbered(ogb.load(path, dtype=dtype), 0)
    if source is nel:
        return nel.read(path, name, features=features, dtype=dtype)
    files = tu.Files(path, name)
    files.require("A", "graph_indicator", "graph_labels")
    named = tu.read(files, features=features, dtype=dtype)
    return named._replace(names=list(map(str, range(len(named.graphs)))))


def _numbered(graphs: GraphBatch, num_attributes: int) -> Folder:
    """Graphs whose files have no names for them, nor for their classes."""
    y = graphs.y
    classes = None if y is None or y.is_floating_point() else list(map(str, range(int(y.max()) + 1)))
    return Folder(graphs, list(map(str, range(len(graphs)))), classes, None, num_attributes)


def download(
    name: str,
    root: str | Path | None = None,
    *,
    url: str | None = None,
    verify: bool = True,
    progress: bool = True,
) -> Path:
    """Get a TU set or one of OGB's molecule sets from its official site, unless it is there already.

    A TU set remains the zip that it is; a set of OGB is unpacked to ``ogbg_molhiv/``, as OGB's own loader has it. What
    breaks off, or is not what it should be, leaves nothing behind. Checksums are compared with those known to this
    package, which has them of a dozen sets. Of others the first download is trusted, and its checksums are kept beside
    it, in ``*.sha256``, for later ones and for every loading.

    Args:
        name: as on https://chrsmrrs.github.io/datasets/docs/datasets/, such as ``"NCI1"``, or such as
            ``"ogbg-molhiv"``.
        root: where to put it; None for ``$SPIN_FAST_DATA``, or else the cache.
        url: the address of a mirror, without the file's name; None for ``$SPIN_FAST_TU_URL`` or ``$SPIN_FAST_OGB_URL``,
            or else the official one.
        verify: compare with the checksums known to this package. False takes a file that has been changed at its site.
        progress: show a bar on a terminal.

    Returns:
        The zip or the folder.

    Raises:
        DatasetError: there is no such set, no connection, no place, or the file is damaged or not the one known; one
            line that says which and what to do.
    """
    check.flag("verify", verify)
    check.flag("progress", progress)
    if name in BUILT_IN or name in _STAND_IN:
        raise DatasetError(f"{name} is built in: there is nothing to download, load it")
    found = _locate(name, root)
    return _download_to(name, root, url, verify, progress) if found is None else found[1]


def split(
    name: str | Path,
    y: Tensor,
    root: str | Path | None = None,
    *,
    seed: int = 0,
    splits: str | Path | None = None,
    fold: int | None = None,
) -> Split:
    """Divide the graphs of a set into training, validation and test.

    OGB sets have an official scaffold split, whatever the seed. With ``splits`` or ``fold`` it is a fold of
    :func:`published_splits`, or your own split. All others are drawn 80/10/10, stratified by class, or, of tasks side
    by side, by whether a graph has any label that is known, and any that is 1, where there are enough of each kind.

    Args:
        name: the set.
        y: its labels, first axis ``G``; int64 ``[G]``, or float ``[G, T]`` of tasks, where the split is drawn.
        root: as for ``load``.
        seed: of the draw.
        splits: the file of the folds or of a single split, or its folder; None with a ``fold`` for where
            :func:`published_splits` looks.
        fold: its number, from 0; None for the first with ``splits``, or else for a draw.

    Returns:
        Ascending graph numbers that together are ``0..G-1`` (a split from a file keeps its own order, and a single one
        may leave graphs out).

    Raises:
        DatasetError: the official split or the folds are missing or of another size, or a class is too small to be
            divided. ValueError: there is no such fold.
    """
    if splits is not None or fold is not None:
        folds = published_splits(name, len(y), root, splits=splits)
        if check.integer("fold", 0 if fold is None else fold, 0) >= len(folds):
            raise ValueError(f"fold must be below {len(folds)}, the number of folds of {name}, got {fold}")
        return folds[fold or 0]
    name = str(name)
    if ogb.owns(name):
        if (found := _locate(name, root)) is None:
            raise _unknown(name, root)
        return Split(*ogb.scaffold_split(found[1], len(y)))
    return _splits.draw(name, y, seed)


def published_splits(
    name: str | Path, num_graphs: int, root: str | Path | None = None, *, splits: str | Path | None = None
) -> list[Split]:
    """The ten folds that Errica et al. (2020) publish for a set, each with one part to select by; or your own.

    They are files ``NAME_splits.json`` of https://github.com/diningphil/gnn-comparison (``data_splits/``). ``PROTEINS``
    has those of ``PROTEINS_full``. A file may also hold a single split, ``{"train": [...], "validation": [...],
    "test": [...]}``, graph numbers from 0.

    Args:
        name: the set.
        num_graphs: how many graphs it has.
        root: as for ``load``: the file is looked for in ``root/splits/``, of a folder of your own in ``splits/`` beside
            it.
        splits: instead, the file, or the folder that holds it.

    Returns:
        One split per fold, int64 graph numbers in the order of the file. In each fold they are ``0..num_graphs-1``, and
        each graph is tested in one fold; a single split may leave graphs out.

    Raises:
        NoPublishedSplits: there is no such file. DatasetError: it is wrong; names it, the fold and what is wrong.
    """
    check.integer("num_graphs", num_graphs, 1)
    own = own_folder(name, root)
    places = _roots(root) if own is None else [own.parent]  # the set of that name is another one
    return _splits.read(_splits.locate(Path(name).name, places, splits), num_graphs)


def cora(root: str | Path | None = None, *, normalize: bool = False, dtype: torch.dtype = torch.float32) -> NodeDataset:
    """Load Cora: 2,708 papers that cite each other, 7 classes, 1,433 words of which a paper has some.

    ``Cora.zip`` or ``Cora/`` under ``root`` must hold ``edges.csv`` (each edge once), ``labels.csv``, ``features.txt``
    (a line of word numbers per paper) and ``split_train.csv``, ``split_valid.csv``, ``split_test.csv``, the public
    split of Planetoid: 20 papers per class, 500, and 1,000; nodes and words are numbered from 0. From PyG's
    ``Planetoid`` the same comes by ``GraphBatch.from_pyg(data, y=None)`` and ``data.y``.

    Args:
        root: the folder of the files; None for ``$SPIN_FAST_DATA``, or else ``data`` and the cache.
        normalize: divide the rows of ``x`` by their sums, as PyG's ``NormalizeFeatures`` does.
        dtype: float32 or float64, of ``x``.

    Returns:
        One graph with ``x [2708, 1433]`` of 0 and 1, both directions of each edge, the classes of its nodes, the split.

    Raises:
        DatasetError: no such files, or wrong ones; one line that says which.
    """
    roots = _roots(root)
    path = next(filter(None, map(citation.locate, roots)), None)
    if path is None:
        places = " or ".join(map(str, roots))
        raise DatasetError(f"Cora needs Cora.zip or Cora/ in {places}; put it there, or name its folder by root")
    return citation.load(path, normalize=normalize, dtype=dtype)


def metric(name: str | Path) -> str:
    """How a set is scored: ``"rocauc"`` for ogbg-molhiv (other OGB sets: what OGB says), ``"accuracy"`` otherwise."""
    return ogb.metric(str(name)) if ogb.owns(str(name)) else "accuracy"


def num_node_attributes(name: str | Path, root: str | Path | None = None, *, features: Features = None) -> int:
    """How many columns of ``x``, the first ones, are measured numbers: what it makes sense to standardise.

    The others are codes (one-hot node labels, OGB's atom features) or counts (degrees).

    Args:
        name, root, features: as for ``load``.
    """
    if (path := own_folder(name, root)) is not None:
        return load_folder(path, features=features, label=None).num_attributes
    name = str(name)
    if name in BUILT_IN:
        return _BUILT_IN_ATTRIBUTES.get(name, 0)
    found = _locate(name, root)
    if found is None and name not in _STAND_IN:
        raise _unknown(name, root)
    return tu.num_attributes(found[1], name, features=features) if found is not None and found[0] is tu else 0


def own_folder(name: str | Path, root: str | Path | None = None) -> Path | None:
    """The folder of your own graphs, or ``.nel`` file, that ``load`` takes ``name`` for, or None for a set by name."""
    path = Path(name).expanduser()
    if isinstance(name, Path) or "/" in name or os.sep in name or name in (os.curdir, os.pardir):
        return path
    if name in BUILT_IN or ogb.owns(name):
        return None
    for place in _roots(root):
        if folder.holds_graphs(place / name):
            return place / name
    if Path(name).suffix == ".nel":
        return next((file for place in (*_roots(root), Path()) if (file := place / name).is_file()), None)
    return path if name and path.is_dir() and name not in _STAND_IN and _locate(name, root) is None else None


def names(root: str | Path | None = None) -> list[str]:
    """The names that ``load`` knows: the built-in sets, then those found in the folder or folders."""
    found: set[str] = set()
    for place in _roots(root):
        found.update(*(source.names(place) for source in (ogb, nel, tu, folder)))
    known = [*BUILT_IN, *_STAND_IN]
    return [*known, *sorted(found.difference(known))]


def _roots(root: str | Path | None) -> list[Path]:
    """Where files are looked for, in that order."""
    chosen = root if root is not None else os.environ.get("SPIN_FAST_DATA")
    return [Path(chosen).expanduser()] if chosen else [Path("data"), downloads.cache()]


def _download_to(
    name: str, root: str | Path | None, url: str | None = None, verify: bool = True, progress: bool = True
) -> Path:
    return downloads.download(name, _roots(root)[-1], url=url, verify=verify, progress=progress)


def _locate(name: str, root: str | Path | None) -> tuple[ModuleType, Path] | None:
    """The module that reads a set, and the file or folder for it."""
    for place in _roots(root):
        for source in (ogb, nel, tu):
            if (path := source.locate(name, place)) is not None:
                return source, path
    return None


def _refuse_features(name: str, features: Features) -> None:
    if features is not None:
        raise DatasetError(
            f"features={features!r} is impossible for {name}, whose features are fixed; leave them out",
            argument="features",
        )


def _refuse_edge_options(name: str, edge_options: EdgeOptions) -> None:
    for argument, default in (("undirected", False), ("coalesce", None), ("self_loops", None)):
        if (value := edge_options.get(argument, default)) is not default:
            raise DatasetError(
                f"{argument}={value!r} is impossible for {name}, whose edges are known; "
                "it is for folders of your own graphs",
                argument=argument,
            )


def _unknown(name: str, root: str | Path | None) -> DatasetError:
    ogb.refuse_others(name)
    built_in = [*BUILT_IN, *_STAND_IN]
    found = names(root)[len(built_in) :]
    by_lower_case = {known.lower(): known for known in [*built_in, *found]}
    close = [by_lower_case[match] for match in difflib.get_close_matches(name.lower(), by_lower_case)]
    here = Path(name).expanduser()
    close += [f"{os.curdir}{os.sep}{name}"] if name and here.is_file() else []
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    places = " and ".join(f"{place}{'' if place.is_dir() else ' (which is no folder)'}" for place in _roots(root))
    looked = f"ogbg_{name[5:]}/" if ogb.owns(name) else f"{name}.nel, {name}.zip, {name}/ and {name}/raw/"
    return DatasetError(
        f"unknown data set {name!r}{hint} "
        f"Built in: {', '.join(built_in)}. Found in {places}: {', '.join(found) or 'nothing'} "
        f"(looked for {looked}). Download it by download=True, put its files there, or name their folder by root or "
        "SPIN_FAST_DATA."
    )
