"""What columns of a user's own tables and GraphML are to a model: numbers or words one-hot; classes or tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._common import WIDEST_ONE_HOT, DatasetError

Features = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
Label = str | Sequence[str] | None

LABEL = "label"
MOST_CATEGORIES = 1024  # that a column may turn out to have: a name of each node is no category
_SHOWN = 10


class Column(NamedTuple):
    """A node attribute that features are made of.

    Attributes:
        name: of the column.
        categories: those that have a column of ``x``, in this order; ``"auto"`` for those that occur, in sorted order;
            ``"number"`` for no categories, a number; ``"any"`` for whichever of both it holds.
    """

    name: str
    categories: list[str] | Literal["auto", "number", "any"]

    @property
    def is_number(self) -> bool:
        return self.categories == "number"

    @property
    def width(self) -> int:
        return len(self.categories) if isinstance(self.categories, list) else 1

    def code(self, codes: np.ndarray | Tensor, dtype: torch.dtype) -> Tensor:
        """``[N, width]`` one-hot of positions in ``categories``, ``[N]``."""
        positions = torch.as_tensor(codes, dtype=torch.int64)[:, None]
        return torch.zeros(len(positions), self.width, dtype=dtype).scatter_(1, positions, 1)

    def unknown(self, where: str, word: str) -> DatasetError:
        assert isinstance(self.categories, list)
        more = len(self.categories) - _SHOWN
        known = ", ".join(map(repr, self.categories[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
        return DatasetError(f"{where} holds {word!r}, which features have no category for: they know {known}")

    def settled(self, words: Sequence[str], where: str) -> Column:
        """With the words that occur as categories, if it has none yet."""
        if isinstance(self.categories, list):
            return self
        if len(words) > MOST_CATEGORIES:
            raise DatasetError(
                f"{where} {self.name!r} holds {len(words):,} different words, and at most {MOST_CATEGORIES:,} become "
                "one-hot unless features list them; name the columns to use by features"
            )
        return Column(self.name, sorted(words))


def as_categories(name: str) -> str:
    """How to ask for them, for messages."""
    asked = json.dumps({"column": name, "categories": "auto"}, ensure_ascii=False)
    return f"to take all of it as words, name it by features as {asked}"


def check_features(features: object) -> None:
    """Raise a TypeError or ValueError unless ``features`` are of the type ``Features``."""
    if features is None:
        return
    items = [features] if isinstance(features, str | Mapping) else features
    if not isinstance(items, list | tuple) or not all(isinstance(item, str | Mapping) for item in items):
        raise TypeError(f"features must be a list of names (str) or of {{'column': name, ...}}, got {features!r}")
    for item in items:
        if isinstance(item, str):
            continue
        categories = item.get("categories", "auto")
        if not isinstance(item.get("column"), str) or item.keys() - {"column", "categories"}:
            raise ValueError(f"features must have 'column', a name, and maybe 'categories', got {dict(item)!r}")
        if categories == "auto":
            continue
        words = isinstance(categories, list | tuple) and all(isinstance(word, str) for word in categories)
        if not words or not 0 < len(set(categories)) == len(categories) <= WIDEST_ONE_HOT:
            raise ValueError(
                "features must have as 'categories' different words (str), at least one and at most "
                f"{WIDEST_ONE_HOT}, or 'auto', got {categories!r:.100}"
            )
    names = [item if isinstance(item, str) else item["column"] for item in items]
    if len(set(names)) < max(len(names), 1):
        raise ValueError(f"features must be different names, at least one, got {features!r}")


def chosen(features: Features, found: Sequence[str]) -> list[Column]:
    """The columns to use, of those that are found; none for the degree."""
    if features is None:
        return [Column(name, "any") for name in found]
    if features == "degree":
        return []
    columns = []
    for item in [features] if isinstance(features, str | Mapping) else features:
        if isinstance(item, str):
            columns.append(Column(item, "any"))
        else:
            categories: Any = item.get("categories", "number")
            columns.append(Column(item["column"], categories if categories in ("auto", "number") else list(categories)))
    return columns


def described(columns: Sequence[Column]) -> str | list[Any]:
    """``Folder.features`` of columns that are settled."""
    return [
        {"column": column.name} | ({} if column.is_number else {"categories": column.categories}) for column in columns
    ] or "degree"


def numbers_first(columns: Sequence[Column]) -> list[Column]:
    return sorted(columns, key=lambda column: not column.is_number)


def check_label(label: object, classes: object) -> None:
    """Raise a TypeError or ValueError unless ``label`` is of the type ``Label``, and ``classes`` suit it."""
    if label is None or isinstance(label, str):
        return
    if not isinstance(label, list | tuple) or not all(isinstance(name, str) for name in label):
        raise TypeError(f"label must be a name (str), a list of names, or None, got {label!r}")
    if len(set(label)) < max(len(label), 1):
        raise ValueError(f"label must be different names, at least one, got {label!r}")
    if classes is not None:
        raise ValueError("classes must be None where label is a list: binary tasks have none")
