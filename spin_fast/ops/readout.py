"""``sum_readout`` and ``attention_readout``: the public functions, and fake kernels and gradients of their ops.

``sum_readout`` is linear, so it is the gradient of its own backward pass; the second derivative of
``attention_readout`` differentiates the reference implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._common import check, torch_compat
from . import native, reference
from .invariants import check_rows, num_graphs

_AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}  # float64 is not autocast's


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

    def call(branches: int) -> Tensor:
        entries = (ptr.contiguous(), native.contiguous(index), native.contiguous(count))
        return _sum(z.contiguous(), *entries, branches, z.dim() == 3, check_invariants)

    if native.op_checks(z, check_invariants) and (num_branches is None or type(num_branches) is int):
        try:
            return call((z.shape[0] if z.dim() == 3 else 1) if num_branches is None else num_branches)
        except native.REFUSALS:
            pass  # the checks below say why, or else the next call does
    branches = check_rows(z, ptr, index, count, num_branches, check_invariants)
    check_invariants = bool(check_invariants)  # of numpy
    if native.has_kernel(z):
        return call(branches)
    return reference.sum_readout(z, ptr, index=index, count=count, num_branches=branches)


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

    def call() -> Tensor | tuple[Tensor, Tensor]:
        tensors = (z.contiguous(), w.contiguous(), ptr.contiguous(), native.contiguous(index), native.contiguous(count))
        readout, weights = _attention(*tensors, z.dim() == 3, check_invariants)
        if readout.dtype != z.dtype:  # unrounded, for the gradient
            readout = readout.to(z.dtype)
        if not return_weights:
            return readout
        return readout, weights.view(z.shape[:2]) if z.dim() == 3 else weights

    if native.is_autocast(z) and isinstance(w, Tensor) and {z.dtype, w.dtype} <= _AUTOCAST:
        w = w.to(z.dtype)
    if native.op_checks(z, check_invariants):
        try:
            return call()
        except native.REFUSALS:
            pass  # the checks below say why, or else the next call does
    check.tensor("w", w, ("h",) if isinstance(w, Tensor) and w.dim() == 1 else ("branches", "h"), check.STORED)
    if w.dim() == 2 and w.shape[0] == 0:
        raise ValueError("w must have at least 1 branch, got 0")
    check_rows(z, ptr, index, count, 1 if w.dim() == 1 else w.shape[0], check_invariants)
    check_invariants = bool(check_invariants)
    if w.shape[-1] != z.shape[-1] or w.dtype != z.dtype or w.device != z.device:
        raise ValueError(
            f"w must match z in width, dtype and device ({z.shape[-1]}, {z.dtype}, {z.device}), "
            f"got {w.shape[-1]}, {w.dtype}, {w.device}"
        )
    if native.has_kernel(z):
        return call()
    return reference.attention_readout(z, w, ptr, index=index, count=count, return_weights=return_weights)


def _call(name: str, *args: Any) -> Any:
    """Call an op; without gradients directly below autograd, whose Python part costs more than a small readout."""
    op = getattr(torch.ops.spin_fast, name).default
    if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return op(*args)
    with torch_compat.below_autograd():
        return op(*args)


def _sum_fake(z, ptr, index, count, num_branches, shared, check_invariants):  # type: ignore[no-untyped-def]
    return z.new_empty(num_graphs(ptr, num_branches, shared), num_branches * z.shape[-1])


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Of the op and of its backward pass."""
    rows, ptr, index, count, ctx.num_branches, *_, ctx.shared, _ = inputs
    ctx.shape = rows.shape
    ctx.save_for_backward(ptr, index, count)


def _sum_grad(ctx: Any, grad: Tensor) -> native.Grads:
    ptr, index, count = ctx.saved_tensors
    num_rows = math.prod(ctx.shape[:-1])  # numel() would fix the sizes while compiling
    dz = _call(
        "sum_readout_backward", grad.contiguous(), ptr, index, count, ctx.num_branches, num_rows, ctx.shared, False
    )
    return dz.view(ctx.shape), None, None, None, None, None, None


