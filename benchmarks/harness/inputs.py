"""Inputs of the races: data sets, batches of them, and synthetic graphs of shapes that data sets do not have."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spin_fast import GraphBatch, datasets
from spin_fast.datasets.common import assemble

NUM_HOPS = 3
NUM_BRANCHES = NUM_HOPS + 1


class Input(NamedTuple):
    name: str
    graphs: GraphBatch


def batch(dataset: str, graphs: GraphBatch, size: int) -> Input:
    """A random batch of a data set; of less graphs than that, all."""
    size = min(size, len(graphs))
    ids = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0))[:size]
    return Input(f"{dataset}, {size} graphs", graphs[ids])


def tiny() -> Input:
    """One graph of the size of a molecule: its time is the overhead of a call."""
    return Input("1 graph of 30 nodes", datasets.erdos_renyi(1, 30, 0.1, num_features=16))


def skewed(num_features: int) -> Input:
    """One large graph among a thousand small ones: divided by graphs, most of the work is one thread's."""
    small = partial(datasets.erdos_renyi, 500, 30, 0.1, num_features)
    large = datasets.power_law(1, 100_000, 10.0, num_features=num_features)
    return Input(
        "100,000 nodes among 1,000 graphs of 30", GraphBatch.concatenate([small(seed=0), large, small(seed=1)])
    )


@cache
def _adjacency(num_nodes: int) -> GraphBatch:
    """One power-law graph, without features; a million nodes are drawn in some 20 seconds."""
    return datasets.power_law(num_nodes=num_nodes, num_features=0)


def one_graph(num_nodes: int, num_features: int) -> Input:
    """A power-law graph, of twenty edges per node, with random features."""
    graphs = _adjacency(num_nodes)
    x = torch.randn(graphs.num_nodes, num_features, generator=torch.Generator().manual_seed(0))
    name = f"one graph of {num_nodes:,} nodes, d = {num_features}"
    return Input(name, GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, x))


class Statistics(NamedTuple):
    """Of a data set: means per graph, ``spread`` the deviation of the logarithm of a graph's size.

    ``reach`` says where the edges of a tree lead, as a power of a uniform number: to any node before, or to the first
    ones, which become hubs; None for chains with branches, as in molecules. Nodes of one of the ``kinds`` have the same
    features.
    """

    graphs: int
    nodes: float
    edges: float
    features: int
    spread: float
    kinds: int = 0
    reach: float | None = None


STATISTICS = {
    "NCI1": Statistics(4110, 29.87, 32.30, 37, 0.42, kinds=37),
    "REDDIT-BINARY": Statistics(2000, 429.63, 497.75, 1, 0.85, reach=6.0),
    "ogbg-molhiv": Statistics(41127, 25.5, 27.5, 9, 0.45, kinds=60),
}


def stand_in(dataset: str, num_graphs: int | None = None) -> GraphBatch:
    """Random graphs with the statistics of a data set whose files are not there; labels mean nothing.

    A tree in each graph, and as many edges more, in molecules rings of six. The features are one-hot kinds, rows of
    small integers by kind, or degrees; few kinds are frequent.
    """
    facts = STATISTICS[dataset]
    number, rng = num_graphs or facts.graphs, np.random.default_rng(0)
    sizes = facts.nodes * rng.lognormal(-(facts.spread**2) / 2, facts.spread, number)
    sizes = np.maximum(sizes.round(), 2).astype(np.int64)
    ptr = np.concatenate([[0], sizes.cumsum()])
    first = np.repeat(ptr[:-1], sizes)
    node = np.arange(ptr[-1])
    place = node - first
    if facts.reach is None:
        target = np.maximum(place - rng.choice(3, len(node), p=(0.82, 0.14, 0.04)) - 1, 0)
    else:
        target = (place * rng.random(len(node)) ** facts.reach).astype(np.int64)
    tree = np.stack([node, first + target])[:, place > 0]
    chosen = rng.integers(0, len(node), round(1.2 * number * (facts.edges - facts.nodes + 1)))
    if facts.reach is None:
        more = np.stack([chosen, chosen - 5])[:, place[chosen] >= 5]
    else:
        length = np.repeat(sizes, sizes)[chosen] * rng.random(len(chosen)) ** facts.reach
        more = np.stack([chosen, first[chosen] + length.astype(np.int64)])
    edges = np.concatenate([tree, more], axis=1)
    x = None
    if facts.kinds:
        chance = 0.3 ** np.arange(facts.kinds)
        table = (
            np.eye(facts.kinds) if facts.kinds == facts.features else rng.integers(0, 7, (facts.kinds, facts.features))
        )
        x = torch.from_numpy(table[rng.choice(facts.kinds, len(node), p=chance / chance.sum())]).float()
    return assemble(edges, torch.from_numpy(ptr), x, torch.arange(number) % 2, undirected=True)


def real_or_stand_in(dataset: str, root: str | None, num_graphs: int | None = None) -> Input:
    """A data set if its files exist, else its stand-in; the name says which."""
    if num_graphs is None and dataset in datasets.names(root):
        return Input(dataset, datasets.load(dataset, root))
    return Input(f"{dataset} (stand-in)", stand_in(dataset, num_graphs))


def branches(graphs: GraphBatch, width: int) -> tuple[Tensor, Tensor]:
    """``z [R+1, N, h]``, as the MLPs of the branches give it, and ``w [R+1, h]``."""
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return random(NUM_BRANCHES, graphs.num_nodes, width), random(NUM_BRANCHES, width)
