"""Rows ``[U, d]``, dense or in torch's compressed sparse rows (CSR), whose values that are left out are +0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import check
from .indexing import offsets, ragged_arange

MOST_VALUES = 2**31 - 1  # of sparse rows, whose indices are int32
ROWS_AT_ONCE = 1 << 16
SparseArrays = tuple[Tensor, Tensor | None, Tensor | None, int]


# Once per process torch says that CSR is in beta, and some releases that it is not checked. Little but its arrays is
# used here.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Sparse (CSR tensor support is in beta|invariant checks)")
    torch.sparse_csr_tensor([0], [], [], (0, 0), check_invariants=False)


def is_sparse(rows: Tensor) -> bool:
    return rows.layout is torch.sparse_csr


def check_ragged(rows: Tensor) -> None:
    """Check type, shape and dtype of dense rows or sparse ones; the contents of indices are not read."""
    if not isinstance(rows, Tensor) or not is_sparse(rows):
        check.tensor("rows", rows, ("U", "d"), check.FLOATS)
        return
    if rows.dim() != 2:
        raise check.ArgumentValueError("rows", "have shape [U, d]", list(rows.shape))
    check.tensor("rows.crow_indices()", rows.crow_indices(), (rows.shape[0] + 1,), (torch.int32,))
    check.tensor("rows.col_indices()", rows.col_indices(), ("nnz",), (torch.int32,))
    check.tensor("rows.values()", rows.values(), (rows.col_indices().shape[0],), check.FLOATS)
    if rows.requires_grad:
        raise check.ArgumentValueError("rows", "be dense to have a gradient", rows.layout)


def sparse_rows(values: Tensor, crow_indices: Tensor, col_indices: Tensor, num_features: int) -> Tensor:
    """A CSR tensor of these arrays, whose contents are not read."""
    size = (crow_indices.shape[0] - 1, num_features)
    return torch.sparse_csr_tensor(crow_indices, col_indices, values, size, check_invariants=False)


def checked_sparse_rows(values: Tensor, crow_indices: Any, col_indices: Any, num_features: int) -> Tensor:
    """The same of arrays whose shapes and dtypes are checked; raises TypeError, ValueError."""
    check.integer("num_features", num_features, 0, bits=31)
    check.tensor("rows", values, ("nnz",), check.FLOATS)
    check.tensor("crow_indices", crow_indices, ("U + 1",), (torch.int32,), values.device)
    check.tensor("col_indices", col_indices, (len(values),), (torch.int32,), values.device)
    if len(crow_indices) == 0:
        raise ValueError("crow_indices must have at least one entry, got none")
    return sparse_rows(values, crow_indices, col_indices, num_features)


def arrays_of(rows: Tensor) -> SparseArrays:
    """What an op takes for rows: the rows or their values, ``crow_indices``, ``col_indices``, and ``d``."""
    if not is_sparse(rows):
        return rows, None, None, rows.shape[1]
    arrays = (rows.values(), rows.crow_indices(), rows.col_indices())
    values, crow_indices, col_indices = (array.contiguous() for array in arrays)
    return values, crow_indices, col_indices, rows.shape[1]


def rows_of(values: Tensor, crow_indices: Tensor | None, col_indices: Tensor | None, num_features: int) -> Tensor:
    """The rows of :func:`arrays_of`."""
    if crow_indices is None or col_indices is None:
        return values
    return sparse_rows(values, crow_indices, col_indices, num_features)


def values_of(rows: Tensor, num_rows: int | None = None) -> Tensor:
    """The values of the first rows, or of all, in any shape; of sparse rows those that are stored."""
    if not is_sparse(rows):
        return rows[:num_rows]
    return rows.values() if num_rows is None else rows.values()[: int(rows.crow_indices()[num_rows])]


def take(rows: Tensor, ids: Tensor) -> Tensor:
    """The rows of these numbers, in the same layout: ``rows.index_select(0, ids)``."""
    if not is_sparse(rows):
        return rows.index_select(0, ids)
    crow_indices = rows.crow_indices()
    starts = crow_indices.index_select(0, ids).long()
    sizes = crow_indices.index_select(0, ids + 1).long() - starts
    if (num_values := int(sizes.sum())) > MOST_VALUES:
        raise ValueError(f"rows must have at most {MOST_VALUES} values that are not 0, got {num_values}")
    entries = ragged_arange(starts, sizes)
    arrays = (rows.values()[entries], offsets(sizes).int(), rows.col_indices()[entries])
    return sparse_rows(*arrays, rows.shape[1])


def dense(rows: Tensor) -> Tensor:
    """The rows as a strided tensor: themselves, if they are one."""
    return rows.to_dense() if is_sparse(rows) else rows


def with_arrays(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of which ``function`` was applied to all arrays; dense where that moves them to a GPU."""
    if not is_sparse(rows):
        return function(rows)
    values, crow_indices, col_indices = (
        function(of) for of in (rows.values(), rows.crow_indices(), rows.col_indices())
    )
    moved = sparse_rows(values, crow_indices, col_indices, rows.shape[1])
    return moved if values.is_cpu else dense(moved)


def take_dense(rows: Tensor, ids: Tensor) -> Tensor:
    """The rows of these numbers, of any shape, dense: ``rows[ids]``."""
    if not is_sparse(rows):
        return rows[ids]
    taken = torch.empty(ids.numel(), rows.shape[1], dtype=rows.dtype, device=rows.device)
    for some, block in zip(ids.flatten().split(ROWS_AT_ONCE), taken.split(ROWS_AT_ONCE), strict=True):
        block.copy_(dense(take(rows, some)))
    return taken.view(*ids.shape, rows.shape[1])
