"""Splits into training, validation and test graphs: drawn, in folds, or published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._common import check
from .._common.check import Argument
from .._common.indexing import as_tensor
from .common import DatasetError, reading

SEED_BITS = 32  # of numpy's RandomState
# The same graphs in the same order under two names; folds are published under the second.
_SAME_GRAPHS = {"PROTEINS": "PROTEINS_full"}


class NoPublishedSplits(DatasetError):
    """There is no file of the folds of a data set where it is looked for."""


class Split(NamedTuple):
    """Graph numbers for training, validation and test: three int64 vectors without overlap."""

    train: Tensor
    validation: Tensor
    test: Tensor

    def __repr__(self) -> str:
        return f"Split({', '.join(f'{name}={len(ids)} ids' for name, ids in self._asdict().items())})"


def draw(name: str, y: Tensor, seed: int) -> Split:
    """Ascending graph numbers, 80/10/10, stratified by class, or by whether any task's label is known, and is 1."""
    labels = (
        _strata(name, y) if y.is_floating_point() and y.dim() == 2 else _classes(f"{name} has no official split", y)
    )
    classes, sizes = np.unique(labels, return_counts=True)
    if len(y) == 0 or sizes.min() < 10:
        small = f"class {classes[sizes.argmin()]} has {sizes.min()}" if len(y) else "there are none"
        raise DatasetError(
            f"{name} cannot be split 80/10/10: it takes 10 graphs per class, {small}; name a file of your own by ",
            Argument("splits"),
            f", {_SINGLE}",
        )
    from sklearn.model_selection import train_test_split

    part = partial(train_test_split, random_state=check.integer("seed", seed, 0, bits=SEED_BITS))
    train, held = part(np.arange(len(y)), test_size=0.2, stratify=labels)
    validation, test = part(held, test_size=0.5, stratify=labels[held])
    return _ascending(train, validation, test)


def stratified_folds(y: Tensor, num_folds: int = 10, *, seed: int = 0, validation: float = 0.1) -> list[Split]:
    """Draw the splits of a cross-validation: each graph is tested in one fold.

    Of the graphs of a fold that are not tested, some are held out for validation. All parts are stratified by class.

    Args:
        y: int64 ``[G]``, one class per graph.
        num_folds: at least 2; each class needs as many graphs.
        seed: of the draw.
        validation: the fraction of the remaining graphs for validation, between 0 and 1.

    Returns:
        One split per fold, ascending graph numbers that together are ``0..G-1``.

    Raises:
        DatasetError: a class is too small. TypeError, ValueError: an argument is out of range; named.
    """
    from sklearn.model_selection import StratifiedKFold, train_test_split

    check.integer("num_folds", num_folds, 2)
    check.integer("seed", seed, 0, bits=SEED_BITS)
    y = as_tensor(y)
    if not 0 < check.number("validation", validation, 0) < 1:
        raise ValueError(f"validation must be a share between 0 and 1, got {validation!r}")
    labels = _classes("folds are drawn by class", y)
    classes, sizes = np.unique(labels, return_counts=True)
    if len(y) == 0 or sizes.min() < num_folds:
        small = f"class {classes[sizes.argmin()]} has {sizes.min()}" if len(y) else "there are none"
        raise DatasetError(f"y cannot be cut into {num_folds} folds: it takes as many graphs per class, {small}")
    folds = StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(labels, labels)
    splits = []
    for rest, test in folds:
        try:
            train, held = train_test_split(rest, test_size=validation, random_state=seed, stratify=labels[rest])
        except ValueError as error:  # a part with fewer graphs than classes
            raise DatasetError(f"a share of {validation} of {len(rest)} graphs cannot be held out ({error})") from error
        splits.append(_ascending(train, held, test))
    return splits


def read(path: str | Path, num_graphs: int) -> list[Split]:
    """Read the folds of a JSON file as Errica et al. (2020) publish them for a fair comparison, or a single split.

    It is a list with ``{"test": [...], "model_selection": [{"train": [...], "validation": [...]}]}`` for each fold,
    graph numbers from 0; ``{"train": [...], "validation": [...], "test": [...]}`` is the same in short. Each of several
    folds divides ``num_graphs`` graphs, and their test parts together cover them; one alone may leave graphs out.
    """
    with reading(str(path)):
        folds = json.loads(Path(path).read_bytes())
    if isinstance(folds, dict) and folds:
        folds = [folds]
    if not isinstance(folds, list) or not folds:
        raise DatasetError(f"{path} must hold a list of folds or a single split, {_SINGLE}, got {_kind(folds)}")
    splits = []
    for number, fold in enumerate(folds):
        inner = fold.get("model_selection", [fold]) if isinstance(fold, dict) else None
        if not isinstance(inner, list) or len(inner) != 1 or not isinstance(inner[0], dict):
            raise DatasetError(
                f"{path}, fold {number} must have 'test' and, under 'model_selection', one pair of 'train' and "
                f"'validation', got {_kind(fold)}"
            )
        where = f"{path}, fold {number}" if len(folds) > 1 else str(path)
        parts = {key: _numbers(of.get(key), f"{where}, {key}") for of in (inner[0], fold) for key in of if key in _KEYS}
        if missing := [key for key in _KEYS if key not in parts]:
            raise DatasetError(f"{where} must have {' and '.join(map(repr, missing))}, got {_kind(fold)}")
        _check_parts(parts, num_graphs, where, every=len(folds) > 1)
        splits.append(Split(*(torch.from_numpy(parts[key]) for key in _KEYS)))
    tested = np.concatenate([split.test.numpy() for split in splits])
    if len(splits) > 1 and (len(tested) != num_graphs or len(np.unique(tested)) != num_graphs):
        raise DatasetError(
            f"{path} must test each of the {num_graphs} graphs in one fold, got {len(tested)} entries, "
            f"{len(np.unique(tested))} of them different; is it the file of another set?"
        )
    return splits


