"""Graphs as flat arrays, node features made of them, and other libraries' graphs."""

from .batch import GraphBatch
from .node_features import NodeFeatures

__all__ = ["GraphBatch", "NodeFeatures"]
