"""The readouts against torch's segment operations, PyG, torch_scatter and torch.compile; all are checked first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spin_fast import GraphBatch, attention_readout, sum_readout

from .harness import floors, inputs
from .harness.checks import assert_close
from .harness.floors import Traffic
from .harness.inputs import NUM_BRANCHES, Input
from .harness.plugin import Floors, RaceRunner
from .harness.report import Session
from .rivals import ops
from .rivals.ops import Segments
from .test_power import TRUSTED

WIDTH = 32
OTHER_WIDTHS = (16, 64)
BATCHES = (("sum", 128), ("attention", 128), ("attention", 32))

Readout = Callable[..., Tensor]

both_directions = pytest.mark.parametrize("direction", ["forward", "forward and backward"])


@both_directions
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("sum", None),
        ("attention", None),
        *(pytest.param(*batch, marks=pytest.mark.full) for batch in BATCHES),
    ],
)
def test_readout(
    race: RaceRunner,
    session: Session,
    dataset: str,
    graphs: GraphBatch,
    kind: str,
    size: int | None,
    direction: str,
    threads: int,
) -> None:
    """A whole data set, or a batch of it."""
    on = Input(dataset, graphs) if size is None else inputs.batch(dataset, graphs, size)
    run(race, session, kind, on, WIDTH, direction, threads)


@both_directions
@pytest.mark.full
@pytest.mark.parametrize("width", OTHER_WIDTHS)
@pytest.mark.prefer("NCI1", "DD")
def test_width(
    race: RaceRunner, session: Session, dataset: str, graphs: GraphBatch, width: int, direction: str, threads: int
) -> None:
    """Narrower and wider branches: one data set of small graphs, one of large ones."""
    on = Input(f"{dataset}, h = {width}", graphs)
    run(race, session, "attention", on, width, direction, threads)


def rivals_of(kind: str, graphs: GraphBatch, session: Session) -> dict[str, Readout]:
    """All rivals; with attention torch.compile too, where it works."""
    segments = Segments.of(graphs.ptr, NUM_BRANCHES)
    if kind == "sum":
        return ops.sum_readouts(segments)
    rivals = ops.attention_readouts(segments)
    if not ops.HAS_TORCH_SCATTER:
        session.note("torch_scatter is not installed, so it does not race")
    if reason := ops.cannot_compile():
        session.note(f"torch.compile does not work here, so it does not race: {reason}")
        return rivals
    return {**rivals, **ops.compiled_attention(segments)}


def readout_floors(kind: str, z: Tensor, graphs: GraphBatch, backward: bool, threads: int) -> Floors:
    """Forward ``z`` is read and the readout written; backward ``dz`` is, for which attention reads ``z`` once more."""
    passes = [Traffic((z,), (len(graphs), NUM_BRANCHES * z.shape[2]))]
    if backward:
        passes.append(Traffic((z,) if kind == "attention" else (), tuple(z.shape)))
    return floors.memory(*passes, threads=threads)


def run(race: RaceRunner, session: Session, kind: str, on: Input, width: int, direction: str, threads: int) -> None:
    """All branches in one call; rivals see ``(R + 1) * G`` segments and may leave the branches below each other."""
    backward = direction != "forward"
    z, w = (tensor.requires_grad_(backward) for tensor in inputs.branches(on.graphs, width))
    arguments = (z, w) if kind == "attention" else (z,)
    ours = partial(attention_readout if kind == "attention" else sum_readout, ptr=on.graphs.ptr)
    random = torch.Generator().manual_seed(1)
    beside = torch.randn(len(on.graphs), NUM_BRANCHES * width, generator=random)
    below = beside.view(-1, NUM_BRANCHES, width).transpose(0, 1).flatten(0, 1).contiguous()
    expected = ours(*arguments)
    expected_below = expected.view(-1, NUM_BRANCHES, width).transpose(0, 1).flatten(0, 1)
    expected_gradients = gradients(ours, arguments, beside) if backward else ()
    trusted = partial(ours, check_invariants=False)
    readouts: dict[str, Readout] = {"spin_fast": ours, TRUSTED: trusted, **rivals_of(kind, on.graphs, session)}
    contenders: dict[str, Callable[[], Any]] = {}
    with torch.inference_mode(not backward):
        for name, call in readouts.items():
            is_ours = name in ("spin_fast", TRUSTED)
            assert_close(name, [call(*arguments)], [expected if is_ours else expected_below])
            if backward:
                contenders[name] = partial(gradients, call, arguments, beside if is_ours else below)
                assert_close(name, contenders[name](), expected_gradients)
            else:
                contenders[name] = partial(call, *arguments)
        case = f"{kind} readout, {direction}"
        race(case, on.name, contenders, readout_floors(kind, z, on.graphs, backward, threads), ours=2)


def gradients(readout: Readout, arguments: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward."""
    return torch.autograd.grad(readout(*arguments), arguments, gradient)
