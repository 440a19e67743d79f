"""``power_features``: the public function, and fake kernels and gradients of its ops.

The op is linear in ``x``, so it is the gradient of its own backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common import check
from . import native, reference
from .invariants import check_csr, contents_are_readable


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
            and the values by rounding only, as long as sums of neighbours stay in the range of float32.
        edge_weight: ``[E]``, dtype of ``x``, or float32 where that is of half precision; no gradient flows to it.
        out: ``[R + 1, N, d]``, dtype of ``x``, contiguous, aligned, in memory of its own, to be overwritten; not with
            gradients. Without ``check_invariants``, ``ptr`` may be a slice of the offsets, and ``N`` here the number of
            its nodes: other graphs are not read.
        float64_sums: sum everything in float64, so that nodes of equal neighbourhoods get equal bits in almost every
            order of their neighbours, which is what deduplication compares. Slower, most of all for wide ``x``.
        check_invariants: check the contents of ``indptr``, ``indices`` and ``ptr``; False where the caller vouches for
            them, as a ``GraphBatch`` does.

    Returns:
        ``[R + 1, N, d]`` in the dtype of ``x``.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it, before anything is written; where an index
            is outside its graph, ``out`` may hold the powers of others.
    """

    def call() -> Tensor:
        graph = (indptr.contiguous(), indices.contiguous(), x.contiguous(), num_hops, operator)
        options = (native.contiguous(ptr), native.contiguous(edge_weight), check_invariants, float64_sums)
        if out is None:
            return torch.ops.spin_fast.power_features.default(*graph, *options)
        torch.ops.spin_fast.power_features_out.default(*graph, *options, out)
        return out

    if native.op_checks(x, check_invariants, float64_sums) and type(num_hops) is int:
        try:
            _check_gradients(x, edge_weight, out)
            return call()
        except native.REFUSALS:
            pass  # the checks below say why, or else the next call does
    check.tensor("x", x, ("N", "d"), check.STORED)
    num_hops = check.integer("num_hops", num_hops, 0)
    check.operator(operator)
    float64_sums = check.flag("float64_sums", float64_sums)
    check_invariants = check.flag("check_invariants", check_invariants)
    num_nodes = x.shape[0]  # len(x) would fix the size while exporting
    check_csr(indptr, indices, ptr, num_nodes, check_invariants=check_invariants, device=x.device)
    part = None if check_invariants else ptr  # maybe a slice of the offsets
    if edge_weight is not None:
        dtype = torch.float32 if x.dtype.itemsize == 2 else x.dtype
        check.tensor("edge_weight", edge_weight, (indices.numel(),), (dtype,), x.device)
        if contents_are_readable(edge_weight):
            reference.operator_scales(indptr, operator, edge_weight)
    if out is not None:
        rows: int | str = num_nodes
        if part is not None:
            rows = int(part[-1]) - int(part[0]) if contents_are_readable(part) else "nodes"
        check.tensor("out", out, (num_hops + 1, rows, x.shape[1]), (x.dtype,), x.device)
        if not out.is_contiguous():
            raise ValueError("out must be contiguous")
    _check_gradients(x, edge_weight, out)
    if native.has_kernel(x):
        return call()
    if out is None:
        return reference.power_features(indptr, indices, x, num_hops, operator, edge_weight=edge_weight)
    if part is not None:
        first, last = int(part[0]), int(part[-1])
        edges = slice(int(indptr[first]), int(indptr[last]))
        indptr, indices, x = indptr[first : last + 1] - edges.start, indices[edges] - first, x[first:last]
        edge_weight = None if edge_weight is None else edge_weight[edges]
    return out.copy_(reference.power_features(indptr, indices, x, num_hops, operator, edge_weight=edge_weight))


def _check_gradients(x: Tensor, edge_weight: Tensor | None, out: Tensor | None) -> None:
    """Check what an op cannot see."""
    if edge_weight is not None and edge_weight.requires_grad:
        raise ValueError("edge_weight must not require a gradient: power_features is differentiable in x only")
    if out is not None and torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out must not be given where x or out requires a gradient; leave it out, or detach x")


def _fake(indptr, indices, x, num_hops, operator, ptr, edge_weight, check_invariants, float64_sums):  # type: ignore[no-untyped-def]
    return x.new_empty(num_hops + 1, *x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, indices, _, _, ctx.operator, ptr, edge_weight, _, _ = inputs
    ctx.save_for_backward(indptr, indices, ptr, edge_weight)


def _grad(ctx: Any, grad: Tensor) -> native.Grads:
    indptr, indices, ptr, edge_weight = ctx.saved_tensors
    wide = grad.float() if grad.dtype.itemsize == 2 else grad
    dx = torch.ops.spin_fast.power_features_backward.default(
        indptr, indices, wide.contiguous(), ctx.operator, ptr, edge_weight, False
    )
    return None, None, dx.to(grad.dtype), None, None, None, None, None, None


def _backward_fake(indptr, indices, grad, operator, ptr, edge_weight, check_invariants):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape[1:])


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, indices, grad, ctx.operator, ptr, edge_weight, _ = inputs
    ctx.num_hops = grad.shape[0] - 1
    ctx.save_for_backward(indptr, indices, ptr, edge_weight)


def _backward_grad(ctx: Any, grad_dx: Tensor) -> native.Grads:
    indptr, indices, ptr, edge_weight = ctx.saved_tensors
    grad = torch.ops.spin_fast.power_features.default(
        indptr, indices, grad_dx.contiguous(), ctx.num_hops, ctx.operator, ptr, edge_weight, False, False
    )
    return None, None, grad, None, None, None, None


native.register("power_features", _fake, _grad, _setup)
native.register("power_features_backward", _backward_fake, _backward_grad, _backward_setup)
native.register("power_features_out", lambda *_: None)
