"""The branches of a SPIN: MLPs of rows, and their readouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from .layers import BranchLinear, BranchNorm, Rows, is_plain, nodes_per_graph, nodes_per_row


class Branches(nn.Module):
    """Branches of one input width: an MLP each, then the attention-weighted or plain sum of its rows over each graph.

    Args:
        num_branches: how many; their readouts are side by side.
        in_features: of a row.
        config: that of the :class:`SPIN`.
    """

    def __init__(self, num_branches: int, in_features: int, config: dict[str, Any]) -> None:
        super().__init__()
        self.num_branches, self.config = num_branches, config
        width, depth = config["hidden_features"], config["num_layers"]
        widths = [in_features] + [width] * depth
        self.attention = nn.Parameter(torch.empty(num_branches, width)) if config["attention"] else None
        self.layers = nn.ModuleList(BranchLinear(num_branches, a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(BranchNorm(num_branches, width) for _ in range(depth * config["batch_norm"]))
        if self.attention is not None:
            bound = 1 / math.sqrt(width)
            nn.init.uniform_(self.attention, -bound, bound)

    def forward(self, rows: Rows, ptr: Tensor, index: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """Readouts ``[G, num_branches * h]``, module by module; arguments as in :meth:`SPIN.forward_tensors`."""
        return self._readout(self.transformed(rows, index, count), ptr, index, count)

    def transformed(self, rows: Rows, index: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """The rows after all layers, which the readout sums."""
        sizes = None if isinstance(rows, Tensor) else [x.shape[0] for x in rows]
        times = None
        if sizes is not None and self.has_batch_statistics():
            times = nodes_per_row(sum(sizes), index, count)
        for depth, linear in enumerate(self.layers):
            z = linear(rows)
            if self.norms:
                z = self.norms[depth](z, sizes, times)
            z = F.leaky_relu(z, self.config["negative_slope"])
            z = F.dropout(z, self.config["dropout"], self.training)
            rows = z if sizes is None else z.split(sizes)
        return z

    def fused(self, rows: Tensor, ptr: Tensor, nodes_per_graph: Tensor | None, **segments: Tensor | None) -> Tensor:
        """The same by :func:`spin_fast.branch_readout`, BatchNorm folded into the layers before it.

        ``nodes_per_graph [G]`` scales the readouts; None does not.
        """
        (weights, biases), slope = self._folded(), self.config["negative_slope"]
        readout = ops.branch_readout(
            rows, weights, biases, self.attention, ptr, **segments, negative_slope=slope, check_invariants=False
        )
        return readout if nodes_per_graph is None else readout * nodes_per_graph.to(readout.dtype)[:, None]

    def evaluated_rows(self, num_nodes: int, operator: str) -> ops.EvaluatedRows:
        """What computes :meth:`fused` of chunks of so many nodes in all."""
        options = {"negative_slope": self.config["negative_slope"], "num_nodes": num_nodes, "operator": operator}
        return ops.EvaluatedRows(*self._folded(), self.attention, **options)

    def bound(self) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
        """What computes :meth:`fused` of dense rows, parts and ptr as long as no weight changes."""
        slope = self.config["negative_slope"]
        return ops.bind_branch_readout(*self._folded(), self.attention, negative_slope=slope)

    def _folded(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases of the layers, with BatchNorm in them."""
        linears = self._linears
        weights: list[Tensor] = [layer.weight for layer in linears]
        biases: list[Tensor] = [layer.bias for layer in linears]
        for depth, norm in enumerate(cast("list[BranchNorm]", [*self.norms])):
            weights[depth], biases[depth] = norm.folded(weights[depth], biases[depth])
        return weights, biases

    @property
    def _linears(self) -> list[BranchLinear]:
        return cast("list[BranchLinear]", [*self.layers])

    def has_batch_statistics(self) -> bool:
        return any(norm.training for norm in self.norms)

    def is_as_constructed(self) -> bool:
        """Whether :meth:`fused` computes what :meth:`forward` would: all modules are what the constructor made."""
        depth, with_norms = self.config["num_layers"], self.config["batch_norm"]
        layers = [is_plain(layer, BranchLinear) for layer in self.layers]
        norms = [is_plain(norm, BranchNorm) for norm in self.norms]
        return is_plain(self, Branches) and layers == [True] * depth and norms == [True] * (depth * with_norms)

    def calibrate(self, rows: Sequence[Tensor], ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
        """Scale the layers by ragged rows, see :meth:`SPIN.calibrate`; returns the readouts."""
        sizes, num_rows = [len(x) for x in rows], sum(len(x) for x in rows)
        times = nodes_per_row(num_rows, index, count)
        times_of = (ptr.new_ones(num_rows) if times is None else times).split(sizes)
        for layer in self._linears:
            for branch, (z, times) in enumerate(zip(layer(rows).split(sizes), times_of, strict=True)):
                std, mean = deviation_and_mean(z, times)
                layer.weight[branch] /= std
                layer.bias[branch] = (layer.bias[branch] - mean) / std
            rows = F.leaky_relu(layer(rows), self.config["negative_slope"]).split(sizes)
        return self._readout(torch.cat([*rows]), ptr, index, count)

    def _readout(self, z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
        if self.attention is None:
            return ops.sum_readout(
                z, ptr, index=index, count=count, num_branches=self.num_branches, check_invariants=False
            )
        readout = ops.attention_readout(z, self.attention, ptr, index=index, count=count, check_invariants=False)
        if not self.config["size_aware"]:
            return readout
        # In the ragged form the entries of branch 0 tell the number of nodes.
        bounds = ptr if z.dim() == 3 else ptr[: (ptr.shape[0] - 1) // self.num_branches + 1]
        return readout * nodes_per_graph(bounds, count).to(readout.dtype)[:, None]


def deviation_and_mean(values: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Of each column of ``values [n, h]``, rows counted ``times [n]``; a deviation that is hardly any is 1."""
    share = times.to(values.dtype) / times.sum()
    mean = share @ values
    std = (share @ (values - mean).square()).sqrt()
    return torch.where(std > 1e-4, std, torch.ones_like(std)), mean
