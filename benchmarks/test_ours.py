"""The operations against themselves: with more threads, with other instruction sets, and what a mere call costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from spin_fast import GraphBatch, attention_readout, native_available, reference, sum_readout
from spin_fast.ops import native

from . import inputs
from .inputs import NUM_HOPS, Input
from .plugin import RaceThreads, RunRace
from .race import Contender
from .test_power import ours as powers_of
from .test_power import power_floors
from .test_readout import WIDTH, readout_floors


def attention_of(graphs: GraphBatch) -> tuple[Tensor, Callable[[], Tensor]]:
    """``z``, and the readout of it."""
    z, w = inputs.branches(graphs, WIDTH)
    return z, partial(attention_readout, z, w, graphs.ptr, check_invariants=False)


@pytest.mark.parametrize("operation", ["power_features", "attention_readout"])
def test_threads(
    race_threads: RaceThreads, dataset: str, graphs: GraphBatch, operation: str, most_threads: int
) -> None:
    """A whole data set."""
    scale(race_threads, Input(dataset, graphs), operation, most_threads)


@pytest.mark.parametrize("operation", ["power_features", "attention_readout"])
def test_threads_on_skewed_graphs(race_threads: RaceThreads, operation: str, most_threads: int) -> None:
    """One large graph among a thousand small ones."""
    scale(race_threads, inputs.skewed(num_features=16), operation, most_threads)


def scale(race_threads: RaceThreads, on: Input, operation: str, threads: int) -> None:
    if operation == "power_features":
        call, least = powers_of(on.graphs), power_floors(on.graphs, None, threads)
    else:
        z, call = attention_of(on.graphs)
        least = readout_floors("attention", z, on.graphs, False, threads)
    with torch.inference_mode():
        race_threads(f"{operation}, forward", on.name, call, least)


@pytest.mark.skipif(not native_available(), reason="no native kernels")
@pytest.mark.prefer("NCI1", "PROTEINS")
@pytest.mark.parametrize("operation", ["power_features", "attention_readout"])
def test_instruction_sets(race: RunRace, dataset: str, graphs: GraphBatch, operation: str, threads: int) -> None:
    """The best that this CPU has comes first."""
    if operation == "power_features":
        call, least = powers_of(graphs), power_floors(graphs, None, threads)
    else:
        z, call = attention_of(graphs)
        least = readout_floors("attention", z, graphs, False, threads)
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
def test_tiny(race: RunRace, operation: str) -> None:
    """What a call costs. A floor would be the cost of calling it."""
    on = inputs.tiny()
    graphs, (z, w) = on.graphs, inputs.branches(on.graphs, WIDTH)
    contenders: dict[str, dict[str, Contender]] = {
        "power_features": {
            "spin_fast": powers_of(graphs),
            "reference": partial(reference.power_features, graphs.indptr, graphs.indices, graphs.x, NUM_HOPS, "sym"),
        },
        "sum_readout": {
            "spin_fast": partial(sum_readout, z, graphs.ptr, check_invariants=False),
            "reference": partial(reference.sum_readout, z, graphs.ptr),
        },
        "attention_readout": {
            "spin_fast": partial(attention_readout, z, w, graphs.ptr, check_invariants=False),
            "reference": partial(reference.attention_readout, z, w, graphs.ptr),
        },
    }
    with torch.inference_mode():
        race(on.name, operation, contenders[operation])
