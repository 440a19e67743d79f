"""The family that SPIN belongs to, made of any parts: for graphs, and in its node-level form for nodes and links."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import ops
from .._common import check, torch_compat
from .._common.indexing import offsets
from ..features.power_features import PowerFeatures
from ..ops import reference
from .base import GraphClassifier
from .layers import Rows, nodes_per_graph

Readout = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
Combine = Callable[[Sequence[Tensor]], Tensor]


class PAGNN(GraphClassifier):
    """A GNN with parallel neighbourhood aggregation, of any parts (Doshi & Chepuri, section "A generic PA-GNN model").

    Branch ``r`` transforms the rows of its hop, ``z_v^(r) = g^(r)(b_v^(r))``; a readout makes one vector per graph of
    them, ``s_G^(r)``; a combination makes one of those, ``e_G``; a classifier scores it. ``SPIN`` is the case of MLPs,
    the attention or the sum, concatenation, and an MLP; its steps are one operation each: prefer it where it fits.

    What the paper shows of the parts: the model tells apart all graphs that colour refinement (1-WL) does if operator,
    branches, readout and combination are injective (Theorem 1). A branch of a single linear layer, with a ReLU or
    without, is not (Lemma 1): give each two or more. The readouts ``"mean"`` and ``"max"`` are not, they cannot tell
    regular graphs of equal nodes apart (Lemma 3), and the attention, a softmax, is the mean there; ``"sum"`` is. Of the
    combinations ``"concat"`` is.

    *Node level.* With ``readout=None`` there is one output per node, ``h_v = Theta(z_v^(0), ..., z_v^(R))``, where
    ``combine`` and ``classifier`` are ``Theta``: SIGN is ``"concat"`` and an MLP, GA-MLPs are of this form. The model
    then takes :meth:`PowerFeatures.nodes`, in which every node is a graph, and so do ``training.fit`` and ``predict``.

    Args:
        branches: ``R + 1`` modules from ``[*, d]`` to ``[*, h_r]``, or ``1 + k R`` with ``k`` operators; the same
            module several times shares its weights.
        readout: ``"sum"``, ``"mean"``, ``"max"``, an :class:`AttentionReadout`, an aggregation of PyG
            (``torch_geometric.nn.aggr``), None, or any function of ``z [U, h]``, ``ptr [G + 1]``, ``index [nnz]`` and
            ``count [nnz]`` that returns ``[G, k]``: entry ``e`` of graph ``g``, ``ptr[g] <= e < ptr[g + 1]``, is the
            row ``z[index[e]]``, ``count[e]`` times; ``index`` None is the identity, ``count`` None is ones, as they are
            where rows are not shared. One for all branches, or a list of one for each. Nodes have no order in it.
        combine: ``"concat"``, ``"sum"``, ``"mean"``, ``"max"``, a :class:`BranchAttention`, or any function of the list
            of ``R + 1`` tensors ``[G, k_r]`` that returns ``[G, k]``, such as PyG's ``JumpingKnowledge``.
        classifier: a module from ``[G, k]`` to class scores ``[G, C]``; None returns the embeddings ``e_G`` themselves.
        per_node: send every node through the branches, rather than every distinct row once. Both are the same for what
            treats rows one by one, and alike, which dropout and BatchNorm do not: None does so in training where a
            branch has a layer of those, as torch or PyG has them, and never in evaluation.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """

    def __init__(
        self,
        branches: Sequence[nn.Module],
        readout: str | Readout | Sequence[str | Readout] | None = "sum",
        combine: str | Combine = "concat",
        classifier: nn.Module | None = None,
        *,
        per_node: bool | None = None,
    ) -> None:
        super().__init__()
        if isinstance(branches, nn.Sequential) or not isinstance(branches, Iterable):  # layers, not branches
            raise TypeError(f"branches must be a list of modules, one per hop, got {type(branches).__name__}")
        branches = list(branches)
        for branch in branches:
            if not isinstance(branch, nn.Module):
                raise TypeError(f"branches must hold torch.nn.Modules, got {type(branch).__name__}")
        if not branches:
            raise ValueError("branches must hold at least one module, got none")
        if classifier is not None and not isinstance(classifier, nn.Module):
            raise TypeError(f"classifier must be a torch.nn.Module or None, got {type(classifier).__name__}")
        if per_node is not None:
            check.flag("per_node", per_node)
        self.num_branches = len(branches)
        self.branches = nn.ModuleList(branches)
        self.readout = _readouts(readout, len(branches))
        self.combine = _part("combine", combine, COMBINATIONS)
        self.classifier = classifier
        self.per_node = per_node

    def forward(self, features: PowerFeatures) -> Tensor:
        """Class scores ``[G, C]`` of the selected graphs, or of the nodes where ``readout`` is None."""
        self.check(features)
        per_node = self.training and any(map(_is_random, self.branches)) if self.per_node is None else self.per_node
        if per_node:
            return self.forward_tensors(features.dense_rows(), features.selected_ptr, check_invariants=False)
        return self.forward_tensors(*features.branch_rows(), check_invariants=False)

    def forward_tensors(
        self,
        rows: Rows,
        ptr: Tensor,
        index: Tensor | None = None,
        count: Tensor | None = None,
        *,
        check_invariants: bool = True,
    ) -> Tensor:
        """Class scores from plain tensors, as :meth:`spin_fast.SPIN.forward_tensors` takes them.

        For the node level ``rows`` may be ``power_features(...)[:, nodes]``, with ``ptr = torch.arange(n + 1)``.
        """
        self._check_tensors(rows, ptr, index, count, check_invariants)
        num_branches = len(rows)
        readouts = self.readout if isinstance(self.readout, nn.ModuleList) else [self.readout] * num_branches
        if isinstance(rows, Tensor):
            segments: Any = [(ptr, None, None)] * num_branches
        else:
            segments = _segments(rows, ptr, index, count)
        embeddings = []
        for branch, readout, x, entries in zip(self.branches, readouts, rows, segments, strict=True):
            z = branch(x)
            if z.dim() != 2 or len(z) != len(x):
                raise ValueError(f"branches must return one row for each of {len(x)}, got {list(z.shape)}")
            embeddings.append(readout(z, *entries))
            if embeddings[-1].shape[:-1] != (entries[0].numel() - 1,):
                graphs, shape = entries[0].numel() - 1, list(embeddings[-1].shape)
                raise ValueError(f"readout must return [{graphs}, k], one row per graph, got {shape}")
        combined = self.combine(embeddings)
        return combined if self.classifier is None else self.classifier(combined)


class AttentionReadout(nn.Module):
    """The readout of SPIN-att for one branch: a softmax of ``ReLU(<w, z_v>)`` over the graph weighs its ``z_v``.

    Args:
        in_features: ``h``.
        size_aware: multiply by the number of nodes, which a softmax does not see.
    """

    def __init__(self, in_features: int, *, size_aware: bool = False) -> None:
        super().__init__()
        check.integer("in_features", in_features, 1)
        check.flag("size_aware", size_aware)
        self.weight = nn.Parameter(torch.empty(in_features))
        self.size_aware = size_aware
        bound = 1 / math.sqrt(in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, z: Tensor, ptr: Tensor, index: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        readout = ops.attention_readout(
            z.to(self.weight.dtype), self.weight, ptr, index=index, count=count, check_invariants=False
        )
        return readout * nodes_per_graph(ptr, count).to(readout.dtype)[:, None] if self.size_aware else readout

    def extra_repr(self) -> str:
        return f"in_features={len(self.weight)}, size_aware={self.size_aware}"


class BranchAttention(nn.Module):
    """A combination: the sum of the branches' ``s^(r)``, weighted by a softmax of ``<w, tanh(W s^(r))>`` over them.

    Args:
        in_features: the width ``k`` that all branches have.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        check.integer("in_features", in_features, 1)
        self.score = nn.Sequential(nn.Linear(in_features, in_features), nn.Tanh(), nn.Linear(in_features, 1))

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Combine ``R + 1`` tensors ``[G, k]`` into one."""
        stacked = _stacked(embeddings)
        return (self.score(stacked).softmax(0) * stacked).sum(0)


class LinkPredictor(nn.Module):
    """Scores of pairs of nodes: the inner product of their representations, or a module on the elementwise one.

    Train it with ``torch.nn.functional.binary_cross_entropy_with_logits`` on pairs that are linked and pairs that are
    not. Links to be predicted must not be among the edges that the features were computed from.

    Args:
        encoder: makes the representations ``[n, k]``, such as ``PAGNN(branches, readout=None)``.
        head: a module from ``[P, k]`` to ``[P, 1]``; None for the sum.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        for name, module in (("encoder", encoder), ("head", head)):
            if not isinstance(module, nn.Module) and (module is not None or name == "encoder"):
                raise TypeError(f"{name} must be a torch.nn.Module, got {type(module).__name__}")
        self.encoder, self.head = encoder, head

    def forward(self, features: PowerFeatures, pairs: Tensor) -> Tensor:
        """Scores ``[P]`` of ``pairs [2, P]``, int64; only nodes that occur in them are encoded, each once.

        ``features`` are those of :meth:`PowerFeatures.nodes`.
        """
        check.tensor("pairs", pairs, (2, "P"), (torch.int64,), features.rows.device)
        if pairs.is_cpu and pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < len(features):
            low, high = int(pairs.min()), int(pairs.max())
            raise ValueError(f"pairs must be nodes in [0, {len(features)}), got {low} to {high}")
        nodes, pairs = pairs.unique(return_inverse=True)
        return self.decode(self.encoder(features[nodes]), pairs)

    def decode(self, h: Tensor, pairs: Tensor) -> Tensor:
        """Scores ``[P]`` of pairs of rows of ``h [n, k]``."""
        product = h[pairs[0]] * h[pairs[1]]
        return product.sum(1) if self.head is None else self.head(product).squeeze(1)


