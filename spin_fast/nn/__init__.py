"""Models as torch modules: from the rows of the branches to class scores."""

from .layers import BranchLinear, BranchNorm
from .spin import SPIN

__all__ = ["SPIN", "BranchLinear", "BranchNorm"]