def _sum_backward_fake(grad, ptr, index, count, num_branches, num_rows, shared, check_invariants):  # type: ignore[no-untyped-def]
    return grad.new_empty(num_rows, grad.shape[1] // num_branches)


def _sum_backward_grad(ctx: Any, grad_dz: Tensor) -> native.Grads:
    ptr, index, count = ctx.saved_tensors
    grad = torch.ops.spin_fast.sum_readout.default(
        grad_dz.contiguous(), ptr, index, count, ctx.num_branches, ctx.shared, False
    )
    return grad, None, None, None, None, None, None, None


def _attention_fake(z, w, ptr, index, count, shared, check_invariants):  # type: ignore[no-untyped-def]
    num_entries = math.prod(z.shape[:-1]) if index is None else index.shape[0]
    graphs = num_graphs(ptr, w.shape[0] if w.dim() == 2 else 1, shared)
    dtype = reference.compute_dtype(z.dtype)
    return z.new_empty(graphs, w.numel(), dtype=dtype), z.new_empty(num_entries, dtype=dtype)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, w, ptr, index, count, ctx.shared, _ = inputs
    ctx.save_for_backward(z, w, ptr, index, count, *output)
    ctx.set_materialize_grads(False)


def _attention_grad(ctx: Any, grad: Tensor | None, grad_alpha: Tensor | None) -> native.Grads:
    z, w, ptr, index, count, readout, alpha = ctx.saved_tensors
    grad = torch.zeros_like(readout) if grad is None else grad.contiguous()
    grad_alpha = None if grad_alpha is None else grad_alpha.contiguous()
    dz, dw = _call(
        "attention_readout_backward", grad, grad_alpha, z, w, ptr, index, count, readout, alpha, ctx.shared, False
    )
    return dz, dw, None, None, None, None, None


def _attention_backward_fake(grad, grad_alpha, z, w, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(z), torch.empty_like(w)


def _attention_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, grad_alpha, z, w, ptr, index, count, _, _, ctx.shared, _ = inputs
    ctx.save_for_backward(grad, grad_alpha, z, w, ptr, index, count)


def _attention_backward_grad(ctx: Any, grad_dz: Tensor, grad_dw: Tensor) -> native.Grads:
    """``readout`` and ``alpha`` are functions of ``z`` and ``w``: their share of the derivative flows through those."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "attention_readout has no third derivative; use spin_fast.reference.attention_readout"
        )
    grad, grad_alpha, z, w, ptr, index, count = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [value.detach().requires_grad_() for value in (z, w, grad, grad_alpha) if value is not None]
        z, w, *cotangents = inputs
        shaped = z.view(w.shape[0], -1, z.shape[-1]) if ctx.shared and w.dim() == 2 else z
        readout, alpha = reference.attention_readout(shaped, w, ptr, index=index, count=count, return_weights=True)
        outputs = (readout, alpha.flatten())[: len(cotangents)]
        first = torch.autograd.grad(outputs, (z, w), cotangents, create_graph=True)
        dz, dw, dgrad, *rest = torch.autograd.grad(first, inputs, (grad_dz, grad_dw))
    return dgrad, rest[0] if rest else None, dz, dw, None, None, None, None, None, None, None


def _register(
    name: str, fake: Callable[..., Any], gradient: Callable[..., native.Grads], setup: Callable[..., None]
) -> Callable[..., Any]:
    """Register a readout op with its gradient, and return the shortest way to call it.

    That is below autograd, or as compilation needs it, or an autograd function, which has half the overhead of what
    ``register_autograd`` makes of the same gradient.
    """
    native.register(name, fake, gradient, setup)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _call(name, *inputs)
        setup(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    function: Any = type(name, (torch.autograd.Function,), members)  # by its name profilers show the gradient

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(torch.ops.spin_fast, name).default(*inputs)
        if torch.is_grad_enabled() and (inputs[0].requires_grad or inputs[1].requires_grad):
            return function.apply(*inputs)
        return _call(name, *inputs)

    return call


_sum = _register("sum_readout", _sum_fake, _sum_grad, _sum_setup)
_attention = _register("attention_readout", _attention_fake, _attention_grad, _attention_setup)
native.register("sum_readout_backward", _sum_backward_fake, _sum_backward_grad, _sum_setup)
native.register(
    "attention_readout_backward", _attention_backward_fake, _attention_backward_grad, _attention_backward_setup
)
