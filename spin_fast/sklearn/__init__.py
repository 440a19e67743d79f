"""Estimators of scikit-learn: a classifier of graphs, and transformers: of node features, to subtree counts."""

from .classifier import SPINClassifier
from .subtree_counts import SubtreeCounts
from .transformer import NodeFeaturesTransformer

__all__ = ["NodeFeaturesTransformer", "SPINClassifier", "SubtreeCounts"]
