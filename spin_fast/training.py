"""Train and evaluate one model: early stopping on validation, going on after an interruption, prediction."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from . import _check
from ._arrays import GraphIds, graph_ids
from ._powers import power_chunks
from ._progress import progress_bar
from ._run import START_ANEW, Epoch, Run, RunFile, copied, restore, sample_of, settings_of, snapshot
from .checkpoints import load_checkpoint, save_checkpoint
from .features import PowerFeatures
from .graphs import GraphBatch
from .losses import ClassWeight, check_labels, class_weights, loss_of, weights_of
from .nn import GraphClassifier
from .schedules import SCHEDULES, Schedule, advance, scheduler_of
from .trainer import Trainer

__all__ = [
    "SCHEDULES",
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


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Share of graphs whose largest class score is that of their label; ``logits [G, C]``, ``y [G]`` int64.

    Of binary tasks side by side, float ``y [G, T]``, the share of known labels that their score has the sign of.
    """
    if y.is_floating_point():
        return ((logits > 0) == (y > 0.5))[~y.isnan()].double().mean().item()
    return (logits.argmax(1) == y).double().mean().item()


def rocauc(logits: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of the second class; ``logits [G, 2]``, ``y [G]`` of 0 and 1.

    Of binary tasks side by side, ``logits [G, T]`` and float ``y [G, T]``, it is the mean over those tasks whose known
    labels are not all equal, as OGB has it. NaN where there is nothing to compare.
    """
    from sklearn.metrics import roc_auc_score

    if y.dim() == 1 and logits.shape == (len(y), 2):
        logits, y = (logits[:, 1] - logits[:, 0])[:, None], y[:, None]
    elif not y.is_floating_point() or logits.shape != y.shape:
        raise ValueError(
            "logits must have shape [G, 2] and y [G], or both [G, T] and y floating-point, "
            f"got {list(logits.shape)} and {list(y.shape)} {y.dtype}"
        )
    areas = []
    for score, label in zip(logits.T.double().cpu().numpy(), y.T.double().cpu().numpy(), strict=True):
        known = label == label  # not NaN
        if len(set(label[known])) == 2:
            areas.append(roc_auc_score(label[known], score[known]))
    return statistics.fmean(areas) if areas else math.nan


@dataclass
class Fit:
    """What :func:`fit` leaves behind; the model holds the weights of ``epochs[best_epoch]``."""

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
def predict(
    model: GraphClassifier, features: PowerFeatures, ids: GraphIds | None = None, batch_size: int = 1024
) -> Tensor:
    """Class scores ``[G, C]`` of the graphs ``ids`` (default: all selected ones), in that order.

    Raises:
        TypeError, ValueError: features that do not fit the model, or of another operator than ``model.operator``.
    """
    model.check_training(features)
    batch_size = _check.integer("batch_size", batch_size, 1)
    model.eval()
    selected = features if ids is None else features[ids]
    if len(selected) == 0:
        return features.rows.new_empty(0, model.num_outputs(features))
    return torch.cat([model(selected[start : start + batch_size]) for start in range(0, len(selected), batch_size)])


CHUNK_BYTES = 4 << 20
"""Of powers, and of arcs, that :func:`predict_proba` takes at a time, unless a single graph has more."""
GPU_CHUNK_BYTES = 256 << 20
"""The same on a GPU: enough to fill it."""


@torch.inference_mode()
def predict_proba(
    model: GraphClassifier, graphs: GraphBatch, operator: str | Sequence[str] | None = None, *, progress: bool = False
) -> Tensor:
    """Class probabilities ``[G, C]`` of graphs that need no features made beforehand.

    Chunk after chunk of the graphs goes through the powers and the model, so that memory does not grow with their
    number, but for the result. They are what ``model.probabilities`` makes of the scores: of a model for binary tasks
    side by side, those of each task.

    Args:
        model: a classifier; it is put into evaluation mode.
        graphs: the graphs as the model's ``node_features`` take them; without these, with the node features that it was
            trained with. With edge weights if those of its training had any, which a model does not know.
        operator: the one that the model was trained with, or those; None for ``model.operator``.
        progress: show a progress bar on the terminal.

    Raises:
        TypeError, ValueError: graphs that do not fit the model; an operator that is unknown, or another one than
            ``model.operator``; none given where the model does not know its own.
    """
    chunks = predict_chunks(model, graphs, operator, progress=progress)
    return torch.cat([model.probabilities(scores) for scores in chunks])


def predict_chunks(
    model: GraphClassifier, graphs: GraphBatch, operator: str | Sequence[str] | None = None, *, progress: bool = False
) -> Iterator[Tensor]:
    """Class scores ``[g, C]`` of consecutive chunks of graphs, computed as they are asked for.

    Arguments and errors are those of :func:`predict_proba`.
    """
    if not isinstance(graphs, GraphBatch):
        raise TypeError(f"graphs must be a GraphBatch, got {type(graphs).__name__}")
    if model.node_features is not None:
        graphs = model.node_features.transform(graphs)
    if model.in_features not in (None, graphs.num_features):
        raise ValueError(f"graphs must have {model.in_features} features as the model, got {graphs.num_features}")
    if graphs.x.device != (device := next((weight.device for weight in model.parameters()), graphs.x.device)):
        raise ValueError(f"graphs must be on {device} as the model is, got {graphs.x.device}; move one of them")
    operator = model.check_operator(operator)
    model.eval()
    return _scores_of_chunks(model, graphs, operator, progress)


@torch.inference_mode()
def _scores_of_chunks(model: GraphClassifier, graphs: GraphBatch, operator: str, progress: bool) -> Iterator[Tensor]:
    if len(graphs) == 0:
        rows = graphs.x.new_empty(model.num_branches, 0, graphs.num_features)
        yield model.forward_tensors(rows, graphs.ptr, check_invariants=False)
    chunk_bytes = CHUNK_BYTES if graphs.x.is_cpu else GPU_CHUNK_BYTES
    with progress_bar("graphs", len(graphs), progress) as advance:
        num_hops = (model.num_branches - 1) // len(operator.split(","))
        for powers, ptr in power_chunks(graphs, num_hops, operator, chunk_bytes):
            yield model.forward_tensors(powers, ptr, check_invariants=False)
            advance("", len(ptr) - 1)


def fit(
    model: GraphClassifier,
    features: PowerFeatures,
    train: GraphIds,
    validation: GraphIds,
    *,
    epochs: int = 60,
    batch_size: int = 32,
    learning_rate: float = 5e-3,
    schedule: Schedule = "cosine",
    weight_decay: float = 0.0,
    class_weight: ClassWeight = None,
    graph_weight: Tensor | Sequence[float] | None = None,
    patience: int = 30,
    seed: int = 0,
    metric: Metric = accuracy,
    state: str | Path | None = None,
    resume: bool = False,
    on_epoch: Callable[[Epoch], object] | None = None,
    progress: bool = False,
) -> Fit:
    """Train with Adam; stop when ``metric`` on the validation graphs has not risen for ``patience`` epochs.

    On the device of ``model`` and ``features``; see :class:`Trainer`.

    Of epochs with the same metric the one with the lower validation loss is kept. While the metric is NaN, of which a
    ``UserWarning`` tells, that loss alone decides, also when to stop.
    Ctrl-C ends training as early stopping does. Whatever ends it, errors too, the model then holds the best weights.

    A run whose ``state`` is kept can go on after an interruption, an error, or the death of the process: with
    ``resume=True`` and otherwise the same arguments, on the same kind of device, every number is that of a run without
    interruption, bit for bit. ``epochs`` and ``patience`` may be raised where that does not change what has been: a
    cosine is over all ``epochs``, so these stay as they were.

    Args:
        model: trained in place. It takes over the operator of the features, see ``GraphClassifier.operator``.
        features: of all graphs, with labels.
        train: the training graphs: ids, a slice or a mask. One that is named twice counts twice, as in a bootstrap.
        validation: the validation graphs, likewise; a ``UserWarning`` says if some are training graphs.
        epochs: at most so many passes, at least 1.
        batch_size: graphs per step.
        learning_rate: of Adam, at the start.
        schedule: of the learning rate: ``cosine`` falls to 0 over ``epochs``, ``warmup-cosine`` rises over their first
            tenth before, ``constant`` stays, ``step`` halves every 50 epochs, ``plateau`` halves when the validation
            loss has not fallen for 10. Or what makes any of torch's schedulers from the optimiser; it is stepped once
            an epoch, and a ``ReduceLROnPlateau`` sees the validation loss, or the metric if its ``mode`` is ``max``.
        weight_decay: L2 penalty of Adam.
        class_weight: None; ``"balanced"``, by the training graphs as in scikit-learn; or weights ``[C]`` as those of
            torch's ``cross_entropy``, for binary tasks side by side ``[T]`` as ``pos_weight`` of its
            ``binary_cross_entropy_with_logits``. They weigh the validation loss, too, but not the metric.
        graph_weight: None; or ``[len(features)]``, how often each graph counts in both losses, but not in the metric;
            only the ratios matter. Steps with it are those of autograd, which are slower.
        patience: in epochs.
        seed: of the order of the graphs and of dropout.
        metric: from class scores and labels to a number that should rise.
        state: a file for all that it takes to go on, written at most every ten seconds and when training ends; none
            by default. The model in it is for this function; :func:`save_checkpoint` writes those to keep.
        resume: go on from ``state`` if there is such a file, and start if there is none. Without, the first epoch
            replaces it.
        on_epoch: called with each new :class:`Epoch`; the epoch counts when this has returned. See
            :mod:`spin_fast.logs`.
        progress: show a progress bar on the terminal.

    Raises:
        TypeError, ValueError: no labels, an empty part, an argument that is wrong, or differs from that of ``state``; a
            ``state`` that is damaged, or something else.
        OSError: ``state`` cannot be written.
    """
    if not isinstance(model, GraphClassifier):
        raise TypeError(f"model must be a SPIN, a PAGNN or another GraphClassifier, got {type(model).__name__}")
    model.check_training(features)
    epochs, batch_size, patience, seed = (
        _check.integer(name, value, minimum)
        for name, value, minimum in (
            ("epochs", epochs, 1),
            ("batch_size", batch_size, 1),
            ("patience", patience, 1),
            ("seed", seed, 0),
        )
    )
    learning_rate, weight_decay = _rate("learning_rate", learning_rate), _rate("weight_decay", weight_decay)
    if not callable(metric):
        raise TypeError(f"metric must be a function of class scores and labels, got {type(metric).__name__}")
    if on_epoch is not None and not callable(on_epoch):
        raise TypeError(f"on_epoch must be a function of an Epoch, or None, got {type(on_epoch).__name__}")
    _check.flag("resume", resume)
    train, validation = graph_ids(train, len(features)), graph_ids(validation, len(features))
    for name, ids in (("train", train), ("validation", validation)):
        if len(ids) == 0:
            raise ValueError(f"{name} must have at least one graph")
    num_outputs = model.num_outputs(features)
    check_labels(features, num_outputs, read=True)
    if resume and state is None:
        raise ValueError("resume must come with state, the file to go on from")
    train_labels, target = features[train].y, features[validation].y
    assert train_labels is not None
    assert target is not None
    for name, labels in (("train", train_labels), ("validation", target)):
        if labels.is_floating_point() and bool(labels.isnan().all()):
            raise ValueError(f"{name} must have at least one label that is known, got NaN alone")
    shared = int(torch.isin(features.storage_ids(validation), features.storage_ids(train)).sum())
    if shared:
        warnings.warn(
            f"validation has {shared} graph(s) of train, so that its metric, which chooses the epoch, is too good",
            stacklevel=2,
        )
    weights = class_weights(class_weight, train_labels, num_outputs)
    weights = None if weights is None else weights.to(features.rows)
    if graph_weight is not None:
        graph_weight = weights_of("graph_weight", graph_weight, len(features)).to(features.rows.device)
        for name, ids in (("train", train), ("validation", validation)):
            if not bool((graph_weight[ids] > 0).any()):
                raise ValueError(f"graph_weight must not be all 0 in {name}")
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    trainer = Trainer(model, learning_rate=learning_rate, weight_decay=weight_decay, class_weight=weights)
    scheduler = scheduler_of(schedule, trainer.optimizer, epochs)
    run, file = Run(best=copied(model.state_dict())), None
    if state is not None:
        settings = settings_of(
            model,
            features,
            train,
            validation,
            batch_size=batch_size,
            learning_rate=learning_rate,
            schedule=_name_of(schedule),
            weight_decay=weight_decay,
            class_weight=class_weight if weights is None or isinstance(class_weight, str) else weights.tolist(),
            graph_weight=graph_weight,
            seed=seed,
            metric=_name_of(metric),
        )
        file = RunFile(Path(state), settings, sample_of(features, train, validation))
        if resume and file.path.exists():
            run = file.read(like=replace(run, last=snapshot(trainer, order)))
            _check_past(run, file.path, epochs, patience)
            _replay(run, scheduler, file.path)
            restore(trainer, order, run)
    known_before = model.operator, model.multilabel
    model.operator, model.multilabel = features.operator, target.is_floating_point()  # if no epoch is left, too
    interrupted, warned = False, False
    with progress_bar("epoch", epochs, progress) as advance_bar:
        advance_bar("", len(run.epochs))
        try:
            while not run.is_over(epochs, patience):
                number, rate, start = len(run.epochs) + 1, _rate_of(scheduler), time.perf_counter()
                loss = trainer.epoch(features, train, batch_size, order, graph_weight)
                seconds = time.perf_counter() - start
                if not math.isfinite(loss):
                    _check_finite(features[train])
                    raise ValueError(
                        f"training diverged: the loss of epoch {number} is {loss}; try a lower learning_rate"
                    )
                logits = predict(model, features, validation)
                of_validation = None if graph_weight is None else graph_weight[validation]
                validation_loss = loss_of(logits, target, weights, of_validation).item()
                score = float(metric(logits, target))
                if math.isnan(score) and not warned:
                    warned = True
                    warnings.warn(
                        f"metric {_name_of(metric)} is NaN on the validation graphs: their loss chooses the epoch, and "
                        "when to stop",
                        stacklevel=2,
                    )
                epoch = Epoch(number, loss, validation_loss, score, rate, seconds)
                if on_epoch is not None:
                    on_epoch(epoch)
                run = run.after(epoch, model.state_dict(), {} if file is None else snapshot(trainer, order))
                if file is not None:
                    file.keep(run)
                advance(scheduler, epoch.validation_loss, epoch.validation)
                advance_bar(f"loss {loss:.4f}  validation {epoch.validation:.4f}  best {run.best_score[0]:.4f}")
        except KeyboardInterrupt:
            if not run.epochs:
                raise
            interrupted = True
        finally:
            model.load_state_dict(run.best)
            model.unflatten_parameters()
            if not run.epochs:  # it has learnt nothing
                model.operator, model.multilabel = known_before
            if file is not None:  # last, as it may fail
                file.keep(run, now=True)
    return Fit(list(run.epochs), run.best_epoch, interrupted)


def _check_finite(features: PowerFeatures) -> None:
    rows = torch.cat(features.branch_rows()[0])
    if not bool(rows.isfinite().all()):
        found = "NaN" if bool(rows.isnan().any()) else "infinity"
        raise ValueError(f"features must be finite, got {found} in the rows of the graphs to train on")


def _rate(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return float(value)


def _rate_of(scheduler: LRScheduler) -> float:
    return float(scheduler.optimizer.param_groups[0]["lr"])


def _name_of(function: object) -> str:
    return function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)


def _check_past(run: Run, path: Path, epochs: int, patience: int) -> None:
    """That a run with these limits would have come as far."""
    if len(run.epochs) > epochs:
        raise ValueError(
            f"epochs must be at least {len(run.epochs)}, as many as {path} has, got {epochs}; {START_ANEW}"
        )
    sooner = Run()
    for epoch in run.epochs:
        if sooner.is_over(epochs, patience):
            raise ValueError(
                f"patience must not stop the run of {path} before its last epoch, got {patience}; {START_ANEW}"
            )
        sooner = sooner.after(epoch, {}, {})


def _replay(run: Run, scheduler: LRScheduler, path: Path) -> None:
    """Step the scheduler through the epochs so far, by the log alone, so that any scheduler can go on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no step of the optimiser comes between
        for epoch in run.epochs:
            if not math.isclose(_rate_of(scheduler), epoch.learning_rate, rel_tol=1e-6, abs_tol=1e-12):
                raise ValueError(
                    f"epochs and schedule must give the learning rates of {path}, {epoch.learning_rate:.6g} in epoch "
                    f"{epoch.number}, got {_rate_of(scheduler):.6g}: a cosine needs the number of epochs that it began "
                    f"with; {START_ANEW}"
                )
            advance(scheduler, epoch.validation_loss, epoch.validation)
