"""The powers of the graphs in a batch, at once or in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._common import check
from .._common.indexing import offsets, prepared_by
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures
from ..ops import reference

EDGE_BYTES = 2  # that an edge counts: less than it takes, since it is only read


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


class PowerChunk:
    """Consecutive graphs of a batch, whose powers are computed when they are asked for.

    Attributes:
        graphs: the batch.
        node_ptr: ``[g + 1]`` int64, the nodes of the graphs in it.
    """

    def __init__(self, graphs: GraphBatch, node_ptr: Tensor, compute: Callable[[GraphBatch, Tensor], Tensor]) -> None:
        self.graphs, self.node_ptr = graphs, node_ptr
        self._compute = compute
        self._powers: Tensor | None = None

    def __len__(self) -> int:
        return self.node_ptr.numel() - 1

    @property
    def num_nodes(self) -> int:
        return int(self.node_ptr[-1] - self.node_ptr[0])

    @property
    def ptr(self) -> Tensor:
        """``[g + 1]`` int64, the nodes of the graphs in the powers."""
        return self.node_ptr - self.node_ptr[0]

    @property
    def powers(self) -> Tensor:
        """``[B, n, d]``, which those of the next chunk overwrite."""
        if self._powers is None:
            self._powers = self._compute(self.graphs, self.node_ptr)
        return self._powers


def power_chunks(
    graphs: GraphBatch,
    num_hops: int,
    operator: str,
    num_bytes: int,
    bytes_beside: int = 0,
    *,
    float64_sums: bool = False,
    any_edges: bool = False,
) -> Iterator[PowerChunk]:
    """Yield consecutive chunks of the graphs.

    Args:
        num_bytes: bounds the powers of a chunk, and its edges, unless it is a single graph.
        bytes_beside: more bytes per node that count.
        float64_sums: as in :func:`spin_fast.power_features`.
        any_edges: edges do not count.
    """
    check_weights(graphs, operator)
    num_nodes, num_edges = _limits(graphs.x, num_hops, operator, num_bytes, bytes_beside)
    limits = num_nodes, graphs.num_edges if any_edges else num_edges
    chunks = ((graphs, begin, end) for begin, end in graphs.chunks(*limits))
    yield from _chunks(chunks, num_hops, operator, float64_sums)


def _limits(x: Tensor, num_hops: int, operator: str, num_bytes: int, bytes_beside: int) -> tuple[int, int]:
    """Nodes and edges of a chunk; they depend on the graphs that are joined, but not on the dtype of their indices."""
    bytes_per_node = num_branches_of(num_hops, operator) * x.shape[1] * x.element_size() + bytes_beside
    return num_bytes // max(bytes_per_node, 1), num_bytes // EDGE_BYTES


def _chunks(
    ranges: Iterable[tuple[GraphBatch, int, int]], num_hops: int, operator: str, float64_sums: bool
) -> Iterator[PowerChunk]:
    memory = None

    def powers(graphs: GraphBatch, ptr: Tensor) -> Tensor:
        nonlocal memory
        shape = (num_branches_of(num_hops, operator), int(ptr[-1] - ptr[0]), graphs.num_features)
        if memory is None or memory.numel() < math.prod(shape):
            memory = graphs.x.new_empty(math.prod(shape))
        out = memory[: math.prod(shape)].view(shape)
        return _write(graphs, num_hops, operator, out, ptr=ptr, float64_sums=float64_sums)

    for graphs, begin, end in ranges:
        yield PowerChunk(graphs, graphs.ptr[begin : end + 1], powers)
        del graphs  # which need not be in memory when the next are made


class Stream:
    """Chunks of graphs, which are read once and must be alike.

    Attributes:
        x: ``[0, d]``, of the dtype and device of all chunks.
    """

    def __init__(self, chunks: Iterable[GraphBatch], operator: str) -> None:
        if not isinstance(chunks, Iterable):
            raise TypeError(f"chunks must be an iterable of GraphBatches, got {type(chunks).__name__}")
        self._operator = operator
        self._sizes: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._graphs = self._read(chunks)
        self._first = [*islice(self._graphs, 1)]
        if not self._first:
            raise ValueError("chunks must yield at least one GraphBatch, got none")
        self.x = self._first[0].x.detach().new_empty(0, self._first[0].num_features)
        self._node_features = self._first[0].node_features

    def _read(self, chunks: Iterable[GraphBatch]) -> Iterator[GraphBatch]:
        first: dict[str, str] = {}
        for graphs in chunks:
            number = len(self._sizes)
            if not isinstance(graphs, GraphBatch):
                raise TypeError(f"chunks must yield GraphBatches, got {type(graphs).__name__} as chunk {number}")
            kind = _kind(graphs)
            first = first or kind
            for name, value in kind.items():
                if value != first[name]:
                    raise ValueError(
                        f"chunks must be alike in {name}, got {first[name]} in chunk 0 and {value} in chunk {number}"
                    )
            try:
                check_weights(graphs, self._operator)
            except ValueError as error:
                raise ValueError(f"{error} of chunk {number}") from error
            self._sizes.append(graphs.num_nodes_per_graph)
            if graphs.y is not None:
                self._labels.append(graphs.y)
            yield graphs
            del graphs  # which need not be in memory when the next are made

    def __iter__(self) -> Iterator[GraphBatch]:
        """The chunks as they come."""
        yield self._first.pop()
        yield from self._graphs

    def power_chunks(self, num_hops: int, num_bytes: int, bytes_beside: int) -> Iterator[PowerChunk]:
        """What :func:`power_chunks` yields of all graphs in one batch, with ``float64_sums``."""
        limits = _limits(self.x, num_hops, self._operator, num_bytes, bytes_beside)
        return _chunks(self._cut(*limits), num_hops, self._operator, True)

    def _cut(self, num_nodes: int, num_edges: int) -> Iterator[tuple[GraphBatch, int, int]]:
        """Yield the chunks that :meth:`GraphBatch.chunks` makes of all graphs in one batch, as ranges of a batch."""
        held: list[GraphBatch] = []  # of a chunk to which more graphs may belong
        room = num_nodes, num_edges
        for graphs in self:
            begin, end_of_chunk = 0, graphs.ends_of_chunks()
            while begin < len(graphs):
                end = end_of_chunk(begin, *room)
                if not held:
                    end = max(end, begin + 1)
                if end == len(graphs):
                    held.append(graphs if begin == 0 else GraphBatch.concatenate([graphs[begin:]]))  # a copy
                    room = room[0] - held[-1].num_nodes, room[1] - held[-1].num_edges
                elif held:
                    whole = GraphBatch.concatenate([*held, graphs[begin:end]])
                    held, room = [], (num_nodes, num_edges)
                    yield whole, 0, len(whole)
                    del whole
                else:
                    yield graphs, begin, end
                begin = end
            del graphs
        if held:
            whole = GraphBatch.concatenate(held) if len(held) > 1 else held.pop()
            yield whole, 0, len(whole)

    @property
    def told(self) -> tuple[Tensor, Tensor | None, str, NodeFeatures | None]:
        """Of all graphs that have been read: node offsets, labels, the operator, and what has transformed them."""
        labels = torch.cat(self._labels) if self._labels else None
        return offsets(torch.cat(self._sizes)), labels, self._operator, self._node_features


def _kind(graphs: GraphBatch) -> dict[str, str]:
    """Properties that chunks of one stream share."""
    labels = "none" if graphs.y is None else f"{check.shown(graphs.y.dtype)} {['G', *graphs.y.shape[1:]]}"
    return {
        "num_features": str(graphs.num_features),
        "dtype": check.shown(graphs.x.dtype),
        "device": str(graphs.x.device),
        "labels": labels.replace("'", ""),
        "edge weights": "none" if graphs.edge_weight is None else "some",
        "what has transformed them": prepared_by(graphs),
    }
