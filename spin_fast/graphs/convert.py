"""Graphs of other libraries as flat arrays, and back: PyG, DGL, networkx, scipy.

What they hold is taken as it is. Edges are changed in one place only, ``GraphBatch.from_edge_index``, to which the
arrays go, and there by its arguments. The libraries are imported where they are used.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from .._common import check
from .._common.indexing import offsets, ragged_arange


class Parts(NamedTuple):
    """Graphs as ``GraphBatch.from_edge_index`` takes them, with dtypes as found; ``x`` None stands for the degree."""

    edge_index: Tensor
    batch: Tensor
    num_graphs: int
    x: Tensor | None
    y: Any
    edge_weight: Tensor | None


def library(module: str, wanted_by: str) -> Any:
    """Import a module of a library that spin_fast does not require, or say what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0].replace("_", "-")
        raise ImportError(f"{wanted_by} needs a package that is missing: pip install {package}") from error


def numbers(name: str, values: Any) -> np.ndarray:
    """A contiguous array of real numbers, of a type that torch has, from nested lists or another array."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} must be numbers, or vectors of one length, got {error}") from error
    if array.size and array.dtype.kind not in "biuf":
        found = array.ravel().tolist()
        raise TypeError(
            f"{name} must be numbers, or vectors of one length, got {next(filter(_is_no_number, found), found[0])!r}"
        )
    array = array if array.dtype.kind != "f" or array.itemsize <= 8 else array.astype(np.float64)
    array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    return array.copy() if min(array.strides, default=0) < 0 else array  # which numpy may call contiguous


def _is_no_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return True
    return False


def narrowed(name: str | Callable[[int], str], values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in another dtype, in which what is finite must be finite, and integers must be the same.

    Integers may be categories, of which two would become one. ``name`` may name the value in a row.
    """
    converted, must = values.to(dtype), ""
    if values.dtype == torch.float64 and dtype != torch.float64:
        wrong, must = converted.isinf() & values.isfinite(), f"be finite as {check.shown(dtype)}"
    elif not values.dtype.is_floating_point and values.dtype != torch.bool:
        wrong = (converted.long() != values.long()) | (converted >= 2.0**63)  # which is beyond int64
        must = f"hold integers that {check.shown(dtype)} holds exactly"
    if must and bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        where = name if isinstance(name, str) else name(first[0])
        raise ValueError(f"{where} must {must}, got {values[tuple(first)].item()}")
    return converted


