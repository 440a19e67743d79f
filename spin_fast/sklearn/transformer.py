"""Preparation of node features as a transformer of scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from sklearn.base import TransformerMixin
from sklearn.utils.validation import check_is_fitted

from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import Degree, NodeFeatures
from ._inputs import GraphEstimator, check_finite


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
        degree, keep_x, standardize, columns: those of :class:`spin_fast.NodeFeatures`.

    Attributes:
        n_features_in_: features of a node before.
        node_features_: the fitted :class:`spin_fast.NodeFeatures`.
    """

    degree: Degree | None = None
    _: KW_ONLY
    keep_x: bool | Literal["auto"] = "auto"
    standardize: bool | Literal["auto"] = "auto"
    columns: Sequence[int] | None = None

    def fit(self, X: Any, y: Any = None) -> NodeFeaturesTransformer:
        """Fit to all graphs of ``X``; ``y`` is not used.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        self._fit(self._batch(X))
        return self

    def fit_transform(self, X: Any, y: Any = None) -> GraphBatch:
        """Fit to all graphs of ``X``, and transform them."""
        graphs = self._batch(X, with_labels=y is None)
        self._fit(graphs)
        return self.node_features_.transform(graphs)

    def transform(self, X: Any) -> GraphBatch:
        """Return the graphs with prepared node features.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        check_is_fitted(self)
        graphs = self._batch(X)
        self._check_features(graphs)
        return self.node_features_.transform(graphs)

    def _batch(self, X: Any, with_labels: bool = False) -> GraphBatch:
        graphs = self._graphs(X, with_labels)
        if isinstance(graphs, PowerFeatures):
            raise TypeError("X must be graphs, of which no powers are computed yet, got PowerFeatures")
        return graphs

    def _fit(self, graphs: GraphBatch) -> None:
        check_finite(graphs)
        made = NodeFeatures(self.degree, keep_x=self.keep_x, standardize=self.standardize, columns=self.columns)
        self.node_features_, self.n_features_in_ = made.fit(graphs), graphs.num_features
