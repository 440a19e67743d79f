"""The report of a session: tables on the terminal, ``results.json``, ``results.md``, and a plot per table."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import spin_fast
from spin_fast._common.files import replacing

from . import gpu
from .floors import Bandwidth
from .gpu import Copies
from .race import Race, Spread

PACKAGES = ("torch", "numpy", "scipy", "torch_geometric", "pyg_lib", "torch_scatter")
MEANING = (
    "Medians of interleaved rounds; one thread by CPU time, more by wall time. '/ ours': a contender's time over the "
    "first one's in its block, which is ours; above 1 we are faster. '/ floor': its time over the floor's, the least "
    "that this machine needs for what must be read, written and fetched; of several floors the slowest counts. "
    "Ratios are taken round by round. A rival that takes very long is timed once, without rounds."
)


GPU_MEANING = (
    "On the GPU: wall time of calls that follow one another, from an idle GPU to an idle GPU. The floor there is a "
    "copy on the device of as many bytes, of which it reads one half and writes the other: every input of the "
    "operation counts once and every output once, with attention the weights too. A share of the copy bandwidth is "
    "the floor's time over ours. Stand-ins are random graphs with the statistics of a data set that was not there."
)


class Table(NamedTuple):
    """A table; ``blocks`` are rows that belong together. The first ``left`` columns are words; some have a plot."""

    title: str
    headers: tuple[str, ...]
    blocks: list[Sequence[tuple[str, ...]]]
    left: int = 1
    plotted: bool = False


@dataclass
class Curves:
    """Seconds along an axis: of every contender, at every place on the axis."""

    title: str
    axis: str
    seconds: dict[str, dict[float, float]] = field(default_factory=dict)

    @property
    def table(self) -> Table:
        places = sorted({place for curve in self.seconds.values() for place in curve})
        headers = ("contender", *(f"{self.axis} = {place:g}" for place in places))
        block = [
            (name, *(_duration(curve[place]) if place in curve else "" for place in places))
            for name, curve in self.seconds.items()
        ]
        return Table(self.title, headers, [block], plotted=True)


class Goal(NamedTuple):
    """A target: a minimum, or of ``ms`` a maximum; ``x`` and ``%`` are ratios, of which 1 is 100 %."""

    what: str
    on: str
    wanted: float
    unit: str
    reached: Spread

    @property
    def met(self) -> bool:
        return self.reached.median <= self.wanted if self.unit == "ms" else self.reached.median >= self.wanted

    @property
    def row(self) -> tuple[str, ...]:
        factor = {"x": 1, "%": 100, "ms": 1e3}[self.unit]
        low, median, high = (_short(factor * value) for value in self.reached)
        wanted = f"{'≤' if self.unit == 'ms' else '≥'} {factor * self.wanted:g} {self.unit}"
        return self.what, self.on, wanted, f"{median} {self.unit}", f"{low}–{high}", "yes" if self.met else "**no**"


@dataclass
class Session:
    """What was measured, and notes on what was left out and why."""

    goals: list[Goal] = field(default_factory=list)
    copies: Copies | None = None
    races: list[Race] = field(default_factory=list)
    curves: list[Curves] = field(default_factory=list)
    counted: list[Table] = field(default_factory=list)
    bandwidths: list[Bandwidth] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def along(self, axis: str, title: str) -> Curves:
        """The curves of that title, new where there are none."""
        found = next((curves for curves in self.curves if curves.title == title), None)
        if found is None:
            self.curves.append(found := Curves(title, axis))
        return found

    def count(self, title: str, headers: tuple[str, ...], block: Sequence[tuple[str, ...]], left: int = 1) -> None:
        """Add a block to the table of that title, for what is neither a race nor a curve."""
        found = next((table for table in self.counted if table.title == title), None)
        if found is None:
            self.counted.append(found := Table(title, headers, [], left))
        found.blocks.append(block)

    @property
    def summary(self) -> Table:
        """Of each race the best rival and ours."""
        headers = ("race", "best rival", "ours", "rival", "/ ours")
        block = [
            (
                *(f"{race.title}: {race.on}", rival),
                *(_duration(race.time(name).median) for name in (race.ours, rival)),
                _short(race.ratio(rival).median),
            )
            for race in self.races
            if (rival := race.best_rival)
        ]
        return Table("summary", headers, [block], left=2)

    def tables(self, races: bool = True) -> list[Table]:
        """All of them, or all but the races."""
        tables = []
        headers: tuple[str, ...]
        if self.goals:
            headers = ("goal", "input", "wanted", "reached", "quartiles", "met")
            tables.append(Table("goals on the GPU", headers, [[goal.row for goal in self.goals]], left=2))
        if self.copies is not None:
            headers = ("bytes of the copy", "copy_", "kernel")
            title = "memory of the GPU, GB/s read and written"
            tables.append(Table(title, headers, [self.copies.rows], left=0))
        if self.bandwidths:
            headers = ("threads", "triad", "copy", "read", "floor's loop", "floor's loop / triad")
            block = [bandwidth_row(bandwidth) for bandwidth in self.bandwidths]
            tables.append(Table("memory of this machine, GB/s read and written", headers, [block], left=0))
        if races:
            tables += [
                Table(title, race_headers(group[0]), [rows(race) for race in group], left=2, plotted=True)
                for title, group in by_table(self.races)
            ]
        return [*tables, *(curves.table for curves in self.curves), *self.counted]


@cache
def machine() -> dict[str, Any]:
    """The machine and the versions; nothing that changes between sessions."""
    from cpuinfo import get_cpu_info  # a dependency of pytest-benchmark

    return {
        "cpu": get_cpu_info().get("brand_raw", platform.processor()),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "spin_fast": {"version": spin_fast.__version__, **spin_fast.build_info()},
        **({"gpu": gpu.describe()} if torch.cuda.is_available() else {}),
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
    gpu_facts = ", ".join(f"{name} {value}" for name, value in info["gpu"].items()) + "; " if "gpu" in info else ""
    cores = f"{info['cpu']}, {info['cores']} cores"
    return f"{gpu_facts}{cores}; spin_fast {ours['version']}: {kernels}; {versions}"


def summary(race: Race) -> dict[str, Any]:
    """One race for pytest-benchmark's JSON: seconds per call and ratios, as quartiles."""
    floor = race.floor
    return {
        "input": race.on,
        "threads": race.threads,
        "device": race.device,
        "clock": race.clock,
        "calls_per_sample": race.calls,
        "seconds": {contender: race.time(contender)._asdict() for contender in race.seconds},
        "ratios": {other: race.ratio(other)._asdict() for other in race.others},
        "floor": floor and {"name": floor, "ours_over_it": race.ratio(race.ours, floor)._asdict()},
    }


