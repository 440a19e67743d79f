"""What must hold of the contents of index arrays, checked on the CPU.

The contents of arrays on a GPU are never checked, since no operation waits for a GPU, except for ``distinct_rows``,
whose results are as large as what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .._common import check, torch_compat
from .._common.rows import is_sparse
from . import native, reference


def contents_are_readable(value: Tensor) -> bool:
    """Reading a GPU's memory would synchronise; while compiling there is nothing to read (the kernels then check).

    Nor is there in a transform, where the reference implementations run, which bad contents may fail but not crash.
    """
    return value.device.type == "cpu" and not torch.compiler.is_compiling() and not torch_compat.is_transformed()


def _array(values: Tensor | None) -> np.ndarray | None:
    return None if values is None else values.contiguous().numpy()


def check_csr(
    indptr: Tensor,
    indices: Tensor,
    ptr: Tensor | None,
    num_nodes: int,
    *,
    check_invariants: bool = True,
    device: torch.device | None = None,
) -> None:
    """Check a CSR adjacency and, on the CPU, its contents: monotone offsets, columns in range and in their own graph.

    Args:
        check_invariants: check contents.
        device: that the arrays must be on, if it matters.

    Raises:
        TypeError, ValueError: name the argument, and the first entry that is wrong.
    """
    check.tensor("indptr", indptr, (check.integer("num_nodes", num_nodes, 0) + 1,), check.INTEGERS, device)
    check.tensor("indices", indices, ("E",), (indptr.dtype,), indptr.device)
    if ptr is not None:
        check.offsets_shape("ptr", ptr, indptr.device)
    if not check_invariants or not contents_are_readable(indptr):
        return
    if native.library is None:
        problem = reference.check_csr(indptr, indices, ptr, num_nodes)
    else:
        problem = native.library.check_csr(_array(indptr), _array(indices), _array(ptr), num_nodes)
    if problem:
        raise ValueError(problem)


def check_segments(
    ptr: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    num_rows: int,
    row_ptr: Tensor | Sequence[int] | None = None,
    *,
    check_invariants: bool = True,
) -> None:
    """Check segments and, on the CPU, their contents: monotone offsets, row numbers in range, counts positive.

    Args:
        row_ptr: the range of rows that each branch may refer to; None: every branch to all rows.
        check_invariants: check contents.

    Raises:
        TypeError, ValueError: name the argument, and the first entry that is wrong.
    """
    check.offsets_shape("ptr", ptr)
    num_entries = check.integer("num_rows", num_rows, 0)
    if index is not None:
        check.tensor("index", index, ("nnz",), check.INTEGERS, ptr.device)
        num_entries = index.numel()
    if count is not None:
        check.tensor("count", count, (num_entries,), (torch.int32,), ptr.device)
    if not check_invariants or not contents_are_readable(ptr):
        return
    row_ptr = None if row_ptr is None else torch.as_tensor(row_ptr, device="cpu")
    if native.library is None:
        problem = reference.check_segments(ptr, index, count, num_rows, row_ptr)
    else:
        row_ptr = torch.tensor([0, num_rows], device="cpu") if row_ptr is None else row_ptr
        problem = native.library.check_segments(_array(ptr), _array(index), _array(count), _array(row_ptr))
    if problem:
        raise ValueError(problem)


def check_sparse_rows(rows: Tensor) -> None:
    """Check, on the CPU, the indices of rows in CSR layout: monotone offsets, columns in range that ascend in a row.

    Raises:
        ValueError: names the indices, and the first entry that is wrong.
    """
    if not is_sparse(rows) or not contents_are_readable(rows):
        return
    crow_indices, col_indices = rows.crow_indices(), rows.col_indices()
    if native.library is not None:
        problem = native.library.check_sparse_rows(_array(crow_indices), _array(col_indices), rows.shape[1])
    else:
        problem = reference.check_sparse_rows(crow_indices, col_indices, rows.shape[1])
    if problem:
        raise ValueError(problem)


def check_parts(name: str, parts: Tensor, num_rows: int) -> None:
    """Check, on the CPU, that the parts of joint rows are among ``num_rows`` rows."""
    if contents_are_readable(parts) and parts.numel():
        low, high = int(parts.min()), int(parts.max())
        if low < 0 or high >= num_rows:
            raise ValueError(f"{name} must be in [0, {num_rows}), got {low} to {high}")


def check_rows(
    z: Tensor,
    ptr: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    num_branches: int | None,
    check_invariants: bool,
) -> int:
    """Check ``z`` of the dense or the ragged form with its segments, and return the number of branches."""
    dense = isinstance(z, Tensor) and z.dim() == 3
    check.tensor("z", z, ("branches", "N", "h") if dense else ("rows", "h"), check.STORED)
    return check_forms("z", z, ptr, index, count, num_branches, check_invariants, z.shape[-2])


def check_forms(
    name: str,
    rows: Tensor,
    ptr: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    num_branches: int | None,
    check_invariants: bool,
    num_rows: int,
) -> int:
    """The rest of :func:`check_rows`, of rows that are checked; ``num_rows`` is the number that entries refer to."""
    dense = rows.dim() == 3
    check.offsets_shape("ptr", ptr, rows.device)
    if num_branches is not None:
        num_branches = check.integer("num_branches", num_branches, 1)
    if dense:
        for other, value in (("index", index), ("count", count)):
            if value is not None:
                raise ValueError(f"{other} must come with the ragged form of {name}, got {name} with three axes")
        if len(rows) == 0 or (num_branches is not None and num_branches != len(rows)):
            raise ValueError(f"{name} must have {num_branches or 'at least 1'} branches, got {len(rows)}")
        num_branches = len(rows)
    else:
        num_branches = num_branches or 1
        if (ptr.numel() - 1) % num_branches:
            raise ValueError(f"ptr must have a multiple of {num_branches} segments (branches), got {ptr.numel() - 1}")
    check.flag("check_invariants", check_invariants)
    check_segments(ptr, index, count, num_rows, check_invariants=bool(check_invariants))
    return num_branches


def num_graphs(ptr: Tensor, num_branches: int, shared: bool) -> int:
    """Graphs of ``ptr``, which is that of every branch (``shared``) or has the segments of all."""
    return (ptr.shape[0] - 1) // (1 if shared else num_branches)
