"""GraphBatch: many graphs as one block-diagonal CSR adjacency with node features and labels."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from .. import ops
from .._common import check
from .._common.indexing import GraphArrays, GraphIds, are_alike, graph_ids, offsets, prepared_by, ragged_arange
from . import convert

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .node_features import NodeFeatures

Labels = Tensor | np.ndarray | Sequence[Any]
Reduce = Literal["sum", "mean", "min", "max"]
REDUCTIONS = ("sum", "mean", "min", "max")


class EdgeOptions(TypedDict, total=False):
    """Options of ``GraphBatch.from_edge_index``."""

    undirected: bool
    coalesce: Reduce | None
    self_loops: bool | None
    sort_nodes: bool


def _changed_edges(
    edge_index: Tensor, weight: Tensor | None, num_nodes: int, undirected: bool, self_loops: bool | None
) -> tuple[Tensor, Tensor | None]:
    """Add reversed edges, and drop self-loops or add missing ones."""
    loops = edge_index[0] == edge_index[1]
    others = ~loops if bool(loops.any()) else slice(None)  # which is no copy
    kept = others if self_loops is False else slice(None)
    edges, weights = [edge_index[:, kept]], [] if weight is None else [weight[kept]]
    if undirected:
        edges.append(edge_index[:, others].flip(0))
        weights += [] if weight is None else [weight[others]]
    if self_loops:
        lack = torch.ones(num_nodes, dtype=torch.bool, device=edge_index.device)
        lack[edge_index[0, loops].long()] = False
        nodes = lack.nonzero().squeeze(1).to(edge_index.dtype)
        edges.append(nodes.expand(2, -1))
        weights += [] if weight is None else [weight.new_ones(len(nodes))]
    return torch.cat(edges, dim=1), torch.cat(weights) if weights else None


def _coalesced(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, reduce: Reduce, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge repeated edges, which are neighbours in their row."""
    is_first = torch.ones_like(indices, dtype=torch.bool)
    is_first[1:] = indices[1:] != indices[:-1]
    is_first[indptr[indptr < len(indices)].long()] = True  # of its row
    if bool(is_first.all()):
        return indptr, indices, weight
    first = is_first.nonzero().squeeze(1)
    times = first.diff(append=first.new_tensor([len(indices)]))
    if weight is not None:
        weight = torch.segment_reduce(weight, reduce, lengths=times)
    elif reduce == "sum":
        weight = times.to(dtype)
    return offsets(is_first)[indptr.long()].to(indptr.dtype), indices[first], weight


def _check_crossing(edge_index: Tensor, batch: Tensor) -> None:
    """Raise a ValueError with the first edge between two graphs, in the caller's numbering."""
    ends = batch[edge_index.long()]
    crossing = (ends[0] != ends[1]).nonzero()
    if len(crossing):
        edge = int(crossing[0])
        (source, target), (one, other) = edge_index[:, edge].tolist(), ends[:, edge].tolist()
        raise ValueError(
            "edge_index must have both ends of an edge in one graph, "
            f"got {source} -> {target} at position {edge}, from graph {one} to {other}"
        )


