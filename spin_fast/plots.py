"""Plots by matplotlib, written to files; no display is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ._common import files
from .graphs.drawing import Drawing
from .selection import Evaluation
from .training.explanation import Explanation
from .training.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

WIDTH = 8  # inches of a graph
SIGNED = "RdBu_r"  # colours of what may be added or taken away


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
    losses = [loss for epoch in fit.epochs for loss in (epoch.loss, epoch.validation_loss)]
    left.set(xlabel="epoch", ylabel="cross-entropy", yscale="log" if 0 < 10 * min(losses) < max(losses) else "linear")
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
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    _write(figure, Path(path))


def explained_graph(path: str | Path, drawing: Drawing, explained: Explanation, *, title: str) -> None:
    """Draw a graph with nodes shaded by what they add to a class score; below, by their attention in each branch.

    Of an ensemble they are shaded by what they add to the probability, and below by what they add to each member's.

    Args:
        path: where to write; its ending chooses the format, such as ``.png`` or ``.svg``.
        drawing: what :func:`spin_fast.graphs.drawing.draw` makes of the graph.
        explained: what :func:`spin_fast.training.explain` returns for it alone.
        title: above it.

    Raises:
        ValueError: an explanation of several graphs, or of another one.
    """
    from matplotlib.figure import Figure

    if explained.ptr.tolist() != [0, len(drawing.positions)]:
        raise ValueError(f"explained must be of the graph of {len(drawing.positions)} nodes that is drawn")
    totals = explained.totals.cpu()
    parts, colours, label = [], "Greys", "attention"
    if members := explained.members:
        names = [f"member {number}, probability {float(of.scores[0]):.3g}" for number, of in enumerate(members, 1)]
        parts, colours, label = [*zip(names, [of.totals.cpu() for of in members], strict=True)], SIGNED, "added"
    elif explained.attention is not None:
        parts = [*zip(explained.branches, explained.attention.cpu(), strict=True)]
    shape = np.ptp(drawing.positions, axis=0) + 1
    height = float(np.clip(min(WIDTH / shape[0], 1.2) * shape[1], 2.5, 7))  # at most 1.2 inches to a unit
    columns = 4
    rows = math.ceil(len(parts) / columns)
    small = height / columns + 0.3
    figure = Figure(figsize=(WIDTH + 1.2, height + rows * small + 1), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[height] + [small] * rows)
    axes = figure.add_subplot(grid[0, :])
    most = float(totals.abs().max()) or 1.0
    shades = _shaded(axes, drawing, totals, SIGNED, (-most, most), min(WIDTH / shape[0], height / shape[1]))
    figure.colorbar(shades, ax=axes, label=f"added to the {explained.quantity}", shrink=0.9, aspect=30, panchor=False)
    if parts:
        below = [figure.add_subplot(grid[1 + place // columns, place % columns]) for place in range(rows * columns)]
        most = max(float(values.abs().max()) for _, values in parts) or 1.0
        limits, scale = (-most * (colours == SIGNED), most), min(WIDTH / shape[0], height / shape[1]) / (columns + 0.5)
        for axes, (name, values) in zip(below, parts, strict=False):
            shades = _shaded(axes, drawing, values, colours, limits, scale)
            axes.set_title(name, fontsize=8)
        for axes in below[len(parts) :]:  # which keep their place, so that all are as large
            axes.axis("off")
        figure.colorbar(shades, ax=below).ax.set_title(label, fontsize=8)
    figure.suptitle(title, fontsize=11, parse_math=False)
    note = "shaded by what its rows add, and a row of hop r describes the neighbourhood within r hops"
    figure.supxlabel(f"a node is {note}, not the node alone", fontsize=8)
    _write(figure, Path(path))


def _shaded(
    axes: Axes, drawing: Drawing, values: Tensor, colours: str, limits: tuple[float, float], scale: float
) -> PathCollection:
    """Draw the graph, ``scale`` inches to a unit of length."""
    from matplotlib.collections import LineCollection
    from scipy.spatial import cKDTree

    positions, ends = drawing.positions, drawing.positions[np.array(drawing.pairs, dtype=int).reshape(-1, 2)]
    apart = cKDTree(positions).query(positions, 2)[0][:, 1] if len(positions) > 1 else np.ones(1)
    width = float(np.clip(0.65 * 72 * scale * np.median(apart), 2, 24))  # of a node, in points
    across = np.stack([ends[:, 0, 1] - ends[:, 1, 1], ends[:, 1, 0] - ends[:, 0, 0]], axis=1)
    lines = [
        end + 0.12 * (number - (bonds - 1) / 2) * side
        for end, side, bonds in zip(ends, across, drawing.bonds, strict=True)
        for number in range(bonds)
    ]
    thickness = float(np.clip(width / 12, 0.3, 1.2))
    faint = float(np.clip(6 * len(positions) / max(len(lines), 1), 0.15, 1))  # where lines are many
    axes.add_collection(LineCollection(lines, colors="0.55", linewidths=thickness, alpha=faint, zorder=1))
    if any(drawing.directed):
        one_way = ends[drawing.directed]
        middle = 0.6 * (one_way[:, 1] - one_way[:, 0])
        axes.quiver(
            *one_way[:, 0].T,
            *middle.T,
            angles="xy",
            scale_units="xy",
            scale=1,
            units="inches",
            width=thickness / 72,
            color="0.55",
            headwidth=8,
            headlength=8,
            headaxislength=7,
            zorder=1,
        )
    low, high = limits
    order = values.abs().argsort(stable=True)  # what adds most is on top
    shades = axes.scatter(
        positions[order, 0],
        positions[order, 1],
        s=width**2,
        c=values[order],
        cmap=colours,
        vmin=low,
        vmax=high,
        edgecolors="0.35",
        linewidths=min(0.8, width / 12),
        zorder=2,
    )
    if width >= 12:
        size = width / (1.4 + 0.4 * max(map(len, drawing.labels)))
        for (x, y), label, value in zip(positions, drawing.labels, values.tolist(), strict=True):
            colour = "white" if abs(value) > 0.65 * high else "black"
            at = {"ha": "center", "va": "center"}
            axes.text(x, y, label, at, fontsize=size, color=colour, zorder=3, parse_math=False)
    axes.set(aspect="equal", xlim=_around(positions[:, 0]), ylim=_around(positions[:, 1]))
    axes.axis("off")
    return shades


def _around(values: np.ndarray) -> tuple[float, float]:
    return values.min() - 0.5, values.max() + 0.5


def _write(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    kind = path.suffix[1:] or "png"
    metadata = {"png": {"Software": "spin_fast"}, "svg": {"Creator": "spin_fast", "Date": None}}.get(kind)
    with files.replacing(path) as temporary, rc_context({"svg.hashsalt": "spin_fast"}):
        figure.savefig(temporary, dpi=120, format=kind, metadata=metadata)