def features(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``[N, d]`` or ``[N]`` of any real dtype as ``[N, d]`` of ``dtype``; None keeps float32 and float64.

    Other dtypes then become float32, which holds bfloat16, float16 and bools exactly. Integers that would be rounded,
    and numbers that would become infinite, are errors.
    """
    if not isinstance(x, Tensor):
        raise check.ArgumentTypeError("x", "be a torch.Tensor", type(x))
    if dtype is not None and dtype not in check.FLOATS:
        raise TypeError(f"dtype must be torch.float32, torch.float64 or None, got {dtype}")
    if x.is_complex():
        raise TypeError(f"x must be real numbers, got {check.shown(x.dtype)}")
    wanted = dtype or (x.dtype if x.dtype in check.FLOATS else torch.float32)
    converted = narrowed("x", x, wanted)
    return converted.unsqueeze(1) if x.dim() == 1 else converted


def labels(y: Any, dtype: torch.dtype) -> Tensor:
    """Labels from a tensor, an array or a list; integers become int64, real numbers of a list ``dtype``.

    Integers ``[G, 1]``, the way of OGB, become classes ``[G]``.
    """
    if not isinstance(y, Tensor):
        values = numbers("y", y)
        real = values.dtype.kind == "f"
        y = torch.tensor(values, dtype=torch.int64 if not real else None if isinstance(y, np.ndarray) else dtype)
    if y.dtype.is_floating_point or y.dim() == 0:
        return y
    return y.to(torch.int64).squeeze(1) if y.dim() == 2 else y.to(torch.int64)


def cat(name: str, values: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    """Concatenate over graphs what all of them have, or none, in the same dtype, device and other sizes."""
    given = [value is not None for value in values]
    if any(given) and not all(given):
        some, none = given.index(True), given.index(False)
        raise ValueError(f"{name} must be given in all graphs or in none, got it at {some} but not at {none}")
    there = [value for value in values if value is not None]
    sizes = [", ".join("*" if axis == dim else str(size) for axis, size in enumerate(v.shape)) for v in there]
    kinds = [f"{check.shown(v.dtype)} [{shape}] on {v.device}" for v, shape in zip(there, sizes, strict=True)]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(f"{name} must be alike in all graphs, got {kinds[0]} at 0 and {kind} at {number}")
    return torch.cat(there, dim) if there else None


def _joined(name: str, parts: list[Parts]) -> Parts:
    if not parts:
        raise ValueError(f"{name} must hold at least one graph, got none")
    if len(parts) == 1:
        return parts[0]
    edges, batches, counts, xs, ys, weights = zip(*parts, strict=True)
    device = batches[0].device
    nodes, num_edges, graphs = (
        torch.tensor(sizes, device=device)
        for sizes in ([len(batch) for batch in batches], [edge.shape[1] for edge in edges], counts)
    )
    wide = any(edge.dtype == torch.int64 for edge in edges)
    edge_index = cat("edge_index", [edge.long() if wide else edge for edge in edges], dim=1)
    assert edge_index is not None
    first_graph = graphs.cumsum(0) - graphs
    return Parts(
        _numbered_over_all(edge_index, num_edges, nodes),
        torch.cat(batches) + first_graph.repeat_interleave(nodes),
        sum(counts),
        cat("x", xs),
        cat("y", ys),
        cat("edge_weight", weights),
    )


def _numbered_over_all(edge_index: Tensor, num_edges: Tensor, num_nodes: Tensor) -> Tensor:
    """Edges of graphs one after the other, each of which counts its nodes from 0, with numbers over all nodes.

    Raises:
        ValueError: an end is no node of its graph; names the first such graph.
    """
    if max(int(num_nodes.sum()), edge_index.shape[1]) >= 2**31:
        edge_index = edge_index.long()
    edge_ptr, node_ptr = offsets(num_edges), offsets(num_nodes)
    over_all = edge_index + node_ptr[:-1].to(edge_index.dtype).repeat_interleave(num_edges)
    try:
        for ends in over_all:
            ops.check_segments(edge_ptr, ends, None, int(node_ptr[-1]), node_ptr)
    except ValueError:
        wrong = (edge_index < 0) | (edge_index >= num_nodes.repeat_interleave(num_edges))
        graph = int(torch.searchsorted(edge_ptr, wrong.any(0).nonzero()[0], right=True)) - 1
        low, high = edge_index[:, edge_ptr[graph] : edge_ptr[graph + 1]].aminmax()
        raise ValueError(
            f"edge_index must be in [0, {num_nodes[graph]}), got {int(low)}..{int(high)} at {graph}"
        ) from None
    return over_all


def _items(name: str, value: Any, kind: str) -> list[Any]:
    wrong = isinstance(value, (str, bytes, Tensor, np.ndarray, Mapping)) or hasattr(value, "edges")  # another's graph
    if not wrong and isinstance(value, Iterable):
        return list(value)
    if wrong or not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
    return [value[number] for number in range(len(value))]  # a map-style dataset need not be iterable


def _per_edge(weight: Tensor, num_edges: int, at: str) -> Tensor:
    weight = weight.squeeze(1) if weight.dim() == 2 and weight.shape[1] == 1 else weight
    if weight.shape != (num_edges,):
        raise ValueError(f"edge_weight must have one number per edge, {num_edges}, got shape {list(weight.shape)}{at}")
    return weight


def plain(edge_index: Any) -> Any:
    """PyG's ``EdgeIndex``, a tensor with operators of its own, as a plain tensor."""
    return edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index


def from_pyg(data: Any, x: str | None, y: Any, edge_weight: str | None) -> Parts:
    pyg = library("torch_geometric.data", "from_pyg")
    for argument, name in (("x", x), ("edge_weight", edge_weight)):
        if name is not None and not isinstance(name, str):
            raise check.ArgumentTypeError(argument, "be the name of an attribute or None", type(name))
    if parts := _pyg_collated(pyg, data, x, y if isinstance(y, str) else None, edge_weight):
        return parts if y is None or isinstance(y, str) else parts._replace(y=y)
    single = isinstance(data, (pyg.Data, pyg.HeteroData))
    items = [data] if single else _items("data", data, "a PyG Data, Batch or dataset, or a list of Data")
    name = y if isinstance(y, str) else None
    parts = _joined("data", [_pyg_part(pyg, item, f" at {i}", x, name, edge_weight) for i, item in enumerate(items)])
    return parts if y is None or isinstance(y, str) else parts._replace(y=y)


def _pyg_collated(pyg: Any, data: Any, x: str | None, y: str | None, edge_weight: str | None) -> Parts | None:
    """The graphs of an ``InMemoryDataset``, or some, from the arrays in which it has all, without a look at each.

    None where more makes a graph than these, and where something is missing or wrong, which a look at each will tell.
    """
    kind, makes_graphs, chosen = pyg.InMemoryDataset, ("get", "indices", "len", "__getitem__", "__len__"), None
    if type(data) is torch.utils.data.Subset:
        data, chosen = data.dataset, list(data.indices)
    if not isinstance(data, kind) or data.transform is not None or "get" in vars(data):
        return None
    arrays, slices = vars(data).get("_data"), data.slices
    is_own = any(getattr(type(data), name) is not getattr(kind, name) for name in makes_graphs)
    if is_own or type(arrays) is not pyg.Data or not slices or "batch" in arrays:
        return None
    wanted = {name for name in ("edge_index", x, y, edge_weight) if name is not None}
    names = [name for name in wanted | {"x"} if name in arrays]
    dims = {name: -1 if name == "edge_index" else 0 for name in names}
    for name, dim in dims.items():
        values, ends = arrays[name], slices.get(name)
        if not isinstance(values, Tensor) or not isinstance(ends, Tensor) or arrays.__cat_dim__(name, values) != dim:
            return None
        if ends[-1] > values.shape[dim] or _has_changed(vars(data).get("_data_list"), name, values, dim, ends.tolist()):
            return None
    ids = torch.tensor(data.indices(), dtype=torch.int64)
    if chosen is not None:
        ids = ids[chosen]
    if len(ids) == 0:
        return None
    sizes = {name: slices[name].diff()[ids] for name in names}
    counted = getattr(arrays._store, "_num_nodes", None)
    num_nodes = sizes.get("x") if counted is None else torch.tensor(counted)[ids]
    missing = wanted - {*names}
    if num_nodes is None or x in missing or not missing <= {"y", "edge_weight"}:
        return None
    expected = {x: num_nodes, y: torch.ones_like(num_nodes), edge_weight: sizes["edge_index"]}
    if not all(torch.equal(sizes[name], size) for name, size in expected.items() if name in names):
        return None

    def taken(name: str) -> Tensor:
        values, ends = plain(arrays[name]), slices[name]
        if data._indices is None and chosen is None:
            return values.narrow(dims[name], ends[0], ends[-1] - ends[0])
        return values.index_select(dims[name], ragged_arange(ends[ids], sizes[name]).to(values.device))

    edge_index, weight = taken("edge_index"), taken(edge_weight) if edge_weight in names else None
    if edge_index.shape[:-1] != (2,) or (weight is not None and weight.shape[1:] not in ((), (1,))):
        return None
    check.tensor("edge_index", edge_index, (2, "E"), check.INTEGERS)
    num_nodes, num_edges = num_nodes.to(edge_index.device), sizes["edge_index"].to(edge_index.device)
    return Parts(
        _numbered_over_all(edge_index, num_edges, num_nodes),
        torch.arange(len(ids), device=edge_index.device).repeat_interleave(num_nodes),
        len(ids),
        None if x is None else taken(x).clone(),
        labels(taken(y).clone(), torch.float32) if y in names else None,
        None if weight is None else _per_edge(weight.clone(), edge_index.shape[1], ""),
    )


def _has_changed(graphs: list[Any] | None, name: str, values: Tensor, dim: int, ends: list[int]) -> bool:
    """Whether one of the graphs that a dataset keeps since they were looked at has another array than its part."""
    start, step = values.data_ptr(), values.stride(dim) * values.element_size()
    for graph, (begin, end) in zip(graphs or (), itertools.pairwise(ends), strict=False):
        if graph is None:
            continue
        own = getattr(graph, name, None)
        if not isinstance(own, Tensor) or own.dim() != values.dim() or own.shape[dim] != end - begin:
            return True
        if own.numel() and own.data_ptr() != start + begin * step:
            return True
    return False


def _pyg_part(pyg: Any, item: Any, at: str, x: str | None, y: str | None, edge_weight: str | None) -> Parts:
    if not isinstance(item, pyg.Data):
        hint = "; convert it by its to_homogeneous()" if isinstance(item, pyg.HeteroData) else ""
        raise TypeError(f"data must hold torch_geometric.data.Data, got {type(item).__name__}{at}{hint}")

    def attribute(name: str, remedy: str = "") -> Any:
        value = getattr(item, name, None)
        if value is None and name not in ("y", "edge_weight"):
            raise ValueError(f"data must have {name!r}, got none{at}{remedy}")
        return value

    edge_index = plain(attribute("edge_index", ", but an adj_t: undo ToSparseTensor" if "adj_t" in item else ""))
    check.tensor("edge_index", edge_index, (2, "E"), check.INTEGERS)
    value = None if x is None else attribute(x, "; x=None takes the degree instead")
    batch, num_graphs = item.batch, 1
    if batch is None:
        batch = torch.zeros(item.num_nodes, dtype=torch.int64, device=edge_index.device)
    elif isinstance(item, pyg.Batch):
        num_graphs = item.num_graphs
    else:
        num_graphs = int(batch.max()) + 1 if len(batch) else 0
    label = None if y is None else attribute(y)
    weight = None if edge_weight is None else attribute(edge_weight)
    return Parts(
        edge_index,
        batch,
        num_graphs,
        value,
        None if label is None else _pyg_labels(label, num_graphs, at),
        None if weight is None else _per_edge(weight, edge_index.shape[1], at),
    )


def _pyg_labels(label: Any, num_graphs: int, at: str) -> Tensor:
    label = labels(label if isinstance(label, Tensor) else [label], torch.float32)
    label = label.unsqueeze(0) if label.dim() == 0 else label
    if len(label) != num_graphs:
        raise ValueError(
            f"y must have one entry per graph, {num_graphs}, got shape {list(label.shape)}{at}; "
            "several tasks are y [1, T], and y=None leaves out labels of nodes"
        )
    return label


def from_dgl(graphs: Any, x: str | None, y: Any, edge_weight: str | None) -> Parts:
    """Without an import: what is read is DGL's documented interface."""
    items = [graphs] if _is_dgl(graphs) else _items("graphs", graphs, "a DGLGraph, a dataset, or a list of DGLGraphs")
    parts = _joined("graphs", [_dgl_part(item, f" at {i}", x, edge_weight) for i, item in enumerate(items)])
    return parts if y is None else parts._replace(y=y)


def _is_dgl(graph: Any) -> bool:
    return all(hasattr(graph, name) for name in ("edges", "ndata", "edata", "batch_num_nodes", "is_homogeneous"))


def _dgl_part(item: Any, at: str, x: str | None, edge_weight: str | None) -> Parts:
    graph, label = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)
    if not _is_dgl(graph):
        raise TypeError(f"graphs must hold DGLGraphs, or pairs of one and its label, got {type(graph).__name__}{at}")
    if not graph.is_homogeneous:
        raise TypeError(f"graphs must be homogeneous, got several types{at}; convert by dgl.to_homogeneous")
    for name, frame, kind in ((x, graph.ndata, "node"), (edge_weight, graph.edata, "edge")):
        if name is not None and name not in frame:
            raise ValueError(f"graphs must have the {kind} data {name!r}, got {sorted(frame)}{at}")
    sizes = graph.batch_num_nodes()
    edge_index = torch.stack(graph.edges(order="eid"))  # the order of edata
    return Parts(
        edge_index,
        torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes),
        len(sizes),
        None if x is None else graph.ndata[x],
        None if label is None else _dgl_labels(label, len(sizes), at),
        None if edge_weight is None else _per_edge(graph.edata[edge_weight], edge_index.shape[1], at),
    )


