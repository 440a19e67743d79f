"""The rows of all branches, and which of them each graph has; their storage in files."""

from . import shards
from .power_features import PowerFeatures

__all__ = ["PowerFeatures", "shards"]