def by_table(races: Iterable[Race]) -> list[tuple[str, list[Race]]]:
    """Races of one case and one number of threads share a table; tables and rows keep the order of the session."""
    found: dict[str, list[Race]] = {}
    for race in races:
        found.setdefault(race.title, []).append(race)
    return list(found.items())


def race_headers(race: Race) -> tuple[str, ...]:
    """Ratios are taken to ours, and to another one of ours or else to the floor."""
    return "input", "contender", "time", "/ ours", "quartiles", f"/ {race.second or 'floor'}", "quartiles", "rounds"


def race_table(race: Race) -> Table:
    """One race, without empty columns and the second quartiles, so that it fits into 100 columns."""
    headers, block = race_headers(race), rows(race)
    shown = [column for column in (1, 2, 3, 4, 5, 7) if any(row[column] for row in block)]
    narrow = [tuple(row[column] for column in shown) for row in (headers, *block)]
    return Table(f"{race.title}: {race.on}", narrow[0], [narrow[1:]])


def rows(race: Race) -> list[tuple[str, ...]]:
    """A row per contender and kind of floor, as under :func:`race_headers`."""
    floor = race.floor

    def ratio(contender: str, to: str | None) -> tuple[str, str]:
        if to is None or contender == to:
            return "", ""
        spread = race.ratio(contender, to)
        return _short(spread.median), f"{_short(spread.low)}–{_short(spread.high)}"

    shown = [race.ours, *race.others, *race.kinds]
    several = len(race.kinds) > 1
    return [
        (
            race.on if contender == race.ours else "",
            f"{contender} (counts)" if several and contender == floor else contender,
            _duration(race.time(contender).median),
            *ratio(contender, race.ours),
            *ratio(contender, race.second or floor),
            str(race.rounds(contender)) if race.rounds(contender) != before else "",
        )
        for before, contender in zip([0, *map(race.rounds, shown)], shown, strict=False)
    ]