def _dgl_labels(label: Any, num_graphs: int, at: str) -> Tensor:
    """DGL's datasets give the tasks of one graph as ``[T]``, its loaders those of several as ``[G, T]``."""
    label = label if isinstance(label, Tensor) else torch.as_tensor(label)
    if num_graphs == 1 and not (label.dim() == 2 and len(label) == 1):
        label = label.reshape(1) if label.numel() == 1 else label.reshape(1, -1)
    return _pyg_labels(label, num_graphs, at)


def from_networkx(
    graphs: Any, x: str | Sequence[str] | None, y: Any, edge_weight: str | None, dtype: torch.dtype
) -> Parts:
    networkx = library("networkx", "from_networkx")
    items = [graphs] if isinstance(graphs, networkx.Graph) else _items("graphs", graphs, "a networkx graph or a list")
    if not items:
        raise ValueError("graphs must hold at least one graph, got none")
    edges: list[tuple[int, int]] = []
    weights: list[Any] = []
    first = 0
    for number, graph in enumerate(items):
        if not isinstance(graph, networkx.Graph):
            raise TypeError(f"graphs must hold networkx graphs, got {type(graph).__name__} at {number}")
        if isinstance(y, str) and y not in graph.graph:
            raise ValueError(f"graph {number} must have the attribute {y!r} (graph.graph), got {sorted(graph.graph)}")
        node_of = {node: first + position for position, node in enumerate(graph)}
        first += len(node_of)
        for source, target, *weight in graph.edges(data=False if edge_weight is None else edge_weight):
            if weight and weight[0] is None:
                where = f"edge ({source!r}, {target!r}) of graph {number}"
                raise ValueError(f"{where} must have the attribute {edge_weight!r}, got none")
            pair = (node_of[source], node_of[target])
            directions = [pair] if graph.is_directed() or source == target else [pair, pair[::-1]]
            edges += directions
            weights += weight * len(directions)
    columns = [_networkx_attribute(items, name, dtype) for name in ([x] if isinstance(x, str) else x or [])]
    if x is not None and not columns:
        raise ValueError("x must name at least one node attribute, or be None for the degree, got none")
    return Parts(
        torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t(),
        torch.arange(len(items)).repeat_interleave(torch.tensor([len(graph) for graph in items])),
        len(items),
        None if x is None else torch.from_numpy(np.concatenate(columns, axis=1)),
        [graph.graph[y] for graph in items] if isinstance(y, str) else y,
        None if edge_weight is None else torch.from_numpy(numbers(f"edge attribute {edge_weight!r}", weights)),
    )


