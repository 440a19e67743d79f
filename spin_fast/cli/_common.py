"""What the commands share: the app, options, tables or JSON, errors in one line, how things are described."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from .. import __version__, _check, build_info, datasets, native_available, training
from ..features import PowerFeatures
from ..graphs import REDUCTIONS, Arcs, GraphBatch

HOPS = "How far message passing goes; each hop of each operator is a branch of the model."  # for --hops
app = typer.Typer(
    help="SPIN graph classification: message passing once, before training.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
DEFAULT_HOPS = 3
METRICS = {"rocauc": "ROC-AUC"}  # as people call them


class Readout(str, Enum):
    attention = "attention"
    sum = "sum"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Coalesce = Enum("Coalesce", {name: name for name in REDUCTIONS}, type=str)  # type: ignore[misc]


class Metric(str, Enum):
    accuracy = "accuracy"
    rocauc = "rocauc"


class Degree(str, Enum):
    raw = "raw"
    log = "log"
    one_hot = "one-hot"


def _complete_dataset(context: typer.Context, incomplete: str) -> list[str]:
    """Names for the shell; it completes paths by itself where there is none."""
    try:
        return datasets.names(context.params.get("root"))
    except Exception:  # in the middle of a command line there is no place for it
        return []


DATASET = typer.Argument(
    metavar="DATASET",
    help="A built-in dataset, one found in the folder of datasets, or the path of a folder of your own graphs.",
    autocompletion=_complete_dataset,
)
data_option = partial(typer.Option, rich_help_panel="Data")
Root = Annotated[
    Path | None, data_option(help="Folder of the datasets.", envvar="SPIN_FAST_DATA", show_default="data, or the cache")
]
Download = Annotated[bool, data_option("--download", help="Get a dataset that is not there from its official site.")]
Splits = Annotated[
    Path | None,
    data_option(help="File of published folds, or its folder.", show_default="splits/ beside the datasets"),
]
Fold = Annotated[int | None, data_option(min=0, help="Which of the published folds; the first is 0.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON: all of stdout is one document.")]


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
        help="What a hop computes of the neighbours: their sum (adj), a sum weighted by degrees (sym), both added "
        "(sym+adj), or their mean (rw). Several, with commas or one by one, are used side by side.",
        show_default=default,
        rich_help_panel=panel,
    )


def operator_of(chosen: list[str] | None) -> str | None:
    """What ``--operator`` says; None where it is not given."""
    return _check.operators(",".join(chosen)) if chosen else None


def _columns(text: str) -> Any:
    """JSON, or one name, or several with commas; a comma at the end makes one name a list, those in [ ] separate none.

    No text at all is None.
    """
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"must be JSON where it starts with {text[0]}: {error}") from None
    names = re.split(r",(?![^\[]*\])", text)
    return [name.strip() for name in names if name.strip()] if len(names) > 1 else text or None


OwnFeatures = Annotated[
    Any,
    data_option(
        "--node-features",
        parser=_columns,
        metavar="NAMES",
        help="Of a TU or .nel dataset: label, attribute, attribute+label or degree; of your own tables or GraphML: "
        "columns, with commas, of numbers or words, or JSON as in Folder.features; or degree.",
        show_default="the paper's choice, or all columns",
    ),
]
Label = Annotated[
    Any,
    data_option(
        "--label",
        parser=lambda text: (_columns(text),),
        metavar="NAMES",
        help="Of your own tables or GraphML: the column of graphs, or graph attribute, with the classes; several, with "
        'commas, are tasks of 0 and 1, where a label may be missing, and "NAME," is one such task; "" reads none.',
        show_default=datasets.LABEL,
    ),
]
Undirected = Annotated[
    bool,
    data_option("--undirected", help="Your own graphs: each edge is listed once, for both directions."),
]
MergeRepeated = Annotated[
    Coalesce | None,
    data_option(
        "--coalesce",
        help="Your own graphs: merge repeated edges, with this of their weights, which are 1 where there are none.",
        show_default="each counts",
    ),
]
SelfLoops = Annotated[
    bool | None,
    data_option(
        "--self-loops/--no-self-loops",
        help="Your own graphs: give each node an edge to itself, or leave such edges out.",
        show_default="as listed",
    ),
]


def arcs_of(undirected: bool | None, coalesce: Coalesce | None, self_loops: bool | None) -> Arcs:
    """What the three options say, without those that are not given."""
    arcs = Arcs()
    if undirected:
        arcs["undirected"] = True
    if coalesce is not None:
        arcs["coalesce"] = coalesce.value
    if self_loops is not None:
        arcs["self_loops"] = self_loops
    return arcs


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass
class Report:
    """What a command has to say.

    Attributes:
        facts: for machines: numbers as they are, under keys that the help of the command names.
        shown: the same for people: what the console is to print.
        exit_code: of the command.
    """

    facts: dict[str, Any]
    shown: list[RenderableType]
    exit_code: int = 0


def reports(command: Callable[..., Report]) -> Callable[..., None]:
    """Print what a command returns: for people, or with ``--json`` as one document, and all else on stderr."""

    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool = False, **options: Any) -> None:
        if as_json:
            with contextlib.redirect_stdout(sys.stderr):  # progress bars and what other libraries print, too
                report = command(*args, **options)
            print(document_of(report))
        else:
            report = command(*args, **options)
            for part in report.shown:
                console.print(part, highlight=False, soft_wrap=not isinstance(part, Table))
        sys.stdout.flush()  # here, where a closed pipe is no surprise
        if report.exit_code:
            raise typer.Exit(report.exit_code)

    return wrapped


def document_of(report: Report) -> str:
    """Its facts as JSON."""
    return json.dumps(_plain(report.facts), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """As JSON has it, where there is neither NaN nor infinity."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn an exception into one readable line and exit code 1; ``--debug`` lets it through."""

    @functools.wraps(command)
    def wrapped(*args: Any, debug: bool = False, **options: Any) -> None:
        try:
            command(*args, debug=debug, **options)
        except KeyboardInterrupt:
            print("spin-fast: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # who read our output has seen enough, as head does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            if debug or isinstance(error, typer.Exit):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, datasets.DatasetError):
                reason = _as_options(reason)
            print(f"spin-fast: error: {reason}", file=sys.stderr)
            raise typer.Exit(1) from None

    paragraphs = (command.__doc__ or "").split("\n\n")
    wrapped.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # --help breaks lines itself
    return wrapped


def _as_options(reason: str) -> str:
    """What to do, in the words of the command line."""
    words = {"download=True": "--download", "by features": "by --node-features"}
    words |= {f"by {argument}": f"by --{argument}" for argument in ("root", "splits")}
    words["by label=None"] = 'by --label ""'
    words["by url"] = "by SPIN_FAST_TU_URL or SPIN_FAST_OGB_URL"
    for argument, option in words.items():
        reason = reason.replace(argument, option)
    reason = re.sub(r"by label=\['(.*?)'\]", r'by --label "\1,"', reason)
    arguments = r"\b(features|undirected|coalesce|self_loops)=(\w+|'[^']*')"
    return re.sub(arguments, lambda found: as_option(found[1], found[2].strip("'")), reason)


def as_option(argument: str, value: object) -> str:
    """An argument of ``datasets.read`` as the command line has it."""
    if argument in ("undirected", "self_loops"):
        return f"--{'' if str(value) == 'True' else 'no-'}{argument.replace('_', '-')}"
    return f"--{'node-' if argument == 'features' else ''}{argument} {value}"


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


def read_dataset(
    dataset: str,
    root: Path | None,
    *,
    download: bool,
    features: Any = None,
    label: tuple[Any] | None = None,
    arcs: Arcs | None = None,
) -> datasets.Folder:
    """The graphs of a dataset or a folder, while the terminal says so; ``label`` is what ``--label`` says.

    Raises:
        ValueError: they are said to be listed once and are listed in both directions.
    """
    if label is not None and datasets.own_folder(dataset, root) is None:
        names = label[0] if isinstance(label[0], str) else json.dumps(label[0] or "")
        raise ValueError(f"--label {names} is impossible for {dataset}, which is no folder of your own graphs")
    chosen = {} if label is None else {"label": label[0]}
    arcs = arcs or Arcs()
    with console.status(f"reading {title_of(dataset)}"):
        read = datasets.read(dataset, root, download=download, features=features, **chosen, **arcs)
        twice = arcs.get("undirected") and directions_of(read.graphs).twice
    if twice:
        raise ValueError(f"--undirected: {dataset} lists each edge in both directions already; leave the option out")
    return read


class Directions(NamedTuple):
    """How edges are listed, self-loops aside.

    Attributes:
        one_way: an arc lacks its reverse.
        twice: each arc is repeated.
    """

    one_way: bool
    twice: bool


def directions_of(graphs: GraphBatch) -> Directions:
    arcs = merged_arcs(graphs, np.ones(graphs.num_arcs, np.int32))
    reverse = arcs.T.tocsr()
    one_way = not (np.array_equal(arcs.indptr, reverse.indptr) and np.array_equal(arcs.indices, reverse.indices))
    times = arcs.data[np.repeat(np.arange(graphs.num_nodes), np.diff(arcs.indptr)) != arcs.indices]
    return Directions(one_way, len(times) > 0 and int(times.min()) > 1)


def merged_arcs(graphs: GraphBatch, weight: np.ndarray) -> Any:
    """The adjacency as a ``csr_array`` in canonical form; weights of repeated arcs are added up."""
    from scipy.sparse import csr_array

    shape = (graphs.num_nodes, graphs.num_nodes)
    arcs = csr_array((weight, graphs.indices.numpy(), graphs.indptr.numpy()), shape=shape)
    if not arcs.has_canonical_format:
        arcs = arcs.copy()  # of the graphs' own arrays
        arcs.sum_duplicates()
    return arcs


def hint_on_edges(dataset: str, root: Path | None, graphs: GraphBatch) -> str | None:
    """Which option there is for a folder of one's own whose edges have one direction."""
    if datasets.own_folder(dataset, root) is None or not directions_of(graphs).one_way:
        return None
    return "if each edge is listed once, for both directions, add --undirected"


def hint_on_features(read: datasets.Folder, chosen: object) -> str | None:
    """Which option takes the node features that a set has and that nobody has decided against."""
    if chosen is not None or not read.unused:
        return None
    every = "+".join(part for part in ("attribute", "label") if part in read.unused or part in str(read.features))
    return f"{' and '.join(f'node {part}s' for part in read.unused)}, which --node-features {every} uses"


def title_of(dataset: str) -> str:
    """What a dataset is called in tables and file names: the last part of a path."""
    is_path = "/" in dataset or os.sep in dataset or dataset in (os.curdir, os.pardir)
    return Path(dataset).expanduser().resolve().name if is_path else dataset


def show_bytes(number: int) -> str:
    """``1234567`` is 1.23 MB."""
    power = min(len(str(number)) - 1, 14) // 3
    if power == 0:
        return f"{number} bytes"
    return f"{number / 1000**power:.4g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def describe(name: str, graphs: GraphBatch) -> str:
    num_graphs = max(len(graphs), 1)
    classes = "" if graphs.y is None or graphs.y.is_floating_point() else f"{int(graphs.y.max()) + 1} classes, "
    return (
        f"[bold]{escape(name)}[/bold]: {len(graphs):,} graphs, {classes}{graphs.num_nodes / num_graphs:.2f} nodes and "
        f"{graphs.num_arcs / num_graphs:.2f} arcs on average, {graphs.num_features} feature(s) per node"
    )


def tell(name: str, read: datasets.Folder, edges: str | None, features: str | None) -> None:
    """What the graphs are, and the hints."""
    console.print(describe(name, read.graphs), highlight=False)
    for what, hint in (("edges are directed", edges), ("there are also", features)):
        if hint is not None:
            console.print(f"{what}: {hint}", highlight=False)


def ratios_of(features: PowerFeatures) -> str:
    return by_branch(features.deduplication)


def by_branch(ratios: Iterable[float]) -> str:
    return "  ".join(f"{r}: {ratio:.3g}x" for r, ratio in enumerate(ratios))


def num_outputs_of(y: Tensor) -> int:
    return y.shape[1] if y.is_floating_point() else int(y.max()) + 1


def metric_of(dataset: str, label: tuple[Any] | None, chosen: Metric | None) -> tuple[str, training.Metric]:
    """Name and function of the metric; OGB's sets are scored by OGB's own Evaluator unless another one is chosen.

    ``label`` is what ``--label`` says: of tasks, which are mostly 0, accuracy would tell little.
    """
    official = datasets.metric(dataset)
    of_tasks = label is not None and isinstance(label[0], list)
    name = chosen.value if chosen is not None else "rocauc" if of_tasks else official
    if name == "accuracy":
        return name, training.accuracy
    if name != official:
        return METRICS[name], training.rocauc
    evaluator = datasets.evaluator(dataset)

    def score(logits: Tensor, y: Tensor) -> float:
        scores = logits if y.is_floating_point() else (logits[:, 1] - logits[:, 0])[:, None]
        return float(evaluator.eval({"y_true": y.view(len(y), -1).cpu().numpy(), "y_pred": scores.cpu().numpy()})[name])

    return METRICS.get(name, name), score


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
