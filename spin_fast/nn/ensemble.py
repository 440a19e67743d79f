"""Several models as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..features.chunks import chunks_of
from ..graphs.batch import GraphBatch
from .base import GraphModel, Scorer


class Ensemble(GraphModel):
    """A model whose probabilities are the mean of those of its members.

    Each member prepares graphs by its own ``node_features``, and has an operator of its own.

    Args:
        members: trained models of graphs, at least one, with as many outputs each.

    Raises:
        TypeError, ValueError: members that do not fit together.
    """

    members: Sequence[GraphModel]

    def __init__(self, members: Sequence[GraphModel]) -> None:
        super().__init__()
        kinds = [*map(type, members)]
        if not members or not all(issubclass(kind, GraphModel) and kind is not Ensemble for kind in kinds):
            raise TypeError(f"members must be models of graphs, at least one, and no ensembles, got {kinds}")
        if len({*map(id, members)}) < len(members):
            raise ValueError("members must be different models: a file keeps each parameter once")
        for name in ("out_features", "multilabel"):
            found = {getattr(member, name) for member in members} - {None}  # which is not known
            if len(found) > 1:
                raise ValueError(f"members must have the same {name}, got {', '.join(sorted(map(str, found)))}")
            setattr(self, name, next(iter(found), None))
        own = (of.in_features if of.node_features is None else of.node_features.num_inputs for of in members)
        widths = sorted({width for width in own if width is not None})
        if len(widths) > 1:
            raise ValueError(f"members must take graphs of as many features each, got {', '.join(map(str, widths))}")
        self.members = nn.ModuleList(members)  # type: ignore[assignment]
        self.config: dict[str, Any] = {"in_features": next(iter(widths), None), "out_features": self.out_features}

    def check_operator(self, operator: str | Sequence[str] | None = None) -> None:
        """Check that there is none, and that the members know theirs; see :meth:`GraphModel.check_operator`."""
        super().check_operator(operator)
        for number, member in enumerate(self.members):
            try:
                member.check_operator()
            except ValueError as error:
                raise ValueError(f"members[{number}]: {error}") from error

    def score_chunks(self, graphs: GraphBatch, operator: str | None, num_bytes: int) -> Iterator[Tensor]:
        """Class scores of consecutive chunks, see :meth:`GraphModel.score_chunks`."""
        if len(graphs) == 0:
            yield self._scores(graphs, num_bytes)
        nodes = num_bytes // max(graphs.num_features * graphs.x.element_size(), 1)
        for begin, end in chunks_of(graphs.ptr, nodes):
            yield self._scores(graphs[begin:end], num_bytes)

    def _scores(self, graphs: GraphBatch, num_bytes: int) -> Tensor:
        scores = []
        for member in self.members:
            own, operator = member.prepared(graphs)
            scores.append(torch.cat(list(member.score_chunks(own, operator, num_bytes))))
        return self.mean(scores).to(graphs.x.dtype)

    def scorer(self, x: Tensor, operator: str | None, num_nodes: int) -> Scorer:
        """By the scorers of the members, see :meth:`GraphModel.scorer`."""
        if type(self).score_chunks is not Ensemble.score_chunks:
            return super().scorer(x, operator, num_nodes)
        scorers = [member.scorer(x, member.check_operator(), num_nodes) for member in self.members]

        def scores(graphs: GraphBatch, num_bytes: int) -> Iterator[Tensor]:
            own = [member.prepared(graphs)[0] for member in self.members]
            of_members = [torch.cat([*score(of, num_bytes)]) for score, of in zip(scorers, own, strict=True)]
            yield self.mean(of_members).to(graphs.x.dtype)

        return scores

    def mean(self, scores: Sequence[Tensor]) -> Tensor:
        """Class scores, in float64, whose probabilities are the mean of those of the members' scores."""
        return mean_scores(scores, self.has_tasks(scores[0]))


def mean_scores(scores: Sequence[Tensor], multilabel: bool) -> Tensor:
    """Scores, in float64, whose probabilities are the mean of those of several models."""
    of = torch.stack([score.double() for score in scores])
    if multilabel:
        return _log_mean(F.logsigmoid(of)) - _log_mean(F.logsigmoid(-of))
    return _log_mean(of.log_softmax(2))


def _log_mean(logarithms: Tensor) -> Tensor:
    return logarithms.logsumexp(0) - math.log(len(logarithms))
