"""The public operations: check the arguments, then call the kernel, or the reference where there is none.

The contents of index arrays on a GPU are never checked, since no operation waits for a GPU, except for
``distinct_rows``, whose results are as large as what it finds.

Under the transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp``, ...) and in forward-mode differentiation the twins
run, which are made of what these can transform. Autocast changes no operation but in this: ``attention_readout`` takes
``w`` in the dtype of ``z``, and ``branch_readout`` takes half types as float32, in which it computes.

Letters in the shapes: ``G`` graphs, ``N`` nodes, ``E`` edges, ``d`` features, ``h`` branch width, ``R`` hops, ``R + 1``
branches, ``S = (R + 1) * G`` segments in branch-major order, ``U`` distinct rows, ``nnz`` entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from .._common import check, torch_compat
from . import native, reference, register
from .parameters import MOST_LAYERS, flat_parameters
from .parameters import ModelSizes as ModelSizes
from .parameters import parameter_shapes as parameter_shapes


def _is_transformed() -> bool:
    """Whether a call must be made of operations that ``torch.func`` and forward-mode differentiation know.

    A kernel would be refused by some of them, and others would take it for a constant.
    """
    return torch_compat.is_transformed()


def _has_kernel(device: torch.device) -> bool:
    if _is_transformed():
        return False
    if device.type == "cpu":
        return native.library is not None
    return device.type == "cuda" and native.wants_cuda()


def _contents_are_readable(value: Tensor) -> bool:
    """Reading a GPU's memory would synchronise; while compiling there is nothing to read (the kernels then check).

    Nor is there in a transform, where the twins run, which bad contents may fail but not crash.
    """
    return value.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_transformed()


def _is_autocast(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and torch.is_autocast_enabled(value.device.type)


def _widened(value: Any) -> Any:
    """Half types as float32; all else as it is, to be checked."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _array(values: Tensor | None) -> np.ndarray | None:
    return None if values is None else values.contiguous().numpy()


def check_csr(indptr: Tensor, indices: Tensor, ptr: Tensor | None, num_nodes: int) -> None:
    """Check the contents of a CSR adjacency on the CPU: monotone offsets, columns in range and inside their own graph.

    Raises:
        TypeError, ValueError: name the argument, and the first entry that is wrong.
    """
    check.tensor("indptr", indptr, (check.integer("num_nodes", num_nodes, 0) + 1,), check.INTEGERS)
    check.tensor("indices", indices, ("E",), (indptr.dtype,), indptr.device)
    if ptr is not None:
        check.offsets_shape("ptr", ptr, indptr.device)
    if not _contents_are_readable(indptr):
        return
    if native.library is None:
        problem = reference.check_csr(indptr, indices, ptr, num_nodes)
    else:
        problem = native.library.check_csr(_array(indptr), _array(indices), _array(ptr), num_nodes)
    if problem:
        raise ValueError(problem)


