"""``spin-fast train --search``."""

from __future__ import annotations

import csv
import math
import signal
import time
from typing import Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from .. import datasets, training
from .._common import files
from .._common.progress import progress_bar
from ..selection import TrainingSet, Trial, search, spaces
from ..selection.training_set import facts_of
from ..selection.trials import OUTCOMES
from ._app import Report, document_of, kernels_on
from ._errors import ended_by_sigterm
from ._metric import show_score, tested
from ._search import SearchOptions
from ._train_outputs import Outputs

SHOWN = 5  # of the ranking


def check_options(context: typer.Context, searches: bool, of_search: set[str], of_one_model: set[str]) -> None:
    """Refuse options of a search where there is none, and with one those that it would choose."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        if searches and parameter.name in ("device", "resume", "tensorboard"):
            raise ValueError(f"{parameter.opts[0]} is of training without --search")
        if searches and parameter.name in of_one_model:
            raise ValueError(
                f"{parameter.opts[0]}: --search chooses it itself; leave it out, or name a --space FILE.json"
            )
        if not searches and parameter.name in of_search:
            raise ValueError(f"{parameter.opts[0]} is of --search, which is not given")


def train_by_search(
    options: SearchOptions,
    outputs: Outputs,
    source: datasets.Source,
    read: datasets.Folder,
    split: datasets.Split,
    metric: training.Metric,
    metric_name: str,
    metadata: dict[str, Any],
) -> Report:
    """Search by the validation graphs; write the best model, or the ensemble of the best, and report its test."""
    seed = metadata["seed"]
    candidates, budgets = options.candidates(source, seed)
    data = TrainingSet.of(read.graphs, split.train, split.validation, metric)
    start = time.perf_counter()
    with (
        progress_bar(source.title, spaces.search_epochs(candidates, budgets) or None, True) as advance,
        ended_by_sigterm() as signals,
    ):

        def on_trial(trial: Trial) -> None:
            at = "diverged" if trial.trained is None else show_score(metric_name, trial.trained.validation)
            advance(f"validation {at}", spaces.epochs_of(trial.settings, trial.budget))

        found = search(data, candidates, budgets=budgets, seed=seed, n_jobs=options.num_jobs, on_trial=on_trial)
    model = found.model(options.ensemble)
    parts = [(read.graphs[ids], ids) for ids in (split.validation, split.test)]
    scores = [torch.cat(list(training.predict_chunks(model, graphs))) for graphs, _ in parts]
    validation, test = (tested(of, graphs.y, ids, metric) for of, (graphs, ids) in zip(scores, parts, strict=True))
    seconds = time.perf_counter() - start
    for stale in (outputs.result, outputs.state, outputs.curve, outputs.log):  # of a run before
        stale.unlink(missing_ok=True)
    known = {"metric": metric_name, "test": None if math.isnan(test) else test}
    training.save_checkpoint(outputs.model, model, dataset=source.title, **known, **metadata)
    rows = found.table()
    with files.replacing(outputs.trials) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
    chosen = found.ranking[: max(options.ensemble, 1)]
    facts = {
        "dataset": source.title,
        "space": options.name,
        "settings": len(candidates),
        "seed": seed,
        "fold": metadata["fold"],
        "metric": metric_name,
        "test": test,
        "validation": validation,
        "graphs": {part: len(ids) for part, ids in split._asdict().items()},
        "chosen": [facts_of(trial.settings) for trial in chosen],
        "interrupted": found.interrupted,
        "seconds": seconds,
        "kernels": kernels_on(torch.device("cpu")),
        "model": outputs.model,
        "trials": outputs.trials,
        "result": outputs.result,
    }
    of = f"{len(chosen)} models together" if options.ensemble else "the best model"
    table = Table(show_header=False, title=f"{of} of {len(candidates)} settings on {escape(source.title)}")
    table.add_row(f"test {metric_name}", f"[bold]{show_score(metric_name, test)}[/bold]  ({len(split.test)} graphs)")
    table.add_row(
        f"validation {metric_name}", f"{show_score(metric_name, validation)}  ({len(split.validation)} graphs)"
    )
    table.add_row("search", f"{len(found.trials)} models in {seconds:.0f} s")
    for name in ("model", "trials", "result"):
        table.add_row(name, escape(str(facts[name])))
    ranking = Table("rank", "validation", "loss", "settings", title="the best by validation", title_justify="left")
    for rank, row in enumerate(rows[: min(max(SHOWN, len(chosen)), len(found.ranking))], 1):
        told = ", ".join(f"{name} {value}" for name, value in row.items() if name not in OUTCOMES)
        star = " *" if rank <= len(chosen) else ""
        ranking.add_row(f"{rank}{star}", show_score(metric_name, row["validation"]), f"{row['loss']:.3f}", escape(told))
    report = Report(facts, [table, ranking, "* is in the model"])
    if found.interrupted:
        report.exit_code = 128 + (signals[0] if signals else signal.SIGINT)
        report.shown.append(f"interrupted after {len(found.trials)} models: the best of these is kept")
    with files.replacing(outputs.result) as temporary:  # last: it says that all others are there
        temporary.write_text(document_of(report) + "\n")
    return report
