"""Class scores and probabilities, from features or straight from graphs, chunk by chunk."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._common import check
from .._common.indexing import GraphIds, graph_ids
from .._common.progress import progress_bar
from ..features.power_features import PowerFeatures
from ..features.shards import ShardedFeatures
from ..graphs.batch import GraphBatch
from ..nn import GraphClassifier, GraphModel
from ..nn.base import Scorer

CHUNK_BYTES = 4 << 20  # of powers, and without a kernel of edges, at a time, unless a single graph has more
GPU_CHUNK_BYTES = 256 << 20  # the same on a GPU: enough to fill it
FEW_NODES = 1000  # of a call, at most, in which a look at the model counts; patterns are for more


@torch.inference_mode()
def predict(
    model: GraphClassifier,
    features: PowerFeatures | ShardedFeatures,
    ids: GraphIds | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """Class scores ``[G, C]`` of the graphs ``ids`` (default: all selected ones), in that order.

    The model is then in evaluation mode.

    Args:
        batch_size: graphs that are scored together; None for ``model.graphs_at_once``. Rows that they share are
            evaluated once, so more are faster.

    Raises:
        TypeError, ValueError: features that do not fit the model, or of another operator than ``model.operator``.
        IndexError: ``ids`` that there are not.
    """
    if batch_size is not None:
        batch_size = check.integer("batch_size", batch_size, 1)
    if isinstance(features, ShardedFeatures):
        chosen, scores = graph_ids(slice(None) if ids is None else ids, len(features)), None
        for shard, of_shard, places in features.parts(chosen):
            part = predict(model, shard, of_shard, batch_size)
            scores = part.new_empty(len(chosen), part.shape[1]) if scores is None else scores
            scores[places] = part
        return predict(model, features[:0]) if scores is None else scores
    model.check_training(features)
    model.eval()
    selected = features if ids is None else features[ids]
    if len(selected) == 0:
        return torch.empty(0, model.num_outputs(features), dtype=features.rows.dtype, device=features.rows.device)
    size = model.graphs_at_once if batch_size is None else batch_size
    return torch.cat([model(selected[start : start + size]) for start in range(0, len(selected), size)])


def predict_proba(
    model: GraphModel, graphs: GraphBatch, operator: str | Sequence[str] | None = None, *, progress: bool = False
) -> Tensor:
    """Class probabilities ``[G, C]`` of graphs that need no features made beforehand.

    Chunk after chunk of the graphs goes through the powers and the model, so that memory does not grow with their
    number, but for the result. They are what ``model.probabilities`` makes of the scores: of a model for binary tasks
    side by side, those of each task. A ``UserWarning`` counts the graphs whose scores are not finite: their
    probabilities are NaN.

    Args:
        model: of graphs, such as a ``SPIN``; it is put into evaluation mode.
        graphs: the graphs as the model's ``node_features`` take them, or as they return them; without these, as they
            were in training. What has gone through another library counts as what nothing has transformed. With edge
            weights if those of its training had any, which a model does not know.
        operator: the one that the model was trained with, or those; None for ``model.operator``.
        progress: show a progress bar on the terminal.

    Raises:
        TypeError, ValueError: graphs that do not fit the model; an operator that is unknown, or another one than
            ``model.operator``; none given where the model does not know its own.
    """
    return _probabilities(model, [*predict_chunks(model, graphs, operator, progress=progress)])


class Predictor:
    """:func:`predict_proba` by a copy of a model, for many calls with few graphs each, as a server makes them.

    A call with a small graph takes longer to look at the model than to evaluate it: whether fused operations compute
    what its modules would, and at its parameters, to copy them. A predictor looks once, in each thread that calls it;
    of more than 1,000 nodes, where that hardly counts, at every call. What it returns are the same bits, where there
    are kernels, and what is done to the model afterwards changes nothing. Threads and forked processes may share a
    predictor, and others get it pickled.

    Args:
        model: of graphs, such as a ``SPIN``.
        operator: as for :func:`predict_proba`.

    Raises:
        TypeError, ValueError: as :func:`predict_proba` does; for wrong graphs, when it is called.

    Example:
        >>> predict = training.Predictor(model)
        >>> predict(graphs)  # [G, C]
    """

    def __init__(self, model: GraphModel, operator: str | Sequence[str] | None = None) -> None:
        _check_model(model)
        self._operator = model.check_operator(operator)
        made = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
        # What pruning and weight_norm have made of parameters cannot be copied.
        copies = {id(value): value.detach().clone() for value in made if not value.is_leaf}
        self._model = copy.deepcopy(model, copies).eval()
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Predictor, (self._model, self._operator)

    def __repr__(self) -> str:
        return f"Predictor({type(self._model).__name__}, operator={self._operator!r})"

    def __call__(self, graphs: GraphBatch) -> Tensor:
        """Class probabilities ``[G, C]``."""
        graphs, _ = self._model.prepared(graphs, self._operator)
        if not 0 < graphs.num_nodes <= FEW_NODES:
            return _probabilities(self._model, [*_scores_of_chunks(self._model, graphs, self._operator)])
        kind = graphs.x.dtype, torch.is_autocast_enabled(graphs.x.device.type)
        scorers = cast("dict[tuple[torch.dtype, bool], Scorer]", vars(self._of_thread))
        with torch.inference_mode():
            if kind not in scorers:
                scorers[kind] = self._model.scorer(graphs.x, self._operator, FEW_NODES)
            scores = [*scorers[kind](graphs, _chunk_bytes(graphs))]
        return _probabilities(self._model, scores)


def _chunk_bytes(graphs: GraphBatch) -> int:
    return CHUNK_BYTES if graphs.x.is_cpu else GPU_CHUNK_BYTES


def _check_model(model: object) -> None:
    if not isinstance(model, GraphModel):
        raise TypeError(f"model must be a GraphModel, such as a SPIN, got {type(model).__name__}")


def _probabilities(model: GraphModel, chunks: list[Tensor]) -> Tensor:
    """Class probabilities of scores, with a warning to the caller's caller where these are not finite."""
    scores = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    if not math.isfinite(scores.sum()) and len(wrong := not_finite(scores)):
        first = f"{len(wrong)} of {len(scores)} graph(s) have scores that are not finite, the first is {int(wrong[0])}"
        warnings.warn(f"{first}: their probabilities are NaN", stacklevel=3)
    return model.probabilities(scores)


def not_finite(scores: Tensor) -> Tensor:
    """Return the positions of the graphs of which a score is NaN or infinite, ascending."""
    return (0 * scores).sum(1).nonzero()[:, 0]  # NaN, too, is not 0


def predict_chunks(
    model: GraphModel, graphs: GraphBatch, operator: str | Sequence[str] | None = None, *, progress: bool = False
) -> Iterator[Tensor]:
    """Class scores ``[g, C]`` of consecutive chunks of graphs, computed as they are asked for.

    The model must not change until the last one. Arguments and errors are those of :func:`predict_proba`.
    """
    _check_model(model)
    graphs, name = model.prepared(graphs, operator)
    return _scores_of_chunks(model, graphs, name, progress)


@torch.inference_mode()
def _scores_of_chunks(
    model: GraphModel, graphs: GraphBatch, operator: str | None, progress: bool = False
) -> Iterator[Tensor]:
    with progress_bar("graphs", len(graphs), progress) as advance:
        for scores in model.score_chunks(graphs, operator, _chunk_bytes(graphs)):
            yield scores
            advance("", len(scores))
