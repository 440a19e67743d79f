"""Power features: the distinct rows of all branches, the segments that refer to them, and their storage in files."""

from . import shards
from .power_features import PowerFeatures

__all__ = ["PowerFeatures", "shards"]
