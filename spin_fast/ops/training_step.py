"""``training_step`` and ``training_steps``: the public functions, and the fake kernels of the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common import check
from .._common.rows import arrays_of, check_ragged
from . import native, reference
from .invariants import check_parts, check_segments, check_sparse_rows
from .joint import JointRows
from .parameters import BRANCHES, ModelSizes


def training_step(
    rows: Tensor,
    parameters: Tensor,
    labels: Tensor,
    ptr: Tensor | None,
    *,
    ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of a ``SPIN`` on a batch, and its gradient in every parameter, in one operation.

    :func:`branch_readout`, then the classifier, then the mean cross-entropy, weighted by ``class_weight`` of each
    graph's class; 0 where all weigh 0. It runs once per batch, so the op alone checks most arguments: it takes
    contiguous tensors, and calls the arrays of ``joint`` ``parts``, ``joint_ptr``, ...

    Args:
        rows: ragged ``[U, d]`` float32 or float64; dense or, as in :func:`branch_readout`, sparse.
        parameters: the flat parameters, see :func:`parameter_shapes`.
        labels: int64 classes of all graphs.
        ptr: int64 offsets of the segments into ``index``; None of a model without branches of hops.
        model: sizes of the model.
        index: ``[nnz]`` int32 or int64, the row that an entry refers to; None for the identity.
        count: ``[nnz]`` int32, how often; None for ones.
        joint: the joint rows of a model that has a branch of them.
        ids: ``[G']`` int64, the graphs of the batch; None for all.
        class_weight: ``[C]`` in the dtype of ``rows``; None for ones.
        check_invariants: check the contents of ``ptr``, ``index``, ``count`` and ``joint``; False where the caller
            vouches for them.

    Returns:
        The loss, and the gradient in the shape of ``parameters``.

    Raises:
        TypeError, ValueError, RuntimeError: name the argument and what is wrong with it.
    """
    return bind_training_step(rows, parameters, labels, ptr, **options).step(ids)


class Adam(NamedTuple):
    """What torch's fused Adam updates a parameter by: vectors like it, the number of steps so far, its settings."""

    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_steps: Tensor
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float


def training_steps(
    rows: Tensor,
    parameters: Tensor,
    labels: Tensor,
    ptr: Tensor | None,
    *,
    ids: Tensor,
    batch_size: int,
    adam: Adam,
    **options: Any,
) -> Tensor:
    """Make a :func:`training_step` on each batch of graphs, and an update of ``parameters`` by Adam, in one operation.

    A call for each takes up to a fifth of the time of small batches. For the CPU: a GPU plays back what is captured.

    Args:
        ids: ``[n]`` int64, the graphs of all batches; if there are none, the step is one on no graphs.
        batch_size: graphs per step; the last may have fewer.
        adam: its ``gradient`` becomes that of the last step, ``num_steps`` is float32, and both moments are updated.
        rows, parameters, labels, ptr, model, index, count, joint, class_weight, check_invariants: as in
            :func:`training_step`; ``parameters`` is updated.

    Returns:
        The losses of the steps, ``[ceil(n / batch_size)]``.

    Raises:
        TypeError, ValueError, RuntimeError: name the argument and what is wrong with it; nothing has been updated.
    """
    return bind_training_step(rows, parameters, labels, ptr, **options).steps(ids, batch_size, adam)


class BoundTrainingStep(NamedTuple):
    """:func:`training_step` as a function of ``ids``, and :func:`training_steps` as one of its last three arguments."""

    step: Callable[[Tensor | None], tuple[Tensor, Tensor]]
    steps: Callable[[Tensor, int, Adam], Tensor]


def bind_training_step(
    rows: Tensor,
    parameters: Tensor,
    labels: Tensor,
    ptr: Tensor | None,
    *,
    model: ModelSizes,
    index: Tensor | None = None,
    count: Tensor | None = None,
    joint: JointRows | None = None,
    class_weight: Tensor | None = None,
    check_invariants: bool = True,
) -> BoundTrainingStep:
    """Both operations for a loop over batches: what stays the same is looked up once."""
    if model.branches not in BRANCHES:
        raise ValueError(f"model must have branches of {', '.join(BRANCHES)}, got {model.branches!r}")
    check_ragged(rows)
    if model.branches != "joint" and ptr is None:
        raise ValueError(f"ptr must be given to a model of {model.branches!r} branches, got None")
    if model.branches != "hops":
        if joint is None:
            raise ValueError(f"joint must be given to a model of {model.branches!r} branches, got None")
        check.tensor("parts", joint.parts, ("J", model.num_branches), check.INTEGERS)  # the op takes any number
    if not native.has_kernel(rows):
        if check_invariants:
            check_sparse_rows(rows)
            _check_contents(len(rows), ptr, index, count, joint)
        data = (rows, parameters, labels, ptr)
        options: dict[str, Any] = {"model": model, "index": index, "count": count, "joint": joint}
        options["class_weight"] = class_weight
        return BoundTrainingStep(
            lambda ids: reference.training_step(*data, ids=ids, **options),
            lambda ids, batch_size, adam: reference.training_steps(
                *data, ids=ids, batch_size=batch_size, adam=adam, **options
            ),
        )
    hops = (ptr, index, count) if model.branches != "joint" else (None,) * 3
    joint_rows = (None,) * 4 if model.branches == "hops" else vars(joint).values()
    before_ids = (*arrays_of(rows), parameters, labels, class_weight, *hops, *joint_rows)
    after_ids = (*model[:-1], native.may_use_tf32(), check_invariants)
    op, op_of_steps = torch.ops.spin_fast.training_step.default, torch.ops.spin_fast.training_steps.default
    return BoundTrainingStep(
        lambda ids: op(*before_ids, ids, *after_ids),
        lambda ids, batch_size, adam: op_of_steps(*before_ids, ids, *after_ids, batch_size, *adam),
    )


def _check_contents(
    num_rows: int, ptr: Tensor | None, index: Tensor | None, count: Tensor | None, joint: JointRows | None
) -> None:
    if ptr is not None:
        check_segments(ptr, index, count, num_rows)
    if joint is not None:
        check_parts("parts", joint.parts, num_rows)
        try:
            check_segments(joint.ptr, joint.index, joint.count, len(joint.parts))
        except ValueError as error:
            raise ValueError(f"joint_{error}") from error


def _fake(rows, crow, col, num_features, parameters, *rest):  # type: ignore[no-untyped-def]
    return rows.new_empty(()), torch.empty_like(parameters)


def _fake_steps(rows, crow, col, num_features, parameters, labels, weight, *rest):  # type: ignore[no-untyped-def]
    ids, batch_size = rest[7], rest[-10]
    return rows.new_empty(max(1, -(-ids.shape[0] // batch_size)))


native.register("training_step", _fake)
native.register("training_steps", _fake_steps)
