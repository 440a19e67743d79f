"""Conversion of ``X`` and ``y`` to graphs and labels, and their validation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite
from torch import Tensor

from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch

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
        if isinstance(first, GraphBatch):
            return GraphBatch.concatenate(X)
        if isinstance(first, PowerFeatures):
            return PowerFeatures.concatenate(X)
        libraries = {base.__module__.partition(".")[0] for base in type(first).__mro__}
        if "torch_geometric" in libraries:
            return GraphBatch.from_pyg(X, y="y" if with_labels else None)
        if "networkx" in libraries:
            return GraphBatch.from_networkx(X)
        if "dgl" in libraries:
            return GraphBatch.from_dgl(X)
        if "scipy" in libraries:
            return GraphBatch.from_scipy(X)
        wanted = "X must be a GraphBatch, PowerFeatures, or a list of graphs of PyG, DGL, networkx or scipy"
        if hasattr(X, "edges") or hasattr(X, "edge_index"):
            raise TypeError(f"{wanted}, got a single {type(X).__name__}: wrap it in a list")
        raise TypeError(f"{wanted}, got {type(X).__name__}" + ("" if first is None else f" of {type(first).__name__}"))

    def _check_features(self, graphs: Graphs) -> None:
        if graphs.num_features != self.n_features_in_:
            raise ValueError(
                f"X has {graphs.num_features} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input."
            )
        check_finite(graphs)


def check_finite(graphs: Graphs) -> None:
    parts = [("features", graphs.rows if isinstance(graphs, PowerFeatures) else graphs.x)]
    if isinstance(graphs, GraphBatch) and graphs.edge_weight is not None:
        parts.append(("edge weights", graphs.edge_weight))
    for name, values in parts:
        if not bool(torch.isfinite(values).all()):
            found = "NaN" if bool(values.isnan().any()) else "infinity"
            raise ValueError(f"Input X contains {found}: {name} must be finite")


def labels_of(y: Any, estimator: BaseEstimator) -> np.ndarray:
    """Return labels ``[G]``, or ``[G, T]`` of 0 and 1, as an array; the estimator is named in errors."""
    if y is None:
        raise ValueError(
            f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None "
            "and X has no labels."
        )
    y = y.cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 2 and y.shape[1] != 1:
        y = check_array(y, dtype=None, input_name="y")
        if not np.isin(y, (0, 1)).all():
            raise ValueError("y must be one label per graph, or 0 and 1 for each of several, got other values")
        return y.astype(np.int64)
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    return y


def labelled(features: PowerFeatures, y: Tensor) -> PowerFeatures:
    """The features with other labels, ``[G]`` or ``[G, T]``, of the selected graphs."""
    y = y.to(features.rows.device)
    if features.ids is None:
        return replace(features, labels=y)
    labels = y.new_zeros(features.node_ptr.numel() - 1, *y.shape[1:])
    labels[features.ids] = y
    if not torch.equal(labels[features.ids], y):  # a graph is selected twice, with two labels
        return replace(features.take(), labels=y)
    return replace(features, labels=labels)
