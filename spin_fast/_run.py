"""A run of training after some epochs: which weights to keep, when to stop, and all that it takes to go on."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _files, ops
from .checkpoints import load_state, save_state
from .features import PowerFeatures
from .trainer import Trainer


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
class Run:
    """Never changed, only replaced: whenever a run is interrupted, it is as after its last complete epoch.

    Attributes:
        epochs: the log.
        best_epoch: whose weights are kept, from 0.
        best_score: its metric and, of equal metrics, the lower loss; a metric that is no number is below all others.
        risen: the last epoch at which the metric rose, from 0.
        best: the weights of ``best_epoch``; those before training while neither metric nor loss was a number.
        last: what the next epoch starts from (:func:`snapshot`), where a file of it is kept.
    """

    epochs: tuple[Epoch, ...] = ()
    best_epoch: int = 0
    best_score: tuple[float, float] = (-math.inf, -math.inf)
    risen: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)

    def after(self, epoch: Epoch, weights: dict[str, Tensor], last: dict[str, Tensor]) -> Run:
        """The run with one epoch more, which has left the model with ``weights``."""
        metric = -math.inf if math.isnan(epoch.validation) else epoch.validation
        epochs, score = (*self.epochs, epoch), (metric, -epoch.validation_loss)
        if not score > self.best_score:
            return replace(self, epochs=epochs, last=last)
        number = len(self.epochs)
        risen = number if metric > self.best_score[0] else self.risen
        return Run(epochs, number, score, risen, copied(weights), last)

    def is_over(self, epochs: int, patience: int) -> bool:
        done = len(self.epochs)
        return done >= epochs or (done > 0 and done - 1 - self.risen >= patience)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def snapshot(trainer: Trainer, order: torch.Generator) -> dict[str, Tensor]:
    """Copies of what an epoch changes: parameters, buffers, what Adam remembers, and the states of random numbers."""
    copies = copied(_changing(trainer)) | {"random.order": order.get_state(), "random.cpu": torch.get_rng_state()}
    if (device := _gpu_of(trainer)) is not None:
        copies["random.cuda"] = torch.cuda.get_rng_state(device)
    return copies


def restore(trainer: Trainer, order: torch.Generator, run: Run) -> None:
    """Undo what has happened since the last :func:`snapshot`; of random numbers of a GPU, where both were on one."""
    trainer.model.load_state_dict(run.best)  # what is not trained
    with torch.no_grad():
        for name, value in _changing(trainer).items():
            value.copy_(run.last[name])
    order.set_state(run.last["random.order"])
    torch.set_rng_state(run.last["random.cpu"])
    if (device := _gpu_of(trainer)) is not None and "random.cuda" in run.last:
        torch.cuda.set_rng_state(run.last["random.cuda"], device)


def _changing(trainer: Trainer) -> dict[str, Tensor]:
    (moments,) = trainer.optimizer.state.values()
    tensors = {f"buffer.{name}": value for name, value in trainer.model.named_buffers()}
    tensors |= {f"adam.{name}": value for name, value in moments.items()}
    return tensors | {"parameters": trainer.model.flatten_parameters()}


def _gpu_of(trainer: Trainer) -> torch.device | None:
    device = next(trainer.model.parameters()).device
    return device if device.type == "cuda" else None


def _part(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


def settings_of(
    model: torch.nn.Module, features: PowerFeatures, train: Tensor, validation: Tensor, **options: Any
) -> dict[str, Any]:
    """What must be the same for a run to go on, by the names of the arguments, as JSON values."""
    parts = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # objects have another address in every process
    modules = {"modules": " ".join(parts.split())}  # of models that are made of any
    config: dict[str, Any] = {"class": type(model).__name__} | getattr(model, "config", modules)
    config["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    config["trained parameters"] = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    data = {
        "graphs": len(features),
        "features": features.num_features,
        "dtype": str(features.rows.dtype),
        "hops": features.num_hops,
        "operator": features.operator,
        "sizes": _digest(features.selected_ptr),
        "labels": _digest(features.y),
    }
    settings = options | {f"model.{name}": value for name, value in config.items()}
    settings |= {f"features: {name}": value for name, value in data.items()}
    settings |= {"train": _described(train), "validation": _described(validation)}
    return json.loads(json.dumps(settings, default=_as_text))


def _as_text(value: Any) -> str:
    return _digest(value) if isinstance(value, Tensor) else repr(value)


def _digest(values: Tensor | None) -> str:
    return "" if values is None else hashlib.sha256(values.cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


def sample_of(features: PowerFeatures, train: Tensor) -> Tensor:
    """Sums of the magnitudes in the rows of some graphs, which tell other features, but not where rows are shared."""
    rows, ptr, index, count = features[train[:16]].branch_rows()
    magnitudes, branches = torch.cat(rows).abs(), features.num_branches
    return ops.sum_readout(magnitudes, ptr, index=index, count=count, num_branches=branches, checked=True).cpu()


def _described(ids: Tensor) -> str:
    return f"{len(ids)} graphs ({_digest(ids)})"


class RunFile:
    """The file of a run, written when ``SECONDS`` have passed, so that short epochs do not wait for it."""

    SECONDS = 10.0

    def __init__(self, path: Path, settings: dict[str, Any], sample: Tensor) -> None:
        self.path, self._settings, self._sample = path, settings, sample
        self._due, self._written = -math.inf, Run()
        _files.check_writable(path)

    def read(self) -> Run:
        """The run as it was kept.

        Raises:
            FileNotFoundError: no such file. ValueError: it is damaged, something else, or of other settings.
        """
        tensors, record = load_state(self.path)
        for name, value in self._settings.items():
            if value != (there := record["settings"].get(name)):
                raise ValueError(f"{name} must be {there!r} to go on from {self.path}, got {value!r}")
        if not torch.allclose(tensors["sample"], self._sample, rtol=1e-4):  # another machine may round otherwise
            raise ValueError(f"features must have the rows of {self.path} to go on from it, got others")
        run = Run()
        for epoch in record["epochs"]:
            run = run.after(Epoch(**epoch), {}, {})
        run = replace(run, best=_part("best", tensors), last=tensors)
        self._written = run
        return run

    def keep(self, run: Run, *, now: bool = False) -> None:
        """Write ``run`` if it is time to, or at once."""
        if run is self._written or not run.epochs or (not now and time.monotonic() < self._due):
            return
        best = {f"best.{name}": value for name, value in run.best.items()}
        record = {"settings": self._settings, "epochs": [vars(epoch) for epoch in run.epochs]}
        save_state(self.path, {"sample": self._sample} | best | run.last, record)
        self._written, self._due = run, time.monotonic() + self.SECONDS
