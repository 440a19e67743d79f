"""Train one model: early stopping on validation, going on after an interruption."""

from __future__ import annotations

import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._common import check
from .._common.check import Argument, ArgumentTypeError
from .._common.indexing import GraphIds, graph_ids
from .._common.progress import progress_bar
from ..features.power_features import PowerFeatures
from ..features.shards import ShardedFeatures, sharded
from ..nn import GraphClassifier
from .losses import ClassWeight, Metric, accuracy, check_labels, class_weights, loss_of, warn_of_shared, weights_of
from .prediction import not_finite, predict
from .ranks import OneRank, ranks_of
from .resume import Epoch, StateError, StateFile, TrainingState, copied, restore, sample_of, settings_of, snapshot
from .schedules import Schedule, advance, scheduler_of
from .trainer import Trainer

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup


class Diverged(ValueError):
    """Training has led to numbers that are not finite."""


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


_random_state = threading.RLock()  # torch has one per process


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random state, of the device too, for one thread at a time; what others draw goes on as before."""
    gpus = [device] if device.type == "cuda" else []
    with _random_state, torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed is of all GPUs
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def fit(
    model: GraphClassifier,
    features: PowerFeatures | ShardedFeatures,
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
    process_group: ProcessGroup | None = None,
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

    With a ``process_group`` of several ranks, each calls this function with the same arguments and features, begins
    with the parameters of the first, and ends with the same model. Of each batch a rank computes the gradient of its
    range of the graphs; these are summed once per step to the gradient of the batch, whatever its graphs weigh. The
    validation graphs are shared out, too. Rank 0 alone calls ``metric`` and ``on_epoch``, shows progress, and reads and
    writes ``state``, with which any number of ranks can go on. Numbers are the same bits in every run with as many
    ranks; between other numbers of ranks they differ by rounding, and by dropout, which each rank draws for itself.
    Ctrl-C ends the rank that it reaches; the others wait for it until its process ends, or it destroys the group.

    Args:
        model: trained in place. It takes over the operator of the features, see ``GraphClassifier.operator``, and their
            ``node_features``.
        features: of all graphs, with labels. Of those in several files (``spin_fast.shards.load``) an epoch takes one
            shard after the other, in random order, and the graphs of each in random order; a batch is of one shard.
        train: the training graphs: ids, a slice or a mask. One that is named twice counts twice, as in a bootstrap.
        validation: the validation graphs, likewise; a ``UserWarning`` says if some are training graphs.
        epochs: at most so many passes, at least 1.
        batch_size: graphs per step, of all ranks together.
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
        seed: of the order of the graphs and of dropout; torch's own random state is left as it was.
        metric: from class scores and labels to a number that should rise.
        state: a file for all that it takes to go on, written at most every ten seconds and when training ends; none
            by default. The model in it is for this function; :func:`save_checkpoint` writes those to keep.
        resume: go on from ``state`` if there is such a file, and start if there is none. Without, the first epoch
            replaces it.
        on_epoch: called with each new :class:`Epoch`; the epoch counts when this has returned. See
            :mod:`spin_fast.training.logs`.
        progress: show a progress bar on the terminal.
        process_group: of ``torch.distributed``, such as ``torch.distributed.group.WORLD``; None for this process alone.
            Models with BatchNorm are trained by one process only.

    Raises:
        TypeError, ValueError: no labels, an empty part, an argument that is wrong, or differs from that of ``state`` or
            of another rank; a ``state`` that is damaged, or something else; a loss that is not finite; no epoch with a
            finite metric or loss on the validation graphs.
        IndexError: ``train`` or ``validation`` have graphs that there are not. OSError: ``state`` cannot be written.
        ConnectionError: another rank has ended.
    """
    if not isinstance(model, GraphClassifier):
        raise ArgumentTypeError("model", "be a SPIN, a PAGNN or another GraphClassifier", type(model))
    features = sharded(features)
    for shard in features.shards:
        model.check_training(shard)
    epochs, patience = check.integer("epochs", epochs, 1), check.integer("patience", patience, 1)
    batch_size, seed = check.integer("batch_size", batch_size, 1), check.integer("seed", seed, 0)
    learning_rate = float(check.number("learning_rate", learning_rate, 0))
    weight_decay = float(check.number("weight_decay", weight_decay, 0))
    check.flag("resume", resume)
    if not callable(metric):
        raise ArgumentTypeError("metric", "be a function of class scores and labels", type(metric))
    if on_epoch is not None and not callable(on_epoch):
        raise ArgumentTypeError("on_epoch", "be a function of an Epoch, or None", type(on_epoch))
    if resume and state is None:
        raise ValueError("resume must come with state, the file to go on from")
    ranks = ranks_of(process_group)
    data = _checked_data(model, features, train, validation, class_weight, graph_weight)

    def settings() -> dict[str, Any]:
        return settings_of(
            model,
            features,
            data.train,
            data.validation,
            batch_size=batch_size,
            learning_rate=learning_rate,
            schedule=name_of(schedule),
            weight_decay=weight_decay,
            class_weight=class_weight if isinstance(class_weight, str) else data.class_weight,
            graph_weight=data.graph_weight,
            seed=seed,
            metric=name_of(metric),
        )

    ranks.check_same(
        lambda: settings() | {"epochs": epochs, "patience": patience, "state": state is not None, "resume": resume}
    )
    with seeded(seed, features.device):
        trainer = Trainer(
            model,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            class_weight=data.class_weight,
            process_group=process_group,
        )
        scheduler = scheduler_of(schedule, trainer.optimizer, epochs)
        before = TrainingState(best=copied(model.state_dict()))
        order = torch.Generator().manual_seed(seed)
        run = _Run(data, trainer, scheduler, order, batch_size, seed, metric, ranks, before)

        def open_state(path: Path) -> TrainingState | None:
            """Keep the state from now on; returns the one to go on from."""
            run.file = StateFile(path, settings(), sample_of(features, data.train, data.validation))
            like = replace(before, last=snapshot(trainer, order))
            return run.file.read(like) if resume and path.exists() else None

        if state is not None:
            path = Path(state)
            if (found := ranks.from_first(lambda: open_state(path))) is not None:
                run.go_on(found, path, epochs, patience)
        on_epoch = on_epoch if ranks.is_first else None
        interrupted = run.train(epochs, patience, on_epoch, progress and ranks.is_first)
        model.eval()  # also where an epoch was interrupted
        model.zero_grad()
        if not run.state.has_best:
            raise Diverged(
                "training diverged: neither metric nor loss of the validation graphs was finite in any epoch; try a "
                "lower learning_rate, and look for node features that are too large"
            )
        return Fit(list(run.state.epochs), run.state.best_epoch, interrupted)


