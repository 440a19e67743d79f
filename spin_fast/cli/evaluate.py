"""``spin-fast evaluate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from .. import __version__, datasets
from .._common import files
from .._common.progress import progress_bar
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..selection import Evaluation, Trial, published, spaces
from ..selection import evaluate as evaluate_folds
from ..selection.evaluation import EVALUATION_FORMAT
from ..selection.training_set import differing
from ._app import Report, command
from ._errors import ended_by_sigterm
from ._graphs import tell
from ._metric import METRIC, METRIC_DEFAULT, MetricName, labels_of, metric_of, of_class, show_score
from ._options import DATASET, DataOptions, Splits, data_option, out_option, output_option
from ._outputs import check_output, is_evaluation_table, is_picture
from ._search import SearchOptions, search_option

FOLDS, RUNS, RUNS_OF_ONE_SPLIT = 10, 3, 10


@command("spin-fast evaluate IMDB-BINARY --root data --space paper-att")
def evaluate(
    context: typer.Context,
    data: DataOptions,
    options: SearchOptions,
    dataset: Annotated[str, DATASET],
    splits: Splits = None,
    folds: Annotated[
        int | None,
        data_option(
            min=2,
            help="Cut the graphs into so many folds, stratified by class.",
            show_default=f"the official split or the published folds, or else {FOLDS}",
        ),
    ] = None,
    metric_choice: Annotated[
        MetricName | None,
        search_option("--metric", help=f"What selects, and is reported: {METRIC}", show_default=METRIC_DEFAULT),
    ] = None,
    runs: Annotated[
        int | None,
        search_option(
            min=1,
            help="Final models of each fold.",
            show_default=f"{RUNS}, of a single split {RUNS_OF_ONE_SPLIT}",
        ),
    ] = None,
    seed: Annotated[int, search_option(min=0, help="Of the folds, the settings, the weights and the order.")] = 0,
    out: Annotated[
        Path | None,
        out_option(help="Where to write the evaluation.", show_default="runs/DATASET/SPACE", rich_help_panel="Output"),
    ] = None,
    resume: Annotated[bool, output_option("--resume", help="Go on after the folds that are done.")] = False,
) -> Report:
    """Evaluate by folds: select settings by validation, train anew, test once; write the scores, and print them.

    In each fold the validation graphs select among settings; those selected are trained anew, some times, and each of
    these models sees the test graphs once. Neither selection nor training is given any of these.

    The space "spin" and that of a file are searched by successive halving, the paper's as a plain grid. With --ensemble
    the mean of the probabilities of the best settings is reported beside those of the best one.

    --out gets evaluation.json after each fold, with all that was tried; evaluation.md, the same as a table; and
    evaluation.png, beside what is published on the same folds. While a run writes there, another is refused.

    Keys of --json: dataset, space, metric, mean, std, ensemble_mean, ensemble_std, scores, ensemble_scores, folds,
    runs, settings, duplicates, unscored, seconds, cpu_seconds, evaluation, table, picture. In unscored each run of each
    fold has the number of test graphs whose scores count as 0, since training diverged or they are not finite.
    """
    source = datasets.find(dataset, data.root)
    if folds is not None and splits is not None:
        raise ValueError(f"--folds {folds}: the folds are those of --splits {splits}; leave one of them out")
    out = Path("runs") / source.title / Path(options.space).stem if out is None else out
    written = {"evaluation": out / "evaluation.json", "table": out / "evaluation.md", "picture": out / "evaluation.png"}
    check_output(written["evaluation"], partial(files.has_format, format=EVALUATION_FORMAT), source, splits)
    check_output(written["table"], is_evaluation_table, source, splits)
    check_output(written["picture"], is_picture, source, splits)
    context.with_resource(files.locked(out))
    before = None
    if written["evaluation"].exists():
        if not resume:
            raise ValueError(f"--out {out} has an evaluation; add --resume to go on, or choose another folder")
        before = Evaluation.load(written["evaluation"])
    candidates, budgets = options.candidates(source, seed)
    metric_name, metric = metric_of(source, data.label, metric_choice)
    source, read = data.read(source)
    graphs = read.graphs
    y, _ = labels_of(source, graphs.y, metric_choice)
    metric_name = of_class(metric_name, read.classes, y)
    parts = _folds(source, y, splits, folds, seed)
    tell(source, read, data.node_features)
    about = {
        "dataset": source.title,
        "space": options.name,
        "metric": metric_name,
        "node_features": read.features,
        "edges": data.edge_options,
        "duplicates": _duplicates(graphs, parts),
        "spin_fast": __version__,
        "commit": _commit(),
        **({} if data.label is None else {"label": data.label}),
        **({"own_folds": True} if source.is_own or folds is not None or splits is not None else {}),
    }
    num_runs = runs if runs is not None else RUNS if len(parts) > 1 else RUNS_OF_ONE_SPLIT
    per_fold = spaces.search_epochs(candidates, budgets)
    per_fold += num_runs * max(options.ensemble, 1) * max(map(spaces.epochs_of, candidates))
    done = 0 if before is None else len(before.folds)
    with (
        progress_bar(source.title, len(parts) * per_fold, True, done=done * per_fold) as advance,
        ended_by_sigterm(),
    ):

        def on_trial(fold: int, trial: Trial) -> None:
            at = "" if trial.trained is None else f", validation {show_score(metric_name, trial.trained.validation)}"
            advance(f"fold {fold + 1} of {len(parts)}{at}", spaces.epochs_of(trial.settings, trial.budget))

        found = evaluate_folds(
            graphs,
            parts,
            candidates,
            metric=metric,
            num_runs=num_runs,
            ensemble=options.ensemble,
            budgets=budgets,
            seed=seed,
            n_jobs=options.num_jobs,
            about=json.loads(json.dumps(about)),
            resume_from=before,
            on_fold=lambda evaluation: evaluation.save(written["evaluation"]),
            on_trial=on_trial,
        )
    return _report(found, written)


def _folds(
    source: datasets.Source, y: Tensor, splits: Path | None, folds: int | None, seed: int
) -> list[datasets.Split]:
    if folds is None and splits is None and source.has_official_split:
        return [source.split(y)]
    if folds is None:
        try:
            return source.published_splits(len(y), splits=splits)
        except datasets.NoPublishedSplits:
            if splits is not None:
                raise
    return datasets.stratified_folds(y, FOLDS if folds is None else folds, seed=seed)


def _duplicates(graphs: GraphBatch, parts: Sequence[datasets.Split]) -> list[int]:
    """How many test graphs of each fold look like a training graph to a SPIN of three hops."""
    first = PowerFeatures.from_graphs(graphs, 3).identical_graphs(joint=True)
    return [int(torch.isin(first[split.test], first[split.train]).sum()) for split in parts]


def _commit() -> str | None:
    """The commit that was installed, where pip knows it: from a repository."""
    origin = json.loads(distribution("spin_fast").read_text("direct_url.json") or "{}")
    return origin.get("vcs_info", {}).get("commit_id")


def _report(found: Evaluation, written: dict[str, Path]) -> Report:
    from ..plots import evaluation_picture

    about, metric_name = found.about, found.about["metric"]
    results = {about["space"]: found.mean_and_std(), "ensemble": found.mean_and_std(ensemble=True)}
    facts = {
        "dataset": about["dataset"],
        "space": about["space"],
        "metric": metric_name,
        "mean": results[about["space"]][0],
        "std": results[about["space"]][1],
        "ensemble_mean": results["ensemble"][0],
        "ensemble_std": results["ensemble"][1],
        "scores": found.scores(),
        "ensemble_scores": found.scores(ensemble=True),
        "folds": about["folds"],
        "runs": about["runs"],
        "settings": len(found.candidates),
        "duplicates": about["duplicates"],
        "unscored": [fold.unscored for fold in found.folds],
        "seconds": sum(fold.seconds for fold in found.folds),
        "cpu_seconds": sum(fold.cpu_seconds for fold in found.folds),
    }
    title = f"{about['space']} on {about['dataset']}"
    evaluation_picture(written["picture"], found, title=title, published=_published(about))
    rows = _rows(found)
    summary = _summary(found)
    with files.replacing(written["table"]) as temporary:
        temporary.write_text(_markdown(title, rows, summary), encoding="utf-8")
    table = Table(*rows[0], title=escape(title))
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    lines = [escape(f"{name}: {value}") for name, value in (summary | written).items()]
    return Report(facts | written, [table, *lines])


def _published(about: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What is published on the same folds."""
    return {} if about.get("own_folds") else published.results(about["dataset"], about["metric"])


