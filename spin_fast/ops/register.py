"""Fake kernels and gradients of the registered ops. Schemas: ``csrc/library.cpp``.

A backward pass is itself a registered op. ``power_features`` and ``sum_readout`` are linear, so each is the gradient of
its own backward; the second derivative of ``attention_readout`` differentiates the reference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._common import torch_compat
from . import native, reference
from .parameters import ModelSizes, split_parameters

Grads = tuple[Tensor | None, ...]


def _power_features_fake(indptr, indices, x, num_hops, operator, ptr, edge_weight, check_invariants, float64_sums):  # type: ignore[no-untyped-def]
    return x.new_empty(num_hops + 1, *x.shape)


def _power_features_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, indices, _, _, ctx.operator, ptr, edge_weight, _, _ = inputs
    ctx.save_for_backward(indptr, indices, ptr, edge_weight)


def _power_features_grad(ctx: Any, grad: Tensor) -> Grads:
    indptr, indices, ptr, edge_weight = ctx.saved_tensors
    wide = grad.float() if grad.dtype.itemsize == 2 else grad
    dx = torch.ops.spin_fast.power_features_backward.default(
        indptr, indices, wide.contiguous(), ctx.operator, ptr, edge_weight, False
    )
    return None, None, dx.to(grad.dtype), None, None, None, None, None, None


def _power_features_backward_fake(indptr, indices, grad, operator, ptr, edge_weight, check_invariants):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape[1:])


def _power_features_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, indices, grad, ctx.operator, ptr, edge_weight, _ = inputs
    ctx.num_hops = grad.shape[0] - 1
    ctx.save_for_backward(indptr, indices, ptr, edge_weight)


def _power_features_backward_grad(ctx: Any, grad_dx: Tensor) -> Grads:
    indptr, indices, ptr, edge_weight = ctx.saved_tensors
    grad = torch.ops.spin_fast.power_features.default(
        indptr, indices, grad_dx.contiguous(), ctx.num_hops, ctx.operator, ptr, edge_weight, False, False
    )
    return None, None, grad, None, None, None, None


def _call(name: str, *args: Any) -> Any:
    """Call an op; without gradients directly below autograd, whose Python part costs more than a small readout."""
    op = getattr(torch.ops.spin_fast, name).default
    if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return op(*args)
    with torch_compat.below_autograd():
        return op(*args)


def _num_graphs(ptr: Tensor, num_branches: int, shared: bool) -> int:
    return (ptr.shape[0] - 1) // (1 if shared else num_branches)


def _sum_readout_fake(z, ptr, index, count, num_branches, shared, check_invariants):  # type: ignore[no-untyped-def]
    return z.new_empty(_num_graphs(ptr, num_branches, shared), num_branches * z.shape[-1])


def _sum_readout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, ptr, index, count, ctx.num_branches, ctx.shared, _ = inputs
    ctx.shape = z.shape
    ctx.save_for_backward(ptr, index, count)


def _sum_readout_grad(ctx: Any, grad: Tensor) -> Grads:
    ptr, index, count = ctx.saved_tensors
    num_rows = math.prod(ctx.shape[:-1])  # numel() would fix the sizes while compiling
    dz = _call(
        "sum_readout_backward", grad.contiguous(), ptr, index, count, ctx.num_branches, num_rows, ctx.shared, False
    )
    return dz.view(ctx.shape), None, None, None, None, None, None


def _sum_readout_backward_fake(grad, ptr, index, count, num_branches, num_rows, shared, check_invariants):  # type: ignore[no-untyped-def]
    return grad.new_empty(num_rows, grad.shape[1] // num_branches)


def _sum_readout_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ptr, index, count, ctx.num_branches, _, ctx.shared, _ = inputs
    ctx.save_for_backward(ptr, index, count)


def _sum_readout_backward_grad(ctx: Any, grad_dz: Tensor) -> Grads:
    ptr, index, count = ctx.saved_tensors
    grad = torch.ops.spin_fast.sum_readout.default(
        grad_dz.contiguous(), ptr, index, count, ctx.num_branches, ctx.shared, False
    )
    return grad, None, None, None, None, None, None, None


def _attention_readout_fake(z, w, ptr, index, count, shared, check_invariants):  # type: ignore[no-untyped-def]
    num_entries = math.prod(z.shape[:-1]) if index is None else index.shape[0]
    num_graphs = _num_graphs(ptr, w.shape[0] if w.dim() == 2 else 1, shared)
    dtype = reference.compute_dtype(z.dtype)
    return z.new_empty(num_graphs, w.numel(), dtype=dtype), z.new_empty(num_entries, dtype=dtype)


def _attention_readout_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, w, ptr, index, count, ctx.shared, _ = inputs
    ctx.save_for_backward(z, w, ptr, index, count, *output)
    ctx.set_materialize_grads(False)


def _attention_readout_grad(ctx: Any, grad: Tensor | None, grad_alpha: Tensor | None) -> Grads:
    z, w, ptr, index, count, readout, alpha = ctx.saved_tensors
    grad = torch.zeros_like(readout) if grad is None else grad.contiguous()
    grad_alpha = None if grad_alpha is None else grad_alpha.contiguous()
    dz, dw = _call(
        "attention_readout_backward", grad, grad_alpha, z, w, ptr, index, count, readout, alpha, ctx.shared, False
    )
    return dz, dw, None, None, None, None, None


def _attention_readout_backward_fake(grad, grad_alpha, z, w, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(z), torch.empty_like(w)


def _attention_readout_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, grad_alpha, z, w, ptr, index, count, _, _, ctx.shared, _ = inputs
    ctx.save_for_backward(grad, grad_alpha, z, w, ptr, index, count)


def _attention_readout_backward_grad(ctx: Any, grad_dz: Tensor, grad_dw: Tensor) -> Grads:
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


# What branch_readout and its backward pass share, in the order of the schema: rows, parameters, ptr, index, count, ids,
# num_branches, widths, attention, negative_slope, tf32, shared, check_invariants.


def _branch_readout_fake(rows, parameters, ptr, index, count, ids, num_branches, widths, *rest):  # type: ignore[no-untyped-def]
    *_, shared, _ = rest
    num_graphs = _num_graphs(ptr, num_branches, shared) if ids is None else ids.shape[0]
    return rows.new_empty(num_graphs, num_branches * widths[-1])


def _branch_readout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:12]


def _branch_readout_grad(ctx: Any, grad: Tensor) -> Grads:
    with_rows = ctx.needs_input_grad[0]
    dparameters, drows = torch.ops.spin_fast.branch_readout_backward.default(
        grad.contiguous(), *ctx.saved_tensors, *ctx.options, False, with_rows
    )
    return (drows if with_rows else None, dparameters, *[None] * 11)


def _branch_readout_backward_fake(grad, rows, parameters, *rest):  # type: ignore[no-untyped-def]
    with_rows = rest[-1]
    return torch.empty_like(parameters), torch.empty_like(rows) if with_rows else rows.new_empty(0, rows.shape[1])


def _branch_readout_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options, ctx.with_rows = inputs[7:13], inputs[14]


def _branch_readout_backward_grad(ctx: Any, grad_dparameters: Tensor, grad_drows: Tensor) -> Grads:
    if torch.is_grad_enabled():
        raise NotImplementedError("branch_readout has no third derivative; use spin_fast.reference.branch_readout")
    grad, rows, parameters, ptr, index, count, ids = ctx.saved_tensors
    num_branches, widths, attention, slope, _, shared = ctx.options
    with torch.enable_grad():
        grad, rows, parameters = (value.detach().requires_grad_() for value in (grad, rows, parameters))
        w, weights, biases, _ = split_parameters(
            parameters, rows.shape[1], ModelSizes(num_branches, widths, (), attention, slope)
        )
        shaped = rows.view(num_branches, -1, rows.shape[1]) if shared else rows
        readout = reference.branch_readout(
            shaped, weights, biases, w, ptr, index=index, count=count, ids=ids, negative_slope=slope
        )
        asked, cotangents = (parameters, rows)[: 1 + ctx.with_rows], (grad_dparameters, grad_drows)[: 1 + ctx.with_rows]
        first = torch.autograd.grad(readout, asked, grad, create_graph=True)
        dgrad, drows, dparameters = torch.autograd.grad(first, (grad, rows, parameters), cotangents, allow_unused=True)
    return (dgrad, drows, dparameters, *[None] * 12)


def _training_step_fake(rows, parameters, *rest):  # type: ignore[no-untyped-def]
    return rows.new_empty(()), torch.empty_like(parameters)


def _distinct_rows_fake(powers, ptr, wide_index, hash_bits, check_invariants):  # type: ignore[no-untyped-def]
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


class SumReadout(torch.autograd.Function):
    """The op with its gradient for eager execution, at half the overhead of what ``register_autograd`` makes of it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _call("sum_readout", *inputs)
        _sum_readout_setup(ctx, inputs, output)
        return output

    backward = staticmethod(_sum_readout_grad)