class _Data(NamedTuple):
    """What to train on and to validate by, checked: ids, and weights on the device of the features."""

    features: ShardedFeatures
    train: Tensor
    validation: Tensor
    target: Tensor
    class_weight: Tensor | None
    graph_weight: Tensor | None


def _checked_data(
    model: GraphClassifier,
    features: ShardedFeatures,
    train: GraphIds,
    validation: GraphIds,
    class_weight: ClassWeight,
    graph_weight: Tensor | Sequence[float] | None,
) -> _Data:
    parts = {}
    for name, ids in (("train", train), ("validation", validation)):
        try:
            parts[name] = graph_ids(ids, len(features))
        except (TypeError, IndexError) as error:
            raise type(error)(f"{name}: {error}") from error
    num_outputs, device = model.num_outputs(features[:1]), features.device
    check_labels(features.y, num_outputs, read=True)
    assert features.y is not None
    labels: list[Tensor] = []
    for name, ids in parts.items():
        if len(ids) == 0:
            raise ValueError(f"{name} must have at least one graph")
        y = features.y[ids]
        if y.is_floating_point() and bool(y.isnan().all()):
            raise ValueError(f"{name} must have at least one label that is known, got NaN alone")
        labels.append(y)
    if labels[0].dim() == 2 and len(unknown := labels[0].isnan().all(0).nonzero()[:, 0].tolist()):
        told = ", ".join(map(str, unknown))
        warnings.warn(f"train has no known label of task(s) {told}: their scores mean nothing", stacklevel=3)
    warn_of_shared(features.storage_ids(parts["validation"]), features.storage_ids(parts["train"]))
    weights = class_weights(class_weight, labels[0], num_outputs)
    if graph_weight is not None:
        graph_weight = weights_of("graph_weight", graph_weight, len(features)).to(device)
        for name, ids in parts.items():
            if not bool((graph_weight[ids] > 0).any()):
                raise ValueError(f"graph_weight must not be all 0 in {name}")
    weights = None if weights is None else weights.to(features.shards[0].rows)
    return _Data(features, parts["train"], parts["validation"], labels[1], weights, graph_weight)


