"""A picture of a table: a line per input, a dot per contender, on a logarithmic axis of time over ours."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from .race import Race

COLOURS = 64  # a plot has few, and a palette makes a small file


def plot(title: str, races: list[Race], path: Path) -> None:
    """Draw one table; what lies right of 1 is slower than ours, the black line is the floor."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
    from PIL import Image

    rivals = list(dict.fromkeys(rival for race in races for rival in race.rivals))
    figure = Figure(figsize=(7.5, 1.3 + 0.2 * len(rivals) / 3 + 0.26 * len(races)), dpi=110, layout="constrained")
    ax = figure.subplots()
    for number, rival in enumerate(rivals):
        lines = [line for line, race in enumerate(races) if rival in race.seconds]
        ratios = [races[line].ratio(rival) for line in lines]
        medians = [ratio.median for ratio in ratios]
        ax.errorbar(
            medians,
            lines,
            xerr=[[ratio.median - ratio.low for ratio in ratios], [ratio.high - ratio.median for ratio in ratios]],
            fmt="osD^vP*X"[number % 8],
            color=f"C{number % 10}",
            markersize=5,
            elinewidth=0.8,
            label=rival,
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
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("time / ours (left of 1: faster than ours)", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.tick_params("y", length=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    picture = BytesIO()
    figure.savefig(picture)
    Image.open(picture).convert("RGB").quantize(COLOURS).save(path, optimize=True)