class AttentionReadout(torch.autograd.Function):
    """As :class:`SumReadout`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _call("attention_readout", *inputs)
        _attention_readout_setup(ctx, inputs, output)
        return output

    backward = staticmethod(_attention_readout_grad)


def call_readout(function: type[torch.autograd.Function], name: str, *inputs: Any) -> Any:
    """Call a readout op by the shortest way: below autograd, by ``function``, or as compilation needs it."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.spin_fast, name).default(*inputs)
    if torch.is_grad_enabled() and (inputs[0].requires_grad or inputs[1].requires_grad):
        return function.apply(*inputs)
    return _call(name, *inputs)


def _register() -> None:
    for name in (
        "power_features",
        "power_features_backward",
        "sum_readout",
        "sum_readout_backward",
        "attention_readout",
        "attention_readout_backward",
        "branch_readout",
        "branch_readout_backward",
    ):
        torch.library.register_fake(f"spin_fast::{name}", globals()[f"_{name}_fake"])
        torch.library.register_autograd(
            f"spin_fast::{name}", globals()[f"_{name}_grad"], setup_context=globals()[f"_{name}_setup"]
        )
    torch.library.register_fake("spin_fast::power_features_out", lambda *_: None)
    torch.library.register_fake("spin_fast::training_step", _training_step_fake)
    torch.library.register_fake("spin_fast::distinct_rows", _distinct_rows_fake)


if native.available():
    _register()