@dataclass
class _Run:
    """A training run: its state, and what its epochs change."""

    data: _Data
    trainer: Trainer
    scheduler: LRScheduler
    order: torch.Generator
    batch_size: int
    seed: int
    metric: Metric
    ranks: OneRank
    state: TrainingState
    file: StateFile | None = None
    warned: bool = False

    def go_on(self, state: TrainingState, path: Path, epochs: int, patience: int) -> None:
        """Continue the run of a state in a file, if one with these arguments would have come as far.

        The scheduler steps through the epochs so far by the log alone, so that any scheduler can go on.
        """
        done, sooner = len(state.epochs), TrainingState()
        if done > epochs:
            raise StateError(Argument("epochs"), f" must be at least {done}, as many as {path} has, got {epochs}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no step of the optimiser comes between
            for epoch in state.epochs:
                if sooner.is_over(epochs, patience):
                    what = f" must not stop the run of {path} before its last epoch, got {patience}"
                    raise StateError(Argument("patience"), what)
                if not math.isclose(self._rate, epoch.learning_rate, rel_tol=1e-6, abs_tol=1e-12):
                    raise StateError(
                        Argument("epochs"),
                        " and ",
                        Argument("schedule"),
                        f" must give the learning rates of {path}, {epoch.learning_rate:.6g} in epoch "
                        f"{epoch.number}, got {self._rate:.6g}: a cosine needs the number of epochs that it began with",
                    )
                sooner = sooner.after(epoch, {}, {})
                advance(self.scheduler, epoch.validation_loss, epoch.validation)
        restore(self.trainer, self.order, state)
        self.state = state

    @property
    def _rate(self) -> float:
        return float(self.scheduler.optimizer.param_groups[0]["lr"])

    def train(self, epochs: int, patience: int, on_epoch: Callable[[Epoch], object] | None, progress: bool) -> bool:
        """Train until it is over, and leave the best weights in the model; returns whether it was interrupted."""
        model, interrupted = self.trainer.model, False
        known_before = model.operator, model.multilabel, model.node_features
        model.operator, model.multilabel = self.data.features.operator, self.data.target.is_floating_point()
        model.node_features = self.data.features.node_features
        with progress_bar("epoch", epochs, progress, done=len(self.state.epochs)) as advance_bar:
            try:
                while not self.state.is_over(epochs, patience):
                    epoch = self._epoch()
                    if on_epoch is not None:
                        on_epoch(epoch)
                    last = {} if self.file is None else snapshot(self.trainer, self.order)
                    self.state = self.state.after(epoch, model.state_dict(), last)
                    if self.file is not None:
                        self.file.keep(self.state)
                    advance(self.scheduler, epoch.validation_loss, epoch.validation)
                    best = self.state.best_score[0]
                    advance_bar(f"loss {epoch.loss:.4f}  validation {epoch.validation:.4f}  best {best:.4f}")
            except KeyboardInterrupt:
                if not self.state.epochs:
                    raise
                interrupted = True
            finally:
                model.load_state_dict(self.state.best)
                model.unflatten_parameters()
                if not self.state.has_best:  # it has learnt nothing
                    model.operator, model.multilabel, model.node_features = known_before
                if self.file is not None:  # last, as it may fail
                    self.file.keep(self.state, now=True)
        return interrupted

    def _epoch(self) -> Epoch:
        data, number, rate = self.data, len(self.state.epochs) + 1, self._rate
        self.ranks.seed(self.seed, number)
        start = time.perf_counter()
        loss = self.trainer.epoch(data.features, data.train, self.batch_size, self.order, data.graph_weight)
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            self._refuse_not_finite(data.train, "train on")
            raise Diverged(f"training diverged: the loss of epoch {number} is {loss}; try a lower learning_rate")
        logits = self.ranks.in_order(partial(predict, self.trainer.model, data.features), data.validation)
        scores = self.ranks.from_first(partial(self._validate, number, logits))
        return Epoch(number, loss, *scores, rate, seconds)

    def _validate(self, number: int, logits: Tensor) -> tuple[float, float]:
        """Return loss and metric of the validation graphs; NaN for both if a score is not finite."""
        data = self.data
        if wrong := len(not_finite(logits)):
            if not self.warned:
                self._refuse_not_finite(data.validation, "validate by")
            self._warn_once(
                f"{wrong} validation graph(s) have scores that are not finite in epoch {number}: such an epoch is "
                "never the best one"
            )
            return math.nan, math.nan
        weight = None if data.graph_weight is None else data.graph_weight[data.validation]
        score = float(self.metric(logits, data.target))
        if math.isnan(score):
            self._warn_once(
                f"metric {name_of(self.metric)} is NaN on the validation graphs: their loss chooses the epoch, and "
                "when to stop"
            )
        return loss_of(logits, data.target, data.class_weight, weight).item(), score

    def _refuse_not_finite(self, ids: Tensor, purpose: str) -> None:
        for shard, of_shard, _ in self.data.features.parts(ids):
            rows = torch.cat(shard[of_shard].branch_rows()[0])
            if not bool(rows.isfinite().all()):
                found = "NaN" if bool(rows.isnan().any()) else "infinity"
                raise ValueError(f"features must be finite, got {found} in the rows of the graphs to {purpose}")

    def _warn_once(self, message: str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(message, stacklevel=7)  # the caller of fit


def name_of(function: object) -> str:
    return function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
