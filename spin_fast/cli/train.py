"""``spin-fast train``."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from .. import _files, datasets, sum_readout, training
from .._run import START_ANEW, OtherRunError
from ..features import PowerFeatures
from ..graphs import GraphBatch
from ..logs import CsvLog, TensorBoardLog
from ..nn import SPIN
from ..preprocessing import NodeFeatures
from ._common import (
    DATASET,
    DEFAULT_HOPS,
    HOPS,
    Debug,
    Degree,
    Device,
    Download,
    Fold,
    Json,
    Label,
    MergeRepeated,
    Metric,
    OwnFeatures,
    Readout,
    Report,
    Root,
    SelfLoops,
    Splits,
    Undirected,
    app,
    arcs_of,
    console,
    data_option,
    device_of,
    directions_of,
    document_of,
    hint_on_edges,
    hint_on_features,
    kernels_on,
    metric_of,
    num_outputs_of,
    one_line_errors,
    operator_of,
    operator_option,
    ratios_of,
    read_dataset,
    reports,
    show_score,
    tell,
    title_of,
    wait_for,
)

Schedule = Enum("Schedule", {name: name for name in training.SCHEDULES}, type=str)  # type: ignore[misc]


class ClassWeight(str, Enum):
    none = "none"
    balanced = "balanced"


_model, _training, _output = (partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Training", "Output"))


@app.command(epilog="Example: spin-fast train NCI1 --root data --readout attention --epochs 50")
@one_line_errors
@reports
def train(
    dataset: Annotated[str, DATASET] = "digits",
    root: Root = None,
    download: Download = False,
    splits: Splits = None,
    fold: Fold = None,
    features_file: Annotated[
        Path | None,
        data_option("--features", help="What spin-fast precompute has written, instead of computing it anew."),
    ] = None,
    own_features: OwnFeatures = None,
    label: Label = None,
    undirected: Undirected = False,
    coalesce: MergeRepeated = None,
    self_loops: SelfLoops = None,
    degree: Annotated[
        Degree | None,
        data_option(help="Features made of the degree, beside the others, or in the place of the plain degree."),
    ] = None,
    standardize: Annotated[
        bool | None,
        data_option(
            "--standardize/--no-standardize",
            help="Shift and scale features to mean 0 and deviation 1 on the training graphs.",
            show_default="where there are other than whole numbers",
        ),
    ] = None,
    deduplicate: Annotated[bool, data_option(help="Compute what is equal once, to the same result.")] = True,
    readout: Annotated[Readout, _model(help="How a graph's nodes are summed.")] = Readout.sum,
    operators: Annotated[list[str] | None, operator_option("sym, or that of --features", "Model")] = None,
    hops: Annotated[
        int | None,
        _model(min=0, help=HOPS, show_default=f"{DEFAULT_HOPS}, or as --features"),
    ] = None,
    hidden: Annotated[int, _model(min=1, help="Width of a branch.")] = 32,
    layers: Annotated[int, _model(min=1, help="Linear layers of a branch.")] = 3,
    batch_norm: Annotated[bool, _model(help="BatchNorm in the branches; its steps are slower.")] = False,
    calibrate: Annotated[bool, _model(help="Scale the new weights by the training graphs.")] = True,
    dropout: Annotated[float, _model(min=0, max=0.99, help="Dropout in the branches.")] = 0.0,
    epochs: Annotated[int, _training(min=1, help="At most so many.")] = 100,
    batch_size: Annotated[int, _training(min=1, help="Graphs per step.")] = 32,
    learning_rate: Annotated[float, _training(min=0, help="Of Adam, at the start.")] = 5e-3,
    schedule: Annotated[
        Schedule,
        _training(
            help="Of the learning rate: a cosine to 0 over --epochs, after a rise in their first tenth or not; halved "
            "every 50 epochs (step), or when the validation loss has not fallen for 10 (plateau)."
        ),
    ] = Schedule["cosine"],
    weight_decay: Annotated[float, _training(min=0, help="L2 penalty of Adam.")] = 0.0,
    class_weight: Annotated[
        ClassWeight, _training(help="balanced: a rare class counts as much as a frequent one.")
    ] = ClassWeight.none,
    metric_choice: Annotated[
        Metric | None,
        _training(
            "--metric",
            help="What chooses the epoch and is reported: accuracy, or the area under the ROC curve of two classes, of "
            "tasks their mean.",
            show_default="accuracy; rocauc of tasks; OGB's own of its sets",
        ),
    ] = None,
    patience: Annotated[int, _training(min=1, help="Stop after so many epochs without a better validation.")] = 60,
    seed: Annotated[int, _training(min=0, help="Of the split, the weights and the order of the graphs.")] = 0,
    device: Annotated[
        Device, _training(help="Where to train; auto takes the GPU if torch has one and its kernels are installed.")
    ] = Device.auto,
    threads: Annotated[int, _training(min=1, help="CPU threads; small batches gain little from more than 1.")] = 1,
    out: Annotated[
        Path | None,
        _output(help="Where to write; what another run has left there is replaced.", show_default="runs/DATASET"),
    ] = None,
    resume: Annotated[
        bool, _output("--resume", help="Go on where the same command was interrupted, to the same numbers.")
    ] = False,
    tensorboard: Annotated[
        bool, _output("--tensorboard", help="Write event files, too: tensorboard --logdir runs shows them.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> Report:
    """Train a SPIN on DATASET; write the model, a log, a training curve and the result, and print it.

    Datasets with an official split use it; with --fold or --splits it is one of the published folds; the others are
    split 80/10/10 by the seed, stratified.

    Ctrl-C, or SIGTERM, ends training early: the best model so far is written, and --resume goes on.

    Another run to the same --out replaces the files of the one before, from the end of its first epoch on; result.json,
    the document of --json, is there when a run has ended.

    Keys of --json: dataset, readout, operator, hops, seed, fold, metric, test, validation, graphs, test_seen, epochs,
    best_epoch, interrupted, seconds_per_epoch, graphs_per_second, precomputation_seconds, deduplication, parameters,
    kernels, model, training_curve, log, result.
    """
    torch.set_num_threads(threads)
    operator = operator_of(operators)
    place = device_of(device)
    name = title_of(dataset)
    out = Path("runs") / name if out is None else out
    outputs = _Outputs(out)
    metric_name, metric = metric_of(dataset, label, metric_choice)
    if features_file is not None and (degree is not None or standardize):
        option = "--standardize" if degree is None else f"--degree {degree.value}"
        raise ValueError(f"{option}: --features {features_file} has the hops already, and it comes before them")
    board = TensorBoardLog(out, metric_name) if tensorboard else None
    logs = [log for log in (CsvLog(outputs.log), board) if log is not None]
    goes_on = resume and outputs.state.exists()
    if resume and not goes_on:
        console.print(f"nothing to go on from in {escape(str(out))}: starting", highlight=False)
    if not goes_on and outputs.result.exists():
        earlier = _score_in(outputs.result)
        console.print(f"{escape(str(out))} has a result{earlier}: this run replaces it", highlight=False)
    made = None if features_file is None else PowerFeatures.load(features_file)
    arcs = arcs_of(undirected, coalesce, self_loops)
    read = read_dataset(dataset, root, download=download, features=own_features, label=label, arcs=arcs)
    graphs = read.graphs
    if graphs.y is None:
        of_folder = "; --label names the column that has them" if datasets.own_folder(dataset, root) is not None else ""
        raise ValueError(f"{dataset} has no labels to train by{of_folder}")
    split = datasets.split(dataset, graphs.y, root, seed=seed, splits=splits, fold=fold)
    tell(name, read, hint_on_edges(dataset, root, graphs), hint_on_features(read, own_features))
    num_outputs = num_outputs_of(graphs.y)
    if metric_choice is Metric.rocauc and num_outputs != 2 and not graphs.y.is_floating_point():
        raise ValueError(f"--metric rocauc is of two classes, and {dataset} has {num_outputs}")
    settings: dict[str, Any] = {"seed": seed, "fold": fold, "node_features": read.features, "classes": read.classes}
    settings["tasks"] = num_outputs if graphs.y.is_floating_point() else None
    settings["task_names"] = read.tasks
    settings |= {"weighted": bool(read.weighted), "arcs": arcs, "directed": directions_of(graphs).one_way}
    node_features = None
    if made is None:
        node_features = NodeFeatures(
            None if degree is None else degree.value, standardize="auto" if standardize is None else standardize
        )
        graphs = node_features.fit(graphs, split.train).transform(graphs)
        if degree is not None or node_features.columns_:
            number, standardized = graphs.num_features, len(node_features.columns_)
            console.print(
                f"node features: {number}, {standardized} standardised on the training graphs", highlight=False
            )
        hops = DEFAULT_HOPS if hops is None else hops
        with console.status(f"computing {hops} hops"):
            graphs = graphs.to(place)
            start = time.perf_counter()
            features = PowerFeatures.from_graphs(graphs, hops, operator or "sym", deduplicate, node_rows=dropout > 0)
            wait_for(place)
            seconds: float | Path | None = time.perf_counter() - start
    else:
        _check_features(f"--features {features_file}", made, name, graphs, hops, operator, deduplicate, dropout)
        features, seconds = made.to(place), features_file
        if standardize is None and NodeFeatures().fit(graphs, split.train).columns_:
            console.print("node features: not standardised, which train without --features does", highlight=False)
    torch.manual_seed(seed)
    model = SPIN(
        graphs.num_features,
        hidden,
        num_outputs,
        features.num_hops,
        num_operators=features.num_operators,
        attention=readout is Readout.attention,
        num_layers=layers,
        batch_norm=batch_norm,
        dropout=dropout,
    ).to(place)
    model.node_features = node_features
    if calibrate:
        model.calibrate(features[split.train])

    def on_epoch(epoch: training.Epoch) -> None:
        outputs.result.unlink(missing_ok=True)  # until this run has ended, what is there is not all of one
        for log in logs:
            log(epoch)

    with board or nullcontext(), _termination_as_interruption() as signals, _errors_in_options(out, name, fold):
        fit = training.fit(
            model,
            features,
            split.train,
            split.validation,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            schedule=schedule.value,
            weight_decay=weight_decay,
            class_weight=None if class_weight is ClassWeight.none else class_weight.value,
            patience=patience,
            seed=seed,
            metric=metric,
            state=outputs.state,
            resume=resume,
            on_epoch=on_epoch,
            progress=True,
        )
    target = features[split.test].y
    assert target is not None
    test = metric(training.predict(model, features, split.test), target)
    report = _write_and_report(outputs, name, features, model, fit, split, metric_name, test, seconds, settings)
    if fit.interrupted:
        on = f"interrupted after epoch {len(fit.epochs)}: the same command with --resume goes on from there"
        report.shown.append(on)
        report.exit_code = 128 + (signals[0] if signals else signal.SIGINT)
    return report


@contextmanager
def _termination_as_interruption() -> Iterator[list[int]]:
    """What clusters send before they kill ends training as Ctrl-C does; the signals that came."""
    signals: list[int] = []

    def interrupt(number: int, _: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_features(
    source: str,
    features: PowerFeatures,
    dataset: str,
    graphs: GraphBatch,
    hops: int | None,
    operator: str | None,
    deduplicate: bool,
    dropout: float,
) -> None:
    """Check that features are of just these graphs and settings.

    Raises:
        ValueError: says what differs.
    """
    of_graphs, of_file = (f"{of.num_graphs} graphs with {of.num_features} feature(s)" for of in (graphs, features))
    if of_graphs != of_file:
        raise ValueError(f"{source} is not of {dataset}: it has {of_file}, {dataset} {of_graphs}")
    if not torch.equal(features.node_ptr, graphs.ptr) or not _equal(features.labels, graphs.y):
        raise ValueError(f"{source} is not of {dataset}: its graphs have other sizes or labels")
    if not _equal_sums(features, graphs):
        options = "--node-features, or, of degrees, --undirected, --coalesce and --self-loops"
        raise ValueError(f"{source} is not of {dataset}: its graphs have other node features; see {options}")
    if not _equal_hops(features, graphs):
        options = "--undirected, --coalesce and --self-loops"
        raise ValueError(f"{source} is not of {dataset}: its graphs have other edges; give {options} as to precompute")
    if hops is not None and hops != features.num_hops:
        raise ValueError(f"--hops {hops}: {source} has {features.num_hops}")
    if operator is not None and operator != features.operator:
        raise ValueError(f"--operator {operator}: {source} has {features.operator}")
    if dropout > 0 and features.index is not None and features.row_of_node is None:
        raise ValueError(f"--dropout {dropout:g}: {source} must be made by spin-fast precompute --node-rows")
    if not deduplicate and features.index is not None:
        raise ValueError(f"--no-deduplicate: {source} must be made by spin-fast precompute --no-deduplicate")


def _equal_sums(features: PowerFeatures, graphs: GraphBatch) -> bool:
    """Whether what no hop has changed yet adds up to the same in each graph."""
    return _close(_sums(features, 0), sum_readout(graphs.x.double(), graphs.ptr), 1e-6)


def _equal_hops(features: PowerFeatures, graphs: GraphBatch) -> bool:
    """Whether the first hop of each operator adds up to the same in each graph."""
    if features.num_hops == 0:
        return True
    wanted = PowerFeatures.from_graphs(graphs, 1, features.operator, node_rows=False)
    firsts = range(1, features.num_branches, features.num_hops)
    return all(_close(_sums(features, first), _sums(wanted, number), 1e-5) for number, first in enumerate(firsts, 1))


def _sums(features: PowerFeatures, branch: int) -> Tensor:
    """``[G, d]``: rows of a branch, added up by graph."""
    ptr = features.ptr[branch * len(features) : (branch + 1) * len(features) + 1]
    first, last = features.row_ptr[branch : branch + 2].tolist()
    entries = slice(int(ptr[0]), int(ptr[-1]))
    index = None if features.index is None else features.index[entries] - first
    count = None if features.count is None else features.count[entries]
    return sum_readout(features.rows[first:last].double(), ptr - ptr[0], index=index, count=count)


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool(((found - wanted).abs() <= tolerance * wanted.abs().amax(0)).all())


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether labels are equal, with a NaN like any other."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(2), other.nan_to_num(2))


class _Outputs:
    """What a run writes; checked before any work, so that an unwritable place does not cost a training."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {folder} cannot be made: {error.strerror}") from error
        self.model, self.state = folder / "model.safetensors", folder / "state.safetensors"
        self.curve, self.log, self.result = folder / "training-curve.png", folder / "log.csv", folder / "result.json"
        for file in vars(self).values():
            _files.check_writable(file)


