"""The fused branch on dense rows that nothing shares: how near its arithmetic comes to the machine's matrix product.

The rates count the products of the MLP alone; the readout, LeakyReLU and biases come free of charge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spin_fast import attention_readout, branch_readout

from .harness.checks import assert_close
from .harness.inputs import NUM_BRANCHES
from .harness.plugin import RaceRunner
from .harness.report import Session

NUM_GRAPHS = 128
NODES_PER_GRAPH = 40
PRODUCT = 2048
FEATURES = 32


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("width", [32, pytest.param(64, marks=pytest.mark.full)])
def test_fused_branch(race: RaceRunner, session: Session, width: int, backward: bool, threads: int) -> None:
    """SPIN-att, three layers; PyTorch's way is ``baddbmm`` layer by layer and our readout."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-2] ** 0.5

    ptr = torch.arange(NUM_GRAPHS + 1) * NODES_PER_GRAPH
    rows = draw(NUM_BRANCHES, NUM_GRAPHS * NODES_PER_GRAPH, FEATURES)
    shapes = list(pairwise([FEATURES, width, width, width]))
    weights = [draw(NUM_BRANCHES, a, b).requires_grad_() for a, b in shapes]
    biases = [torch.zeros(NUM_BRANCHES, b, requires_grad=True) for _, b in shapes]
    w = draw(NUM_BRANCHES, width).requires_grad_()
    left, right = torch.randn(2, PRODUCT, PRODUCT, generator=generator)
    parameters = [*weights, *biases, w]

    def unfused() -> Tensor:
        z = rows
        for weight, bias in zip(weights, biases, strict=True):
            z = F.leaky_relu(torch.baddbmm(bias[:, None], z, weight))
        return attention_readout(z, w, ptr)

    fused = partial(branch_readout, rows, weights, biases, w, ptr)
    cotangent = torch.randn(fused().shape, generator=generator)
    ways = {"branch_readout": fused, "baddbmm and attention_readout": unfused}
    product = f"product of two [{PRODUCT}, {PRODUCT}] matrices"
    results = {name: torch.autograd.grad(way(), parameters, cotangent) for name, way in ways.items()}
    assert_close("branch_readout", *results.values(), rtol=1e-3)

    def call(way: Callable[[], Tensor]) -> object:
        if backward:
            return torch.autograd.grad(way(), parameters, cotangent)
        with torch.inference_mode():
            return way()

    contenders = {name: partial(call, way) for name, way in ways.items()}
    case, on = "forward and backward" if backward else "forward", f"{rows.shape[1]:,} rows a branch, h = {width}"
    times = race(f"fused branch, {case}", on, contenders | {product: partial(torch.matmul, left, right)})
    num_rows = rows.shape[0] * rows.shape[1]
    flops = sum(2 * num_rows * a * b for a, b in shapes)
    if backward:  # but for the gradient of the rows, which nobody asks for
        flops = 3 * flops - 2 * num_rows * shapes[0][0] * shapes[0][1]
    peak = 2 * PRODUCT**3 / times.time(product).median
    rates = [flops / times.time(name).median for name in ways]
    cells = [cell for rate in rates for cell in (f"{rate / 1e9:.0f}", f"{rate / peak:.0%}")]
    title = "rate of the products in a branch, GFLOP/s, and share of the large product's"
    headers = ("threads", "h", "pass", "branch_readout", "share", "baddbmm", "share", "large product")
    session.count(title, headers, [(str(threads), str(width), case, *cells, f"{peak / 1e9:.0f}")], left=3)