def _networkx_attribute(graphs: list[Any], name: str, dtype: torch.dtype) -> np.ndarray:
    """``[N, width]`` of the dtype that numpy finds."""
    found = [(graph, node, value) for graph, of in enumerate(graphs) for node, value in of.nodes(data=name)]
    for graph, node, value in found:
        if value is None:
            raise ValueError(f"node {node!r} of graph {graph} must have the attribute {name!r}, got none")
    values = numbers(f"node attribute {name!r}", [value for *_, value in found])
    if values.ndim > 2:
        raise ValueError(f"node attribute {name!r} must be numbers or vectors, got shape {list(values.shape[1:])}")
    values = values[:, None] if values.ndim == 1 else values
    where = "attribute {3!r} of node {1!r} of graph {0}".format
    narrowed(lambda row: where(*found[row], name), torch.from_numpy(values), dtype)
    return values


def from_scipy(adjacency: Any, x: Any, y: Any, ptr: Any) -> Parts:
    sparse = library("scipy.sparse", "from_scipy")
    single = sparse.issparse(adjacency)
    items = [adjacency] if single else _items("adjacency", adjacency, "a scipy sparse matrix or a list of them")
    parts = _joined("adjacency", [_scipy_part(sparse, item, f" at {number}") for number, item in enumerate(items)])
    if ptr is not None:
        if not single:
            raise ValueError("ptr must be left out where adjacency is a list: each matrix is a graph")
        parts = _cut(parts, ptr)
    if isinstance(x, (list, tuple)):
        xs = [torch.from_numpy(numbers("x", item)) if not isinstance(item, Tensor) else item for item in x]
        if [len(value) for value in xs] != (sizes := torch.bincount(parts.batch, minlength=parts.num_graphs).tolist()):
            raise ValueError(f"x must have one row per node, {sizes}, got {[len(value) for value in xs]}")
        x = cat("x", xs)
    elif x is not None and not isinstance(x, Tensor):
        x = torch.from_numpy(numbers("x", x))
    weight = parts.edge_weight
    ones = weight is None or bool((weight == 1).all())
    return parts._replace(x=x, y=y, edge_weight=None if ones else weight)


