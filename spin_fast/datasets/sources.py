"""Where a data set comes from: one's own folder, a TU, ``.nel`` or OGB set in files, a generator, or nowhere."""

from __future__ import annotations

import difflib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from .._common import check
from .._common.check import Argument
from ..graphs.batch import GraphBatch
from . import digits, downloads, folder, nel, ogb, tu
from . import splits as _splits
from .columns import LABEL, Features, Label
from .common import DatasetError, Folder
from .splits import Split
from .synthetic import csl, erdos_renyi, power_law, random_regular

BUILT_IN: dict[str, Callable[..., GraphBatch]] = {
    "digits": digits.load,
    "erdos-renyi": partial(erdos_renyi, p=(0.05, 0.1)),
    "random-regular": partial(random_regular, degree=(3, 4)),
    "power-law": partial(power_law, num_graphs=1000, num_nodes=100, mean_degree=6.0, exponent=(2.3, 4.0)),
}
STAND_INS: dict[str, Callable[..., GraphBatch]] = {"CSL": csl}  # where there are no files of that name
_ATTRIBUTES = {"digits": 3, "erdos-renyi": 50}  # columns of x that are measured numbers; of others none
_FIXED = "whose features are fixed; leave them out"


@dataclass(frozen=True)
class Source(ABC):
    """A data set as :func:`find` has found it: what it is, where it is, and how it is read.

    The functions of this module that take a name are methods of it.

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
        """See :func:`spin_fast.datasets.metric`."""
        return "accuracy"

    def downloaded(self) -> Source:
        """The set itself, got from its official site if it is not there yet."""
        return self

    @abstractmethod
    def read(self, **options: Any) -> Folder:
        """See :func:`spin_fast.datasets.read`."""

    @abstractmethod
    def num_node_attributes(self, features: Features = None) -> int:
        """See :func:`spin_fast.datasets.num_node_attributes`."""

    def split(self, y: Tensor, *, seed: int = 0, splits: str | Path | None = None, fold: int | None = None) -> Split:
        """See :func:`spin_fast.datasets.split`."""
        if splits is None and fold is None:
            return self._split(y, seed)
        folds = self.published_splits(len(y), splits=splits)
        if check.integer("fold", 0 if fold is None else fold, 0) >= len(folds):
            raise check.ArgumentValueError("fold", f"be below {len(folds)}, the number of folds of {self.name}", fold)
        return folds[fold or 0]

    def _split(self, y: Tensor, seed: int) -> Split:
        return _splits.draw(self.name, y, seed)

    def published_splits(self, num_graphs: int, *, splits: str | Path | None = None) -> list[Split]:
        """See :func:`spin_fast.datasets.published_splits`."""
        check.integer("num_graphs", num_graphs, 1)
        return _splits.read(_splits.locate(self.title, self._places_of_splits(), splits), num_graphs)

    def _places_of_splits(self) -> tuple[Path, ...]:
        return self.roots


class OwnGraphs(Source):
    """A folder or file that :func:`load_folder` reads."""

    path: Path
    is_own = True

    @property
    def title(self) -> str:
        return Path(os.path.abspath(self.path)).name

    def read(self, **options: Any) -> Folder:
        return folder.load_folder(self.path, **options)

    def num_node_attributes(self, features: Features = None) -> int:
        return self.read(features=features, label=None).num_attributes

    def _places_of_splits(self) -> tuple[Path, ...]:
        return (self.path.parent,)  # the set of that name is another one


class Known(Source):
    """A set by name, whose labels and edges leave no choice."""

    def read(
        self,
        *,
        features: Features = None,
        label: Label = LABEL,
        dtype: torch.dtype = torch.float32,
        **edge_options: Any,
    ) -> Folder:
        folder.check_dtype_and_edges(dtype, edge_options)
        for argument, default in (("undirected", False), ("coalesce", None), ("self_loops", None)):
            if (value := edge_options.get(argument, default)) is not default:
                self._refuse(argument, value, "whose edges are known; it is for folders of your own graphs")
        if label != LABEL:
            self._refuse("label", label, "which is no folder of your own; leave it out")
        if self.path is not None:
            downloads.check(self.path)
        return self._read(features, dtype)

    def _refuse(self, argument: str, value: object, why: str) -> NoReturn:
        raise DatasetError(Argument(argument, value), f" is impossible for {self.name}, {why}", argument=argument)

    @abstractmethod
    def _read(self, features: Features, dtype: torch.dtype) -> Folder: ...

    def num_node_attributes(self, features: Features = None) -> int:
        return 0


class BuiltIn(Known):
    """A generator, or the digits of scikit-learn."""

    def _read(self, features: Features, dtype: torch.dtype) -> Folder:
        if self.name in STAND_INS:
            if features not in (None, "degree"):
                self._refuse("features", features, "which has no labels or attributes")
            return _numbered(STAND_INS[self.name](dtype=dtype), 0)
        if features is not None:
            self._refuse("features", features, _FIXED)
        return _numbered(BUILT_IN[self.name](dtype=dtype), self.num_node_attributes())

    def num_node_attributes(self, features: Features = None) -> int:
        return _ATTRIBUTES.get(self.name, 0)


class TU(Known):
    """The text files of a TU set, in a folder or a zip."""

    path: Path

    def _read(self, features: Features, dtype: torch.dtype) -> Folder:
        files = tu.Files(self.path, self.name)
        files.require("A", "graph_indicator", "graph_labels")
        read = tu.read(files, features=features, dtype=dtype)
        return read._replace(names=list(map(str, range(len(read.graphs)))))

    def num_node_attributes(self, features: Features = None) -> int:
        return tu.num_attributes(self.path, self.name, features=features)


class Nel(Known):
    """A ``.nel`` file among the data sets."""

    path: Path

    def _read(self, features: Features, dtype: torch.dtype) -> Folder:
        return nel.read(self.path, self.name, features=features, dtype=dtype)


class Ogb(Known):
    """The folder of one of OGB's molecule sets."""

    path: Path
    has_official_split = True

    @property
    def metric(self) -> str:
        return ogb.metric(self.name)

    def _read(self, features: Features, dtype: torch.dtype) -> Folder:
        if features is not None:
            self._refuse("features", features, _FIXED)
        return _numbered(ogb.load(self.path, dtype=dtype), 0)

    def _split(self, y: Tensor, seed: int) -> Split:
        return Split(*ogb.scaffold_split(self.path, len(y)))


