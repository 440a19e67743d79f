"""Train and evaluate one model: early stopping on validation, prediction."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._arrays import GraphIds, graph_ids
from ._powers import power_chunks
from ._progress import progress_bar
from .checkpoints import load_checkpoint, save_checkpoint
from .features import PowerFeatures
from .graphs import GraphBatch
from .nn import SPIN
from .trainer import Trainer, check_labels, loss_of

__all__ = [
    "Epoch",
    "Fit",
    "Trainer",
    "accuracy",
    "fit",
    "load_checkpoint",
    "loss_of",
    "predict",
    "predict_chunks",
    "predict_proba",
    "rocauc",
    "save_checkpoint",
]

Metric = Callable[[Tensor, Tensor], float]
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Share of graphs whose largest class score is that of their label; ``logits [G, C]``, ``y [G]`` int64."""
    return (logits.argmax(1) == y).double().mean().item()


def rocauc(logits: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of the second class; ``logits [G, 2]``, ``y [G]`` of 0 and 1."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(y.cpu().numpy(), (logits[:, 1] - logits[:, 0]).cpu().numpy()))


@dataclass
class Epoch:
    """One line of the training log; ``seconds`` is the time of the training pass alone."""

    loss: float
    validation_loss: float
    validation: float
    seconds: float


@dataclass
class Fit:
    """What :func:`fit` leaves behind; the model holds the weights of ``best_epoch``."""

    epochs: list[Epoch] = field(default_factory=list)
    best_epoch: int = 0
    interrupted: bool = False

    @property
    def seconds_per_epoch(self) -> float:
        """Median time of a training pass."""
        return statistics.median(epoch.seconds for epoch in self.epochs)

    @property
    def validation(self) -> float:
        """The metric on the validation graphs at the best epoch."""
        return self.epochs[self.best_epoch].validation


@torch.inference_mode()
def predict(model: SPIN, features: PowerFeatures, ids: GraphIds | None = None, batch_size: int = 1024) -> Tensor:
    """Class scores ``[G, C]`` of the graphs ``ids`` (default: all selected ones), in that order."""
    model.eval()
    selected = features if ids is None else features[ids]
    if len(selected) == 0:
        return features.rows.new_empty(0, model.config["out_features"])
    return torch.cat([model(selected[start : start + batch_size]) for start in range(0, len(selected), batch_size)])


CHUNK_BYTES = 4 << 20
"""Of powers, and of arcs, that :func:`predict_proba` takes at a time, unless a single graph has more."""
GPU_CHUNK_BYTES = 256 << 20
"""The same on a GPU: enough to fill it."""


@torch.inference_mode()
def predict_proba(
    model: SPIN, graphs: GraphBatch, operator: str | Sequence[str] = "sym", *, progress: bool = False
) -> Tensor:
    """Class probabilities ``[G, C]`` of graphs that need no features made beforehand.

    Chunk after chunk of the graphs goes through the powers, the model and the softmax, so that memory does not grow
    with their number, but for the result.

    Args:
        model: a classifier; it is put into evaluation mode.
        graphs: the graphs, with the node features that the model was trained with: what ``NodeFeatures`` made then,
            it has to make of these.
        operator: the one that the model was trained with, or those.
        progress: show a progress bar on the terminal.

    Raises:
        TypeError, ValueError: graphs that do not fit the model, or an unknown operator.
    """
    chunks = predict_chunks(model, graphs, operator, progress=progress)
    probabilities = graphs.x.new_empty(len(graphs), model.config["out_features"])
    done = 0
    for scores in chunks:
        probabilities[done : done + len(scores)] = scores.softmax(1)
        done += len(scores)
    return probabilities


def predict_chunks(
    model: SPIN, graphs: GraphBatch, operator: str | Sequence[str] = "sym", *, progress: bool = False
) -> Iterator[Tensor]:
    """Class scores ``[g, C]`` of consecutive chunks of graphs, computed as they are asked for.

    Arguments and errors are those of :func:`predict_proba`.
    """
    if not isinstance(graphs, GraphBatch):
        raise TypeError(f"graphs must be a GraphBatch, got {type(graphs).__name__}")
    if graphs.num_features != (wanted := model.config["in_features"]):
        raise ValueError(f"graphs must have {wanted} features as the model, got {graphs.num_features}")
    if graphs.x.device != (device := model.classifier[0].weight.device):
        raise ValueError(f"graphs must be on {device} as the model is, got {graphs.x.device}; move one of them")
    operator = model.check_operator(operator)
    model.eval()
    return _scores_of_chunks(model, graphs, operator, progress)


@torch.inference_mode()
def _scores_of_chunks(model: SPIN, graphs: GraphBatch, operator: str, progress: bool) -> Iterator[Tensor]:
    chunk_bytes = CHUNK_BYTES if graphs.x.is_cpu else GPU_CHUNK_BYTES
    with progress_bar("graphs", len(graphs), progress) as advance:
        for powers, ptr in power_chunks(graphs, model.config["num_hops"], operator, chunk_bytes):
            yield model.forward_tensors(powers, ptr)
            advance("", len(ptr) - 1)


def fit(
    model: SPIN,
    features: PowerFeatures,
    train: GraphIds,
    validation: GraphIds,
    *,
    epochs: int = 60,
    batch_size: int = 32,
    learning_rate: float = 5e-3,
    schedule: str = "cosine",
    weight_decay: float = 0.0,
    patience: int = 30,
    seed: int = 0,
    metric: Metric = accuracy,
    progress: bool = False,
) -> Fit:
    """Train with Adam; stop when ``metric`` on the validation graphs has not risen for ``patience`` epochs.

    On the device of ``model`` and ``features``; see :class:`Trainer`.

    Of epochs with the same metric the one with the lower validation loss is kept. Ctrl-C ends training as early
    stopping does: the model holds the best weights so far.

    Args:
        model: trained in place.
        features: of all graphs, with labels.
        train: the training graphs: ids, a slice or a mask.
        validation: the validation graphs, likewise.
        epochs: at most so many passes, at least 1.
        batch_size: graphs per step.
        learning_rate: of Adam, at the start.
        schedule: ``cosine`` lets the learning rate fall to 0 over ``epochs``, ``constant`` keeps it.
        weight_decay: L2 penalty of Adam.
        patience: in epochs.
        seed: of the order of the graphs and of dropout.
        metric: from class scores and labels to a number that should rise.
        progress: show a progress bar on the terminal.

    Raises:
        ValueError: no labels, an empty part, or a number out of range.
    """
    train, validation = graph_ids(train, len(features)), graph_ids(validation, len(features))
    check_labels(features, model.config["out_features"], read=True)
    _check_fit(train, validation, epochs, batch_size, patience)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    trainer = Trainer(model, learning_rate=learning_rate, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda epoch: SCHEDULES[schedule](epoch / epochs))
    target = features[validation].y
    assert target is not None
    risen = 0
    result, best, best_state = Fit(), (-float("inf"), -float("inf")), copy.deepcopy(model.state_dict())
    with progress_bar("epoch", epochs, progress) as advance:
        try:
            for number in range(epochs):
                start = time.perf_counter()
                loss = trainer.epoch(features, train, batch_size, generator)
                scheduler.step()
                seconds = time.perf_counter() - start
                if not math.isfinite(loss):
                    raise ValueError(
                        f"training diverged: the loss of epoch {number + 1} is {loss}; try a lower learning_rate"
                    )
                logits = predict(model, features, validation)
                epoch = Epoch(loss, loss_of(logits, target).item(), metric(logits, target), seconds)
                result.epochs.append(epoch)
                score = (epoch.validation, -epoch.validation_loss)  # a NaN is never better
                if score > best and not math.isnan(epoch.validation):
                    risen = number if epoch.validation > best[0] else risen
                    best, best_state, result.best_epoch = score, copy.deepcopy(model.state_dict()), number
                advance(f"loss {loss:.4f}  validation {epoch.validation:.4f}  best {best[0]:.4f}")
                if number - risen >= patience:
                    break
        except KeyboardInterrupt:
            if not result.epochs:
                raise
            result.interrupted = True
    model.load_state_dict(best_state)
    model.unflatten_parameters()
    return result


def _check_fit(train: Tensor, validation: Tensor, epochs: int, batch_size: int, patience: int) -> None:
    for name, ids in (("train", train), ("validation", validation)):
        if len(ids) == 0:
            raise ValueError(f"{name} must have at least one graph")
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("patience", patience)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
