"""Class scores and probabilities, from features or straight from graphs, chunk by chunk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._common import check
from .._common.indexing import GraphIds, graph_ids
from .._common.progress import progress_bar
from ..features.power_features import PowerFeatures
from ..features.shards import ShardedFeatures
from ..graphs.batch import GraphBatch
from ..nn import GraphClassifier, GraphModel

CHUNK_BYTES = 4 << 20  # of powers, and of edges, at a time, unless a single graph has more
GPU_CHUNK_BYTES = 256 << 20  # the same on a GPU: enough to fill it


@torch.inference_mode()
def predict(
    model: GraphClassifier,
    features: PowerFeatures | ShardedFeatures,
    ids: GraphIds | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """Class scores ``[G, C]`` of the graphs ``ids`` (default: all selected ones), in that order.

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
        graphs: the graphs as the model's ``node_features`` take them; without these, with the node features that it was
            trained with. With edge weights if those of its training had any, which a model does not know.
        operator: the one that the model was trained with, or those; None for ``model.operator``.
        progress: show a progress bar on the terminal.

    Raises:
        TypeError, ValueError: graphs that do not fit the model; an operator that is unknown, or another one than
            ``model.operator``; none given where the model does not know its own.
    """
    scores = torch.cat(list(predict_chunks(model, graphs, operator, progress=progress)))
    if len(wrong := not_finite(scores)):
        first = f"{len(wrong)} of {len(scores)} graph(s) have scores that are not finite, the first is {int(wrong[0])}"
        warnings.warn(f"{first}: their probabilities are NaN", stacklevel=2)
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
    graphs, name = model.prepared(graphs, operator)
    return _scores_of_chunks(model, graphs, name, progress)


@torch.inference_mode()
def _scores_of_chunks(model: GraphModel, graphs: GraphBatch, operator: str | None, progress: bool) -> Iterator[Tensor]:
    chunk_bytes = CHUNK_BYTES if graphs.x.is_cpu else GPU_CHUNK_BYTES
    with progress_bar("graphs", len(graphs), progress) as advance:
        for scores in model.score_chunks(graphs, operator, chunk_bytes):
            yield scores
            advance("", len(scores))
