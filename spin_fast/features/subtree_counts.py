"""Counts of subtree patterns (1-WL) in hashed columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import ops
from .._common import check
from .._common.indexing import offsets
from ..graphs.batch import GraphBatch

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Norm = Literal["l1", "l2"]
NORMS = ("l1", "l2")
MOST_COLUMNS = 2**31  # so that a graph and a column fit in an int64


class SubtreeCounts(NamedTuple):
    """A sparse matrix, a row per graph.

    Attributes:
        ptr: ``[G + 1]`` int64, offsets of the rows.
        column: ``[nnz]`` int64, ascending within a row, each once.
        value: ``[nnz]`` float64.
    """

    ptr: Tensor
    column: Tensor
    value: Tensor

    def to_scipy(self, num_columns: int) -> csr_array:
        """The same as a sparse array ``[G, num_columns]`` of scipy."""
        from scipy.sparse import csr_array

        shape = (len(self.ptr) - 1, num_columns)
        narrow = torch.int32 if max(*shape, len(self.column)) < 2**31 else torch.int64  # for liblinear
        column, ptr = (index.to(narrow).cpu().numpy() for index in (self.column, self.ptr))
        return csr_array((self.value.cpu().numpy(), column, ptr), shape=shape)


def check_options(num_hops: Any, norm: Any, edge_types: Any, seed: Any, **num_columns: Any) -> None:
    """Check arguments of :func:`subtree_counts`; ``num_columns`` by the name that the caller has for it.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    check.integer("num_hops", num_hops, 0)
    for name, number in num_columns.items():
        if check.integer(name, number, 1) > MOST_COLUMNS:
            raise ValueError(f"{name} must be at most 2**31, got {number}")
    if norm is not None and norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)} or None, got {norm!r}")
    check.flag("edge_types", edge_types)
    check.integer("seed", seed, 0)


def edge_types_of(graphs: GraphBatch, name: str = "graphs") -> Tensor:
    """The edge weights as types ``[E]`` int64.

    Raises:
        ValueError: there are none, or others than whole numbers.
    """
    weight = graphs.edge_weight
    if weight is None:
        raise ValueError(f"{name} must have edge weights, the types of edges, where edge_types is True")
    if not bool(((weight == weight.round()) & (weight.abs() < 2**53)).all()):  # of larger ones not all are numbers
        raise ValueError(f"{name} must have whole numbers as edge weights where edge_types is True")
    return weight.long()


def subtree_counts(
    graphs: GraphBatch,
    *,
    num_hops: int,
    num_columns: int,
    norm: Norm | None,
    edge_types: bool,
    seed: int,
    features: Sequence[int] | None = None,
) -> SubtreeCounts:
    """Count how often each subtree pattern occurs in each graph, after 0 to ``num_hops`` hops.

    The column of a pattern is its key, taken as an unsigned number, modulo ``num_columns``. The same bits on every
    device, whatever graphs are beside it.

    Args:
        graphs: their nodes are compared by the values of their features.
        num_hops, seed: those of :func:`spin_fast.subtree_keys`.
        num_columns: patterns share one with a chance of one to as many.
        norm: divide rows by their ``"l1"`` or ``"l2"`` norm; None for counts.
        edge_types: take the edge weights, whole numbers, as types of edges.
        features: which columns of ``graphs.x`` are compared; None for all.
    """
    x = graphs.x if features is None else graphs.x[:, list(features)]
    types = edge_types_of(graphs) if edge_types else None
    entries, count = subtree_entries(
        graphs.indptr, graphs.indices, x, graphs.ptr, num_hops, num_columns, seed, types
    ).unique_consecutive(return_counts=True)
    row = entries // num_columns
    value = count.double()
    if norm is not None:
        size = torch.zeros(len(graphs), dtype=torch.int64, device=row.device)
        size.index_add_(0, row, count if norm == "l1" else count * count)  # of integers: in any order
        value /= (size.double() if norm == "l1" else size.double().sqrt())[row]
    return SubtreeCounts(offsets(row.bincount(minlength=len(graphs))), entries % num_columns, value)


def subtree_entries(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    ptr: Tensor,
    num_hops: int,
    num_columns: int,
    seed: int,
    edge_type: Tensor | None,
) -> Tensor:
    """``graph * num_columns + column`` of every node after each hop, ``[N * (num_hops + 1)]`` int64, ascending."""
    columns = subtree_columns(indptr, indices, x, num_hops, num_columns, seed, edge_type)
    graph = torch.bucketize(torch.arange(x.shape[0], device=x.device), ptr[1:], right=True)
    return (graph[:, None] * num_columns + columns.T).flatten().sort().values  # hardly unsorted, graph after graph


def subtree_columns(
    indptr: Tensor, indices: Tensor, x: Tensor, num_hops: int, num_columns: int, seed: int, edge_type: Tensor | None
) -> Tensor:
    """The column of every node after each hop, ``[num_hops + 1, N]`` int64."""
    keys = ops.subtree_keys(indptr, indices, x, num_hops, edge_type=edge_type, seed=seed, check_invariants=False)
    beyond = num_columns - 2**64 % num_columns  # what negative keys, those from 2^63 on, are too large by
    return (keys.remainder(num_columns) - beyond * (keys < 0)).remainder(num_columns)