def _score_in(result: Path) -> str:
    try:
        facts = json.loads(result.read_bytes())
        return f", test {facts['metric']} {show_score(facts['metric'], facts['test'])}"
    except (OSError, ValueError, KeyError, TypeError):  # NaN, among others
        return ""


_OPTIONS = {
    "seed": "--seed",
    "batch_size": "--batch-size",
    "learning_rate": "--learning-rate",
    "schedule": "--schedule",
    "weight_decay": "--weight-decay",
    "class_weight": "--class-weight",
    "features: hops": "--hops",
    "features: operator": "--operator",
    "model.hidden_features": "--hidden",
    "model.num_layers": "--layers",
    "model.attention": "--readout",
    "model.batch_norm": "--batch-norm",
    "model.dropout": "--dropout",
}  # of what a run that goes on must have as before


@contextmanager
def _errors_in_options(out: Path, dataset: str, fold: int | None) -> Iterator[None]:
    """Say what keeps a run from going on in the words of the command line."""
    try:
        yield
    except ValueError as error:
        if START_ANEW not in (reason := str(error)):
            raise
        if isinstance(error, OtherRunError):
            reason = _in_options(error, f"the run in {out}", dataset, fold)
            reason += f"; the same command goes on, {START_ANEW}"
        subject, must, rest = reason.partition(" must ")
        if subject in ("epochs", "patience", "epochs and schedule"):
            reason = re.sub(r"(epochs|patience|schedule)", r"--\1", subject) + must + rest
        raise ValueError(reason.replace(START_ANEW, "without --resume training starts anew")) from error