def check_segments(ptr: Tensor, index: Tensor | None, count: Tensor | None, num_rows: int) -> None:
    """Check the contents of a readout's segments on the CPU: monotone offsets, row numbers in range, counts positive.

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
    if not _contents_are_readable(ptr):
        return
    if native.library is None:
        problem = reference.check_segments(ptr, index, count, num_rows)
    else:
        problem = native.library.check_segments(_array(ptr), _array(index), _array(count), num_rows)
    if problem:
        raise ValueError(problem)


def power_features(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    num_hops: int,
    operator: str = "sym",
    *,
    ptr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    out: Tensor | None = None,
    float64_sums: bool = False,
    check_invariants: bool = True,
) -> Tensor:
    """Compute ``[X, ĀX, ..., Ā^R X]``, the parameter-free part of SPIN (paper, "Parallel neighborhood aggregation").

    Row ``v`` of ``Ā X`` gathers from the columns stored in row ``v``. With ``D`` the row sums of ``A``, the operator
    ``adj`` is ``A``, ``sym`` is ``D^-1/2 A D^-1/2``, ``sym+adj`` their sum, ``rw`` is ``D^-1 A``; a node of degree 0
    gets 0. Repeated entries count as often as they stand there, self-loops as given. Differentiable in ``x``,
    to any order.

    Args:
        indptr: ``[N + 1]`` int32 or int64.
        indices: ``[E]``, dtype of ``indptr``.
        x: ``[N, d]`` float32, float64, bfloat16 or float16. Sums run in float32 at least, those of more than 64
            neighbours and of large graphs in float64; of bfloat16 and float16 only what is returned is rounded.
        num_hops: ``R``, at least 0.
        operator: ``adj``, ``sym``, ``sym+adj`` or ``rw``.
        ptr: ``[G + 1]`` int64 node offsets of a block-diagonal adjacency; None for one big graph. It changes the speed,
            and the values by rounding only.
        edge_weight: ``[E]``, dtype of ``x``, or float32 where that is of half precision; no gradient flows to it.
        out: ``[R + 1, N, d]``, dtype of ``x``, contiguous, to be overwritten; not with gradients. Without
            ``check_invariants``, ``ptr`` may be a slice of the offsets, and ``N`` here the number of its nodes: other
            graphs are not read.
        float64_sums: sum everything in float64, so that nodes of equal neighbourhoods get equal bits in almost every
            order of their neighbours, which is what deduplication compares. Slower, most of all for wide ``x``.
        check_invariants: check the contents of ``indptr``, ``indices`` and ``ptr``; False where the caller vouches for
            them, as a ``GraphBatch`` does.

    Returns:
        ``[R + 1, N, d]`` in the dtype of ``x``.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it, before anything is written.
    """
    check.tensor("x", x, ("N", "d"), check.STORED)
    num_nodes = x.shape[0]
    check.integer("num_hops", num_hops, 0)
    check.operator(operator)
    check.flag("float64_sums", float64_sums)
    check.flag("check_invariants", check_invariants)
    check.tensor("indptr", indptr, (num_nodes + 1,), check.INTEGERS, x.device)
    check.tensor("indices", indices, ("E",), (indptr.dtype,), x.device)
    if ptr is not None:
        check.offsets_shape("ptr", ptr, x.device)
        ptr = ptr.contiguous()
    indptr, indices = indptr.contiguous(), indices.contiguous()
    if check_invariants:
        check_csr(indptr, indices, ptr, num_nodes)
    check_inside = check_invariants and torch.compiler.is_compiling()
    if (
        not check_invariants
        and ptr is not None
        and isinstance(out, Tensor)
        and out.dim() == 3
        and out.shape[1] != num_nodes
    ):
        return _power_features_of_run(indptr, indices, x, num_hops, operator, ptr, edge_weight, out, float64_sums)
    if edge_weight is not None:
        edge_weight = _checked_weight(indptr, indices, x, operator, edge_weight)
    if out is not None:
        _check_out(out, x, num_hops)
        if _has_kernel(x.device):
            torch.ops.spin_fast.power_features_out.default(
                indptr, indices, x.contiguous(), num_hops, operator, ptr, edge_weight, check_inside, float64_sums, out
            )
            return out
        return out.copy_(reference.power_features(indptr, indices, x, num_hops, operator, edge_weight=edge_weight))
    if _has_kernel(x.device):
        return torch.ops.spin_fast.power_features.default(
            indptr, indices, x.contiguous(), num_hops, operator, ptr, edge_weight, check_inside, float64_sums
        )
    return reference.power_features(indptr, indices, x, num_hops, operator, edge_weight=edge_weight)


def _power_features_of_run(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    num_hops: int,
    operator: str,
    ptr: Tensor,
    edge_weight: Tensor | None,
    out: Tensor,
    float64_sums: bool,
) -> Tensor:
    if _contents_are_readable(ptr):
        _check_out(out, x[int(ptr[0]) : int(ptr[-1])], num_hops)
    else:
        _check_out(out, x[: out.shape[1]], num_hops)
    if _has_kernel(x.device):
        arrays = (indptr, indices, x.contiguous(), num_hops, operator, ptr, edge_weight)
        torch.ops.spin_fast.power_features_out.default(*arrays, False, float64_sums, out)
        return out
    first, last = int(ptr[0]), int(ptr[-1])
    edges = slice(int(indptr[first]), int(indptr[last]))
    part = (indptr[first : last + 1] - edges.start, indices[edges] - first, x[first:last])
    weight = None if edge_weight is None else edge_weight[edges]
    return out.copy_(reference.power_features(*part, num_hops, operator, edge_weight=weight))


def _checked_weight(indptr: Tensor, indices: Tensor, x: Tensor, operator: str, edge_weight: Tensor) -> Tensor:
    dtype = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    check.tensor("edge_weight", edge_weight, (indices.numel(),), (dtype,), x.device)
    if edge_weight.requires_grad:
        raise ValueError("edge_weight must not require a gradient: power_features is differentiable in x only")
    if _contents_are_readable(edge_weight):
        reference.operator_scales(indptr, operator, edge_weight)
    return edge_weight.contiguous()


def _check_out(out: Tensor, x: Tensor, num_hops: int) -> None:
    check.tensor("out", out, (num_hops + 1, *x.shape), (x.dtype,), x.device)
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out must not be given where x or out requires a gradient; leave it out, or detach x")
    if not torch.compiler.is_compiling() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() != 0:
        raise ValueError("out must not share memory with x")


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
    check.tensor("powers", powers, ("branches", "N", "d"), check.STORED)
    num_branches, num_nodes, _ = powers.shape
    if num_branches == 0:
        raise ValueError("powers must have at least 1 branch, got 0")
    check.offsets_shape("ptr", ptr, powers.device)
    fits = num_branches * num_nodes < 2**31
    index_dtype = (torch.int32 if fits else torch.int64) if index_dtype is None else index_dtype
    if index_dtype not in check.INTEGERS:
        raise TypeError(f"index_dtype must be torch.int32 or torch.int64, got {index_dtype}")
    if index_dtype == torch.int32 and not fits:
        raise ValueError(f"index_dtype must be torch.int64 for {num_branches * num_nodes} rows, got {index_dtype}")
    check.flag("check_invariants", check_invariants)
    if (
        check_invariants
        and _contents_are_readable(ptr)
        and (problem := reference.check_offsets("ptr", ptr, num_nodes, "nodes"))
    ):
        raise ValueError(problem)
    powers, ptr = powers.detach().contiguous(), ptr.contiguous()
    if not _has_kernel(powers.device):
        return reference.distinct_rows(powers, ptr, index_dtype=index_dtype)
    check_inside = check_invariants and torch.compiler.is_compiling()
    return torch.ops.spin_fast.distinct_rows.default(powers, ptr, index_dtype == torch.int64, 64, check_inside)


class DistinctRows:
    """:func:`distinct_rows` of powers that come part by part and need never be in memory at once.

    For :meth:`spin_fast.PowerFeatures.from_graphs`: arguments are not checked.

    Args:
        num_branches: ``R + 1``.
        x: ``[N, d]`` float32 or float64, as large as a branch of all parts together.
        num_graphs: of all parts together.
        node_rows: keep ``row_of_node``.
    """

    def __init__(self, num_branches: int, x: Tensor, num_graphs: int, *, node_rows: bool = True) -> None:
        wide, self._node_rows = num_branches * len(x) >= 2**31, node_rows
        self._native: Any = None
        if x.is_cpu and _has_kernel(x.device):
            sizes = (num_branches, *x.shape, num_graphs, x.element_size())
            self._native = native.library.DistinctRows(*sizes, wide, node_rows)  # type: ignore[union-attr]
        else:
            self._twin = reference.DistinctRows(num_branches, x[:0].detach(), torch.int64 if wide else torch.int32)

    def add(self, powers: Tensor, ptr: Tensor) -> None:
        """Take in the next graphs: contiguous ``powers [R + 1, n, d]``, and ``ptr [graphs + 1]`` into them."""
        if self._native is None:
            self._twin.add(powers, ptr)
        else:
            self._native.add(powers.numpy(), ptr.numpy())

    @property
    def num_rows(self) -> int:
        """Distinct rows of all branches so far."""
        return (self._twin if self._native is None else self._native).num_rows()

    def take(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return what :func:`distinct_rows` does if all parts are one, and keep nothing."""
        found = self._twin.take() if self._native is None else map(torch.from_numpy, self._native.take())
        rows, row_ptr, ptr, index, count, row_of_node = found
        return rows, row_ptr, ptr, index, count, row_of_node if self._node_rows else None


