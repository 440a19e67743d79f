"""``distinct_rows``: the public function, the same of powers in chunks, and the fake kernel of the op."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._common import check
from .._common.rows import sparse_rows, take_dense
from . import native, reference
from .invariants import contents_are_readable

WIDE = 2**31  # rows from which on their numbers are int64
KNOWN_ROWS = 1 << 16  # of a branch, that are handed over at once


def distinct_rows(
    powers: Tensor, ptr: Tensor, *, index_dtype: torch.dtype | None = None, check_invariants: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the distinct rows of each branch, and which of them each graph has how often.

    Rows are equal if their bits are, with -0 made +0; a NaN equals a NaN of the same bits. Not differentiable. On a
    CPU a branch must have fewer than 2^31 distinct rows.

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
        wide = (index_dtype or _row_type(powers.shape[0] * powers.shape[1])) == torch.int64
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
    if native.has_kernel(powers):
        return call()
    return reference.distinct_rows(powers.detach(), ptr, index_dtype=index_dtype or _row_type(num_branches * num_nodes))


def _row_type(num_rows: int) -> torch.dtype:
    return torch.int32 if num_rows < WIDE else torch.int64


def has_kernel_of_chunks(x: Tensor) -> bool:
    """Whether a kernel takes chunk after chunk, and not each as a whole."""
    return x.is_cpu and native.has_kernel(x)


class DistinctRows:
    """:func:`distinct_rows` of powers that come chunk by chunk and need never be in memory at once.

    For :class:`spin_fast.PowerFeatures`: arguments are not checked. The kernel, unlike the reference, may return rows
    in torch's CSR layout: where a dense row takes 256 bytes or more and those of the first graph that has nodes take at
    most a quarter of their memory so, unless in the end the rows of all take more than dense ones.

    On a GPU each chunk is a call of :func:`distinct_rows`, in which the rows so far stand before those of the chunk, so
    chunks should be large. On the CPU the kernel has room for a number of nodes and graphs, in memory that is not
    touched before it is used. Where more come than that, what is found of the graphs so far is set aside, and the
    kernel starts anew, with twice the room, from the rows that are distinct so far, which keep their numbers.

    Args:
        num_branches: ``R + 1``.
        x: ``[*, d]`` float32 or float64, of the dtype, width and device of the powers.
        num_nodes, num_graphs: of all chunks together, where they are known; otherwise there will be room for more.
        node_rows: keep ``row_of_node``.
        operator: of the hops; for :meth:`add_graphs`.

    Attributes:
        num_branches: as given.
        num_graphs: so far.
    """

    _is_sparse: bool | None = None  # None until the kernel has chosen

    def __init__(
        self,
        num_branches: int,
        x: Tensor,
        *,
        num_nodes: int = 0,
        num_graphs: int = 0,
        node_rows: bool = True,
        operator: str = "",
    ) -> None:
        self._operators = operator.split(",") if operator else []
        self.num_branches = num_branches
        self._x = torch.empty(0, x.shape[1], dtype=x.dtype, device=x.device)
        self._node_rows = node_rows
        self._num_nodes = self.num_graphs = 0
        self._set_aside: reference.Lists = [[] for _ in range(num_branches)]
        self._is_native = has_kernel_of_chunks(x)
        self._found: Any
        if self._is_native:
            self._start(num_nodes, num_graphs)
        else:
            self._found = reference.DistinctRows(num_branches, self._x, partial(distinct_rows, check_invariants=False))

    def _start(self, num_nodes: int, num_graphs: int) -> None:
        sizes = (self.num_branches, num_nodes, self._x.shape[1], num_graphs, self._x.element_size())
        is_wide = _row_type(self.num_branches * num_nodes) == torch.int64
        options = (is_wide, self._node_rows, self._is_sparse, self._operators)
        self._found = native.library.DistinctRows(*sizes, *options)  # type: ignore[union-attr]
        self._nodes_left, self._graphs_left = num_nodes, num_graphs
        self._known_nodes = self._known_graphs = 0  # that stand for the rows of earlier chunks

    def add(self, powers: Tensor, ptr: Tensor) -> None:
        """Take in the next graphs: contiguous ``powers [R + 1, n, d]``, and ``ptr [graphs + 1]`` into them."""
        if self._is_native:
            self._make_room(ptr)
            self._found.add(powers.numpy(), ptr.numpy())
        else:
            self._found.add(powers, ptr)
        self._count(ptr)

    def add_graphs(self, graphs: Any, node_ptr: Tensor) -> bool:
        """Take in the next graphs by their patterns, ``node_ptr [graphs + 1]`` their nodes in a batch.

        A pattern is what a node's row is made of, see ``csrc/cpu/patterns.h``. False where their powers are to be added
        instead: rows are narrow, patterns hardly repeat, a graph is large, or edges have weights.
        """
        arrays = (graphs.indptr, graphs.indices, graphs.x.detach())
        if not self._is_native or graphs.edge_weight is not None:
            return False
        if not all(array.is_contiguous() for array in arrays):
            return False
        self._make_room(node_ptr)
        if not self._found.add_graphs(*(array.numpy() for array in arrays), node_ptr.numpy()):
            return False
        self._count(node_ptr)
        return True

    def _make_room(self, ptr: Tensor) -> None:
        num_nodes, num_graphs = int(ptr[-1] - ptr[0]), ptr.numel() - 1
        if num_nodes > self._nodes_left or num_graphs > self._graphs_left:
            self._grow(self._num_nodes + 2 * num_nodes, self.num_graphs + 2 * num_graphs)

    def _count(self, ptr: Tensor) -> None:
        num_nodes, num_graphs = int(ptr[-1] - ptr[0]), ptr.numel() - 1
        if self._is_native:
            self._nodes_left -= num_nodes
            self._graphs_left -= num_graphs
        self._num_nodes += num_nodes
        self.num_graphs += num_graphs

    def _grow(self, num_nodes: int, num_graphs: int) -> None:
        """Make room for so many nodes and graphs more."""
        rows, row_ptr = self._take_rows()
        last = row_ptr.diff()[:, None] - 1
        known = range(0, int(last.max()) + 1, KNOWN_ROWS)
        self._start(num_nodes + int(last.max()) + 1, num_graphs + len(known))
        for begin in known:  # as graphs with all rows of a branch in order, and again the last one, if others have more
            numbers = torch.arange(begin, min(begin + KNOWN_ROWS, int(last.max()) + 1)).minimum(last)
            self._found.add(take_dense(rows, numbers + row_ptr[:-1, None]).numpy(), np.array([0, numbers.shape[1]]))
            self._known_nodes += numbers.shape[1]
            self._known_graphs += 1
        self._nodes_left, self._graphs_left = num_nodes, num_graphs

    def _take_rows(self) -> tuple[Tensor, Tensor]:
        """Set aside what is found of the graphs so far, but for the rows, which are returned."""
        found = self._take_all()
        reference.add_lists(self._set_aside, found, self._known_graphs, self._known_nodes)
        return found[:2]

    def _take_all(self) -> reference.Found:
        if self._num_nodes:
            self._is_sparse = self._found.is_sparse()
        rows, row_ptr, ptr, index, count, row_of_node, *sparse = map(torch.from_numpy, self._found.take())
        if sparse:
            crow_indices, col_indices = sparse
            rows = sparse_rows(rows, crow_indices, col_indices, self._x.shape[1])
        return rows, row_ptr, ptr, index, count, row_of_node

    @property
    def num_rows(self) -> int:
        """Distinct rows of all branches so far."""
        return self._found.num_rows()

    def take(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return what :func:`distinct_rows` does if all chunks are one, and keep nothing."""
        row_type = _row_type(self.num_branches * self._num_nodes)
        if not self._is_native:
            found = self._found.take(row_type)
        elif self._set_aside[0]:
            rows, row_ptr = self._take_rows()
            found = (rows, row_ptr, *reference.joined_lists(self._set_aside, row_ptr, row_type))
        else:
            found = self._take_all()
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
