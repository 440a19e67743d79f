"""``distinct_rows``: the public function, the same of powers in chunks, and the fake kernel of the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common import check
from . import native, reference
from .invariants import contents_are_readable


def distinct_rows(
    powers: Tensor, ptr: Tensor, *, index_dtype: torch.dtype | None = None, check_invariants: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the distinct rows of each branch, and which of them each graph has how often.

    Rows are equal if their bits are, with -0 made +0; a NaN equals a NaN of the same bits. Not differentiable.

    Args:
        powers: ``[R + 1, N, d]`` float32, float64, bfloat16 or float16, at least one branch.
        ptr: ``[G + 1]`` int64 node offsets of the graphs.
        index_dtype: of row numbers, int32 or int64; by default int32 where ``(R + 1) * N`` fits.
        check_invariants: check the contents of ``ptr``; False where the caller vouches for them.

    Returns:
        ``rows [U, d]``, the distinct rows of all branches one after the other, in a branch by first appearance;
        ``row_ptr [R + 2]`` int64 on the CPU, where each branch begins;
        ``ptr [S + 1]`` int64, ``index [nnz]`` and ``count [nnz]`` int32: which rows each segment has, ascending, and
        how often;
        ``row_of_node [R + 1, N]``.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    def call() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        wide = _row_type(powers, index_dtype) == torch.int64
        arguments = (powers.detach().contiguous(), ptr.contiguous(), wide, 64, check_invariants)
        return torch.ops.spin_fast.distinct_rows.default(*arguments)

    if native.op_checks(powers, check_invariants) and index_dtype in (None, *check.INTEGERS):
        try:
            return call()
        except native.REFUSALS:
            pass  # the checks below say why, or else the next call does
    check.tensor("powers", powers, ("branches", "N", "d"), check.STORED)
    num_branches, num_nodes, _ = powers.shape
    if num_branches == 0:
        raise ValueError("powers must have at least 1 branch, got 0")
    check.offsets_shape("ptr", ptr, powers.device)
    if index_dtype not in (None, *check.INTEGERS):
        raise TypeError(f"index_dtype must be torch.int32 or torch.int64, got {index_dtype}")
    if index_dtype == torch.int32 and num_branches * num_nodes >= 2**31:
        raise ValueError(f"index_dtype must be torch.int64 for {num_branches * num_nodes} rows, got {index_dtype}")
    check_invariants = check.flag("check_invariants", check_invariants)
    if (
        check_invariants
        and contents_are_readable(ptr)
        and (problem := reference.check_offsets("ptr", ptr, num_nodes, "nodes"))
    ):
        raise ValueError(problem)
    if native.has_kernel(powers.device):
        return call()
    return reference.distinct_rows(powers.detach(), ptr, index_dtype=_row_type(powers, index_dtype))


def _row_type(powers: Tensor, index_dtype: torch.dtype | None) -> torch.dtype:
    if index_dtype is not None:
        return index_dtype
    return torch.int32 if powers.shape[0] * powers.shape[1] < 2**31 else torch.int64


class DistinctRows:
    """:func:`distinct_rows` of powers that come chunk by chunk and need never be in memory at once.

    For :meth:`spin_fast.PowerFeatures.from_graphs`: arguments are not checked.

    Args:
        num_branches: ``R + 1``.
        x: ``[N, d]`` float32 or float64, as large as a branch of all chunks together.
        num_graphs: of all chunks together.
        node_rows: keep ``row_of_node``.
    """

    def __init__(self, num_branches: int, x: Tensor, num_graphs: int, *, node_rows: bool = True) -> None:
        wide, self._node_rows = num_branches * len(x) >= 2**31, node_rows
        self._is_native = x.is_cpu and native.has_kernel(x.device)
        self._found: Any
        if self._is_native:
            sizes = (num_branches, *x.shape, num_graphs, x.element_size())
            self._found = native.library.DistinctRows(*sizes, wide, node_rows)  # type: ignore[union-attr]
        else:
            self._found = reference.DistinctRows(num_branches, x[:0].detach(), torch.int64 if wide else torch.int32)

    def add(self, powers: Tensor, ptr: Tensor) -> None:
        """Take in the next graphs: contiguous ``powers [R + 1, n, d]``, and ``ptr [graphs + 1]`` into them."""
        if self._is_native:
            self._found.add(powers.numpy(), ptr.numpy())
        else:
            self._found.add(powers, ptr)

    @property
    def num_rows(self) -> int:
        """Distinct rows of all branches so far."""
        return self._found.num_rows()

    def take(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return what :func:`distinct_rows` does if all chunks are one, and keep nothing."""
        found = self._found.take()
        if self._is_native:
            found = map(torch.from_numpy, found)
        rows, row_ptr, ptr, index, count, row_of_node = found
        return rows, row_ptr, ptr, index, count, row_of_node if self._node_rows else None


def _fake(powers, ptr, wide_index, hash_bits, check_invariants):  # type: ignore[no-untyped-def]
    context = torch.library.get_ctx()
    num_rows, num_entries = context.new_dynamic_size(), context.new_dynamic_size()
    index = ptr.new_empty(num_entries, dtype=torch.int64 if wide_index else torch.int32)
    return (
        powers.new_empty(num_rows, powers.shape[2]),
        ptr.new_empty(powers.shape[0] + 1, device="cpu"),
        ptr.new_empty(powers.shape[0] * (ptr.shape[0] - 1) + 1),
        index,
        ptr.new_empty(num_entries, dtype=torch.int32),
        index.new_empty(powers.shape[:2]),
    )


native.register("distinct_rows", _fake)
