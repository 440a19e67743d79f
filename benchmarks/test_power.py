"""``power_features`` against scipy, torch's sparse products and PyG's SIGN; all are checked before the race."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from spin_fast import GraphBatch, power_features

from .harness import floors, inputs, pages, peak
from .harness.checks import assert_close
from .harness.floors import Traffic
from .harness.inputs import NUM_BRANCHES, NUM_HOPS, Input
from .harness.plugin import Floors, RaceRunner
from .harness.report import Session
from .rivals import ops

GATHERED = 16  # features: wider rows of a small graph come from a cache faster than its hops go to memory
CACHED = 1 << 20  # bytes of the features of a small graph
NUM_NODES = 1_000_000
TRUSTED = "spin_fast, contents trusted"  # as by PowerFeatures, since a GraphBatch has been checked
REUSED = pytest.param("output reused", marks=pytest.mark.full)


def ours(graphs: GraphBatch, hops: int = NUM_HOPS) -> Callable[..., Tensor]:
    """Some hops of ``sym``, called as a user calls it."""
    return partial(power_features, graphs.indptr, graphs.indices, graphs.x, hops, ptr=graphs.ptr)


def power_floors(graphs: GraphBatch, out: Tensor | None, threads: int) -> Floors:
    """Adjacency and features once, all hops once; and in every hop the row of each edge."""
    writes = (NUM_BRANCHES, *graphs.x.shape) if out is None else out
    found = floors.memory(Traffic((graphs.indptr, graphs.indices, graphs.x), writes), threads=threads)
    largest = 4 * graphs.num_features * int(graphs.num_nodes_per_graph.max())
    if graphs.num_features < GATHERED or largest > CACHED:
        found = {**found, **floors.gather(graphs, NUM_HOPS, threads)}
    return found


@pytest.fixture(params=["whole", pytest.param("batch", marks=pytest.mark.full)])
def on(request: pytest.FixtureRequest, dataset: str, graphs: GraphBatch) -> Input:
    """A whole data set, or a batch of it."""
    return Input(dataset, graphs) if request.param == "whole" else inputs.batch(dataset, graphs, 128)


@pytest.mark.parametrize("memory", ["new output", REUSED, "end to end from raw CSR, new output"])
def test_power_features(race: RaceRunner, on: Input, memory: str, threads: int) -> None:
    """Rivals get the matrix normalised beforehand, but end to end. An output that is reused is the same for all."""
    if memory == "new output":
        rivals = {**ops.powers(on.graphs, NUM_HOPS), **ops.sign(on.graphs, NUM_HOPS)}
    elif memory == "output reused":
        rivals = ops.powers(on.graphs, NUM_HOPS)
    else:
        rivals = ops.powers_from_raw(on.graphs, NUM_HOPS)
    run(race, f"power_features, {memory}", on, rivals, memory == "output reused", threads)


@pytest.mark.full
def test_hops_alone(race: RaceRunner, on: Input, threads: int) -> None:
    """What is left if preparing is free: no hop, which is a copy, and 3/2 of what three hops cost more than one."""
    graphs = on.graphs

    def hops(number: int) -> Callable[[], Tensor]:
        out = pages.touched((number + 1, *graphs.x.shape))
        return partial(ours(graphs, number), check_invariants=False, out=out)

    out = pages.touched((NUM_BRANCHES, *graphs.x.shape))
    rivals = {name: partial(call, out=out) for name, call in ops.powers(graphs, NUM_HOPS).items()}
    calls = {TRUSTED: hops(NUM_HOPS), "one hop": hops(1), "no hop": hops(0), **rivals}
    with torch.inference_mode():
        for name, rival in rivals.items():
            assert_close(name, rival(), calls[TRUSTED]())
        race("power_features, hops alone", on.name, calls, power_floors(graphs, out, threads), ours=3)


@pytest.mark.full
@pytest.mark.parametrize("num_features", [16, 100])
@pytest.mark.parametrize("memory", ["new output", "output reused"])
def test_one_large_graph(race: RaceRunner, quick: bool, num_features: int, memory: str, threads: int) -> None:
    """A graph that no cache holds and that cannot be shared out by graphs."""
    on = inputs.one_graph(2000 if quick else NUM_NODES, num_features)
    case = f"power_features, {memory}, one graph"
    run(race, case, on, ops.powers(on.graphs, NUM_HOPS), memory == "output reused", threads)


def run(
    race: RaceRunner, case: str, on: Input, rivals: Mapping[str, ops.Powers], reuse_output: bool, threads: int
) -> None:
    """Compare all with ours, and race."""
    graphs, out = on.graphs, None
    trusted = {TRUSTED: partial(ours(graphs), check_invariants=False)}
    calls = {"spin_fast": ours(graphs), **trusted, **rivals}
    if reuse_output:
        out = pages.touched((NUM_BRANCHES, *graphs.x.shape))
        calls = {name: partial(call, out=out) for name, call in calls.items()}
    with torch.inference_mode():
        expected = ours(graphs)()
        for name, call in calls.items():
            assert_close(name, call(), expected)
        race(case, on.name, calls, power_floors(graphs, out, threads), ours=2)


@pytest.mark.full
@pytest.mark.skipif(not peak.available(), reason="this system does not tell the peak memory of a process")
@pytest.mark.parametrize("num_features", [16, 100])
def test_peak_memory(session: Session, quick: bool, num_features: int) -> None:
    """What a call takes beyond its input, and beyond the normalised matrix of the rivals."""
    on = inputs.one_graph(2000 if quick else NUM_NODES, num_features)
    output = NUM_BRANCHES * on.graphs.x.nbytes
    peaks = peak.measure("powers", on.graphs, [peak.OURS, "scipy", "torch CSR int32", "torch CSR int64"])
    block = [
        (on.name, name, f"{output / 1e6:,.0f}", f"{size / 1e6:,.0f}", f"{size / output:.2f}")
        for name, size in peaks.items()
    ]
    headers = ("input", "contender", "output, MB", "peak above before, MB", "peak / output")
    session.count("peak memory of one call, new output", headers, block, left=2)
