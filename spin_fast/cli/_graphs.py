"""Read the graphs of a dataset, and describe them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from torch import Tensor

from .. import datasets
from ..datasets.summary import directions_of
from ..graphs.batch import GraphBatch
from ._app import console


def read_dataset(source: datasets.Source, **options: Any) -> datasets.Folder:
    """Read a dataset by ``source.read`` while the terminal says so; refuse ``--undirected`` if edges have a reverse."""
    with console.status(f"reading {source.title}"):
        read = source.read(**options)
        twice = options.get("undirected") and directions_of(read.graphs).twice
    if twice:
        raise ValueError(f"--undirected: {source.name} lists each edge in both directions already; leave it out")
    return read


def hint_on_edges(source: datasets.Source, graphs: GraphBatch) -> str | None:
    """Name the option for a folder of one's own whose edges have one direction."""
    if not source.is_own or not directions_of(graphs).one_way:
        return None
    return "if each edge is listed once, for both directions, add --undirected"


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
    words = {item["column"]: item.get("categories") for item in read.features}
    return ", ".join(
        name if of is None else f"{name} ({len(of):,} word{'s' * (len(of) != 1)})" for name, of in words.items()
    )


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


def tell(source: datasets.Source, read: datasets.Folder, chosen_features: object) -> None:
    """Print a description of the graphs, and the hints."""
    graphs = read.graphs
    number = max(len(graphs), 1)
    classes = "" if graphs.y is None or graphs.y.is_floating_point() else f"{int(graphs.y.max()) + 1} classes, "
    console.print(
        f"[bold]{escape(source.title)}[/bold]: {len(graphs):,} graphs, {classes}{graphs.num_nodes / number:.2f} nodes "
        f"and {graphs.num_edges / number:.2f} directed edges on average, {graphs.num_features} feature(s) per node"
    )
    if (columns := columns_of(read)) is not None:
        console.print(f"node features: {escape(columns)}")
    empty = Odd(NO_NODES)
    empty.add_empty(graphs, read.names)
    empty.warn(len(graphs))
    if (hint := hint_on_edges(source, graphs)) is not None:
        console.print(f"edges are directed: {hint}")
    if (hint := hint_on_features(read, chosen_features)) is not None:
        console.print(f"there are also: {hint}")
