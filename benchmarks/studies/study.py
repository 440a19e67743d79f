"""Studies: scores of training runs with many seeds, which take minutes; none that is kept is repeated.

The scores of a run are kept, as it ends, under words and its seed, such as ``NCI1/SPIN-att/0``; those that differ in
the seed alone are averaged.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress

from spin_fast import datasets
from spin_fast._common.files import replacing

from ..harness import plots, report

Scores = dict[str, Any]
"""``test`` and ``validation``, from 0 to 1, and what else a study tells of a training run."""
TrainingRun = Callable[[], Scores]
Columns = Mapping[str, Mapping[tuple[str, ...], str]]
"""Further cells of a table, by header and by the words of a row."""


class OtherSettings(ValueError):
    """The scores in a file are of other settings."""


class Study(NamedTuple):
    """Training runs of one kind: ``runs`` of a folder of data sets, by the words of ``headers`` and the seed.

    A plot has a panel for the first word, a line for the last one, and a place on its axis for those between.
    """

    title: str
    note: str
    headers: tuple[str, ...]
    settings: dict[str, Any]
    runs: Callable[[str | None], dict[str, TrainingRun]]
    score: str = "accuracy"
    plotted: bool = True
    columns: Callable[[dict[str, Scores]], Columns] = lambda done: {}

    @property
    def described_settings(self) -> str:
        return ", ".join(f"{setting} {value}" for setting, value in self.settings.items())


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """With the options that all such programs have."""
    made = argparse.ArgumentParser(
        prog=f"python -m spin_fast.benchmarks.studies.{program}",
        description=description,
        epilog="Started again with the same --results, it goes on where it was stopped.",
    )
    made.add_argument("--root", help="folder of the data sets (default: $SPIN_FAST_DATA, else data)")
    made.add_argument("--results", type=Path, default=Path("."), metavar="DIR", help="default: the current folder")
    return made


def complete(file: Path, settings: dict[str, Any], runs: dict[str, TrainingRun]) -> dict[str, Scores]:
    """Do the runs that ``file`` lacks; all scores of the file, those of ``runs`` first, in their order.

    Raises:
        OtherSettings: the file was made with other ones.
    """
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"settings": settings, "runs": {}}
    if kept["settings"] != settings:
        raise OtherSettings(f"{file} was made with other settings; move it away")
    done: dict[str, Scores] = kept["runs"]

    def in_order() -> dict[str, Scores]:
        return {key: done[key] for key in dict.fromkeys((*runs, *done)) if key in done}

    with Progress() as progress:
        task = progress.add_task(file.stem, total=len(runs))
        for key, run in runs.items():
            progress.update(task, description=f"{file.stem} {key}")
            if key not in done:
                done[key] = run()
                with replacing(file) as part:
                    part.write_text(json.dumps({"settings": settings, "machine": report.machine(), "runs": in_order()}))
            progress.advance(task)
    return in_order()


def by_words(done: dict[str, Scores]) -> dict[tuple[str, ...], list[Scores]]:
    """The scores that differ in the seed alone."""
    groups: dict[tuple[str, ...], list[Scores]] = {}
    for key, scores in done.items():
        groups.setdefault(tuple(key.split("/")[:-1]), []).append(scores)
    return groups


def percent(values: Iterable[float]) -> str:
    """Mean and standard deviation, such as ``76.3 ± 3.2``."""
    scores = [100 * value for value in values]
    return f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores) if len(scores) > 1 else 0:.1f}"


def table(study: Study, done: dict[str, Scores]) -> report.Table:
    """A row for each group of runs, of means over the seeds; a block for each first word."""
    columns = study.columns(done)
    blocks: dict[str, list[tuple[str, ...]]] = {}
    for words, group in by_words(done).items():
        block = blocks.setdefault(words[0], [])
        cells = (
            percent(scores["test"] for scores in group),
            f"{100 * statistics.mean(scores['validation'] for scores in group):.1f}",
        )
        further = (column[words] for column in columns.values())
        block.append(("" if block else words[0], *words[1:], *cells, *further, str(len(group))))
    headers = (*study.headers, f"test {study.score}, %", "validation, %", *columns, "seeds")
    return report.Table(study.title, headers, list(blocks.values()), left=len(study.headers), plotted=study.plotted)


def carry_out(
    name: str, studies: Mapping[str, Study], asked: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    """Do what is missing; write ``STUDY.json`` of each, a plot, and the tables to ``name.md``; print these."""
    torch.set_num_threads(1)
    session = report.Session()
    for key, study in studies.items():
        try:
            done = complete(options.results / f"{key}.json", study.settings, study.runs(options.root))
        except (OtherSettings, datasets.DatasetError) as error:
            asked.error(str(error))
        if study.note:
            settings = study.described_settings
            session.note(f"{study.title}. {study.note} {settings[0].upper()}{settings[1:]}.")
        session.counted.append(table(study, done))
        if study.plotted:
            scores = {words: [one["test"] for one in group] for words, group in by_words(done).items()}
            axis = ", ".join(study.headers[1:-1])
            plots.plot_scores(study.title, axis, scores, options.results / report.plot_name(study.title))
    for one in session.counted:
        print(report.text(one, 140))
    file = options.results / f"{name}.md"
    with replacing(file) as part:
        part.write_text(report.markdown(session, report.machine()))
    print(f"written: {file}")