def _scipy_part(sparse: Any, matrix: Any, at: str) -> Parts:
    if not sparse.issparse(matrix):
        raise TypeError(f"adjacency must hold scipy sparse matrices, got {type(matrix).__name__}{at}")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.dtype.kind not in "biuf":
        got = f"{matrix.dtype} {list(matrix.shape)}"
        raise ValueError(f"adjacency must hold square matrices of real numbers, got {got}{at}")
    rows = sparse.csr_array(matrix)
    degree = torch.from_numpy(rows.indptr).diff()
    columns = torch.from_numpy(rows.indices)
    target = torch.arange(len(degree), dtype=columns.dtype).repeat_interleave(degree)
    weight = torch.from_numpy(rows.data.astype(np.float64))
    batch = torch.zeros(len(degree), dtype=torch.int64)
    return Parts(torch.stack([columns, target]), batch, 1, None, None, weight)


def _cut(parts: Parts, ptr: Any) -> Parts:
    values, num_nodes = numbers("ptr", ptr.cpu() if isinstance(ptr, Tensor) else ptr), len(parts.batch)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(f"ptr must be integers [graphs + 1], got {values.dtype} {list(values.shape)}")
    sizes = torch.from_numpy(values.astype(np.int64)).diff()
    if not len(values) or values[0] != 0 or values[-1] != num_nodes or bool((sizes < 0).any()):
        raise ValueError(f"ptr must rise from 0 to the number of nodes, {num_nodes}, got {values.tolist()}")
    batch = torch.arange(len(sizes)).repeat_interleave(sizes)
    crossing = (batch[parts.edge_index[0].long()] != batch[parts.edge_index[1].long()]).nonzero()
    if len(crossing):
        column, row = parts.edge_index[:, crossing[0, 0]].tolist()
        graphs = f"{int(batch[row])} and {int(batch[column])}"
        raise ValueError(f"ptr must cut adjacency into its blocks, got entry [{row}, {column}] between graphs {graphs}")
    return parts._replace(batch=batch, num_graphs=len(sizes))


