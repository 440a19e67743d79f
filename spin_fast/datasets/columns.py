"""Columns of tables and GraphML: numbers, words that become one-hot, and binary tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._common.check import Argument
from .common import DatasetError

MOST_CATEGORIES = 1024  # that may be found in a column; names of nodes are no categories
LEAVE_OUT = "leave such graphs out, train with such words, or have them 0 in all columns by None among the categories"
_SHOWN = 10
_KINDS: dict[str, Any] = {
    "a date": date,
    "a time": time,
    "a duration": timedelta,
    "a list": (np.ndarray, list, tuple),
    "a mapping": Mapping,
}


class Column(NamedTuple):
    """A node attribute among the features.

    Attributes:
        name: of the column.
        categories: those that have a column of ``x``, in this order; None among them lets other words have none.
            ``"auto"`` for those that occur, in sorted order; ``"number"`` for no categories, a number; ``"any"`` for
            whichever of both it holds.
    """

    name: str
    categories: list[str | None] | Literal["auto", "number", "any"]

    @property
    def is_number(self) -> bool:
        return self.categories == "number"

    def code(self, codes: np.ndarray, dtype: torch.dtype) -> Tensor:
        """``[N, words]`` one-hot of positions in ``categories``, ``[N]``; 0 where that is None."""
        positions = torch.from_numpy(codes)[:, None]
        coded = torch.zeros(len(positions), len(self.categories), dtype=dtype).scatter_(1, positions, 1)
        return coded if None not in self.categories else coded[:, [word is not None for word in self.categories]]


class Words:
    """The words of a column, numbered: listed categories in their order, others as they come."""

    def __init__(self, column: Column, *, strict: bool = False) -> None:
        """``strict`` takes no numbers for words."""
        self.column, self.strict = column, strict
        self.listed = isinstance(column.categories, list)
        known = column.categories if self.listed else ()
        self.numbers: dict[str | None, int] = {word: number for number, word in enumerate(known)}

    def number(self, value: object, where: Callable[[], str]) -> int:
        """The number of a word; an error at ``where()`` if it is empty, a number, or not among the listed words."""
        if self.strict and not isinstance(value, str):
            raise DatasetError(f"{where()} must be a word as in files before it, got {shown(value)}; correct it")
        word = text_of(value)
        if word is None:
            raise DatasetError(f"{where()} is empty; fill it in")
        if self.is_strange(word):
            raise DatasetError(f"{where()} {self.strange(word)}; {LEAVE_OUT}")
        if self.listed:
            return self.numbers[word if word in self.numbers else None]
        return self.numbers.setdefault(word, len(self.numbers))

    def is_strange(self, value: object) -> bool:
        """Whether it is a word that features do not list."""
        takes_any = not self.listed or None in self.numbers
        return not takes_any and (word := text_of(value)) is not None and word not in self.numbers

    def strange(self, value: object) -> str:
        """Describe such a word, for messages."""
        more = len(self.numbers) - _SHOWN
        known = ", ".join(map(repr, [*self.numbers][:_SHOWN])) + (f" and {more} more" if more > 0 else "")
        return f"holds {text_of(value)!r}, which features have no category for: they know {known}"

    def settled(self, where: str) -> tuple[np.ndarray, Column]:
        """Positions in the categories by word number, and the column with these: by default the words that occur."""
        column = self.column
        if not self.listed:
            if len(self.numbers) > MOST_CATEGORIES:
                raise DatasetError(
                    f"{where} {column.name!r} holds {len(self.numbers):,} different words, and at most "
                    f"{MOST_CATEGORIES:,} become one-hot unless features list them; name the columns to use by ",
                    Argument("features"),
                )
            column = Column(column.name, [*sorted(word for word in self.numbers if word is not None)])
        position = {word: number for number, word in enumerate(column.categories)}
        return np.array([position[word] for word in self.numbers], np.int64), column


def text_of(value: object) -> str | None:
    """A value as text without blanks around it; None where it is missing."""
    return None if value is None or value != value else str(value).strip() or None


def task_of(value: object, where: Callable[[], str]) -> float:
    """The label of a binary task, NaN where nothing is filled in."""
    if text_of(value) is None:
        return np.nan
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # text, a date
        number = np.nan
    if number not in (0, 1):
        raise DatasetError(f"{where()} must be 0, 1 or empty as a task, got {shown(value)}")
    return number


def holds_words(
    name: str, values: Sequence[object], is_word: np.ndarray, where: Callable[[int], str], row: Callable[[int], str]
) -> bool:
    """Whether all values of a column that are filled in are words; a mixture of words and numbers is an error.

    In its message ``where`` is the place of a value, and ``row`` the same in short.
    """
    if is_word.any() and not is_word.all():
        word, number = int(is_word.argmax()), int(is_word.argmin())
        raise DatasetError(
            f"{where(word)} must be a number, got {shown(values[word])}, as {row(number)} holds {values[number]}; "
            "correct it, or ",
            *as_categories(name),
        )
    return bool(is_word.any())


def shown(value: object) -> str:
    """A value for messages; of what is neither number nor text only the kind."""
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind
    return repr(value.item() if isinstance(value, np.generic) else value)


def as_categories(name: str) -> tuple[str | Argument, ...]:
    """How to read a column as categories, for messages."""
    asked = json.dumps({"column": name, "categories": "auto"}, ensure_ascii=False)
    return "to take all of it as words, name it by ", Argument("features"), f" as {asked}"


def as_task(label: str, labels: Sequence[str | None]) -> tuple[str | Argument, ...]:
    """How to read labels with gaps, for messages; empty unless they are 0 and 1."""
    binary = set() < {*labels} - {None} <= {"0", "1", "0.0", "1.0"}
    return ("read it as a task with missing labels by ", Argument("label", [label]), ", ") if binary else ()