def sum_readout(
    z: Tensor,
    ptr: Tensor,
    *,
    index: Tensor | None = None,
    count: Tensor | None = None,
    num_branches: int | None = None,
    check_invariants: bool = True,
) -> Tensor:
    """Sum the rows of each graph in each branch: the readout of SPIN-non-att (paper, "Branch-level readout").

    *Dense form*: ``z [N, h]`` or ``[R + 1, N, h]`` and node offsets ``ptr [G + 1]``. *Ragged form*: ``z [U, h]``, the
    rows of all branches one after the other, ``ptr [S + 1]`` offsets into ``index``. An empty graph gives 0.

    Args:
        z: float32, float64, bfloat16 or float16; sums run in float64 over blocks of float32, and are rounded once.
        ptr: int64 offsets.
        index: ``[nnz]`` int32 or int64, the row of ``z`` that an entry refers to; None for the identity.
        count: ``[nnz]`` int32, how often; None for ones.
        num_branches: ``R + 1`` of the ragged form (default 1); it must divide ``S``.
        check_invariants: check the contents of ``ptr``, ``index`` and ``count``; False where the caller vouches for
            them.

    Returns:
        ``[G, h]``, or ``[G, (R + 1) * h]``: the branches side by side.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    refusal = None
    if _op_checks(z) and (num_branches is None or type(num_branches) is int):
        try:
            branches = (z.shape[0] if z.dim() == 3 else 1) if num_branches is None else num_branches
            return _sum(z, ptr, index, count, branches, check_invariants)
        except _REFUSALS as error:
            refusal = error
    branches = _check_form(z, ptr, index, num_branches)
    ptr, index, count = _check_entries(z, ptr, index, count, branches, check_invariants)
    if refusal is not None:
        raise refusal
    if not _has_kernel(z.device):
        return reference.sum_readout(z, ptr, index=index, count=count, num_branches=branches)
    return _sum(z, ptr, index, count, branches, check_invariants)


def _sum(
    z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None, num_branches: int, check_invariants: bool
) -> Tensor:
    entries = (ptr.contiguous(), _contiguous(index), _contiguous(count))
    return register.call_readout(
        register.SumReadout, "sum_readout", z.contiguous(), *entries, num_branches, z.dim() == 3, check_invariants
    )


@overload
def attention_readout(
    z: Tensor,
    w: Tensor,
    ptr: Tensor,
    *,
    index: Tensor | None = ...,
    count: Tensor | None = ...,
    return_weights: Literal[False] = ...,
    check_invariants: bool = ...,
) -> Tensor: ...
@overload
def attention_readout(
    z: Tensor,
    w: Tensor,
    ptr: Tensor,
    *,
    index: Tensor | None = ...,
    count: Tensor | None = ...,
    return_weights: Literal[True],
    check_invariants: bool = ...,
) -> tuple[Tensor, Tensor]: ...
def attention_readout(
    z: Tensor,
    w: Tensor,
    ptr: Tensor,
    *,
    index: Tensor | None = None,
    count: Tensor | None = None,
    return_weights: bool = False,
    check_invariants: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention-weighted sum of the rows of each graph in each branch: the readout of SPIN-att.

    ``beta_v = ReLU(<w, z_v>)``, ``alpha`` the softmax of ``beta`` over the nodes of one graph in one branch,
    ``s = sum_v alpha_v z_v`` (paper, "Branch-level readout"); twice differentiable. An entry with count ``c`` weighs
    as ``c`` equal nodes. An empty graph gives 0. Forms of ``z``, and the other arguments, as in :func:`sum_readout`.

    Args:
        w: ``[h]`` for one branch, ``[R + 1, h]`` for several; dtype of ``z``, to which autocast brings it.
        return_weights: return ``alpha`` as well, per entry: ``[nnz]``, or ``[R + 1, N]`` in the dense form with
            branches; float32 for the half types. The weight of one node is ``alpha / count``.

    Returns:
        ``[G, h]`` or ``[G, (R + 1) * h]``; with ``return_weights`` a pair.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    refusal = None
    if _is_autocast(z) and isinstance(w, Tensor) and {z.dtype, w.dtype} <= _AUTOCAST:
        w = w.to(z.dtype)
    if _op_checks(z):
        try:
            return _attention(z, w, ptr, index, count, return_weights, check_invariants)
        except _REFUSALS as error:
            refusal = error
    check.tensor("w", w, ("h",) if isinstance(w, Tensor) and w.dim() == 1 else ("branches", "h"), check.STORED)
    if w.dim() == 2 and w.shape[0] == 0:
        raise ValueError("w must have at least 1 branch, got 0")
    num_branches = _check_form(z, ptr, index, 1 if w.dim() == 1 else w.shape[0])
    if w.shape[-1] != z.shape[-1] or w.dtype != z.dtype or w.device != z.device:
        raise ValueError(
            f"w must match z in width, dtype and device ({z.shape[-1]}, {z.dtype}, {z.device}), "
            f"got {w.shape[-1]}, {w.dtype}, {w.device}"
        )
    ptr, index, count = _check_entries(z, ptr, index, count, num_branches, check_invariants)
    if refusal is not None:
        raise refusal
    if not _has_kernel(z.device):
        return reference.attention_readout(z, w, ptr, index=index, count=count, return_weights=return_weights)
    return _attention(z, w, ptr, index, count, return_weights, check_invariants)


def _attention(
    z: Tensor,
    w: Tensor,
    ptr: Tensor,
    index: Tensor | None,
    count: Tensor | None,
    return_weights: bool,
    check_invariants: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    entries = (ptr.contiguous(), _contiguous(index), _contiguous(count))
    readout, weights = register.call_readout(
        register.AttentionReadout,
        "attention_readout",
        z.contiguous(),
        w.contiguous(),
        *entries,
        z.dim() == 3,
        check_invariants,
    )
    if readout.dtype != z.dtype:  # unrounded, for the gradient
        readout = readout.to(z.dtype)
    if not return_weights:
        return readout
    return readout, weights.view(z.shape[:2]) if z.dim() == 3 else weights


def branch_readout(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w: Tensor | None,
    ptr: Tensor,
    *,
    index: Tensor | None = None,
    count: Tensor | None = None,
    ids: Tensor | None = None,
    negative_slope: float = 0.01,
    check_invariants: bool = True,
) -> Tensor:
    """Send the rows of every branch through its MLP and read out the graphs, in one operation.

    Per branch: ``Linear -> LeakyReLU`` layer by layer (paper, "Branch transform"), then :func:`attention_readout`, or
    :func:`sum_readout` where ``w`` is None. A row that several chosen graphs, or several nodes, refer to goes through
    the MLP once; nothing of the size ``N x h`` is stored: the backward pass evaluates the MLP again. Twice
    differentiable, in ``rows``, ``weights``, ``biases`` and ``w``.

    Args:
        rows: ragged ``[U, d]``, or dense ``[R + 1, N, d]``; float32 or float64. Under autocast half types are widened
            to float32, in which it then runs; the parameters too.
        weights: of each layer ``[R + 1, d_in, d_out]``; 1 to 8 layers.
        biases: of each layer ``[R + 1, d_out]``.
        w: ``[R + 1, h]``, with ``h`` the width of the last layer, or None.
        ptr: int64 offsets of the segments into ``index``, ``[(R + 1) * G + 1]``; in the dense form of the graphs into
            the nodes, ``[G + 1]``.
        index: ``[nnz]`` int32 or int64, the row that an entry refers to; None for the identity.
        count: ``[nnz]`` int32, how often; None for ones.
        ids: ``[G']`` int64, the graphs to read out, in any order and as often as they stand there; None for all.
        negative_slope: of the LeakyReLU, finite and at least 0; 0 makes it a ReLU.
        check_invariants: check the contents of ``ptr``, ``index`` and ``count``; False where the caller vouches for
            them.

    Returns:
        ``[G', (R + 1) * h]``: the branches side by side.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    if _is_autocast(rows):
        rows, w = _widened(rows), _widened(w)
        weights, biases = [_widened(weight) for weight in weights], [_widened(bias) for bias in biases]
    dense = isinstance(rows, Tensor) and rows.dim() == 3
    check.tensor("rows", rows, ("branches", "N", "d") if dense else ("U", "d"), check.FLOATS)
    num_branches = _check_layers(rows, weights, biases, w)
    _check_form(rows, ptr, index, num_branches, "rows")
    ptr, index, count = _check_entries(rows, ptr, index, count, num_branches, check_invariants)
    negative_slope = check.number("negative_slope", negative_slope, 0)
    if ids is not None:
        check.tensor("ids", ids, ("graphs",), (torch.int64,), rows.device)
        num_graphs = (ptr.numel() - 1) // (1 if dense else num_branches)
        if _contents_are_readable(ids) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_graphs:
            raise ValueError(f"ids must be in [0, {num_graphs}), got {int(ids.min())} to {int(ids.max())}")
        ids = ids.contiguous()
    if not _has_kernel(rows.device):
        for name, value in (("ptr", ptr), ("ids", ids)):
            if value is not None and torch_compat.is_batched(value):
                raise ValueError(f"{name} must not be batched by vmap: branch_readout reads it to choose rows")
        return reference.branch_readout(
            rows, weights, biases, w, ptr, index=index, count=count, ids=ids, negative_slope=negative_slope
        )
    parameters = flat_parameters(weights, biases, w)
    widths = [weight.shape[2] for weight in weights]
    flat = rows.contiguous().flatten(0, 1) if dense else rows.contiguous()
    check_inside = check_invariants and torch.compiler.is_compiling()
    options = (num_branches, widths, w is not None, negative_slope, may_use_tf32(), dense, check_inside)
    return torch.ops.spin_fast.branch_readout.default(flat, parameters, ptr, index, count, ids, *options)


@torch_compat.constant_while_compiling
def may_use_tf32() -> bool:
    """Whether torch's settings let products of float32 matrices on a GPU round their factors to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


_AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}  # float64 is not autocast's


def _check_layers(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], w: Tensor | None) -> int:
    """Check the MLP of the branches and return the number of branches."""
    for name, layers in (("weights", weights), ("biases", biases)):
        if not hasattr(layers, "__len__"):
            raise TypeError(f"{name} must be a sequence of tensors, got {type(layers).__name__}")
    if not 1 <= len(weights) <= MOST_LAYERS or len(biases) != len(weights):
        raise ValueError(
            f"weights and biases must have 1 to {MOST_LAYERS} layers, as many as each other, "
            f"got {len(weights)} and {len(biases)}"
        )
    check.tensor("weights[0]", weights[0], ("branches", rows.shape[-1], "d_out"), (rows.dtype,), rows.device)
    num_branches, width = weights[0].shape[0], rows.shape[-1]
    if num_branches == 0:
        raise ValueError("weights[0] must have at least 1 branch, got 0")
    for depth, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check.tensor(f"weights[{depth}]", weight, (num_branches, width, "d_out"), (rows.dtype,), rows.device)
        width = weight.shape[2]
        if width == 0:
            raise ValueError(f"weights[{depth}] must have a d_out of at least 1, got 0")
        check.tensor(f"biases[{depth}]", bias, (num_branches, width), (rows.dtype,), rows.device)
    if w is not None:
        check.tensor("w", w, (num_branches, width), (rows.dtype,), rows.device)
    return num_branches


def _check_form(z: Tensor, ptr: Tensor, index: Tensor | None, num_branches: int | None, name: str = "z") -> int:
    """Check ``z`` and ``ptr`` together and return the number of branches."""
    dense = isinstance(z, Tensor) and z.dim() == 3
    check.tensor(name, z, ("branches", "N", "h") if dense else ("rows", "h"), check.STORED)
    check.offsets_shape("ptr", ptr, z.device)
    if num_branches is not None:
        num_branches = check.integer("num_branches", num_branches, 1)
    if dense:
        if index is not None:
            raise ValueError(f"index must come with the ragged form of {name}, got {name} with three axes")
        if z.shape[0] == 0 or (num_branches is not None and num_branches != z.shape[0]):
            raise ValueError(f"{name} must have {num_branches or 'at least 1'} branches, got {z.shape[0]}")
        return z.shape[0]
    num_branches = num_branches or 1
    if (ptr.numel() - 1) % num_branches:
        raise ValueError(f"ptr must have a multiple of {num_branches} segments (branches), got {ptr.numel() - 1}")
    return num_branches


def _check_entries(
    z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None, num_branches: int, check_invariants: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Check offsets, row numbers and counts, and make them contiguous."""
    if index is not None:
        check.tensor("index", index, ("nnz",), check.INTEGERS, z.device)
        index = index.contiguous()
    if count is not None:
        if z.dim() == 3:
            raise ValueError("count must come with the ragged form, got three axes")
        num_entries = z.shape[0] if index is None else index.numel()
        check.tensor("count", count, (num_entries,), (torch.int32,), z.device)
        count = count.contiguous()
    ptr = ptr.contiguous()
    check.flag("check_invariants", check_invariants)
    if check_invariants:
        check_segments(ptr, index, count, z.shape[-2])
    return ptr, index, count


def _contiguous(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.contiguous()


# What an op raises on bad arguments. The checks then say by name what is wrong; if they find nothing, it is another
# failure, such as a lack of memory, and stands.
_REFUSALS = (ValueError, RuntimeError, TypeError, AttributeError)


def _op_checks(z: Tensor) -> bool:
    """Whether to call the op at once: it checks its arguments itself, faster, but says less about what is wrong."""
    return (
        native.library is not None
        and not torch.compiler.is_compiling()
        and not _is_transformed()
        and isinstance(z, Tensor)
        and z.is_cpu
    )
