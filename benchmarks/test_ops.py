"""The operations against scipy, torch's sparse and segment operations, and PyG; all are checked before the race."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from spin_fast import GraphBatch, attention_readout, power_features, reference, sum_readout

from . import op_rivals
from .op_rivals import Segments
from .plugin import RunRace

NUM_HOPS = 3
NUM_BRANCHES = NUM_HOPS + 1
WIDTH = 32
BATCH_SIZE = 128


class Input(NamedTuple):
    name: str
    graphs: GraphBatch


@pytest.fixture(params=["whole", "batch"])
def on(request: pytest.FixtureRequest, dataset: str, graphs: GraphBatch) -> Input:
    """A whole data set, or a random batch of it."""
    if request.param == "whole":
        return Input(dataset, graphs)
    if len(graphs) <= BATCH_SIZE:
        pytest.skip(f"{dataset} has only {len(graphs)} graphs")
    ids = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0))[:BATCH_SIZE]
    return Input(f"{dataset}, {BATCH_SIZE} graphs", graphs[ids])


@pytest.mark.parametrize("memory", ["fresh", "reused"])
def test_power_features(race: RunRace, on: Input, memory: str) -> None:
    """Three hops of ``sym``. Rivals get the matrix normalised; ours trusts the contents: ``GraphBatch`` has checked."""
    graphs = on.graphs
    ours = partial(
        power_features, graphs.indptr, graphs.indices, graphs.x, NUM_HOPS, "sym", ptr=graphs.ptr, checked=True
    )
    powers: dict[str, Callable[..., Tensor]] = {"spin_fast": ours, **op_rivals.powers(graphs, NUM_HOPS)}
    if memory == "fresh":
        plain = partial(reference.power_features, graphs.indptr, graphs.indices, graphs.x, NUM_HOPS, "sym")
        contenders: dict[str, Callable[[], Tensor]] = {**powers, "reference": plain}
    else:
        contenders = {
            name: partial(power, out=torch.empty(NUM_BRANCHES, *graphs.x.shape)) for name, power in powers.items()
        }
    with torch.inference_mode():
        for name, contender in contenders.items():
            assert_close(name, contender(), ours())
        race(f"power_features, {memory} memory", on.name, contenders)


@pytest.mark.parametrize("direction", ["forward", "forward and backward"])
@pytest.mark.parametrize("kind", ["sum", "attention"])
def test_readout(race: RunRace, on: Input, kind: str, direction: str) -> None:
    """All branches in one call; rivals see ``(R + 1) * G`` segments and may leave the branches below each other."""
    ptr, backward = on.graphs.ptr, direction != "forward"
    segments = Segments.of(ptr, NUM_BRANCHES)
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    z = random(NUM_BRANCHES, on.graphs.num_nodes, WIDTH).requires_grad_(backward)
    w = random(NUM_BRANCHES, WIDTH).requires_grad_(backward)
    if kind == "sum":
        inputs: tuple[Tensor, ...] = (z,)
        ours, plain = partial(sum_readout, ptr=ptr, checked=True), partial(reference.sum_readout, ptr=ptr)
        rivals: dict[str, Callable[..., Tensor]] = op_rivals.sum_readouts(segments)
    else:
        inputs = (z, w)
        ours, plain = partial(attention_readout, ptr=ptr, checked=True), partial(reference.attention_readout, ptr=ptr)
        rivals = op_rivals.attention_readouts(segments)
    gradient = random(len(on.graphs), NUM_BRANCHES * WIDTH)
    expected = (ours(*inputs), *(gradients(ours, inputs, gradient) if backward else ()))
    contenders: dict[str, Callable[[], Any]] = {}
    for name, readout in {"spin_fast": ours, "reference": plain, **rivals}.items():
        result = readout(*inputs)
        is_below = result.shape != gradient.shape
        assert_close(name, [side_by_side(result) if is_below else result], expected[:1])
        if backward:
            contenders[name] = partial(gradients, readout, inputs, below(gradient) if is_below else gradient)
            assert_close(name, contenders[name](), expected[1:])
        else:
            contenders[name] = partial(readout, *inputs)
    with torch.inference_mode(not backward):
        race(f"{kind} readout, {direction}", on.name, contenders)


def gradients(readout: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward."""
    return torch.autograd.grad(readout(*inputs), inputs, gradient)


def side_by_side(segments: Tensor) -> Tensor:
    """``[(R+1)*G, h]`` to ``[G, (R+1)*h]``."""
    return segments.view(NUM_BRANCHES, -1, WIDTH).transpose(0, 1).flatten(1)


def below(branches: Tensor) -> Tensor:
    """``[G, (R+1)*h]`` to ``[(R+1)*G, h]``."""
    return branches.view(-1, NUM_BRANCHES, WIDTH).transpose(0, 1).flatten(0, 1).contiguous()


def assert_close(name: str, results: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare with ours, within the rounding of float32 sums."""
    for result, ours in zip(results, expected, strict=True):
        scale = float(ours.detach().abs().max()) if ours.numel() else 0.0
        torch.testing.assert_close(result, ours, rtol=1e-4, atol=1e-5 * scale, msg=lambda text: f"{name}: {text}")
