"""Ours against itself: with more threads, with other instruction sets, and what a mere call of an operation costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from spin_fast import SPIN, GraphBatch, PowerFeatures, attention_readout, native_available, reference, sum_readout
from spin_fast.ops import native
from spin_fast.training import predict_proba

from .harness import epochs, floors, inputs
from .harness.inputs import NUM_HOPS
from .harness.plugin import RaceRunner
from .harness.race import SHORTEST_SAMPLE, Contender, Floors
from .harness.report import Session
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


def whole_call(what: str, graphs: GraphBatch) -> Contender:
    """What users wait for, and a product, all of which threads share."""
    if what == "large product":
        return floors.arithmetic(10**9)["arithmetic"]["large products"]
    if what == "from_graphs":
        return partial(PowerFeatures.from_graphs, graphs, epochs.DEPTH)
    classes = int(graphs.y.max()) + 1 if graphs.y is not None else 1
    model = SPIN(graphs.num_features, epochs.WIDTH, classes, epochs.DEPTH, attention=True)
    if what == "prediction from graphs":
        return partial(predict_proba, model, graphs, "sym")
    return epochs.ours(model, PowerFeatures.from_graphs(graphs, epochs.DEPTH), int(what.rpartition(" ")[2]))


@pytest.mark.scaling
@both_operations
def test_threads(
    race: RaceRunner, session: Session, dataset: str, graphs: GraphBatch, operation: str, threads: int
) -> None:
    """A whole data set."""
    call, least = forward_of(operation, graphs, threads)
    with torch.inference_mode():
        scale(race, session, f"{operation}, forward", dataset, call, threads, least)


@pytest.mark.full
@pytest.mark.scaling
@both_operations
def test_threads_on_skewed_graphs(race: RaceRunner, session: Session, operation: str, threads: int) -> None:
    """One large graph among a thousand small ones."""
    on = inputs.skewed(num_features=16)
    call, least = forward_of(operation, on.graphs, threads)
    with torch.inference_mode():
        scale(race, session, f"{operation}, forward", on.name, call, threads, least)


@pytest.mark.full
@pytest.mark.scaling
@pytest.mark.parametrize(
    "what",
    [
        "training epoch, batches of 128",
        "training epoch, batches of 32",
        "prediction from graphs",
        "from_graphs",
        "large product",
    ],
)
def test_threads_on_whole_calls(
    race: RaceRunner, session: Session, dataset: str, graphs: GraphBatch, what: str, threads: int
) -> None:
    """What users wait for."""
    scale(race, session, what, dataset, whole_call(what, graphs), threads)


def scale(
    race: RaceRunner,
    session: Session,
    what: str,
    on: str,
    call: Contender,
    threads: int,
    least: Floors | None = None,
) -> None:
    """Race a call with all threads against itself with one."""

    def with_threads(number: int) -> object:
        torch.set_num_threads(number)
        return call()

    contenders = {f"{threads} threads": partial(with_threads, threads), "1 thread": partial(with_threads, 1)}
    handed = [] if floors.missing() else [floors.hand_over()]
    race(f"{what}, scaling", on, contenders, least, shortest=10 * SHORTEST_SAMPLE)
    if handed:
        handed.append(floors.hand_over())
        title, headers = "a cache line to another thread and back, ns", ("around the race", "input", "before", "after")
        session.count(title, headers, [(what, on, *(f"{1e9 * seconds:.0f}" for seconds in handed))], left=2)


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
