"""The loss: what classes, tasks and graphs weigh in it, and which labels it takes; and metrics, which should rise."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ClassWeight = str | Tensor | Sequence[float] | None
Metric = Callable[[Tensor, Tensor], float]  # of class scores and labels


def loss_of(
    logits: Tensor, y: Tensor, class_weight: Tensor | None = None, graph_weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy for classes (int64 ``y [G]``); binary cross-entropy per task for float ``y [G, T]``, NaN masked.

    ``class_weight [C]`` is ``weight`` of torch's ``cross_entropy``; ``[T]`` for tasks, where it is ``pos_weight`` of
    ``binary_cross_entropy_with_logits``. A graph counts ``graph_weight [G]`` times; only the ratios of these matter.
    Where all weights of a batch are 0, or no label is known, its loss is 0.

    Raises:
        ValueError: float ``y`` of another shape than ``logits``.
    """
    if y.is_floating_point() and y.shape != logits.shape:
        raise ValueError(f"y must have the shape of logits, {list(logits.shape)}, as float tasks, got {list(y.shape)}")
    graph_weight = None if graph_weight is None else scaled(graph_weight).to(logits)
    shares = shares_of(y, class_weight, graph_weight)
    if shares is None:
        return F.cross_entropy(logits, y)
    if y.is_floating_point():
        target = y.nan_to_num().to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none", pos_weight=class_weight)
        losses = losses.where(~y.isnan(), 0).sum(1)
    else:
        losses = F.cross_entropy(logits, y, class_weight, reduction="none")
    total = (losses if graph_weight is None else losses * graph_weight).sum()
    dtype = torch.promote_types(total.dtype, torch.float32)  # of tasks without weights, shares are integers
    return total / shares.sum().to(dtype).clamp(min=torch.finfo(dtype).tiny)


def scaled(weight: Tensor) -> Tensor:
    """Weights in float64, the largest 1: sums of theirs then fit in any dtype, and none is lost that counts."""
    weight = weight.double()
    largest = weight.amax() if weight.numel() else weight.new_ones(())
    return weight / largest.clamp(min=torch.finfo(weight.dtype).tiny)


def shares_of(y: Tensor, class_weight: Tensor | None, graph_weight: Tensor | None) -> Tensor | None:
    """What each graph counts in the mean of :func:`loss_of`, ``[G]``; None where all count the same."""
    if y.is_floating_point():
        shares: Tensor | None = (~y.isnan()).sum(1)
    else:
        shares = None if class_weight is None else class_weight[y]
    return shares if graph_weight is None else graph_weight if shares is None else shares * graph_weight


def class_weights(class_weight: ClassWeight, y: Tensor, num_outputs: int) -> Tensor | None:
    """The weights ``[num_outputs]`` that :func:`loss_of` takes, on the device of ``y``.

    Args:
        class_weight: None; ``"balanced"``; or the weights themselves.
        y: labels of the training graphs, which ``"balanced"`` counts: a class weighs ``G / (C * its graphs)``, as in
            scikit-learn, and a positive label as much as its task has negative labels for each positive one. What does
            not occur weighs 1.
        num_outputs: classes, or tasks.
    """
    if class_weight is None:
        return None
    if isinstance(class_weight, str):
        if class_weight != "balanced":
            raise ValueError(f"class_weight must be None, 'balanced' or a tensor of weights, got {class_weight!r}")
        if y.is_floating_point():
            positive, negative = (y == 1).sum(0).double(), (y == 0).sum(0).double()
            return (negative / positive).where((positive > 0) & (negative > 0), 1.0)
        count = y.bincount(minlength=num_outputs).double()
        return (len(y) / ((count > 0).sum() * count)).where(count > 0, 1.0)
    return weights_of("class_weight", class_weight, num_outputs, "None, 'balanced' or").to(y.device)


