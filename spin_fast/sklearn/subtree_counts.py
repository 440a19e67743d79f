"""Counts of subtree patterns (1-WL) as a transformer of scikit-learn."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from sklearn.base import TransformerMixin
from sklearn.utils.validation import check_is_fitted

from ..features.subtree_counts import Norm, check_options, edge_types_of, subtree_counts
from .transformer import GraphEstimator, check_finite

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(repr=False, eq=False)
class SubtreeCounts(TransformerMixin, GraphEstimator):
    """Counts of the subtree patterns of each graph, as columns for linear models.

    Nodes are coloured by colour refinement (1-WL), by :func:`spin_fast.subtree_keys`: a colour stands for what a node
    sees within so many hops. A row has how often each colour occurs in a graph, after 0 to ``num_hops`` hops; the inner
    product of two rows is the Weisfeiler-Lehman subtree kernel (Shervashidze et al. 2011). Colours are hashed to
    columns as words are by scikit-learn's ``HashingVectorizer``: nothing is learnt, graphs that are seen later get the
    same columns, and there are none for what occurs only there.

    ``make_pipeline(SubtreeCounts(), LinearSVC())`` is the usual model on them.

    ``X`` is a :class:`spin_fast.GraphBatch`, or a list of graphs as :class:`SPINClassifier` takes it. Node features are
    compared by their values: numbers that are measured, and hardly ever equal, make every node a pattern of its own.

    Args:
        num_hops: ``R``, rounds of refinement.
        n_features: columns, at most 2**31; two patterns share one with a chance of ``1 / n_features``.
        norm: divide rows by their ``"l2"`` norm, which makes the kernel a cosine, or by their ``"l1"`` norm, which
            makes them proportions; None leaves counts.
        edge_types: take edge weights, whole numbers, as types of edges, which then count as different.
        seed: of the hash.

    Attributes:
        n_features_in_: features of a node.
    """

    num_hops: int = 3
    _: KW_ONLY
    n_features: int = 2**20
    norm: Norm | None = "l2"
    edge_types: bool = False
    seed: int = 0

    def fit(self, X: Any, y: Any = None) -> SubtreeCounts:
        """Check the arguments, and note the number of node features; nothing else is learnt.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        check_options(self.num_hops, self.norm, self.edge_types, self.seed, n_features=self.n_features)
        graphs = self._batch(X)
        check_finite(graphs)
        if self.edge_types:
            edge_types_of(graphs, "X")
        self.n_features_in_ = graphs.num_features
        return self

    def transform(self, X: Any) -> csr_array:
        """The counts ``[G, n_features]``, a sparse array of float64.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        check_is_fitted(self)
        graphs = self._batch(X)
        self._check_features(graphs)
        counts = subtree_counts(
            graphs,
            num_hops=self.num_hops,
            num_columns=self.n_features,
            norm=self.norm,
            edge_types=self.edge_types,
            seed=self.seed,
        )
        return counts.to_scipy(self.n_features)
