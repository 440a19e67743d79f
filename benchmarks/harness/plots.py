"""Plots: of a table of races, of seconds along an axis, of scores. Times are relative to ours, on logarithmic axes."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from .race import Race

COLOURS = 64  # a plot has few, and a palette makes a small file
MARKERS = "osD^vP*X"


def plot(title: str, races: list[Race], path: Path) -> None:
    """Draw one table; what lies right of 1 is slower than ours, the black line is the floor."""
    from matplotlib.figure import Figure

    others = list(dict.fromkeys(other for race in races for other in race.others))
    figure = Figure(figsize=(7.5, 1.3 + 0.2 * len(others) / 3 + 0.26 * len(races)), dpi=110, layout="constrained")
    ax = figure.subplots()
    for number, other in enumerate(others):
        lines = [line for line, race in enumerate(races) if other in race.seconds]
        ratios = [races[line].ratio(other) for line in lines]
        medians = [ratio.median for ratio in ratios]
        ax.errorbar(
            medians,
            lines,
            xerr=[[ratio.median - ratio.low for ratio in ratios], [ratio.high - ratio.median for ratio in ratios]],
            fmt=MARKERS[number % len(MARKERS)],
            color=f"C{number % 10}",
            markersize=5,
            elinewidth=0.8,
            label=other,
        )
    floors = [(race.ratio(race.floor).median, line) for line, race in enumerate(races) if race.floor]
    if floors:
        ax.plot(*zip(*floors, strict=True), "|", color="black", markersize=11, markeredgewidth=2, label="floor")
    ax.axvline(1, color="black", linewidth=1)
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_yticks(range(len(races)), [race.on for race in races])
    ax.set_ylim(len(races) - 0.5, -0.5)
    ax.grid(axis="y", color="lightgrey", linewidth=0.5)
    ax.set_axisbelow(True)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.8), max(high, 1.25))
    _label_logarithmic(ax.xaxis)
    ax.set_xlabel("time / ours (left of 1: faster than ours)", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.tick_params("y", length=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    _save(figure, path)


def plot_curves(title: str, axis: str, seconds: dict[str, dict[float, float]], path: Path) -> None:
    """Draw a curve per contender, relative to the first one, which is ours, at the first place of the axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=110, layout="constrained")
    ax = figure.subplots()
    ours = next(iter(seconds.values()))
    first = min(ours)
    for number, (line, times) in enumerate(seconds.items()):
        places = sorted(times)
        ax.plot(
            places,
            [times[place] / ours[first] for place in places],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linewidth=1.2,
            label=line,
        )
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_yscale("log")
    _label_logarithmic(ax.yaxis)
    ax.set_xlabel(axis, fontsize=8)
    ax.set_ylabel(f"time / ours at {axis} = {first:g}", fontsize=8)
    ax.grid(color="lightgrey", linewidth=0.5)
    ax.tick_params(labelsize=8)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    _save(figure, path)


def plot_scores(title: str, axis: str, scores: dict[tuple[str, ...], list[float]], path: Path) -> None:
    """Draw scores of many seeds, in %: every one pale, and their mean and standard deviation.

    ``scores`` are by words: the first has a panel, the last a line, and those between are a place on the axis, numbers
    as far apart as they are.
    """
    import numpy as np
    from matplotlib.figure import Figure

    panels, lines = ([*dict.fromkeys(words[at] for words in scores)] for at in (0, -1))
    places = {panel: [*dict.fromkeys(words[1:-1] for words in scores if words[0] == panel)] for panel in panels}
    width, ratios = 2.5 + sum(map(len, places.values())), [len(places[panel]) for panel in panels]
    figure = Figure(figsize=(max(width, 5.5), 4), dpi=110, layout="constrained")
    drawn = figure.subplots(1, len(panels), squeeze=False, width_ratios=ratios)[0]
    for ax, panel in zip(drawn, panels, strict=True):
        names = ["\n".join(words) for words in places[panel]]
        numbers = all(name.isdigit() for name in names)
        at = dict(zip(places[panel], map(int, names) if numbers else range(len(names)), strict=True))
        for number, line in enumerate(lines):
            aside = 0 if len(lines) == 1 else 0.5 * (number / (len(lines) - 1) - 0.5)
            found = {
                at[words[1:-1]]: values for words, values in scores.items() if (words[0], words[-1]) == (panel, line)
            }
            for place, values in found.items():
                ax.plot([place + aside] * len(values), 100 * np.array(values), ".", color=f"C{number}", alpha=0.25)
            ax.errorbar(
                [place + aside for place in found],
                [100 * np.mean(values) for values in found.values()],
                [100 * np.std(values, ddof=1) if len(values) > 1 else 0 for values in found.values()],
                fmt=MARKERS[number % len(MARKERS)] + ("-" if numbers else ""),
                color=f"C{number}",
                markersize=5,
                elinewidth=1,
                capsize=2,
                label=line,
            )
        ax.set_title(panel, fontsize=9)
        ax.set_xticks([*at.values()], names)
        ax.set_xlabel(axis, fontsize=8)
        ax.grid(axis="y", color="lightgrey", linewidth=0.5)
        ax.tick_params(labelsize=8)
    drawn[0].set_ylabel("test, %", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    if len(lines) > 1:
        figure.legend(
            *drawn[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7, frameon=False
        )
    _save(figure, path)


def _label_logarithmic(axis: Any) -> None:
    """Label a logarithmic axis 1, 2, 5, 10, ..., and in between where that would be few labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Any, path: Path) -> None:
    from PIL import Image

    picture = BytesIO()
    figure.savefig(picture, bbox_inches="tight")  # or a legend wider than the axes is cut off
    Image.open(picture).convert("RGB").quantize(COLOURS).save(path, optimize=True)
