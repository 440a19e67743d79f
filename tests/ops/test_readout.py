from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import cuda_kernels
import numpy as np
import pytest
import torch
from helpers import TOLERANCE, looped_readout, ragged_readouts, strided
from hypothesis import given
from hypothesis import strategies as st

import spin_fast
from spin_fast.ops import native as native_module
from spin_fast.ops import readout

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def schedules(backend: str, threads: None) -> Iterator[list[Callable[[], None]]]:
    """What must not change a bit: the number of threads; of the CUDA kernels the order of threads and blocks."""
    if backend != "cuda":
        yield [partial(torch.set_num_threads, number) for number in (1, 2)]
        return
    kernels = cuda_kernels.kernels()
    yield [partial(kernels.set_order, order) for order in (0, 1, 2)]
    kernels.set_order(0)


def sums(case: dict) -> torch.Tensor:
    names = ("z", "ptr", "index", "count", "num_branches")
    return spin_fast.sum_readout(**{name: case[name] for name in names})


def attention(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    names = ("z", "w", "ptr", "index", "count")
    return spin_fast.attention_readout(**{name: case[name] for name in names}, return_weights=True)


def dense_case(sizes: list[int], branches: int, width: int, dtype: torch.dtype, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    ptr = torch.tensor([0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()])
    return {
        "z": torch.randn(branches, int(ptr[-1]), width, dtype=dtype, generator=generator),
        "w": torch.randn(branches, width, dtype=dtype, generator=generator),
        "ptr": ptr,
        "index": None,
        "count": None,
        "num_branches": branches,
    }


def assert_equals_loops(case: dict) -> None:
    shared = {name: case[name] for name in ("z", "ptr", "num_branches", "index", "count")}
    tolerance = TOLERANCE[case["z"].dtype]
    torch.testing.assert_close(sums(case).double(), looped_readout(**shared)[0], **tolerance)
    readout, weights = attention(case)
    expected, expected_weights = looped_readout(**shared, w=case["w"])
    torch.testing.assert_close(readout.double(), expected, **tolerance)
    torch.testing.assert_close(weights.flatten().double(), expected_weights, **tolerance)


@given(case=ragged_readouts())
def test_ragged_form_equals_loops(backend: str, case: dict) -> None:
    assert_equals_loops(case)


@given(
    sizes=st.lists(st.integers(0, 9), max_size=6),
    branches=st.integers(1, 4),
    width=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_dense_form_equals_loops(backend: str, sizes: list[int], branches: int, width: int, dtype: torch.dtype) -> None:
    case = dense_case(sizes, branches, width, dtype)
    assert_equals_loops(case)
    one = {"z": case["z"][0], "ptr": case["ptr"]}
    torch.testing.assert_close(spin_fast.sum_readout(**one), sums(case)[:, :width])
    readout = spin_fast.attention_readout(w=case["w"][0], **one)
    torch.testing.assert_close(readout, attention(case)[0][:, :width])


def test_counts_are_repetitions(backend: str) -> None:
    z, w = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    ptr, index = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 1, 3, 2, 1])
    count = torch.tensor([2, 1, 3, 1, 4], dtype=torch.int32)
    repeated = {"index": index.repeat_interleave(count), "ptr": torch.tensor([0, 6, 6, 11])}
    counted = {"index": index, "count": count, "ptr": ptr}
    torch.testing.assert_close(spin_fast.sum_readout(z, **counted), spin_fast.sum_readout(z, **repeated))
    torch.testing.assert_close(
        spin_fast.attention_readout(z, w, **counted), spin_fast.attention_readout(z, w, **repeated)
    )


def test_softmax_is_per_graph_and_uniform_below_zero(backend: str) -> None:
    z = -torch.rand(2, 6, 3).double() - 0.1
    w, ptr = torch.ones(2, 3).double(), torch.tensor([0, 4, 4, 6])
    readout, weights = spin_fast.attention_readout(z, w, ptr, return_weights=True)
    torch.testing.assert_close(weights, torch.tensor([0.25] * 4 + [0.5] * 2).double().expand(2, 6))
    assert not readout[1].any()
    torch.testing.assert_close(readout[0, :3], z[0, :4].mean(0))


def test_large_logits_do_not_overflow(backend: str) -> None:
    z = torch.tensor([[1e4, 0.0], [1e4 - 5, 1.0], [-1e4, 2.0]])
    readout, weights = spin_fast.attention_readout(
        z, torch.tensor([1.0, 0.0]), torch.tensor([0, 3]), return_weights=True
    )
    expected = torch.softmax(torch.tensor([1e4, 1e4 - 5, 0.0]), 0)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(readout[0], expected @ z)


def test_nan_and_inf_stay_in_their_graph(backend: str) -> None:
    case = dense_case([3, 4, 2], 2, 5, torch.float32)
    clean_sum, clean = sums(case), attention(case)[0]
    case["z"][0, 4, 2], case["z"][1, 5, 1] = float("nan"), float("inf")
    for result, expected in ((sums(case), clean_sum), (attention(case)[0], clean)):
        assert torch.equal(result[[0, 2]], expected[[0, 2]])
        assert not bool(result[1].isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_segment(backend: str, value: float) -> None:
    """In segments that stand beside others in a warp, a block, or a chunk; gradients too."""
    for sizes in ([3, 1, 5, 2, 0, 4], [200, 300, 250], [1100, 1100, 20, 1200]):
        case = dense_case(sizes, 1, 4, torch.float32)
        clean = results_of(case, torch.float32)
        hit = int(case["ptr"][1])  # in the second graph
        case["z"][0, hit, 1] = value
        own = slice(hit, int(case["ptr"][2]))
        readouts, weights, dz = slice(2), 2, 3
        results = results_of(case, torch.float32)
        for result, expected in zip(results[readouts], clean[readouts], strict=True):
            assert torch.equal(result[0], expected[0])
            assert torch.equal(result[2:], expected[2:])
            assert not bool(result[1].isfinite().all())
        for result, expected in ((results[weights][0], clean[weights][0]), (results[dz][0], clean[dz][0])):
            assert torch.equal(result[: own.start], expected[: own.start])
            assert torch.equal(result[own.stop :], expected[own.stop :])


def test_logits_below_zero_weigh_the_same_in_long_segments(backend: str) -> None:
    z = -torch.rand(3000, 3) - 0.1
    weights = spin_fast.attention_readout(z, torch.ones(3), torch.tensor([0, 1500, 1500, 3000]), return_weights=True)[1]
    torch.testing.assert_close(weights, torch.full((3000,), 1 / 1500))


def test_same_bits_for_any_number_of_threads(backend: str, schedules: list[Callable[[], None]]) -> None:
    generator = torch.Generator().manual_seed(0)
    number, longest = (30, 1300) if backend == "cuda" else (400, 20000)
    sizes = [*torch.randint(0, 60, (number,), generator=generator).tolist(), longest]
    dense = dense_case(sizes, 3, 33, torch.float32)
    num_rows = longest // 4
    rows = dense["z"].flatten(0, 1)[:num_rows].clone()
    nnz = int(dense["ptr"][-1]) * 3
    shifts = torch.arange(3)[:, None] * int(dense["ptr"][-1])
    ragged = dense | {
        "z": rows,
        "ptr": torch.cat([(shifts + dense["ptr"][:-1]).flatten(), torch.tensor([nnz])]),
        "index": torch.randint(0, num_rows, (nnz,), generator=generator),
        "count": torch.randint(1, 4, (nnz,), generator=generator, dtype=torch.int32),
    }
    for case in (dense, ragged):
        results = []
        for choose in schedules:
            choose()
            z, w = case["z"].clone().requires_grad_(), case["w"].clone().requires_grad_()
            outputs = [sums(case | {"z": z}), *attention(case | {"z": z, "w": w})]
            sum(output.square().sum() for output in outputs).backward()
            results.append([*(output.detach() for output in outputs), z.grad, w.grad])
        for result in results[1:]:
            for one, two in zip(results[0], result, strict=True):
                assert torch.equal(one, two)


def results_of(case: dict, dtype: torch.dtype) -> list[torch.Tensor]:
    """Both readouts, the weights and all gradients."""
    z, w = (case[name].detach().to(dtype).requires_grad_() for name in ("z", "w"))
    outputs = [sums(case | {"z": z}), *attention(case | {"z": z, "w": w})]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(output.shape, generator=generator).bfloat16().to(output.dtype) for output in outputs]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, (z, w), cotangents)]


