"""spin_fast: SPIN graph classification on fast kernels for the precomputation and the readout."""

from importlib.metadata import version

from . import datasets, training
from .features import shards
from .features.power_features import PowerFeatures
from .graphs.batch import GraphBatch
from .graphs.node_features import NodeFeatures
from .nn import PAGNN, SPIN
from .ops import attention_readout, branch_readout, power_features, reference, subtree_keys, sum_readout
from .ops.native import available as native_available
from .ops.native import build_info

__version__ = version("spin_fast")
__all__ = [
    "PAGNN",
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
    "subtree_keys",
    "sum_readout",
    "training",
]
