"""The command ``spin-fast``: train, predict, precompute, info, bench."""

from __future__ import annotations

import functools
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from . import __version__, _files, build_info, datasets, native_available, shards, training
from ._progress import progress_bar
from .features import PowerFeatures, index_of
from .graphs import GraphBatch
from .nn import SPIN

app = typer.Typer(
    help="SPIN graph classification: message passing once, before training.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
DEFAULT_HOPS = 3


class Operator(str, Enum):
    adj = "adj"
    sym = "sym"
    sym_adj = "sym+adj"
    rw = "rw"


class Readout(str, Enum):
    attention = "attention"
    sum = "sum"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Root = Annotated[
    Path | None, typer.Option(help="Folder of the datasets.", envvar="SPIN_FAST_DATA", show_default="data")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn an exception into one readable line and exit code 1; ``--debug`` lets it through."""

    @functools.wraps(command)
    def wrapped(*args: Any, debug: bool = False, **options: Any) -> None:
        try:
            command(*args, debug=debug, **options)
        except KeyboardInterrupt:
            print("spin-fast: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except Exception as error:
            if debug or isinstance(error, typer.Exit):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"spin-fast: error: {reason}", file=sys.stderr)
            raise typer.Exit(1) from None

    return wrapped


def _version(show: bool) -> None:
    if show:
        print(f"spin-fast {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: spin-fast train NCI1 --root data --readout attention --epochs 50")
@one_line_errors
def train(
    dataset: Annotated[
        str, typer.Argument(help="A built-in dataset, or one found in the folder of datasets.")
    ] = "digits",
    root: Root = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="runs/DATASET")] = None,
    readout: Annotated[Readout, typer.Option(help="How a graph's nodes are summed.")] = Readout.sum,
    operator: Annotated[
        Operator | None, typer.Option(help="The graph operator.", show_default="sym, or that of --features")
    ] = None,
    hops: Annotated[
        int | None,
        typer.Option(min=0, help="R: there are R + 1 branches.", show_default=f"{DEFAULT_HOPS}, or as --features"),
    ] = None,
    features_file: Annotated[
        Path | None,
        typer.Option("--features", help="What spin-fast precompute has written, instead of computing it anew."),
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Width of a branch.")] = 32,
    layers: Annotated[int, typer.Option(min=1, help="Linear layers of a branch.")] = 3,
    batch_norm: Annotated[bool, typer.Option(help="BatchNorm in the branches; its steps are slower.")] = False,
    calibrate: Annotated[bool, typer.Option(help="Scale the new weights by the training graphs.")] = True,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Dropout in the branches.")] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Graphs per step.")] = 32,
    learning_rate: Annotated[float, typer.Option(min=0, help="Of Adam; falls to 0 along a cosine.")] = 5e-3,
    weight_decay: Annotated[float, typer.Option(min=0, help="L2 penalty of Adam.")] = 0.0,
    patience: Annotated[int, typer.Option(min=1, help="Stop after so many epochs without a better validation.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the weights and the order of the graphs.")] = 0,
    device: Annotated[
        Device, typer.Option(help="Where to train; auto takes the GPU if torch has one and its kernels are installed.")
    ] = Device.auto,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; small batches gain little from more than 1.")] = 1,
    deduplicate: Annotated[bool, typer.Option(help="Store and evaluate each distinct row once (exact).")] = True,
    debug: Debug = False,
) -> None:
    """Train a SPIN on DATASET; write the model and a training curve, print the result.

    Datasets with an official split use it; the others are split 80/10/10 by the seed, stratified.
    """
    torch.set_num_threads(threads)
    place = _device(device)
    out = Path("runs") / dataset if out is None else out
    _make_folder(out)
    metric_name, metric = _metric(dataset)
    made = None if features_file is None else PowerFeatures.load(features_file)
    with console.status(f"reading {dataset}"):
        graphs = datasets.load(dataset, root)
        assert graphs.y is not None
        split = datasets.split(dataset, graphs.y, root, seed=seed)
    console.print(_describe(dataset, graphs), highlight=False)
    num_outputs = _num_outputs(graphs.y)
    if made is None:
        hops = DEFAULT_HOPS if hops is None else hops
        with console.status(f"computing {hops} hops"):
            graphs = graphs.to(place)
            start = time.perf_counter()
            features = PowerFeatures.from_graphs(
                graphs, hops, (operator or Operator.sym).value, deduplicate, node_rows=dropout > 0
            )
            _wait_for(place)
            precomputation = f"{1000 * (time.perf_counter() - start):.1f} ms, once, deduplication included"
    else:
        _check_features(f"--features {features_file}", made, dataset, graphs, hops, operator, deduplicate, dropout)
        features, precomputation = made.to(place), f"read from {features_file}"
    torch.manual_seed(seed)
    model = SPIN(
        graphs.num_features,
        hidden,
        num_outputs,
        features.num_hops,
        attention=readout is Readout.attention,
        num_layers=layers,
        batch_norm=batch_norm,
        dropout=dropout,
    ).to(place)
    if calibrate:
        model.calibrate(features[split.train])
    fit = training.fit(
        model,
        features,
        split.train,
        split.validation,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        patience=patience,
        seed=seed,
        metric=metric,
        progress=True,
    )
    target = features[split.test].y
    assert target is not None
    test = metric(training.predict(model, features, split.test), target)
    settings = {"operator": features.operator, "seed": seed}
    _write_and_report(out, dataset, features, model, fit, split, metric_name, test, precomputation, **settings)


def _check_features(
    source: str,
    features: PowerFeatures,
    dataset: str,
    graphs: GraphBatch,
    hops: int | None,
    operator: Operator | None,
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
    if hops is not None and hops != features.num_hops:
        raise ValueError(f"--hops {hops}: {source} has {features.num_hops}")
    if operator is not None and operator.value != features.operator:
        raise ValueError(f"--operator {operator.value}: {source} has {features.operator}")
    if dropout > 0 and features.index is not None and features.row_of_node is None:
        raise ValueError(f"--dropout {dropout:g}: {source} must be made by spin-fast precompute --node-rows")
    if not deduplicate and features.index is not None:
        raise ValueError(f"--no-deduplicate: {source} must be made by spin-fast precompute --no-deduplicate")


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether labels are equal, with a NaN like any other."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(2), other.nan_to_num(2))


def _make_folder(path: Path) -> None:
    """Before any work, so that an unwritable place does not cost a training."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {path} cannot be made: {error.strerror}") from error


def _write_and_report(
    out: Path,
    dataset: str,
    features: PowerFeatures,
    model: SPIN,
    fit: training.Fit,
    split: datasets.Split,
    metric_name: str,
    test: float,
    precomputation: str,
    **settings: Any,
) -> None:
    from .plots import training_curve

    kind = "SPIN-att" if model.config["attention"] else "SPIN-non-att"
    checkpoint, curve = out / "model.safetensors", out / "training-curve.png"
    training.save_checkpoint(checkpoint, model, dataset=dataset, metric=metric_name, test=test, **settings)
    training_curve(curve, fit, title=f"{kind} on {dataset}", metric=metric_name, test=test)
    seconds = fit.seconds_per_epoch
    first = features.identical_graphs().cpu()
    known = int(torch.isin(first[split.test], first[split.train]).sum())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    table = Table(show_header=False, title=f"{kind} on {dataset}")
    rows = {
        f"test {metric_name}": f"[bold]{_score(metric_name, test)}[/bold]  ({len(split.test)} graphs, seen once)",
        f"validation {metric_name}": f"{_score(metric_name, fit.validation)}  ({len(split.validation)} graphs)",
        "test graphs seen in training": f"{known} of {len(split.test)} (no SPIN can tell them from a training graph)",
        "epochs": f"{len(fit.epochs)}{' (interrupted)' if fit.interrupted else ''}, kept epoch {fit.best_epoch + 1}",
        "time per epoch": f"{1000 * seconds:.1f} ms (median)",
        "graphs per second": f"{len(split.train) / seconds:,.0f} in training",
        "precomputation": precomputation,
        "nodes per stored row": f"{_ratios(features)}  (by branch)",
        "parameters": f"{parameters:,}",
        "kernels": _kernels(features.rows.device),
        "model": str(checkpoint),
        "training curve": str(curve),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


@app.command(epilog="Example: spin-fast predict runs/NCI1/model.safetensors NCI1 --root data --out probabilities.csv")
@one_line_errors
def predict(
    checkpoint: Annotated[Path, typer.Argument(help="A model that spin-fast train has written.")],
    dataset: Annotated[str, typer.Argument(help="A built-in dataset, or one found in the folder of datasets.")],
    root: Root = None,
    out: Annotated[Path, typer.Option(help="Where to write: .csv or .parquet.")] = Path("probabilities.csv"),
    operator: Annotated[
        Operator | None, typer.Option(help="The graph operator.", show_default="that of the model")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    debug: Debug = False,
) -> None:
    """Write the class probabilities of all graphs of DATASET, chunk by chunk, in their order.

    A row has the number of the graph, the predicted class, and the probability of each class. Of datasets with several
    tasks, or missing labels, it has the probability of each task.
    """
    torch.set_num_threads(threads)
    place = _device(device)
    table_writer = _table_writer(out)
    _files.check_writable(out)
    model, metadata = training.load_checkpoint(checkpoint)
    chosen = metadata.get("operator") if operator is None else operator.value
    if chosen is None:
        raise ValueError(f"--operator must be given: {checkpoint} does not tell it")
    with console.status(f"reading {dataset}"):
        graphs = datasets.load(dataset, root).to(place)
    if len(graphs) == 0:
        raise ValueError(f"{dataset} has no graphs to predict")
    tasks = graphs.y is not None and graphs.y.is_floating_point()
    scores = training.predict_chunks(model.to(place), graphs, chosen, progress=True)
    with _files.replacing(out) as temporary, table_writer(temporary) as write:
        done = 0
        for chunk in scores:
            probabilities = (chunk.sigmoid() if tasks else chunk.softmax(1)).cpu()
            columns = {"graph": torch.arange(done, done + len(chunk)).numpy()}
            if not tasks:
                columns["prediction"] = probabilities.argmax(1).numpy()
            names = (f"{'task' if tasks else 'class'}_{number}" for number in range(probabilities.shape[1]))
            write(columns | dict(zip(names, probabilities.numpy().T, strict=True)))
            done += len(chunk)
    console.print(f"{out}: {done:,} graphs", highlight=False, soft_wrap=True)


Columns = dict[str, np.ndarray]


def _table_writer(path: Path) -> Callable[[Path], AbstractContextManager[Callable[[Columns], None]]]:
    """What writes a table as the suffix of ``path`` says, some rows at a time.

    Raises:
        ValueError: there is no such format. ImportError: Parquet without pyarrow.
    """
    if path.suffix == ".csv":
        return _csv_writer
    if path.suffix != ".parquet":
        raise ValueError(f"--out must end with .csv or .parquet, got {path}")
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ImportError(f"--out {path}: {error}; Parquet needs: pip install pyarrow; CSV does without") from None
    return _parquet_writer


@contextmanager
def _csv_writer(path: Path) -> Iterator[Callable[[Columns], None]]:
    import pandas

    with path.open("w", newline="") as file:
        yield lambda columns: pandas.DataFrame(columns).to_csv(file, index=False, header=file.tell() == 0)


@contextmanager
def _parquet_writer(path: Path) -> Iterator[Callable[[Columns], None]]:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        writers: list[Any] = []

        def write(columns: Columns) -> None:
            rows = pyarrow.table(columns)
            if not writers:
                writers.append(stack.enter_context(ParquetWriter(path, rows.schema)))
            writers[0].write_table(rows)

        yield write


UNITS = {"": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}
UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def _bytes(text: str) -> int:
    """``2GB`` is 2 * 1000**3, ``2GiB`` 2 * 1024**3."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip(), re.IGNORECASE)
    number = 0 if match is None else int(float(match[1]) * UNITS.get(match[2].upper(), 0))
    if number < 1:
        raise typer.BadParameter(f"must be a size such as 500MB, 2GB or 1.5GiB, got {text!r}")
    return number


@app.command(epilog="Example: spin-fast precompute NCI1 --root data --out NCI1.safetensors")
@one_line_errors
def precompute(
    dataset: Annotated[str, typer.Argument(help="A built-in dataset, or one found in the folder of datasets.")],
    root: Root = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="DATASET.safetensors")] = None,
    operator: Annotated[Operator, typer.Option(help="The graph operator.")] = Operator.sym,
    hops: Annotated[int, typer.Option(min=0, help="R: there are R + 1 branches.")] = DEFAULT_HOPS,
    shard_size: Annotated[
        int | None,
        typer.Option(parser=_bytes, metavar="SIZE", help="Write files of at most so much, such as 2GB, and an index."),
    ] = None,
    node_rows: Annotated[bool, typer.Option(help="Keep the row of each node: what dropout needs.")] = False,
    deduplicate: Annotated[bool, typer.Option(help="Store each distinct row once (exact).")] = True,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    debug: Debug = False,
) -> None:
    """Compute the hops of DATASET once and write them to a file, for train --features and PowerFeatures.load."""
    torch.set_num_threads(threads)
    out = Path(f"{dataset}.safetensors") if out is None else out
    shards.check_path(out)
    with console.status(f"reading {dataset}"):
        graphs = datasets.load(dataset, root)
    console.print(_describe(dataset, graphs), highlight=False)
    settings = (graphs, hops, operator.value, deduplicate)
    if shard_size is None:
        parts: Iterable[PowerFeatures] = (PowerFeatures.from_graphs(*settings, node_rows=node_rows, progress=True),)
    else:
        parts = _with_progress(shards.compute(*settings, max_bytes=shard_size, node_rows=node_rows), len(graphs))
    stored = torch.zeros(hops + 1, dtype=torch.int64)

    def counted() -> Iterator[PowerFeatures]:
        for part in parts:
            stored.add_(part.row_ptr.diff())
            yield part

    files = shards.save(counted(), out)
    table = Table(show_header=False, title=f"{hops} hops of {dataset}")
    ratios = (graphs.num_nodes / max(int(number), 1) for number in stored)
    table.add_row("nodes per stored row", f"{_by_branch(ratios)}  (by branch)")
    table.add_row("bytes", f"{sum(file.stat().st_size for file in files):,}")
    if len(files) == 1:
        table.add_row("file", str(out))
    else:
        table.add_row("files", f"{files[0]} to {files[-1].name}")
        table.add_row("index", str(index_of(out)))
    console.print(table)


def _with_progress(parts: Iterable[PowerFeatures], num_graphs: int) -> Iterator[PowerFeatures]:
    with progress_bar("graphs", num_graphs, True) as advance:
        for number, part in enumerate(parts, 1):
            yield part
            advance(f"{number} file(s)", len(part))


@app.command(epilog="Example: spin-fast info NCI1 --root data")
@one_line_errors
def info(
    dataset: Annotated[str | None, typer.Argument(help="Also describe this dataset.")] = None,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Show what is installed, which kernels run, and which datasets are found."""
    facts = {"spin_fast": __version__, "python": platform.python_version()} | build_info()
    facts["kernels"] = _kernels(torch.device("cpu"))
    facts["kernels on the GPU"] = _kernels(torch.device("cuda")) if torch.cuda.is_available() else "torch finds no GPU"
    facts["datasets"] = ", ".join(datasets.names(root))
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    console.print(table)
    if dataset is not None:
        graphs = datasets.load(dataset, root)
        console.print(_describe(dataset, graphs), highlight=False)
        features = PowerFeatures.from_graphs(graphs, DEFAULT_HOPS)
        times = torch.bincount(features.identical_graphs())
        console.print(
            f"nodes per stored row by branch, {features.operator} over {DEFAULT_HOPS} hops: {_ratios(features)}\n"
            f"graphs that no SPIN can tell from another one: {int(times[times > 1].sum()):,}",
            highlight=False,
        )


@app.command(
    epilog="Example: spin-fast bench --quick",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@one_line_errors
def bench(
    context: typer.Context,
    root: Root = None,
    names: Annotated[
        str | None, typer.Option("--datasets", help="Comma-separated.", show_default="those found")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few rounds on digits, to see that all runs.")] = False,
    results: Annotated[Path | None, typer.Option(help="Write JSON, a table and plots there.")] = None,
    debug: Debug = False,
) -> None:
    """Time the operations, training and prediction against their rivals; further options go to pytest.

    Accuracy at equal settings: python -m spin_fast.benchmarks.accuracy. Needs the extra: pip install
    'spin_fast\\[bench]'.
    """
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}; the benchmarks need: pip install 'spin_fast[bench]'") from None
    arguments = ["--pyargs", "spin_fast.benchmarks", "-p", "spin_fast.benchmarks.plugin", "-q"]
    for option, value in (("--root", root), ("--datasets", names), ("--results", results)):
        arguments += [] if value is None else [f"{option}={value}"]
    arguments += ["--quick"] if quick else []
    raise typer.Exit(int(pytest.main([*arguments, *context.args])))


def _describe(name: str, graphs: GraphBatch) -> str:
    edges = int((graphs.num_arcs + _num_loops(graphs)) / 2)
    num_graphs = max(len(graphs), 1)
    classes = "" if graphs.y is None or graphs.y.is_floating_point() else f"{int(graphs.y.max()) + 1} classes, "
    return (
        f"[bold]{name}[/bold]: {len(graphs):,} graphs, {classes}{graphs.num_nodes / num_graphs:.2f} nodes and "
        f"{edges / num_graphs:.2f} edges on average, {graphs.num_features} feature(s) per node"
    )


def _ratios(features: PowerFeatures) -> str:
    return _by_branch(features.deduplication)


def _by_branch(ratios: Iterable[float]) -> str:
    return "  ".join(f"{r}: {ratio:.3g}x" for r, ratio in enumerate(ratios))


def _num_loops(graphs: GraphBatch) -> int:
    rows = torch.arange(graphs.num_nodes).repeat_interleave(graphs.degree.long())
    return int((rows == graphs.indices).sum())


def _num_outputs(y: Tensor) -> int:
    return y.shape[1] if y.is_floating_point() else int(y.max()) + 1


def _metric(dataset: str) -> tuple[str, training.Metric]:
    """Name and function of the metric; OGB's sets are scored by OGB's own Evaluator."""
    name = datasets.metric(dataset)
    if name == "accuracy":
        return name, training.accuracy
    evaluator = datasets.evaluator(dataset)

    def score(logits: Tensor, y: Tensor) -> float:
        scores = logits if y.is_floating_point() else (logits[:, 1] - logits[:, 0])[:, None]
        return float(evaluator.eval({"y_true": y.view(len(y), -1).cpu().numpy(), "y_pred": scores.cpu().numpy()})[name])

    return {"rocauc": "ROC-AUC"}.get(name, name), score


def _score(metric_name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if metric_name == "accuracy" else f"{value:.4f}"


def _device(wanted: Device) -> torch.device:
    """The device to train on.

    Raises:
        ValueError: a GPU is asked for, and torch has none.
    """
    there = torch.cuda.is_available()
    if wanted is Device.auto:
        return torch.device("cuda" if there and native_available("cuda") else "cpu")
    if wanted is Device.cuda and not there:
        version = torch.version.cuda
        reason = f"torch {torch.__version__} has no CUDA" if version is None else "torch finds no GPU (see nvidia-smi)"
        raise ValueError(f"--device cuda: {reason}; --device cpu trains without")
    return torch.device(wanted.value)


def _wait_for(device: torch.device) -> None:
    """For what is timed: work on a GPU goes on when its call has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernels(device: torch.device) -> str:
    """Which kernels run on ``device``, and on what."""
    facts = build_info()
    on = f"{torch.get_num_threads()} CPU thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if native_available(device):
        return f"native ({facts['isa'] if device.type == 'cpu' else 'CUDA'}), {on}"
    return f"reference ({facts['reason' if device.type == 'cpu' else 'cuda_reason']}), {on}"


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
