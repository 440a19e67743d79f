"""Models as torch modules: from graphs, or the rows of the branches, to class scores."""

from .base import GraphClassifier, GraphModel
from .ensemble import Ensemble
from .export import export
from .layers import BranchLinear, BranchNorm
from .pagnn import PAGNN, AttentionReadout, BranchAttention, LinkPredictor
from .spin import SPIN
from .subtree_linear import SubtreeLinear

__all__ = [
    "PAGNN",
    "SPIN",
    "AttentionReadout",
    "BranchAttention",
    "BranchLinear",
    "BranchNorm",
    "Ensemble",
    "GraphClassifier",
    "GraphModel",
    "LinkPredictor",
    "SubtreeLinear",
    "export",
]
