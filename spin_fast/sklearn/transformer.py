"""The base of the estimators, which reads ``X``; and the transformer of node features."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from .._common.rows import values_of
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import Degree, NodeFeatures

Graphs = GraphBatch | PowerFeatures


class GraphEstimator(BaseEstimator):
    """Base class of the estimators, whose ``X`` is no array."""

    n_features_in_: int

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        return tags

    def _graphs(self, X: Any, with_labels: bool = False) -> Graphs:
        """Convert ``X``; read the labels of a list of graphs, and check them, only ``with_labels``."""
        if isinstance(X, Graphs):
            return X
        if isinstance(X, np.ndarray) and X.dtype == object:
            X = list(X)
        first = next(iter(X), None) if isinstance(X, Iterable) and hasattr(X, "__len__") else None
        if isinstance(first, Graphs):
            return type(first).concatenate(X)
        libraries = {base.__module__.partition(".")[0] for base in type(first).__mro__}
        if "torch_geometric" in libraries:
            x = "x" if getattr(first, "x", None) is not None else None  # None takes the degree
            return GraphBatch.from_pyg(X, x=x, y="y" if with_labels else None)
        if "networkx" in libraries and (unread := _attributes_of(first)):
            warnings.warn(
                f"X has attributes that are not read, {', '.join(unread)}: give GraphBatch.from_networkx(X, x=..., "
                "edge_weight=...) as X to have them as features or weights",
                stacklevel=3,
            )
        for library in ("networkx", "dgl", "scipy"):
            if library in libraries:
                return getattr(GraphBatch, f"from_{library}")(X)
        wanted = "X must be a GraphBatch, PowerFeatures, or a list of graphs of PyG, DGL, networkx or scipy"
        if hasattr(X, "edges") or hasattr(X, "edge_index"):
            raise TypeError(f"{wanted}, got a single {type(X).__name__}: wrap it in a list")
        if isinstance(X, list) and not X:
            raise TypeError(
                f"{wanted}, got an empty list, which does not tell of what; graphs[:0] of a GraphBatch does"
            )
        raise TypeError(f"{wanted}, got {type(X).__name__}" + ("" if first is None else f" of {type(first).__name__}"))

    def _batch(self, X: Any, with_labels: bool = False) -> GraphBatch:
        graphs = self._graphs(X, with_labels)
        if isinstance(graphs, PowerFeatures):
            raise TypeError("X must be graphs, of which no powers are computed yet, got PowerFeatures")
        return graphs

    def _check_features(self, graphs: Graphs, number: int | None = None) -> None:
        """Check for so many features, by default those of ``fit``."""
        number = self.n_features_in_ if number is None else number
        if graphs.num_features != number:
            raise ValueError(
                f"X has {graphs.num_features} features, but {type(self).__name__} is expecting {number} features "
                "as input."
            )
        check_finite(graphs)


def _attributes_of(graph: Any) -> list[str]:
    """Of the first node, and of the first edge, of a graph of networkx."""
    first = [*itertools.islice(graph.nodes(data=True), 1), *itertools.islice(graph.edges(data=True), 1)]
    return sorted({repr(name) for *_, attributes in first for name in attributes})


def check_finite(graphs: Graphs) -> None:
    parts = [("features", values_of(graphs.rows) if isinstance(graphs, PowerFeatures) else graphs.x)]
    if isinstance(graphs, GraphBatch) and graphs.edge_weight is not None:
        parts.append(("edge weights", graphs.edge_weight))
    for name, values in parts:
        if not bool(torch.isfinite(values).all()):
            found = "NaN" if bool(values.isnan().any()) else "infinity"
            raise ValueError(f"Input X contains {found}: {name} must be finite")


@dataclass(repr=False, eq=False)
class NodeFeaturesTransformer(TransformerMixin, GraphEstimator):
    """:class:`spin_fast.NodeFeatures` as a transformer of scikit-learn, for pipelines and searches.

    ``Pipeline([("features", NodeFeaturesTransformer("log")), ("spin", SPINClassifier())])`` fits both on the training
    graphs of every fold. :class:`SPINClassifier` has ``degree`` and ``standardize`` of its own, which are enough where
    all columns are treated alike; where ``columns`` or ``standardize=False`` here say which are not to be standardised,
    give it ``standardize=False``, too.

    ``X`` is a :class:`spin_fast.GraphBatch`, or a list of graphs as :class:`SPINClassifier` takes it. Labels in a list
    are read by ``fit_transform`` without ``y``, but not by ``transform``.

    Args:
        degree, max_degree, one_hot, keep_x, standardize, columns: those of :class:`spin_fast.NodeFeatures`.

    Attributes:
        n_features_in_: features of a node before.
        node_features_: the fitted :class:`spin_fast.NodeFeatures`.
    """

    degree: Degree | None = None
    _: KW_ONLY
    max_degree: int | None = None
    one_hot: bool | Sequence[int] = False
    keep_x: bool | Literal["auto"] = "auto"
    standardize: bool | Literal["auto"] = "auto"
    columns: Sequence[int] | None = None

    def fit(self, X: Any, y: Any = None) -> NodeFeaturesTransformer:
        """Fit to all graphs of ``X``; ``y`` is not used.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        graphs = self._batch(X)
        check_finite(graphs)
        made = NodeFeatures(**self.get_params())
        self.node_features_, self.n_features_in_ = made.fit(graphs), graphs.num_features
        return self

    def fit_transform(self, X: Any, y: Any = None) -> GraphBatch:
        """Fit to all graphs of ``X``, and transform them."""
        graphs = self._batch(X, with_labels=y is None)
        return self.fit(graphs).node_features_.transform(graphs)

    def transform(self, X: Any) -> GraphBatch:
        """Return the graphs with prepared node features.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        check_is_fitted(self)
        graphs = self._batch(X)
        self._check_features(graphs)
        return self.node_features_.transform(graphs)
