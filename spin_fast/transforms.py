"""Transforms for PyG."""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from ._common import check
from .graphs import convert
from .graphs.batch import GraphBatch

try:
    from torch_geometric.data import Data
    from torch_geometric.transforms import BaseTransform
except ImportError as error:
    raise ImportError("spin_fast.transforms needs PyG, which is missing: pip install torch-geometric") from error


class SIGN(BaseTransform):
    """Attach ``ĀX, ..., Ā^K X`` as ``data.x1, ..., data.xK``, as ``torch_geometric.transforms.SIGN`` does.

    With the default operator the values are those of PyG's transform up to rounding: ``Ā = D^-1/2 A D^-1/2`` without
    added self-loops, where row ``v`` of ``A`` holds the edges that end in ``v``, with the weights ``data.edge_weight``
    if there are any. ``D`` on both sides is the row sum of ``A``, so the in-degree, in directed graphs as well; where
    it is 0 the row becomes 0. Repeated edges and self-loops count as they stand. ``data`` may be a ``Batch``.

    Other than there, a negative row sum is an error instead of NaN, and features in bfloat16 and float16, or in float64
    with weights in float32, are taken. To classify graphs, :meth:`spin_fast.GraphBatch.from_pyg` and
    :class:`spin_fast.PowerFeatures` serve better: equal rows are stored once.

    Args:
        K: the number of hops, at least 0.
        operator: ``sym``, ``adj``, ``sym+adj`` or ``rw``.

    Raises:
        TypeError, ValueError: name what is wrong with ``data``.
    """

    def __init__(self, K: int, operator: str = "sym") -> None:
        self.K = check.integer("K", K, 0)
        self.operator = check.operator(operator)

    def forward(self, data: Any) -> Any:
        if not isinstance(data, Data):
            raise TypeError(f"data must be a torch_geometric.data.Data or Batch, got {type(data).__name__}")
        for name in ("x", "edge_index"):
            if getattr(data, name) is None:
                raise ValueError(f"data must have {name}, got none")
        x, weight = data.x, data.edge_weight
        check.tensor("x", x, ("N", "d"), check.STORED)
        summed = x.dtype if x.dtype in check.FLOATS else torch.float32  # what sums run in, and weights have
        graph = GraphBatch.from_edge_index(
            convert.plain(data.edge_index),
            x.new_empty(len(x), 0, dtype=summed),
            edge_weight=None if weight is None else convert.narrowed("edge_weight", weight, summed),
        )
        powers = ops.power_features(
            graph.indptr, graph.indices, x, self.K, self.operator, edge_weight=graph.edge_weight, check_invariants=False
        )
        for hop, rows in enumerate(powers[1:], 1):
            data[f"x{hop}"] = rows
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(K={self.K}, operator={self.operator!r})"
