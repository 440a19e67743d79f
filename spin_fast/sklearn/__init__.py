"""Estimators of scikit-learn: a classifier of graphs, and a transformer of their node features."""

from .classifier import SPINClassifier
from .transformer import NodeFeaturesTransformer

__all__ = ["NodeFeaturesTransformer", "SPINClassifier"]
