"""``spin-fast predict``: tables of class probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

from .. import datasets, training
from .._common import files
from .._common.check import Argument
from .._common.progress import progress_bar
from ..datasets.summary import directions_of
from ..graphs.batch import EdgeOptions, GraphBatch
from ..graphs.convert import library
from ..nn import GraphClassifier
from ._app import Report, command, console
from ._errors import as_option
from ._graphs import empty_graphs, read_dataset, warn_of
from ._options import DATASET, Device, Download, Root, data_option, device_of, operator_of, operator_option
from ._outputs import check_output, is_predictions

CHUNK_GRAPHS = 1024  # of a folder that are read at a time


@command("spin-fast predict runs/NCI1/model.safetensors NCI1 --root data --out probabilities.csv")
def predict(
    checkpoint: Annotated[Path, typer.Argument(metavar="MODEL", help="A model that spin-fast train has written.")],
    dataset: Annotated[str, DATASET],
    root: Root = None,
    download: Download = False,
    out: Annotated[Path, typer.Option(help="Where to write: .csv or .parquet.")] = Path("probabilities.csv"),
    undirected: Annotated[
        bool | None,
        data_option(
            "--undirected/--no-undirected",
            help="Your own graphs: each edge is listed once, for both directions, or in both.",
            show_default="as in training",
        ),
    ] = None,
    operators: Annotated[list[str] | None, operator_option("that of the model")] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = "auto",
) -> Report:
    """Write the class probabilities of all graphs of DATASET, chunk by chunk, in their order.

    A row has the number of the graph, from 0; its name, if it is from a folder of your own; the predicted class; and
    the probability of each class, class_NAME, where names are those of the training set. Of a model for several tasks
    it has the probability of each task, task_NAME or, where training knew no names, its number. Labels of a folder are
    not read; its edges have weights if those in training had, and its nodes only words that occurred there.

    Where scores are not finite, prediction and probabilities are blank; such graphs are counted on stderr.

    Keys of --json: model, dataset, operator, out, graphs, not_finite, predicted.
    """
    place = device_of(device)
    if out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--out must end with .csv or .parquet, got {out}")
    if out.suffix == ".parquet":
        library("pyarrow", f"--out {out}, other than .csv,")
    source = datasets.find(dataset, root)
    check_output(out, is_predictions, source, checkpoint)
    model, metadata = training.load_checkpoint(checkpoint)
    model.to(place)
    asked = operator_of(operators)
    if not isinstance(model, GraphClassifier):
        if asked is not None:
            raise ValueError(f"--operator {asked}: {checkpoint} is a {type(model).__name__}, which has none")
    elif asked is not None and model.operator not in (None, asked):
        raise ValueError(f"--operator {asked}: {checkpoint} was trained with {model.operator}")
    elif asked is None and model.operator is None:
        raise ValueError(f"--operator must be given, that of training: {checkpoint} does not tell it")
    operator = model.check_operator(asked)
    num_outputs = model.config["out_features"]
    classes = _classes(checkpoint, metadata, num_outputs)
    task_names = metadata.get("task_names") or range(num_outputs)
    predicted = np.zeros(num_outputs, np.int64)
    if download:
        source = source.downloaded()
    parts = _parts(source, metadata, undirected)
    first = next(parts, None)
    if first is None or len(first[0]) == 0:
        raise ValueError(f"{dataset} has no graphs to predict")
    width, wanted = first[0].num_features, model.config["in_features"]
    if model.node_features is None and width != wanted:
        how = "; node_features=... in save_checkpoint says which to read" if "node_features" not in metadata else ""
        raise ValueError(f"{dataset} has {width} feature(s) per node, and {checkpoint} takes {wanted}{how}")
    y, done = first[0].y, 0
    if model.multilabel is None:  # the checkpoint does not tell
        model.multilabel = num_outputs == 1 or (y is not None and y.is_floating_point())
    tasks = model.multilabel
    heads = [f"task_{name}" for name in task_names] if tasks else [f"class_{name}" for name in classes]
    empty: list[str] = []
    not_finite: list[str] = []
    with (
        files.replacing(out) as temporary,
        _table_writer(temporary, out.suffix) as write,
        progress_bar("graphs", first[2], True) as advance,
    ):
        for graphs, names, _ in itertools.chain([first], parts):
            known = names or list(map(str, range(done, done + len(graphs))))
            empty += empty_graphs(graphs, known)
            start = 0
            for scores in training.predict_chunks(model, graphs.to(place), operator):
                chunk = slice(start, start := start + len(scores))
                wrong = training.not_finite(scores).cpu().numpy()
                not_finite += [known[chunk][number] for number in wrong]
                probabilities = model.probabilities(scores).cpu().numpy()
                columns: Columns = {"graph": np.arange(done, done + len(scores))}
                if names is not None:
                    columns["name"] = np.array(names[chunk], dtype=object)
                if not tasks:
                    best = probabilities.argmax(1)
                    predicted += np.bincount(np.delete(best, wrong), minlength=num_outputs)
                    columns["prediction"] = np.array(classes, dtype=object)[best]
                    columns["prediction"][wrong] = None
                write(columns | dict(zip(heads, probabilities.T, strict=True)))
                done += len(scores)
                advance("", len(scores))
    warn_of(empty, done, "no nodes")
    warn_of(not_finite, done, "scores that are not finite, which are left blank")
    facts = {
        "model": checkpoint,
        "dataset": source.title,
        "operator": operator,
        "out": out,
        "graphs": done,
        "not_finite": len(not_finite),
        "predicted": None if tasks else dict(zip(classes, predicted.tolist(), strict=True)),
    }
    return Report(facts, [Text(f"{out}: {done:,} graphs")])


def _classes(checkpoint: Path, metadata: dict[str, Any], number: int) -> list[str]:
    """The names of the classes; their numbers if the checkpoint has no names."""
    if (classes := metadata.get("classes")) is None:
        return list(map(str, range(number)))
    if not isinstance(classes, list) or len({*map(str, classes)}) != number or len(classes) != number:
        raise ValueError(f"classes of {checkpoint} must be {number} different names, one per output, got {classes}")
    return list(map(str, classes))


def _parts(
    source: datasets.Source, metadata: dict[str, Any], undirected: bool | None
) -> Iterator[tuple[GraphBatch, list[str] | None, int | None]]:
    """Graphs as in training, their names if they are of a folder, and how many there are in all if that is known."""
    features, edge_options = metadata.get("node_features"), EdgeOptions(**(metadata.get("edge_options") or {}))
    dataset, folder = source.name, source.path if source.is_own else None
    if folder is None:  # it lists both directions of an edge, and allows no other options
        others = [as_option(Argument(*item)) for item in edge_options.items() if item[0] != "undirected"]
        if others:
            raise ValueError(
                f"{dataset} is read as it is, and the model was trained with {' '.join(others)}; "
                "instead of a name give the path of a folder with its files"
            )
        edge_options = EdgeOptions()
    asked = edge_options if undirected is None else edge_options | EdgeOptions(undirected=undirected)
    num_graphs = None
    try:
        if folder is None:
            read = read_dataset(source, features=features, **asked)
            parts, num_graphs = iter([read]), len(read.graphs)
        else:
            weight = None if metadata.get("weighted") is False else "weight"
            parts = datasets.iter_folder(
                folder, CHUNK_GRAPHS, features=features, label=None, edge_weight=weight, **asked
            )
        with console.status(f"reading {source.title}"):
            first = next(parts, None)
    except datasets.DatasetError as error:
        if error.argument == "features":  # nobody has asked for them here
            columns: Any = [features] if isinstance(features, str) else features
            names = ", ".join(str(item["column"] if isinstance(item, dict) else item) for item in columns)
            raise ValueError(f"{dataset} has no such node features as the model was trained on: {names}") from error
        raise
    for part in itertools.chain([] if first is None else [first], parts):
        if metadata.get("weighted") and part.weighted is False and part.graphs.num_edges:
            raise ValueError(f"{dataset} has no edge weights, and the model was trained with them")
        directions = directions_of(part.graphs) if undirected is None else None
        if directions and directions.twice and edge_options.get("undirected"):
            raise ValueError(
                f"{dataset} lists each edge in both directions, and the model was trained with --undirected; "
                "--no-undirected takes them as they are"
            )
        if directions and directions.one_way and metadata.get("directed") is False:
            raise ValueError(
                f"{dataset} has directed edges, and the model was trained on undirected graphs; add --undirected "
                "if each edge is listed once, for both directions, or else --no-undirected"
            )
        yield part.graphs, None if folder is None else part.names, num_graphs


Columns = dict[str, np.ndarray]


@contextmanager
def _table_writer(path: Path, suffix: str) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that writes some rows at a time."""
    import pandas

    if suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            yield lambda columns: pandas.DataFrame(columns).to_csv(file, index=False, header=file.tell() == 0)
        return
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        writer: Any = None

        def write(columns: Columns) -> None:
            nonlocal writer
            types = {name: pyarrow.string() if values.dtype == object else None for name, values in columns.items()}
            rows = pyarrow.table(  # where NaN is null, too
                {name: pyarrow.array(values, types[name], from_pandas=True) for name, values in columns.items()}
            )
            writer = writer or stack.enter_context(ParquetWriter(path, rows.schema))
            writer.write_table(rows)

        yield write
