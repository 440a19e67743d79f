"""GraphBatch: many graphs as one block-diagonal CSR adjacency with node features and labels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from . import _check, ops

GraphIds = int | slice | list[int] | range | np.ndarray | Tensor


CPU = torch.device("cpu")
Arrays = TypeVar("Arrays")


def graph_ids(ids: GraphIds, num_graphs: int, device: torch.device = CPU) -> Tensor:
    """Turn an int, slice, index array, list or boolean mask into int64 graph ids in ``[0, num_graphs)`` on ``device``.

    What comes from the host is checked there and then moved without waiting. Ids that are on a GPU already and stay
    there are not read and so not checked; a mask there has to be read.

    Raises:
        TypeError: ``ids`` is none of these. IndexError: an id is out of range, or a mask has another length.
    """
    if isinstance(ids, slice):
        rising = (ids.step or 1) > 0
        chosen = torch.arange(num_graphs)[ids] if rising else torch.tensor(range(*ids.indices(num_graphs)))
        return without_waiting(chosen, device)
    if isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        chosen = torch.tensor([int(ids)])
    else:
        try:
            chosen = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"graph ids must be an int, slice, index array or mask, got {type(ids).__name__}"
            ) from error
    if chosen.device != device:
        chosen = chosen.cpu()
    if chosen.dtype == torch.bool:
        if chosen.shape != (num_graphs,):
            raise IndexError(f"a mask of graphs must have shape [{num_graphs}], got {list(chosen.shape)}")
        return without_waiting(chosen.nonzero().squeeze(1), device)
    if chosen.dim() != 1 or (chosen.numel() and chosen.dtype.is_floating_point):
        raise TypeError(f"graph ids must be one-dimensional integers, got {chosen.dtype} of shape {list(chosen.shape)}")
    chosen = chosen.to(torch.int64)
    if chosen.is_cpu and chosen.numel() and (chosen.min() < -num_graphs or chosen.max() >= num_graphs):
        bad = chosen[(chosen < -num_graphs) | (chosen >= num_graphs)][0].item()
        raise IndexError(f"graph id {bad} is out of range for {num_graphs} graphs")
    return without_waiting(torch.where(chosen < 0, chosen + num_graphs, chosen), device)


def without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """Move from the host to ``device``; to a GPU from page-locked memory, so that the host need not wait for it."""
    if device.type == "cuda" and values.is_cpu:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def with_arrays(container: Arrays, function: Callable[[Tensor], Tensor], *, but: Collection[str] = ()) -> Arrays:
    """A copy of a ``GraphBatch`` or ``PowerFeatures`` with ``function`` of every array; its contents are trusted."""
    changed = copy.copy(container)
    for name, value in vars(container).items():
        if isinstance(value, Tensor) and name not in but:
            object.__setattr__(changed, name, function(value))
    return changed


def ragged_arange(starts: Tensor, sizes: Tensor) -> Tensor:
    """Concatenate ``arange(start, start + size)`` over all pairs: ``[2, 9], [3, 2] -> [2, 3, 4, 9, 10]``."""
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    shifts = (starts - (ends - sizes)).repeat_interleave(sizes, output_size=total)
    return torch.arange(total, device=starts.device) + shifts


def offsets(sizes: Tensor) -> Tensor:
    """Offsets ``[n + 1]`` (int64) of ``n`` consecutive runs of the given sizes: ``[2, 3] -> [0, 2, 5]``."""
    return torch.nn.functional.pad(sizes.to(torch.int64).cumsum(0), (1, 0))


@dataclass(frozen=True, repr=False, eq=False)
class GraphBatch:
    """Graphs as flat arrays; graph ``g`` owns the nodes ``ptr[g]:ptr[g + 1]``.

    Contents are checked, and arrays made contiguous, once, here; the operations then trust them. On a GPU contents are
    not checked, which would wait for it: build on the CPU and move with :meth:`to`.

    Args:
        ptr: ``[G + 1]`` int64, node offsets of the graphs.
        indptr: ``[N + 1]`` int32 or int64, row offsets of the adjacency over all nodes.
        indices: ``[E]``, dtype of ``indptr``: for each row the columns (numbers over all nodes) that it gathers from.
            An undirected edge is two arcs. A column outside the row's graph is an error.
        x: ``[N, d]`` float32 or float64, node features.
        y: labels, first axis ``G``, or None.
        edge_weight: ``[E]``, dtype of ``x``, or None for ones.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    ptr: Tensor
    indptr: Tensor
    indices: Tensor
    x: Tensor
    y: Tensor | None = None
    edge_weight: Tensor | None = None

    def __post_init__(self) -> None:
        _check.tensor("x", self.x, ("N", "d"), _check.FLOATS)
        device, num_nodes = self.x.device, self.x.shape[0]
        _check.offsets_shape("ptr", self.ptr, device)
        _check.tensor("indptr", self.indptr, (num_nodes + 1,), _check.INTEGERS, device)
        _check.tensor("indices", self.indices, ("E",), (self.indptr.dtype,), device)
        if self.edge_weight is not None:
            _check.tensor("edge_weight", self.edge_weight, (self.indices.numel(),), (self.x.dtype,), device)
        if self.y is not None and (not isinstance(self.y, Tensor) or self.y.shape[:1] != (self.num_graphs,)):
            got = list(self.y.shape) if isinstance(self.y, Tensor) else type(self.y).__name__
            raise ValueError(f"y must be a tensor whose first axis has {self.num_graphs} entries (graphs), got {got}")
        if self.y is not None and self.y.device != device:
            raise ValueError(f"y must be on {device}, got {self.y.device}")
        ops.check_csr(self.indptr, self.indices, self.ptr, num_nodes)
        for name in ("ptr", "indptr", "indices", "x", "y", "edge_weight"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, value.contiguous())  # once, instead of at every operation

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        x: Tensor,
        batch: Tensor | None = None,
        *,
        num_graphs: int | None = None,
        y: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> GraphBatch:
        """Build from COO arcs in PyG's convention: ``edge_index[0]`` are sources, ``edge_index[1]`` targets.

        Row ``v`` of the adjacency gathers from the sources of the arcs that end in ``v``. Arcs are taken as they are:
        for an undirected graph give both directions; repeated arcs count as often as they stand there.

        Args:
            edge_index: ``[2, E]`` int32 or int64.
            x: ``[N, d]`` float32 or float64.
            batch: ``[N]`` int64, the graph of each node, ascending; None for a single graph.
            num_graphs: needed only where trailing graphs are empty; by default the last entry of ``batch`` plus one.
            y: labels, first axis ``G``.
            edge_weight: ``[E]``, dtype of ``x``.
        """
        _check.tensor("x", x, ("N", "d"), _check.FLOATS)
        num_nodes = x.shape[0]
        _check.tensor("edge_index", edge_index, (2, "E"), _check.INTEGERS, x.device)
        if batch is None:
            batch = torch.zeros(num_nodes, dtype=torch.int64, device=x.device)
            num_graphs = 1 if num_graphs is None else num_graphs
        _check.tensor("batch", batch, (num_nodes,), (torch.int64,), x.device)
        if num_nodes and (bool((batch[1:] < batch[:-1]).any()) or int(batch[0]) < 0):
            raise ValueError("batch must be ascending and not negative; sort the nodes by graph first")
        least = int(batch[-1]) + 1 if num_nodes else 0
        num_graphs = least if num_graphs is None else _check.integer("num_graphs", num_graphs, least)
        if edge_index.numel() and (int(edge_index.min()) < 0 or int(edge_index.max()) >= num_nodes):
            raise ValueError(
                f"edge_index must be in [0, {num_nodes}), got {int(edge_index.min())}..{int(edge_index.max())}"
            )
        if edge_weight is not None:
            _check.tensor("edge_weight", edge_weight, (edge_index.shape[1],), (x.dtype,), x.device)
        source, target = edge_index
        order = torch.argsort(target.long() * max(num_nodes, 1) + source, stable=True)
        return cls(
            ptr=offsets(torch.bincount(batch, minlength=num_graphs)),
            indptr=offsets(torch.bincount(target, minlength=num_nodes)).to(edge_index.dtype),
            indices=source[order].contiguous(),
            x=x,
            y=y,
            edge_weight=None if edge_weight is None else edge_weight[order],
        )

    @property
    def num_graphs(self) -> int:
        return self.ptr.numel() - 1

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    @property
    def num_arcs(self) -> int:
        """Stored entries of the adjacency: an undirected edge counts twice, a self-loop once."""
        return self.indices.numel()

    @property
    def num_features(self) -> int:
        return self.x.shape[1]

    @property
    def num_nodes_per_graph(self) -> Tensor:
        return self.ptr.diff()

    @property
    def degree(self) -> Tensor:
        """``[N]`` entries per row of the adjacency; a self-loop counts 1."""
        return self.indptr.diff()

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> GraphBatch:
        """The same graphs on another device; ``non_blocking`` as in ``torch.Tensor.to``."""
        return with_arrays(self, lambda value: value.to(device, non_blocking=non_blocking))

    def cuda(self, device: torch.device | str | int = "cuda") -> GraphBatch:
        return self.to(device)

    def cpu(self) -> GraphBatch:
        return self.to("cpu")

    def pin_memory(self) -> GraphBatch:
        """The same graphs in page-locked memory, from which ``to(device, non_blocking=True)`` does not wait."""
        return with_arrays(self, Tensor.pin_memory)

    def __len__(self) -> int:
        return self.num_graphs

    def __getitem__(self, ids: GraphIds) -> GraphBatch:
        """Select graphs by int, slice, index array or mask, in the order given.

        The arrays are copied, but for a slice without steps, which shares what it can.
        """
        if isinstance(ids, slice) and ids.step in (None, 1):
            return self._between(*ids.indices(self.num_graphs)[:2])
        ids = graph_ids(ids, self.num_graphs, self.ptr.device)
        sizes = self.num_nodes_per_graph[ids]
        nodes = ragged_arange(self.ptr[ids], sizes)
        degree = self.degree[nodes]
        arcs = ragged_arange(self.indptr[nodes].long(), degree.long())
        ptr = offsets(sizes)
        shift = (ptr[:-1] - self.ptr[ids]).repeat_interleave(sizes).repeat_interleave(degree)
        return GraphBatch(
            ptr=ptr,
            indptr=offsets(degree).to(self.indptr.dtype),
            indices=(self.indices[arcs] + shift).to(self.indices.dtype),
            x=self.x[nodes],
            y=None if self.y is None else self.y[ids],
            edge_weight=None if self.edge_weight is None else self.edge_weight[arcs],
        )

    def _between(self, begin: int, end: int) -> GraphBatch:
        """The graphs ``begin`` to ``end - 1``."""
        end = max(begin, end)
        first, last = int(self.ptr[begin]), int(self.ptr[end])
        first_arc, last_arc = int(self.indptr[first]), int(self.indptr[last])
        selected = copy.copy(self)  # not a new object: its contents are checked already
        parts = {
            "ptr": self.ptr[begin : end + 1] - first,
            "indptr": self.indptr[first : last + 1] - first_arc,
            "indices": self.indices[first_arc:last_arc] - first,
            "x": self.x[first:last],
            "y": None if self.y is None else self.y[begin:end],
            "edge_weight": None if self.edge_weight is None else self.edge_weight[first_arc:last_arc],
        }
        for name, value in parts.items():
            object.__setattr__(selected, name, value)
        return selected

    def chunks(self, num_nodes: int, num_arcs: int) -> Iterator[tuple[int, int]]:
        """Where runs of graphs begin and end, of at most so many nodes and arcs each, but at least one graph."""
        begin = 0
        while begin < self.num_graphs:
            first = int(self.ptr[begin])
            arcs = min(int(self.indptr[first]) + num_arcs, self.num_arcs)
            last = min(first + num_nodes, int(torch.searchsorted(self.indptr, arcs, right=True)) - 1)
            end = max(int(torch.searchsorted(self.ptr, last, right=True)) - 1, begin + 1)
            yield begin, end
            begin = end

    def __iter__(self) -> Iterator[GraphBatch]:
        return (self[graph] for graph in range(self.num_graphs))

    def __repr__(self) -> str:
        labels = "" if self.y is None else f", y={list(self.y.shape)}"
        return (
            f"GraphBatch({self.num_graphs} graphs, {self.num_nodes} nodes, {self.num_arcs} arcs, "
            f"{self.num_features} features{labels}, {self.x.dtype}, {self.x.device})"
        )
