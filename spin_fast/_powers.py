"""The powers of the graphs in a batch, all at once or chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import ops, reference
from .graphs import GraphBatch


def runs(ptr: Tensor, num_nodes: int) -> Iterator[tuple[int, int]]:
    """Where runs of graphs begin and end, of at most so many nodes, but at least one graph."""
    begin = 0
    while begin < ptr.numel() - 1:
        end = max(int(torch.searchsorted(ptr, ptr[begin] + num_nodes, right=True)) - 1, begin + 1)
        yield begin, end
        begin = end


def powers_of(graphs: GraphBatch, num_hops: int, operator: str, canonical: bool) -> Tensor:
    """The powers of the graphs, ``[R + 1, N, d]``."""
    arrays = (graphs.indptr, graphs.indices, graphs.x.detach(), num_hops, operator)
    weight = graphs.edge_weight
    return ops.power_features(*arrays, ptr=graphs.ptr, edge_weight=weight, canonical=canonical, checked=True)


def check_weights(graphs: GraphBatch, operator: str) -> None:
    """Name a wrong edge weight by its node, before any work."""
    if graphs.edge_weight is not None:
        reference.operator_scales(graphs.indptr, operator, graphs.edge_weight)


def power_chunks(
    graphs: GraphBatch,
    num_hops: int,
    operator: str,
    num_bytes: int,
    bytes_beside: int = 0,
    *,
    canonical: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive chunks of the graphs: their powers ``[R + 1, n, d]``, which the next chunk overwrites, and offsets.

    Args:
        num_bytes: of the powers of a chunk at most, and of its arcs at most, unless it is a single graph.
        bytes_beside: count for each node as well.
        canonical: as in :func:`spin_fast.power_features`.
    """
    check_weights(graphs, operator)
    bytes_per_node = (num_hops + 1) * graphs.num_features * graphs.x.element_size() + bytes_beside
    arrays = (graphs.indptr, graphs.indices, graphs.x.detach(), num_hops, operator)
    weight = graphs.edge_weight
    memory = graphs.x.new_empty(0)
    for begin, end in graphs.chunks(num_bytes // max(bytes_per_node, 1), num_bytes // graphs.indices.element_size()):
        ptr = graphs.ptr[begin : end + 1]
        shape = (num_hops + 1, int(ptr[-1] - ptr[0]), graphs.num_features)
        if memory.numel() < math.prod(shape):
            memory = graphs.x.new_empty(math.prod(shape))
        out = memory[: math.prod(shape)].view(shape)
        ops.power_features(*arrays, ptr=ptr, edge_weight=weight, out=out, canonical=canonical, checked=True)
        yield out, ptr - ptr[0]
