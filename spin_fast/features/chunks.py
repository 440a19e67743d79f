"""The powers of the graphs in a batch, at once or in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..graphs.batch import GraphBatch
from ..ops import reference


def chunks_of(ptr: Tensor, num_nodes: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks ``(begin, end)`` of at most ``num_nodes`` nodes, and of at least one graph each."""
    begin = 0
    while begin < ptr.numel() - 1:
        end = max(int(torch.searchsorted(ptr, ptr[begin] + num_nodes, right=True)) - 1, begin + 1)
        yield begin, end
        begin = end


def num_branches_of(num_hops: int, operator: str) -> int:
    """Branch 0 and the hops of each operator."""
    return 1 + len(operator.split(",")) * num_hops


def powers_of(graphs: GraphBatch, num_hops: int, operator: str, float64_sums: bool) -> Tensor:
    """The powers of the graphs, ``[B, N, d]``: branch 0, then the hops of each operator in ``operator``."""
    out = None
    if "," in operator:
        out = graphs.x.new_empty(num_branches_of(num_hops, operator), *graphs.x.shape)
    return _write(graphs, num_hops, operator, out, ptr=graphs.ptr, float64_sums=float64_sums)


def _write(graphs: GraphBatch, num_hops: int, operator: str, out: Tensor | None, **options: Any) -> Tensor:
    """:func:`powers_of` into ``out``, which may be left out for a single operator."""
    arrays = (graphs.indptr, graphs.indices, graphs.x.detach(), num_hops)
    options |= {"edge_weight": graphs.edge_weight, "check_invariants": False}
    if out is None:
        return ops.power_features(*arrays, operator, **options)
    # Each operator writes X before its hops, over the last hop of the one before: so the last operator comes first.
    for number, name in reversed([*enumerate(operator.split(","))]):
        begin = number * num_hops
        ops.power_features(*arrays, name, out=out[begin : begin + num_hops + 1], **options)
    return out


def check_weights(graphs: GraphBatch, operator: str) -> None:
    """Raise a ValueError that names the node of a wrong edge weight, before any work."""
    if graphs.edge_weight is not None:
        for name in operator.split(","):
            reference.operator_scales(graphs.indptr, name, graphs.edge_weight)


def power_chunks(
    graphs: GraphBatch,
    num_hops: int,
    operator: str,
    num_bytes: int,
    bytes_beside: int = 0,
    *,
    float64_sums: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the powers ``[B, n, d]`` of consecutive chunks, which the next chunk overwrites, with node offsets.

    Args:
        num_bytes: bounds the powers of a chunk, and its edges, unless it is a single graph.
        bytes_beside: more bytes per node that count.
        float64_sums: as in :func:`spin_fast.power_features`.
    """
    check_weights(graphs, operator)
    num_branches = num_branches_of(num_hops, operator)
    bytes_per_node = num_branches * graphs.num_features * graphs.x.element_size() + bytes_beside
    memory = graphs.x.new_empty(0)
    for begin, end in graphs.chunks(num_bytes // max(bytes_per_node, 1), num_bytes // graphs.indices.element_size()):
        ptr = graphs.ptr[begin : end + 1]
        shape = (num_branches, int(ptr[-1] - ptr[0]), graphs.num_features)
        if memory.numel() < math.prod(shape):
            memory = graphs.x.new_empty(math.prod(shape))
        out = memory[: math.prod(shape)].view(shape)
        yield _write(graphs, num_hops, operator, out, ptr=ptr, float64_sums=float64_sums), ptr - ptr[0]
