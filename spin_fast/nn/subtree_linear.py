"""A linear model on counts of subtree patterns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from .._common import check
from ..features.subtree_counts import (
    Norm,
    check_options,
    edge_types_of,
    subtree_columns,
    subtree_counts,
    subtree_entries,
)
from ..graphs.batch import GraphBatch
from .base import GraphModel

BYTES_PER_ENTRY = 64  # of a node after a hop: its key, its column, and what sorts these


class SubtreeLinear(GraphModel):
    """Class scores that are linear in the counts of the subtree patterns (1-WL) of a graph.

    The columns are those of :class:`spin_fast.sklearn.SubtreeCounts`. Only columns that occur in training have weights;
    patterns that occur elsewhere alone add nothing to the scores, but to the norm. A new model has weights of 0 for the
    first columns; ``selection.SubtreeRecipe`` fits one, in float64.

    Args:
        in_features: ``d``.
        out_features: number of classes (or of tasks, for binary tasks side by side).
        num_weights: ``K``, how many columns have weights, at least 1.
        num_hops: ``R``, rounds of refinement.
        num_columns: of the counts, at most 2**31; two patterns share one with a chance of one to as many.
        norm: divide the counts of a graph by their ``"l1"`` or ``"l2"`` norm; None for counts.
        edge_types: take edge weights, whole numbers, as types of edges.
        seed: of the hash.
        features: which columns of ``x`` nodes are compared by; None for all.

    Attributes:
        columns: ``[K]`` int64, those that have weights, ascending.
        weight: ``[K, out_features]``.
        bias: ``[out_features]``.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    columns: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_weights: int,
        *,
        num_hops: int = 3,
        num_columns: int = 2**20,
        norm: Norm | None = "l2",
        edge_types: bool = False,
        seed: int = 0,
        features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check.integer("in_features", in_features, 0)
        self.out_features = check.integer("out_features", out_features, 1)
        check_options(num_hops, norm, edge_types, seed, num_columns=num_columns)
        if check.integer("num_weights", num_weights, 1) > num_columns:
            raise ValueError(f"num_weights must be at most {num_columns}, the number of columns, got {num_weights}")
        if features is not None:
            features = [check.integer("features", column, 0) for column in features]
            if max(features, default=-1) >= in_features:
                raise ValueError(f"features must be less than {in_features}, the number of columns, got {features}")
        self.options: dict[str, Any] = {
            "num_hops": num_hops,
            "num_columns": num_columns,
            "norm": norm,
            "edge_types": edge_types,
            "seed": seed,
            "features": features,
        }
        sizes = {"in_features": in_features, "out_features": out_features, "num_weights": num_weights}
        self.config: dict[str, Any] = sizes | self.options
        self.register_buffer("columns", torch.arange(num_weights))
        self.weight = nn.Parameter(torch.zeros(num_weights, out_features, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=torch.float64))

    def forward(self, graphs: GraphBatch) -> Tensor:
        """Class scores ``[G, out_features]``, in the dtype of the weights."""
        if graphs.num_features != self.in_features:
            raise ValueError(f"graphs must have {self.in_features} features as the model, got {graphs.num_features}")
        types = edge_types_of(graphs) if self.options["edge_types"] else None
        return self.forward_tensors(graphs.indptr, graphs.indices, graphs.x, graphs.ptr, types)

    def forward_tensors(
        self, indptr: Tensor, indices: Tensor, x: Tensor, ptr: Tensor, edge_type: Tensor | None = None
    ) -> Tensor:
        """The same from the arrays of a ``GraphBatch``, whose contents are not checked."""
        names = ("num_hops", "num_columns", "seed", "features", "norm")
        num_hops, num_columns, seed, features, norm = (self.options[name] for name in names)
        x = x if features is None else x[:, features]
        entries = subtree_entries(indptr, indices, x, ptr, num_hops, num_columns, seed, edge_type)
        graph, column = entries // num_columns, entries % num_columns
        place = torch.searchsorted(self.columns, column).clamp(max=len(self.columns) - 1)
        known = (self.columns[place] == column).to(self.weight.dtype)
        bags = ptr * (num_hops + 1)
        scores = F.embedding_bag(
            place, self.weight, bags, mode="sum", per_sample_weights=known, include_last_offset=True
        )
        if norm is not None:
            size = bags.diff()
            if norm == "l2":  # the sum of the squares of counts is that of the counts of all entries
                count = torch.searchsorted(entries, entries, right=True) - torch.searchsorted(entries, entries)
                size = torch.zeros_like(size).index_add(0, graph, count)  # of integers: in any order
            size = size.clamp(min=1).to(scores.dtype)
            scores = scores / (size if norm == "l1" else size.sqrt())[:, None]
        return scores + self.bias

    @property
    def _is_trained(self) -> bool:
        return self.multilabel is not None

    @torch.no_grad()
    def contributions(self, graphs: GraphBatch) -> Tensor:
        """What each node adds to each score after each hop, ``[num_hops + 1, N, out_features]``: all but ``bias``."""
        options = self.options
        x = graphs.x if options["features"] is None else graphs.x[:, options["features"]]
        types = edge_types_of(graphs) if options["edge_types"] else None
        num_hops, num_columns, seed = (options[name] for name in ("num_hops", "num_columns", "seed"))
        column = subtree_columns(graphs.indptr, graphs.indices, x, num_hops, num_columns, seed, types)
        place = torch.searchsorted(self.columns, column).clamp(max=len(self.columns) - 1)
        added = self.weight[place] * (self.columns[place] == column)[:, :, None]
        if options["norm"] is None:
            return added
        counts = subtree_counts(graphs, **options | {"norm": None})
        values = counts.value if options["norm"] == "l1" else counts.value.square()
        size = ops.sum_readout(values[:, None], counts.ptr)[:, 0]
        size = size if options["norm"] == "l1" else size.sqrt()
        return added / size.repeat_interleave(graphs.num_nodes_per_graph)[None, :, None].to(added.dtype)

    def score_chunks(self, graphs: GraphBatch, operator: str | None, num_bytes: int) -> Iterator[Tensor]:
        """Class scores of consecutive chunks, see :meth:`GraphModel.score_chunks`."""
        if len(graphs) == 0:
            yield self(graphs)
        nodes = num_bytes // (BYTES_PER_ENTRY * (self.options["num_hops"] + 1))
        for begin, end in graphs.chunks(nodes, num_bytes // graphs.indices.element_size()):
            yield self(graphs[begin:end])

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())
