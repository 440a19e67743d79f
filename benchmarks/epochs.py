"""One training epoch of SPIN or of a rival as a call: what races, memory runs and accuracy runs train alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spin_fast import SPIN, PowerFeatures, training

DEPTH = 3
"""Hops of SPIN and message passing layers of its rivals."""
WIDTH = 32
LEARNING_RATE = 1e-3

Epoch = Callable[[], float]


def adam(model: nn.Module) -> torch.optim.Adam:
    """The optimiser of all but ours, which has it on one flat parameter, and of the loop over graphs."""
    return torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)


def ours(model: SPIN, features: PowerFeatures, batch_size: int, ids: Tensor | None = None) -> Epoch:
    """An epoch of SPIN over the graphs ``ids``, by default all, in random order."""
    ids = torch.arange(len(features)) if ids is None else ids
    return partial(training.Trainer(model, learning_rate=LEARNING_RATE).epoch, features, ids, batch_size)


def of(model: nn.Module, batches: Callable[[], Iterable[Any]], optimizer: torch.optim.Optimizer | None = None) -> Epoch:
    """An epoch of a rival; ``batches`` starts the epoch's iterator."""
    optimizer = optimizer or adam(model)

    def epoch() -> float:
        model.train()
        losses = []
        for inputs in batches():
            loss = F.cross_entropy(model(inputs), inputs.y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    return epoch


def shuffled(batches: list[Any]) -> Iterator[Any]:
    """One epoch of batches collated beforehand: their order is drawn anew, what is in each of them stays."""
    return (batches[i] for i in torch.randperm(len(batches)).tolist())
