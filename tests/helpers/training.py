"""Small models, and the log of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spin_fast import SPIN, training


def new_model(seed: int = 0, **options) -> SPIN:
    torch.manual_seed(seed)
    return SPIN(3, 16, 10, 2, **options)


def numbers(fit: training.Fit) -> list[tuple]:
    """All of a log but the seconds."""
    return [
        (epoch.number, epoch.loss, epoch.validation_loss, epoch.validation, epoch.learning_rate) for epoch in fit.epochs
    ]


def knowing(operator: str | Sequence[str] | None, out_features: int = 4, **options: Any) -> SPIN:
    model = SPIN(3, 8, out_features, 2, **options)
    model.operator = operator
    return model