@dataclass(frozen=True, repr=False, eq=False)
class GraphBatch(GraphArrays):
    """Graphs as flat arrays; graph ``g`` owns the nodes ``ptr[g]:ptr[g + 1]``.

    Edges are directed, from a source to a target, as in PyG; an undirected edge is stored as two, one per direction.
    ``num_edges``, ``E`` and degrees count directed edges.

    Contents are checked, and arrays made contiguous, once, here; the operations then trust them. Those that are
    contiguous are not copied. On a GPU contents are not checked, which would wait for it: build on the CPU and move
    with :meth:`to`.

    Args:
        ptr: ``[G + 1]`` int64, node offsets of the graphs.
        indptr: ``[N + 1]`` int32 or int64, row offsets of the adjacency over all nodes.
        indices: ``[E]``, dtype of ``indptr``: for each row the columns (numbers over all nodes) that it gathers from.
            A column outside the row's graph is an error.
        x: ``[N, d]`` float32 or float64, node features.
        y: labels, first axis ``G``, or None.
        edge_weight: ``[E]``, dtype of ``x``, or None for ones.
        node_features: what has transformed the graphs, which ``NodeFeatures.transform`` notes here; None for graphs as
            they are. Features made of these graphs, and models that are trained on those, take it over.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    ptr: Tensor
    indptr: Tensor
    indices: Tensor
    x: Tensor
    y: Tensor | None = None
    edge_weight: Tensor | None = None
    node_features: NodeFeatures | None = None

    def __post_init__(self) -> None:
        check.tensor("x", self.x, ("N", "d"), check.FLOATS)
        device, num_nodes = self.x.device, self.x.shape[0]
        check.offsets_shape("ptr", self.ptr, device)
        ops.check_csr(self.indptr, self.indices, self.ptr, num_nodes, device=device)
        if self.edge_weight is not None:
            check.tensor("edge_weight", self.edge_weight, (self.indices.numel(),), (self.x.dtype,), device)
        if self.y is not None and (not isinstance(self.y, Tensor) or self.y.shape[:1] != (self.num_graphs,)):
            got = list(self.y.shape) if isinstance(self.y, Tensor) else type(self.y).__name__
            raise ValueError(f"y must be a tensor whose first axis has {self.num_graphs} entries (graphs), got {got}")
        if self.y is not None and self.y.device != device:
            raise ValueError(f"y must be on {device}, got {self.y.device}")
        if self.node_features is not None and not hasattr(self.node_features, "num_features_"):
            made = type(self.node_features).__name__
            raise TypeError(f"node_features must be fitted NodeFeatures or None, got {made}")
        for name in ("ptr", "indptr", "indices", "x", "y", "edge_weight"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, value.contiguous())  # once, instead of at every operation

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        x: Tensor | None,
        batch: Tensor | None = None,
        *,
        num_graphs: int | None = None,
        y: Tensor | None = None,
        edge_weight: Tensor | None = None,
        undirected: bool = False,
        coalesce: Reduce | None = None,
        self_loops: bool | None = None,
        sort_nodes: bool = False,
    ) -> GraphBatch:
        """Build from COO edges in PyG's convention: ``edge_index[0]`` are sources, ``edge_index[1]`` targets.

        Row ``v`` of the adjacency gathers from the sources of the edges that end in ``v``. Edges may come in any order
        and are stored by target, then source. Unless the arguments say otherwise they are taken as listed: an
        undirected graph needs both directions, and repeated edges count as often as they are listed.

        Args:
            edge_index: ``[2, E]`` int32 or int64.
            x: ``[N, d]`` float32 or float64; None for the degree, ``[N, 1]``, of the nodes that ``batch`` has.
            batch: ``[N]`` int64, the graph of each node, ascending; None for a single graph.
            num_graphs: needed only where trailing graphs are empty; by default the last entry of ``batch`` plus one.
            y: labels, first axis ``G``.
            edge_weight: ``[E]``, dtype of ``x``.
            undirected: each undirected edge is listed once, in either direction: add its reverse, of the same weight.
                A self-loop remains one edge. What is listed in both directions becomes a repeated edge.
            coalesce: make one edge of repeated ones, with the ``"sum"``, ``"mean"``, ``"min"`` or ``"max"`` of their
                weights. Without weights each has weight 1, so that ``"sum"`` makes their number a weight, and the
                others just drop repeats. None leaves them.
            self_loops: False leaves them out; True adds one of weight 1 to each node that has none; None takes them as
                they are.
            sort_nodes: accept a ``batch`` in any order: node ``i`` of the result is ``batch.argsort(stable=True)[i]``.
        """
        has_features = x is not None
        if x is None:
            if batch is None:
                raise ValueError("batch must be given where x is None: one of them tells the number of nodes")
            check.tensor("batch", batch, ("N",), (torch.int64,))
            if edge_weight is not None:
                check.tensor("edge_weight", edge_weight, ("E",), check.FLOATS)
            x = batch.new_empty(len(batch), 0, dtype=torch.float32 if edge_weight is None else edge_weight.dtype)
        check.tensor("x", x, ("N", "d"), check.FLOATS)
        num_nodes = x.shape[0]
        check.tensor("edge_index", edge_index, (2, "E"), check.INTEGERS, x.device)
        for name, value in (("undirected", undirected), ("sort_nodes", sort_nodes)):
            check.flag(name, value)
        if self_loops is not None:
            self_loops = check.flag("self_loops", self_loops)
        if coalesce is not None and coalesce not in REDUCTIONS:
            raise ValueError(f"coalesce must be one of {', '.join(REDUCTIONS)} or None, got {coalesce!r}")
        if edge_weight is not None:
            check.tensor("edge_weight", edge_weight, (edge_index.shape[1],), (x.dtype,), x.device)
        given_edges, given_batch = edge_index, batch
        if sort_nodes or undirected or self_loops is not None:
            ops.check_ends(edge_index, num_nodes)
        if batch is None:
            num_graphs = 1 if num_graphs is None else check.integer("num_graphs", num_graphs, min(num_nodes, 1))
            ptr = torch.full((num_graphs + 1,), num_nodes, device=x.device)
            ptr[0] = 0
        else:
            check.tensor("batch", batch, (num_nodes,), (torch.int64,), x.device)
            if bool((batch[1:] < batch[:-1]).any()):
                if not sort_nodes:
                    raise ValueError(
                        "batch must be ascending; sort_nodes=True sorts the nodes by graph, or sort them beforehand"
                    )
                by_graph = batch.argsort(stable=True)
                position = torch.empty_like(by_graph).scatter_(0, by_graph, torch.arange(num_nodes, device=x.device))
                batch, x, edge_index = batch[by_graph], x[by_graph], position[edge_index.long()].to(edge_index.dtype)
            if num_nodes and (first := int(batch[0])) < 0:
                raise ValueError(f"batch must not be negative, got {first}")
            least = int(batch[-1]) + 1 if num_nodes else 0
            num_graphs = least if num_graphs is None else check.integer("num_graphs", num_graphs, least)
            ptr = offsets(torch.bincount(batch, minlength=num_graphs))
        if undirected or self_loops is not None:
            edge_index, edge_weight = _changed_edges(edge_index, edge_weight, num_nodes, undirected, self_loops)
        indptr, indices, order = ops.csr_of_edges(edge_index, num_nodes, return_order=edge_weight is not None)
        if edge_weight is not None and order is not None:
            edge_weight = edge_weight.index_select(0, order)
        if coalesce is not None:
            indptr, indices, edge_weight = _coalesced(indptr, indices, edge_weight, coalesce, x.dtype)
        try:
            graphs = cls(ptr=ptr, indptr=indptr, indices=indices, x=x, y=y, edge_weight=edge_weight)
        except ValueError:
            if given_batch is not None:
                _check_crossing(given_edges, given_batch)
            raise
        return graphs if has_features else graphs._with_degree()

    @classmethod
    def from_pyg(
        cls,
        data: Any,
        *,
        x: str | None = "x",
        y: str | Labels | None = "y",
        edge_weight: str | None = "edge_weight",
        dtype: torch.dtype | None = None,
        **edge_options: Unpack[EdgeOptions],
    ) -> GraphBatch:
        """Build from PyG: a ``Data``, a ``Batch``, or an iterable of them, such as a list, a dataset or a loader.

        Other attributes, such as ``edge_attr``, are left out. What is on a GPU stays there. An ``InMemoryDataset`` that
        has no ``transform`` is read from the arrays in which it has all graphs, which is many times faster than one by
        one.

        Args:
            data: homogeneous graphs with ``edge_index``.
            x: the attribute that holds the features, ``[N, d]`` or ``[N]``; None for the degree, ``[N, 1]``: the edges
                that end in a node, a self-loop counting 1, after ``edge_options`` have been applied.
            y: the attribute that holds the labels of the graphs, or these labels themselves, or None. PyG has them as
                ``[1]`` or, with several tasks, ``[1, T]`` per graph. Integers become int64; of one task, ``[1, 1]``
                per graph, as OGB has them, they become classes ``[G]``.
            edge_weight: the attribute that holds the weights, ``[E]`` or ``[E, 1]``, in the dtype of the features
                afterwards; None to leave them out. Unlike any other attribute named here, ``"y"`` and ``"edge_weight"``
                may be missing.
            dtype: float32 or float64, of the features. None keeps these two, and makes float32 of any other; integers
                that this would round are an error. OGB's integer features, which are categories, become those numbers;
                encode them beforehand if that is not meant.
            **edge_options: ``undirected``, ``coalesce``, ``self_loops``, ``sort_nodes`` as in :meth:`from_edge_index`.

        Raises:
            ImportError: PyG is not installed. TypeError, ValueError: name the argument and what is wrong with it.
        """
        return cls._from_parts(convert.from_pyg(data, x, y, edge_weight), dtype, edge_options)

    @classmethod
    def from_dgl(
        cls,
        graphs: Any,
        *,
        x: str | None = "feat",
        y: Labels | None = None,
        edge_weight: str | None = None,
        dtype: torch.dtype | None = None,
        **edge_options: Unpack[EdgeOptions],
    ) -> GraphBatch:
        """Build from DGL: a ``DGLGraph``, batched or not, or an iterable of them or of pairs (graph, label).

        Such pairs are what DGL's datasets for graph classification and ``GraphDataLoader`` consist of.

        Args:
            graphs: homogeneous graphs.
            x: the key in ``ndata`` of the features, ``[N, d]`` or ``[N]``; None for the degree, as in :meth:`from_pyg`.
            y: labels, first axis ``G``; None for those of the pairs, if there are any. Integers become int64.
            edge_weight: the key in ``edata`` of the weights, ``[E]`` or ``[E, 1]``; None to leave them out.
            dtype: as in :meth:`from_pyg`.
            **edge_options: ``undirected``, ``coalesce``, ``self_loops``, ``sort_nodes`` as in :meth:`from_edge_index`.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it.
        """
        return cls._from_parts(convert.from_dgl(graphs, x, y, edge_weight), dtype, edge_options)

    @classmethod
    def from_networkx(
        cls,
        graphs: Any,
        *,
        x: str | Sequence[str] | None = None,
        y: str | Labels | None = None,
        edge_weight: str | None = None,
        dtype: torch.dtype = torch.float32,
        **edge_options: Unpack[EdgeOptions],
    ) -> GraphBatch:
        """Build from networkx: a graph or an iterable of them, each directed or not, with parallel edges or without.

        Nodes are numbered in the order in which networkx lists them, whatever they are called. An edge of an undirected
        graph becomes two, one per direction, a self-loop one. Parallel edges are repeated.

        Args:
            graphs: the graphs.
            x: one or several node attributes, numbers or vectors, side by side; None for the degree, as in
                :meth:`from_pyg`.
            y: the graph attribute (in ``graph.graph``) that is the label, or the labels themselves, or None. Integers
                become int64, real numbers ``dtype``.
            edge_weight: the edge attribute that is the weight; None to leave weights out.
            dtype: float32 or float64.
            **edge_options: ``undirected``, ``coalesce`` and ``self_loops`` as in :meth:`from_edge_index`.

        Raises:
            ImportError: networkx is not installed. TypeError, ValueError: name the graph and what is wrong with it.
        """
        return cls._from_parts(convert.from_networkx(graphs, x, y, edge_weight, dtype), dtype, edge_options)

    @classmethod
    def from_scipy(
        cls,
        adjacency: Any,
        x: Any = None,
        *,
        ptr: Any = None,
        y: Labels | None = None,
        dtype: torch.dtype | None = None,
        **edge_options: Unpack[EdgeOptions],
    ) -> GraphBatch:
        """Build from sparse matrices of scipy: one that is block-diagonal, or an iterable with one per graph.

        Row ``v`` gathers from its columns, as in ``adjacency @ x``: entry ``[v, u]`` is an edge from ``u`` to ``v``.
        Transpose directed graphs that follow the convention of ``scipy.sparse.csgraph``. Entries are weights, but for
        matrices of nothing but ones, which need none.

        Args:
            adjacency: square, real, of any format; entries stored twice add up where they do in scipy.
            x: ``[N, d]`` features as a tensor or an array, or a list of them, one per graph; None for the degree, as in
                :meth:`from_pyg`.
            ptr: ``[G + 1]`` node offsets of the graphs in one block-diagonal matrix; None for a single graph.
            y: labels, first axis ``G``. Integers become int64.
            dtype: as in :meth:`from_pyg`.
            **edge_options: ``undirected``, ``coalesce`` and ``self_loops`` as in :meth:`from_edge_index`.

        Raises:
            ImportError: scipy is not installed. TypeError, ValueError: name the argument and what is wrong with it.
        """
        return cls._from_parts(convert.from_scipy(adjacency, x, y, ptr), dtype, edge_options)

    @classmethod
    def _from_parts(cls, parts: convert.Parts, dtype: torch.dtype | None, edge_options: EdgeOptions) -> GraphBatch:
        num_nodes = len(parts.batch)
        x = parts.batch.new_empty(num_nodes, 0, dtype=torch.float32) if parts.x is None else parts.x
        x = convert.features(x, dtype)
        if len(x) != num_nodes:
            raise ValueError(f"x must have one row per node, {num_nodes}, got {len(x)}")
        weight = parts.edge_weight
        graphs = cls.from_edge_index(
            parts.edge_index,
            x,
            parts.batch,
            num_graphs=parts.num_graphs,
            y=None if parts.y is None else convert.labels(parts.y, x.dtype).to(x.device),
            edge_weight=None if weight is None else convert.narrowed("edge_weight", weight, x.dtype),
            **edge_options,
        )
        return graphs if parts.x is not None else graphs._with_degree()

    def _with_degree(self) -> GraphBatch:
        """The degree in the place of the features, in their dtype."""
        return replace(self, x=self.degree.to(self.x.dtype).unsqueeze(1))

    @classmethod
    def concatenate(cls, batches: Iterable[GraphBatch]) -> GraphBatch:
        """One batch with the graphs of several, in order; the arrays are copied.

        Args:
            batches: at least one; alike in device, features and dtype, all or none with labels, all or none with
                weights, and all transformed by the same, if at all. Where int32 and int64 indices meet, or int32 no
                longer holds them, int64 results.

        Raises:
            TypeError, ValueError: names what differs.
        """
        parts = list(batches)
        for part in parts:
            if not isinstance(part, GraphBatch):
                raise TypeError(f"batches must hold GraphBatches, got {type(part).__name__}")
        if not parts:
            raise ValueError("batches must hold at least one GraphBatch, got none")
        made = parts[0].node_features
        for part in parts:
            if not are_alike(part.node_features, made):
                raise ValueError(
                    f"batches must be prepared alike, got graphs prepared by {prepared_by(parts[0])} and by "
                    f"{prepared_by(part)}"
                )
        x, y, edge_weight = (
            convert.cat(name, [getattr(part, name) for part in parts]) for name in ("x", "y", "edge_weight")
        )
        assert x is not None
        num_edges = sum(part.num_edges for part in parts)
        wide = any(part.indptr.dtype == torch.int64 for part in parts) or max(len(x), num_edges) >= 2**31
        dtype = torch.int64 if wide else torch.int32
        first_nodes = itertools.accumulate((part.num_nodes for part in parts), initial=0)
        return cls(
            ptr=offsets(torch.cat([part.num_nodes_per_graph for part in parts])),
            indptr=offsets(torch.cat([part.degree for part in parts])).to(dtype),
            indices=torch.cat(
                [part.indices.to(dtype) + first for part, first in zip(parts, first_nodes, strict=False)]
            ),
            x=x,
            y=y,
            edge_weight=edge_weight,
            node_features=made,
        )

    def to_pyg(self) -> list[Any]:
        """The graphs as PyG's ``Data``, for its ``DataLoader`` or ``Batch.from_data_list``; copies on the same device.

        Each has ``x`` ``[n, d]``, ``edge_index`` ``[2, e]`` int64, and where there are any ``y`` ``[1]`` or ``[1, T]``
        and ``edge_weight`` ``[e]``. :meth:`from_pyg` makes the same graphs of them, which no longer tell their
        ``node_features``.

        Raises:
            ImportError: PyG is not installed.
        """
        return convert.to_pyg(self)

    def to_networkx(
        self,
        *,
        x: str | None = "x",
        y: str | None = "y",
        edge_weight: str | None = "weight",
        undirected: bool = False,
        multigraph: bool = False,
    ) -> list[Any]:
        """The graphs as networkx graphs with the nodes ``0..n-1``.

        Args:
            x: the node attribute for the features, a list of numbers; None to leave them out.
            y: the graph attribute (in ``graph.graph``) for the label; None to leave it out.
            edge_weight: the edge attribute for the weight; None to leave it out.
            undirected: make ``Graph`` instead of ``DiGraph``; each edge must have its reverse, of the same weight.
            multigraph: make ``MultiDiGraph`` or ``MultiGraph``; needed where edges are repeated.

        Raises:
            ImportError: networkx is not installed. ValueError: what was asked for would lose edges.
        """
        check.flag("undirected", undirected)
        check.flag("multigraph", multigraph)
        return convert.to_networkx(self.cpu(), x, y, edge_weight, undirected, multigraph)

    @property
    def num_graphs(self) -> int:
        """``G``."""
        return self.ptr.numel() - 1

    @property
    def num_nodes(self) -> int:
        """``N``, of all graphs together."""
        return self.x.shape[0]

    @property
    def num_edges(self) -> int:
        """Directed edges, the stored entries of the adjacency: a self-loop counts once."""
        return self.indices.numel()

    @property
    def num_features(self) -> int:
        """``d``."""
        return self.x.shape[1]

    @property
    def num_nodes_per_graph(self) -> Tensor:
        """``[G]`` int64."""
        return self.ptr.diff()

    @property
    def edge_index(self) -> Tensor:
        """``[2, E]`` COO edges in PyG's convention, source and target, in the order and dtype of ``indices``."""
        nodes = torch.arange(self.num_nodes, dtype=self.indices.dtype, device=self.indices.device)
        return torch.stack([self.indices, nodes.repeat_interleave(self.degree, output_size=self.num_edges)])

    @property
    def degree(self) -> Tensor:
        """``[N]`` entries per row of the adjacency; a self-loop counts 1."""
        return self.indptr.diff()

    def __getitem__(self, ids: GraphIds) -> GraphBatch:
        """Select graphs by int, slice, index array or mask, in the order given.

        The arrays are copied, but for a slice without steps, which shares what it can.
        """
        nodes: slice | Tensor
        edges: slice | Tensor
        if isinstance(ids, slice) and ids.step in (None, 1):
            begin, end, _ = ids.indices(self.num_graphs)
            ids = slice(begin, max(begin, end))
            ptr = self.ptr[begin : ids.stop + 1]
            nodes = slice(int(ptr[0]), int(ptr[-1]))
            indptr = self.indptr[nodes.start : nodes.stop + 1]
            edges = slice(int(indptr[0]), int(indptr[-1]))
            ptr, indptr, shift = ptr - nodes.start, indptr - edges.start, -nodes.start
        else:
            ids = graph_ids(ids, self.num_graphs, self.ptr.device)
            sizes = self.num_nodes_per_graph[ids]
            nodes = ragged_arange(self.ptr[ids], sizes)
            degree = self.degree[nodes]
            edges = ragged_arange(self.indptr[nodes].long(), degree.long())
            ptr, indptr = offsets(sizes), offsets(degree).to(self.indptr.dtype)
            shift = (ptr[:-1] - self.ptr[ids]).repeat_interleave(sizes).repeat_interleave(degree)
        selected = copy.copy(self)  # not a new object: its contents are checked already
        vars(selected).update(
            ptr=ptr,
            indptr=indptr,
            indices=(self.indices[edges] + shift).to(self.indices.dtype),
            x=self.x[nodes],
            y=None if self.y is None else self.y[ids],
            edge_weight=None if self.edge_weight is None else self.edge_weight[edges],
        )
        return selected

    def chunks(self, num_nodes: int, num_edges: int) -> Iterator[tuple[int, int]]:
        """Yield the chunks ``(begin, end)`` of at most so many nodes and edges, and of at least one graph each."""
        if self.num_graphs and self.num_nodes <= num_nodes and self.num_edges <= num_edges:
            yield 0, self.num_graphs
            return
        begin, end_of_chunk = 0, self.ends_of_chunks()
        while begin < self.num_graphs:
            end = max(end_of_chunk(begin, num_nodes, num_edges), begin + 1)
            yield begin, end
            begin = end

    def ends_of_chunks(self) -> Callable[[int, int, int], int]:
        """What tells where the graphs from ``begin`` on end that have at most so many nodes and edges; maybe none."""
        nodes, edges = self.ptr.cpu().numpy(), self.indptr[self.ptr].long().cpu().numpy()

        def end(begin: int, num_nodes: int, num_edges: int) -> int:
            ends = (
                nodes.searchsorted(nodes[begin] + num_nodes, "right"),
                edges.searchsorted(edges[begin] + num_edges, "right"),
            )
            return max(int(min(ends)) - 1, begin)

        return end

    def __iter__(self) -> Iterator[GraphBatch]:
        return (self[graph] for graph in range(self.num_graphs))

    def __repr__(self) -> str:
        labels = "" if self.y is None else f", y={list(self.y.shape)}"
        return (
            f"GraphBatch({self.num_graphs} graphs, {self.num_nodes} nodes, {self.num_edges} edges, "
            f"{self.num_features} features{labels}, {self.x.dtype}, {self.x.device})"
        )
