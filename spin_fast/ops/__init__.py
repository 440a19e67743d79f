"""The public operations, a module for each: check the arguments, call the kernel, or the reference where there is none.

A kernel that takes its arguments checks them itself. Python checks them again where it refuses, to say by name and type
what is wrong, and where contents are not the kernel's to check.

Under the transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp``, ...) and in forward-mode differentiation the
reference implementations run, which are made of what these can transform. Autocast changes no operation but in this:
``attention_readout`` takes ``w`` in the dtype of ``z``, and ``branch_readout`` takes half types as float32, in which it
computes.

Letters in the shapes: ``G`` graphs, ``N`` nodes, ``E`` edges, ``d`` features, ``h`` branch width, ``R`` hops, ``R + 1``
branches, ``S = (R + 1) * G`` segments in branch-major order, ``U`` distinct rows, ``J`` joint rows, ``nnz`` entries.
"""

from .branch import bind_branch_readout, branch_readout
from .csr import check_ends, csr_of_edges
from .distinct import DistinctRows, distinct_rows
from .evaluated import EvaluatedRows, chunks_at_once, classifier_of
from .invariants import check_csr, check_parts, check_segments, check_sparse_rows
from .joint import JointRows, joint_rows
from .native import may_use_tf32
from .parameters import BRANCHES, MOST_LAYERS, ModelSizes, parameter_shapes
from .power import power_features
from .readout import attention_readout, sum_readout
from .subtree import subtree_keys
from .training_step import Adam, bind_training_step, training_step, training_steps

__all__ = [
    "BRANCHES",
    "MOST_LAYERS",
    "Adam",
    "DistinctRows",
    "EvaluatedRows",
    "JointRows",
    "ModelSizes",
    "attention_readout",
    "bind_branch_readout",
    "bind_training_step",
    "branch_readout",
    "check_csr",
    "check_ends",
    "check_parts",
    "check_segments",
    "check_sparse_rows",
    "chunks_at_once",
    "classifier_of",
    "csr_of_edges",
    "distinct_rows",
    "joint_rows",
    "may_use_tf32",
    "parameter_shapes",
    "power_features",
    "subtree_keys",
    "sum_readout",
    "training_step",
    "training_steps",
]