class Missing(Source):
    """A name under which nothing is found: it can be downloaded and, unless it is OGB's, split, but not read."""

    @property
    def metric(self) -> str:
        return ogb.metric(self.name) if ogb.owns(self.name) else super().metric

    def downloaded(self) -> Source:
        if self.name.lower() == "cora":
            raise self.unknown()
        downloads.download(self.name, self.roots[-1])
        return find(self.name, self.roots)

    def read(self, **options: Any) -> Folder:
        raise self.unknown()  # before its arguments: it may be the mistyped path of a folder

    def num_node_attributes(self, features: Features = None) -> int:
        raise self.unknown()

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
        ogb.refuse_others(self.name)
        built_in = [*BUILT_IN, *STAND_INS]
        found = found_in(self.roots)
        by_lower_case = {known.lower(): known for known in [*built_in, *found]}
        close = [by_lower_case[match] for match in difflib.get_close_matches(self.name.lower(), by_lower_case)]
        close += [f"{os.curdir}{os.sep}{self.name}"] if self.name and Path(self.name).expanduser().is_file() else []
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        places = " and ".join(f"{place}{'' if place.is_dir() else ' (which is no folder)'}" for place in self.roots)
        files = f"{self.name}.nel, {self.name}.zip, {self.name}/ and {self.name}/raw/"
        return DatasetError(
            f"unknown data set {self.name!r}{hint} "
            f"Built in: {', '.join(built_in)}. Found in {places}: {', '.join(found) or 'nothing'} "
            f"(looked for {f'ogbg_{self.name[5:]}/' if ogb.owns(self.name) else files}). Download it by ",
            Argument("download", True),
            ", put its files there, or name their folder by ",
            Argument("root"),
            " or SPIN_FAST_DATA.",
        )


def locate(name: str, roots: tuple[Path, ...]) -> Source | None:
    """The set of that name in files, or None."""
    for root in roots:
        for module, kind in ((ogb, Ogb), (nel, Nel), (tu, TU)):
            if (path := module.locate(name, root)) is not None:
                return kind(name, roots, path)
    return None


def find(name: str | Path, roots: tuple[Path, ...]) -> Source:
    """What :func:`spin_fast.datasets.load` takes a name for."""
    path = Path(name).expanduser()
    if isinstance(name, Path) or "/" in name or os.sep in name or name in (os.curdir, os.pardir):
        return OwnGraphs(str(name), roots, path)
    if name in BUILT_IN:
        return BuiltIn(name, roots)
    if not ogb.owns(name):
        for root in roots:
            if folder.holds_graphs(root / name):
                return OwnGraphs(name, roots, root / name)
        if path.suffix == ".nel":
            for place in (*roots, Path()):
                if (file := place / name).is_file():
                    return OwnGraphs(name, roots, file)
    found = locate(name, roots)
    if found is not None and not (isinstance(found, TU) and name.lower() == "cora"):
        return found
    if name in STAND_INS:
        return BuiltIn(name, roots)
    if found is None and name and path.is_dir() and not ogb.owns(name):
        return OwnGraphs(name, roots, path)
    return Missing(name, roots)


def found_in(roots: tuple[Path, ...]) -> list[str]:
    """The names of sets in files."""
    found = {name for root in roots for source in (ogb, nel, tu, folder) for name in source.names(root)}
    return sorted(found - {*BUILT_IN, *STAND_INS})


def _numbered(graphs: GraphBatch, num_attributes: int) -> Folder:
    """Graphs whose files have no names for them, nor for their classes."""
    y = graphs.y
    classes = None if y is None or y.is_floating_point() else list(map(str, range(int(y.max()) + 1)))
    return Folder(graphs, list(map(str, range(len(graphs)))), classes, None, num_attributes)
