"""What a model is scored by."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

from torch import Tensor

from .. import datasets, training
from ._graphs import Odd

MetricName = Literal["accuracy", "rocauc", "ap"]
METRICS = {"rocauc": ("ROC-AUC", training.rocauc), "ap": ("AP", training.ap)}  # as people call them
METRIC = "accuracy; or the area under the ROC curve, or average precision, of the second of two classes, or of tasks."
METRIC_DEFAULT = "accuracy; rocauc of tasks; OGB's own of its sets"


def labels_of(source: datasets.Source, y: Tensor | None, metric: MetricName | None) -> tuple[Tensor, int]:
    """Return the labels, and the number of classes, or of tasks."""
    if y is None:
        of_folder = "; --label names the column that has them" if source.is_own else ""
        raise ValueError(f"{source.name} has no labels to train by{of_folder}")
    number = y.shape[1] if y.is_floating_point() else int(y.max()) + 1
    if not y.is_floating_point() and number < 2:
        raise ValueError(f"{source.name} must have at least two classes to learn, got one")
    if metric in METRICS and number != 2 and not y.is_floating_point():
        raise ValueError(f"--metric {metric} is of two classes, and {source.name} has {number}")
    return y, number


def metric_of(
    source: datasets.Source, label: tuple[Any] | None, chosen: MetricName | None
) -> tuple[str, training.Metric]:
    """Name and function of the metric; OGB's sets are scored by OGB's own Evaluator unless another one is chosen.

    ``label`` is what ``--label`` says: of tasks, which are mostly 0, accuracy would tell little.
    """
    official = source.metric
    of_tasks = label is not None and isinstance(label[0], list)
    name = chosen if chosen is not None else "rocauc" if of_tasks else official
    if name == "accuracy":
        return name, training.accuracy
    if name != official:
        return METRICS[name]
    evaluator = datasets.evaluator(source.name)

    def score(logits: Tensor, y: Tensor) -> float:
        scores = logits if y.is_floating_point() else (logits[:, 1] - logits[:, 0])[:, None]
        tasks = y.view(len(y), -1).cpu()
        if not bool(((tasks == 1).any(0) & (tasks == 0).any(0)).any()):  # which the evaluator refuses
            return math.nan
        return float(evaluator.eval({"y_true": tasks.numpy(), "y_pred": scores.cpu().numpy()})[name])

    score.__qualname__ = METRICS[name][0]  # by which a warning, and --resume, know it
    return score.__qualname__, score


def of_class(metric_name: str, classes: list[str] | None, y: Tensor) -> str:
    """Average precision is of one class: the name says of which, a line on stderr that it may not be the one meant."""
    if metric_name != "AP" or not classes:
        return metric_name
    if (share := float((y == 1).double().mean())) > 0.5:
        told = f"AP is of {classes[1]}, which {share:.0%} of the graphs are"
        print(f"{told}; of {classes[0]} it is where that name comes last in the alphabet", file=sys.stderr)
    return f"{metric_name} of {classes[1]}"


def tested(scores: Tensor, y: Tensor | None, ids: Tensor, metric: training.Metric) -> float:
    """Return the metric of the graphs ``ids``; NaN, with a line on stderr, if a score is not finite."""
    assert y is not None
    odd = Odd("scores that are not finite, so that the test has no result")
    odd.add(training.not_finite(scores).cpu(), [*map(str, ids.tolist())])
    odd.warn(len(ids))
    return math.nan if odd.number else metric(scores, y.to(scores.device))


def show_score(metric_name: str, value: float) -> str:
    if math.isnan(value):
        return "none"
    return f"{100 * value:.2f} %" if metric_name == "accuracy" else f"{value:.4f}"