def weights_of(name: str, values: Any, size: int, others: str = "None or") -> Tensor:
    """Weights ``[size]`` in float64, each finite and at least 0, and one above."""
    try:
        device = values.device if isinstance(values, Tensor) else "cpu"
        weights = torch.as_tensor(values, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be {others} a tensor of weights, got {type(values).__name__}") from error
    if weights.shape != (size,):
        raise ValueError(f"{name} must have shape [{size}], got {list(weights.shape)}")
    if not (bool(weights.isfinite().all()) and bool((weights >= 0).all()) and bool((weights > 0).any())):
        shown = weights.tolist() if size <= 10 else f"values from {weights.min():g} to {weights.max():g}"
        raise ValueError(f"{name} must be finite, at least 0 and not all 0, got {shown}")
    return weights


def check_labels(y: Tensor | None, num_outputs: int, *, read: bool = False) -> None:
    """Check the labels of graphs.

    Tasks, and on a GPU classes, only if they are to be ``read``: there are many, or it waits.
    """
    if y is None:
        raise ValueError("features must have labels (y) to train on")
    are_tasks = y.is_floating_point()
    if y.dim() != (2 if are_tasks else 1) or not (are_tasks or y.dtype == torch.int64):
        raise ValueError(
            "y must be int64 classes [G], or float tasks [G, T] of 0, 1 and NaN, "
            f"got {y.dtype} of shape {list(y.shape)}"
        )
    if are_tasks and y.shape[1] != num_outputs:
        raise ValueError(f"y must have {num_outputs} tasks, the model's outputs, got {y.shape[1]}")
    if not read and (are_tasks or not y.is_cpu):
        return
    if are_tasks:
        known, highest, what = y[~y.isnan()], 1, "tasks of 0, 1 and NaN, got values from"
    else:
        known, highest, what = y, num_outputs - 1, f"classes in [0, {num_outputs}), the model's outputs, got"
    low, high = (value.item() for value in known.aminmax()) if known.numel() else (0, 0)
    if not 0 <= low <= high <= highest:
        raise ValueError(f"y must be {what} {low:g} to {high:g}" if are_tasks else f"y must be {what} {low} to {high}")


def warn_of_shared(validation: Tensor, train: Tensor, stacklevel: int = 4) -> None:
    """Warn where graphs to choose the epoch by, given by their ids, are trained on."""
    if number := int(torch.isin(validation, train).sum()):
        warnings.warn(
            f"validation has {number} graph(s) of train, so that its metric, which chooses the epoch, is too good",
            stacklevel=stacklevel,
        )


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Share of graphs whose largest class score is that of their label; ``logits [G, C]``, ``y [G]`` int64.

    Of binary tasks side by side, float ``y [G, T]``, the share of known labels that their score has the sign of. NaN if
    a score is not finite.
    """
    if logits.dim() != 2 or y.shape != (logits.shape if y.is_floating_point() else logits.shape[:1]):
        raise ValueError(
            "logits must have shape [G, C] and y [G], or both [G, T] and y floating-point, "
            f"got {list(logits.shape)} and {list(y.shape)} {y.dtype}"
        )
    if not bool(logits.isfinite().all()):
        return math.nan
    if y.is_floating_point():
        return ((logits > 0) == (y > 0.5))[~y.isnan()].double().mean().item()
    return (logits.argmax(1) == y).double().mean().item()


def rocauc(logits: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of the second class; ``logits [G, 2]``, ``y [G]`` of 0 and 1.

    Of binary tasks side by side, ``logits [G, T]`` and float ``y [G, T]``, it is the mean over those tasks whose known
    labels are not all equal, as OGB has it. NaN if there is no such task, or a score is not finite.
    """
    from sklearn.metrics import roc_auc_score

    return _mean_of_tasks(roc_auc_score, logits, y)


def ap(logits: Tensor, y: Tensor) -> float:
    """Average precision of the second class, which tells more than :func:`rocauc` where few graphs are of it.

    Arguments, the mean over tasks and NaN are those of :func:`rocauc`; 1 for a perfect order, and of a random one the
    share of graphs that are of that class.
    """
    from sklearn.metrics import average_precision_score

    return _mean_of_tasks(average_precision_score, logits, y)


def _mean_of_tasks(metric: Callable[..., float], logits: Tensor, y: Tensor) -> float:
    if y.dim() == 1 and logits.shape == (len(y), 2):
        logits, y = (logits[:, 1] - logits[:, 0])[:, None], y[:, None]
    elif not y.is_floating_point() or logits.shape != y.shape:
        raise ValueError(
            "logits must have shape [G, 2] and y [G], or both [G, T] and y floating-point, "
            f"got {list(logits.shape)} and {list(y.shape)} {y.dtype}"
        )
    if not bool(logits.isfinite().all()):
        return math.nan
    of_tasks = []
    for score, label in zip(logits.T.double().cpu().numpy(), y.T.double().cpu().numpy(), strict=True):
        known = label == label  # not NaN
        if len(set(label[known])) == 2:
            of_tasks.append(metric(label[known], score[known]))
    return statistics.fmean(of_tasks) if of_tasks else math.nan
