"""Runs with many seeds, which take minutes: each is kept as it ends, and none that is kept is repeated.

A run is kept under words and its seed, such as ``NCI1/SPIN-att/0``; runs that differ in the seed alone are averaged.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from spin_fast._common.files import replacing

from . import report

Run = dict[str, Any]
"""``test`` and ``validation``, scores from 0 to 1, and what else a program tells of a run."""
Job = Callable[[], Run]


class OtherSettings(ValueError):
    """The runs of a file are of other settings."""


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """With the options that all such programs have."""
    made = argparse.ArgumentParser(
        prog=f"python -m spin_fast.benchmarks.{prog}",
        description=description,
        epilog="Started again with the same --results, it goes on where it was stopped.",
    )
    made.add_argument("--root", help="folder of the data sets (default: $SPIN_FAST_DATA, else data)")
    made.add_argument("--results", type=Path, default=Path("."), metavar="DIR", help="default: the current folder")
    return made


def complete(file: Path, settings: dict[str, Any], jobs: dict[str, Job]) -> dict[str, Run]:
    """Do the jobs that ``file`` lacks the runs of; all runs of the file, those of the jobs first, in their order.

    Raises:
        OtherSettings: the file was made with other ones.
    """
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"settings": settings, "runs": {}}
    if kept["settings"] != settings:
        raise OtherSettings(f"{file} was made with other settings; move it away")
    runs: dict[str, Run] = kept["runs"]
    with Progress() as progress:
        task = progress.add_task(file.stem, total=len(jobs))
        for key, job in jobs.items():
            progress.update(task, description=f"{file.stem} {key}")
            if key not in runs:
                runs[key] = job()
                with replacing(file) as part:
                    part.write_text(json.dumps({"settings": settings, "machine": report.machine(), "runs": runs}))
            progress.advance(task)
    return {key: runs[key] for key in dict.fromkeys((*jobs, *runs)) if key in runs}


def by_words(runs: dict[str, Run]) -> dict[tuple[str, ...], list[Run]]:
    """The runs that differ in the seed alone."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for key, run in runs.items():
        groups.setdefault(tuple(key.split("/")[:-1]), []).append(run)
    return groups


def percent(values: Iterable[float]) -> str:
    """Mean and standard deviation, such as ``76.3 ± 3.2``."""
    scores = [100 * value for value in values]
    return f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores) if len(scores) > 1 else 0:.1f}"


def table(
    title: str,
    headers: Sequence[str],
    runs: dict[str, Run],
    score: str = "accuracy",
    *,
    more: Mapping[str, Mapping[tuple[str, ...], str]] | None = None,
    plotted: bool = False,
) -> report.Table:
    """A row for each group of runs, under the ``headers`` of its words; a block for each first word.

    ``more`` has further columns, whose cells are found by those words.
    """
    more = more or {}
    blocks: dict[str, list[tuple[str, ...]]] = {}
    for words, group in by_words(runs).items():
        block = blocks.setdefault(words[0], [])
        cells = (
            percent(run["test"] for run in group),
            f"{100 * statistics.mean(run['validation'] for run in group):.1f}",
        )
        further = (column[words] for column in more.values())
        block.append(("" if block else words[0], *words[1:], *cells, *further, str(len(group))))
    columns = (*headers, f"test {score}, %", "validation, %", *more, "seeds")
    return report.Table(title, columns, list(blocks.values()), left=len(headers), plotted=plotted)


def write(name: str, folder: Path, session: report.Session) -> None:
    """Print the tables, and write them to ``folder/name.md``."""
    print(report.terminal(session))
    file = folder / f"{name}.md"
    with replacing(file) as part:
        part.write_text(report.markdown(session, report.machine()))
    print(f"written: {file}")