class _Function(nn.Module):
    """A function among modules."""

    def __init__(self, function: Callable[..., Tensor], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, *args: Any) -> Tensor:
        return self.function(*args)

    def __repr__(self) -> str:
        return self.name


class _Aggregation(nn.Module):
    """An aggregation of PyG, which takes a row per node, as a readout."""

    def __init__(self, aggregation: nn.Module) -> None:
        super().__init__()
        self.aggregation = aggregation

    def forward(self, z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
        x = z if index is None else z[index.long()]
        x = x if count is None else x.repeat_interleave(count.long(), dim=0)
        graph = reference.segment_of_entry(offsets(nodes_per_graph(ptr, count)), len(x))
        return self.aggregation(x, graph, dim_size=ptr.numel() - 1)


def _sum(z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
    return ops.sum_readout(z, ptr, index=index, count=count, check_invariants=False)


def _mean(z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
    total = _sum(z, ptr, index, count)
    return total / nodes_per_graph(ptr, count).clamp(min=1).to(total.dtype)[:, None]


def _max(z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
    z = z if index is None else z[index.long()]
    graph = reference.segment_of_entry(ptr, len(z))[:, None].expand_as(z)
    empty = z.new_zeros(ptr.numel() - 1, z.shape[1])
    return empty.scatter_reduce(0, graph, z, "amax", include_self=False)


def _nodes(z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
    z = z if index is None else z[index.long()]
    readable = ptr.is_cpu and not torch.compiler.is_compiling()
    if len(z) != ptr.numel() - 1 or (readable and not torch.equal(ptr, torch.arange(len(ptr)))):
        raise ValueError("features must have one node per graph where readout is None: take features.nodes()")
    return z


def _concat(embeddings: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(embeddings), dim=1)


def _stacked(embeddings: Sequence[Tensor]) -> Tensor:
    widths = [s.shape[1] for s in embeddings]
    if len(set(widths)) > 1:
        raise ValueError(f"combine must be 'concat', or a module that can, where widths of branches differ: {widths}")
    return torch.stack(list(embeddings))


def _total(embeddings: Sequence[Tensor]) -> Tensor:
    return _stacked(embeddings).sum(0)


def _average(embeddings: Sequence[Tensor]) -> Tensor:
    return _stacked(embeddings).mean(0)


def _largest(embeddings: Sequence[Tensor]) -> Tensor:
    return _stacked(embeddings).amax(0)


READOUTS: dict[str, Readout] = {"sum": _sum, "mean": _mean, "max": _max}
COMBINATIONS: dict[str, Combine] = {"concat": _concat, "sum": _total, "mean": _average, "max": _largest}


def _part(name: str, part: Any, known: Mapping[str, Callable[..., Tensor]]) -> nn.Module:
    """A part given by name, as a function or as a module, as a module."""
    if isinstance(part, nn.Module):
        return part
    if isinstance(part, str):
        if part not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, a module or a function, got {part!r}")
        return _Function(known[part], part)
    if not callable(part):
        raise TypeError(f"{name} must be a str, a module or a function, got {type(part).__name__}")
    return _Function(part, getattr(part, "__name__", repr(part)))


def _readout(readout: Any) -> nn.Module:
    if readout is None:
        return _Function(_nodes, "None")
    part = _part("readout", readout, READOUTS)
    pyg = sys.modules.get("torch_geometric.nn.aggr")  # not loaded: none of its aggregations is here
    return _Aggregation(part) if pyg is not None and isinstance(part, pyg.Aggregation) else part


def _readouts(readout: Any, num_branches: int) -> nn.Module:
    """One readout for all branches, or an ``nn.ModuleList`` of one for each."""
    if not isinstance(readout, (list, tuple, nn.ModuleList)):
        return _readout(readout)
    if len(readout) != num_branches:
        raise ValueError(f"readout must be one, or one for each of {num_branches} branches, got {len(readout)}")
    return nn.ModuleList(map(_readout, readout))


def _is_random(branch: nn.Module) -> bool:
    """Whether equal rows may come to differ in training, or count as often as they occur.

    Modules that call functions for their dropout, such as PyG's ``MLP``, keep its rate as an attribute.
    """
    kinds = (torch_compat.Dropout, torch_compat.BatchNorm, nn.RReLU)
    return any(isinstance(part, kinds) or np.any(getattr(part, "dropout", 0)) for part in branch.modules())


def _segments(
    rows: Sequence[Tensor], ptr: Tensor, index: Tensor | None, count: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """``ptr [G + 1]``, ``index`` and ``count`` of each branch alone, from those of all branches."""
    num_graphs, first_row = (ptr.numel() - 1) // len(rows), 0
    bounds = ptr[torch.arange(len(rows) + 1, device=ptr.device) * num_graphs].tolist()
    for branch, (begin, end) in enumerate(pairwise(bounds)):
        segments = ptr[branch * num_graphs : (branch + 1) * num_graphs + 1] - begin
        own = None if index is None else index[begin:end] - first_row
        yield segments, own, None if count is None else count[begin:end]
        first_row += len(rows[branch])