def _in_options(error: OtherRunError, run: str, dataset: str, fold: int | None) -> str:
    if error.name in ("train", "validation"):
        return f"{'without --fold' if fold is None else f'--fold {fold}'}: {run} has another split (see --splits, too)"
    if error.name == "metric":
        return f"{dataset}: {run} has another metric (see --metric)"
    if error.name in ("features: graphs", "features: sizes", "features: labels"):
        return f"{dataset}: {run} is of other graphs or labels"
    if error.name in ("features: features", "features: rows"):
        options = "--node-features, --degree, --standardize, --features, --undirected, --coalesce, --self-loops"
        return f"{dataset}: {run} is of other node features or edges (see {options})"
    here, there = (_typed(_OPTIONS.get(error.name, error.name), value) for value in (error.here, error.there))
    return f"{here}: {run} has {there}"


def _typed(option: str, value: Any) -> str:
    """An option as it is given."""
    if option == "--batch-norm":
        return option if value else "--no-batch-norm"
    if option == "--readout":
        value = "attention" if value else "sum"
    return f"{option} {'none' if value is None else value}"


def _write_and_report(
    outputs: _Outputs,
    dataset: str,
    features: PowerFeatures,
    model: SPIN,
    fit: training.Fit,
    split: datasets.Split,
    metric_name: str,
    test: float,
    precomputation: float | Path | None,
    settings: dict[str, Any],
) -> Report:
    from ..plots import training_curve

    kind = "SPIN-att" if model.config["attention"] else "SPIN-sum"
    training.save_checkpoint(outputs.model, model, dataset=dataset, metric=metric_name, test=test, **settings)
    training_curve(outputs.curve, fit, title=f"{kind} on {dataset}", metric=metric_name, test=test)
    seconds = fit.seconds_per_epoch
    first = features.identical_graphs().cpu()
    known = int(torch.isin(first[split.test], first[split.train]).sum())
    facts = {
        "dataset": dataset,
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
        "kernels": kernels_on(features.rows.device),
        "model": outputs.model,
        "training_curve": outputs.curve,
        "log": outputs.log,
        "result": outputs.result,
    }
    chosen = [f"{features.operator} over {features.num_hops} hops", f"seed {settings['seed']}"]
    chosen += [] if settings["fold"] is None else [f"fold {settings['fold']}"]
    made = f"read from {escape(str(precomputation))}"
    if isinstance(precomputation, float):
        made = f"{1000 * precomputation:.1f} ms, once, deduplication included"
    rows = {
        f"test {metric_name}": f"[bold]{show_score(metric_name, test)}[/bold]  ({len(split.test)} graphs)",
        f"validation {metric_name}": f"{show_score(metric_name, fit.validation)}  ({len(split.validation)} graphs)",
        "duplicates": f"{known} of the test graphs (no SPIN can tell them from a training graph)",
        "settings": escape(", ".join(chosen)),
        "epochs": f"{len(fit.epochs)}{' (interrupted)' if fit.interrupted else ''}, kept epoch {fit.best_epoch + 1}",
        "time per epoch": f"{1000 * seconds:.1f} ms (median)",
        "graphs per second": f"{facts['graphs_per_second']:,.0f} in training",
        "precomputation": made,
        "nodes per stored row": f"{ratios_of(features)}  (by branch)",
        "parameters": f"{facts['parameters']:,}",
        "kernels": facts["kernels"],
        "model": escape(str(outputs.model)),
        "training curve": escape(str(outputs.curve)),
        "log": escape(str(outputs.log)),
        "result": escape(str(outputs.result)),
    }
    table = Table(show_header=False, title=f"{kind} on {escape(dataset)}")
    for name, value in rows.items():
        table.add_row(name, value)
    report = Report(facts, [table])
    with _files.replacing(outputs.result) as temporary:  # last: it says that all others are there
        temporary.write_text(document_of(report) + "\n")
    return report
