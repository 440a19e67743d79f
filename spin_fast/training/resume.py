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

from .. import ops
from .._common import files
from ..features.power_features import PowerFeatures
from .checkpoints import load_state, save_state
from .trainer import Trainer

START_ANEW = "resume=False starts anew"  # what to do, at the end of errors
SAMPLED, SAMPLE_SUMS = 1024, 64  # graphs of a part that sample_of looks at, at most, and into how many sums


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
        risen: the last epoch at which the metric rose or, while it was no number, the loss fell, from 0.
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
        risen = number if metric > self.best_score[0] or metric == -math.inf else self.risen
        return Run(epochs, number, score, risen, copied(weights), last)

    @property
    def has_best(self) -> bool:
        """Whether the metric, or else the loss, of any epoch was a number."""
        return self.best_score > (-math.inf, -math.inf)

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
    config["calibrated"] = getattr(model, "calibrated", False)
    config["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    config["trained parameters"] = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    data = {
        "graphs": len(features),
        "sizes": _digest(features.selected_ptr),
        "labels": _digest(features.y),
        "features": features.num_features,
        "dtype": str(features.rows.dtype),
        "hops": features.num_hops,
        "operator": features.operator,
    }
    settings = {f"features: {name}": value for name, value in data.items()} | options  # data first: options follow it
    settings |= {"train": _described(train), "validation": _described(validation)}
    settings |= {f"model.{name}": value for name, value in config.items()}  # last: it follows from the others, mostly
    return json.loads(json.dumps(settings, default=_as_text))


def _as_text(value: Any) -> str:
    return _digest(value) if isinstance(value, Tensor) else repr(value)