def ragged(case: dict, form: str, num_rows: int) -> dict:
    """The same rows with counts, or as many entries that refer to the first ``num_rows`` of them."""
    if form == "dense":
        return case
    num_nodes, rows = case["z"].shape[1], case["z"].flatten(0, 1)
    count = torch.arange(len(rows), dtype=torch.int32) % 3 + 1
    case = case | {"z": rows, "ptr": torch.cat([case["ptr"], case["ptr"][1:] + num_nodes]), "count": count}
    if form == "counted":
        return case
    index = torch.arange(len(rows), dtype=torch.int32) * 7919 % num_rows
    return case | {"z": rows[:num_rows].clone(), "index": index}


def assert_equals_reference(
    case: dict, monkeypatch: pytest.MonkeyPatch, schedules: list[Callable[[], None]], dtype: torch.dtype
) -> None:
    """Readouts, weights and gradients: right, and the same bits for each of the schedules."""
    results = []
    for choose in schedules:
        choose()
        results.append(results_of(case, dtype))
    with monkeypatch.context() as patch:
        patch.setattr(native_module, "library", None)
        expected = results_of(case, torch.float64)
    for result in results:
        for one, first, exact in zip(result, results[0], expected, strict=True):
            assert torch.equal(one, first)
            scale = float(exact.abs().max()) if exact.numel() else 0.0
            rtol = 2e-5 if dtype == torch.float32 else 1e-10
            torch.testing.assert_close(one.double(), exact, rtol=rtol, atol=rtol / 10 * scale)


