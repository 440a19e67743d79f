"""Joint rows: the rows of all branches of a node side by side, each different one once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._common import check
from .distinct import distinct_rows


@dataclass(frozen=True, eq=False)
class JointRows:
    """The joint rows of some graphs, and which of them each graph has how often.

    Two nodes have the same joint row if they have the same row in every branch. The rows themselves are not stored:
    a joint row is the numbers of its parts, from which they are gathered.

    Attributes:
        parts: ``[J, R + 1]`` int32 or int64, the row of each branch that a joint row consists of.
        ptr: ``[G + 1]`` int64, the entries of each graph.
        index: ``[nnz]``, the joint row of each entry; None for the identity.
        count: ``[nnz]`` int32, how often it occurs in the graph; None for ones.
    """

    parts: Tensor
    ptr: Tensor
    index: Tensor | None = None
    count: Tensor | None = None


def joint_rows(row_of_node: Tensor, ptr: Tensor) -> JointRows:
    """Find the distinct joint rows of nodes.

    Args:
        row_of_node: ``[R + 1, N]`` int32 or int64, the row of each node in each branch.
        ptr: ``[G + 1]`` int64 node offsets of the graphs.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    check.tensor("row_of_node", row_of_node, ("branches", "N"), check.INTEGERS)
    numbers = row_of_node.t().contiguous()  # to be compared bit by bit, as the rows of a single branch
    bits = numbers.view(torch.float32 if numbers.dtype == torch.int32 else torch.float64)
    rows, _, segments, index, count, _ = distinct_rows(bits[None], ptr)
    return JointRows(rows.view(numbers.dtype), segments, index, count)
