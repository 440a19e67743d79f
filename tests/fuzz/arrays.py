"""Graphs and other arguments drawn at random, and damage to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Random = np.random.Generator
EXTREMES = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**62, 2**63 - 1)


class Arrays(NamedTuple):
    """Graphs as a block-diagonal CSR adjacency."""

    ptr: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1


def chance(random: Random, probability: float) -> bool:
    return bool(random.random() < probability)


def graphs(random: Random, most: int = 6) -> Arrays:
    """Some graphs: empty ones, isolated nodes, repeated edges, self-loops, hubs, rows in any order."""
    sizes = random.choice([0, 1, 2, 3, 9, 33, 70], size=random.integers(0, most + 1))
    ptr = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
    rows: list[np.ndarray] = []
    for first, size in zip(ptr[:-1], sizes, strict=True):
        degree = random.choice([0, 1, 2, 4, 20]) * random.random()
        for _ in range(size):
            number = random.poisson(degree) if not chance(random, 0.02) else 3 * size
            row = random.integers(first, first + size, number)
            rows.append(np.sort(row) if chance(random, 0.5) else row)
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Arrays(ptr, indptr, np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64))


def tensor(random: Random, values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A tensor of the values, sometimes one whose memory has gaps or another order."""
    made = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    how = random.integers(0, 6)
    if how == 0 and made.dim() == 1:
        spread = torch.full((2 * len(made),), 99).to(dtype)
        spread[::2] = made
        return spread[::2]
    if how == 1 and made.dim() > 1:
        return made.transpose(0, -1).contiguous().transpose(0, -1)
    return made


def values(random: Random, *shape: int) -> np.ndarray:
    """Numbers as features have them: normal, small integers, or with zeros."""
    kind = random.integers(0, 4)
    if kind == 0:
        return random.integers(-2, 3, shape).astype(np.float64)
    made = random.standard_normal(shape) * 10.0 ** random.integers(-3, 3)
    return made * (random.random(shape) < 0.3) if kind == 1 else made


def damaged(random: Random, array: np.ndarray) -> np.ndarray:
    """The array with one entry that may be wrong, or one less."""
    if len(array) == 0:
        return array
    if chance(random, 0.15):
        return array[:-1]
    array, at = array.copy(), random.integers(0, len(array))
    array[at] = random.choice(EXTREMES) if chance(random, 0.5) else array[at] + random.integers(-3, 4)
    return array


def fits(array: np.ndarray, dtype: torch.dtype) -> bool:
    info = torch.iinfo(dtype)
    return bool(((array >= info.min) & (array <= info.max)).all())


Change = Callable[[Tensor], Any]
BAD: tuple[Change, ...] = (
    lambda value: value.tolist(),
    lambda value: value.to(torch.complex64),
    lambda value: value.bool(),
    lambda value: value[None],
    lambda value: value.sum(),
    lambda value: value.numpy() if value.dtype != torch.bfloat16 else 3,
    lambda value: "x",
)
BAD_VECTOR: tuple[Change, ...] = (*BAD, lambda value: value[1:], lambda value: value.repeat(2), torch.Tensor.half)


def misused(
    random: Random, arguments: dict[str, Any], names: Iterable[str], changes: tuple[Change, ...] = BAD
) -> dict[str, Any]:
    """The arguments with one, or a member of one, of another kind, which no op takes."""
    name = str(random.choice([name for name in names if isinstance(arguments[name], Tensor | list)]))
    value, change = arguments[name], changes[random.integers(0, len(changes))]
    if isinstance(value, Tensor):
        return arguments | {name: change(value)}
    at = random.integers(0, len(value))
    return arguments | {name: [change(member) if i == at else member for i, member in enumerate(value)]}
