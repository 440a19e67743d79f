"""Columns of tables and GraphML as features (numbers, or words one-hot) and as labels (classes or tasks)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._common import check
from .._common.check import Argument, ArgumentTypeError, ArgumentValueError
from ..graphs.batch import EdgeOptions
from .common import WIDEST_ONE_HOT, DatasetError

Features = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
Label = str | Sequence[str] | None

LABEL = "label"
MOST_CATEGORIES = 1024  # that may be found in a column; names of nodes are no categories
LEAVE_OUT = "leave such graphs out, or train with such words"
_SHOWN = 10
_EDGE_OPTIONS = ("undirected", "coalesce", "self_loops")  # not sort_nodes, since rows come in any order
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

    def code(self, codes: np.ndarray, dtype: torch.dtype) -> Tensor:
        """``[N, width]`` one-hot of positions in ``categories``, ``[N]``."""
        positions = torch.from_numpy(codes)[:, None]
        return torch.zeros(len(positions), self.width, dtype=dtype).scatter_(1, positions, 1)

    def settled(self, words: Sequence[str], where: str) -> Column:
        """Take the words that occur as categories, unless there are some already."""
        if isinstance(self.categories, list):
            return self
        if len(words) > MOST_CATEGORIES:
            raise DatasetError(
                f"{where} {self.name!r} holds {len(words):,} different words, and at most {MOST_CATEGORIES:,} become "
                "one-hot unless features list them; name the columns to use by ",
                Argument("features"),
            )
        return Column(self.name, sorted(words))


class Words:
    """The words of a column, numbered: listed categories in their order, others as they come."""

    def __init__(self, column: Column, *, strict: bool = False) -> None:
        """``strict`` takes no numbers for words."""
        self.column, self.strict = column, strict
        self.listed = isinstance(column.categories, list)
        self.numbers = {word: number for number, word in enumerate(column.categories if self.listed else ())}

    def number(self, value: object, where: Callable[[], str]) -> int:
        """The number of a word.

        Raises:
            DatasetError: nothing is filled in, it is a number, or features list other words; says ``where()``.
        """
        if self.strict and not isinstance(value, str):
            raise DatasetError(f"{where()} must be a word as in files before it, got {shown(value)}; correct it")
        word = text_of(value)
        if word is None:
            raise DatasetError(f"{where()} is empty; fill it in")
        if self.is_strange(word):
            raise DatasetError(f"{where()} {self.strange(word)}; {LEAVE_OUT}")
        return self.numbers.setdefault(word, len(self.numbers))

    def is_strange(self, value: object) -> bool:
        """Whether it is a word that features do not list."""
        return self.listed and (word := text_of(value)) is not None and word not in self.numbers

    def strange(self, value: object) -> str:
        """Describe such a word, for messages."""
        more = len(self.numbers) - _SHOWN
        known = ", ".join(map(repr, [*self.numbers][:_SHOWN])) + (f" and {more} more" if more > 0 else "")
        return f"holds {text_of(value)!r}, which features have no category for: they know {known}"

    def settled(self, where: str) -> tuple[np.ndarray, Column]:
        """Positions in the categories by word number, and the column with its categories."""
        column = self.column.settled([*self.numbers], where)
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
    binary = {*labels} <= {None, "0", "1", "0.0", "1.0"}
    return ("read it as a task with missing labels by ", Argument("label", [label]), ", ") if binary else ()


class ReadOptions(NamedTuple):
    """The arguments of ``load_folder``, which describes them."""

    features: Features
    classes: Sequence[str] | None
    label: Label
    edge_weight: str | None
    dtype: torch.dtype
    edge_options: EdgeOptions

    def check(self) -> None:
        """Raise a TypeError or ValueError unless all are of their types, and ``classes`` suit ``label``."""
        check_features(self.features)
        check_label(self.label, self.classes)
        if (classes := self.classes) is not None:
            if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
                raise TypeError(f"classes must be a list of names (str), got {classes!r}")
            if len(set(classes)) < max(len(classes), 1):
                raise ValueError(f"classes must be different names, at least one, got {classes!r}")
        check_dtype_and_edges(self.dtype, self.edge_options)


def check_dtype_and_edges(dtype: torch.dtype, edge_options: Mapping[str, Any]) -> None:
    if dtype not in check.FLOATS:
        raise TypeError(f"dtype must be float32 or float64, got {dtype}")
    if unknown := edge_options.keys() - _EDGE_OPTIONS:
        options = ", ".join(_EDGE_OPTIONS)
        raise TypeError(f"{min(unknown)} is no option of reading a folder; those for edges are {options}")


def check_features(features: object) -> None:
    """Raise a TypeError or ValueError unless ``features`` are of the type ``Features``."""
    if features is None:
        return
    items = [features] if isinstance(features, str | Mapping) else features
    if not isinstance(items, list | tuple) or not all(isinstance(item, str | Mapping) for item in items):
        raise ArgumentTypeError("features", 'be names or of the form {"column": NAME, ...}', features)
    for item in items:
        if isinstance(item, str):
            continue
        categories = item.get("categories", "auto")
        if not isinstance(item.get("column"), str) or item.keys() - {"column", "categories"}:
            raise ArgumentValueError("features", "have 'column', a name, and maybe 'categories'", dict(item))
        if categories == "auto":
            continue
        words = isinstance(categories, list | tuple) and all(isinstance(word, str) for word in categories)
        if not words or not 0 < len(set(categories)) == len(categories) <= WIDEST_ONE_HOT:
            expected = f"have as 'categories' different words, at least one and at most {WIDEST_ONE_HOT}, or 'auto'"
            raise ArgumentValueError("features", expected, categories)
    names = [item if isinstance(item, str) else item["column"] for item in items]
    if len(set(names)) < max(len(names), 1):
        raise ArgumentValueError("features", "be different names, at least one", features)


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
        raise ArgumentTypeError("label", "be a name, several in a list, or None", label)
    if len(set(label)) < max(len(label), 1):
        raise ArgumentValueError("label", "be different names, at least one", label)
    if classes is not None:
        raise ValueError("classes must be None where label is a list: binary tasks have none")