def _rows(found: Evaluation) -> list[list[str]]:
    """The folds: a heading, and a row for each."""
    show = partial(show_score, found.about["metric"])
    with_ensemble = found.about["ensemble"] > 0
    heading = ["fold", "settings", "validation", "test", *(["ensemble"] if with_ensemble else []), "epochs", "time"]
    rows = [heading]
    settings = differing(found.candidates)
    for fold in found.folds:
        chosen = ", ".join(f"{name} {value}" for name, value in settings[fold.settings].items())
        ensemble = [" ".join(map(show, fold.ensemble))] if with_ensemble else []
        rows.append(
            [
                str(fold.number),
                chosen or "the only ones",
                show(fold.validation),
                " ".join(map(show, fold.test)),
                *ensemble,
                " ".join(map(str, fold.epochs)),
                f"{fold.seconds:.0f} s",
            ]
        )
    return rows


def _summary(found: Evaluation) -> dict[str, str]:
    about, folds = found.about, found.folds
    metric_name = about["metric"]

    def of(ensemble: bool) -> str:
        mean, std = found.mean_and_std(ensemble)
        return f"{show_score(metric_name, mean)} ± {show_score(metric_name, std)}"

    over = f"{len(folds)} folds" if about["folds"] > 1 else f"{about['runs']} runs"
    lines = {f"test {metric_name}": f"{of(False)} over {over}"}
    if about["ensemble"]:
        lines[f"of the best {about['ensemble']} together"] = of(True)
    for fold in folds:
        for run, number in enumerate(fold.unscored, 1):
            if number:
                lines[f"fold {fold.number}, run {run}"] = f"{number:,} test graphs without a finite score count as 0"
    for name, (mean, std) in _published(about).items():
        lines[f"published, {name}"] = f"{mean:.1f} ± {std:.1f}"
    seconds, cpu_seconds = (sum(times) for times in zip(*((of.seconds, of.cpu_seconds) for of in folds), strict=True))
    return lines | {
        "selected": f"by validation, in each fold among {len(found.candidates)}; then {about['runs']} final models",
        "time": f"{seconds:,.0f} s, of one CPU thread {cpu_seconds:,.0f} s",
        "duplicates": f"{sum(about['duplicates']):,} test graphs look like a training graph to a SPIN of three hops",
        "splits": f"{about['splits_sha256']} (hash), seed {about['seed']}",
        "spin_fast": about["spin_fast"] + (f", commit {about['commit']}" if about["commit"] else ""),
    }


def _markdown(title: str, rows: list[list[str]], summary: dict[str, str]) -> str:
    lines = [f"# Evaluation: {title}", "", *(f"- {name}: {value}" for name, value in summary.items()), ""]
    heading, *folds = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join([*lines, heading, "|---" * len(rows[0]) + "|", *folds, ""])
