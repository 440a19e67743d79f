"""Data sets by name or path, and where they come from: a folder of one's own, known files, a generator, or nowhere."""

from __future__ import annotations

import difflib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from .._common import check
from .._common.check import Argument
from .._common.indexing import as_tensor
from ..graphs.batch import EdgeOptions, GraphBatch
from . import citation, downloads, folder, nel, ogb, tu
from . import splits as _splits
from .built_in import csl, digits, erdos_renyi, power_law, random_regular
from .citation import NodeDataset
from .common import DatasetError, Folder, impossible
from .options import LABEL, Features, Label, ReadOptions, check_dtype_and_edges
from .reader import Reader, Whole
from .splits import Split

if TYPE_CHECKING:
    from typing_extensions import Unpack

BUILT_IN: dict[str, Callable[..., GraphBatch]] = {
    "digits": digits,
    "erdos-renyi": partial(erdos_renyi, p=(0.05, 0.1)),
    "random-regular": partial(random_regular, degree=(3, 4)),
    "power-law": partial(power_law, num_graphs=1000, num_nodes=100, mean_degree=6.0, exponent=(2.3, 4.0)),
    "CSL": csl,
}
STAND_IN = "CSL"  # built in where there are no files of that name
_ATTRIBUTES = {"digits": 3, "erdos-renyi": 50}  # columns of x that are measured numbers; of others none
_FIXED = "whose features are fixed; leave them out"


def find(name: str | Path = "digits", root: str | Path | None = None) -> Source:
    """Find a data set, without reading it; the arguments are those of :func:`load`."""
    return _find(name, _roots(root))


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
    source = find(name, root)
    if check.flag("download", download):
        source = source.downloaded()
    return source.read(features=features, label=label, dtype=dtype, **edge_options).graphs


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
    if name in BUILT_IN:
        raise DatasetError(f"{name} is built in: there is nothing to download, load it")
    roots = _roots(root)
    if (found := _locate(name, roots)) is not None and found.path is not None:
        return found.path
    return downloads.download(name, roots[-1], url=url, verify=verify, progress=progress)


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
    path = next((path for root in roots for path in (root / "Cora.zip", root / "Cora") if path.exists()), None)
    if path is None:
        places = " or ".join(map(str, roots))
        raise DatasetError(
            f"Cora needs Cora.zip or Cora/ in {places}; put it there, or name its folder by ", Argument("root")
        )
    return citation.load(path, normalize=normalize, dtype=dtype)


def names(root: str | Path | None = None) -> list[str]:
    """The names that ``load`` knows: the built-in sets, then those found in the folder or folders."""
    return [*BUILT_IN, *_found_in(_roots(root))]


def _roots(root: str | Path | None) -> tuple[Path, ...]:
    """The folders where files are looked for, in that order."""
    chosen = root if root is not None else os.environ.get("SPIN_FAST_DATA")
    return (Path(chosen).expanduser(),) if chosen else (Path("data"), downloads.cache())


