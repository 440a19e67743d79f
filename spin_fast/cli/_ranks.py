"""Under torchrun: the processes of one ``spin-fast train``, of which one speaks for all."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist


class Alone:
    """This process was not started with others."""

    number = 1
    is_first = True

    @contextmanager
    def one_voice(self) -> Iterator[None]:
        """Have the first rank alone use stdout and stderr."""
        yield

    def tell(self, line: str) -> None:
        """Print the line of an error, on the rank that meets one first: torchrun then ends the others."""
        print(line, file=sys.stderr)

    def on_first(self, function: Callable[[], object]) -> None:
        """Call a function on the first rank alone, while the others wait."""
        function()

    @contextmanager
    def process_group(self, device: torch.device) -> Iterator[dist.ProcessGroup | None]:
        """The group of all ranks, for tensors on ``device``; None of a single process."""
        yield None

    def own(self, device: torch.device) -> torch.device:
        """The device of this rank, of the kind of ``device``."""
        return device


class Rank(Alone):
    """One of several processes that torchrun has started."""

    def __init__(self) -> None:
        store, self.rank, self.number = next(dist.rendezvous("env://"))
        self._store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)  # it outlives a restart
        self._stderr = sys.stderr
        self._num_calls = 0  # of on_first
        self.is_first = self.rank == 0

    @contextmanager
    def one_voice(self) -> Iterator[None]:
        if not self.is_first:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        try:
            yield
        except SystemExit as end:
            if end.code == 2 and not self.is_first:  # every rank has the same wrong arguments: the first tells
                with suppress(RuntimeError):
                    self._store.wait(["spin-fast ended"], timedelta(days=1))
            raise
        finally:
            sys.stderr = self._stderr  # for the traceback that --debug asks for
            if self.is_first:
                with suppress(RuntimeError):
                    self._store.set("spin-fast ended", "")

    def tell(self, line: str) -> None:
        is_told = False
        with suppress(RuntimeError):  # the process that keeps the store has ended
            is_told = self._store.add("spin-fast told", 1) > 1
        if not is_told:
            print(line, file=self._stderr, flush=True)

    def on_first(self, function: Callable[[], object]) -> None:
        self._num_calls += 1
        done = f"spin-fast first {self._num_calls}"
        if self.is_first:
            function()
            self._store.set(done, "")
        else:
            self._store.wait([done], timedelta(days=1))

    @contextmanager
    def process_group(self, device: torch.device) -> Iterator[dist.ProcessGroup | None]:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if hasattr(os, "SCHED_BATCH"):  # else threads of gloo often wait for a time slice to end
            with suppress(OSError):  # a policy that may not be left
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.number)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()

    def own(self, device: torch.device) -> torch.device:
        if device.type != "cuda":
            return device
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device


@functools.cache
def launch() -> Alone:
    """How this process was started."""
    is_launched = dist.is_available() and dist.is_torchelastic_launched()
    return Rank() if is_launched and int(os.environ["WORLD_SIZE"]) > 1 else Alone()
