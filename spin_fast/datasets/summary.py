"""Summary of a data set: sizes, memory, directions of edges, and graphs that no model can tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from .common import Folder
from .splits import Split


def summarize(
    read: Folder, num_hops: int = 3, operator: str | Sequence[str] = "sym", splits: Mapping[str, Split] | None = None
) -> dict[str, Any]:
    """Summarise a data set, as ``spin-fast info`` shows it.

    Graphs are *duplicates* if all models of these hops and this operator give them the same scores. Where the labels of
    duplicates differ, some predictions are wrong whatever the model, which bounds the accuracy.

    Edges are counted once however often they are repeated; in an undirected graph both directions count as one edge.

    Args:
        read: the graphs, as :meth:`Source.read` or :func:`load_folder` returns them.
        num_hops, operator: as in :meth:`spin_fast.PowerFeatures.from_graphs`.
        splits: splits by name, to count the validation and test graphs that have a duplicate in training.

    Returns:
        JSON values under these keys. ``nodes``, ``edges`` and ``density`` (without self-loops) are spreads over the
        graphs: mean, median, min, max and, of counts, the total.

        - ``graphs``, ``nodes``, ``edges``, ``density``, ``empty_graphs``, ``isolated_nodes``, ``self_loops``,
          ``repeated_edges``, ``directed``, ``weighted``.
        - ``features``: their ``width`` and ``dtype``, the width and kind of their ``parts``, the ``columns`` of tables
          that they are made of, and what else a TU set has, ``unused``.
        - ``classes``: name and number of graphs of each; ``tasks``: their number, names and the share of known labels.
        - ``operator``, ``hops``; ``bytes`` of the graphs, the powers and the deduplicated features; ``deduplication``:
          nodes per stored row of each branch; ``joint_deduplication``: nodes per joint row.
        - ``duplicates``: the number of graphs with a duplicate, of ``distinct`` graphs, of duplicates with
          ``contradicting`` labels, and the ``best_accuracy`` that is possible.
        - ``splits``: the sizes of each, and how many validation and test graphs have a duplicate in training.
    """
    graphs = read.graphs
    features = PowerFeatures.from_graphs(graphs, num_hops, operator)
    first = features.identical_graphs(joint=True)
    columns = read.features if isinstance(read.features, list) else None
    return {
        **_structure(graphs),
        "features": _features(graphs, read.widths) | {"columns": columns, "unused": list(read.unused)},
        **_labels(graphs, read.classes, read.tasks),
        "operator": features.operator,
        "hops": num_hops,
        "bytes": {
            "graphs": sum(value.nbytes for value in vars(graphs).values() if isinstance(value, Tensor)),
            "powers": features.num_branches * graphs.x.nbytes,
            "features": features.nbytes - (0 if features.row_of_node is None else features.row_of_node.nbytes),
        },
        "deduplication": features.deduplication,
        "joint_deduplication": graphs.num_nodes / max(len(features.joint.parts), 1),
        "duplicates": _duplicates(first, graphs.y),
        "splits": [_overlap(name, split, first) for name, split in (splits or {}).items()],
    }


MOSTLY = 0.9  # a list of both directions may lack some


class Directions(NamedTuple):
    """How edges are listed, self-loops aside: some lack their reverse (``one_way``), most are repeated (``twice``)."""

    one_way: bool
    twice: bool


def directions_of(graphs: GraphBatch) -> Directions:
    edges, rows = _merged(graphs, np.ones(graphs.num_edges, np.int32))
    times = edges.data[rows != edges.indices]
    twice = len(times) > 0 and float((times > 1).mean()) > MOSTLY
    return Directions(_differs_from_reverse(edges, ("indptr", "indices")), twice)


def _merged(graphs: GraphBatch, weight: np.ndarray) -> tuple[Any, np.ndarray]:
    """The adjacency as a ``csr_array`` in canonical form, with the sum of the weights of repeated edges; their rows."""
    from scipy.sparse import csr_array

    shape = (graphs.num_nodes, graphs.num_nodes)
    edges = csr_array((weight, graphs.indices.numpy(), graphs.indptr.numpy()), shape=shape)
    if not edges.has_canonical_format:
        edges = edges.copy()  # the arrays belong to the graphs
        edges.sum_duplicates()
    return edges, np.repeat(np.arange(graphs.num_nodes, dtype=edges.indices.dtype), np.diff(edges.indptr))


def _differs_from_reverse(edges: Any, parts: Sequence[str]) -> bool:
    reverse = edges.T.tocsr()
    return any(not np.array_equal(getattr(edges, part), getattr(reverse, part)) for part in parts)


def _structure(graphs: GraphBatch) -> dict[str, Any]:
    ptr, num_nodes = graphs.ptr.numpy(), graphs.num_nodes
    weight = np.ones(graphs.num_edges, np.int32) if graphs.edge_weight is None else graphs.edge_weight.numpy()
    edges, rows = _merged(graphs, weight)
    directed = _differs_from_reverse(edges, ("indptr", "indices", "data"))
    proper = rows != edges.indices
    gathering = np.bincount(rows[proper], minlength=num_nodes)
    isolated = gathering == 0
    if directed:
        isolated &= np.bincount(edges.indices[proper], minlength=num_nodes) == 0
    nodes = np.diff(ptr)
    before = np.concatenate([[0], np.cumsum(gathering)])
    proper_edges = before[ptr[1:]] - before[ptr[:-1]]
    loops = np.diff(edges.indptr[ptr]) - proper_edges
    pairs = nodes * (nodes - 1)
    density = np.divide(proper_edges, pairs, out=np.zeros(len(nodes)), where=pairs > 0)
    return {
        "graphs": len(graphs),
        "nodes": _spread(nodes),
        "edges": _spread((proper_edges if directed else proper_edges // 2) + loops),
        "density": _spread(density),
        "empty_graphs": int((nodes == 0).sum()),
        "isolated_nodes": int(isolated.sum()),
        "self_loops": int(loops.sum()),
        "repeated_edges": graphs.num_edges - edges.nnz,
        "directed": directed,
        "weighted": graphs.edge_weight is not None,
    }


def _spread(values: np.ndarray) -> dict[str, Any]:
    """Spread of a number over the graphs; counts have a total, too."""
    if len(values) == 0:
        return dict.fromkeys(("mean", "median", "min", "max"))
    spread = {
        name: function(values).item()
        for name, function in (("mean", np.mean), ("median", np.median), ("min", np.min), ("max", np.max))
    }
    return spread if values.dtype.kind == "f" else {"total": int(values.sum())} | spread


def _features(graphs: GraphBatch, widths: list[int]) -> dict[str, Any]:
    """Width and kind of the node features, for the measured numbers and each code."""
    x = graphs.x
    kinds = [{"width": part.shape[1], "kind": _kind(part, graphs.degree)} for part in x.split(widths, dim=1)]
    return {"width": x.shape[1], "dtype": str(x.dtype).removeprefix("torch."), "parts": kinds}


def _kind(x: Tensor, degree: Tensor) -> str:
    if bool((x == x[:1]).all()):
        return "constant"
    if x.shape[1] == 1 and torch.equal(x[:, 0], degree.to(x.dtype)):
        return "degree"
    if bool(((x == 0) | (x == 1)).all()):
        return "one-hot" if bool((x.sum(1) == 1).all()) else "0 or 1"
    return "whole numbers" if bool((x == x.round()).all()) else "real numbers"


def _labels(graphs: GraphBatch, names: Sequence[str] | None, task_names: Sequence[str] | None) -> dict[str, Any]:
    """Sizes of the classes, or the fraction of known labels of tasks, with names where there are any."""
    y = graphs.y
    if y is None:
        return {"classes": None, "tasks": None}
    if y.is_floating_point():
        tasks = y.view(len(y), -1)
        known = tasks == tasks
        labelled = known.double().mean().item() if known.numel() else None
        return {"classes": None, "tasks": {"number": tasks.shape[1], "labelled": labelled, "names": task_names}}
    sizes = torch.bincount(y, minlength=0 if names is None else len(names)).tolist()
    names = list(map(str, range(len(sizes)))) if names is None else names
    return {
        "classes": [{"name": name, "graphs": size} for name, size in zip(names, sizes, strict=True)],
        "tasks": None,
    }


def _duplicates(first: Tensor, y: Tensor | None) -> dict[str, Any]:
    """Count duplicates, and those whose labels differ; ``first`` ``[G]`` is the first graph identical to each one."""
    times = torch.bincount(first, minlength=len(first))
    found: dict[str, Any] = {
        "graphs": int(times[times > 1].sum()),
        "distinct": int((times > 0).sum()),
        "contradicting": None,
        "best_accuracy": None,
    }
    if y is None or len(y) == 0:
        return found
    if y.is_floating_point():
        tasks = y.view(len(y), -1)
        of = first[:, None].expand_as(tasks)
        low, high = (
            torch.full_like(tasks, missing).scatter_reduce(0, of, tasks.nan_to_num(missing), reduce)
            for reduce, missing in (("amin", torch.inf), ("amax", -torch.inf))
        )
        contradictory = (low < high).any(1)
    else:
        num_classes = int(y.max()) + 1
        kinds, number = torch.unique(first * num_classes + y, return_counts=True)
        of = kinds // num_classes
        most = torch.zeros_like(first).scatter_reduce(0, of, number, "amax")
        found["best_accuracy"] = int(most.sum()) / len(y)
        contradictory = torch.bincount(of, minlength=len(first)) > 1
    found["contradicting"] = int(times[contradictory].sum())
    return found


def _overlap(name: str, split: Split, first: Tensor) -> dict[str, Any]:
    seen = {
        f"{part}_seen": int(torch.isin(first[ids], first[split.train]).sum())
        for part, ids in (("validation", split.validation), ("test", split.test))
    }
    return {"name": name} | {part: len(ids) for part, ids in split._asdict().items()} | seen
