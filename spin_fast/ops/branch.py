"""``branch_readout``: the public function, and fake kernels and gradients of its ops.

The second derivative differentiates the reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._common import check, torch_compat
from .._common.rows import arrays_of, check_ragged, dense, is_sparse, rows_of
from . import native, reference
from .invariants import check_forms, check_parts, check_sparse_rows, contents_are_readable, num_graphs
from .parameters import MOST_LAYERS, ModelSizes, flat_parameters, split_parameters


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
    parts: Tensor | None = None,
    negative_slope: float = 0.01,
    check_invariants: bool = True,
) -> Tensor:
    """Send the rows of every branch through its MLP and read out the graphs, in one operation.

    Per branch: ``Linear -> LeakyReLU`` layer by layer (paper, "Branch transform"), then :func:`attention_readout`, or
    :func:`sum_readout` where ``w`` is None. A row that several chosen graphs, or several nodes, refer to goes through
    the MLP once; nothing of the size ``N x h`` is stored: the backward pass evaluates the MLP again. Twice
    differentiable, in ``rows``, ``weights``, ``biases`` and ``w``. Weights should be finite: columns that are 0 in all
    rows of a tile are left out, so that an infinite weight makes NaN of some of its zeros and not of others.

    Args:
        rows: ragged ``[U, d]``, or dense ``[R + 1, N, d]``; float32 or float64. Under autocast half types are widened
            to float32, in which it then runs; the parameters too. Ragged rows may be in torch's CSR layout, with int32
            indices, on the CPU and without a gradient: where few of their values are not 0, that takes less memory.
        weights: of each layer ``[R + 1, d_in, d_out]``; 1 to 8 layers.
        biases: of each layer ``[R + 1, d_out]``.
        w: ``[R + 1, h]``, with ``h`` the width of the last layer, or None.
        ptr: int64 offsets of the segments into ``index``, ``[(R + 1) * G + 1]``; in the dense form of the graphs into
            the nodes, ``[G + 1]``.
        index: ``[nnz]`` int32 or int64, the row that an entry refers to; None for the identity.
        count: ``[nnz]`` int32, how often; None for ones.
        ids: ``[G']`` int64, the graphs to read out, in any order and as often as they stand there; None for all.
        parts: ``[J, k]`` int32 or int64, joint rows (see :class:`spin_fast.ops.JointRows`) for a single branch: each
            consists of ``k`` of the ragged ``rows`` side by side, ``d_in`` of the first layer is ``k * d``, and
            ``index`` refers to joint rows. They are not stored. None for ``rows`` themselves.
        negative_slope: of the LeakyReLU, finite and at least 0; 0 makes it a ReLU.
        check_invariants: check the contents of ``ptr``, ``index``, ``count`` and ``parts``; False where the caller
            vouches for them.

    Returns:
        ``[G', (R + 1) * h]``: the branches side by side.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    if native.is_autocast(rows):
        rows, w = _widened(rows), _widened(w)
        weights, biases = [_widened(weight) for weight in weights], [_widened(bias) for bias in biases]
    _check_layers(rows, weights, biases, w, parts)  # an op sees only the flat parameters
    num_branches, shared = len(weights[0]), rows.dim() == 3

    def call() -> Tensor:
        return torch.ops.spin_fast.branch_readout.default(
            *arrays_of(rows if is_sparse(rows) else rows.contiguous().flatten(0, -2)),
            flat_parameters(weights, biases, w),
            native.contiguous(parts),
            ptr.contiguous(),
            native.contiguous(index),
            native.contiguous(count),
            native.contiguous(ids),
            num_branches,
            [weight.shape[2] for weight in weights],
            w is not None,
            negative_slope,
            native.may_use_tf32(),
            shared,
            check_invariants,
        )

    refusal = None
    if native.op_checks(rows, check_invariants) and type(negative_slope) is float:
        try:
            return call()
        except native.REFUSALS as error:
            refusal = error
    num_rows = rows.shape[-2] if parts is None else parts.shape[0]  # len would fix the size while exporting
    check_forms("rows", rows, ptr, index, count, num_branches, check_invariants, num_rows)
    if check_invariants:
        check_sparse_rows(rows)
    if parts is not None and check_invariants:
        check_parts("parts", parts, rows.shape[0])
    check_invariants = bool(check_invariants)  # of numpy
    negative_slope = check.number("negative_slope", negative_slope, 0)
    if ids is not None:
        check.tensor("ids", ids, ("graphs",), (torch.int64,), rows.device)
        graphs = num_graphs(ptr, num_branches, shared)
        if contents_are_readable(ids) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < graphs:
            raise ValueError(f"ids must be in [0, {graphs}), got {int(ids.min())} to {int(ids.max())}")
    if refusal is not None:
        raise refusal
    if native.has_kernel(rows):
        return call()
    for name, value in (("ptr", ptr), ("ids", ids)):
        if value is not None and torch_compat.is_batched(value):
            raise ValueError(f"{name} must not be batched by vmap: branch_readout reads it to choose rows")
    options: dict[str, Any] = {"index": index, "count": count, "ids": ids, "parts": parts}
    return reference.branch_readout(rows, weights, biases, w, ptr, **options, negative_slope=negative_slope)


def bind_branch_readout(
    weights: Sequence[Tensor], biases: Sequence[Tensor], w: Tensor | None, *, negative_slope: float
) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
    """:func:`branch_readout` as a function of dense ``rows``, ``parts`` and ``ptr``, to predict chunk after chunk.

    For :class:`spin_fast.SPIN`: arguments are contiguous and not checked; there is no gradient.
    """
    parameters, widths = flat_parameters(weights, biases, w).detach(), [weight.shape[2] for weight in weights]
    model = (len(weights[0]), widths, w is not None, negative_slope)
    op = torch.ops.spin_fast.branch_readout.default

    def readout(rows: Tensor, parts: Tensor | None, ptr: Tensor) -> Tensor:
        arrays = arrays_of(rows.flatten(0, 1))
        return op(*arrays, parameters, parts, ptr, None, None, None, *model, False, parts is None, False)

    return readout


def _widened(value: Any) -> Any:
    """Half types as float32; all else as it is, to be checked."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _check_layers(
    rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], w: Tensor | None, parts: Tensor | None
) -> None:
    """Check the rows and the MLPs of the branches."""
    if isinstance(rows, Tensor) and rows.dim() == 3 and parts is None:
        check.tensor("rows", rows, ("branches", "N", "d"), check.FLOATS)
    else:
        check_ragged(rows)
    for name, layers in (("weights", weights), ("biases", biases)):
        if not hasattr(layers, "__len__"):
            raise TypeError(f"{name} must be a sequence of tensors, got {type(layers).__name__}")
    if not 1 <= len(weights) <= MOST_LAYERS or len(biases) != len(weights):
        raise ValueError(
            f"weights and biases must have 1 to {MOST_LAYERS} layers, as many as each other, "
            f"got {len(weights)} and {len(biases)}"
        )
    like = (rows.dtype,), rows.device
    num_branches: int | str = "branches" if parts is None else 1
    width = rows.shape[-1]
    if parts is not None:
        check.tensor("parts", parts, ("J", "k"), check.INTEGERS, rows.device)
        if parts.shape[1] == 0:
            raise ValueError("parts must have at least 1 column, got 0")
        width *= parts.shape[1]
    for depth, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check.tensor(f"weights[{depth}]", weight, (num_branches, width, "d_out"), *like)
        num_branches, _, width = weight.shape
        if num_branches == 0:
            raise ValueError(f"weights[{depth}] must have at least 1 branch, got 0")
        if width == 0:
            raise ValueError(f"weights[{depth}] must have a d_out of at least 1, got 0")
        check.tensor(f"biases[{depth}]", bias, (num_branches, width), *like)
    if w is not None:
        check.tensor("w", w, (num_branches, width), *like)


def _fake(rows, crow, col, num_features, parameters, parts, ptr, index, count, *rest):  # type: ignore[no-untyped-def]
    ids, num_branches, widths, *_, shared, _ = rest
    graphs = num_graphs(ptr, num_branches, shared) if ids is None else ids.shape[0]
    return rows.new_empty(graphs, num_branches * widths[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *arrays, ctx.num_features, parameters, parts, ptr, index, count, ids = inputs[:10]
    *model, ctx.tf32, ctx.shared, _ = inputs[10:]
    ctx.num_branches, ctx.widths, ctx.attention, ctx.slope = model
    ctx.save_for_backward(*arrays, parameters, parts, ptr, index, count, ids)


def _grad(ctx: Any, grad: Tensor) -> native.Grads:
    with_rows = ctx.needs_input_grad[0]
    model = (ctx.num_branches, ctx.widths, ctx.attention, ctx.slope)
    arrays, rest = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    dparameters, drows = torch.ops.spin_fast.branch_readout_backward.default(
        grad.contiguous(), *arrays, ctx.num_features, *rest, *model, ctx.tf32, ctx.shared, False, with_rows
    )
    return (drows if with_rows else None, *[None] * 3, dparameters, *[None] * 12)


def _backward_fake(grad, rows, crow, col, num_features, parameters, *rest):  # type: ignore[no-untyped-def]
    with_rows = rest[-1]
    return torch.empty_like(parameters), torch.empty_like(rows) if with_rows else rows.new_empty(0, num_features)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, *arrays, ctx.num_features, parameters, parts, ptr, index, count, ids = inputs[:11]
    *model, _, ctx.shared, _, ctx.with_rows = inputs[11:]
    ctx.num_branches, ctx.widths, ctx.attention, ctx.slope = model
    ctx.save_for_backward(grad, *arrays, parameters, parts, ptr, index, count, ids)


def _backward_grad(ctx: Any, grad_dparameters: Tensor, grad_drows: Tensor) -> native.Grads:
    if torch.is_grad_enabled():
        raise NotImplementedError("branch_readout has no third derivative; use spin_fast.reference.branch_readout")
    grad, values, crow, col, parameters, parts, ptr, index, count, ids = ctx.saved_tensors
    rows = dense(rows_of(values, crow, col, ctx.num_features))
    model = ModelSizes(ctx.num_branches, ctx.widths, (), ctx.attention, ctx.slope)
    options = {"index": index, "count": count, "ids": ids, "parts": parts, "negative_slope": model.negative_slope}
    width = rows.shape[1] if parts is None else parts.shape[1] * rows.shape[1]
    with torch.enable_grad():
        grad, rows, parameters = (value.detach().requires_grad_() for value in (grad, rows, parameters))
        groups, _ = split_parameters(parameters, width, model)
        shaped = rows.view(model.num_branches, -1, rows.shape[1]) if ctx.shared else rows
        readout = reference.branch_readout(shaped, *groups["hops"], ptr, **options)
        asked, cotangents = (parameters, rows)[: 1 + ctx.with_rows], (grad_dparameters, grad_drows)[: 1 + ctx.with_rows]
        first = torch.autograd.grad(readout, asked, grad, create_graph=True)
        dgrad, drows, dparameters = torch.autograd.grad(first, (grad, rows, parameters), cotangents, allow_unused=True)
    return (dgrad, drows if crow is None else None, *[None] * 3, dparameters, *[None] * 13)


native.register("branch_readout", _fake, _grad, _setup)
native.register("branch_readout_backward", _backward_fake, _backward_grad, _backward_setup)
