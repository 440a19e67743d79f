"""Node features before any hop: degrees, codes of categories, columns standardised on the training graphs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import check
from .._common.indexing import GraphIds, graph_ids, ragged_arange
from .batch import GraphBatch

Degree = Literal["raw", "log", "one-hot", "profile"]
DEGREES = ("raw", "log", "one-hot", "profile")
MOST_CATEGORIES = 4096  # of a column; more are no categories
BLOCK = 1 << 16  # nodes in float64 at a time


@dataclass(eq=False)
class NodeFeatures:
    """Transforms node features: fitted on the training graphs, then applied to all graphs.

    Used as a transformer of scikit-learn is::

        node_features = NodeFeatures(degree="log").fit(graphs, train)
        features = PowerFeatures.from_graphs(node_features.transform(graphs), num_hops=3)

    It belongs before the powers: ``Ā`` of a standardised column is not the standardised column of ``ĀX``, unless the
    rows of ``Ā`` sum to 1. Equal rows stay equal bit by bit, but with a ``"profile"``, so that they are stored once as
    before.

    Args:
        degree: features to make of the number of edges per row of a node (a self-loop counts 1, weights do not count):
            ``"raw"``; ``"log"`` (``log(1 + degree)``); ``"one-hot"``, with a column for each degree from 0 to the
            largest in the training graphs, which stands for larger ones as well; or ``"profile"``, the logarithms of
            the degree and of the minimum, maximum, mean and standard deviation of the neighbours' degrees (Cai & Wang
            2018), 0 without neighbours. None for none.
        max_degree: with ``"one-hot"`` the largest degree that may have a column; None for no such bound.
        one_hot: encode categories, such as OGB's atom features: True for all columns of ``x``, or the numbers of some.
            They must hold whole numbers; each value that occurs in the training graphs becomes a column, in the place
            of the one encoded, and other values have none.
        keep_x: True for ``x`` first and then what is made of the degree, False for that alone; ``"auto"`` leaves ``x``
            out if it is the degree itself.
        standardize: shift and scale columns to mean 0 and standard deviation 1 over the nodes of the training graphs;
            ``"auto"`` does if ``x`` has anything but whole numbers, so that attributes are, but neither one-hot labels
            nor OGB's categories nor degrees alone, or if ``columns`` are named.
        columns: which columns of the result to standardise; None for those of anything but 0 and 1. A column that is
            constant over the training graphs is left alone.

    Attributes:
        num_features_: columns of the ``x`` it was fitted on.
        keeps_x_: whether the result has them.
        max_degree_: the largest degree that has a column; None but for ``"one-hot"``.
        categories_: the values of each column of ``x`` that has them, ascending; None for columns left as they are.
        columns_: the columns of the result that are standardised, ascending.
        mean_, scale_: of each of ``columns_``, computed in float64.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    degree: Degree | None = None
    _: KW_ONLY
    max_degree: int | None = None
    one_hot: bool | Sequence[int] = False
    keep_x: bool | Literal["auto"] = "auto"
    standardize: bool | Literal["auto"] = "auto"
    columns: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.degree is not None and self.degree not in DEGREES:
            raise ValueError(f"degree must be one of {', '.join(DEGREES)} or None, got {self.degree!r}")
        if self.max_degree is not None:
            self.max_degree = check.integer("max_degree", self.max_degree, 0)
            if self.degree != "one-hot":
                raise ValueError(f"max_degree must be None where degree is {self.degree!r}: it is of one-hot degrees")
        if isinstance(self.one_hot, bool | np.bool_):
            self.one_hot = bool(self.one_hot)
        elif isinstance(self.one_hot, Iterable):
            self.one_hot = [check.integer("one_hot", column, 0) for column in self.one_hot]
        else:
            raise TypeError(f"one_hot must be a bool or numbers of columns, got {type(self.one_hot).__name__}")
        if self.one_hot and self.keep_x is False:
            raise ValueError("one_hot must be left out where keep_x is False: it encodes columns of x")
        for name, value in (("keep_x", self.keep_x), ("standardize", self.standardize)):
            if value is not True and value is not False and value != "auto":
                raise ValueError(f"{name} must be True, False or 'auto', got {value!r}")
        if self.degree is None and self.keep_x is False:
            raise ValueError("keep_x must not be False without degree: no features would be left")
        if self.columns is not None:
            self.columns = [check.integer("columns", column, 0) for column in self.columns]
            if self.standardize is False:
                raise ValueError("columns must be None where standardize is False")

    @torch.no_grad()
    def fit(self, graphs: GraphBatch, ids: GraphIds | None = None) -> NodeFeatures:
        """Learn from the graphs ``ids``, the training part; None for all. Returns itself.

        Raises:
            TypeError, ValueError: no nodes, ``columns`` out of range, or values to standardise that are not finite.
        """
        check_graphs(graphs)
        x, degree, nodes = graphs.x.detach(), graphs.degree, None
        if ids is not None:
            chosen = graph_ids(ids, len(graphs), graphs.ptr.device)
            nodes = ragged_arange(graphs.ptr[chosen], graphs.num_nodes_per_graph[chosen])
            x, degree = x[nodes], degree[nodes]
        if len(x) == 0:
            raise ValueError("graphs must have nodes in the training part, got none")
        self.num_features_ = x.shape[1]
        is_degree = x.shape[1] == 1 and torch.equal(x[:, 0], degree.to(x.dtype))
        wanted = not is_degree or bool(self.one_hot)
        self.keeps_x_ = self.keep_x is True or self.degree is None or (self.keep_x == "auto" and wanted)
        self.max_degree_ = int(degree.max()) if self.degree == "one-hot" else None
        if self.max_degree is not None and self.max_degree_ is not None:
            self.max_degree_ = min(self.max_degree_, self.max_degree)
        self.categories_ = self._fitted_categories(x)
        self.columns_: list[int] = []
        self.mean_: list[float] = []
        self.scale_: list[float] = []
        automatic = self.columns is not None or not torch.equal(x, x.round())
        if self.standardize is True or (self.standardize == "auto" and automatic):
            made = self._columns_of(graphs)
            self._fit_columns(made if nodes is None else made[nodes])
        return self

    def _fitted_categories(self, x: Tensor) -> list[list[int] | None]:
        chosen = range(x.shape[1]) if self.one_hot is True else self.one_hot or ()
        if (widest := max(chosen, default=-1)) >= x.shape[1]:
            raise ValueError(f"one_hot must be less than {x.shape[1]}, the number of columns, got {widest}")
        categories: list[list[int] | None] = [None] * x.shape[1]
        for column in chosen:
            values = x[:, column].unique()
            if not bool(((values == values.round()) & (values.abs() < 2**53)).all()):  # nor NaN, nor infinity
                raise ValueError(f"one_hot must name columns of whole numbers; column {column} has others")
            if len(values) > MOST_CATEGORIES:
                raise ValueError(
                    f"one_hot must name columns of at most {MOST_CATEGORIES} values; column {column} has {len(values)}"
                )
            categories[column] = values.long().tolist()
        return categories

    def _fit_columns(self, x: Tensor) -> None:
        if self.columns is None:
            chosen = ((x != 0) & (x != 1)).any(0).nonzero()[:, 0].tolist()
        elif (widest := max(self.columns, default=-1)) >= x.shape[1]:
            raise ValueError(f"columns must be less than {x.shape[1]}, the number of columns, got {widest}")
        else:
            chosen = sorted(set(self.columns))
        if not chosen:
            return
        total = sum(block.sum(0) for block in _blocks(x, chosen))
        mean = torch.as_tensor(total) / len(x)
        squares = sum((block - mean).square().sum(0) for block in _blocks(x, chosen))
        varies = (x != x[0]).any(0)[chosen]  # a sum of equal numbers, divided, may be another one
        scale = (torch.as_tensor(squares) / len(x)).sqrt()
        for column, center, spread, real in zip(chosen, mean.tolist(), scale.tolist(), varies.tolist(), strict=True):
            if not math.isfinite(spread):
                raise ValueError(f"x must be finite in the training graphs to be standardised; column {column} is not")
            if real and spread > 0:
                self.columns_.append(column)
                self.mean_.append(center)
                self.scale_.append(spread)

    @torch.no_grad()
    def transform(self, graphs: GraphBatch) -> GraphBatch:
        """The same graphs with the features that were fitted, in the dtype and on the device of ``graphs.x``.

        Raises:
            TypeError, ValueError: not fitted yet, or graphs with another number of features.
        """
        check_graphs(graphs)
        if not hasattr(self, "num_features_"):
            raise ValueError("NodeFeatures must be fitted before they transform: call fit")
        if graphs.num_features != self.num_features_:
            raise ValueError(f"graphs must have {self.num_features_} features as fitted, got {graphs.num_features}")
        x = self._columns_of(graphs)
        if self.columns_:
            mean, scale = (x.new_tensor(values, dtype=torch.float64) for values in (self.mean_, self.scale_))
            x = x.clone() if x is graphs.x else x
            for block in x.split(BLOCK):  # views
                block[:, self.columns_] = ((block[:, self.columns_].double() - mean) / scale).to(x.dtype)
        return graphs if x is graphs.x else replace(graphs, x=x)

    def _columns_of(self, graphs: GraphBatch) -> Tensor:
        """The columns before they are standardised, ``[N, columns]``; ``x`` itself if these are all."""
        x, degree = graphs.x, graphs.degree
        if self.degree is None and not any(self.categories_):
            return x
        made = [x] if self.keeps_x_ else []
        if self.keeps_x_ and any(self.categories_):
            made = []
            for number, (column, values) in enumerate(zip(x.split(1, dim=1), self.categories_, strict=True)):
                if values is not None and not bool(column.isfinite().all()):
                    raise ValueError(f"x must be finite in columns to be encoded; column {number} is not")
                made.append(column if values is None else (column == x.new_tensor(values)).to(x.dtype))
        if self.max_degree_ is not None:
            made.append(F.one_hot(degree.long().clamp(max=self.max_degree_), self.max_degree_ + 1).to(x.dtype))
        elif self.degree == "profile":
            made.append(_degree_profile(graphs).log1p().to(x.dtype))
        elif self.degree is not None:
            made.append((degree.double().log1p() if self.degree == "log" else degree).to(x.dtype)[:, None])
        return torch.cat(made, dim=1)

    def to_dict(self) -> dict[str, Any]:
        """All arguments and what was fitted, as JSON values, from which :meth:`from_dict` makes the same again."""
        return {name: list(value) if isinstance(value, list) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> NodeFeatures:
        """Restore what :meth:`to_dict` has returned, exactly.

        Raises:
            ValueError: ``state`` is nothing that it returns.
        """
        try:
            made = cls(**{field.name: state[field.name] for field in fields(cls)})
            if state.keys() - vars(made).keys():
                made.num_features_ = check.integer("num_features_", state["num_features_"], 0)
                made.keeps_x_ = check.flag("keeps_x_", state["keeps_x_"])
                made.max_degree_ = None
                if made.degree == "one-hot":
                    made.max_degree_ = check.integer("max_degree_", state["max_degree_"], 0)
                made.categories_ = [
                    None if values is None else [int(value) for value in values] for values in state["categories_"]
                ]
                if len(made.categories_) != made.num_features_:
                    raise ValueError(f"categories_ must be of {made.num_features_} columns")
                made.columns_ = [check.integer("columns_", column, 0) for column in state["columns_"]]
                made.mean_, made.scale_ = ([float(value) for value in state[name]] for name in ("mean_", "scale_"))
                if not len(made.columns_) == len(made.mean_) == len(made.scale_):
                    raise ValueError("columns_, mean_ and scale_ must be of one length")
                if made.to_dict() != state:
                    raise ValueError(f"it would be {made.to_dict()}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"state must be what NodeFeatures.to_dict has told, got {state!r}: {error!r}") from error
        return made


def _degree_profile(graphs: GraphBatch) -> Tensor:
    """Degree, and minimum, maximum, mean and deviation of the neighbours' degrees, ``[N, 5]`` float64.

    Sums of whole numbers are exact, so that the order of the neighbours changes no bit.
    """
    degree = graphs.degree.double()
    number = degree.clamp(min=1)
    of_neighbours = degree[graphs.indices.long()]
    node = graphs.edge_index[1].long()
    zeros = torch.zeros_like(degree)
    least, most = (zeros.scatter_reduce(0, node, of_neighbours, how, include_self=False) for how in ("amin", "amax"))
    mean = zeros.index_add(0, node, of_neighbours) / number
    variance = zeros.index_add(0, node, of_neighbours.square()) / number - mean.square()
    return torch.stack([degree, least, most, mean, variance.clamp(min=0).sqrt()], dim=1)


def check_graphs(graphs: Any) -> None:
    if not isinstance(graphs, GraphBatch):
        raise TypeError(f"graphs must be a GraphBatch, got {type(graphs).__name__}")


def _blocks(x: Tensor, columns: list[int]) -> Iterator[Tensor]:
    return (block[:, columns].double() for block in x.split(BLOCK))