@pytest.mark.parametrize("form", ["dense", "counted", "indexed"])
@pytest.mark.parametrize(
    "width", [1, 17, 100, *(pytest.param(width, marks=pytest.mark.slow) for width in (3, 16, 32, 64))]
)
def test_long_segment_among_small_ones(
    backend: str, schedules: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch, width: int, form: str
) -> None:
    """A segment that is cut into pieces."""
    longest, step = (1100, 3) if backend == "cuda" else (70000 // width + 1000, 1)
    case = dense_case([5, 0, longest, *range(0, 40, step), 64, 65, 63, 1, 128], 2, width, torch.float32)
    case["z"] = case["z"] / width**0.5
    assert_equals_reference(ragged(case, form, 3000), monkeypatch, schedules, torch.float32)


# The CUDA kernels cut segments of more than 1024 entries where chunks of 512 begin.
CUTS = {
    "at the limit": [1024, 1025, 1023, 0, 1, 512, 511, 513],
    "two in a chunk": [1100, 1100, 3, 1030],
    "wide": [3, 1030],
    "in step with the chunks": [512, 1536, 1024, 0, 1536],
    "ends before an end": [511, 1026, 511, 2, 1534],
    "huge": [5000],
    "huge and empty": [0, 0, 3000, 0],
    "empty": [0, 0, 0],
    "short": [3, 1, 0, 5, 2] * 30,
    "middling": [150, 700, 3, 0, 400],
}


@pytest.mark.parametrize("form", ["dense", "counted", "indexed"])
@pytest.mark.parametrize("cut", CUTS)
def test_segments_are_cut_anywhere(
    backend: str, schedules: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch, cut: str, form: str
) -> None:
    width = 129 if cut == "wide" else 5  # 129 columns are more than a warp of the CUDA kernels takes at once
    case = dense_case(CUTS[cut], 2, width, torch.float64)
    assert_equals_reference(ragged(case, form, min(400, case["z"].shape[1])), monkeypatch, schedules[:2], torch.float64)


@pytest.mark.parametrize("form", ["dense", "counted", "indexed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 33, 130, 144, 516, 1030])
def test_rows_of_any_width(
    backend: str,
    schedules: list[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    dtype: torch.dtype,
    form: str,
) -> None:
    """Rows that do not fill vectors or registers, and that are wider than all registers of a warp."""
    case = dense_case([5, 0, 40, 1, 9], 2, width, dtype)
    case["z"] = case["z"] / width**0.5
    assert_equals_reference(ragged(case, form, 30), monkeypatch, schedules[:2], dtype)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_start_anywhere_in_memory(backend: str, width: int, dtype: torch.dtype) -> None:
    case = dense_case([3, 0, 20], 1, width, torch.float32)
    memory = torch.cat([torch.zeros(1), case["z"].flatten()]).to(dtype)
    shifted = case | {"z": memory[1:].view_as(case["z"]), "w": case["w"].to(dtype)}
    assert shifted["z"].data_ptr() % 16 != 0
    for one, other in zip(results_of(shifted, dtype), results_of(case, dtype), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("width", [16, 32])
def test_gradients_larger_than_the_caches(backend: str, attends: bool, width: int) -> None:
    """They are written around the caches: the same bits as those of a few graphs."""
    if backend in ("reference", "cuda"):
        pytest.skip("only the kernels of the CPU write around the caches")
    num_nodes, few = (9 << 20) // (4 * width), 90
    random = torch.Generator().manual_seed(0)
    z, w = torch.randn(num_nodes, width, generator=random), torch.randn(width, generator=random)
    grad = torch.randn(num_nodes // 9, width, generator=random)

    def gradient(nodes: int) -> torch.Tensor:
        rows, ptr = z[:nodes].clone().requires_grad_(), torch.arange(0, nodes + 1, 9)
        ptr[-1] = nodes
        read = spin_fast.attention_readout(rows, w, ptr) if attends else spin_fast.sum_readout(rows, ptr)
        return torch.autograd.grad(read, rows, grad[: len(ptr) - 1])[0]

    assert torch.equal(gradient(num_nodes)[:few], gradient(few))


@pytest.mark.parametrize("branches", [1, 3])
def test_gradients_dense(backend: str, branches: int) -> None:
    case = dense_case([2, 0, 1, 4], branches, 3, torch.float64)
    z, w = case["z"].requires_grad_(), case["w"].requires_grad_()
    assert_gradients(case, z, w, fast_mode=backend == "cuda" and branches > 1)


def test_gradients_ragged(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    case = {
        "z": torch.randn(6, 3, dtype=torch.float64, generator=generator).requires_grad_(),
        "w": torch.randn(2, 3, dtype=torch.float64, generator=generator).requires_grad_(),
        "ptr": torch.tensor([0, 2, 2, 5, 9]),
        "index": torch.tensor([0, 1, 0, 1, 3, 2, 5, 0, 2]),  # row 4 is never used, row 0 in both branches
        "count": torch.tensor([1, 2, 1, 3, 1, 1, 2, 1, 1], dtype=torch.int32),
        "num_branches": 2,
    }
    assert_gradients(case, case["z"], case["w"])
    assert_gradients(case | {"index": None, "count": None, "ptr": torch.tensor([0, 2, 2, 5, 6])}, case["z"], case["w"])


def assert_gradients(case: dict, z: torch.Tensor, w: torch.Tensor, fast_mode: bool = False) -> None:
    for function, inputs in (
        (lambda z: sums(case | {"z": z}), (z,)),
        (lambda z, w: attention(case | {"z": z, "w": w})[0], (z, w)),
        (lambda z, w: attention(case | {"z": z, "w": w})[1], (z, w)),
        (lambda z, w: attention(case | {"z": z, "w": w}), (z, w)),
    ):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=fast_mode)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=fast_mode)


def test_gradient_is_the_formula_of_the_paper(native) -> None:
    case = dense_case([5], 1, 4, torch.float64)
    z, w, ds = case["z"][0].requires_grad_(), case["w"][0].requires_grad_(), torch.randn(4).double()
    readout, alpha = spin_fast.attention_readout(z, w, case["ptr"], return_weights=True)
    readout.backward(ds[None])
    t = ds @ readout[0].detach()
    with torch.no_grad():
        dbeta = alpha * (z @ ds - t) * (z @ w > 0)
        torch.testing.assert_close(z.grad, alpha[:, None] * ds + dbeta[:, None] * w)
        torch.testing.assert_close(w.grad, dbeta @ z)


@pytest.mark.slow
def test_ten_million_nodes_in_one_graph(backend: str) -> None:
    z = torch.rand(3_000_000 if backend == "cuda" else 10_000_000, 2) + 0.1
    ptr = torch.tensor([0, len(z)])
    exact, naive = z.double().sum(0), z.sum(0).double()
    ours = spin_fast.sum_readout(z, ptr)[0].double()
    assert (ours - exact).abs().max() <= max(2 * (naive - exact).abs().max(), exact.max() * 6e-8)
    w = torch.tensor([0.3, -0.1])
    mean = spin_fast.attention_readout(z, w, ptr)[0].double()
    torch.testing.assert_close(mean, torch.softmax((z.double() @ w.double()).relu(), 0) @ z.double(), rtol=1e-6, atol=0)


def test_float32_is_as_accurate_as_torch(backend: str) -> None:
    """At most twice the error of torch's own float32 operations, graph by graph; the reference sums as torch does."""
    case = dense_case([3000, 17, 500], 2, 32, torch.float32)
    shared = {name: case[name] for name in ("z", "ptr")}
    sizes = case["ptr"].diff().tolist()

    def theirs(weigh) -> torch.Tensor:
        graphs = [
            torch.stack([(weigh(rows, w) * rows).sum(0) for rows, w in zip(graph, case["w"], strict=True)])
            for graph in case["z"].split(sizes, 1)
        ]
        return torch.stack(graphs).flatten(1).double()

    for ours, weigh, w in (
        (sums(case), lambda rows, w: torch.ones(len(rows), 1), None),
        (attention(case)[0], lambda rows, w: torch.softmax((rows @ w).relu(), 0)[:, None], case["w"]),
    ):
        exact = looped_readout(**shared, num_branches=2, w=w)[0]
        most = 3 if backend == "reference" else 2  # torch's order of sums depends on the processor
        assert (ours.double() - exact).norm() <= most * (theirs(weigh) - exact).norm()


@pytest.mark.parametrize("form", ["dense", "counted", "indexed"])
@pytest.mark.parametrize("width", [3, 16, 32, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_storage(backend: str, dtype: torch.dtype, width: int, form: str) -> None:
    """Results are rounded once; a gradient meets the rounded readout and is the sum of two rounded ones."""
    case = dense_case([3, 0, 700, 90, 1, 1500 if backend == "cuda" else 5000], 2, width, torch.float32)
    case |= {name: case[name].to(dtype) for name in ("z", "w")}
    case = ragged(case, form, 500)
    exact = results_of(case, torch.float64)
    results = results_of(case, dtype)
    stored, roundings = (dtype, dtype, torch.float32, dtype, dtype), (0.51, 0.51, 100, 2, 2)
    for result, expected, kind, number in zip(results, exact, stored, roundings, strict=True):
        assert result.dtype == kind
        tolerance = number * torch.finfo(kind).eps
        torch.testing.assert_close(
            result.double(), expected, rtol=tolerance, atol=max(tolerance * float(expected.abs().max()) * 0.5, 1e-5)
        )


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_accurate_as_torch(backend: str, dtype: torch.dtype, attends: bool) -> None:
    """At most twice the error of torch's own operations on the same rows, gradients too."""
    case = dense_case([300, 17, 50], 2, 32, torch.float32)
    case |= {name: case[name].to(dtype) for name in ("z", "w")}
    cotangent = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)

    def by_torch(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        readouts = []
        for graph in z.split(case["ptr"].diff().tolist(), 1):
            alpha = torch.softmax((graph @ w[:, :, None]).relu(), 1) if attends else 1
            readouts.append((alpha * graph).sum(1).flatten())
        return torch.stack(readouts)

    def results(readout, kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        z, w = (case[name].to(kind).requires_grad_() for name in ("z", "w"))
        s = readout(z, w)
        return s.detach(), *torch.autograd.grad(s, (z, w) if attends else (z,), cotangent.to(kind))

    def by_us(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return spin_fast.attention_readout(z, w, case["ptr"]) if attends else spin_fast.sum_readout(z, case["ptr"])

    ours = results(by_us, dtype)
    for one, other, exact in zip(ours, results(by_torch, dtype), results(by_torch, torch.float64), strict=True):
        assert (one.double() - exact).abs().max() <= 2 * (other.double() - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_keep_special_values(backend: str, dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, 1e-7, -6e-8, 3e-5, 65504.0, float("inf"), float("-inf"), float("nan"), 1.0])
    z = special.repeat(3)[:, None].expand(30, 17).to(dtype)
    each = torch.arange(31)
    torch.testing.assert_close(spin_fast.sum_readout(z, each), z, rtol=0, atol=0, equal_nan=True)
    doubled = spin_fast.sum_readout(torch.cat([z, z], 1).view(60, 17), 2 * each)
    torch.testing.assert_close(doubled, (z.double() * 2).to(dtype), rtol=0, atol=0, equal_nan=True)
    expected = torch.randn(5, 17).to(dtype)
    values = torch.randn(20, 17).to(dtype).requires_grad_()
    spin_fast.sum_readout(values, torch.arange(0, 21, 4)).backward(expected)
    assert torch.equal(values.grad, expected.repeat_interleave(4, 0))


def test_small_float16_stays_where_denormals_are_flushed(backend: str) -> None:
    z = torch.full((40, 17), 3e-5, dtype=torch.float16)  # denormal as float16 alone
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU flushes no denormals")
    try:
        sums = spin_fast.sum_readout(z, torch.arange(41))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(sums, z)


@pytest.mark.slow
def test_opcheck(native) -> None:
    ops = torch.ops.spin_fast
    z, w = torch.randn(6, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    ragged = (torch.tensor([0, 2, 2, 4, 5]), torch.tensor([0, 5, 2, 2, 1]), torch.ones(5, dtype=torch.int32))
    dense = (torch.tensor([0, 1, 3]), None, None)
    for segments, shared in ((ragged, False), (dense, True)):
        torch.library.opcheck(ops.sum_readout, (z, *segments, 2, shared, True))
        torch.library.opcheck(
            ops.sum_readout_backward, (torch.randn(2, 6, requires_grad=True), *segments, 2, 6, shared, True)
        )
        torch.library.opcheck(ops.attention_readout, (z, w, *segments, shared, True))
        outputs = [output.detach() for output in ops.attention_readout(z, w, *segments, shared, True)]
        for grad_alpha in (None, torch.randn_like(outputs[1]).requires_grad_()):
            grads = (torch.randn_like(outputs[0]).requires_grad_(), grad_alpha)
            torch.library.opcheck(ops.attention_readout_backward, (*grads, z, w, *segments, *outputs, shared, True))


def test_non_contiguous_and_expanded_gradient(backend: str) -> None:
    case = dense_case([3, 2], 2, 4, torch.float64)
    strided = case["z"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(sums(case | {"z": strided}), sums(case))
    z = case["z"].clone().requires_grad_()
    sums(case | {"z": z}).sum().backward()  # the gradient that arrives is an expanded 1
    assert torch.equal(z.grad, torch.ones_like(z))


@pytest.mark.parametrize("form", ["dense", "indexed"])
def test_no_argument_need_be_contiguous(backend: str, form: str) -> None:
    case = ragged(dense_case([3, 0, 40], 2, 5, torch.float32), form, 30)
    gradients = []
    for way in (case, {name: strided(value) for name, value in case.items()}):
        way = way | {name: way[name].detach().requires_grad_() for name in ("z", "w")}
        outputs = [sums(way), *attention(way)]
        gradients.append(torch.autograd.grad(sum(s.square().sum() for s in outputs), (way["z"], way["w"])))
        gradients[-1] += tuple(s.detach() for s in outputs)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["dense", "counted", "indexed"])
@pytest.mark.parametrize(("sizes", "width"), [([2, 0, 3], 0), ([0, 0], 4), ([], 4), ([0], 0), ([], 0)])
def test_gradients_of_nothing(backend: str, sizes: list[int], width: int, form: str) -> None:
    case = ragged(dense_case(sizes, 2, width, torch.float32), form, max(sum(sizes), 1))
    z, w = (case[name].requires_grad_() for name in ("z", "w"))
    outputs = [sums(case), *attention(case)]
    assert outputs[0].shape == outputs[1].shape == (len(sizes), 2 * width)
    gradients = torch.autograd.grad([s.sum() for s in outputs], (z, w), allow_unused=width == 0)
    for gradient, value in zip(gradients, (z, w), strict=True):
        assert gradient is None or (gradient.shape == value.shape and bool((gradient.isfinite()).all()))


Z, W, PTR = torch.randn(6, 3), torch.randn(2, 3), torch.tensor([0, 1, 2, 4, 6])
BAD = [
    ({"z": None}, TypeError, r"z must be a torch.Tensor, got NoneType"),
    ({"z": Z.int()}, TypeError, r"z must be float32, float64, bfloat16 or float16, got int32"),
    ({"z": Z[0]}, ValueError, r"z must have shape \[rows, h\], got \[3\]"),
    ({"z": Z.view(3, 2, 3)}, ValueError, r"z must have 2 branches, got 3"),
    ({"w": W[:, :2]}, ValueError, r"w must match z in width, dtype and device"),
    ({"w": W.double()}, ValueError, r"w must match z"),
    ({"w": W[None]}, ValueError, r"w must have shape \[branches, h\]"),
    ({"ptr": PTR.int()}, TypeError, r"ptr must be int64, got int32"),
    ({"ptr": PTR[:-1]}, ValueError, r"ptr must have a multiple of 2 segments"),
    ({"ptr": PTR + 1}, ValueError, r"ptr must start with 0"),
    ({"ptr": torch.tensor([0, 1, 3, 2, 6])}, ValueError, r"ptr must not decrease"),
    ({"ptr": torch.tensor([0, 1, 2, 3, 5])}, ValueError, r"ptr must end with the number of rows of z, 6, got 5"),
    ({"index": torch.arange(6).float()}, TypeError, r"index must be int32 or int64"),
    ({"index": torch.arange(6) + 1}, ValueError, r"index must be in \[0, 6\), got index\[5\] = 6"),
    ({"index": torch.arange(6) - 1}, ValueError, r"index must be in \[0, 6\), got index\[0\] = -1"),
    ({"index": torch.arange(5)}, ValueError, r"ptr must end with the number of index, 5, got 6"),
    ({"check_invariants": "yes"}, TypeError, r"check_invariants must be a bool, got str"),
    ({"count": torch.ones(6)}, TypeError, r"count must be int32"),
    ({"count": torch.ones(5, dtype=torch.int32)}, ValueError, r"count must have shape \[6\]"),
    ({"count": torch.tensor([1, 0, 1, 1, 1, 1], dtype=torch.int32)}, ValueError, r"count must be positive"),
    ({"z": Z.view(2, 3, 3), "index": torch.arange(6), "ptr": PTR[:2]}, ValueError, r"index must come with the ragged"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named(backend: str, change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        spin_fast.attention_readout(**{"z": Z, "w": W, "ptr": PTR} | change)
    if "w" in change:
        return
    arguments = {"z": Z, "ptr": PTR, "num_branches": 2} | {k: v for k, v in change.items() if k != "w"}
    with pytest.raises(error, match=message):
        spin_fast.sum_readout(**arguments)


def test_no_branches_and_no_third_derivative(backend: str) -> None:
    with pytest.raises(ValueError, match="z must have at least 1 branches, got 0"):
        spin_fast.sum_readout(torch.ones(0, 3, 2), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="w must have at least 1 branch, got 0"):
        spin_fast.attention_readout(Z, torch.ones(0, 3), torch.tensor([0]))
    if backend == "reference":
        return
    w = W[0].clone().requires_grad_()
    value = spin_fast.attention_readout(Z, w, torch.tensor([0, 6])).pow(3).sum()
    (first,) = torch.autograd.grad(value, w, create_graph=True)
    with pytest.raises(NotImplementedError, match="no third derivative"):
        torch.autograd.grad(first.sum(), w, create_graph=True)


@pytest.mark.parametrize("branches", [1, 3])
def test_number_of_branches_must_be_that_of_z(backend: str, branches: int) -> None:
    z, ptr, w = torch.randn(branches, 6, 3), torch.tensor([0, 2, 6]), torch.randn(3)
    expected = spin_fast.sum_readout(z, ptr)
    for right in (branches, np.int64(branches)):
        assert torch.equal(spin_fast.sum_readout(z, ptr, num_branches=right), expected)
    for wrong, error, message in (
        (7, ValueError, f"z must have 7 branches, got {branches}"),
        (2**70, ValueError, r"num_branches must be below 2\*\*63, got [0-9]*"),
        (0, ValueError, "num_branches must be at least 1, got 0"),
        (-1, ValueError, "num_branches must be at least 1, got -1"),
        (True, TypeError, "num_branches must be an int, got bool"),
        (1.0, TypeError, "num_branches must be an int, got float"),
    ):
        for check_invariants in (False, True):
            with pytest.raises(error, match=message):
                spin_fast.sum_readout(z, ptr, num_branches=wrong, check_invariants=check_invariants)
    with pytest.raises(ValueError, match="num_branches must be at least 1, got 0"):
        spin_fast.sum_readout(z[0], ptr, num_branches=0)
    if branches == 1:
        torch.testing.assert_close(spin_fast.attention_readout(z, w, ptr), spin_fast.attention_readout(z[0], w, ptr))
        return
    for check_invariants in (False, True):
        with pytest.raises(ValueError, match="z must have 1 branches, got 3"):
            spin_fast.attention_readout(z, w, ptr, check_invariants=check_invariants)


def test_other_failures_than_bad_arguments_stand(native, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(readout, "_sum", fail)
    monkeypatch.setattr(readout, "_attention", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        spin_fast.sum_readout(Z, PTR)
    with pytest.raises(RuntimeError, match="out of memory"):
        spin_fast.attention_readout(Z, W, PTR)


def test_raw_op_checks_contents_itself(native) -> None:
    ops, ptr, z = torch.ops.spin_fast, torch.tensor([0, 2]), torch.randn(3, 2, 4)
    with pytest.raises(ValueError, match="z must have 2 branches, got 3"):
        ops.sum_readout(z, ptr, None, None, 2, True, False)
    with pytest.raises(ValueError, match="z must have 1 branches, as w, got 3"):
        ops.attention_readout(z, z[0, 0].clone(), ptr, None, None, True, False)
    readout, alpha = ops.attention_readout(z, z[:, 0].clone(), ptr, None, None, True, False)
    outputs = (readout[:, :4].contiguous(), alpha[:2].clone())
    with pytest.raises(ValueError, match="z must have 1 branches, as w, got 3"):
        ops.attention_readout_backward(outputs[0], None, z, z[0, 0].clone(), ptr, None, None, *outputs, True, False)
    with pytest.raises(ValueError, match=r"index must be in \[0, 6\), got index\[5\] = 6"):
        torch.ops.spin_fast.sum_readout(Z, PTR, torch.arange(6) + 1, None, 2, False, True)
    with pytest.raises(ValueError, match=r"ptr must have a multiple of 3 segments"):
        torch.ops.spin_fast.sum_readout(Z, PTR, None, None, 3, False, False)
    with pytest.raises(ValueError, match=r"index must be in \[0, 6\), got index\[5\] = 6"):
        torch.ops.spin_fast.sum_readout_backward(Z[:2].repeat(1, 2), PTR, torch.arange(6) + 1, None, 2, 6, False, True)