@dataclass(frozen=True)
class Source(ABC):
    """A data set as :func:`find` has found it: what it is, where it is, and how it is read.

    Attributes:
        name: what was looked for.
        roots: the folders of data sets, with published folds in their ``splits/``.
        path: its file or folder; None for a built-in set, and for one that is not there.
        is_own: whether it is a folder or file of your own graphs, with labels and edges that options describe.
        has_official_split: whether :meth:`split` is the same for every seed.
    """

    name: str
    roots: tuple[Path, ...]
    path: Path | None = None
    is_own: ClassVar[bool] = False
    has_official_split: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """The name; of a path its last part."""
        return self.name

    @property
    def metric(self) -> str:
        """How it is scored: ``"rocauc"`` for ogbg-molhiv (other OGB sets: what OGB says), ``"accuracy"`` otherwise."""
        return ogb.metric(self.name) if ogb.owns(self.name) and not self.is_own else "accuracy"

    def downloaded(self) -> Source:
        """The set itself, got from its official site if it is not there yet."""
        return self

    @abstractmethod
    def read(self, **options: Any) -> Folder:
        """Read the graphs, with the names of graphs and classes.

        Classes have the names that the files of TU and ``.nel`` sets and of your own graphs give them, such as ``"-1"``
        and ``"1"``; those of other sets, and the graphs of a set by name, are called by their numbers, from 0.

        Args:
            **options: ``features``, ``label``, ``dtype`` and those of edges, as for :func:`load`.
        """

    def open(self, **options: Any) -> Reader:
        """Read the graphs when they are asked for, some at a time.

        Of a set of TU or OGB, and of Parquet, GraphML and tables of your own, nodes and edges are in memory only of
        those that are asked for. Of TU, OGB and tables, a shard takes as long to reach as all lines before it take to
        read; a TU set and tables are also read through once, before the first graph. What :func:`iter_folder` reads as
        a whole, and built-in sets, are in memory.

        Args:
            **options: as for :meth:`read`; and those of :func:`iter_folder` for your own graphs.
        """
        return Whole(self.read(**options))

    def smiles(self, graph: int) -> str | None:
        """The SMILES of a graph that is a molecule; None where none is known."""
        return None

    def split(self, y: Tensor, *, seed: int = 0, splits: str | Path | None = None, fold: int | None = None) -> Split:
        """Divide the graphs into training, validation and test.

        OGB sets have an official scaffold split, whatever the seed. With ``splits`` or ``fold`` it is a fold of
        :meth:`published_splits`, or your own split. All others are drawn 80/10/10, stratified by class, or, of tasks
        side by side, by whether a graph has any label that is known, and any that is 1, where there are enough of each
        kind.

        Args:
            y: the labels, first axis ``G``; int64 ``[G]``, or float ``[G, T]`` of tasks, where the split is drawn.
            seed: of the draw.
            splits: the file of the folds or of a single split, or its folder; None with a ``fold`` for where
                :meth:`published_splits` looks.
            fold: its number, from 0; None for the first with ``splits``, or else for a draw.

        Returns:
            Ascending graph numbers that together are ``0..G-1`` (a split from a file keeps its own order, and a single
            one may leave graphs out).

        Raises:
            DatasetError: the official split or the folds are missing or of another size, or a class is too small to be
                divided. ValueError: there is no such fold.
        """
        if splits is None and fold is None:
            return self._split(as_tensor(y), seed)
        folds = self.published_splits(len(y), splits=splits)
        if check.integer("fold", 0 if fold is None else fold, 0) >= len(folds):
            raise check.ArgumentValueError("fold", f"be below {len(folds)}, the number of folds of {self.name}", fold)
        return folds[fold or 0]

    def _split(self, y: Tensor, seed: int) -> Split:
        return _splits.draw(self.name, y, seed)

    def published_splits(self, num_graphs: int, *, splits: str | Path | None = None) -> list[Split]:
        """The ten folds that Errica et al. (2020) publish, each with validation graphs; or your own.

        They are files ``NAME_splits.json`` of https://github.com/diningphil/gnn-comparison (``data_splits/``).
        ``PROTEINS`` has those of ``PROTEINS_full``. A file may also hold a single split, ``{"train": [...],
        "validation": [...], "test": [...]}``, graph numbers from 0.

        Args:
            num_graphs: how many graphs there are.
            splits: the file, or the folder that holds it; None for ``splits/`` in the folders of data sets, of a folder
                of your own beside it.

        Returns:
            One split per fold, int64 graph numbers in the order of the file. In each fold they are
            ``0..num_graphs-1``, and each graph is tested in one fold; a single split may leave graphs out.

        Raises:
            NoPublishedSplits: there is no such file. DatasetError: it is wrong; names it, the fold and what is wrong.
        """
        check.integer("num_graphs", num_graphs, 1)
        folders = self.roots if not self.is_own or self.path is None else (self.path.parent,)  # there it is another set
        return _splits.read(_splits.locate(self.title, folders, splits), num_graphs)


class OwnGraphs(Source):
    """A folder or file that :func:`load_folder` reads."""

    path: Path
    is_own = True

    @property
    def title(self) -> str:
        return Path(os.path.abspath(self.path)).name

    def read(self, **options: Any) -> Folder:
        return folder.load_folder(self.path, **options)

    def open(self, **options: Any) -> Reader:
        return folder.open_folder(self.path, ReadOptions.of(**options))


class Known(Source):
    """A set by name, whose labels and edges leave no choice."""

    def read(self, **options: Any) -> Folder:
        return self.open(**options).read()

    def open(
        self,
        *,
        features: Features = None,
        label: Label = LABEL,
        dtype: torch.dtype = torch.float32,
        **edge_options: Any,
    ) -> Reader:
        check_dtype_and_edges(dtype, edge_options)
        for argument, default in (("undirected", False), ("coalesce", None), ("self_loops", None)):
            if (value := edge_options.get(argument, default)) is not default:
                self._refuse(argument, value, "whose edges are known; it is for folders of your own graphs")
        if label != LABEL:
            self._refuse("label", label, "which is no folder of your own; leave it out")
        if self.path is not None:
            downloads.check(self.path)
        return self._open(features, dtype)

    def _refuse(self, argument: str, value: object, why: str) -> NoReturn:
        raise impossible(argument, value, f"{self.name}, {why}")

    @abstractmethod
    def _open(self, features: Features, dtype: torch.dtype) -> Reader: ...


class BuiltIn(Known):
    """A generator, or the digits of scikit-learn."""

    def _open(self, features: Features, dtype: torch.dtype) -> Reader:
        if features is not None and not (self.name == STAND_IN and features == "degree"):
            self._refuse("features", features, "which has no labels or attributes" if self.name == STAND_IN else _FIXED)
        graphs = BUILT_IN[self.name](dtype=dtype)
        assert graphs.y is not None
        names, classes = (list(map(str, range(number))) for number in (len(graphs), int(graphs.y.max()) + 1))
        return Whole(Folder(graphs, names, classes, None, _ATTRIBUTES.get(self.name, 0)))


