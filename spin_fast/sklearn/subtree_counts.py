"""Counts of subtree patterns (1-WL) as a transformer of scikit-learn."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from sklearn.base import TransformerMixin
from sklearn.preprocessing import normalize
from sklearn.utils.validation import check_is_fitted

from .. import ops
from .._common import check
from ..graphs.batch import GraphBatch
from .transformer import GraphEstimator, check_finite

if TYPE_CHECKING:
    from scipy.sparse import csr_array

NORMS = ("l1", "l2")


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
        n_features: columns; two patterns share one with a chance of ``1 / n_features``.
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
    norm: Literal["l1", "l2"] | None = "l2"
    edge_types: bool = False
    seed: int = 0

    def fit(self, X: Any, y: Any = None) -> SubtreeCounts:
        """Check the arguments, and note the number of node features; nothing else is learnt.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        check.integer("num_hops", self.num_hops, 0)
        check.integer("n_features", self.n_features, 1)
        if self.norm is not None and self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)} or None, got {self.norm!r}")
        check.flag("edge_types", self.edge_types)
        check.integer("seed", self.seed, 0)
        graphs = self._batch(X)
        check_finite(graphs)
        if self.edge_types:
            _types(graphs)
        self.n_features_in_ = graphs.num_features
        return self

    def transform(self, X: Any) -> csr_array:
        """The counts ``[G, n_features]``, a sparse array of float64.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        from scipy.sparse import coo_array

        check_is_fitted(self)
        graphs = self._batch(X)
        self._check_features(graphs)
        graphs = graphs.cpu()
        keys = ops.subtree_keys(
            graphs.indptr,
            graphs.indices,
            graphs.x,
            self.num_hops,
            edge_type=_types(graphs) if self.edge_types else None,
            seed=self.seed,
            check_invariants=False,
        )
        narrow = np.int32 if max(keys.numel(), len(graphs), self.n_features) < 2**31 else np.int64  # for liblinear
        columns = (keys.numpy().view(np.uint64) % np.uint64(self.n_features)).astype(narrow)
        rows = np.repeat(np.arange(len(graphs), dtype=narrow), graphs.num_nodes_per_graph.numpy())
        places = (np.tile(rows, len(columns)), columns.ravel())
        counts = coo_array((np.ones(columns.size), places), shape=(len(graphs), self.n_features)).tocsr()
        return counts if self.norm is None or len(graphs) == 0 else normalize(counts, self.norm)


def _types(graphs: GraphBatch) -> torch.Tensor:
    weight = graphs.edge_weight
    if weight is None:
        raise ValueError("X must have edge weights, the types of edges, where edge_types is True")
    if not torch.equal(weight, weight.round()):
        raise ValueError("X must have whole numbers as edge weights where edge_types is True")
    return weight.long()
