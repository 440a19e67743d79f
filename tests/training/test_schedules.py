from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spin_fast.training.schedules import SCHEDULES, advance, scheduler_of


def rates(schedule, epochs: int, losses: list[float] | None = None, metric: float = 0.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, found = scheduler_of(schedule, optimizer, epochs), []
    for number in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        advance(scheduler, 1.0 if losses is None else losses[number], metric)
    return found


def test_rates() -> None:
    assert rates("constant", 3) == [1, 1, 1]
    assert rates("cosine", 4) == pytest.approx([(1 + math.cos(math.pi * part / 4)) / 2 for part in range(4)])
    warm = rates("warmup-cosine", 40)
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert warm[4:] == pytest.approx(rates("cosine", 36))
    assert rates("step", 120) == [1.0] * 50 + [0.5] * 50 + [0.25] * 20
    falling = [1.0] + [0.5] * 30
    assert rates("plateau", 31, falling) == [1.0] * 13 + [0.5] * 11 + [0.25] * 7


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epochs", [1, 2, 11])
def test_rates_are_positive(schedule: str, epochs: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(schedule, epochs))


def test_plateaus_of_the_metric() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, mode="max", patience=0)

    falling = [1.0, 0.5, 0.2]
    assert rates(plateau, 3, falling) == pytest.approx([1, 1, 0.1])


def test_bad_schedules_are_named() -> None:
    with pytest.raises(ValueError, match=r"schedule must be one of constant, cosine, .*, got 'linear'"):
        rates("linear", 2)
    with pytest.raises(TypeError, match="schedule must be a name or make a torch scheduler, got int"):
        rates(3, 2)
    with pytest.raises(TypeError, match=r"schedule must return a .*LRScheduler, got SGD"):
        rates(lambda optimizer: optimizer, 2)
