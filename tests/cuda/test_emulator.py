"""The emulator of the CUDA kernels detects faults, and detects none in the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import cuda_kernels
import pytest
import torch
from helpers import random_graphs

import spin_fast
from spin_fast import SPIN, PowerFeatures, ops, reference
from spin_fast.ops import BRANCHES

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
        (HALF_A_WARP, "a warp waits for lanes that do not arrive"),
        (OUTSIDE_THE_MASK, "a shuffle reads a lane that does not participate"),
        (IN_A_BRANCH, "a warp waits for lanes that do not arrive"),
        (NOT_ALIGNED, "accesses a misaligned address"),
    ],
)
def test_what_a_gpu_cannot_do_is_an_error(emulated: cuda_kernels.Emulated, which: int, message: str) -> None:
    assert message in emulated.run_fault(which, 256)[1]


def test_shared_memory_has_an_end(emulated: cuda_kernels.Emulated) -> None:
    assert emulated.run_fault(SHARED_MEMORY, 256) == ([1] * 64, "")
    assert "writes behind its shared memory" in emulated.run_fault(SHARED_MEMORY, 252)[1]
    assert emulated.run_fault(SHARED_MEMORY, 228 << 10)[1] == "refused"


def test_an_access_outside_a_tensor_is_an_error(emulated: cuda_kernels.Emulated) -> None:
    z, ptr = torch.ones(6, 4), torch.tensor([0, 6])
    with emulated.guarded():
        assert emulated.call("sum_readout", z, ptr, None, None, 1, False, False).tolist() == [[6.0] * 4]
        with pytest.raises(RuntimeError, match="accesses memory outside its tensors"):
            emulated.call("sum_readout", z, torch.tensor([0, 40]), None, None, 1, False, False)


@pytest.mark.parametrize("attention", [True, False])
def test_branches_may_refer_to_the_same_rows(emulated: cuda_kernels.Emulated, attention: bool) -> None:
    """The first branch has all rows, the second one some of these again, and none has rows of its own."""
    generator = torch.Generator().manual_seed(0)
    num_rows, widths, classifier_widths = 70, [5, 4], [6, 3]
    index = torch.cat([torch.arange(num_rows), torch.tensor([num_rows - 1, 7, 7])])
    ptr = torch.tensor([0, 30, num_rows, num_rows + 2, num_rows + 3])
    shapes = [(num_rows, 3), *([(2, 4)] if attention else []), (2, 3, 5), (2, 5), (2, 5, 4), (2, 4)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    rows, *of_branches = [leaf.detach() for leaf in leaves]
    classifier = torch.randn(9 * 6 + 7 * 3, generator=generator, dtype=torch.float64)
    parameters = torch.cat([*(part.flatten() for part in of_branches), classifier])
    step = (rows, parameters, torch.tensor([2, 0]), ptr)
    options = {"index": index, "model": ops.ModelSizes(2, widths, classifier_widths, attention, 0.01)}

    def run(module: ModuleType) -> list[torch.Tensor]:
        w, (a, a_bias, b, b_bias) = leaves[1] if attention else None, leaves[-4:]
        readout = module.branch_readout(leaves[0], [a, b], [a_bias, b_bias], w, ptr, index=index)
        return [readout.detach(), *torch.autograd.grad(readout.sin().sum(), leaves)]

    expected = [*run(reference), *reference.training_step(*step, **options)]
    with cuda_kernels.standing_in(), emulated.guarded():
        for order in (0, 1, 2):
            emulated.set_order(order)
            result = [*run(ops), *ops.training_step(*step, **options, check_invariants=False)]
            for one, other in zip(result, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", ["nodes", "distinct", "chosen"])
@pytest.mark.parametrize("attention", [True, False])
def test_joint_rows_beside_rows(emulated: cuda_kernels.Emulated, attention: bool, form: str) -> None:
    """Joint rows with and without an index, counts and a choice of graphs; steps of hops, of joint rows and of both."""
    graphs = replace(random_graphs([3, 0, 50, 1, 40], 0.1, signs=True), y=torch.arange(5) % 3)
    features = PowerFeatures.from_graphs(graphs, 2, deduplicate=form != "nodes")
    joint, ids = features.joint, torch.tensor([2, 4, 0, 2]) if form == "chosen" else None
    assert (joint.index is None) == (form == "nodes")
    torch.manual_seed(0)
    class_weight = torch.rand(3, dtype=torch.float64) if attention else None
    models = [SPIN(3, 8, 3, 2, branches=branches, attention=attention).double() for branches in BRANCHES]
    rows = features.rows.clone().requires_grad_()

    def run(module: ModuleType, **unchecked: bool) -> list[torch.Tensor]:
        layers, w = models[1].joint.layers, models[1].joint.attention
        leaves = [rows, *models[1].joint.parameters()]
        parameters = ([layer.weight for layer in layers], [layer.bias for layer in layers], w)
        readout = module.branch_readout(rows, *parameters, **vars(joint), ids=ids, **unchecked)
        results = [readout.detach(), *torch.autograd.grad(readout.sin().sum(), leaves)]
        for model in models:
            step = (features.rows, model.flatten_parameters(), features.labels, features.ptr)
            entries = {"index": features.index, "count": features.count, "joint": joint, "ids": ids}
            results += module.training_step(*step, model=model.sizes, class_weight=class_weight, **entries, **unchecked)
        return results

    expected = run(reference)
    with cuda_kernels.standing_in(), emulated.guarded():
        results = []
        for order in (0, 1, 2):
            emulated.set_order(order)
            results.append(run(ops, check_invariants=False))
    for result in results:
        for one, first, other in zip(result, results[0], expected, strict=True):
            assert torch.equal(one, first)
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[3, 0, 50, 1], [300, 20], [0, 0], []])
def test_kernels_stay_inside_their_tensors(
    emulated: cuda_kernels.Emulated, sizes: list[int], dtype: torch.dtype
) -> None:
    """All kernels from graphs to readouts, and the gradients back to the node features, in any order of threads."""
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
