"""``spin-fast predict``: tables of class probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.text import Text

from .. import datasets, training
from .._common import files
from .._common.progress import progress_bar
from ..graphs.convert import library
from ._app import Report, command
from ._graphs import empty_graphs, warn_of
from ._options import DATASET, Download, Root, device_of, out_option
from ._outputs import check_output, is_predictions
from ._trained import Checkpoint, ComputeDevice, OperatorsAsTrained, Trained, UndirectedAsTrained


@command("spin-fast predict runs/NCI1/model.safetensors NCI1 --root data --out probabilities.csv")
def predict(
    checkpoint: Checkpoint,
    dataset: Annotated[str, DATASET],
    root: Root = None,
    download: Download = False,
    out: Annotated[Path, out_option(help="Where to write: .csv or .parquet.")] = Path("probabilities.csv"),
    undirected: UndirectedAsTrained = None,
    operators: OperatorsAsTrained = None,
    device: ComputeDevice = "auto",
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
    trained = Trained.load(checkpoint, place, operators)
    model, num_outputs = trained.model, trained.model.config["out_features"]
    predicted, done = np.zeros(num_outputs, np.int64), 0
    if download:
        source = source.downloaded()
    parts = trained.read(source, undirected)
    first = next(parts)
    classes = None if model.multilabel else trained.names
    heads = [f"{'task' if classes is None else 'class'}_{name}" for name in trained.names]
    empty: list[str] = []
    not_finite: list[str] = []
    with (
        files.replacing(out) as temporary,
        _table_writer(temporary, out.suffix) as write,
        progress_bar("graphs", first.num_graphs, True) as advance,
    ):
        for graphs, names, _ in itertools.chain([first], parts):
            known = names or list(map(str, range(done, done + len(graphs))))
            empty += empty_graphs(graphs, known)
            start = 0
            for scores in training.predict_chunks(model, graphs.to(place), trained.operator):
                chunk = slice(start, start := start + len(scores))
                wrong = training.not_finite(scores).cpu().numpy()
                not_finite += [known[chunk][number] for number in wrong]
                probabilities = model.probabilities(scores).cpu().numpy()
                columns: Columns = {"graph": np.arange(done, done + len(scores))}
                if names is not None:
                    columns["name"] = np.array(names[chunk], dtype=object)
                if classes is not None:
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
        "operator": trained.operator,
        "out": out,
        "graphs": done,
        "not_finite": len(not_finite),
        "predicted": None if classes is None else dict(zip(classes, predicted.tolist(), strict=True)),
    }
    return Report(facts, [Text(f"{out}: {done:,} graphs")])


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
