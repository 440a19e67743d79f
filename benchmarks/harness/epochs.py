"""One training epoch of SPIN or of a rival as a call, for races, memory measurements and studies alike."""

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
    """Fused Adam, for the rivals: SPIN's trainer has its own, on the flat parameters."""
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


def captured(model: nn.Module, batches: list[Any]) -> Epoch:
    """An epoch of a rival on a GPU whose batches, collated beforehand, have a CUDA graph of the whole step each.

    The graphs share their memory, which each overwrites, so the losses are kept outside. What they read and write there
    they do not keep alive: model, optimiser and batches must be, as long as the epoch is.
    """
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True, capturable=True)
    losses = torch.zeros(len(batches), device=batches[0].x.device)

    def step(number: int) -> None:
        inputs = batches[number]
        loss = F.cross_entropy(model(inputs), inputs.y)
        loss.backward()
        optimizer.step()
        losses[number].copy_(loss.detach())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries and the optimiser's state are made before
        for number in range(min(3, len(batches))):
            optimizer.zero_grad(set_to_none=True)
            step(number)
    torch.cuda.current_stream().wait_stream(side)
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for number in range(len(batches)):
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step(number)
        graphs.append(graph)

    def epoch(*_: Any) -> float:
        for graph in shuffled(graphs):
            graph.replay()
        return losses.mean().item()

    return partial(epoch, model, optimizer, batches)


def shuffled(batches: list[Any]) -> Iterator[Any]:
    """One epoch of batches collated beforehand: their order is drawn anew, what is in each of them stays."""
    return (batches[i] for i in torch.randperm(len(batches)).tolist())
