"""What a session of races leaves behind: a table on the terminal, ``results.json``, ``results.md`` and bar plots."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import spin_fast

from .race import Race, Spread

PACKAGES = ("torch", "numpy", "scipy", "torch_geometric", "pyg_lib")
HEADERS = ("input", "rival", "ours, ms", "rival, ms", "rival / ours", "quartiles", "rounds")
MEANING = (
    "Medians of interleaved rounds; one thread by CPU time, more by wall time. A ratio above 1: spin_fast is faster. "
    "Ratios are taken round by round."
)


@cache
def machine() -> dict[str, Any]:
    """The machine and the versions, nothing that changes from run to run."""
    from cpuinfo import get_cpu_info  # a dependency of pytest-benchmark

    return {
        "cpu": get_cpu_info().get("brand_raw", platform.processor()),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "spin_fast": {"version": spin_fast.__version__, **spin_fast.build_info()},
    }


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def load() -> float:
    """Processes that ran or waited for a core in the minute before the first call, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe(info: dict[str, Any]) -> str:
    """One line about the machine."""
    ours = info["spin_fast"]
    kernels = ours["isa"] if ours["native"] else f"no native kernels ({ours['reason']})"
    versions = ", ".join(f"{name} {number or 'missing'}" for name, number in info["versions"].items())
    return f"{info['cpu']}, {info['cores']} cores; spin_fast {ours['version']}: {kernels}; {versions}"


def summary(race: Race) -> dict[str, Any]:
    """One race for pytest-benchmark's JSON: seconds per call and ratios to ours, as quartiles."""
    return {
        "input": race.on,
        "threads": race.threads,
        "clock": "CPU time" if race.threads == 1 else "wall time",
        "calls_per_sample": race.calls,
        "seconds": {contender: race.time(contender)._asdict() for contender in race.seconds},
        "ratios": {rival: race.ratio(rival)._asdict() for rival in race.rivals},
    }


def by_table(races: Iterable[Race]) -> list[tuple[str, list[Race]]]:
    """Races of one case and one number of threads share a table; tables and rows keep the order of the session."""

    def title(race: Race) -> str:
        return f"{race.case}, {race.threads} thread{'s' if race.threads > 1 else ''}"

    order: dict[str, int] = {}
    for race in races:
        order.setdefault(title(race), len(order))
    ranked = sorted(races, key=lambda race: order[title(race)])
    return [(name, list(group)) for name, group in groupby(ranked, key=title)]


def rows(races: Iterable[Race]) -> list[tuple[str, ...]]:
    """One row per race and rival, as under ``HEADERS``."""
    return [
        (
            race.on,
            rival,
            _milliseconds(race.time(race.ours)),
            _milliseconds(race.time(rival)),
            f"{race.ratio(rival).median:.2f}",
            f"{race.ratio(rival).low:.2f} .. {race.ratio(rival).high:.2f}",
            str(race.rounds),
        )
        for race in races
        for rival in race.rivals
    ]


def _milliseconds(seconds: Spread) -> str:
    value = seconds.median * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def terminal(races: list[Race], width: int) -> str:
    """All tables as text."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(width, 120))
    with console.capture() as capture:
        for title, group in by_table(races):
            table = Table(title=title, title_justify="left")
            for column, header in enumerate(HEADERS):
                table.add_column(header, justify="left" if column < 2 else "right", no_wrap=True)
            for race in group:
                for row in rows([race]):
                    table.add_row(*row)
                table.add_section()
            console.print(table)
    return capture.get()


def markdown(races: list[Race], info: dict[str, Any]) -> str:
    """All tables as Markdown."""
    lines = [f"{describe(info)}. Load before the start: {load():.1f}.", "", MEANING, ""]
    for title, group in by_table(races):
        lines += [f"### {title}", "", f"| {' | '.join(HEADERS)} |", "|---|---" + "|---:" * (len(HEADERS) - 2) + "|"]
        lines += [*(f"| {' | '.join(row)} |" for row in rows(group)), ""]
    return "\n".join(lines)


def write(races: list[Race], info: dict[str, Any], folder: Path) -> None:
    """Write ``results.json`` (every sample), ``results.md`` and one plot per suite into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": load(),
        "machine": info,
        "races": [{"suite": race.suite, "case": race.case, **summary(race), "samples": race.seconds} for race in races],
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(races, info))
    for suite in dict.fromkeys(race.suite for race in races):
        plot([race for race in races if race.suite == suite], folder / f"{suite}.png")


def plot(races: list[Race], path: Path) -> None:
    """Bars of the ratios on a logarithmic axis, a panel per table: cases below each other, threads side by side."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(race.case for race in races))
    threads = sorted({race.threads for race in races})
    tables = {(group[0].case, group[0].threads): (title, group) for title, group in by_table(races)}
    lines = [
        max(
            sum(len(race.rivals) + 1 for race in races if (race.case, race.threads) == (case, number))
            for number in threads
        )
        for case in cases
    ]
    heights = [0.9 + 0.16 * number for number in lines]
    figure = Figure(figsize=(6.5 * len(threads), sum(heights)), layout="constrained")
    axes = figure.subplots(len(cases), len(threads), squeeze=False, height_ratios=heights)
    for row, case in enumerate(cases):
        for column, number in enumerate(threads):
            if (case, number) in tables:
                _panel(axes[row][column], *tables[case, number])
            else:
                axes[row][column].set_axis_off()
    figure.savefig(path, dpi=110)


def _panel(ax: Any, title: str, races: list[Race]) -> None:
    """One bar per rival under the name of the input, green where we are faster."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    labels: list[str] = []
    names: list[int] = []
    ratios: list[Spread] = []
    for race in races:
        ax.axhline(len(labels) - 0.5, color="lightgrey", linewidth=0.6)
        names.append(len(labels))
        labels.append(race.on)
        for rival in race.rivals:
            ratio = race.ratio(rival)
            ratios.append(ratio)
            ax.barh(
                len(labels),
                ratio.median - 1,
                left=1,
                xerr=[[ratio.median - ratio.low], [ratio.high - ratio.median]],
                color="tab:green" if ratio.median >= 1 else "tab:orange",
                error_kw={"linewidth": 0.8},
            )
            beside = (max(ratio.high, 1), len(labels))
            ax.annotate(f"{ratio.median:.2f}", beside, (3, 0), textcoords="offset points", va="center", fontsize=7)
            labels.append(rival)
    ax.axvline(1, color="black", linewidth=1)
    ax.set_title(title, fontsize=9)
    ax.set_yticks(range(len(labels)), labels)
    for line in names:
        ax.get_yticklabels()[line].set_fontweight("bold")
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set_xscale("log")
    ax.set_xlim(min(0.9, *(ratio.low for ratio in ratios)) / 1.1, max(1.1, *(ratio.high for ratio in ratios)) * 1.5)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("rival's time / ours", fontsize=8)
    ax.tick_params(labelsize=7)
    ax.tick_params("y", length=0)
