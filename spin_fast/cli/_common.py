"""What the commands share: the app, options, errors in one line, how things are described."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from .. import __version__, _check, build_info, datasets, native_available, training
from ..features import PowerFeatures
from ..graphs import GraphBatch

app = typer.Typer(
    help="SPIN graph classification: message passing once, before training.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
DEFAULT_HOPS = 3


class Readout(str, Enum):
    attention = "attention"
    sum = "sum"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Degree(str, Enum):
    raw = "raw"
    log = "log"
    one_hot = "one-hot"


Root = Annotated[
    Path | None, typer.Option(help="Folder of the datasets.", envvar="SPIN_FAST_DATA", show_default="data")
]


def _operators(text: str) -> str:
    try:
        return _check.operators(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def operator_option(default: str, panel: str | None = None) -> Any:
    """The option ``--operator``, a list of names, maybe with commas between them, for :func:`operator_of`."""
    return typer.Option(
        "--operator",
        parser=_operators,
        metavar="|".join(_check.OPERATORS),
        help="The graph operator; given several times, or several with commas, their hops stand side by side.",
        show_default=default,
        rich_help_panel=panel,
    )


def operator_of(chosen: list[str] | None) -> str | None:
    """What ``--operator`` says; None where it is not given."""
    return _check.operators(",".join(chosen)) if chosen else None


OwnFeatures = Annotated[
    str | None,
    typer.Option(
        "--node-features",
        help="Which features of a TU or .nel dataset: label, attribute, attribute+label or degree.",
        show_default="the paper's choice",
    ),
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


def describe(name: str, graphs: GraphBatch) -> str:
    edges = int((graphs.num_arcs + _num_loops(graphs)) / 2)
    num_graphs = max(len(graphs), 1)
    classes = "" if graphs.y is None or graphs.y.is_floating_point() else f"{int(graphs.y.max()) + 1} classes, "
    return (
        f"[bold]{name}[/bold]: {len(graphs):,} graphs, {classes}{graphs.num_nodes / num_graphs:.2f} nodes and "
        f"{edges / num_graphs:.2f} edges on average, {graphs.num_features} feature(s) per node"
    )


def ratios_of(features: PowerFeatures) -> str:
    return by_branch(features.deduplication)


def by_branch(ratios: Iterable[float]) -> str:
    return "  ".join(f"{r}: {ratio:.3g}x" for r, ratio in enumerate(ratios))


def _num_loops(graphs: GraphBatch) -> int:
    rows = torch.arange(graphs.num_nodes).repeat_interleave(graphs.degree.long())
    return int((rows == graphs.indices).sum())


def num_outputs_of(y: Tensor) -> int:
    return y.shape[1] if y.is_floating_point() else int(y.max()) + 1


def metric_of(dataset: str) -> tuple[str, training.Metric]:
    """Name and function of the metric; OGB's sets are scored by OGB's own Evaluator."""
    name = datasets.metric(dataset)
    if name == "accuracy":
        return name, training.accuracy
    evaluator = datasets.evaluator(dataset)

    def score(logits: Tensor, y: Tensor) -> float:
        scores = logits if y.is_floating_point() else (logits[:, 1] - logits[:, 0])[:, None]
        return float(evaluator.eval({"y_true": y.view(len(y), -1).cpu().numpy(), "y_pred": scores.cpu().numpy()})[name])

    return {"rocauc": "ROC-AUC"}.get(name, name), score


def show_score(metric_name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if metric_name == "accuracy" else f"{value:.4f}"


def device_of(wanted: Device) -> torch.device:
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


def wait_for(device: torch.device) -> None:
    """For what is timed: work on a GPU goes on when its call has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_on(device: torch.device) -> str:
    """Which kernels run on ``device``, and on what."""
    facts = build_info()
    on = f"{torch.get_num_threads()} CPU thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if native_available(device):
        return f"native ({facts['isa'] if device.type == 'cpu' else 'CUDA'}), {on}"
    return f"reference ({facts['reason' if device.type == 'cpu' else 'cuda_reason']}), {on}"
