"""Data sets by name: raw files, or a generator, to a ``GraphBatch``.

Built in, without files: ``digits`` (the default), ``erdos-renyi``, ``random-regular``, ``power-law``.
From files under a folder, by default the environment variable ``SPIN_FAST_DATA`` or else ``data``: TU sets
(``NAME.zip``, ``NAME/``, ``NAME/raw/``), ``NAME.nel``, and OGB's molecules (``ogbg_molhiv/``). Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _check
from ..graphs import GraphBatch
from . import citation, digits, nel, ogb, tu
from ._common import DatasetError
from .citation import NodeDataset
from .ogb import evaluator
from .synthetic import erdos_renyi, power_law, random_regular

__all__ = [
    "DatasetError",
    "NodeDataset",
    "Split",
    "cora",
    "erdos_renyi",
    "evaluator",
    "load",
    "metric",
    "names",
    "power_law",
    "random_regular",
    "split",
]

BUILT_IN: dict[str, Callable[..., GraphBatch]] = {
    "digits": digits.load,
    "erdos-renyi": partial(erdos_renyi, p=(0.05, 0.1)),
    "random-regular": partial(random_regular, degree=(3, 4)),
    "power-law": partial(power_law, num_graphs=1000, num_nodes=100, mean_degree=6.0, exponent=(2.3, 4.0)),
}


class Split(NamedTuple):
    """Numbers of the graphs to train on, to select by, and to report on: three int64 vectors without overlap."""

    train: Tensor
    validation: Tensor
    test: Tensor


def load(
    name: str = "digits",
    root: str | Path | None = None,
    *,
    features: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> GraphBatch:
    """Load a data set.

    Args:
        name: a built-in set, or what the files under ``root`` are called; a ``.nel`` file goes before a zip.
        root: the folder of the files; None for ``$SPIN_FAST_DATA``, else ``data``.
        features: of TU and ``.nel`` sets: ``"label"``, ``"attribute"``, ``"attribute+label"``, ``"degree"``, or None
            for the paper's choice.
        dtype: float32 or float64, of the features.

    Returns:
        The graphs with features ``x`` ``[N, d]`` and labels ``y``: int64 ``[G]`` in ``0..C-1``, or for OGB sets with
        several tasks or missing labels ``[G, T]`` of ``dtype`` with NaN for missing.

    Raises:
        DatasetError: there is no such set, or its files are wrong; one line that says which and what to do.
    """
    root = _root(root)
    fixed = f"features={features!r} is impossible for {name}, whose features are fixed; leave features out"
    if name in BUILT_IN:
        if features is not None:
            raise DatasetError(fixed)
        return BUILT_IN[name](dtype=dtype)
    if (path := ogb.locate(name, root)) is not None:
        if features is not None:
            raise DatasetError(fixed)
        return ogb.load(path, dtype=dtype)
    if (path := nel.locate(name, root)) is not None:
        return nel.load(path, name, features=features, dtype=dtype)
    if (path := tu.locate(name, root)) is not None:
        return tu.load(path, name, features=features, dtype=dtype)
    raise _unknown(name, root)


def split(name: str, y: Tensor, root: str | Path | None = None, *, seed: int = 0) -> Split:
    """Divide the graphs of a set into training, validation and test.

    OGB sets have an official scaffold split, whatever the seed. All others are drawn 80/10/10, stratified by class.

    Args:
        name: the set.
        y: its labels, first axis ``G``; int64 ``[G]`` where the split is drawn.
        root: as for ``load``.
        seed: of the draw.

    Returns:
        Ascending graph numbers that together are ``0..G-1`` (an official split keeps its own order).

    Raises:
        DatasetError: the official split is missing or of another size, or a class is too small to be divided.
    """
    if ogb.owns(name):
        path = ogb.locate(name, _root(root))
        if path is None:
            raise _unknown(name, _root(root))
        return Split(*ogb.scaffold_split(path, len(y)))
    if y.dim() != 1 or y.dtype.is_floating_point:
        raise DatasetError(f"{name} has no official split and y, {y.dtype} {list(y.shape)}, is not one class per graph")
    classes, sizes = np.unique(y.numpy(), return_counts=True)
    if len(y) == 0 or sizes.min() < 10:
        small = f"class {classes[sizes.argmin()]} has {sizes.min()}" if len(y) else "there are none"
        raise DatasetError(f"{name} cannot be split 80/10/10: it takes 10 graphs per class, {small}; split it by hand")
    from sklearn.model_selection import train_test_split

    _check.integer("seed", seed, 0)
    part = partial(train_test_split, random_state=seed)
    train, held = part(np.arange(len(y)), test_size=0.2, stratify=y.numpy())
    validation, test = part(held, test_size=0.5, stratify=y.numpy()[held])
    return Split(*(torch.from_numpy(np.sort(ids)) for ids in (train, validation, test)))


def cora(root: str | Path | None = None, *, normalize: bool = False, dtype: torch.dtype = torch.float32) -> NodeDataset:
    """Load Cora: 2,708 papers that cite each other, 7 classes, 1,433 words of which a paper has some.

    ``Cora.zip`` or ``Cora/`` under ``root`` must hold ``edges.csv`` (each edge once), ``labels.csv``, ``features.txt``
    (a line of word numbers per paper) and ``split_train.csv``, ``split_valid.csv``, ``split_test.csv``, the public
    split of Planetoid: 20 papers per class, 500, and 1,000; nodes and words are numbered from 0. From PyG's
    ``Planetoid`` the same comes by ``GraphBatch.from_pyg(data, y=None)`` and ``data.y``.

    Args:
        root: the folder of the files; None for ``$SPIN_FAST_DATA``, else ``data``.
        normalize: divide the rows of ``x`` by their sums, as PyG's ``NormalizeFeatures`` does.
        dtype: float32 or float64, of ``x``.

    Returns:
        One graph with ``x [2708, 1433]`` of 0 and 1 and both arcs of each edge, the classes of its nodes, the split.

    Raises:
        DatasetError: no such files, or wrong ones; one line that says which.
    """
    path = citation.locate(_root(root))
    if path is None:
        raise DatasetError(f"Cora needs Cora.zip or Cora/ in {_root(root)}; put it there, or name its folder by root")
    return citation.load(path, normalize=normalize, dtype=dtype)


def metric(name: str) -> str:
    """How a set is scored: ``"rocauc"`` for ogbg-molhiv (other OGB sets: what OGB says), ``"accuracy"`` otherwise."""
    return ogb.metric(name) if ogb.owns(name) else "accuracy"


def names(root: str | Path | None = None) -> list[str]:
    """The names that ``load`` knows: the built-in sets, then those found under ``root``."""
    folder = _root(root)
    found = {*ogb.names(folder), *nel.names(folder), *tu.names(folder)}
    return [*BUILT_IN, *sorted(found - BUILT_IN.keys())]


def _root(root: str | Path | None) -> Path:
    return Path(os.environ.get("SPIN_FAST_DATA", "data") if root is None else root).expanduser()


def _unknown(name: str, root: Path) -> DatasetError:
    found = names(root)[len(BUILT_IN) :]
    by_lower_case = {known.lower(): known for known in [*BUILT_IN, *found]}
    close = [by_lower_case[match] for match in difflib.get_close_matches(name.lower(), by_lower_case)]
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    absent = "" if root.is_dir() else ", which is no folder"
    looked = f"ogbg_{name[5:]}/" if ogb.owns(name) else f"{name}.nel, {name}.zip, {name}/ and {name}/raw/"
    return DatasetError(
        f"unknown data set {name!r}{hint} "
        f"Built in: {', '.join(BUILT_IN)}. Found in {root}{absent}: {', '.join(found) or 'nothing'} "
        f"(looked for {looked}). Put the files there, or name their folder by root or SPIN_FAST_DATA."
    )
