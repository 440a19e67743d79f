"""Learning-rate schedules: torch's schedulers by name, stepped once an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

Schedule = str | Callable[[Optimizer], LRScheduler]


def _cosine(done: float) -> float:
    return (1 + math.cos(math.pi * done)) / 2


def _warmup_cosine(epoch: int, epochs: int) -> float:
    rise = math.ceil(epochs / 10)
    return (epoch + 1) / (rise + 1) if epoch < rise else _cosine((epoch - rise) / max(epochs - rise, 1))


SCHEDULES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "constant": lambda optimizer, _: LambdaLR(optimizer, lambda _: 1.0),
    "cosine": lambda optimizer, epochs: LambdaLR(optimizer, lambda epoch: _cosine(epoch / epochs)),
    "warmup-cosine": lambda optimizer, epochs: LambdaLR(optimizer, lambda epoch: _warmup_cosine(epoch, epochs)),
    "step": lambda optimizer, _: StepLR(optimizer, step_size=50, gamma=0.5),
    "plateau": lambda optimizer, _: ReduceLROnPlateau(optimizer, factor=0.5, patience=10),
}


def scheduler_of(schedule: Schedule, optimizer: Optimizer, epochs: int) -> LRScheduler:
    """The scheduler of a run of ``epochs``, from its name or from what makes one."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        return SCHEDULES[schedule](optimizer, epochs)
    if not callable(schedule):
        raise TypeError(f"schedule must be a name or make a torch scheduler, got {type(schedule).__name__}")
    scheduler = schedule(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"schedule must return a torch.optim.lr_scheduler.LRScheduler, got {type(scheduler).__name__}")
    return scheduler


def advance(scheduler: LRScheduler, validation_loss: float, validation: float) -> None:
    """One epoch on; a ``ReduceLROnPlateau`` watches the validation loss, or with mode ``max`` the metric."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(validation if scheduler.mode == "max" else validation_loss)
    else:
        scheduler.step()