class TU(Known):
    """The text files of a TU set, in a folder or a zip."""

    path: Path

    def _open(self, features: Features, dtype: torch.dtype) -> Reader:
        files = tu.Files(self.path, self.name)
        files.require("A", "graph_indicator", "graph_labels")
        return tu.TUReader(files, ReadOptions(features=features, dtype=dtype), first_name=0)


class Nel(Known):
    """A ``.nel`` file among the data sets."""

    path: Path

    def _open(self, features: Features, dtype: torch.dtype) -> Reader:
        return Whole(nel.read(self.path, features=features, dtype=dtype))


class Ogb(Known):
    """The folder of one of OGB's molecule sets."""

    path: Path
    has_official_split = True

    def _open(self, features: Features, dtype: torch.dtype) -> Reader:
        if features is not None:
            self._refuse("features", features, _FIXED)
        return ogb.OgbReader(self.path, dtype)

    def smiles(self, graph: int) -> str | None:
        return ogb.smiles(self.path, graph)

    def _split(self, y: Tensor, seed: int) -> Split:
        return ogb.scaffold_split(self.path, len(y))


class Missing(Source):
    """A name under which nothing is found: it can be downloaded and, unless it is OGB's, split, but not read."""

    def downloaded(self) -> Source:
        if self.name.lower() == "cora":
            raise self.unknown()
        downloads.download(self.name, self.roots[-1])
        return _find(self.name, self.roots)

    def read(self, **options: Any) -> Folder:
        raise self.unknown()  # before its arguments: it may be the mistyped path of a folder

    def _split(self, y: Tensor, seed: int) -> Split:
        if ogb.owns(self.name):
            raise self.unknown()
        return super()._split(y, seed)

    def unknown(self) -> DatasetError:
        """The error that nothing of this name is found, with names that are close."""
        if self.name.lower() == "cora":
            return DatasetError(
                f"{self.name} is one graph whose nodes have labels, not a set of graphs: take datasets.cora()"
            )
        ogb.official(self.name)
        found = _found_in(self.roots)
        by_lower_case = {known.lower(): known for known in [*BUILT_IN, *found]}
        close = [by_lower_case[match] for match in difflib.get_close_matches(self.name.lower(), by_lower_case)]
        close += [f"{os.curdir}{os.sep}{self.name}"] if self.name and Path(self.name).expanduser().is_file() else []
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        places = " and ".join(f"{place}{'' if place.is_dir() else ' (which is no folder)'}" for place in self.roots)
        files = f"{self.name}.nel, {self.name}.zip, {self.name}/ and {self.name}/raw/"
        return DatasetError(
            f"unknown data set {self.name!r}{hint} "
            f"Built in: {', '.join(BUILT_IN)}. Found in {places}: {', '.join(found) or 'nothing'} "
            f"(looked for {f'ogbg_{self.name[5:]}/' if ogb.owns(self.name) else files}). Download it by ",
            Argument("download", True),
            ", put its files there, or name their folder by ",
            Argument("root"),
            " or SPIN_FAST_DATA.",
        )


def _locate(name: str, roots: tuple[Path, ...]) -> Source | None:
    for root in roots:
        for module, kind in ((ogb, Ogb), (nel, Nel), (tu, TU)):
            if (path := module.locate(name, root)) is not None:
                return kind(name, roots, path)
    return None


def _find(name: str | Path, roots: tuple[Path, ...]) -> Source:
    path = Path(name).expanduser()
    if isinstance(name, Path) or "/" in name or os.sep in name or name in (os.curdir, os.pardir):
        return OwnGraphs(str(name), roots, path)
    if name in BUILT_IN and name != STAND_IN:
        return BuiltIn(name, roots)
    if not ogb.owns(name):
        for root in roots:
            if folder.holds_graphs(root / name):
                return OwnGraphs(name, roots, root / name)
        if path.suffix in (".nel", ".parquet"):
            for place in (*roots, Path()):
                if (file := place / name).is_file():
                    return OwnGraphs(name, roots, file)
    found = _locate(name, roots)
    if found is not None and not (isinstance(found, TU) and name.lower() == "cora"):
        return found
    if name == STAND_IN:
        return BuiltIn(name, roots)
    if found is None and name and path.is_dir() and not ogb.owns(name):
        return OwnGraphs(name, roots, path)
    return Missing(name, roots)


def _found_in(roots: tuple[Path, ...]) -> list[str]:
    found = {name for root in roots for source in (ogb, nel, tu, folder) for name in source.names(root)}
    return sorted(found - BUILT_IN.keys())
