"""What every node adds to a class score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from .._common import check
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..nn import SPIN, Ensemble, GraphModel, SubtreeLinear
from .prediction import not_finite

TOLERANCE = 1e-3  # of the scores, between fused operations and modules, relative to what is added up


@dataclass(frozen=True)
class Explanation:
    """What every node adds, in every branch, to the score of a class of its graph; float64.

    The score of graph ``g`` is ``constants[g]`` and the sum of ``contributions[:, ptr[g]:ptr[g + 1]]``; of an ensemble
    its probability is. What a node adds in the branch of hop ``r`` is due to its neighbourhood within ``r`` hops, which
    its row there describes, and not to the node alone.

    Attributes:
        ptr: ``[G + 1]``, node offsets of the graphs.
        targets: ``[G]`` int64, the class, or task, whose score is explained.
        scores: ``[G]``, of that class; of an ensemble the probabilities.
        probabilities: ``[G]``, of that class.
        constants: ``[G]``, what the classifier gives without any node, on the piece of it that the graph is on; of an
            ensemble the mean of the probabilities that those of its members give.
        contributions: ``[B, N]``, what each node adds in each branch, the joint branch last.
        attention: ``[B, N]``, the attention weights, which sum to 1 in each branch of each graph; NaN for members of an
            ensemble that have none; None where there is none at all.
        branches: how far the rows of each branch see: ``B`` texts such as ``"within 2 hops"``, with the operator where
            there are several; ``"within 2 hops, joint"`` of joint rows; of an ensemble those of all members, such as
            ``"member 1, within 2 hops"``.
        quantity: what is divided, ``"score"``, or of an ensemble and its members ``"probability"``.
        members: of an ensemble, how the probability that each member gives is divided: its own is their mean.
    """

    ptr: Tensor
    targets: Tensor
    scores: Tensor
    probabilities: Tensor
    constants: Tensor
    contributions: Tensor
    attention: Tensor | None
    branches: list[str]
    quantity: Literal["score", "probability"] = "score"
    members: Sequence[Explanation] = ()

    @property
    def totals(self) -> Tensor:
        """What each node adds in all branches together, ``[N]``."""
        return self.contributions.sum(0)


@torch.inference_mode(False)
@torch.no_grad()
def explain(
    model: SPIN | SubtreeLinear | Ensemble,
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

    An ``Ensemble`` is the mean of probabilities, so that its *probability* is divided: each member's apart, and the
    mean of these. From ``q``, the softmax of all constants ``c`` of a member, to its probabilities ``p``, class ``k``
    gains ``p_k q_j - p_j q_k`` of class ``j``, which adds up to ``p_k - q_k``. Each such gain is divided in proportion
    to what the nodes add to ``s_k - s_j``. This is DeepLIFT's rescale rule (Shrikumar et al. 2017; of models in series
    Chen, Lundberg & Lee 2022) for the softmax ``1 / sum_j exp(s_j - s_k)``, and for the sigmoid of a task, whose other
    class has the score 0. The sum is exact; but what is not linear could be divided in other ways, too.

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
    if not isinstance(model, SPIN | SubtreeLinear | Ensemble):
        got = type(model).__name__
        raise TypeError(f"model must be a SPIN, a SubtreeLinear or an Ensemble, which add up nodes, got {got}")
    graphs, name = model.prepared(graphs, operator)
    if not isinstance(model, Ensemble):
        sums = _sums(model, graphs, name)
        return _of_score(model, sums, graphs.ptr, _targets(model, sums.scores, target))
    of_members = [_sums(member, *member.prepared(graphs)) for member in model.members]
    targets = _targets(model, model.mean([sums.scores for sums in of_members]), target)
    members = [_of_probability(model, sums, graphs.ptr, targets) for sums in of_members]
    probabilities = torch.stack([member.probabilities for member in members]).mean(0)
    weights = [torch.full_like(of.contributions, torch.nan) if of.attention is None else of.attention for of in members]
    return Explanation(
        ptr=graphs.ptr,
        targets=targets,
        scores=probabilities,
        probabilities=probabilities,
        constants=torch.stack([member.constants for member in members]).mean(0),
        contributions=torch.cat([member.contributions for member in members]) / len(members),
        attention=torch.cat(weights) if any(of.attention is not None for of in members) else None,
        branches=[f"member {number}, {text}" for number, of in enumerate(members, 1) for text in of.branches],
        quantity="probability",
        members=members,
    )


@dataclass(frozen=True)
class _Sums:
    """Class scores as sums over nodes.

    Attributes:
        scores: ``[G, C]``.
        divide: from weights ``[G, C]`` of the scores to what each node adds to their weighted sum, ``[B, N]``, and the
            constants of that, ``[G]``; float64.
        attention, branches: those of the explanation.
    """

    scores: Tensor
    divide: Callable[[Tensor], tuple[Tensor, Tensor]]
    attention: Tensor | None
    branches: list[str]


def _of_score(model: GraphModel, sums: _Sums, ptr: Tensor, targets: Tensor) -> Explanation:
    contributions, constants = sums.divide(F.one_hot(targets, sums.scores.shape[1]))
    scores, probabilities = (x.gather(1, targets[:, None]) for x in (sums.scores, model.probabilities(sums.scores)))
    return Explanation(
        ptr=ptr,
        targets=targets,
        scores=scores[:, 0].double(),
        probabilities=probabilities[:, 0].double(),
        constants=constants,
        contributions=contributions,
        attention=sums.attention,
        branches=sums.branches,
    )


def _of_probability(model: Ensemble, sums: _Sums, ptr: Tensor, targets: Tensor) -> Explanation:
    """How the probability that a member gives is divided."""
    num_scores, has_tasks = sums.scores.shape[1], model.has_tasks(sums.scores)
    chosen = [targets] if has_tasks else [torch.full_like(targets, number) for number in range(num_scores)]
    kinds = [F.one_hot(classes, num_scores) for classes in chosen]
    scores = torch.stack([(sums.scores.double() * kind).sum(1) for kind in kinds], 1)
    constants = torch.stack([sums.divide(kind)[1] for kind in kinds], 1)
    if has_tasks:  # the task, and its other class
        scores, constants, place = F.pad(scores, (0, 1)), F.pad(constants, (0, 1)), torch.zeros_like(targets)
    else:
        place = targets
    probabilities = scores.softmax(1).gather(1, place[:, None])[:, 0]
    slopes = _slopes(scores, constants, place[:, None])
    weights = torch.stack([slope[:, None] * kind for slope, kind in zip(slopes.T, kinds, strict=False)]).sum(0)
    contributions, _ = sums.divide(weights)
    return Explanation(
        ptr=ptr,
        targets=targets,
        scores=probabilities,
        probabilities=probabilities,
        constants=probabilities - ops.sum_readout(contributions.sum(0)[:, None], ptr)[:, 0],
        contributions=contributions,
        attention=sums.attention,
        branches=sums.branches,
        quantity="probability",
    )


def _slopes(scores: Tensor, constants: Tensor, place: Tensor) -> Tensor:
    """How much of the step of each class score from constants is that of the probability of the class at ``place``.

    All are ``[G, C]``, but ``place [G, 1]``. What that class gains of another, by the difference of their steps, is the
    larger of two products times ``(1 - exp(-d)) / d``: no number overflows, and none is divided by 0.
    """
    after, before, step = scores.softmax(1), constants.softmax(1), scores - constants
    apart = (step - step.gather(1, place)).abs()
    mean = torch.where(apart > 0, -torch.expm1(-apart) / apart, 1)
    of_others = -torch.maximum(after.gather(1, place) * before, after * before.gather(1, place)) * mean
    of_others = of_others.scatter(1, place, 0)
    return of_others.scatter(1, place, -of_others.sum(1, keepdim=True))


def _sums(model: GraphModel, graphs: GraphBatch, operator: str | None) -> _Sums:
    if isinstance(model, SPIN):
        return _sums_of_branches(model, graphs, model.check_operator(operator))
    if isinstance(model, SubtreeLinear):
        return _sums_of_patterns(model, graphs)
    raise TypeError(f"model must have members that are a SPIN or a SubtreeLinear, got {type(model).__name__}")


def _sums_of_branches(model: SPIN, graphs: GraphBatch, operator: str) -> _Sums:
    features = PowerFeatures.from_graphs(graphs, model.config["num_hops"], operator, deduplicate=False)
    scores = model(features)
    if len(wrong := not_finite(scores)):
        raise ValueError(f"scores must be finite, those of graph {int(wrong[0])} are not")
    rows, readout, attention = _branch_rows(model, features)
    with torch.enable_grad():
        readout = readout.to(scores.dtype).requires_grad_()
        found = model.classifier(readout)

    def divide(weights: Tensor) -> tuple[Tensor, Tensor]:
        (jacobian,) = torch.autograd.grad(found, readout, weights.to(found.dtype), retain_graph=True)
        of_graph = jacobian.double().view(len(graphs), len(rows), rows.shape[2])
        contributions = torch.einsum("bnh,nbh->bn", rows, of_graph.repeat_interleave(graphs.num_nodes_per_graph, 0))
        added, size = ops.sum_readout(torch.stack([contributions.sum(0), contributions.abs().sum(0)], 1), graphs.ptr).T
        explained, by_modules = ((x.double() * weights).sum(1) for x in (scores, found.detach()))
        constants = explained - added
        if bool(((by_modules - explained).abs() > TOLERANCE * (size + constants.abs())).any()):
            raise ValueError(
                "model must compute what its branches and classifier do in turn: a hook, or a forward of its own, "
                "changes the scores"
            )
        return contributions, constants

    return _Sums(scores, divide, attention, _branches(model, operator))


def _sums_of_patterns(model: SubtreeLinear, graphs: GraphBatch) -> _Sums:
    """A branch for each hop: what the pattern of a node adds there, by the norm of the counts of its graph."""
    every = model.contributions(graphs).double()

    def divide(weights: Tensor) -> tuple[Tensor, Tensor]:
        of_node = weights.double().repeat_interleave(graphs.num_nodes_per_graph, 0)
        return torch.einsum("bnc,nc->bn", every, of_node), (model.bias.double() * weights).sum(1)

    return _Sums(model(graphs), divide, None, _within(model.config["num_hops"]))


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
