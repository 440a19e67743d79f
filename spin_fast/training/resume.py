"""The state of a training run: its log, the best weights, when to stop, and all that it takes to go on."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._common import files
from .._common.check import Argument, NamingError
from ..features.shards import ShardedFeatures
from .trainer import Trainer

STATE_FORMAT = "spin_fast training-state 5"
SAMPLED, SAMPLE_SUMS = 1024, 64  # sample_of: at most so many graphs of a part, in so many sums


@dataclass
class Epoch:
    """One line of the training log.

    Attributes:
        number: from 1.
        loss: mean over the training graphs, each when its batch came.
        validation_loss: the same loss of the validation graphs, after the epoch.
        validation: their metric.
        learning_rate: of this epoch.
        seconds: time of the training pass alone.
    """

    number: int
    loss: float
    validation_loss: float
    validation: float
    learning_rate: float
    seconds: float


@dataclass(frozen=True)
class TrainingState:
    """Replaced, never changed, so that an interrupted run is as it was after its last complete epoch.

    Attributes:
        epochs: the log.
        best_epoch: the epoch whose weights are kept, from 0.
        best_score: its metric, then the negative of its loss; -inf for a metric that is NaN.
        risen: the last epoch at which the metric rose or, while it was NaN, the loss fell, from 0.
        best: the weights of ``best_epoch``; those before training until an epoch has a metric or a loss.
        last: what the next epoch starts from (:func:`snapshot`), if there is a :class:`StateFile`.
    """

    epochs: tuple[Epoch, ...] = ()
    best_epoch: int = 0
    best_score: tuple[float, float] = (-math.inf, -math.inf)
    risen: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)

    def after(self, epoch: Epoch, weights: dict[str, Tensor], last: dict[str, Tensor]) -> TrainingState:
        """Return the state after one more epoch, which has left the model with ``weights``."""
        metric = -math.inf if math.isnan(epoch.validation) else epoch.validation
        epochs, score = (*self.epochs, epoch), (metric, -epoch.validation_loss)
        if not score > self.best_score:
            return replace(self, epochs=epochs, last=last)
        number = len(self.epochs)
        risen = number if metric > self.best_score[0] or metric == -math.inf else self.risen
        return TrainingState(epochs, number, score, risen, copied(weights), last)

    @property
    def has_best(self) -> bool:
        """Whether any epoch had a metric or a finite loss."""
        return self.best_score > (-math.inf, -math.inf)

    def is_over(self, epochs: int, patience: int) -> bool:
        done = len(self.epochs)
        return done >= epochs or (done > 0 and done - 1 - self.risen >= patience)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def snapshot(trainer: Trainer, order: torch.Generator) -> dict[str, Tensor]:
    """Copy what an epoch changes: parameters, buffers, the moments of Adam, and the states of random numbers."""
    copies = copied(_changing(trainer)) | {"random.order": order.get_state(), "random.cpu": torch.get_rng_state()}
    if (device := _gpu_of(trainer)) is not None:
        copies["random.cuda"] = torch.cuda.get_rng_state(device)
    return copies


def restore(trainer: Trainer, order: torch.Generator, state: TrainingState) -> None:
    """Go back to the last :func:`snapshot`; with the random numbers of a GPU if both were on one."""
    trainer.model.load_state_dict(state.best)  # what is not trained
    with torch.no_grad():
        for name, value in _changing(trainer).items():
            value.copy_(state.last[name])
    order.set_state(state.last["random.order"])
    torch.set_rng_state(state.last["random.cpu"])
    if (device := _gpu_of(trainer)) is not None and "random.cuda" in state.last:
        torch.cuda.set_rng_state(state.last["random.cuda"], device)


def _changing(trainer: Trainer) -> dict[str, Tensor]:
    (moments,) = trainer.optimizer.state.values()
    tensors = {f"buffer.{name}": value for name, value in trainer.model.named_buffers()}
    tensors |= {f"adam.{name}": value for name, value in moments.items()}
    return tensors | {"parameters": trainer.model.flatten_parameters()}


def _gpu_of(trainer: Trainer) -> torch.device | None:
    device = next(trainer.model.parameters()).device
    return device if device.type == "cuda" else None


def settings_of(
    model: torch.nn.Module, features: ShardedFeatures, train: Tensor, validation: Tensor, **options: Any
) -> dict[str, Any]:
    """Describe what must be the same for a run to go on, as JSON values."""
    parts = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # objects have another address in every process
    config = {
        "class": type(model).__name__,
        **getattr(model, "config", {}),
        "modules": " ".join(parts.split()),
        "calibrated": getattr(model, "calibrated", False),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "frozen": " ".join(name for name, value in model.named_parameters() if not value.requires_grad),
    }
    first = features.shards[0]
    settings = {
        "features.graphs": len(features),
        "features.sizes": _digest(torch.cat([shard.selected_ptr for shard in features.shards])),
        "features.labels": _digest(features.y),
        "features.num_features": first.num_features,
        "features.dtype": str(first.rows.dtype),
        "features.num_hops": first.num_hops,
        "features.operator": first.operator,
        **options,
        "train": f"{len(train)} graphs ({_digest(train)})",
        "validation": f"{len(validation)} graphs ({_digest(validation)})",
        **{f"model.{name}": value for name, value in config.items()},
    }
    text = json.dumps(settings, default=lambda value: _digest(value) if isinstance(value, Tensor) else repr(value))
    return json.loads(text)


def _digest(values: Tensor | None) -> str:
    return "" if values is None else hashlib.sha256(values.cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


def sample_of(features: ShardedFeatures, train: Tensor, validation: Tensor) -> Tensor:
    """Sum the magnitudes of the rows of each branch, to recognise the features whether rows are shared or not.

    Of either part take all graphs, or ``SAMPLED`` evenly spread ones. One sum is over a few graphs, so that a single
    one that differs shows.
    """
    sums = []
    for ids in (train, validation):
        spread = torch.linspace(0, len(ids) - 1, min(len(ids), SAMPLED), dtype=torch.float64, device="cpu").long()
        for few in ids[spread.to(ids.device)].chunk(SAMPLE_SUMS):
            rows, ptr, index, count = features[few].branch_rows()
            of_graphs = ops.sum_readout(
                torch.cat(rows).abs(), ptr, index=index, count=count, num_branches=len(rows), check_invariants=False
            )
            sums.append(of_graphs.sum(0))
    return torch.stack(sums).cpu()


class StateError(NamingError, ValueError):
    """A run cannot go on.

    Attributes:
        differences: the settings that differ (:func:`settings_of`), with the value there, in the file, and here.
    """

    def __init__(self, *parts: str | Argument, differences: dict[str, tuple[Any, Any]] | None = None) -> None:
        super().__init__(*parts)
        self.differences = differences or {}

    def told(self, form: Callable[[Argument], str]) -> str:
        return f"{super().told(form)}; {form(Argument('resume', False))} starts anew"


def _other_settings(path: Path, differences: dict[str, tuple[Any, Any]]) -> StateError:
    parts: list[str | Argument] = [f"{path} is of another run: "]
    for name, (there, here) in differences.items():
        parts += [Argument(name, there), " there, ", Argument(name, here), " here; "]
    return StateError(*parts[:-1], " here", differences=differences)


class StateFile:
    """The file of a :class:`TrainingState`, written at most every ``SECONDS``, so that short epochs do not wait."""

    SECONDS = 10.0

    def __init__(self, path: Path, settings: dict[str, Any], sample: Tensor) -> None:
        self.path, self._settings, self._sample = path, settings, sample
        self._due, self._written = -math.inf, TrainingState()
        files.check_writable(path)

    def read(self, like: TrainingState) -> TrainingState:
        """Read the state.

        Args:
            like: a state of the same model, for names, shapes and dtypes of the tensors.

        Raises:
            FileNotFoundError: no such file. StateError: it is of other settings, damaged, or something else.
        """
        try:
            tensors, header = files.read_tensors(self.path, STATE_FORMAT)
        except ValueError as error:
            raise StateError(str(error)) from error
        epochs = self._epochs(header)
        best = {f"best.{name}": value for name, value in like.best.items()}
        self._check_tensors(tensors, {"sample": self._sample} | best | like.last)
        if not torch.allclose(tensors["sample"], self._sample, rtol=1e-4):  # another machine may round otherwise
            rows = _digest(tensors["sample"]), _digest(self._sample)
            raise _other_settings(self.path, {"features.rows": rows})
        state = TrainingState()
        for epoch in epochs:
            state = state.after(epoch, {}, {})
        last = {name: value for name, value in tensors.items() if name in like.last}
        self._written = replace(state, best={name: tensors[f"best.{name}"] for name in like.best}, last=last)
        return self._written

    def _epochs(self, header: dict[str, str]) -> list[Epoch]:
        """Check the settings, and return the epochs."""
        try:
            record = json.loads(header["record"])
            settings, epochs = record["settings"], [Epoch(**epoch) for epoch in record["epochs"]]
        except (KeyError, TypeError, ValueError):
            settings, epochs = None, []
        values = [value for epoch in epochs for value in vars(epoch).values()]
        are_numbers = all(type(value) in (int, float) for value in values)
        numbers = [epoch.number for epoch in epochs]
        if not isinstance(settings, dict) or not epochs or not are_numbers or numbers != [*range(1, len(epochs) + 1)]:
            what = "it must have the settings of a run, and its epochs as lines of a log, numbered from 1"
            raise StateError(f"{self.path} is damaged: {what}")
        pairs = {name: (settings.get(name), value) for name, value in self._settings.items()}
        if differences := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
            raise _other_settings(self.path, differences)
        return epochs

    def _check_tensors(self, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        for name, value in expected.items():
            there = tensors.get(name)
            if there is None and name == "random.cuda":  # it began on the CPU
                continue
            if there is None or there.shape != value.shape or there.dtype != value.dtype:
                found = "nothing" if there is None else f"{there.dtype} {list(there.shape)}"
                wanted = f"{value.dtype} {list(value.shape)}"
                raise StateError(f"{self.path} is damaged: {name} must be {wanted}, got {found}")
            if name in ("random.order", "random.cpu"):
                try:
                    torch.Generator().set_state(there)
                except RuntimeError as error:
                    raise StateError(f"{self.path} is damaged: {name}: {error}") from error

    def keep(self, state: TrainingState, *, now: bool = False) -> None:
        """Write the state if it is time to, or at once; not before an epoch has finite scores."""
        if state is self._written or not state.has_best or (not now and time.monotonic() < self._due):
            return
        best = {f"best.{name}": value for name, value in state.best.items()}
        record = {"settings": self._settings, "epochs": [vars(epoch) for epoch in state.epochs]}
        tensors = {"sample": self._sample} | best | state.last
        files.write_tensors(self.path, STATE_FORMAT, tensors, {"record": json.dumps(record)})
        self._written, self._due = state, time.monotonic() + self.SECONDS
