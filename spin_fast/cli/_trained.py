"""What applies a trained model: the model of a file, and graphs read as those of its training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from .. import datasets, training
from .._common.check import Argument
from ..datasets.summary import directions_of
from ..graphs.batch import EdgeOptions, GraphBatch
from ..nn import GraphClassifier
from ..training.checkpoints import Saved
from ._app import console
from ._errors import as_option
from ._graphs import read_dataset
from ._options import Device, data_option, operator_of, operator_option

CHUNK_GRAPHS = 1024  # of a folder that are read at a time

Checkpoint = Annotated[Path, typer.Argument(metavar="MODEL", help="A model that spin-fast train has written.")]
UndirectedAsTrained = Annotated[
    bool | None,
    data_option(
        "--undirected/--no-undirected",
        help="Your own graphs: each edge is listed once, for both directions, or in both.",
        show_default="as in training",
    ),
]
OperatorsAsTrained = Annotated[list[str] | None, operator_option("that of the model")]
ComputeDevice = Annotated[Device, typer.Option(help="Where to compute.")]


class Part(NamedTuple):
    """Graphs, their names if they are of a folder, and how many there are in all if that is known."""

    graphs: GraphBatch
    names: list[str] | None
    num_graphs: int | None


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

    def read(self, source: datasets.Source, undirected: bool | None) -> Iterator[Part]:
        """Graphs that fit the model, part by part; of a model that does not know they tell whether it has tasks."""
        parts = _parts(source, self.metadata, undirected)
        first = next(parts, None)
        if first is None or len(first.graphs) == 0:
            raise ValueError(f"{source.name} has no graphs")
        width, wanted, y = first.graphs.num_features, self.model.config["in_features"], first.graphs.y
        if self.model.node_features is None and width != wanted:
            known = "node_features" in self.metadata
            how = "" if known else "; node_features=... in save_checkpoint says which to read"
            raise ValueError(
                f"{source.name} has {width} feature(s) per node, and {self.checkpoint} takes {wanted}{how}"
            )
        if self.model.multilabel is None:  # the checkpoint does not tell
            self.model.multilabel = len(self.classes) == 1 or (y is not None and y.is_floating_point())
        yield from itertools.chain([first], parts)


def _classes(checkpoint: Path, metadata: dict[str, Any], number: int) -> list[str]:
    """The names of the classes; their numbers if the checkpoint has no names."""
    if (classes := metadata.get("classes")) is None:
        return list(map(str, range(number)))
    if not isinstance(classes, list) or len({*map(str, classes)}) != number or len(classes) != number:
        raise ValueError(f"classes of {checkpoint} must be {number} different names, one per output, got {classes}")
    return list(map(str, classes))


def _parts(source: datasets.Source, metadata: dict[str, Any], undirected: bool | None) -> Iterator[Part]:
    """Graphs as in training."""
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
        yield Part(part.graphs, None if folder is None else part.names, num_graphs)
