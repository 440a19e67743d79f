"""``power_features`` against scipy, torch's sparse products and PyG's SIGN; all are checked before the race."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spin_fast import GraphBatch, power_features

from . import floors, inputs, op_rivals, pages, peak
from .checks import assert_close
from .floors import Pass
from .inputs import NUM_BRANCHES, NUM_HOPS, Input
from .peak import Peak
from .plugin import Floors, RunRace
from .report import Session

GATHERED = 16  # features: wider rows of a small graph come from a cache faster than its hops go to memory
CACHED = 1 << 20  # bytes of the features of a small graph


def ours(graphs: GraphBatch) -> Callable[..., Tensor]:
    """Three hops of ``sym``. The contents are trusted, as nobody else checks them: ``GraphBatch`` has."""
    return partial(
        power_features, graphs.indptr, graphs.indices, graphs.x, NUM_HOPS, ptr=graphs.ptr, check_invariants=False
    )


def power_floors(graphs: GraphBatch, out: Tensor | None, threads: int) -> Floors:
    """Adjacency and features once, all hops once; and in every hop the row of each edge."""
    writes = (NUM_BRANCHES, *graphs.x.shape) if out is None else out
    found = floors.memory(Pass((graphs.indptr, graphs.indices, graphs.x), writes), threads=threads)
    largest = 4 * graphs.num_features * int(graphs.num_nodes_per_graph.max())
    if graphs.num_features < GATHERED or largest > CACHED:
        found = {**found, **floors.gather(graphs, NUM_HOPS, threads)}
    return found


@pytest.fixture(params=["whole", "batch"])
def on(request: pytest.FixtureRequest, dataset: str, graphs: GraphBatch) -> Input:
    """A whole data set, or a batch of it."""
    return Input(dataset, graphs) if request.param == "whole" else inputs.batch(dataset, graphs, 128)


@pytest.mark.parametrize("memory", ["new output", "output reused", "end to end from raw CSR, new output"])
def test_power_features(race: RunRace, on: Input, memory: str, threads: int) -> None:
    """Rivals get the matrix normalised beforehand, but end to end. An output that is reused is the same for all."""
    graphs, out = on.graphs, None
    contenders: dict[str, Callable[..., Any]] = {"spin_fast": ours(graphs)}
    if memory == "new output":
        contenders |= {**op_rivals.powers(graphs, NUM_HOPS), **op_rivals.sign(graphs, NUM_HOPS)}
    elif memory == "output reused":
        out = pages.touched((NUM_BRANCHES, *graphs.x.shape))
        contenders |= op_rivals.powers(graphs, NUM_HOPS)
        contenders = {name: partial(call, out=out) for name, call in contenders.items()}
    else:
        contenders |= op_rivals.powers_from_raw(graphs, NUM_HOPS)
    with torch.inference_mode():
        check(graphs, contenders)
        race(f"power_features, {memory}", on.name, contenders, power_floors(graphs, out, threads))


@pytest.mark.large
@pytest.mark.parametrize("num_features", [16, 100])
@pytest.mark.parametrize("memory", ["new output", "output reused"])
def test_one_large_graph(race: RunRace, num_features: int, memory: str, threads: int) -> None:
    """A graph that no cache holds and that cannot be shared out by graphs."""
    name, graphs = inputs.large(num_features)
    contenders: dict[str, Callable[..., Any]] = {"spin_fast": ours(graphs), **op_rivals.powers(graphs, NUM_HOPS)}
    out = pages.touched((NUM_BRANCHES, *graphs.x.shape)) if memory == "output reused" else None
    if out is not None:
        contenders = {name: partial(call, out=out) for name, call in contenders.items()}
    with torch.inference_mode():
        check(graphs, contenders)
        race(f"power_features, {memory}, one graph", name, contenders, power_floors(graphs, out, threads))


@pytest.mark.large
@pytest.mark.skipif(not peak.available(), reason="this system does not tell the peak memory of a process")
@pytest.mark.parametrize("num_features", [16, 100])
def test_peak_memory(session: Session, num_features: int) -> None:
    """What a call takes beyond its input, and beyond the normalised matrix of the rivals."""
    on = inputs.large(num_features)
    contenders = [peak.OURS, "scipy", "torch CSR int32", "torch CSR int64"]
    output = NUM_BRANCHES * on.graphs.x.nbytes
    peaks = peak.measure("powers", on.graphs, contenders)
    session.peaks += [Peak(on.name, contender, output, size) for contender, size in peaks.items()]


def check(graphs: GraphBatch, contenders: dict[str, Callable[..., Any]]) -> None:
    """Compare all with ours."""
    expected = ours(graphs)()
    for name, contender in contenders.items():
        assert_close(name, contender(), expected)
