"""What is read of a folder: the arguments of ``load_folder``, and the features and labels that they choose."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .._common import check
from .._common.check import ArgumentTypeError, ArgumentValueError
from ..graphs.batch import EdgeOptions, GraphBatch
from ..graphs.convert import Parts
from .columns import Column
from .common import WIDEST_ONE_HOT, DatasetError, Folder, class_numbers

Features = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
Label = str | Sequence[str] | None

LABEL = "label"
WEIGHT = "weight"
GAPS = ("nan", "na", "n/a", "none", "null", "?")  # what other programs write where there is no number
_EDGE_OPTIONS = ("undirected", "coalesce", "self_loops")  # not sort_nodes, since rows come in any order


def warn_of_unread(file: Path, names: Iterable[str]) -> None:
    """Tell what edges have beside a weight, unless the caller has said what to read."""
    if told := ", ".join(sorted(names)):
        warnings.warn(f"{file} has edges with {told}, not read: weights are those named {WEIGHT!r}", stacklevel=2)


class ReadOptions(NamedTuple):
    """The arguments of ``load_folder``, which describes them."""

    features: Features = None
    classes: Sequence[str] | None = None
    label: Label = LABEL
    edge_weight: str | None = WEIGHT
    dtype: torch.dtype = torch.float32
    edge_options: EdgeOptions = EdgeOptions()

    @classmethod
    def of(cls, **options: Any) -> ReadOptions:
        """From keyword arguments, those of edges among them."""
        own = {name: options.pop(name) for name in cls._fields if name in options}
        return cls(**own, edge_options=EdgeOptions(**options))  # type: ignore[typeddict-item]

    def check(self) -> None:
        """Raise a TypeError or ValueError unless all are of their types, and ``classes`` suit ``label``."""
        label, classes = self.label, self.classes
        chosen(self.features)
        if label is not None and not isinstance(label, str):
            if not isinstance(label, list | tuple) or not all(isinstance(name, str) for name in label):
                raise ArgumentTypeError("label", "be a name, several in a list, or None", label)
            if len(set(label)) < max(len(label), 1):
                raise ArgumentValueError("label", "be different names, at least one", label)
            if classes is not None:
                raise ValueError("classes must be None where label is a list: binary tasks have none")
        if classes is not None:
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


def chosen(features: Features) -> list[Column] | None:
    """The columns that features name: none for the degree; None stands for all that there are."""
    if features is None:
        return None
    items = [features] if isinstance(features, str | Mapping) else features
    if not isinstance(items, list | tuple) or not all(isinstance(item, str | Mapping) for item in items):
        raise ArgumentTypeError("features", 'be names or of the form {"column": NAME, ...}', features)
    columns = []
    for item in items:
        if isinstance(item, str):
            columns.append(Column(item, "any"))
            continue
        name, categories = item.get("column"), item.get("categories", "auto")
        if not isinstance(name, str) or item.keys() - {"column", "categories"}:
            raise ArgumentValueError("features", "have 'column', a name, and maybe 'categories'", dict(item))
        if categories != "auto":
            words = isinstance(categories, list | tuple) and all(isinstance(word, str | None) for word in categories)
            different = words and {None} < {None, *categories} and len({*categories}) == len(categories)
            if not different or len({*categories} - {None}) > WIDEST_ONE_HOT:
                expected = f"have as 'categories' different words, at least one and at most {WIDEST_ONE_HOT}, or 'auto'"
                raise ArgumentValueError("features", expected, categories)
            categories = list(categories)
        columns.append(Column(name, categories if "categories" in item else "number"))
    if len({column.name for column in columns}) < max(len(columns), 1):
        raise ArgumentValueError("features", "be different names, at least one", features)
    return [] if features == "degree" else columns


def numbers_first(columns: Sequence[Column]) -> list[Column]:
    return sorted(columns, key=lambda column: not column.is_number)


def folder_of(graphs: GraphBatch, names: list[str], columns: Sequence[Column], weighted: bool | None) -> Folder:
    """Graphs without labels, and the columns that became their features."""
    features = [
        {"column": column.name} | ({} if column.is_number else {"categories": column.categories}) for column in columns
    ]
    numbers = sum(column.is_number for column in columns)
    return Folder(graphs, names, None, features or "degree", numbers, weighted=weighted)


def with_labels(read: Folder, labels: Sequence[Any] | None, options: ReadOptions, where: str | Path) -> Folder:
    """The graphs with ``y``, and the names of the classes or tasks; ``labels`` are names, or numbers for each task."""
    if labels is None or options.label is None:
        return read
    if not isinstance(options.label, str):
        y = torch.from_numpy(np.array(labels, np.float64)).to(options.dtype)
        return read._replace(graphs=replace(read.graphs, y=y), tasks=list(options.label))
    classes = sorted_classes({*labels}, where) if options.classes is None else list(options.classes)
    y = class_numbers(labels, classes, where)
    return read._replace(graphs=replace(read.graphs, y=y), classes=classes)


def with_edges(read: Folder, options: ReadOptions) -> Folder:
    """The graphs with the edges that options make of those of a set."""
    if not options.edge_options:
        return read
    graphs = read.graphs
    batch = torch.arange(len(graphs)).repeat_interleave(graphs.num_nodes_per_graph)
    x = None if read.features == "degree" else graphs.x
    parts = Parts(graphs.edge_index, batch, len(graphs), x, graphs.y, None)
    return read._replace(graphs=GraphBatch._from_parts(parts, options.dtype, options.edge_options))


def sorted_classes(labels: set[str], where: str | Path) -> list[str]:
    """Classes in sorted order, that of numbers if they are numbers."""
    values = {label: number for label in labels if (number := _number(label)).is_finite()}
    if words := sorted(labels - values.keys()):
        if values and all(word.lower() in GAPS for word in words):
            raise DatasetError(
                f"{where} has {words[0]!r} as a label beside numbers; leave the label empty where there is none"
            )
        return sorted(labels)
    if any(value != value.to_integral_value() for value in values.values()):
        raise DatasetError(f"{where} has real numbers as labels, and only classes can be learnt")
    classes = sorted(labels, key=lambda label: (values[label], label))
    for one, other in pairwise(classes):
        if values[one] == values[other]:
            raise DatasetError(
                f"{where} has the labels {one!r} and {other!r}, which are one number; write it in one way"
            )
    return classes


def _number(label: str) -> Decimal:
    """A label as a number, exact also where float64 is not; NaN for words."""
    try:
        return Decimal("nan" if "_" in label else label)  # which Python's own syntax of numbers has
    except InvalidOperation:
        return Decimal("nan")
