"""Data sets by name or path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._common import check
from .._common.check import Argument
from ..graphs.batch import EdgeOptions, GraphBatch
from . import citation, downloads, sources
from .citation import NodeDataset
from .columns import LABEL, Features, Label
from .common import DatasetError, Folder
from .sources import BUILT_IN, STAND_INS, Source
from .splits import Split

if TYPE_CHECKING:
    from typing_extensions import Unpack


def find(name: str | Path = "digits", root: str | Path | None = None) -> Source:
    """Find a data set, without reading it. The functions that take a name are methods of the result.

    Args:
        name, root: as for :func:`load`.
    """
    return sources.find(name, _roots(root))


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
    """Load a data set as :func:`load` does, with the names of graphs and classes.

    Classes have the names that the files of TU and ``.nel`` sets and of your own graphs give them, such as ``"-1"``
    and ``"1"``; those of other sets, and the graphs of a set by name, are called by their numbers, from 0.
    """
    source = find(name, root)
    if check.flag("download", download):
        source = source.downloaded()
    return source.read(features=features, label=label, dtype=dtype, **edge_options)


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
    if name in BUILT_IN or name in STAND_INS:
        raise DatasetError(f"{name} is built in: there is nothing to download, load it")
    roots = _roots(root)
    if (found := sources.locate(name, roots)) is not None and found.path is not None:
        return found.path
    return downloads.download(name, roots[-1], url=url, verify=verify, progress=progress)


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
    return find(name, root).split(y, seed=seed, splits=splits, fold=fold)


def published_splits(
    name: str | Path, num_graphs: int, root: str | Path | None = None, *, splits: str | Path | None = None
) -> list[Split]:
    """The ten folds that Errica et al. (2020) publish for a set, each with validation graphs; or your own.

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
    return find(name, root).published_splits(num_graphs, splits=splits)


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
        One graph with ``x [2708, 1433]`` of 0 and 1, each edge in both directions, the classes of its nodes, the split.

    Raises:
        DatasetError: no such files, or wrong ones; one line that says which.
    """
    roots = _roots(root)
    path = next(filter(None, map(citation.locate, roots)), None)
    if path is None:
        places = " or ".join(map(str, roots))
        raise DatasetError(
            f"Cora needs Cora.zip or Cora/ in {places}; put it there, or name its folder by ", Argument("root")
        )
    return citation.load(path, normalize=normalize, dtype=dtype)


def metric(name: str | Path) -> str:
    """How a set is scored: ``"rocauc"`` for ogbg-molhiv (other OGB sets: what OGB says), ``"accuracy"`` otherwise."""
    return find(name).metric


def num_node_attributes(name: str | Path, root: str | Path | None = None, *, features: Features = None) -> int:
    """The number of leading columns of ``x`` that are measured numbers, which it makes sense to standardise.

    The others are codes (one-hot node labels, OGB's atom features) or counts (degrees).

    Args:
        name, root, features: as for ``load``.
    """
    return find(name, root).num_node_attributes(features)


def names(root: str | Path | None = None) -> list[str]:
    """The names that ``load`` knows: the built-in sets, then those found in the folder or folders."""
    return [*BUILT_IN, *STAND_INS, *sources.found_in(_roots(root))]


def _roots(root: str | Path | None) -> tuple[Path, ...]:
    """The folders where files are looked for, in that order."""
    chosen = root if root is not None else os.environ.get("SPIN_FAST_DATA")
    return (Path(chosen).expanduser(),) if chosen else (Path("data"), downloads.cache())
