"""``spin-fast train``."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor

from .. import datasets, training
from ..datasets.summary import directions_of
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures
from ..nn import SPIN
from ..training.logs import CsvLog, TensorBoardLog
from ._app import Report, app, console, reports
from ._device import Device, device_of, wait_for
from ._errors import one_line_errors, one_line_warnings
from ._features_file import check_features
from ._graphs import hint_on_edges, hint_on_features, read_dataset, tell, warn_of
from ._options import (
    DATASET,
    DEFAULT_HOPS,
    HOPS,
    Debug,
    Download,
    Fold,
    Json,
    Label,
    MergeRepeated,
    OwnFeatures,
    Root,
    SelfLoops,
    Splits,
    Undirected,
    data_option,
    edge_options_of,
    operator_of,
    operator_option,
)
from ._train_outputs import Outputs, score_in, write_and_report

Schedule = Enum("Schedule", {name: name for name in training.SCHEDULES}, type=str)  # type: ignore[misc]


class ClassWeight(str, Enum):
    none = "none"
    balanced = "balanced"


class Readout(str, Enum):
    attention = "attention"
    sum = "sum"


class Metric(str, Enum):
    accuracy = "accuracy"
    rocauc = "rocauc"


class Degree(str, Enum):
    raw = "raw"
    log = "log"
    one_hot = "one-hot"


METRICS = {"rocauc": "ROC-AUC"}  # as people call them
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
    precomputed: Annotated[
        Path | None,
        data_option("--features", help="What spin-fast precompute has written, instead of computing it anew."),
    ] = None,
    columns: OwnFeatures = None,
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

    Datasets with an official split use it; with --fold or --splits it is one of the published folds, or your own
    split; the others are split 80/10/10 by the seed, stratified.

    Ctrl-C, or SIGTERM, ends training early: the best model so far is written, and --resume goes on.

    Another run to the same --out replaces the files of the one before, from the end of its first epoch on; result.json,
    the document of --json, is there when a run has ended.

    Keys of --json: dataset, readout, operator, hops, seed, fold, metric, test, validation, graphs, test_seen, epochs,
    best_epoch, interrupted, seconds_per_epoch, graphs_per_second, precomputation_seconds, deduplication, parameters,
    kernels, model, training_curve, log, result.
    """
    torch.set_num_threads(threads)
    place, operator = device_of(device), operator_of(operators)
    source = datasets.find(dataset, root)
    name = source.title
    out = Path("runs") / name if out is None else out
    outputs = Outputs(out, source, precomputed, splits)
    metric_name, metric = metric_of(source, label, metric_choice)
    _check_preparation(precomputed, degree, standardize)
    board = TensorBoardLog(out, metric_name) if tensorboard else None
    goes_on = resume and outputs.state.exists()
    if resume and not goes_on:
        _say(f"nothing to go on from in {out}: starting")
    power = None if precomputed is None else PowerFeatures.load(precomputed)
    edge_options = edge_options_of(undirected, coalesce, self_loops)
    read = read_dataset(
        source.downloaded() if download else source, features=columns, label=label, edge_options=edge_options
    )
    graphs = read.graphs
    num_outputs = _num_outputs(source, graphs.y, metric_choice)
    assert graphs.y is not None
    split = source.split(graphs.y, seed=seed, splits=splits, fold=fold)
    tell(name, read, hint_on_edges(source, graphs), hint_on_features(read, columns))
    preprocessing: NodeFeatures | None = None
    made: float | Path | None = precomputed
    if power is None:
        preprocessing, graphs = _prepare(graphs, split.train, degree, standardize)
        hops = DEFAULT_HOPS if hops is None else hops
        power, made = _compute(graphs.to(place), hops, operator or "sym", deduplicate, dropout > 0)
    else:
        check_features(f"--features {precomputed}", power, name, graphs, hops, operator, deduplicate, dropout)
        power = power.to(place)
        if standardize is None and NodeFeatures().fit(graphs, split.train).columns_:
            _say("node features: not standardised, which train without --features does")
    if not goes_on and outputs.result.exists():
        _say(f"{out} has a result{score_in(outputs.result)}: this run replaces it")
    torch.manual_seed(seed)
    model = SPIN(
        power.num_features,
        hidden,
        num_outputs,
        power.num_hops,
        num_operators=power.num_operators,
        attention=readout is Readout.attention,
        num_layers=layers,
        batch_norm=batch_norm,
        dropout=dropout,
    ).to(place)
    model.node_features = preprocessing
    if calibrate:
        model.calibrate(power[split.train])
    with board or nullcontext(), one_line_warnings(), _termination_as_interruption() as signals:
        fit = training.fit(
            model,
            power,
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
            on_epoch=_on_epoch(outputs, board),
            progress=True,
        )
    settings: dict[str, Any] = {
        "seed": seed,
        "fold": fold,
        "node_features": read.features,
        "classes": read.classes,
        "task_names": read.tasks,
        "weighted": bool(read.weighted),
        "edge_options": edge_options,
        "directed": directions_of(read.graphs).one_way,
    }
    test = _test(model, power, split.test, metric)
    report = write_and_report(outputs, name, power, model, fit, split, metric_name, test, made, settings)
    if fit.interrupted:
        on = f"interrupted after epoch {len(fit.epochs)}: the same command with --resume goes on from there"
        report.shown.append(on)
        report.exit_code = 128 + (signals[0] if signals else signal.SIGINT)
    return report