def bandwidth_row(bandwidth: Bandwidth) -> tuple[str, ...]:
    rates = (f"{rate:.1f}" for rate in bandwidth[1:])
    return (str(bandwidth.threads), *rates, f"{bandwidth.floor / bandwidth.triad:.0%}")


def _short(number: float) -> str:
    """Three digits, or two below 1."""
    return f"{number:.0f}" if number >= 99.5 else f"{number:#.3g}" if number >= 0.995 else f"{number:#.2g}"


def _duration(seconds: float) -> str:
    scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{seconds * scale:.3g} {unit}" if seconds * scale < 100 else f"{seconds * scale:.0f} {unit}"


def text(table: Table, width: int) -> str:
    """A table as text; long words of a row are broken where the width does not suffice."""
    from rich.console import Console
    from rich.table import Table as Printed

    printed = Printed(title=table.title, title_justify="left")
    for column, header in enumerate(table.headers):
        is_word = column < table.left
        printed.add_column(header, justify="left" if is_word else "right", no_wrap=not is_word, overflow="fold")
    for block in table.blocks:
        for row in block:
            printed.add_row(*row)
        printed.add_section()
    console = Console(width=width)
    with console.capture() as capture:
        console.print(printed)
    return capture.get()


def markdown(session: Session, info: dict[str, Any], plots: bool = True) -> str:
    """All tables as Markdown, each with its plot."""
    lines = [f"{describe(info)}. Load before the start: {load():.1f}.", ""]
    lines += [MEANING, ""] if session.races else []
    if session.copies:
        clocks = ", ".join(f"{name} {value}" for name, value in session.copies.clocks.items())
        lines += [GPU_MEANING, "", f"While it copied: {clocks or 'clocks unknown'}.", ""]
    lines += [*(f"- {note}" for note in session.notes), ""] if session.notes else []
    for table in session.tables():
        lines += [f"### {table.title}", ""]
        if plots and table.plotted:
            lines += [f"[plot]({plot_name(table.title)})", ""]
        lines += [*markdown_rows(table), ""]
    return "\n".join(lines)


def markdown_rows(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    rules = "|" + "---|" * table.left + "---:|" * (len(table.headers) - table.left)
    rows = [table.headers, *(row for block in table.blocks for row in block)]
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [head, rules, *body]


def check_folder(folder: Path) -> None:
    """Check that :func:`write` replaces nothing but what it has written.

    Raises:
        ValueError: the folder is a file, or holds others' files.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--results {folder} must be a folder, and is a file")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        found = json.loads((folder / "results.json").read_bytes())
    except (OSError, ValueError):
        found = None
    is_own = isinstance(found, dict) and {"machine", "notes", "races"} <= found.keys()
    if not is_own:
        raise ValueError(f"--results {folder} must be a new folder, an empty one, or one that --results has written")


def write(session: Session, info: dict[str, Any], folder: Path, plots: bool = True) -> None:
    """Write ``results.json`` (every sample), ``results.md`` and plots into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load": load(),
        "machine": info,
        "notes": session.notes,
        **({"copies": session.copies._asdict()} if session.copies else {}),
        "goals": [{**goal._asdict(), "reached": goal.reached._asdict(), "met": goal.met} for goal in session.goals],
        "bandwidth": [bandwidth._asdict() for bandwidth in session.bandwidths],
        "races": [
            {"suite": race.suite, "case": race.case, **summary(race), "floors": race.floors, "samples": race.seconds}
            for race in session.races
        ],
        "curves": [asdict(curves) for curves in session.curves],
        "counted": [table._asdict() for table in session.counted],
    }
    written = {"results.json": json.dumps(_rounded(results)) + "\n", "results.md": markdown(session, info, plots)}
    for name, text in written.items():
        with replacing(folder / name) as temporary:  # half a results.json would not be known as ours
            temporary.write_text(text)
    if not plots:
        return
    from .plots import plot, plot_curves

    for title, group in by_table(session.races):
        plot(title, group, folder / plot_name(title))
    for curves in session.curves:
        plot_curves(curves.title, curves.axis, curves.seconds, folder / plot_name(curves.title))


def _rounded(value: Any) -> Any:
    """The same with floats rounded to six digits, which is more than a clock resolves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def plot_name(title: str) -> str:
    """The file of a table's plot."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".png"
