"""``spin-fast predict``: tables of class probabilities."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from .. import datasets, training
from .._common import files
from .._common.progress import progress_bar
from ..datasets.reader import range_of_shard
from ..graphs.convert import library
from ._app import Report, command
from ._graphs import NO_NODES, Odd
from ._options import DATASET, Download, Root, device_of, out_option
from ._outputs import check_output, is_predictions
from ._shards import Resume, ShardOption, ShardsOption, as_text, chosen, kept, num_graphs_of, paths_of
from ._trained import Checkpoint, ComputeDevice, OperatorsAsTrained, Part, Trained, UndirectedAsTrained, UnknownWords

ROWS = 1 << 16  # of a row group
METADATA = b"spin_fast"  # under which a Parquet file tells what it was made of


@command("spin-fast predict runs/NCI1/model.safetensors NCI1 --root data --out probabilities.csv")
def predict(
    checkpoint: Checkpoint,
    dataset: Annotated[str, DATASET],
    root: Root = None,
    download: Download = False,
    out: Annotated[Path, out_option(help="Where to write: .csv or .parquet.")] = Path("probabilities.csv"),
    undirected: UndirectedAsTrained = None,
    unknown_words: UnknownWords = False,
    operators: OperatorsAsTrained = None,
    device: ComputeDevice = "auto",
    shard: ShardOption = None,
    shards: ShardsOption = None,
    resume: Resume = False,
) -> Report:
    """Write the class probabilities of all graphs of DATASET, chunk by chunk, in their order.

    A row has the number of the graph, from 0; its name, if it is from a folder of your own; the predicted class; and
    the probability of each class, class_NAME, where names are those of the training set. Of a model for several tasks
    it has the probability of each task, task_NAME or, where training knew no names, its number. Labels of a folder are
    not read; its edges have weights if those in training had, and its nodes only words that occurred there.

    Where scores are not finite, prediction and probabilities are blank; such graphs are counted on stderr.

    A file appears under its name when it is complete. With --resume, which only Parquet files allow, those that are
    there are kept: they tell which model, data set, number of graphs, options and shard they are of.

    Keys of --json: model, dataset, operator, out, files, kept, graphs, not_finite, predicted. The last three count
    what was not kept.
    """
    place = device_of(device)
    if out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--out must end with .csv or .parquet, got {out}")
    if out.suffix == ".parquet":
        library("pyarrow", f"--out {out}, other than .csv,")
    elif resume:
        raise ValueError(f"--resume needs --out with a name *.parquet, whose files tell what they are of, got {out}")
    paths = paths_of(out, chosen(shard, shards))
    source = datasets.find(dataset, root)
    for path in paths.values():
        check_output(path, is_predictions, source, checkpoint)
    trained = Trained.load(checkpoint, place, operators)
    if download:
        source = source.downloaded()
    graphs = trained.open(source, undirected, unknown_words)
    made_of = {
        "model": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
        "dataset": source.title,
        "num_graphs": len(graphs),
        "operator": trained.operator,
        "edge_options": dict(graphs.edge_options),
        "unknown_words": unknown_words,
    }
    there = kept(paths, made_of, _made_of) if resume else {}
    done = _Done(trained, np.zeros(trained.model.config["out_features"], np.int64))
    number, before = num_graphs_of(paths, len(graphs)), num_graphs_of(there, len(graphs))
    with progress_bar("graphs", number, True, done=before) as advance:
        for one, path in paths.items():
            if one not in there:
                first = 0 if one is None else range_of_shard(one, len(graphs))[0]
                with files.replacing(path) as temporary, _table_writer(temporary, out.suffix, made_of) as write:
                    for columns in done.predict(graphs.chunks(one), first, place):
                        write(columns)
                        advance("", len(columns["graph"]))
    done.empty.warn(done.number)
    done.not_finite.warn(done.number)
    facts = {
        "model": checkpoint,
        "dataset": source.title,
        "operator": trained.operator,
        "out": out,
        "files": [*paths.values()],
        "kept": [*there.values()],
        "graphs": done.number,
        "not_finite": done.not_finite.number,
        "predicted": None
        if trained.model.multilabel
        else dict(zip(trained.names, done.predicted.tolist(), strict=True)),
    }
    told = f"{as_text([*paths.values()])}: {number:,} graphs"
    return Report(facts, [Text(told + f", {before:,} of them in {len(there)} file(s) that were there" * bool(there))])


@dataclass
class _Done:
    """What has been predicted."""

    trained: Trained
    predicted: np.ndarray  # how often each class was
    number: int = 0
    empty: Odd = field(default_factory=lambda: Odd(NO_NODES))
    not_finite: Odd = field(default_factory=lambda: Odd("scores that are not finite, which are left blank"))

    def predict(self, parts: Iterator[Part], first: int, device: torch.device) -> Iterator[Columns]:
        """Yield the rows of graphs, of which the first has this number."""
        for graphs, names, _ in parts:
            known = names or [*map(str, range(first, first + len(graphs)))]
            self.empty.add_empty(graphs, known)
            begin = 0
            for scores in training.predict_chunks(self.trained.model, graphs.to(device), self.trained.operator):
                chunk = slice(begin, begin := begin + len(scores))
                columns: Columns = {"graph": np.arange(first + chunk.start, first + chunk.stop)}
                if names is not None:
                    columns["name"] = np.array(known[chunk], dtype=object)
                yield columns | self._columns(scores, known[chunk])
            first += len(graphs)
            self.number += len(graphs)
            del graphs  # which need not be in memory when the next are read

    def _columns(self, scores: Tensor, names: list[str]) -> Columns:
        model, of = self.trained.model, self.trained.names
        wrong = training.not_finite(scores).cpu()
        self.not_finite.add(wrong, names)
        probabilities = model.probabilities(scores).cpu().numpy()
        kind = "task" if model.multilabel else "class"
        columns = {f"{kind}_{name}": values for name, values in zip(of, probabilities.T, strict=True)}
        if model.multilabel:
            return columns
        best = probabilities.argmax(1)
        self.predicted += np.bincount(np.delete(best, wrong), minlength=len(of))
        prediction = np.array(of, dtype=object)[best]
        prediction[wrong] = None
        return {"prediction": prediction, **columns}


Columns = dict[str, np.ndarray]


def _made_of(path: Path) -> str | None:
    """What a Parquet file tells about that."""
    from pyarrow.parquet import read_schema

    told = (read_schema(path).metadata or {}).get(METADATA)
    return None if told is None else told.decode()


@contextmanager
def _table_writer(path: Path, suffix: str, made_of: dict[str, Any]) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that writes some rows at a time."""
    import pandas

    if suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            yield lambda columns: pandas.DataFrame(columns).to_csv(file, index=False, header=file.tell() == 0)
        return
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    with ExitStack() as stack:
        held: list[Any] = []  # of a row group
        writer: Any = None

        def write(columns: Columns) -> None:
            types = {name: pyarrow.string() if values.dtype == object else None for name, values in columns.items()}
            rows = {  # where NaN is null, too
                name: pyarrow.array(values, types[name], from_pandas=True) for name, values in columns.items()
            }
            held.append(pyarrow.table(rows, metadata={METADATA: json.dumps(made_of)}))
            if sum(map(len, held)) >= ROWS:
                flush()

        def flush() -> None:
            nonlocal writer
            rows = pyarrow.concat_tables(held)
            held.clear()
            writer = writer or stack.enter_context(ParquetWriter(path, rows.schema))
            writer.write_table(rows)

        yield write
        if held:
            flush()