def _digest(values: Tensor | None) -> str:
    return "" if values is None else hashlib.sha256(values.cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


def sample_of(features: PowerFeatures, train: Tensor, validation: Tensor) -> Tensor:
    """Sums of the magnitudes in the rows of each branch, which tell other features, but not where rows are shared.

    Both parts are in, with all of their graphs or, of many, ``SAMPLED`` that are spread evenly; in sums over a few
    graphs each, so that one that differs shows.
    """
    sums = []
    for ids in (train, validation):
        spread = torch.linspace(0, len(ids) - 1, min(len(ids), SAMPLED), dtype=torch.float64).long()
        for run in ids[spread.to(ids.device)].chunk(SAMPLE_SUMS):
            rows, ptr, index, count = features[run].branch_rows()
            magnitudes, branches = torch.cat(rows).abs(), features.num_branches
            of_graphs = ops.sum_readout(
                magnitudes, ptr, index=index, count=count, num_branches=branches, check_invariants=False
            )
            sums.append(of_graphs.sum(0))
    return torch.stack(sums).cpu()


def _described(ids: Tensor) -> str:
    return f"{len(ids)} graphs ({_digest(ids)})"


_ALIKE = {
    "features: sizes": "have the same numbers of nodes",
    "features: labels": "have the same labels",
    "features: rows": "have the same rows",
    "model.modules": "be made of the same modules",
    "graph_weight": "be the same",
}
_OF_VALUE = {
    "features: graphs": "have {} graphs",
    "features: features": "have {} features per node",
    "features: hops": "have {} hops",
    "model.class": "be a {}",
    "model.parameters": "have {} parameters",
    "model.trained parameters": "have {} trained parameters",
}


class OtherRunError(ValueError):
    """A run cannot go on with what it is given.

    Attributes:
        name: of the first setting that differs, as :func:`settings_of` has it, or ``features: rows``.
        there: its value in the file.
        here: the value given.
    """

    def __init__(self, path: Path, name: str, there: Any = None, here: Any = None) -> None:
        self.name, self.there, self.here = name, there, here
        argument, what, got = self._in_words()
        super().__init__(f"{argument} must {what} to go on from {path}, got {got}; {START_ANEW}")

    def _in_words(self) -> tuple[str, str, str]:
        """The argument, what it must do, and what it does."""
        name, there, here = self.name, self.there, self.here
        if name in ("train", "validation"):
            graphs, others = (str(value).partition(" (")[0] for value in (there, here))
            return name, f"be the same {graphs} in the same order", "others" if graphs == others else others
        argument, _, setting = name.replace(": ", ".").partition(".")
        if name in _ALIKE:
            return argument, _ALIKE[name], "others"
        if not setting:
            return name, f"be {there!r}", repr(here)
        return argument, _OF_VALUE.get(name, f"have {setting}={{!r}}").format(there), str(here)


class RunFile:
    """The file of a run, written when ``SECONDS`` have passed, so that short epochs do not wait for it."""

    SECONDS = 10.0

    def __init__(self, path: Path, settings: dict[str, Any], sample: Tensor) -> None:
        self.path, self._settings, self._sample = path, settings, sample
        self._due, self._written = -math.inf, Run()
        files.check_writable(path)

    def read(self, like: Run) -> Run:
        """The run as it was kept.

        Args:
            like: a run of the same model, whose tensors say what those of the file must be.

        Raises:
            FileNotFoundError: no such file. OtherRunError: it is of other settings. ValueError: it is damaged, or
                something else.
        """
        try:
            tensors, record = load_state(self.path)
            settings, epochs = self._parts_of(record)
            self._compare(settings)
            best = {f"best.{name}": value for name, value in like.best.items()}
            self._check_tensors(tensors, {"sample": self._sample} | best | like.last)
        except OtherRunError:
            raise
        except ValueError as error:
            raise ValueError(f"{error}; {START_ANEW}") from error
        if not torch.allclose(tensors["sample"], self._sample, rtol=1e-4):  # another machine may round otherwise
            raise OtherRunError(self.path, "features: rows")
        run = Run()
        for epoch in epochs:
            run = run.after(epoch, {}, {})
        last = {name: value for name, value in tensors.items() if name in like.last}
        run = replace(run, best=_part("best", tensors), last=last)
        self._written = run
        return run

    def _parts_of(self, record: dict[str, Any]) -> tuple[dict[str, Any], list[Epoch]]:
        settings, epochs = record.get("settings"), record.get("epochs")
        if not isinstance(settings, dict) or not isinstance(epochs, list):
            raise ValueError(f"{self.path} is damaged: it must have the settings and the epochs of a run")
        try:
            found = [Epoch(**epoch) for epoch in epochs]
        except TypeError:
            found = []
        values = [value for epoch in found for value in vars(epoch).values()]
        are_numbers = all(type(value) in (int, float) for value in values)
        if not found or not are_numbers or [epoch.number for epoch in found] != list(range(1, len(found) + 1)):
            raise ValueError(f"{self.path} is damaged: its epochs must be lines of a log, numbered from 1")
        return settings, found

    def _compare(self, settings: dict[str, Any]) -> None:
        for name, value in self._settings.items():
            if name not in settings:
                raise ValueError(f"{self.path} is damaged, or of another version of spin_fast: it does not have {name}")
            if value != settings[name]:
                raise OtherRunError(self.path, name, settings[name], value)

    def _check_tensors(self, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        for name, value in expected.items():
            there = tensors.get(name)
            if there is None and name == "random.cuda":  # it began on the CPU
                continue
            if there is None or there.shape != value.shape or there.dtype != value.dtype:
                found = "nothing" if there is None else f"{there.dtype} {list(there.shape)}"
                wanted = f"{value.dtype} {list(value.shape)}"
                raise ValueError(f"{self.path} is damaged: {name} must be {wanted}, got {found}")
            if name in ("random.order", "random.cpu"):
                try:
                    torch.Generator().set_state(there)
                except RuntimeError as error:
                    raise ValueError(f"{self.path} is damaged: {name}: {error}") from error

    def keep(self, run: Run, *, now: bool = False) -> None:
        """Write ``run`` if it is time to, or at once."""
        if run is self._written or not run.has_best or (not now and time.monotonic() < self._due):
            return
        best = {f"best.{name}": value for name, value in run.best.items()}
        record = {"settings": self._settings, "epochs": [vars(epoch) for epoch in run.epochs]}
        save_state(self.path, {"sample": self._sample} | best | run.last, record)
        self._written, self._due = run, time.monotonic() + self.SECONDS
