"""The files that ``spin-fast train`` writes, and its report."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from .. import datasets, training
from .._common import files
from ..features.shards import ShardedFeatures
from ..nn import SPIN
from ..training.checkpoints import CHECKPOINT_FORMAT
from ..training.resume import STATE_FORMAT
from ._app import Report, by_branch, document_of, kernels_on
from ._metric import show_score
from ._outputs import check_output, is_log, is_picture, is_result, is_trials


class Outputs:
    """The files of a run."""

    def __init__(self, folder: Path) -> None:
        self.model, self.state = folder / "model.safetensors", folder / "state.safetensors"
        self.curve, self.log, self.result = folder / "training-curve.png", folder / "log.csv", folder / "result.json"
        self.trials = folder / "trials.csv"

    def check(self, source: datasets.Source, *inputs: Path | None, resume: bool) -> None:
        """Check that each can be written, before any work; ``inputs`` are read, and to ``resume`` the state."""
        for file, is_own in (
            (self.model, partial(files.has_format, format=CHECKPOINT_FORMAT)),
            (self.state, lambda path: resume or files.has_format(path, format=STATE_FORMAT)),
            (self.curve, is_picture),
            (self.log, is_log),
            (self.result, is_result),
            (self.trials, is_trials),
        ):
            check_output(file, is_own, source, *inputs)


def score_in(result: Path) -> str:
    try:
        facts = json.loads(result.read_bytes())
        return f", test {facts['metric']} {show_score(facts['metric'], facts['test'])}"
    except (OSError, ValueError, KeyError, TypeError):  # NaN, among others
        return ""


def write_and_report(
    outputs: Outputs,
    dataset: str,
    features: ShardedFeatures,
    model: SPIN,
    fit: training.Fit,
    patience: int,
    split: datasets.Split,
    metric_name: str,
    test: float,
    precomputation: float | Path | None,
    settings: dict[str, Any],
) -> Report:
    from ..plots import training_curve

    kind = "SPIN-att" if model.config["attention"] else "SPIN-sum"
    kind += {"hops": "", "joint": " of joint rows", "both": " of hops and joint rows"}[model.config["branches"]]
    score = None if math.isnan(test) else test
    training.save_checkpoint(outputs.model, model, dataset=dataset, metric=metric_name, test=score, **settings)
    training_curve(outputs.curve, fit, title=f"{kind} on {dataset}", metric=metric_name, test=test)
    seconds = fit.seconds_per_epoch
    first = features.identical_graphs(joint=model.joint is not None).cpu()
    known = int(torch.isin(first[split.test], first[split.train]).sum())
    facts = {
        "dataset": dataset,
        "branches": model.config["branches"],
        "readout": "attention" if model.config["attention"] else "sum",
        "operator": features.operator,
        "hops": features.num_hops,
        "seed": settings["seed"],
        "fold": settings["fold"],
        "metric": metric_name,
        "test": test,
        "validation": fit.validation,
        "graphs": {part: len(ids) for part, ids in split._asdict().items()},
        "test_seen": known,
        "epochs": len(fit.epochs),
        "best_epoch": fit.best_epoch + 1,
        "interrupted": fit.interrupted,
        "seconds_per_epoch": seconds,
        "graphs_per_second": len(split.train) / seconds,
        "precomputation_seconds": precomputation if isinstance(precomputation, float) else None,
        "deduplication": features.deduplication,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "kernels": kernels_on(features.device),
        "ranks": settings["ranks"],
    }
    written = {"model": outputs.model, "training_curve": outputs.curve, "log": outputs.log, "result": outputs.result}
    chosen = f"{features.operator} over {features.num_hops} hops, seed {settings['seed']}"
    chosen += "" if settings["fold"] is None else f", fold {settings['fold']}"
    chosen += "" if settings["ranks"] == 1 else f", {settings['ranks']} ranks"
    made = f"read from {escape(str(precomputation))}"
    if isinstance(precomputation, float):
        made = f"{1000 * precomputation:.1f} ms, once, deduplication included"
    ended = ""
    if fit.interrupted:
        ended = " (interrupted)"
    elif len(fit.epochs) - fit.best_epoch - 1 >= patience:
        ended = f" (none better in the last {patience}, --patience)"
    rows = {
        f"test {metric_name}": f"[bold]{show_score(metric_name, test)}[/bold]  ({len(split.test)} graphs)",
        f"validation {metric_name}": f"{show_score(metric_name, fit.validation)}  ({len(split.validation)} graphs)",
        "duplicates": f"{known} of the test graphs (no SPIN can tell them from a training graph)",
        "branches": model.config["branches"],
        "settings": chosen,
        "epochs": f"{len(fit.epochs)}, kept epoch {fit.best_epoch + 1}{ended}",
        "time per epoch": f"{seconds:.1f} s (median)" if seconds >= 10 else f"{1000 * seconds:.1f} ms (median)",
        "graphs per second": f"{facts['graphs_per_second']:,.0f} in training",
        "precomputation": made,
        "nodes per stored row": f"{by_branch(features.deduplication)}  (by branch)",
        "parameters": f"{facts['parameters']:,}",
        "kernels": facts["kernels"],
    }
    rows |= {name.replace("_", " "): escape(str(path)) for name, path in written.items()}
    table = Table(show_header=False, title=f"{kind} on {escape(dataset)}")
    for name, value in rows.items():
        table.add_row(name, value)
    report = Report(facts | written, [table])
    with files.replacing(outputs.result) as temporary:  # last: it says that all others are there
        temporary.write_text(document_of(report) + "\n")
    return report
