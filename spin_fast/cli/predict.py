"""``spin-fast predict``: tables of class probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from .. import _files, datasets, training
from ..preprocessing import NodeFeatures
from ._common import (
    Debug,
    Device,
    Root,
    app,
    console,
    device_of,
    one_line_errors,
    operator_of,
    operator_option,
)


@app.command(epilog="Example: spin-fast predict runs/NCI1/model.safetensors NCI1 --root data --out probabilities.csv")
@one_line_errors
def predict(
    checkpoint: Annotated[Path, typer.Argument(help="A model that spin-fast train has written.")],
    dataset: Annotated[str, typer.Argument(help="A built-in dataset, or one found in the folder of datasets.")],
    root: Root = None,
    out: Annotated[Path, typer.Option(help="Where to write: .csv or .parquet.")] = Path("probabilities.csv"),
    operators: Annotated[list[str] | None, operator_option("that of the model")] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    debug: Debug = False,
) -> None:
    """Write the class probabilities of all graphs of DATASET, chunk by chunk, in their order.

    A row has the number of the graph, the predicted class, and the probability of each class. Of datasets with several
    tasks, or missing labels, it has the probability of each task.
    """
    torch.set_num_threads(threads)
    place = device_of(device)
    table_writer = _table_writer(out)
    _files.check_writable(out)
    model, metadata = training.load_checkpoint(checkpoint)
    chosen = operator_of(operators) or metadata.get("operator")
    if chosen is None:
        raise ValueError(f"--operator must be given: {checkpoint} does not tell it")
    with console.status(f"reading {dataset}"):
        graphs = datasets.load(dataset, root, features=metadata.get("node_features")).to(place)
    if len(graphs) == 0:
        raise ValueError(f"{dataset} has no graphs to predict")
    if (preprocessing := metadata.get("preprocessing")) is not None:
        graphs = NodeFeatures.from_dict(preprocessing).transform(graphs)
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
