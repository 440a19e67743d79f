"""Read the graphs of a dataset, and describe them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from torch import Tensor

from .. import datasets
from ..datasets.reader import Shard
from ..datasets.summary import directions_of
from ..graphs.batch import GraphBatch
from ._app import console

CHUNK_GRAPHS = 1024  # that are read at a time


def read_dataset(source: datasets.Source, **options: Any) -> datasets.Folder:
    """Read a dataset by ``source.read`` while the terminal says so; refuse ``--undirected`` if edges have a reverse."""
    with console.status(f"reading {source.title}"):
        read = source.read(**options)
        if options.get("undirected") and directions_of(read.graphs).twice:
            raise listed_twice(source)
    return read


def open_dataset(source: datasets.Source, **options: Any) -> datasets.Reader:
    """The same by ``source.open``; graphs that are read some at a time are for the caller to refuse."""
    with console.status(f"reading {source.title}"):
        reader = source.open(**options)
        if reader.whole is not None and options.get("undirected") and directions_of(reader.whole.graphs).twice:
            raise listed_twice(source)
    return reader


def listed_twice(source: datasets.Source) -> ValueError:
    return ValueError(
        f"--undirected: {source.name} lists each edge in both directions already, or twice; leave it out, or add "
        "--coalesce max"
    )


def hint_on_edges(source: datasets.Source, graphs: GraphBatch) -> str | None:
    """Name the option for a folder of one's own whose edges have one direction."""
    return BOTH_WAYS if source.is_own and directions_of(graphs).one_way else None


def hint_on_features(read: datasets.Folder, chosen: object) -> str | None:
    """Name the option for node features that a TU set has and that are not used, unless some were ``chosen``."""
    if chosen is not None or not read.unused:
        return None
    every = "+".join(part for part in ("attribute", "label") if part in read.unused or part in str(read.features))
    return f"{' and '.join(f'node {part}s' for part in read.unused)}, which --node-features {every} uses"


def columns_of(read: datasets.Folder) -> str | None:
    """The columns of one's own folder that became features, with the number of words of each that has words."""
    if not isinstance(read.features, list):
        return None
    words = {item["column"]: sum(word is not None for word in item.get("categories", ())) for item in read.features}
    return ", ".join(f"{name} ({of:,} word{'s' * (of != 1)})" if of else name for name, of in words.items())


@dataclass
class Odd:
    """How many graphs have something that is mostly a mistake, and which is the first."""

    what: str
    number: int = 0
    first: str = ""

    def add(self, wrong: Tensor, names: Sequence[str]) -> None:
        """Count the graphs at these positions among ``names``."""
        if len(wrong):
            self.first = self.first if self.number else names[int(wrong[0])]
            self.number += len(wrong)

    def add_empty(self, graphs: GraphBatch, names: Sequence[str]) -> None:
        self.add((graphs.ptr.diff() == 0).nonzero()[:, 0], names)

    def warn(self, num_graphs: int) -> None:
        """Say so on stderr."""
        if self.number:
            has, first = ("has", "it is") if self.number == 1 else ("have", "the first is")
            told = f"{self.number:,} of {num_graphs:,} graphs {has} {self.what}, {first} {self.first}"
            print(told, file=sys.stderr)


NO_NODES = "no nodes"
BOTH_WAYS = "if each edge is listed once, for both directions, add --undirected"


def title_of(dataset: str, shard: Shard | None) -> str:
    return dataset if shard is None else f"{dataset}, shard {shard[0]} of {shard[1]}"


class Description:
    """What is told of graphs, which may come a chunk at a time, and may be those of a shard.

    Attributes:
        facts: of reading, for a model's metadata.
        twice: whether most edges are listed twice, in each chunk that has any.
    """

    def __init__(self, source: datasets.Source, chosen_features: object, shard: Shard | None = None) -> None:
        self._source, self._chosen_features, self._title = source, chosen_features, title_of(source.title, shard)
        self._columns: str | None = None
        self._unused: str | None = None
        self._num_graphs = self._num_nodes = self._num_edges = self._num_classes = self._num_features = 0
        self._num_tasks = self._num_labels = 0
        self._empty = Odd(NO_NODES)
        self.facts: dict[str, Any] = {"weighted": False, "directed": False}
        self.twice: bool | None = None

    def add(self, read: datasets.Folder) -> None:
        graphs = read.graphs
        self._num_graphs += len(graphs)
        self._num_nodes += graphs.num_nodes
        self._num_edges += graphs.num_edges
        self._num_features = graphs.num_features
        if graphs.y is not None and graphs.y.is_floating_point():
            self._num_tasks = graphs.y.shape[1]
            self._num_labels += int((~graphs.y.isnan()).sum())
        elif read.classes is not None:
            self._num_classes = len(read.classes)
        elif graphs.y is not None and len(graphs):
            self._num_classes = max(self._num_classes, int(graphs.y.max()) + 1)
        self._empty.add_empty(graphs, read.names)
        if graphs.num_edges:
            directions = directions_of(graphs)
            self.facts["directed"] |= directions.one_way
            self.twice = directions.twice and self.twice is not False
        self.facts["weighted"] |= bool(read.weighted)
        self.facts |= {"node_features": read.features, "classes": read.classes, "task_names": read.tasks}
        self._columns, self._unused = columns_of(read), hint_on_features(read, self._chosen_features)

    def tell(self) -> None:
        """Print it, and the hints."""
        number = max(self._num_graphs, 1)
        classes = f"{self._num_classes} classes, " if self._num_classes else ""
        if self._num_tasks:
            known = f"{self._num_labels:,} of {self._num_tasks * self._num_graphs:,} labels"
            classes = f"{self._num_tasks} task(s) with {known}, "
        console.print(
            f"[bold]{escape(self._title)}[/bold]: {self._num_graphs:,} graphs, {classes}"
            f"{self._num_nodes / number:.2f} nodes and {self._num_edges / number:.2f} directed edges on average, "
            f"{self._num_features} feature(s) per node"
        )
        if self._columns is not None:
            console.print(f"node features: {escape(self._columns)}")
        self._empty.warn(self._num_graphs)
        if self._source.is_own and self.facts["directed"]:
            console.print(f"edges are directed: {BOTH_WAYS}")
        if self._unused is not None:
            console.print(f"there are also: {self._unused}")


def tell(source: datasets.Source, read: datasets.Folder, chosen_features: object) -> None:
    """Print a description of the graphs, and the hints."""
    description = Description(source, chosen_features)
    description.add(read)
    description.tell()
