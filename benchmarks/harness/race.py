"""Interleaved timing: the contenders of a race take turns, A B C A B C, so that a drift of the machine meets them all.

Floors, lower bounds of what the operation costs on this machine, take part like rivals.

One thread is timed by the CPU time of the process, which other processes disturb least, and two or more by wall time. A
sample is one call, or as many as last 10 ms, of epochs 100 ms: caches are as warm as a repeated call leaves them.
On a GPU a sample is wall time, from an idle device to an idle device.
Ratios are taken round by round; reported are medians and quartiles over the rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import numpy as np
import torch

SHORTEST_SAMPLE = 0.010  # seconds
WARM_AT_ONCE = 1.0  # seconds: a longer call is not repeated to warm up

Contender = Callable[[], object]
Floors = Mapping[str, Mapping[str, Contender]]
"""Minimal work, by kind and by way to do it: of the ways the fastest counts, of the kinds the slowest."""


class Spread(NamedTuple):
    """Quartiles of the rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float] | np.ndarray) -> Spread:
        return cls(*np.percentile(values, [25, 50, 75]).tolist())


@dataclass(frozen=True)
class Effort:
    """How many rounds: as many as fit ``budget`` seconds, but ``fewest`` to ``most``.

    A rival whose single call takes longer than twice the budget is timed once, before the first round.
    """

    budget: float
    fewest: int
    most: int

    @property
    def patience(self) -> float:
        return 2 * self.budget

    def rounds(self, seconds_of_one: float) -> int:
        return min(max(int(self.budget / seconds_of_one), self.fewest), self.most)


@dataclass
class Race:
    """One case on one input: the first contender is ours, the others are more of ours, its rivals, or floors.

    Attributes:
        suite: the module of the case, such as ``power`` or ``training``.
        case: what is computed; cases of the same name share a table.
        on: the input, a row of that table.
        threads: torch's threads.
        shortest: seconds that a sample lasts at least.
        device: ``cuda`` where the work is done on a GPU.
        own: the names of our contenders.
        calls: calls per sample and contender.
        seconds: seconds per call, contender and round.
        floors: the names of those contenders that are floors, by kind.
    """

    suite: str
    case: str
    on: str
    threads: int
    shortest: float = SHORTEST_SAMPLE
    device: str = "cpu"
    own: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    floors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """What it runs on, in words."""
        return "GPU" if self.device == "cuda" else "1 thread" if self.threads == 1 else f"{self.threads} threads"

    @property
    def title(self) -> str:
        """Of the table that it belongs to."""
        return f"{self.case}, {self.place}"

    @property
    def clock(self) -> str:
        """What its seconds are."""
        return "CPU time" if self.device == "cpu" and self.threads == 1 else "wall time"

    @property
    def ours(self) -> str:
        return self.own[0]

    @property
    def second(self) -> str | None:
        """Another one of ours, to which ratios are taken too; not a variant of the first, named ``FIRST, ...``."""
        return next((name for name in self.own[1:2] if not name.startswith(f"{self.ours},")), None)

    @property
    def others(self) -> list[str]:
        """All but the first of ours and the floors."""
        floors = {name for ways in self.floors.values() for name in ways}
        return [name for name in self.seconds if name != self.ours and name not in floors]

    @property
    def best_rival(self) -> str | None:
        """The fastest that is not ours."""
        rivals = (name for name in self.others if name not in self.own)
        return min(rivals, key=lambda name: self.time(name).median, default=None)

    @property
    def kinds(self) -> list[str]:
        """The fastest floor of each kind."""
        return [min(ways, key=lambda way: self.time(way).median) for ways in self.floors.values()]

    @property
    def floor(self) -> str | None:
        """The floor that counts: the slowest kind."""
        return max(self.kinds, key=lambda kind: self.time(kind).median, default=None)

    def rounds(self, contender: str) -> int:
        return len(self.seconds[contender])

    def time(self, contender: str) -> Spread:
        """Seconds per call."""
        return Spread.of(self.seconds[contender])

    def ratio(self, contender: str, to: str | None = None) -> Spread:
        """A contender's time over that of another, by default ours."""
        pairs = zip(self.seconds[contender], self.seconds[to or self.ours], strict=False)
        return Spread.of([seconds / others for seconds, others in pairs])

    def enter(self, contenders: Mapping[str, Contender], floors: Floors, ours: int) -> dict[str, Contender]:
        """Note which contenders are ours, the first ones, and what the floors are called; return all who take part."""
        self.own, entered = list(contenders)[:ours], dict(contenders)
        for kind, ways in floors.items():
            named = {f"floor: {kind}, {way}" if way else f"floor: {kind}": run for way, run in ways.items()}
            self.floors[kind] = list(named)
            entered |= named
        return entered

    def warm_up(self, contenders: Mapping[str, Contender], patience: float, once: Collection[str] = ()) -> float:
        """Call every contender, choose its calls per sample, and return the seconds of a round.

        A rival of ``once``, or that takes longer than ``patience``, has its time by that, and no part in the rounds.
        """
        seconds_of_round = 0.0
        for name, contender in contenders.items():
            self.seconds[name] = []
            calls, seconds = 1, self._sample(contender, 1)
            if name in once or (seconds > patience and name != self.ours):
                self.seconds[name].append(seconds)
                continue
            if seconds < WARM_AT_ONCE:
                seconds = self._sample(contender, 1)
            while calls * seconds < self.shortest / 2:
                calls = min(10 * calls, ceil(self.shortest / seconds))
                seconds = self._sample(contender, calls)
            self.calls[name] = max(calls, ceil(self.shortest / seconds))
            seconds_of_round += self.calls[name] * seconds
        return seconds_of_round

    def run_round(self, contenders: Mapping[str, Contender]) -> None:
        """Take one sample of every contender that has calls to take."""
        for name, calls in self.calls.items():
            self.seconds[name].append(self._sample(contenders[name], calls))

    def _sample(self, contender: Contender, calls: int) -> float:
        now = clock(self.threads, self.device)
        start = now()
        for _ in range(calls):
            contender()
        return max(now() - start, 1e-9) / calls


def clock(threads: int, device: str = "cpu") -> Callable[[], float]:
    """CPU time of the process for one thread, wall time for more, and for a GPU once that has done its work."""
    if device == "cuda":
        return _idle_gpu
    return time.process_time if threads == 1 else time.perf_counter


def _idle_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Set torch's number of threads within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Exclude what exists, such as data sets of many objects, from garbage collection within a block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
