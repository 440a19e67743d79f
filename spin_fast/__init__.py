"""spin_fast: SPIN graph classification on fast kernels for the precomputation and the readout."""

from importlib.metadata import version

from . import datasets, reference, shards, training
from ._native import available as native_available
from ._native import build_info
from .features import PowerFeatures
from .graphs import GraphBatch
from .nn import SPIN
from .ops import attention_readout, branch_readout, power_features, sum_readout
from .preprocessing import NodeFeatures

__version__ = version("spin_fast")
__all__ = [
    "SPIN",
    "GraphBatch",
    "NodeFeatures",
    "PowerFeatures",
    "attention_readout",
    "branch_readout",
    "build_info",
    "datasets",
    "native_available",
    "power_features",
    "reference",
    "shards",
    "sum_readout",
    "training",
]
