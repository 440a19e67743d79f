"""Inputs of more than 2^31 elements on a GPU, which 32-bit offsets cannot address; without one, small inputs.

The expected result is that of the last part of the input alone, or a number that is known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import spin_fast
from spin_fast import attention_readout, branch_readout, ops, power_features, sum_readout

ROOM = 50 << 30  # bytes that the largest of these tests takes
WIDTH = 32
PART = 100  # graphs
HUGE = (1 << 31) // WIDTH + 4096  # rows

Case = tuple[str, int]


@pytest.fixture(params=["cpu", "cuda"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A device, and rows of ``WIDTH`` elements."""
    if request.param == "cpu":
        yield "cpu", 5000
        return
    if not torch.cuda.is_available() or not spin_fast.native_available("cuda"):
        pytest.skip("needs a GPU and the CUDA kernels")
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GB of free memory on the GPU")
    yield "cuda", HUGE
    torch.cuda.empty_cache()


def segments(num_rows: int, size: int, device: str) -> Tensor:
    """Offsets of segments of ``size`` rows; the last one may be shorter."""
    starts = torch.arange(0, num_rows, size, device=device)
    return torch.cat([starts, starts.new_tensor([num_rows])])


def last(ptr: Tensor) -> tuple[slice, Tensor]:
    """The rows and the offsets of the last segments."""
    first = int(ptr[-PART - 1])
    return slice(first, None), ptr[-PART - 1 :] - first


@pytest.mark.parametrize("attention", [True, False])
def test_readouts(case: Case, attention: bool) -> None:
    device, num_rows = case
    z = torch.randn(num_rows, WIDTH, device=device, dtype=torch.bfloat16)
    w = torch.randn(WIDTH, device=device, dtype=torch.bfloat16) / 4
    ptr = segments(num_rows, 30, device)
    rows, bounds = last(ptr)
    gradient = torch.randn(len(ptr) - 1, WIDTH, device=device, dtype=torch.bfloat16)

    def run(z: Tensor, ptr: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().requires_grad_()
        readout = (
            attention_readout(z, w, ptr, check_invariants=False)
            if attention
            else sum_readout(z, ptr, check_invariants=False)
        )
        return readout.detach(), *torch.autograd.grad(readout, z, gradient)

    readout, dz = run(z, ptr, gradient)
    part, dz_of_part = run(z[rows], bounds, gradient[-PART:])
    torch.testing.assert_close(readout[-PART:], part, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dz[rows], dz_of_part, rtol=1e-2, atol=1e-2)


def test_one_segment(case: Case) -> None:
    device, num_rows = case
    z = torch.randn(num_rows, WIDTH, device=device, dtype=torch.bfloat16)
    ptr = torch.tensor([0, num_rows], device=device)
    total = z.sum(0, dtype=torch.float64)
    torch.testing.assert_close(sum_readout(z, ptr, check_invariants=False)[0].double(), total, rtol=1e-2, atol=1e-2)
    mean = attention_readout(z, torch.zeros_like(z[0]), ptr, check_invariants=False)[0]  # all weights are equal
    torch.testing.assert_close(mean.double(), total / num_rows, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("batched", [True, False])
def test_powers_of_many_nodes(case: Case, batched: bool) -> None:
    """Pairs of nodes that are joined: each hop swaps the two rows."""
    device, num_rows = case
    num_rows -= num_rows % 2
    x = torch.randn(num_rows, WIDTH, device=device)
    indptr = torch.arange(num_rows + 1, device=device)
    indices = torch.arange(num_rows, device=device) ^ 1
    ptr = segments(num_rows, 2, device) if batched else None
    powers = power_features(indptr, indices, x, 1, ptr=ptr, check_invariants=False)
    for rows in (slice(0, 1000), slice(-1000, None)):
        assert torch.equal(powers[0, rows], x[rows])
        swapped = x[rows].view(-1, 2, WIDTH).flip(1).view(-1, WIDTH)
        torch.testing.assert_close(powers[1, rows], swapped, rtol=1e-6, atol=0)


def test_powers_over_many_edges(case: Case) -> None:
    """A ring of nodes with as many neighbours each, so that sums of ones are powers of their number."""
    device, num_edges = case[0], case[1] * WIDTH
    degree = 250
    num_nodes = num_edges // degree
    node = torch.arange(num_nodes, device=device)
    indices = torch.empty(num_nodes, degree, dtype=torch.int64, device=device)
    for step in range(degree):
        indices[:, step] = (node + step) % num_nodes
    indptr = torch.arange(num_nodes + 1, device=device) * degree
    powers = power_features(
        indptr, indices.view(-1), torch.ones(num_nodes, 1, device=device), 2, operator="adj", check_invariants=False
    )
    for hop in range(3):
        assert (powers[hop] == degree**hop).all()


def test_branches(case: Case) -> None:
    device, num_rows = case
    rows = torch.randn(1, num_rows, WIDTH, device=device)
    weights = [torch.randn(1, WIDTH, 8, device=device) / WIDTH**0.5]
    biases, w = [torch.randn(1, 8, device=device)], torch.randn(1, 8, device=device)
    ptr = segments(num_rows, 30, device)
    part, bounds = last(ptr)
    readout = branch_readout(rows, weights, biases, w, ptr, check_invariants=False)
    of_part = branch_readout(rows[:, part], weights, biases, w, bounds, check_invariants=False)
    torch.testing.assert_close(readout[-PART:], of_part, rtol=1e-4, atol=1e-5)


def test_distinct_rows(case: Case) -> None:
    """Rows that repeat with a period."""
    device, num_rows = case
    period = 1000
    node = torch.arange(num_rows, device=device)
    powers = torch.randn(period, WIDTH, device=device)[node % period][None]
    ptr = segments(num_rows, 2 * period, device)
    rows, row_ptr, bounds, index, count, row_of_node = ops.distinct_rows(powers, ptr, check_invariants=False)
    assert torch.equal(rows, powers[0, :period])
    assert row_ptr.tolist() == [0, period]
    assert torch.equal(row_of_node[0].long(), node % period)
    assert int(bounds[-1]) == len(index) == len(count)
    assert int(count.sum()) == num_rows
