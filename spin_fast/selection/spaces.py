"""Spaces of settings to select from: the paper's, one of the whole family, or that of a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .._common import check
from .recipe import Recipe
from .subtree import SubtreeRecipe
from .training_set import Settings
from .trials import rounds

Space = Mapping[str, Sequence[Any]]  # values of each parameter of a Recipe

WHOLE = 128  # a batch of at least all training graphs of a brain set

# Of the paper's table of hyperparameters: batch size, R, width of a branch, learning rate, L2.
_PAPER: dict[str, tuple[list[int], list[int], list[int], float, float]] = {
    "DD": ([16, 32], [2, 3, 4], [16, 32, 64], 5e-3, 0.0),
    "NCI1": ([64, 128], [1, 2], [16, 32], 1e-3, 0.0),
    "PROTEINS": ([16, 32, 64], [2, 3], [8, 16], 1e-3, 0.0),
    "ENZYMES": ([8, 16, 32], [2, 3], [8, 16], 1e-3, 1e-3),
    "ogbg-molhiv": ([32, 64, 128], [2, 3], [16, 32, 64, 128], 1e-4, 0.0),
    "IMDB-BINARY": ([16, 32], [2, 3, 4], [8, 16, 32], 5e-3, 0.0),
    "IMDB-MULTI": ([16, 32, 64], [2, 3, 4], [8, 16, 32], 5e-3, 0.0),
    "REDDIT-BINARY": ([32, 64, 128], [3, 4], [8, 16], 5e-3, 0.0),
    "REDDIT-MULTI-5K": ([64, 128], [3, 4], [8, 16], 5e-3, 0.0),
    "COLLAB": ([32, 64, 128], [2, 3, 4], [8, 16, 32, 64], 5e-3, 5e-4),
    "OHSU": ([8, 16, WHOLE], [8, 16], [8, 16, 32], 5e-3, 5e-4),
    "Peking_1": ([8, 16, WHOLE], [4, 8, 16], [8, 16], 5e-3, 5e-4),
}


def paper(dataset: str, readout: Literal["attention", "sum"]) -> Space:
    """The settings of the paper's SPIN-att or SPIN-non-att for one of its data sets (its table of hyperparameters).

    The paper leaves open the number of epochs (here 300), the patience (50), dropout and BatchNorm (none).

    Raises:
        ValueError: the paper has no such data set.
    """
    if dataset not in _PAPER:
        raise ValueError(f"the paper has settings for {', '.join(_PAPER)}, not for {dataset}")
    batch_size, num_hops, hidden_features, learning_rate, weight_decay = _PAPER[dataset]
    return {
        "batch_size": batch_size,
        "num_hops": num_hops,
        "hidden_features": hidden_features,
        "learning_rate": [learning_rate],
        "weight_decay": [weight_decay],
        "branches": ["hops"],
        "readout": [readout],
        "calibrate": [False],
        "schedule": ["constant"],
        "epochs": [300],
        "patience": [50],
    }


def family(one_hot: bool = False) -> Space:
    """Settings for any data set: node features, operators, hops, branches, readout, width, and those of training.

    Dropout is not among them: each node then has a row of its own, and a step is not one operation.

    Args:
        one_hot: encode integer columns that are categories, such as OGB's of atoms.
    """
    return {
        "degree": [None, "log", "profile"],
        "one_hot": [one_hot],
        "operator": ["sym", "adj", "sym+adj", "sym,adj"],
        "num_hops": [0, 1, 2, 3, 4],
        "branches": ["hops", "joint", "both"],
        "readout": ["sum", "attention"],
        "hidden_features": [16, 32, 64],
        "batch_size": [32, 128],
        "learning_rate": [1e-3, 3e-3, 1e-2],
        "weight_decay": [0.0, 1e-4, 1e-3],
        "epochs": [100],
        "patience": [30],
    }


def candidates(number: int = 64, *, one_hot: bool = False, seed: int = 0) -> list[Recipe | SubtreeRecipe]:
    """What a search without a space of its own selects from.

    The default recipe comes first, then linear models of subtree counts, then recipes drawn from :func:`family`; fewer
    than six are drawn alone.
    """
    known: list[Recipe | SubtreeRecipe] = [Recipe(one_hot=one_hot)]
    known += [SubtreeRecipe(num_hops=hops) for hops in (1, 2, 3, 5)]
    if check.integer("number", number, 1) <= len(known):
        return [*draw(family(one_hot), number, seed=seed)]
    return known + draw(family(one_hot), number - len(known), seed=seed)


def budgets(of: Sequence[Settings]) -> tuple[int | None, ...]:
    """Numbers of epochs for a search among settings by successive halving: a ninth of theirs, a third, and all."""
    epochs = max(epochs_of(settings) for settings in of)
    return (max(epochs // 9, 1), max(epochs // 3, 1), None) if len(of) > 1 else (None,)


def search_epochs(settings: Sequence[Settings], budgets: Sequence[int | None]) -> int:
    """At most how many epochs a search takes, by which its progress is shown."""
    if len(settings) == 1:
        return 0
    epochs = max(map(epochs_of, settings))
    numbers = rounds(len(settings), len(budgets))
    return sum(number * (budget or epochs) for number, budget in zip(numbers, budgets, strict=True))


def epochs_of(settings: Settings, budget: int | None = None) -> int:
    """At most how many epochs training takes; 1 of settings that have none."""
    epochs: int = getattr(settings, "epochs", 1)
    return epochs if budget is None else min(epochs, budget)


def read(path: str | Path) -> Space:
    """Read a space from a JSON file such as ``{"num_hops": [2, 3], "hidden_features": [16, 32]}``.

    Raises:
        FileNotFoundError: no such file. ValueError: it is not a space of parameters of a :class:`Recipe`; names it.
    """
    try:
        space = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise type(error)(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
    names = {field.name for field in dataclasses.fields(Recipe)}
    if not isinstance(space, dict) or not all(isinstance(values, list) and values for values in space.values()):
        raise ValueError(f'{path} must have a list of values per parameter, such as {{"num_hops": [2, 3]}}')
    if unknown := [name for name in space if name not in names]:
        raise ValueError(f"{path} has {unknown[0]!r}, which is no parameter of a recipe: {', '.join(sorted(names))}")
    return space


def draw(space: Space, number: int | None = None, *, seed: int = 0) -> list[Recipe]:
    """The recipes of a space: all, or ``number`` of them, drawn at random without repetition.

    Raises:
        TypeError, ValueError: an argument that is wrong.
    """
    from sklearn.model_selection import ParameterGrid, ParameterSampler

    grid = ParameterGrid({name: list(values) for name, values in space.items()})
    if number is None or check.integer("number", number, 1) >= len(grid):
        return [Recipe(**settings) for settings in grid]
    random_state = check.integer("seed", seed, 0, bits=32)  # as of numpy's RandomState
    return [Recipe(**settings) for settings in ParameterSampler(grid.param_grid, number, random_state=random_state)]
