"""The GPU at hand, its copy bandwidth, and the bytes that an operation has to move: the floor that a copy gives.

A copy of ``n`` bytes reads half of them and writes the other half. Every input counts once and every output once, as
from and to the memory of the device; what a kernel keeps on the chip, or reads again, does not count.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spin_fast import GraphBatch

from .race import Contender, Floors, clock

FACTS = ("driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit")
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
SAMPLES = 7
PATIENCE = 20.0  # seconds


def smi(fields: Sequence[str], meanwhile: Contender | None = None) -> dict[str, str]:
    """Fields of nvidia-smi for the GPU at hand; empty without it. ``meanwhile`` is called until it answers."""
    meanwhile = meanwhile or partial(time.sleep, 0.01)
    identity = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", "-i", identity, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return {}
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end:
        meanwhile()
    process.kill()
    answer, _ = process.communicate()
    return parsed(fields, answer) if process.returncode == 0 else {}


def parsed(fields: Sequence[str], line: str) -> dict[str, str]:
    """A line of nvidia-smi's CSV, without what it does not know."""
    values = [value.strip() for value in line.split(",")]
    return {field: value for field, value in zip(fields, values, strict=False) if value and value[0] not in "[N"}


def describe() -> dict[str, str]:
    """The GPU, CUDA and the driver; nothing that changes between sessions, and no host name."""
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    facts = {"GPU": properties.name, "capability": capability, "multiprocessors": str(properties.multi_processor_count)}
    return facts | {"CUDA": str(torch.version.cuda)} | smi(FACTS)


class Copies(NamedTuple):
    """GB/s, read and written, by bytes of the copy: of ``Tensor.copy_`` and of a kernel; and the clocks meanwhile."""

    rates: dict[int, tuple[float, float]]
    clocks: dict[str, str]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [(f"{size / 1e6:,.0f} MB", *(f"{rate:,.0f}" for rate in rates)) for size, rates in self.rates.items()]


def copies(nbytes: int, device: str) -> dict[str, Contender]:
    """Ways to read half of so many bytes and to write the other half."""
    source, target = torch.zeros(2, max(nbytes // 8, 1), device=device)
    return {"copy_": partial(target.copy_, source), "kernel": partial(torch.neg, source, out=target)}


def floors(nbytes: int, device: str) -> Floors:
    """What a copy of so many bytes takes."""
    return {"copy": copies(nbytes, device)}


def measure_copies(sizes: Iterable[int], device: str) -> Copies:
    """Medians of some samples; then the clocks, asked for while the GPU copies on."""
    now, rates = clock(2, device), {}
    calls: dict[str, Contender] = {}
    for size in sizes:
        calls = copies(size, device)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for sample in range(SAMPLES + 1):
            for name, call in calls.items():
                start = now()
                for _ in range(8):
                    call()
                if sample:  # the first one warms up
                    seconds[name].append((now() - start) / 8)
        rates[size] = tuple(size / statistics.median(values) / 1e9 for values in seconds.values())
    clocks = smi(CLOCKS, calls["kernel"]) if device == "cuda" else {}
    return Copies(rates, clocks)


def nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def readout_bytes(kind: str, z: Tensor, ptr: Tensor, backward: bool) -> int:
    """Of a readout of one branch.

    Forward ``z`` and ``ptr`` are read, the readouts are written, and with attention the weights, which the operation
    returns for its gradient. Backward the gradient of the readouts and ``ptr`` are read and ``dz`` is written; with
    attention ``z``, the weights and the readouts are read too.
    """
    compute = max(z.element_size(), 4)
    readouts, weights = (ptr.numel() - 1) * z.shape[1] * compute, len(z) * compute
    if not backward:
        return nbytes(z, ptr) + readouts + (weights if kind == "attention" else 0)
    return nbytes(z, ptr) + readouts + (z.nbytes + weights + readouts if kind == "attention" else 0)


def power_bytes(graphs: GraphBatch, x: Tensor, num_hops: int, whole: bool = False) -> int:
    """Of ``power_features``: the adjacency and ``x`` are read, all hops are written.

    ``whole``: one graph that no chip holds, so that every hop reads the adjacency and the hop before it.
    """
    reads = nbytes(graphs.ptr) + (num_hops if whole else 1) * nbytes(graphs.indptr, graphs.indices, x)
    return reads + (num_hops + 1) * x.nbytes


SEGMENTS = ("short segments", "NCI1's segments", "skewed segments", "one segment")


def segments(kind: str, num_rows: int) -> Tensor:
    """Offsets of segments that have ``num_rows`` rows together."""
    rng = np.random.default_rng(0)
    if kind == "one segment":
        weights = np.ones(1)
    elif kind == "short segments":  # 4 rows on average
        weights = rng.integers(1, 8, max(num_rows // 4, 1)).astype(float)
    elif kind == "skewed segments":  # the k-th largest has 1 / k of the rows of the largest, which has a tenth of all
        weights = rng.permutation(1 / np.arange(1, max(num_rows // 256, 1) + 1))
    else:  # 29.87 on average
        weights = rng.lognormal(sigma=0.42, size=max(round(num_rows / 29.87), 1))
    ends = np.floor(np.cumsum(weights) / weights.sum() * num_rows).astype(np.int64)
    ends[-1] = num_rows
    return torch.from_numpy(np.concatenate([[0], ends]))
