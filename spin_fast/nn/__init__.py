"""Models as torch modules: from the rows of the branches to class scores."""

from .base import GraphClassifier
from .export import export
from .layers import BranchLinear, BranchNorm
from .pagnn import PAGNN, AttentionReadout, BranchAttention, LinkPredictor
from .spin import SPIN

__all__ = [
    "PAGNN",
    "SPIN",
    "AttentionReadout",
    "BranchAttention",
    "BranchLinear",
    "BranchNorm",
    "GraphClassifier",
    "LinkPredictor",
    "export",
]
