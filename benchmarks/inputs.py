"""What the races run on: data sets, batches of them, and synthetic graphs of shapes that data sets do not have."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from spin_fast import GraphBatch, datasets

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
    """One graph as small as a molecule, where a call costs more than the work."""
    return Input("1 graph of 30 nodes", datasets.erdos_renyi(1, 30, 0.1, num_features=16))


def skewed(num_features: int) -> Input:
    """One large graph among a thousand small ones: who shares the work by graphs leaves it to one thread."""
    small = partial(datasets.erdos_renyi, 500, 30, 0.1, num_features)
    large = datasets.power_law(1, 100_000, 10.0, num_features=num_features)
    return Input("100,000 nodes among 1,000 graphs of 30", together([small(seed=0), large, small(seed=1)]))


@cache
def large_adjacency() -> GraphBatch:
    """One power-law graph of a million nodes and twenty million arcs, without features; drawn in some 20 seconds."""
    return datasets.power_law(num_features=0)


def large(num_features: int) -> Input:
    """That graph with random features."""
    graphs = large_adjacency()
    x = torch.randn(graphs.num_nodes, num_features, generator=torch.Generator().manual_seed(0))
    return Input(f"1M nodes, 20M arcs, d = {num_features}", GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, x))


def together(parts: list[GraphBatch]) -> GraphBatch:
    """The graphs of all parts, one after the other; features, but no labels."""
    first_node = torch.tensor([0, *(part.num_nodes for part in parts)]).cumsum(0).tolist()
    first_arc = torch.tensor([0, *(part.num_arcs for part in parts)]).cumsum(0).tolist()

    def joined(offsets: list[Tensor], firsts: list[int]) -> Tensor:
        """Offsets of all parts, each but the first without its leading 0."""
        return torch.cat(
            [part[min(i, 1) :] + first for i, (part, first) in enumerate(zip(offsets, firsts, strict=False))]
        )

    return GraphBatch(
        ptr=joined([part.ptr for part in parts], first_node),
        indptr=joined([part.indptr for part in parts], first_arc),
        indices=torch.cat([part.indices + first for part, first in zip(parts, first_node, strict=False)]),
        x=torch.cat([part.x for part in parts]),
    )


def branches(graphs: GraphBatch, width: int) -> tuple[Tensor, Tensor]:
    """``z [R+1, N, h]``, as the MLPs of the branches give it, and ``w [R+1, h]``."""
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return random(NUM_BRANCHES, graphs.num_nodes, width), random(NUM_BRANCHES, width)
