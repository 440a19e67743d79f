"""Plots by matplotlib, written to files; no display is needed."""

from __future__ import annotations

import math
from pathlib import Path

from ._common import files
from .training.fit import Fit


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
    path = Path(path)
    with files.replacing(path) as temporary:
        kind = path.suffix[1:] or "png"
        figure.savefig(temporary, dpi=120, format=kind, metadata={"Software": "spin_fast"} if kind == "png" else None)
