"""That the emulator of the CUDA kernels finds what it is there to find, and finds nothing of it in the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import cuda_kernels
import pytest
import torch
from helpers import random_graphs

import spin_fast
from spin_fast import PowerFeatures

RACE, NO_RACE, HALF_A_WARP, OUTSIDE_THE_MASK, IN_A_BRANCH, SHARED_MEMORY, NOT_ALIGNED = range(7)
NEIGHBOURS = [*range(1, 64), 0]


@pytest.fixture
def emulated(native) -> Iterator[cuda_kernels.Emulated]:
    kernels = cuda_kernels.kernels()
    if not isinstance(kernels, cuda_kernels.Emulated):
        pytest.skip("the kernels run on a GPU here: compute-sanitizer looks for their faults (scripts/gpu_check.sh)")
    yield kernels
    kernels.set_order(0)


def test_a_race_depends_on_the_order_of_threads(emulated: cuda_kernels.Emulated) -> None:
    results = {RACE: set(), NO_RACE: set()}
    for order in (0, 1, 2):
        emulated.set_order(order)
        for which, found in results.items():
            out, message = emulated.run_fault(which, 256)
            assert message == ""
            found.add(tuple(out))
    assert len(results[RACE]) == 3
    assert results[NO_RACE] == {tuple(NEIGHBOURS)}


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (HALF_A_WARP, "a warp waits for lanes that do not come"),
        (OUTSIDE_THE_MASK, "a shuffle reads a lane that does not take part"),
        (IN_A_BRANCH, "a warp waits for lanes that do not come"),
        (NOT_ALIGNED, "at an address that is not aligned"),
    ],
)
def test_what_a_gpu_does_not_do_is_an_error(emulated: cuda_kernels.Emulated, which: int, message: str) -> None:
    assert message in emulated.run_fault(which, 256)[1]


def test_shared_memory_has_an_end(emulated: cuda_kernels.Emulated) -> None:
    assert emulated.run_fault(SHARED_MEMORY, 256) == ([1] * 64, "")
    assert "wrote behind its shared memory" in emulated.run_fault(SHARED_MEMORY, 252)[1]
    assert emulated.run_fault(SHARED_MEMORY, 228 << 10)[1] == "refused"


def test_an_access_outside_a_tensor_is_an_error(emulated: cuda_kernels.Emulated) -> None:
    z, ptr = torch.ones(6, 4), torch.tensor([0, 6])
    with emulated.guarded():
        assert emulated.call("sum_readout", z, ptr, None, None, 1, False, True).tolist() == [[6.0] * 4]
        with pytest.raises(RuntimeError, match="reads or writes outside its tensors"):
            emulated.call("sum_readout", z, torch.tensor([0, 40]), None, None, 1, False, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[3, 0, 50, 1], [300, 20], [0, 0], []])
def test_kernels_stay_inside_their_tensors(
    emulated: cuda_kernels.Emulated, sizes: list[int], dtype: torch.dtype
) -> None:
    """The whole way of a training step and of a gradient down to the node features, whatever the order of threads."""
    graphs = random_graphs(sizes, 0.1, 5, dtype=dtype, index_dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, a, b, generator=generator, dtype=dtype) for a, b in ((5, 7), (7, 6))]
    biases = [torch.randn(3, b, generator=generator, dtype=dtype) for b in (7, 6)]
    w = torch.randn(3, 6, generator=generator, dtype=dtype)
    arrays = (graphs.indptr, graphs.indices)
    powers = torch.stack([graphs.x.round(), graphs.x.relu().round(), graphs.x.sign()])

    def run() -> list[torch.Tensor]:
        x = graphs.x.clone().requires_grad_()
        rows = spin_fast.power_features(*arrays, x, 2, ptr=graphs.ptr, check_invariants=False)
        whole = spin_fast.power_features(*arrays, x, 2, "rw", check_invariants=False)
        z = torch.tanh(rows)
        readouts = [
            spin_fast.branch_readout(rows, weights, biases, w, graphs.ptr, check_invariants=False),
            spin_fast.sum_readout(whole, graphs.ptr, check_invariants=False),
            spin_fast.attention_readout(z, w[:, :5], graphs.ptr, check_invariants=False),
        ]
        found = PowerFeatures(*spin_fast.ops.distinct_rows(powers, graphs.ptr), graphs.ptr, None, "sym")
        entries = {"index": found.index, "count": found.count}
        shared = found.rows.clone().requires_grad_()
        readouts.append(spin_fast.attention_readout(shared, w[:, :5], found.ptr, **entries, check_invariants=False))
        readouts.append(spin_fast.sum_readout(shared, found.ptr, **entries, num_branches=3, check_invariants=False))
        loss = sum((readout * readout).sum() for readout in readouts)
        gradients = torch.autograd.grad(loss, (x, shared))
        return [rows, whole, *readouts, *gradients, found.rows, found.index, found.count]

    expected = run()
    with cuda_kernels.standing_in():
        results = []
        with emulated.guarded():
            for order in (0, 1, 2):
                emulated.set_order(order)
                results.append(run())
    for result in results:
        for one, first, other in zip(result, results[0], expected, strict=True):
            assert torch.equal(one, first)
            tolerance = 1e-3 if dtype == torch.float32 else 1e-9
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
