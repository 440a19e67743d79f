"""Several processes in a process group, and what they do in tests; a spawned process imports this, but no test."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from spin_fast import PAGNN, SPIN, PowerFeatures, datasets, training
from spin_fast.features.shards import ShardedFeatures
from spin_fast.training.ranks import ranks_of

from .training import numbers

Group = dist.ProcessGroup | None


def by_ranks(number: int, function: Callable[..., Iterator[Any]], *arguments: Any) -> list[Any]:
    """The last result that ``function`` yields in each of so many processes, one of which may be killed then."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, number, folder, function, arguments)) for rank in range(number)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 200
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        late = [process.kill() for process in processes if process.is_alive()]
        assert not late, "a rank hangs"
        assert {process.exitcode for process in processes} <= {0, -signal.SIGKILL}
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(number)]


def _rank(rank: int, number: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number)
    group = weakref.ref(dist.group.WORLD)
    for result in function(*arguments):
        torch.save(result, f"{folder}/{rank}")
    dist.destroy_process_group()
    assert group() is None, "threads of the group go on, one of which may abort the process at its end"


@functools.cache
def digits(dtype: torch.dtype = torch.float64) -> PowerFeatures:
    features = PowerFeatures.from_graphs(datasets.load("digits")[:160], 2)
    return replace(features, rows=features.rows.to(dtype))


def _tasks() -> PowerFeatures:
    """Labels that are missing here and there, and of some graphs all."""
    labels = (digits().labels[:, None] == torch.arange(10)).double()
    labels[::3, ::2], labels[5:9] = math.nan, math.nan
    return replace(digits(), labels=labels)


def _shards() -> ShardedFeatures:
    return ShardedFeatures([digits()[begin:end] for begin, end in pairwise((0, 20, 40, 160))])


class Doubled(SPIN):
    def forward(self, features: PowerFeatures) -> Tensor:
        return 2 * super().forward(features)


def _pagnn() -> PAGNN:
    return PAGNN([torch.nn.Sequential(torch.nn.Linear(3, 10), torch.nn.Tanh()) for _ in range(3)], "sum")


_WEIGHTS = torch.arange(160) % 4 / 3
# Of each a model, features, and options of fit. Batches of 7 leave one of 2 graphs, less than there are ranks.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], PowerFeatures | ShardedFeatures], dict[str, Any]]] = {
    "fused": (lambda: SPIN(3, 8, 10, 2), digits, {}),
    "joint": (lambda: SPIN(3, 8, 10, 2, branches="both", attention=False), digits, {"batch_size": 50}),
    "class weights": (lambda: SPIN(3, 8, 10, 2), digits, {"class_weight": torch.linspace(0, 3, 10)}),
    "balanced": (lambda: SPIN(3, 8, 10, 2, size_aware=True), digits, {"class_weight": "balanced"}),
    "graph weights": (lambda: SPIN(3, 8, 10, 2), digits, {"graph_weight": _WEIGHTS, "class_weight": "balanced"}),
    "tasks": (lambda: SPIN(3, 8, 10, 2), _tasks, {}),
    "weighted tasks": (
        lambda: SPIN(3, 8, 10, 2),
        _tasks,
        {"class_weight": "balanced", "graph_weight": _WEIGHTS, "learning_rate": 1e-3},
    ),
    "autograd": (lambda: Doubled(3, 8, 10, 2), digits, {"schedule": "plateau", "weight_decay": 0.01}),
    "PAGNN": (_pagnn, digits, {"batch_size": 1}),
    "shards": (lambda: SPIN(3, 8, 10, 2), _shards, {"graph_weight": _WEIGHTS}),
    "early stopping": (lambda: SPIN(3, 8, 10, 2), digits, {"epochs": 20, "patience": 1, "learning_rate": 0.05}),
}


def fitted(case: str, group: Group = None) -> tuple[list[tuple], Tensor, int]:
    """The log of a fit, the parameters, and the best epoch."""
    new_model, features, options = CASES[case]
    torch.manual_seed(0)
    model = new_model().double()
    if group is not None and dist.get_rank(group) > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)  # those of the first rank count
    options = {"epochs": 3, "batch_size": 7} | options
    fit = training.fit(model, features(), range(44), range(100, 160), **options, process_group=group)
    return numbers(fit), model.flatten_parameters().clone(), fit.best_epoch


def everything(folder: Path) -> Iterator[dict[str, Any]]:
    """What three processes do, the last of which is no rank of a group of two; the second is killed at the end."""
    two = dist.new_group([0, 1])
    results: dict[str, Any] = {"cases": {(case, 3): fitted(case, dist.group.WORLD) for case in CASES}}
    if dist.get_rank() == 2:
        yield results | {"outside": _error(lambda: fitted("fused", two))}
        return
    results["cases"] |= {(case, 2): fitted(case, two) for case in CASES}
    results["predicted"] = _predicted(two)
    results |= {"again": [_noisy(two) for _ in range(2)], "seen": _seen(two)}
    results |= _going_on(two, folder) | {"errors": _errors(two, folder)} | _plain_ddp(two)
    results["interrupted"] = _ended_by("interrupted", two, folder)
    yield results
    yield results | {"killed": _ended_by("killed", two, folder)}


def _predicted(group: Group) -> list[Tensor]:
    """Scores of one more graph than two ranks can share evenly, of one graph, and of none, by ranks."""
    predicted, ids = partial(training.predict, seeded(), digits()), torch.arange(160).flip(0)
    return [ranks_of(group).in_order(predicted, ids[:number]) for number in (159, 1, 0)]


