"""Models as torch modules: from the rows of the branches to class scores."""

from .export import export
from .layers import BranchLinear, BranchNorm
from .spin import SPIN

__all__ = ["SPIN", "BranchLinear", "BranchNorm", "export"]
