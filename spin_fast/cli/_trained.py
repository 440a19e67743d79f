"""What applies a trained model: the model of a file, and graphs read as those of its training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from .. import datasets, training
from .._common.check import Argument
from ..datasets.columns import LEAVE_OUT
from ..datasets.reader import Shard
from ..datasets.summary import directions_of
from ..graphs.batch import EdgeOptions, GraphBatch
from ..nn import GraphClassifier
from ..training.checkpoints import Saved
from ._app import console
from ._errors import as_option
from ._graphs import CHUNK_GRAPHS
from ._options import Device, data_option, operator_of, operator_option

Checkpoint = Annotated[Path, typer.Argument(metavar="MODEL", help="A model that spin-fast train has written.")]
UndirectedAsTrained = Annotated[
    bool | None,
    data_option(
        "--undirected/--no-undirected",
        help="Your own graphs: each edge is listed once, for both directions, or in both.",
        show_default="as in training",
    ),
]
UnknownWords = Annotated[
    bool,
    data_option("--unknown-words", help="Your own graphs: words that the training had not are 0 in all columns."),
]
OperatorsAsTrained = Annotated[list[str] | None, operator_option("that of the model")]
ComputeDevice = Annotated[Device, typer.Option(help="Where to compute.")]


class Part(NamedTuple):
    """Graphs, and their names and those of their nodes if they are of a folder that has some."""

    graphs: GraphBatch
    names: list[str] | None
    nodes: list[str] | None


@dataclass
class Trained:
    """The model of a file, its operator, and what the file says about its training."""

    checkpoint: Path
    model: Saved
    operator: str | None
    metadata: dict[str, Any]
    classes: list[str]

    @classmethod
    def load(cls, checkpoint: Path, device: torch.device, operators: list[str] | None) -> Trained:
        model, metadata = training.load_checkpoint(checkpoint)
        model.to(device)
        asked = operator_of(operators)
        if not isinstance(model, GraphClassifier):
            if asked is not None:
                raise ValueError(f"--operator {asked}: {checkpoint} is a {type(model).__name__}, which has none")
        elif asked is not None and model.operator not in (None, asked):
            raise ValueError(f"--operator {asked}: {checkpoint} was trained with {model.operator}")
        elif asked is None and model.operator is None:
            raise ValueError(f"--operator must be given, that of training: {checkpoint} does not tell it")
        classes = _classes(checkpoint, metadata, model.config["out_features"])
        return cls(checkpoint, model, model.check_operator(asked), metadata, classes)

    @property
    def names(self) -> list[str]:
        """Those of the classes, or of the tasks; their numbers where the checkpoint knows none."""
        if not self.model.multilabel:
            return self.classes
        return [str(name) for name in self.metadata.get("task_names") or range(self.model.config["out_features"])]

    def open(self, source: datasets.Source, undirected: bool | None, unknown_words: bool) -> Graphs:
        """Graphs that are read as those of the training were."""
        graphs = Graphs(self, source, undirected, unknown_words)
        if len(graphs) == 0:
            raise ValueError(f"{source.name} has no graphs")
        return graphs

    def check(self, graphs: GraphBatch, dataset: str) -> None:
        """Check that graphs fit the model; of a model that does not know they tell whether it has tasks."""
        width, wanted, y = graphs.num_features, self.model.config["in_features"], graphs.y
        if self.model.node_features is None and width != wanted:
            known = "node_features" in self.metadata
            how = "" if known else "; node_features=... in save_checkpoint says which to read"
            raise ValueError(f"{dataset} has {width} feature(s) per node, and {self.checkpoint} takes {wanted}{how}")
        if self.model.multilabel is None:  # the checkpoint does not tell
            self.model.multilabel = len(self.classes) == 1 or (y is not None and y.is_floating_point())


def _classes(checkpoint: Path, metadata: dict[str, Any], number: int) -> list[str]:
    """The names of the classes; their numbers if the checkpoint has no names."""
    if (classes := metadata.get("classes")) is None:
        return list(map(str, range(number)))
    if not isinstance(classes, list) or len({*map(str, classes)}) != number or len(classes) != number:
        raise ValueError(f"classes of {checkpoint} must be {number} different names, one per output, got {classes}")
    return list(map(str, classes))


class Graphs:
    """The graphs of a data set, read as those of a training were; ``len(graphs)`` is their number.

    Attributes:
        edge_options: how edges are read.
    """

    def __init__(self, trained: Trained, source: datasets.Source, undirected: bool | None, unknown_words: bool) -> None:
        self._trained, self._source, self._undirected = trained, source, undirected
        metadata, dataset = trained.metadata, source.name
        self._of_training = EdgeOptions(**(metadata.get("edge_options") or {}))
        if not source.is_own:  # it lists both directions of an edge, and allows no other options
            others = [as_option(Argument(*item)) for item in self._of_training.items() if item[0] != "undirected"]
            if others:
                raise ValueError(
                    f"{dataset} is read as it is, and the model was trained with {' '.join(others)}; "
                    "instead of a name give the path of a folder with its files"
                )
            self._of_training = EdgeOptions()
        self.edge_options = self._of_training
        if undirected is not None:
            self.edge_options = self._of_training | EdgeOptions(undirected=undirected)
        members = getattr(trained.model, "members", [trained.model])
        dtypes = (next(member.parameters()).dtype for member in members if isinstance(member, GraphClassifier))
        dtype = next(dtypes, torch.float32)  # which a SubtreeLinear takes, whose weights are float64
        features: Any = metadata.get("node_features")
        if unknown_words:
            columns = features if isinstance(features, list) and source.is_own else []
            words = [item.get("categories") if isinstance(item, dict) else None for item in columns]
            if not any(isinstance(of, list) for of in words):
                raise ValueError(f"--unknown-words: {trained.checkpoint} and {dataset} must have columns of words")
            features = [
                item | {"categories": [*of, None]} if isinstance(of, list) and None not in of else item
                for item, of in zip(columns, words, strict=True)
            ]
        options: dict[str, Any] = {"features": features, "dtype": dtype, **self.edge_options}
        if source.is_own:
            options |= {"label": None, "edge_weight": None if metadata.get("weighted") is False else "weight"}
            untold = [] if "node_features" in metadata else ["columns are taken in the order of the file"]
            if "edge_options" not in metadata and undirected is None:
                untold.append("edges as they are listed")
            if untold:
                told = f"{trained.checkpoint} does not say how its graphs were read: {', '.join(untold)}"
                print(told, file=sys.stderr)
        with self._features_named(), console.status(f"reading {source.title}"):
            self._reader = source.open(**options)
            self._num_graphs = len(self._reader)

    def __len__(self) -> int:
        return self._num_graphs

    def chunks(self, shard: Shard | None = None) -> Iterator[Part]:
        """Some graphs at a time, each of which is checked."""
        chunks = self._reader.chunks(CHUNK_GRAPHS, shard)
        while True:
            with self._features_named():
                read = next(chunks, None)
            if read is None:
                return
            self._check(read)
            part = Part(read.graphs, read.names if self._source.is_own else None, read.nodes)
            del read
            yield part
            del part  # which need not be in memory when the next is read

    @contextmanager
    def _features_named(self) -> Iterator[None]:
        """Name the features of the training, for which nobody has asked here, where a data set lacks them."""
        try:
            yield
        except datasets.DatasetError as error:
            features = self._trained.metadata.get("node_features")
            if LEAVE_OUT in str(error):
                raise ValueError(f"{error.told(as_option)}, as --unknown-words does") from error
            if error.argument != "features" or features is None:
                raise
            columns: Any = [features] if isinstance(features, str) else features
            names = ", ".join(str(item["column"] if isinstance(item, dict) else item) for item in columns)
            told = f"{self._source.name} has no such node features as the model was trained on: {names}"
            raise ValueError(told) from error

    def _check(self, read: datasets.Folder) -> None:
        dataset, metadata, graphs = self._source.name, self._trained.metadata, read.graphs
        self._trained.check(graphs, dataset)
        if metadata.get("weighted") and read.weighted is False and graphs.num_edges:
            raise ValueError(f"{dataset} has no edge weights, and the model was trained with them")
        directions = directions_of(graphs) if self._undirected is None else None
        is_telling = len(graphs) in (CHUNK_GRAPHS, len(self))  # fewer graphs may be symmetric by chance
        if directions and directions.twice and is_telling and self._of_training.get("undirected"):
            raise ValueError(
                f"{dataset} lists each edge in both directions, or twice, and the model was trained with --undirected; "
                "list each once, or add --no-undirected where its reverse is listed too, or --undirected to read them "
                "as in training"
            )
        if directions and directions.one_way and metadata.get("directed") is False:
            raise ValueError(
                f"{dataset} has directed edges, and the model was trained on undirected graphs; add --undirected "
                "if each edge is listed once, for both directions, or else --no-undirected"
            )