def _noisy(group: Group, epochs: int = 6, seed: int = 0, **options: Any) -> tuple[list[tuple], Tensor]:
    """With dropout, in float32."""
    torch.manual_seed(seed)
    model = SPIN(3, 8, 10, 2, dropout=0.3)
    options = {"epochs": epochs, "schedule": "constant"} | options
    parts = digits(torch.float32), range(44), range(100, 160)
    fit = training.fit(model, *parts, **options, process_group=group)
    return numbers(fit), model.flatten_parameters().clone()


def _seen(group: Group) -> tuple[list[int], list[int]]:
    """How many scores the metric gets, and the epochs that are told."""
    scores: list[int] = []
    epochs: list[int] = []

    def metric(logits: Tensor, y: Tensor) -> float:
        scores.append(len(logits))
        return training.accuracy(logits, y)

    _noisy(group, 2, metric=metric, on_epoch=lambda epoch: epochs.append(epoch.number))
    return scores, epochs


def _going_on(group: Group, folder: Path) -> dict[str, Any]:
    """A run of two ranks that was interrupted; one that one process begins and two end, and the other way round."""
    _noisy(group, 3, state=folder / "state")
    found = {"went on": _noisy(group, 6, seed=1, state=folder / "state", resume=True), "whole": _noisy(group)}
    parts, options = (digits(), range(44), range(100, 160)), {"schedule": "constant", "resume": True}
    for name, runs in (("2 to 1", (group, None)), ("1 to 2", (None, group))):
        for epochs, ranks in zip((2, 4), runs, strict=True):
            if ranks is not None or dist.get_rank() == 0:
                kept = {"state": folder / name, "epochs": epochs}
                found[name] = numbers(training.fit(seeded(), *parts, **options, **kept, process_group=ranks))
            dist.barrier(group)
    return found


def seeded() -> SPIN:
    torch.manual_seed(0)
    return SPIN(3, 8, 10, 2).double()


def _errors(group: Group, folder: Path) -> dict[str, str]:
    rank, parts = dist.get_rank(group), (digits(), range(44), range(100, 160))

    def fit(model: SPIN | None = None, **options: Any) -> Callable[[], object]:
        return lambda: training.fit(model or seeded(), *parts, epochs=1, process_group=group, **options)

    def failing(*_: Tensor) -> float:
        raise _Unreadable("a", "b")

    generator = training.Trainer(seeded(), process_group=group)
    (folder / "damaged").write_text("nothing")
    return {
        "batch norm": _error(fit(SPIN(3, 8, 10, 2, batch_norm=True).double())),
        "differs": _error(fit(seed=rank, batch_size=5 + rank)),
        "state": _error(fit(state=folder / "damaged", resume=True)),
        "metric": _error(fit(metric=failing)),
        "order": _error(lambda: generator.epoch(digits(), range(9), 3)),
    }


class _Unreadable(Exception):
    """That unpickles to nothing, as it takes two arguments and keeps one."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _plain_ddp(group: Group) -> dict[str, Any]:
    """Steps of a loop of one's own in DistributedDataParallel, of the Trainer by ranks, and of one by itself."""
    rank, parameters, gradients = dist.get_rank(group), {}, {}
    batches = torch.arange(96).split(16)
    for name in ("flat", "fresh", "bucket views"):
        model = seeded()
        if name == "flat":
            model.flatten_parameters()
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=name == "bucket views"
        )
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=5e-3)
        for batch in batches:
            selected = digits()[batch[8 * rank : 8 * rank + 8]]
            optimizer.zero_grad()
            training.loss_of(wrapped(selected), selected.y).backward()
            gradients.setdefault(name, torch.cat([value.grad.flatten() for value in model.parameters()]))
            optimizer.step()
        parameters[name] = model.flatten_parameters().clone()
    for name, of in (("ours", group), ("one process", None)):
        trainer = training.Trainer(seeded(), process_group=of)
        losses = []
        for batch in batches:
            losses.append(trainer.step(digits()[batch]).item())
            gradients.setdefault(name, trainer._flat.grad.clone())
        parameters[name] = trainer.model.flatten_parameters().clone()
        parameters[f"losses, {name}"] = torch.tensor(losses)
    return {"ddp": parameters, "gradients": gradients}


def _ended_by(how: str, group: Group, folder: Path) -> tuple[str, float]:
    """In the third epoch all are interrupted, or rank 1 is killed; what this is to a rank, and how long it takes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background may have lost
    rank, epochs, start = dist.get_rank(group), [], []

    class EndedTrainer(training.Trainer):
        def epoch(self, *arguments: Any) -> float:
            epochs.append(1)
            if len(epochs) == 3:
                start.append(time.monotonic())
                if how == "interrupted":
                    os.kill(os.getpid(), signal.SIGINT)
                elif rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().epoch(*arguments)

    options = {"epochs": 5, "state": folder / how, "process_group": group}
    with patch("spin_fast.training.fit.Trainer", EndedTrainer):
        try:
            fit = training.fit(seeded(), digits(), range(44), range(100, 160), **options)
            told = f"interrupted: {fit.interrupted}, epochs: {len(fit.epochs)}"
        except ConnectionError as error:
            told = str(error)
    return told, time.monotonic() - start[0]
