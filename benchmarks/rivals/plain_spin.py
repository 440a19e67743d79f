"""SPIN itself without our kernels: vectorised as a good user of PyTorch writes it, and looped over graphs.

The vectorised form stacks the weights of the branches, gathers a batch from flat arrays with a few calls, and takes the
softmax and the sums of all graphs and branches at once. It comes with one row per node and with deduplicated rows. The
loop is written from the description of the authors' program: graph after graph, branch after branch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spin_fast import SPIN, PowerFeatures
from spin_fast._common.indexing import ragged_arange
from spin_fast._common.rows import take_dense


@dataclass(frozen=True)
class Rows:
    """One batch of the vectorised form: the rows of all branches, and the entries that refer to them."""

    rows: Tensor | tuple[Tensor, ...]  # [R + 1, N, d]; deduplicated: [U_r, d] for each branch
    index: Tensor | None  # the row of each entry
    count: Tensor | None  # how many nodes it stands for
    segment: Tensor  # graph * (R + 1) + branch of each entry: the sums of a graph come to lie side by side
    y: Tensor


class Vectorised(nn.Module):
    """The weights of a SPIN, evaluated by PyTorch's own operations."""

    def __init__(self, spin: SPIN) -> None:
        super().__init__()
        self.weights = nn.ParameterList(copy.deepcopy(layer.weight) for layer in spin.hops.layers)
        self.biases = nn.ParameterList(copy.deepcopy(layer.bias) for layer in spin.hops.layers)
        self.attention = copy.deepcopy(spin.hops.attention)
        self.classifier = copy.deepcopy(spin.classifier)

    def forward(self, inputs: Rows) -> Tensor:
        num_branches, num_graphs = len(self.weights[0]), len(inputs.y)
        z = self._branches(inputs.rows)
        entries = z if inputs.index is None else z[inputs.index]
        zeros = z.new_zeros(num_graphs * num_branches)
        if self.attention is None:
            entries = entries if inputs.count is None else entries * inputs.count[:, None]
            readout = zeros.new_zeros(len(zeros), z.shape[1]).index_add(0, inputs.segment, entries)
        else:
            beta = self._scores(z, inputs.rows)
            beta = beta if inputs.index is None else beta[inputs.index]
            top = zeros.scatter_reduce(0, inputs.segment, beta.detach(), "amax")
            mass = (beta - top[inputs.segment]).exp()
            mass = mass if inputs.count is None else mass * inputs.count
            total = zeros.index_add(0, inputs.segment, mass)
            sums = zeros.new_zeros(len(zeros), z.shape[1]).index_add(0, inputs.segment, mass[:, None] * entries)
            readout = sums / total.clamp_min(torch.finfo(z.dtype).tiny)[:, None]
        return self.classifier(readout.view(num_graphs, -1))

    def _branches(self, rows: Tensor | tuple[Tensor, ...]) -> Tensor:
        """``z``, the branches one after the other."""
        layers = list(zip(self.weights, self.biases, strict=True))
        if isinstance(rows, Tensor):
            for weight, bias in layers:
                rows = F.leaky_relu_(torch.baddbmm(bias.unsqueeze(1), rows, weight))
            return rows.flatten(0, 1)
        results = []
        for branch, x in enumerate(rows):
            for weight, bias in layers:
                x = F.leaky_relu_(torch.addmm(bias[branch], x, weight[branch]))
            results.append(x)
        return torch.cat(results)

    def _scores(self, z: Tensor, rows: Tensor | tuple[Tensor, ...]) -> Tensor:
        """``ReLU(<w, z>)`` of every row."""
        assert self.attention is not None
        if isinstance(rows, Tensor):
            return torch.bmm(z.view(len(rows), -1, z.shape[1]), self.attention.unsqueeze(2)).flatten().relu()
        parts = z.split([len(x) for x in rows])
        return torch.cat([part @ w for part, w in zip(parts, self.attention, strict=True)]).relu()


def row_batches(features: PowerFeatures, ids: Tensor, batch_size: int) -> Iterator[Rows]:
    """Batches of ``ids`` in that order, assembled as they are asked for, from features of either kind."""
    assert features.labels is not None
    num_branches, num_graphs = features.num_branches, features.node_ptr.numel() - 1
    powers = None if features.row_of_node is not None else features.rows.view(num_branches, -1, features.num_features)
    branches = torch.arange(num_branches)[:, None]
    for batch in ids.split(batch_size):
        numbers = torch.arange(len(batch)) * num_branches + branches
        if powers is not None:
            sizes = features.node_ptr[batch + 1] - features.node_ptr[batch]
            nodes = ragged_arange(features.node_ptr[batch], sizes)
            segment = numbers.flatten().repeat_interleave(sizes.repeat(num_branches))
            yield Rows(powers.index_select(1, nodes), None, None, segment, features.labels[batch])
        else:
            assert features.index is not None
            assert features.count is not None
            segments = (branches * num_graphs + batch).flatten()
            starts = features.ptr[segments]
            sizes = features.ptr[segments + 1] - starts
            entries = ragged_arange(starts, sizes)
            distinct, index = torch.unique(features.index[entries], return_inverse=True)
            row_ptr = torch.searchsorted(distinct, features.row_ptr.to(distinct.dtype))
            rows = take_dense(features.rows, distinct).split(row_ptr.diff().tolist())
            segment = numbers.flatten().repeat_interleave(sizes)
            yield Rows(rows, index, features.count[entries], segment, features.labels[batch])


class Separate(NamedTuple):
    """One batch of the loop: the rows of each graph, ``[R + 1, n, d]``."""

    graphs: list[Tensor]
    y: Tensor


class Loop(nn.Module):
    """The weights of a SPIN, evaluated graph by graph and branch by branch."""

    def __init__(self, spin: SPIN) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        for branch in range(spin.config["num_hops"] + 1):
            mlp = nn.Sequential()
            for layer in spin.hops.layers:
                weight, bias = (parameter[branch] for parameter in layer.parameters())
                linear = nn.Linear(*weight.shape)
                linear.load_state_dict({"weight": weight.t(), "bias": bias})
                mlp.extend([linear, nn.LeakyReLU()])
            self.branches.append(mlp)
        self.attention = nn.ParameterList(
            [] if spin.hops.attention is None else spin.hops.attention.detach().clone().unbind()
        )
        self.classifier = copy.deepcopy(spin.classifier)

    def forward(self, inputs: Separate) -> Tensor:
        return self.classifier(torch.stack([self._readout(powers) for powers in inputs.graphs]))

    def _readout(self, powers: Tensor) -> Tensor:
        readouts = []
        for branch, (mlp, x) in enumerate(zip(self.branches, powers, strict=True)):
            z = mlp(x)
            if len(self.attention):
                alpha = torch.relu(z @ self.attention[branch]).softmax(0)
                readouts.append((alpha[:, None] * z).sum(0))
            else:
                readouts.append(z.sum(0))
        return torch.cat(readouts)


def separate_batches(features: PowerFeatures, ids: Tensor, batch_size: int) -> Iterator[Separate]:
    """Batches of ``ids`` in that order, from features with one row per node."""
    assert features.labels is not None
    powers = features.rows.view(features.num_branches, -1, features.num_features)
    bounds = features.node_ptr.tolist()
    for batch in ids.split(batch_size):
        graphs = [powers[:, bounds[graph] : bounds[graph + 1]] for graph in batch.tolist()]
        yield Separate(graphs, features.labels[batch])
