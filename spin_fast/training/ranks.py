"""Training by several processes, the ranks of a process group: what each takes, and what they sum and tell each other.

Every rank draws the same batches, and takes a range of each. The gradients of these parts are summed, each with its
share of the batch, so that all ranks take the same step.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._common import torch_compat
from .._common.check import ArgumentTypeError

if dist.is_available():
    # Its functions keep the group that is the default when it is imported, so not after there is one, as the first
    # optimizer would.
    import torch.distributed.nn.functional

Value = TypeVar("Value")
GradientOf = Callable[..., tuple[Tensor, Tensor]]  # of a batch: the loss, and the gradient in the flat parameters


class OneRank:
    """A process that trains alone."""

    number = 1
    is_first = True

    def unify(self, model: nn.Module) -> None:
        """Give the model of every rank the parameters and buffers of the first.

        Raises:
            ValueError: the model has BatchNorm, whose running statistics each rank would have of its own.
        """

    def check_same(self, settings: Callable[[], dict[str, Any]]) -> None:
        """Check that settings are the same on every rank.

        Raises:
            ValueError: on every rank; says what differs.
        """

    def seed(self, seed: int, epoch: int) -> None:
        """Seed torch's random numbers, of dropout among others, so that each rank draws its own in every epoch."""

    def order(self, number: int, generator: torch.Generator | None) -> Tensor:
        """A random order, the same on every rank."""
        return torch.randperm(number, generator=generator, device="cpu")

    def sharing(
        self, gradient_of: GradientOf, shares_of: Callable[..., Tensor | None], parameters: Tensor
    ) -> GradientOf:
        """Turn a function of this rank's range of a batch into one of the batch, whose gradient is that of the batch.

        The losses of all ranks add up to that of the batch.

        Args:
            gradient_of: loss and gradient of the graphs of tensors, which have an entry for each.
            shares_of: what each of these graphs counts in the loss; None where all count the same.
            parameters: the flat parameters.
        """
        return gradient_of

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, which takes the place of ``values``."""
        return values

    def in_order(self, function: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """``function(ids)``, a row for each id, of which every rank computes a range; all get the whole."""
        return function(ids)

    def from_first(self, function: Callable[[], Value]) -> Value:
        """What ``function`` returns or raises on the first rank, the only one to call it."""
        return function()


class Ranks(OneRank):
    """This process among several; what it waits for raises a ConnectionError when another has ended."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Torch keeps a group until it is destroyed, and ends its threads with the last reference: one of gloo's that
        # still runs when the interpreter ends may abort the process.
        self._group = weakref.ref(group)
        self.rank, self.number = dist.get_rank(group), dist.get_world_size(group)
        self.is_first = self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise ValueError("process_group has been destroyed")
        return group

    def unify(self, model: nn.Module) -> None:
        if any(isinstance(module, torch_compat.BatchNorm) for module in model.modules()):
            raise ValueError(
                "model must have no BatchNorm to be trained by several ranks, each of which would have other running "
                "statistics"
            )
        with _told():
            for value in (*model.parameters(), *model.buffers()):
                sent = value.detach().contiguous()
                dist.broadcast(sent, group=self.group, group_src=0)
                value.detach().copy_(sent)

    def check_same(self, settings: Callable[[], dict[str, Any]]) -> None:
        here = settings()
        of_ranks: list[Any] = [None] * self.number
        with _told():
            dist.all_gather_object(of_ranks, here, self.group)
        for rank, there in enumerate(of_ranks):
            every = {*there, *of_ranks[0]}
            if names := sorted(name for name in every if there.get(name) != of_ranks[0].get(name)):
                told = ", ".join(f"{name}={of_ranks[0].get(name)!r} and {there.get(name)!r}" for name in names)
                raise ValueError(f"arguments must be the same on every rank, got on ranks 0 and {rank} {told}")

    def seed(self, seed: int, epoch: int) -> None:
        mixed = np.random.SeedSequence([seed, epoch, self.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(mixed[0]))

    def order(self, number: int, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            raise ValueError("generator must be given to several ranks, seeded alike, got None")
        return super().order(number, generator)

    def _range(self, number: int) -> slice:
        """This rank's range of so many; the ranges of the last ranks may be shorter, or empty."""
        size = -(-number // self.number)
        return slice(min(self.rank * size, number), min((self.rank + 1) * size, number))

    def sharing(
        self, gradient_of: GradientOf, shares_of: Callable[..., Tensor | None], parameters: Tensor
    ) -> GradientOf:
        def shared(*batch: Tensor) -> tuple[Tensor, Tensor]:
            number, mine = len(batch[0]), self._range(len(batch[0]))
            if mine.start < mine.stop:
                shares = shares_of(*batch)
                loss, gradient = gradient_of(*(values[mine] for values in batch))
                share: float | Tensor = (mine.stop - mine.start) / number
                if shares is not None:
                    of_graphs = shares.double()
                    share = (of_graphs[mine].sum() / of_graphs.sum()).nan_to_num(0)  # where all count nothing
                gradient *= share
                loss = (loss * share).to(loss.dtype)
            else:
                loss, gradient = parameters.new_zeros(()), torch.zeros_like(parameters, requires_grad=False)
            return loss, self.sum(gradient)

        return shared

    def sum(self, values: Tensor) -> Tensor:
        with _told():
            dist.all_reduce(values, group=self.group)
        return values

    def in_order(self, function: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        mine, size = self._range(len(ids)), -(-len(ids) // self.number)
        rows = function(ids[mine])
        padded = rows.new_zeros(size, *rows.shape[1:])
        padded[: len(rows)] = rows
        every = [torch.empty_like(padded) for _ in range(self.number)]
        with _told():
            dist.all_gather(every, padded, group=self.group)
        return torch.cat(every)[: len(ids)]

    def from_first(self, function: Callable[[], Value]) -> Value:
        told: list[Any] = [None]
        if self.is_first:
            try:
                told = [(function(), None)]
            except Exception as error:
                told = [(None, _sendable(error))]
        with _told():
            dist.broadcast_object_list(told, group=self.group, group_src=0)
        value, failed = told[0]
        if failed is not None:
            raise failed
        return value


def ranks_of(process_group: dist.ProcessGroup | None) -> OneRank:
    """The ranks that train together: this process alone without a group, or in a group of one."""
    if process_group is None:
        return OneRank()
    if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise ArgumentTypeError("process_group", "be a ProcessGroup of torch.distributed, or None", type(process_group))
    return Ranks(process_group) if dist.get_world_size(process_group) > 1 else OneRank()


@contextmanager
def _told() -> Iterator[None]:
    """Tell in one line that a rank has ended, of which each backend tells in its own way."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"another rank has ended, or cannot be reached: {error}") from error


def _sendable(error: Exception) -> Exception:
    """The error, or one with its message where other processes could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        told = RuntimeError(f"{type(error).__name__}: {error}")
        told.__cause__ = error
        return told
    return error