def to_pyg(graphs: Any) -> list[Any]:
    data = library("torch_geometric.data", "to_pyg").Data
    num_edges = graphs.indptr[graphs.ptr].diff().long()
    edge_index = graphs.edge_index.long() - graphs.ptr[:-1].repeat_interleave(num_edges)
    sizes, edges = graphs.num_nodes_per_graph.tolist(), num_edges.tolist()
    columns = {"x": graphs.x.split(sizes), "edge_index": edge_index.split(edges, dim=1)}
    if graphs.edge_weight is not None:
        columns["edge_weight"] = graphs.edge_weight.split(edges)
    if graphs.y is not None:
        columns["y"] = graphs.y.split(1)
    if not sizes:  # split leaves one part of what is empty
        return []
    return [
        data(
            **{name: part.clone(memory_format=torch.contiguous_format) for name, part in zip(columns, row, strict=True)}
        )
        for row in zip(*columns.values(), strict=True)
    ]


def to_networkx(
    graphs: Any, x: str | None, y: str | None, edge_weight: str | None, undirected: bool, multigraph: bool
) -> list[Any]:
    networkx = library("networkx", "to_networkx")
    kind = getattr(networkx, f"{'Multi' if multigraph else ''}{'Graph' if undirected else 'DiGraph'}")
    source, target = graphs.edge_index.numpy()
    weight = np.ones(len(source)) if graphs.edge_weight is None else graphs.edge_weight.detach().numpy()
    ptr = graphs.ptr.numpy()

    def edge(number: int) -> str:
        graph = int(np.searchsorted(ptr, source[number], side="right")) - 1
        return f"{source[number] - ptr[graph]} -> {target[number] - ptr[graph]} of graph {graph}"

    order = np.lexsort((weight, target, source))
    chosen = np.arange(len(source))
    if undirected:
        reverse = np.lexsort((weight, source, target))
        there = np.stack([source[order], target[order], weight[order]])
        back = np.stack([target[reverse], source[reverse], weight[reverse]])
        if len(differ := (there != back).any(axis=0).nonzero()[0]):
            first = differ[0]
            lone = order[first] if tuple(there[:, first]) < tuple(back[:, first]) else reverse[first]
            raise ValueError(
                f"undirected must be False where edges differ from their reverse, got {edge(lone)} without its reverse"
                + ("" if graphs.edge_weight is None else " of the same weight")
            )
        order = chosen = order[source[order] <= target[order]]
    repeated = (np.diff(source[order]) == 0) & (np.diff(target[order]) == 0)
    if not multigraph and repeated.any():
        raise ValueError(
            f"multigraph must be True where edges are repeated, got {edge(order[repeated.argmax()])} twice"
        )
    bounds = np.searchsorted(source[chosen] if undirected else target, ptr)
    made = []
    for number, (first, last) in enumerate(itertools.pairwise(ptr.tolist())):
        graph = kind()
        graph.add_nodes_from(range(last - first))
        if x is not None:
            for node, values in enumerate(graphs.x[first:last].tolist()):
                graph.nodes[node][x] = values
        some = chosen[bounds[number] : bounds[number + 1]]
        ends = ((source[some] - first).tolist(), (target[some] - first).tolist())
        if graphs.edge_weight is None or edge_weight is None:
            graph.add_edges_from(zip(*ends, strict=True))
        else:
            graph.add_weighted_edges_from(zip(*ends, weight[some].tolist(), strict=True), weight=edge_weight)
        if y is not None and graphs.y is not None:
            graph.graph[y] = graphs.y[number].tolist()
        made.append(graph)
    return made
