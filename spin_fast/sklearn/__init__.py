"""A classifier of graphs and a transformer of their node features, as estimators of scikit-learn."""

from .classifier import SPINClassifier
from .transformer import NodeFeaturesTransformer

__all__ = ["NodeFeaturesTransformer", "SPINClassifier"]
