"""What every node adds to a class score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from .._common import check
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..nn import SPIN, GraphModel, SubtreeLinear
from .prediction import not_finite

TOLERANCE = 1e-3  # of the scores, between fused operations and modules, relative to what is added up


@dataclass(frozen=True)
class Explanation:
    """What every node adds, in every branch, to the score of a class of its graph; float64.

    The score of graph ``g`` is ``constants[g]`` and the sum of ``contributions[:, ptr[g]:ptr[g + 1]]``. What a node
    adds in the branch of hop ``r`` is due to its neighbourhood within ``r`` hops, which its row there describes, and
    not to the node alone.

    Attributes:
        ptr: ``[G + 1]``, node offsets of the graphs.
        targets: ``[G]`` int64, the class, or task, whose score is explained.
        scores: ``[G]``, of that class.
        probabilities: ``[G]``, of that class.
        constants: ``[G]``, what the classifier gives without any node, on the piece of it that the graph is on.
        contributions: ``[B, N]``, what each node adds in each branch, the joint branch last.
        attention: ``[B, N]``, the attention weights, which sum to 1 in each branch of each graph; None without.
        branches: how far the rows of each branch see: ``B`` texts such as ``"within 2 hops"``, with the operator where
            there are several; ``"within 2 hops, joint"`` of joint rows.
    """

    ptr: Tensor
    targets: Tensor
    scores: Tensor
    probabilities: Tensor
    constants: Tensor
    contributions: Tensor
    attention: Tensor | None
    branches: list[str]

    @property
    def totals(self) -> Tensor:
        """What each node adds in all branches together, ``[N]``."""
        return self.contributions.sum(0)


@torch.inference_mode(False)
@torch.no_grad()
def explain(
    model: SPIN | SubtreeLinear,
    graphs: GraphBatch,
    operator: str | Sequence[str] | None = None,
    *,
    target: int | None = None,
) -> Explanation:
    """Divide the score of a class among the nodes of each graph, exactly.

    The classifier is piecewise linear in the readouts ``s``: at a graph its score is ``J s + c``, ``J`` the Jacobian. A
    readout is a sum over nodes, so that ``J alpha_v z_v`` of all nodes and branches add up to the score less ``c``,
    with attention weights ``alpha_v`` (times the number of nodes if the model is size-aware), or 1 without. How the
    weights depend on the nodes is not part of it.

    A row of hop ``r`` describes the neighbourhood of its node within ``r`` hops: what a node adds is due to all of
    this, and not to the node alone. Classes are decided by the differences of their scores: explain the other class,
    too, since a node may add as much to both.

    A ``SubtreeLinear`` is such a sum as it is: ``c`` is its bias, and the norm of a graph's counts divides each part.

    Args:
        model: it is put into evaluation mode.
        graphs: as :func:`predict_proba` takes them. All rows of all nodes are in memory at once.
        operator: as in :func:`predict_proba`.
        target: the class, or task, for all graphs; None for the predicted class of each, or the only task.

    Raises:
        TypeError, ValueError: arguments as in :func:`predict_proba`; no such target, or none given for several tasks;
            scores that are not finite; a model that computes something else than what its modules do in turn, by hooks
            for instance.
    """
    if not isinstance(model, SPIN | SubtreeLinear):
        raise TypeError(f"model must be a SPIN or a SubtreeLinear, which add up nodes, got {type(model).__name__}")
    graphs, name = model.prepared(graphs, operator)
    if isinstance(model, SubtreeLinear):
        return _explain_linear(model, graphs, target)
    operator = model.check_operator(name)
    features = PowerFeatures.from_graphs(graphs, model.config["num_hops"], operator, deduplicate=False)
    scores = model(features)
    if len(wrong := not_finite(scores)):
        raise ValueError(f"scores must be finite, those of graph {int(wrong[0])} are not")
    targets = _targets(model, scores, target)
    rows, readout, attention = _branch_rows(model, features)
    with torch.enable_grad():
        readout = readout.to(scores.dtype).requires_grad_()
        found = model.classifier(readout).gather(1, targets[:, None])[:, 0]
        (jacobian,) = torch.autograd.grad(found.sum(), readout)
    num_branches, _, width = rows.shape
    of_graph = jacobian.double().view(len(graphs), num_branches, width)
    contributions = torch.einsum("bnh,nbh->bn", rows, of_graph.repeat_interleave(graphs.num_nodes_per_graph, 0))
    added, size = ops.sum_readout(torch.stack([contributions.sum(0), contributions.abs().sum(0)], 1), graphs.ptr).T
    explained, probabilities = (x.gather(1, targets[:, None])[:, 0] for x in (scores, model.probabilities(scores)))
    constants = explained.double() - added
    if bool(((found - explained).abs() > TOLERANCE * (size + constants.abs())).any()):
        raise ValueError(
            "model must compute what its branches and classifier do in turn: a hook, or a forward of its own, changes "
            "the scores"
        )
    return Explanation(
        ptr=graphs.ptr,
        targets=targets,
        scores=explained.double(),
        probabilities=probabilities.double(),
        constants=constants,
        contributions=contributions,
        attention=attention,
        branches=_branches(model, operator),
    )


def _explain_linear(model: SubtreeLinear, graphs: GraphBatch, target: int | None) -> Explanation:
    """A branch for each hop: what the pattern of a node adds there, by the norm of the counts of its graph."""
    scores = model(graphs)
    targets = _targets(model, scores, target)
    of_node = targets.repeat_interleave(graphs.num_nodes_per_graph)
    contributions = model.contributions(graphs).double()
    explained, probabilities = (x.gather(1, targets[:, None])[:, 0] for x in (scores, model.probabilities(scores)))
    return Explanation(
        ptr=graphs.ptr,
        targets=targets,
        scores=explained.double(),
        probabilities=probabilities.double(),
        constants=model.bias.double()[targets],
        contributions=contributions.gather(2, of_node[None, :, None].expand(len(contributions), -1, 1))[:, :, 0],
        attention=None,
        branches=_within(model.config["num_hops"]),
    )


def _branch_rows(model: SPIN, features: PowerFeatures) -> tuple[Tensor, Tensor, Tensor | None]:
    """What each node gives to the readouts, ``[B, N, h]``; the readouts ``[G, B h]``; the attention weights ``[B, N]``.

    All in float64.
    """
    powers, ptr = features.dense_rows(), features.node_ptr
    groups = [] if model.hops is None else [(model.hops, powers)]
    if model.joint is not None:
        groups.append((model.joint, powers.transpose(0, 1).flatten(1)[None]))
    rows, weights = [], []
    for group, inputs in groups:
        z = group.transformed(inputs)
        rows.append(z.double())
        if group.attention is not None:
            alpha = ops.attention_readout(z, group.attention, ptr, return_weights=True)[1].double()
            times = ptr.diff().repeat_interleave(ptr.diff()) if model.config["size_aware"] else 1
            rows[-1] *= (alpha * times)[:, :, None]
            weights.append(alpha)
    readouts = [ops.sum_readout(x, ptr) for x in rows]
    return torch.cat(rows), torch.cat(readouts, dim=1), torch.cat(weights) if weights else None


def _targets(model: GraphModel, scores: Tensor, target: int | None) -> Tensor:
    num_graphs, num_scores = scores.shape
    if target is None:
        if num_scores > 1 and model.multilabel:
            raise ValueError(f"target must be given: the model has {num_scores} tasks")
        return scores.argmax(1)
    if check.integer("target", target, 0) >= num_scores:
        raise ValueError(f"target must be less than {num_scores}, the number of class scores, got {target}")
    return torch.full((num_graphs,), int(target), device=scores.device)


def _branches(model: SPIN, operator: str) -> list[str]:
    within, names = _within(model.config["num_hops"]), operator.split(",")
    found = []
    if model.hops is not None:
        by = [f" by {name}" if len(names) > 1 else "" for name in names]
        found = [within[0], *(text + name for name in by for text in within[1:])]
    return found if model.joint is None else [*found, f"{within[-1]}, joint"]


def _within(num_hops: int) -> list[str]:
    return [f"within {hops} hop{'s' * (hops != 1)}" for hops in range(num_hops + 1)]
