"""Train one model: early stopping on validation, going on after an interruption."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._common import check
from .._common.indexing import GraphIds, graph_ids
from .._common.progress import progress_bar
from ..features.power_features import PowerFeatures
from ..nn import GraphClassifier
from .losses import ClassWeight, check_labels, class_weights, loss_of, weights_of
from .metrics import Metric, accuracy
from .prediction import not_finite, predict
from .resume import START_ANEW, Epoch, Run, RunFile, copied, restore, sample_of, settings_of, snapshot
from .schedules import Schedule, advance, scheduler_of
from .trainer import Trainer


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
    ``UserWarning`` tells, that loss alone decides, also when to stop. An epoch with scores that are not finite has NaN
    for both and is never the best one.
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
            ``state`` that is damaged, or something else; a loss that is not finite; no epoch with a finite metric or
            loss on the validation graphs.
        OSError: ``state`` cannot be written.
    """
    if not isinstance(model, GraphClassifier):
        raise TypeError(f"model must be a SPIN, a PAGNN or another GraphClassifier, got {type(model).__name__}")
    model.check_training(features)
    epochs, batch_size, patience, seed = (
        check.integer(name, value, minimum)
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
    check.flag("resume", resume)
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
                wrong = len(not_finite(logits))
                validation_loss = math.nan if wrong else loss_of(logits, target, weights, of_validation).item()
                score = math.nan if wrong else float(metric(logits, target))
                if math.isnan(score) and not warned:
                    warned = True
                    said = f"metric {_name_of(metric)} is NaN on the validation graphs: their loss chooses the epoch, "
                    said += "and when to stop"
                    if wrong:
                        said = f"{wrong} validation graph(s) have scores that are not finite in epoch {number}: "
                        said += "such an epoch is never the best one"
                    warnings.warn(said, stacklevel=2)
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
            if not run.has_best:  # it has learnt nothing
                model.operator, model.multilabel = known_before
            if file is not None:  # last, as it may fail
                file.keep(run, now=True)
    if not run.has_best:
        raise ValueError(
            "training diverged: neither metric nor loss of the validation graphs was finite in any epoch; try a lower "
            "learning_rate, and look for node features that are too large"
        )
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
