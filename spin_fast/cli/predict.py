"""``spin-fast predict``: tables of class probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.text import Text

from .. import _files, datasets, training
from .._progress import progress_bar
from ..graphs import GraphBatch
from ._common import (
    DATASET,
    Debug,
    Device,
    Download,
    Json,
    Report,
    Root,
    app,
    console,
    device_of,
    one_line_errors,
    operator_of,
    operator_option,
    read_dataset,
    reports,
    title_of,
)

CHUNK_GRAPHS = 1024  # of a folder that are read at a time


@app.command(epilog="Example: spin-fast predict runs/NCI1/model.safetensors NCI1 --root data --out probabilities.csv")
@one_line_errors
@reports
def predict(
    checkpoint: Annotated[Path, typer.Argument(metavar="MODEL", help="A model that spin-fast train has written.")],
    dataset: Annotated[str, DATASET],
    root: Root = None,
    download: Download = False,
    out: Annotated[Path, typer.Option(help="Where to write: .csv or .parquet.")] = Path("probabilities.csv"),
    operators: Annotated[list[str] | None, operator_option("that of the model")] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> Report:
    """Write the class probabilities of all graphs of DATASET, chunk by chunk, in their order.

    A row has the number of the graph, from 0; its name, if it is from a folder of your own; the predicted class; and
    the probability of each class, class_NAME, where names are those of the training set. Of a model for several tasks
    it has the probability of each task, task_NAME or, where training knew no names, its number. Labels of a folder are
    not read; its edges have weights if those in training had, and its nodes only words that occurred there.

    Keys of --json: model, dataset, operator, out, graphs, predicted.
    """
    torch.set_num_threads(threads)
    place = device_of(device)
    table_writer = _table_writer(out)
    _files.check_writable(out)
    model, metadata = training.load_checkpoint(checkpoint)
    model.to(place)
    asked = operator_of(operators)
    if asked is not None and model.operator not in (None, asked):
        raise ValueError(f"--operator {asked}: {checkpoint} was trained with {model.operator}")
    if asked is None and model.operator is None:
        raise ValueError(f"--operator must be given: {checkpoint} does not tell it")
    operator = model.check_operator(asked)
    num_outputs = model.config["out_features"]
    classes = metadata.get("classes") or list(map(str, range(num_outputs)))
    task_names = metadata.get("task_names") or range(num_outputs)
    predicted = np.zeros(num_outputs, np.int64)
    weighted = metadata.get("weighted")
    parts = _parts(dataset, root, metadata.get("node_features"), weighted, download)
    first = next(parts, None)
    if first is None or len(first[0]) == 0:
        raise ValueError(f"{dataset} has no graphs to predict")
    y, done = first[0].y, 0
    of_labels = y is not None and y.is_floating_point()  # where the checkpoint does not tell
    tasks = metadata["tasks"] is not None if "tasks" in metadata else of_labels
    with (
        _files.replacing(out) as temporary,
        table_writer(temporary) as write,
        progress_bar("graphs", first[2], True) as advance,
    ):
        for graphs, names, _ in itertools.chain([first], parts):
            if weighted and graphs.edge_weight is None and graphs.num_arcs:
                raise ValueError(f"{dataset} has no edge weights, and the model was trained with them")
            for scores in training.predict_chunks(model, graphs.to(place), operator):
                probabilities = (scores.sigmoid() if tasks else scores.softmax(1)).cpu().numpy()
                numbers = np.arange(done, done + len(scores))
                columns: Columns = {"graph": numbers}
                if names is not None:
                    columns["name"] = np.array(names[: len(scores)], dtype=object)
                    names = names[len(scores) :]
                if tasks:
                    heads = [f"task_{name}" for name in task_names]
                else:
                    best = probabilities.argmax(1)
                    columns["prediction"] = np.array(classes, dtype=object)[best]
                    predicted += np.bincount(best, minlength=num_outputs)
                    heads = [f"class_{name}" for name in classes]
                write(columns | dict(zip(heads, probabilities.T, strict=True)))
                done += len(scores)
                advance("", len(scores))
    facts = {
        "model": checkpoint,
        "dataset": title_of(dataset),
        "operator": operator,
        "out": out,
        "graphs": done,
        "predicted": None if tasks else dict(zip(classes, predicted.tolist(), strict=True)),
    }
    return Report(facts, [Text(f"{out}: {done:,} graphs")])


def _parts(
    dataset: str, root: Path | None, features: Any, weighted: bool | None, download: bool
) -> Iterator[tuple[GraphBatch, list[str] | None, int | None]]:
    """Graphs, their names if they are of a folder, and how many there are in all if that is known."""
    if (folder := datasets.own_folder(dataset, root)) is None:
        graphs = read_dataset(dataset, root, download=download, features=features).graphs
        yield graphs, None, len(graphs)
        return
    with console.status(f"reading {title_of(dataset)}"):
        weight = None if weighted is False else "weight"
        read = datasets.iter_folder(folder, CHUNK_GRAPHS, features=features, label=None, edge_weight=weight)
        first = next(read, None)
    for part in itertools.chain([] if first is None else [first], read):
        yield part.graphs, part.names, None


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

    with path.open("w", newline="", encoding="utf-8") as file:
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
