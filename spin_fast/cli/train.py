"""``spin-fast train``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor

from .. import datasets, training
from .._common import check, files
from .._common.rows import values_of
from ..features import shards
from ..features.power_features import PowerFeatures
from ..features.shards import ShardedFeatures, sharded
from ..graphs.batch import GraphBatch
from ..selection import Recipe
from ..training.logs import CsvLog, TensorBoardLog
from ._app import Report, command, console
from ._errors import ended_by_sigterm
from ._features_file import check_fitted, check_graphs, check_settings
from ._graphs import Description
from ._metric import METRIC, METRIC_DEFAULT, MetricName, labels_of, metric_of, of_class, tested
from ._options import (
    DATASET,
    DEFAULT_HOPS,
    DataOptions,
    Device,
    Fold,
    Splits,
    device_of,
    operator_of,
    out_option,
    output_option,
)
from ._ranks import launch
from ._search import SearchOptions, search_option
from ._train_options import FeatureOptions, FitOptions, ModelOptions, training_option
from ._train_outputs import Outputs, score_in, write_and_report
from ._train_search import check_options, train_by_search


@command("spin-fast train NCI1 --root data --readout attention --epochs 50", takes_ranks=True)
def train(
    context: typer.Context,
    data: DataOptions,
    features: FeatureOptions,
    model_options: ModelOptions,
    fit_options: FitOptions,
    search_options: SearchOptions,
    dataset: Annotated[str, DATASET] = "digits",
    splits: Splits = None,
    fold: Fold = None,
    metric_choice: Annotated[
        MetricName | None,
        training_option(
            "--metric", help=f"What chooses the epoch and is reported: {METRIC}", show_default=METRIC_DEFAULT
        ),
    ] = None,
    device: Annotated[
        Device,
        training_option(help="Where to train; auto takes the GPU if torch has one and its kernels are installed."),
    ] = "auto",
    search: Annotated[
        bool, search_option("--search", help="Train with many settings, and take those that are best by validation.")
    ] = False,
    out: Annotated[
        Path | None,
        out_option(
            help="Where to write; what another run has left there is replaced.",
            show_default="runs/DATASET",
            rich_help_panel="Output",
        ),
    ] = None,
    resume: Annotated[
        bool, output_option("--resume", help="Go on where the same command was interrupted, to the same numbers.")
    ] = False,
    tensorboard: Annotated[
        bool, output_option("--tensorboard", help="Write event files, too: tensorboard --logdir runs shows them.")
    ] = False,
) -> Report:
    """Train a SPIN on DATASET; write the model, a log, a training curve and the result, and print it.

    Datasets with an official split use it; with --fold or --splits it is one of the published folds, or your own
    split; the others are split 80/10/10 by the seed, stratified.

    With --search all settings are chosen by the validation graphs, in several processes; the result says which, and
    trials.csv what was tried. --ensemble 5 takes the five best together, in one model file like any other.

    Ctrl-C, or SIGTERM, ends training early: the best model so far is written, and --resume goes on. A search
    cannot go on; it writes the best of the models that are trained by then.

    torchrun --nproc-per-node 2 -m spin_fast.cli train ... trains by two processes, on one machine or several.

    Another run to the same --out replaces the files of the one before, from the end of its first epoch on; result.json,
    the document of --json, is there when a run has ended. While a run writes to --out, another is refused.

    Keys of --json: dataset, branches, readout, operator, hops, seed, fold, metric, test, validation, graphs, test_seen,
    epochs, best_epoch, interrupted, seconds_per_epoch, graphs_per_second, precomputation_seconds, deduplication,
    parameters, kernels, ranks, model, training_curve, log, result. With --search: dataset, space, settings, seed, fold,
    metric, test, validation, graphs, chosen, interrupted, seconds, kernels, model, trials, result.
    """
    of_one_model = {field.name for group in (FeatureOptions, ModelOptions, FitOptions) for field in fields(group)}
    check_options(context, search, {field.name for field in fields(SearchOptions)}, of_one_model - {"seed"})
    ranks = launch()
    if search and ranks.number > 1:
        raise ValueError("--search has processes of its own: run it without torchrun")
    place, seed = ranks.own(device_of(device)), fit_options.seed
    source = datasets.find(dataset, data.root)
    out = Path("runs") / source.title if out is None else out
    outputs = Outputs(out)
    if ranks.is_first:
        outputs.check(source, features.precomputed, splits, resume=resume)
        context.with_resource(files.locked(out))
    metric_name, metric = metric_of(source, data.label, metric_choice)
    power = None
    if (stored := features.precomputed) is not None:
        if features.given is not None:
            why = "has the hops already, and it comes before them; give it to spin-fast precompute"
            raise ValueError(f"{features.given}: --features {stored} {why}")
        power = shards.load(stored)
        check_settings(features, power, model_options.needs_node_rows)
    board = TensorBoardLog(out, metric_name) if tensorboard else None
    goes_on = resume and outputs.state.exists()
    if resume and not goes_on:
        console.print(escape(f"nothing to go on from in {out}: starting"))
    if data.download:
        ranks.on_first(source.downloaded)
        source = source.downloaded()
    description = Description(source, data.node_features)
    if power is None:
        source, read = data.read(source)
        description.add(read)
        y = read.graphs.y
    else:
        ranks.on_first(partial(check_graphs, f"--features {stored}", power, source, data, description))
        y = power.y
    y, num_outputs = labels_of(source, y, metric_choice)
    metric_name = of_class(metric_name, description.facts.get("classes"), y)
    split = source.split(y, seed=seed, splits=splits, fold=fold)
    description.tell()
    metadata: dict[str, Any] = {"seed": seed, "fold": fold, "edge_options": data.edge_options, "ranks": ranks.number}
    metadata |= description.facts
    if search:
        return train_by_search(search_options, outputs, source, read, split, metric, metric_name, metadata)
    recipe = Recipe(
        degree=features.degree,
        one_hot=features.one_hot,
        standardize="auto" if features.standardize is None else features.standardize,
        branches=model_options.branches,
        readout=model_options.readout,
        hidden_features=model_options.hidden,
        num_layers=model_options.layers,
        batch_norm=model_options.batch_norm,
        dropout=model_options.dropout,
        calibrate=model_options.calibrate,
    )
    made: float | Path | None = stored
    if power is None:
        graphs = _prepare(read.graphs, split.train, recipe)
        computed, made = _compute(graphs.to(place), features, node_rows=model_options.needs_node_rows is not None)
        power = sharded(computed)
    else:
        check_fitted(features, power.node_features, split.train)
        power = power.to(place)
        if features.standardize is None and power.node_features is None and not _are_whole(power):
            console.print("node features: not standardised, which train without --features does")
    if not goes_on and outputs.result.exists():
        console.print(escape(f"{out} has a result{score_in(outputs.result)}: this run replaces it"))
    torch.manual_seed(check.integer("seed", seed, 0))
    model = recipe.new_model(power, split.train, num_outputs)
    logs: list[Callable[[training.Epoch], object]] = [CsvLog(outputs.log)] if ranks.is_first else []
    logs += [] if board is None else [board]

    def on_epoch(epoch: training.Epoch) -> None:
        for stale in (outputs.result, outputs.trials):  # of the run before
            stale.unlink(missing_ok=True)
        for log in logs:
            log(epoch)

    with (
        board or nullcontext(),
        ranks.process_group(place) as process_group,  # while it connects, a signal ends the process at once
        ended_by_sigterm() as signals,
    ):
        fit = training.fit(
            model,
            power,
            split.train,
            split.validation,
            **fit_options.arguments(),
            metric=metric,
            state=outputs.state,
            resume=resume,
            on_epoch=on_epoch,
            progress=True,
            process_group=process_group,
        )
    exit_code = 128 + (signals[0] if signals else signal.SIGINT) if fit.interrupted else 0
    if not ranks.is_first:
        return Report({}, [], exit_code)
    test = tested(training.predict(model, power, split.test), y[split.test], split.test, metric)
    told = (split, metric_name, test, made, metadata)
    report = write_and_report(outputs, source.title, power, model, fit, fit_options.patience, *told)
    report.exit_code = exit_code
    if fit.interrupted:
        on = f"interrupted after epoch {len(fit.epochs)}: the same command with --resume goes on from there"
        report.shown.append(on)
    return report


def _prepare(graphs: GraphBatch, train: Tensor, recipe: Recipe) -> GraphBatch:
    """Fit the preparation of node features to the training graphs, and apply it to all."""
    made = recipe.node_features().fit(graphs, train)
    graphs, standardized = made.transform(graphs), len(made.columns_)
    if recipe.degree is not None or recipe.one_hot or standardized:
        console.print(f"node features: {graphs.num_features}, {standardized} standardised on the training graphs")
    return graphs


def _are_whole(features: ShardedFeatures) -> bool:
    """Whether all node features are whole numbers."""
    rows = (values_of(shard.rows, int(shard.row_ptr[1])) for shard in features.shards)
    return all(torch.equal(of_shard, of_shard.round()) for of_shard in rows)


def _compute(graphs: GraphBatch, options: FeatureOptions, node_rows: bool) -> tuple[PowerFeatures, float]:
    """Compute power features; also returns the seconds that it took."""
    hops = DEFAULT_HOPS if options.hops is None else options.hops
    operator = operator_of(options.operators) or "sym"
    with console.status(f"computing {hops} hops"):
        start = time.perf_counter()
        power = PowerFeatures.from_graphs(graphs, hops, operator, options.deduplicate, node_rows=node_rows)
        if graphs.x.is_cuda:  # its work goes on when the call has returned
            torch.cuda.synchronize(graphs.x.device)
        return power, time.perf_counter() - start
