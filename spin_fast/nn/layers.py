"""What the branches of a model are made of: layers with one set of weights per branch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import ops
from .._common import torch_compat
from .._common.indexing import offsets, without_waiting
from ..ops import reference

Rows = Tensor | Sequence[Tensor]


class BranchLinear(nn.Module):
    """One linear layer per branch, weights stacked: ``weight [R + 1, d_in, d_out]``, ``bias [R + 1, d_out]``.

    Dense rows ``[R + 1, N, d_in]`` become ``[R + 1, N, d_out]``. A sequence of ``R + 1`` tensors ``[U_r, d_in]``
    becomes ``[U, d_out]``, the rows of all branches one after the other.
    """

    def __init__(self, num_branches: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_branches, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(num_branches, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        bound = 1 / math.sqrt(max(self.weight.shape[1], 1))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, rows: Rows) -> Tensor:
        if isinstance(rows, Tensor):
            return torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight)
        weights, biases = self.weight.unbind(), self.bias.unbind()
        return torch.cat([torch.addmm(bias, x, weight) for bias, x, weight in zip(biases, rows, weights, strict=True)])

    def extra_repr(self) -> str:
        branches, in_features, out_features = self.weight.shape
        return f"branches={branches}, in_features={in_features}, out_features={out_features}"


class BranchNorm(nn.BatchNorm1d):
    """BatchNorm over the nodes, per branch and column.

    A row of the ragged form that stands for several nodes counts as often, so the statistics are those of the nodes.
    """

    def __init__(self, num_branches: int, num_features: int) -> None:
        super().__init__(num_branches * num_features)
        self.num_branches = num_branches

    def forward(self, z: Tensor, sizes: Sequence[int] | None = None, times: Tensor | None = None) -> Tensor:
        """Normalise dense ``z [R + 1, N, h]``, or ragged ``z [U, h]`` with the rows per branch and nodes per row."""
        shape = (self.num_branches, -1)
        stored, z = z.dtype, z.to(self.weight.dtype)  # autocast's half types are too coarse for statistics
        if sizes is None:
            nodes = torch.tensor(z.shape[1])

            def spread(values: Tensor) -> Tensor:
                return values.unsqueeze(1)

            def total(values: Tensor) -> Tensor:
                return values.sum(1)

        else:
            nodes = torch.tensor(sizes[0]) if times is None else times[: sizes[0]].sum()
            ptr = without_waiting(offsets(torch.tensor(sizes)), z.device)
            branch = reference.segment_of_entry(ptr, z.shape[0])

            def spread(values: Tensor) -> Tensor:
                return values[branch]

            def total(values: Tensor) -> Tensor:
                sums = ops.sum_readout(values, ptr, count=times, num_branches=self.num_branches, check_invariants=False)
                return sums.view(shape)

        if self.training:
            mean = total(z) / nodes.clamp(min=1)
            var = total((z - spread(mean)).square()) / nodes.clamp(min=1)
            self._update(mean, var, nodes)
        else:
            mean, var = self.get_buffer("running_mean").view(shape), self.get_buffer("running_var").view(shape)
        scale = self.weight.view(shape) * torch.rsqrt(var + self.eps)
        return (z * spread(scale) + spread(self.bias.view(shape) - mean * scale)).to(stored)

    def folded(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The layer before it, ``[R + 1, d_in, h]`` and ``[R + 1, h]``, with the evaluation's normalisation in it."""
        mean, var = (self.get_buffer(name).view(bias.shape) for name in ("running_mean", "running_var"))
        scale = self.weight.view(bias.shape) * torch.rsqrt(var + self.eps)
        return weight * scale[:, None, :], (bias - mean) * scale + self.bias.view(bias.shape)

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor, nodes: Tensor) -> None:
        """Move the running statistics; a single node has no variance and moves nothing."""
        unbiased = var * nodes / (nodes - 1).clamp(min=1)
        tracked = self.get_buffer("num_batches_tracked")
        tracked += nodes > 1 if self.momentum is None else 1  # without, all batches that have a variance count alike
        rate = (1 / tracked.to(mean).clamp(min=1) if self.momentum is None else self.momentum) * (nodes > 1)
        for name, value in (("running_mean", mean), ("running_var", unbiased)):
            running = self.get_buffer(name)
            running += rate * (value.flatten() - running)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of ``module`` is ``kind.forward`` and nothing else.

    A subclass (which a parametrization makes of a module), a hook (pruning is one, and ``weight_norm``) or a
    ``forward`` of the instance does something else.
    """
    return type(module) is kind and "forward" not in module.__dict__ and not torch_compat.has_hooks(module)


def nodes_per_graph(ptr: Tensor, count: Tensor | None) -> Tensor:
    """``[G]``, from the segments of one branch."""
    return ptr.diff() if count is None else offsets(count)[ptr].diff()


def nodes_per_row(num_rows: int, index: Tensor | None, count: Tensor | None) -> Tensor | None:
    """How many nodes each row stands for, ``[num_rows]`` int32; None for one each."""
    if index is None:
        return count
    times = torch.zeros(num_rows, dtype=torch.int32, device=index.device)
    return times.index_add(0, index, torch.ones_like(index, dtype=torch.int32) if count is None else count)
