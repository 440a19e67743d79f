"""Every op on small inputs, once for each path that its CUDA kernels have: what compute-sanitizer is to watch.

    python scripts/gpu_small.py [--device cuda|cpu]

Prints what it ran. Values are tested elsewhere; here they must only be finite.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import spin_fast
from spin_fast import SPIN, GraphBatch, PowerFeatures, ops, training

NUM_HOPS = 2
SMALL = [5, 0, 12, 1, 30, 2]
SIZES = {
    "small": SMALL * 3,
    "medium": [*SMALL, 700, *SMALL],  # more shared memory than a block has without asking
    "large": [3, 9000, 1],  # more than it may have
}
HUB = 3000  # edges of a row that several teams of threads share
LONG = 5000  # entries of a segment that several blocks share
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BEYOND_SHARED = 1900  # features of a layer whose tile no block has room for


def finite(*results: Tensor | None) -> None:
    for result in results:
        assert result is None or not result.is_floating_point() or result.isfinite().all()


def graphs_of(sizes: list[int], num_features: int, index: torch.dtype) -> GraphBatch:
    """A ring in each graph and some edges more, in a large one a hub; features of few values, so that rows repeat."""
    rng = np.random.default_rng(0)
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    rows, columns = [], []
    for begin, size in zip(ptr, sizes, strict=False):
        if size > 1:
            node = np.arange(size)
            rows.append(begin + np.concatenate([node, (node + 1) % size, rng.integers(0, size, size)]))
            columns.append(begin + np.concatenate([(node + 1) % size, node, rng.integers(0, size, size)]))
        if size > HUB:
            rows.append(np.full(HUB, begin))
            columns.append(begin + np.arange(HUB))
    edges = torch.from_numpy(np.stack([np.concatenate(columns), np.concatenate(rows)])).to(index)
    x = torch.from_numpy(rng.integers(-1, 2, (int(ptr[-1]), num_features))).float()
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return GraphBatch.from_edge_index(edges, x, graph, num_graphs=len(sizes), y=torch.arange(len(sizes)) % 2)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let products of matrices round to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def powers(device: str) -> int:
    """Graphs in shared memory and hop by hop, all operators and types, with gradients; narrow and wide features."""
    calls = 0
    for sizes in SIZES.values():
        for num_features in (1, 5, 33):
            graphs = graphs_of(sizes, num_features, torch.int32 if num_features == 5 else torch.int64).to(device)
            csr = (graphs.indptr, graphs.indices)
            weight = torch.rand(graphs.num_edges, device=device) + 0.5
            for ptr in (graphs.ptr, None):
                for operator in ("adj", "sym", "rw", "sym+adj") if num_features == 5 else ("sym",):
                    x = graphs.x.clone().requires_grad_()
                    out = ops.power_features(*csr, x, NUM_HOPS, operator, ptr=ptr, check_invariants=False)
                    finite(out, *torch.autograd.grad(out.sum(), x))
                    calls += 2
                for dtype in TYPES[1:]:
                    finite(ops.power_features(*csr, graphs.x.to(dtype), NUM_HOPS, ptr=ptr, check_invariants=False))
                weighted = ops.power_features(
                    *csr, graphs.x, NUM_HOPS, ptr=ptr, edge_weight=weight, check_invariants=False
                )
                finite(weighted)
                out = torch.empty(NUM_HOPS + 1, *graphs.x.shape, device=device)
                finite(
                    ops.power_features(
                        *csr, graphs.x, NUM_HOPS, ptr=ptr, out=out, float64_sums=True, check_invariants=False
                    )
                )
                calls += 5
    return calls


def readouts(device: str) -> int:
    """Short and long segments, rows that several entries share, widths of a lane and beyond a warp's registers."""
    calls = 0
    generator = torch.Generator().manual_seed(0)
    for sizes in ([3, 0, 1, 7] * 5, [40] * 6, [2, LONG, 5], [LONG]):
        ptr = torch.tensor([0, *np.cumsum(sizes)]).to(device)
        rows = sum(sizes)
        index = torch.randint(rows // 2 + 1, (rows,), generator=generator, dtype=torch.int32).to(device)
        count = torch.randint(1, 4, (rows,), generator=generator, dtype=torch.int32).to(device)
        for width in (1, 5, 32) if rows > LONG else (1, 5, 32, 64, 300):
            for dtype in TYPES:
                for entries in ({}, {"index": index, "count": count}):
                    z = torch.randn(rows, width, generator=generator).to(device, dtype).requires_grad_()
                    w = torch.randn(width, generator=generator).to(device, dtype).requires_grad_()
                    out = ops.sum_readout(z, ptr, check_invariants=False, **entries)
                    finite(out, *torch.autograd.grad(out.sum(), z))
                    out, alpha = ops.attention_readout(
                        z, w, ptr, return_weights=True, check_invariants=False, **entries
                    )
                    finite(out, alpha, *torch.autograd.grad(out.sum() + alpha.square().sum().to(dtype), (z, w)))
                    calls += 4
    return calls


def distinct(device: str) -> int:
    """Rows that repeat and rows that do not, wide and narrow numbers of them."""
    calls = 0
    for num_features in (1, 5, 33):
        graphs = graphs_of(SIZES["small"], num_features, torch.int64).to(device)
        for dtype in (torch.float32, torch.float64):
            out = ops.power_features(
                graphs.indptr, graphs.indices, graphs.x.to(dtype), NUM_HOPS, ptr=graphs.ptr, check_invariants=False
            )
            for index in (torch.int32, torch.int64):
                finite(*ops.distinct_rows(out, graphs.ptr, index_dtype=index, check_invariants=False))
                calls += 1
    return calls


def branches(device: str) -> int:
    """Tiles in shared memory and beyond it, tensor cores, graphs of one tile and of many; the training step."""
    calls = 0
    for sizes in (SIZES["small"], [70, 0, 33, 7, 600]):
        for deduplicate in (True, False):
            features = PowerFeatures.from_graphs(graphs_of(sizes, 5, torch.int64), NUM_HOPS, deduplicate=deduplicate)
            features = features.to(device)
            for dtype in (torch.float32, torch.float64):
                of_type = replace(features, rows=features.rows.to(dtype))
                for attention, of in ((True, "hops"), (False, "hops"), (True, "joint"), (False, "both")):
                    model = SPIN(5, 24, 2, NUM_HOPS, attention=attention, branches=of).to(device, dtype)
                    loss = training.loss_of(model(of_type[[1, 0, 0, 3]]), of_type[[1, 0, 0, 3]].y)
                    loss.backward()
                    finite(loss, *(parameter.grad for parameter in model.parameters()))
                    class_weight = torch.tensor([0.5, 2.0], dtype=dtype, device=device) if attention else None
                    data = (of_type.rows, model.flatten_parameters(), of_type.labels, of_type.ptr)
                    entries = {"index": of_type.index, "count": of_type.count, "joint": of_type.joint}
                    chosen = {"ids": torch.tensor([2, 0, 3], device=device), "class_weight": class_weight}
                    for products in (nullcontext, tensor_cores) if dtype == torch.float32 else (nullcontext,):
                        with products():
                            finite(*ops.training_step(*data, model=model.sizes, **entries, **chosen))
                        calls += 1
                    calls += 2
            with tensor_cores():
                model = SPIN(5, 32, 2, NUM_HOPS).to(device)
                loss = training.loss_of(model(features), features.y)
                loss.backward()
                finite(loss, *(parameter.grad for parameter in model.parameters()))
                calls += 2
    rows = torch.randn(1, 7, 3, dtype=torch.float64).to(device).requires_grad_()
    shapes = ((3, BEYOND_SHARED), (BEYOND_SHARED, BEYOND_SHARED))
    weights = [(torch.randn(1, *shape, dtype=torch.float64) / 50).to(device).requires_grad_() for shape in shapes]
    biases = [torch.zeros(1, BEYOND_SHARED, dtype=torch.float64, device=device, requires_grad=True) for _ in shapes]
    ptr = torch.tensor([0, 5, 7], device=device)
    out = ops.branch_readout(rows, weights, biases, None, ptr, check_invariants=False)
    finite(out, *torch.autograd.grad(out.sum(), [rows, *weights, *biases]))
    return calls + 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every op on small inputs, once for each path of its kernels.")
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    if not spin_fast.native_available(device):
        info = spin_fast.build_info()
        raise SystemExit(f"gpu_small: no kernels for {device}: {info.get('cuda_reason') or info.get('reason')}")
    torch.manual_seed(0)
    for part in (powers, readouts, distinct, branches):
        print(f"gpu_small: {part.__name__}: {part(device)} calls", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print("gpu_small: done")


if __name__ == "__main__":
    main()
