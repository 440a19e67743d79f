"""Metrics: from class scores and labels to a number that should rise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from torch import Tensor

Metric = Callable[[Tensor, Tensor], float]


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Share of graphs whose largest class score is that of their label; ``logits [G, C]``, ``y [G]`` int64.

    Of binary tasks side by side, float ``y [G, T]``, the share of known labels that their score has the sign of. NaN if
    a score is not finite.
    """
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

    if y.dim() == 1 and logits.shape == (len(y), 2):
        logits, y = (logits[:, 1] - logits[:, 0])[:, None], y[:, None]
    elif not y.is_floating_point() or logits.shape != y.shape:
        raise ValueError(
            "logits must have shape [G, 2] and y [G], or both [G, T] and y floating-point, "
            f"got {list(logits.shape)} and {list(y.shape)} {y.dtype}"
        )
    if not bool(logits.isfinite().all()):
        return math.nan
    areas = []
    for score, label in zip(logits.T.double().cpu().numpy(), y.T.double().cpu().numpy(), strict=True):
        known = label == label  # not NaN
        if len(set(label[known])) == 2:
            areas.append(roc_auc_score(label[known], score[known]))
    return statistics.fmean(areas) if areas else math.nan