def _say(text: str) -> None:
    console.print(escape(text), highlight=False)


def _check_preparation(precomputed: Path | None, degree: Degree | None, standardize: bool | None) -> None:
    """Refuse options that prepare node features if their hops are in a file."""
    if precomputed is not None and (degree is not None or standardize):
        option = "--standardize" if degree is None else f"--degree {degree.value}"
        raise ValueError(f"{option}: --features {precomputed} has the hops already, and it comes before them")


def _num_outputs(source: datasets.Source, y: Tensor | None, metric: Metric | None) -> int:
    """Return the number of classes, or of tasks."""
    if y is None:
        of_folder = "; --label names the column that has them" if source.is_own else ""
        raise ValueError(f"{source.name} has no labels to train by{of_folder}")
    if y.is_floating_point():
        return y.shape[1]
    number = int(y.max()) + 1
    if metric is Metric.rocauc and number != 2:
        raise ValueError(f"--metric rocauc is of two classes, and {source.name} has {number}")
    return number


def _prepare(
    graphs: GraphBatch, train: Tensor, degree: Degree | None, standardize: bool | None
) -> tuple[NodeFeatures, GraphBatch]:
    """Fit the preparation of node features to the training graphs, and apply it to all."""
    preprocessing = NodeFeatures(
        None if degree is None else degree.value, standardize="auto" if standardize is None else standardize
    )
    graphs = preprocessing.fit(graphs, train).transform(graphs)
    if degree is not None or preprocessing.columns_:
        standardized = len(preprocessing.columns_)
        _say(f"node features: {graphs.num_features}, {standardized} standardised on the training graphs")
    return preprocessing, graphs


def _compute(
    graphs: GraphBatch, hops: int, operator: str, deduplicate: bool, node_rows: bool
) -> tuple[PowerFeatures, float]:
    """Compute power features; also returns the seconds that it took."""
    with console.status(f"computing {hops} hops"):
        start = time.perf_counter()
        power = PowerFeatures.from_graphs(graphs, hops, operator, deduplicate, node_rows=node_rows)
        wait_for(graphs.x.device)
        return power, time.perf_counter() - start


def _on_epoch(outputs: Outputs, board: TensorBoardLog | None) -> Callable[[training.Epoch], None]:
    """Return a function that logs an epoch."""
    log = CsvLog(outputs.log)

    def on_epoch(epoch: training.Epoch) -> None:
        outputs.result.unlink(missing_ok=True)  # it belongs to the run before
        log(epoch)
        if board is not None:
            board(epoch)

    return on_epoch


def _test(model: SPIN, power: PowerFeatures, ids: Tensor, metric: training.Metric) -> float:
    """Return the metric of the test graphs; NaN, with a line on stderr, if a score is not finite."""
    target = power[ids].y
    assert target is not None
    scores = training.predict(model, power, ids)
    wrong = ids[training.not_finite(scores).cpu()].tolist()
    warn_of(list(map(str, wrong)), len(ids), "scores that are not finite, so that the test has no result")
    return math.nan if wrong else metric(scores, target)


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


def metric_of(source: datasets.Source, label: tuple[Any] | None, chosen: Metric | None) -> tuple[str, training.Metric]:
    """Name and function of the metric; OGB's sets are scored by OGB's own Evaluator unless another one is chosen.

    ``label`` is what ``--label`` says: of tasks, which are mostly 0, accuracy would tell little.
    """
    official = source.metric
    of_tasks = label is not None and isinstance(label[0], list)
    name = chosen.value if chosen is not None else "rocauc" if of_tasks else official
    if name == "accuracy":
        return name, training.accuracy
    if name != official:
        return METRICS[name], training.rocauc
    evaluator = datasets.evaluator(source.name)

    def score(logits: Tensor, y: Tensor) -> float:
        scores = logits if y.is_floating_point() else (logits[:, 1] - logits[:, 0])[:, None]
        return float(evaluator.eval({"y_true": y.view(len(y), -1).cpu().numpy(), "y_pred": scores.cpu().numpy()})[name])

    score.__qualname__ = METRICS.get(name, name)  # by which a warning, and --resume, know it
    return score.__qualname__, score
