"""Plots by matplotlib, written to files; no display is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ._common import files
from .selection import Evaluation
from .training.fit import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def training_curve(path: str | Path, fit: Fit, *, title: str, metric: str, test: float | None = None) -> None:
    """Draw loss (left) and metric (right) over the epochs, the kept epoch marked.

    Args:
        path: where to write; its ending chooses the format, such as ``.png`` or ``.pdf``.
        fit: what :func:`spin_fast.training.fit` returned.
        title: over both panels.
        metric: name of the metric.
        test: its value on the test graphs, drawn as a line; the test graphs are seen once, after training.
    """
    from matplotlib.figure import Figure

    epochs = range(1, len(fit.epochs) + 1)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(epochs, [epoch.loss for epoch in fit.epochs], label="training")
    left.plot(epochs, [epoch.validation_loss for epoch in fit.epochs], label="validation")
    left.set(xlabel="epoch", ylabel="cross-entropy", yscale="log")
    right.plot(epochs, [epoch.validation for epoch in fit.epochs], color="C1", label="validation")
    if test is not None and math.isfinite(test):
        right.axhline(test, color="C2", linestyle="--", label=f"test {test:.3f}, once, at the kept epoch")
    right.set(xlabel="epoch", ylabel=metric)
    for axes in (left, right):
        axes.axvline(fit.best_epoch + 1, color="0.6", linewidth=1, label=f"kept: epoch {fit.best_epoch + 1}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    _write(figure, Path(path))


def evaluation_picture(
    path: str | Path, evaluation: Evaluation, *, title: str, published: Mapping[str, tuple[float, float]] | None = None
) -> None:
    """Draw the mean of an evaluation, with its standard deviation and a point per fold, beside published results.

    Args:
        path: as for :func:`training_curve`.
        evaluation: with the name of its metric in ``about``.
        title: over the picture.
        published: mean and standard deviation of each method, in percent.
    """
    from matplotlib.figure import Figure

    about = evaluation.about
    bars: list[tuple[str, float, float, str, list[float]]]
    bars = [(name, *result, "0.45", []) for name, result in (published or {}).items()]
    for name, ensemble in ((about["space"], False), (f"{about['space']}, {about['ensemble']} together", True)):
        if scores := evaluation.scores(ensemble):
            mean, std = evaluation.mean_and_std(ensemble)
            bars.append((name, 100 * mean, 100 * std, "C0", [100 * score for score in scores]))
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for at, (_, mean, std, color, scores) in enumerate(bars):
        axes.errorbar(mean, at, xerr=std, fmt="o", color=color, markersize=7, capsize=4)
        axes.plot(scores, [at + 0.25] * len(scores), "o", color="black", markersize=3, alpha=0.6)
    axes.set_title(title)
    axes.set_xlabel(f"test {about['metric']} in percent: mean, standard deviation, and each fold or run")
    axes.set_yticks(range(len(bars)), [f"{name}  {mean:.1f} ± {std:.1f}" for name, mean, std, *_ in bars])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    _write(figure, Path(path))


def _write(figure: Figure, path: Path) -> None:
    with files.replacing(path) as temporary:
        kind = path.suffix[1:] or "png"
        figure.savefig(temporary, dpi=120, format=kind, metadata={"Software": "spin_fast"} if kind == "png" else None)