def locate(name: str, folders: Sequence[Path], splits: str | Path | None) -> Path:
    """The file of the folds of the set ``name``: ``splits``, or in it if it is a folder, or in ``FOLDER/splits``."""
    given = None if splits is None else Path(splits).expanduser()
    if given is not None and not given.exists():
        raise DatasetError(
            Argument("splits"), f" must be a file of folds, or a folder of such files; {given} does not exist"
        )
    if given is not None and not given.is_dir():
        return given
    places = [given] if given is not None else [folder / "splits" for folder in folders]
    names = [known for known in (name, _SAME_GRAPHS.get(name)) if known is not None]
    tried = [place / f"{known}_splits.json" for place in places for known in names]
    for path in tried:
        if path.is_file():
            return path
    raise NoPublishedSplits(
        f"there are no published folds of {name} at {' or '.join(map(str, tried))}; name the file or its folder by ",
        Argument("splits"),
    )


_KEYS = ("train", "validation", "test")
_SINGLE = '{"train": [...], "validation": [...], "test": [...]} with graph numbers from 0'


def _ascending(*parts: np.ndarray) -> Split:
    return Split(*(torch.from_numpy(np.sort(ids)) for ids in parts))


def _strata(name: str, y: Tensor) -> np.ndarray:
    """The stratum of each graph: no task is known (0), no known task is 1 (1), or some are (2).

    Kinds that have too few graphs to be divided are joined.
    """
    known = (~y.isnan().all(1)).long()
    if known.sum() < 10:
        raise DatasetError(f"{name} cannot be split 80/10/10: it takes 10 graphs with labels, got {known.sum()}")
    strata = known + (y == 1).any(1)
    if min((strata == kind).sum() for kind in (1, 2)) < 10:
        strata = known
    if (strata == 0).sum() < 10:
        strata = strata.clamp(min=1)
    return strata.cpu().numpy()


def _classes(reason: str, y: Tensor) -> np.ndarray:
    if y.dim() != 1 or y.dtype.is_floating_point:
        raise DatasetError(f"{reason} and y, {y.dtype} {list(y.shape)}, is not one class per graph")
    return y.cpu().numpy()


def _numbers(ids: Any, where: str) -> np.ndarray:
    values = ids if isinstance(ids, list) else [ids]
    wrong = [value for value in values if type(value) is not int or value.bit_length() > 63]
    if wrong or not isinstance(ids, list):
        raise DatasetError(f"{where} must be a list of graph numbers, got {_kind(wrong[0] if wrong else ids)}")
    return np.array(values, dtype=np.int64)


def _check_parts(parts: dict[str, np.ndarray], num_graphs: int, where: str, *, every: bool) -> None:
    """Check that no part is empty and no number repeated and, if ``every``, that together they are all numbers."""
    for key in _KEYS:
        ids = parts[key]
        if len(ids) == 0:
            raise DatasetError(f"{where} has an empty part {key!r}; correct it")
        if ids.min() < 0 or ids.max() >= num_graphs:
            bad = ids[(ids < 0) | (ids >= num_graphs)][0]
            raise DatasetError(
                f"{where}, {key} names graph {bad}, but there are the graphs 0..{num_graphs - 1}; "
                "is it the file of another set?"
            )
    found, times = np.unique(np.concatenate([parts[key] for key in _KEYS]), return_counts=True)
    if times.max() > 1:
        graph = found[times.argmax()]
        twice = [key for key in _KEYS for _ in range(int((parts[key] == graph).sum()))]
        raise DatasetError(f"{where} names graph {graph} in {' and in '.join(twice)}; correct it")
    if every and len(found) != num_graphs:
        left = np.setdiff1d(np.arange(num_graphs), found)
        raise DatasetError(
            f"{where} leaves out {len(left)} of {num_graphs} graphs, the first of them {left[0]}; "
            "is it the file of another set?"
        )


def _kind(value: Any) -> str:
    text = json.dumps(value) if value is not None else "nothing"
    return text if len(text) <= 40 else f"{text[:37]}..."
