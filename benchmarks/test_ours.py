"""The operations against themselves: with more threads, with other instruction sets, and what a mere call costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from spin_fast import GraphBatch, attention_readout, native_available, reference, sum_readout
from spin_fast.ops import native

from .harness import inputs
from .harness.inputs import NUM_HOPS, Input
from .harness.plugin import RaceRunner
from .harness.race import Contender, Floors
from .test_power import ours as powers_of
from .test_power import power_floors
from .test_readout import WIDTH, readout_floors

both_operations = pytest.mark.parametrize("operation", ["power_features", "attention_readout"])


def forward_of(operation: str, graphs: GraphBatch, threads: int) -> tuple[Callable[[], Tensor], Floors]:
    """A call, and its floors."""
    if operation == "power_features":
        return powers_of(graphs), power_floors(graphs, None, threads)
    z, w = inputs.branches(graphs, WIDTH)
    call = partial(attention_readout, z, w, graphs.ptr)
    return call, readout_floors("attention", z, graphs, False, threads)


@pytest.mark.scaling
@both_operations
def test_threads(race: RaceRunner, dataset: str, graphs: GraphBatch, operation: str, threads: int) -> None:
    """A whole data set."""
    scale(race, Input(dataset, graphs), operation, threads)


@pytest.mark.full
@pytest.mark.scaling
@both_operations
def test_threads_on_skewed_graphs(race: RaceRunner, operation: str, threads: int) -> None:
    """One large graph among a thousand small ones."""
    scale(race, inputs.skewed(num_features=16), operation, threads)


def scale(race: RaceRunner, on: Input, operation: str, threads: int) -> None:
    """Race a call with all threads against itself with one."""
    call, least = forward_of(operation, on.graphs, threads)

    def with_threads(number: int) -> Tensor:
        torch.set_num_threads(number)
        return call()

    contenders = {f"{threads} threads": partial(with_threads, threads), "1 thread": partial(with_threads, 1)}
    with torch.inference_mode():
        race(f"{operation}, forward, scaling", on.name, contenders, least)


@pytest.mark.full
@pytest.mark.skipif(not native_available(), reason="no native kernels")
@pytest.mark.prefer("NCI1", "PROTEINS")
@both_operations
def test_instruction_sets(race: RaceRunner, dataset: str, graphs: GraphBatch, operation: str, threads: int) -> None:
    """The best that this CPU has comes first."""
    call, least = forward_of(operation, graphs, threads)
    library = native.library
    assert library is not None
    before = library.isa()

    def under(isa: str) -> Tensor:
        library.set_isa(isa)
        return call()

    contenders = {isa: partial(under, isa) for isa in reversed(library.isa_available())}
    try:
        with torch.inference_mode():
            race(f"{operation}, instruction sets", dataset, contenders, least)
    finally:
        library.set_isa(before)


@pytest.mark.parametrize("operation", ["power_features", "sum_readout", "attention_readout"])
def test_tiny(race: RaceRunner, operation: str) -> None:
    """What a call costs. A floor would be the cost of calling it."""
    on = inputs.tiny()
    graphs, (z, w) = on.graphs, inputs.branches(on.graphs, WIDTH)
    calls: dict[str, tuple[Contender, Contender]] = {
        "power_features": (
            powers_of(graphs),
            partial(reference.power_features, graphs.indptr, graphs.indices, graphs.x, NUM_HOPS, "sym"),
        ),
        "sum_readout": (
            partial(sum_readout, z, graphs.ptr),
            partial(reference.sum_readout, z, graphs.ptr),
        ),
        "attention_readout": (
            partial(attention_readout, z, w, graphs.ptr),
            partial(reference.attention_readout, z, w, graphs.ptr),
        ),
    }
    with torch.inference_mode():
        race(on.name, operation, dict(zip(("spin_fast", "reference"), calls[operation], strict=True)))
