"""Random graphs, oracles that share no code with the package, and what several tests ask."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spin_fast
from spin_fast import SPIN, GraphBatch, NodeFeatures, PowerFeatures, datasets
from spin_fast._common.indexing import offsets
from spin_fast._common.rows import arrays_of, sparse_rows

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SPIN_FAST_DATA", ROOT.parent / "shared" / "data"))
"""The folder of real data sets."""
ISAS = ("neon",) if platform.machine() in ("aarch64", "arm64") else ("baseline", "avx2", "avx512")
"""The instruction sets for which the kernels are compiled."""

# Tolerances against a float64 oracle; sizes in these tests are small.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.float64: {"rtol": 1e-11, "atol": 1e-11}}


def random_graphs(
    sizes: list[int],
    density: float = 0.4,
    num_features: int = 3,
    *,
    dtype: torch.dtype = torch.float64,
    index_dtype: torch.dtype = torch.int64,
    weighted: bool = False,
    signs: bool = False,
    seed: int = 0,
) -> GraphBatch:
    """Directed graphs with self-loops and repeated edges, columns unsorted; rows of ``signs`` alone repeat."""
    rng = np.random.default_rng(seed)
    ptr = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    indptr, indices = [0], []
    for begin, end in itertools.pairwise(ptr):
        for _ in range(begin, end):
            indices.extend(rng.integers(begin, end, rng.binomial(end - begin, density)))
            indptr.append(len(indices))
    x = torch.from_numpy(rng.standard_normal((int(ptr[-1]), num_features))).to(dtype)
    weight = torch.from_numpy(rng.uniform(0.1, 2.0, len(indices))).to(dtype) if weighted else None
    return GraphBatch(
        ptr=torch.from_numpy(ptr),
        indptr=torch.tensor(indptr, dtype=index_dtype),
        indices=torch.tensor(np.array(indices, dtype=np.int64)).to(index_dtype),
        x=x.sign() if signs else x,
        edge_weight=weight,
    )


def strided(value: Any) -> Any:
    """The same values, where they are tensors, every other number in memory."""
    if isinstance(value, (list, tuple)):
        return type(value)(strided(part) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    wide = torch.stack([value, torch.full_like(value, 77)], dim=-1)[..., 0].detach()
    assert wide.numel() < 2 or not wide.is_contiguous()
    return wide.requires_grad_(value.requires_grad)


def equal(a: GraphBatch, b: GraphBatch) -> bool:
    """Equal arrays, of equal dtypes."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("ptr", "indptr", "indices", "x", "y", "edge_weight")]
    return all(
        one is other or (one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other))
        for one, other in pairs
    )


class WatchedGraphs:
    """Counts the batches that are made from here on: ``made``, and ``most`` that were in memory when one was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from_parts = GraphBatch._from_parts.__func__
        self.start()

        def watched(cls: type[GraphBatch], *arguments: Any) -> GraphBatch:
            self.most = max(self.most, sum(x() is not None for x in self._made))
            graphs = from_parts(cls, *arguments)
            self._made.append(weakref.ref(graphs.x))
            return graphs

        monkeypatch.setattr(GraphBatch, "_from_parts", classmethod(watched))

    def start(self) -> None:
        self._made: list[weakref.ref] = []
        self.most = 0

    @property
    def made(self) -> int:
        return len(self._made)


def sparse(rows: torch.Tensor) -> torch.Tensor:
    """Rows in CSR layout, without the values that are 0."""
    row, column = rows.nonzero().unbind(1)
    return sparse_rows(
        rows[row, column], offsets(torch.bincount(row, minlength=len(rows))).int(), column.int(), rows.shape[1]
    )


def change_array(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change an array of a file of features; None leaves it out."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    changed = change(tensors.pop(name).clone())
    save_file(tensors | ({} if changed is None else {name: changed}), path, metadata)


def assert_same_features(one: PowerFeatures, other: PowerFeatures) -> None:
    for name in (field.name for field in fields(one)):
        value, twin = getattr(one, name), getattr(other, name)
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.layout, value.shape) == (twin.dtype, twin.layout, twin.shape), name
            pairs = zip(arrays_of(value), arrays_of(twin), strict=True) if name == "rows" else [(value, twin)]
            assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor)), name
        elif isinstance(value, NodeFeatures):
            assert value.fingerprint == twin.fingerprint
        else:
            assert value == twin, name


def error_of(call: Callable[[], object]) -> str:
    """The message of the DatasetError that ``call`` raises, which must be one readable line."""
    with pytest.raises(datasets.DatasetError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 700
    return message


def dense_powers(graphs: GraphBatch, num_hops: int, operator: str) -> torch.Tensor:
    """[X, ĀX, ..., Ā^R X] in float64 by dense matrix products, graph by graph."""
    indptr, indices, x = graphs.indptr.numpy(), graphs.indices.numpy(), graphs.x.double().numpy()
    target = np.repeat(np.arange(graphs.num_nodes), np.diff(indptr))
    weight = np.ones(len(indices)) if graphs.edge_weight is None else graphs.edge_weight.double().numpy()
    powers = np.stack([x] * (num_hops + 1))
    for begin, end in itertools.pairwise(graphs.ptr.tolist()):
        edges = slice(indptr[begin], indptr[end])
        adjacency = np.zeros((end - begin, end - begin))
        np.add.at(adjacency, (target[edges] - begin, indices[edges] - begin), weight[edges])
        a = _normalised(adjacency, operator)
        for hop in range(num_hops):
            powers[hop + 1, begin:end] = a @ powers[hop, begin:end]
    return torch.from_numpy(powers)


def _normalised(a: np.ndarray, operator: str) -> np.ndarray:
    degree = a.sum(1)
    with np.errstate(divide="ignore"):
        root, inverse = (np.where(degree == 0, 0.0, degree**power) for power in (-0.5, -1.0))
    if operator == "adj":
        return a
    if operator == "rw":
        return inverse[:, None] * a
    return root[:, None] * a * root + (a if operator == "sym+adj" else 0)


def looped_readout(
    z: torch.Tensor,
    ptr: torch.Tensor,
    num_branches: int,
    w: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Readout and weights per entry in float64 by loops over graphs; the sum readout where ``w`` is None."""
    z = z.double()
    if z.dim() == 3:
        shifts = torch.arange(z.shape[0])[:, None] * z.shape[1]
        bounds = [(int(a), int(b)) for row in shifts + ptr for a, b in itertools.pairwise(row)]
        z = z.flatten(0, 1)
    else:
        bounds = [(int(a), int(b)) for a, b in itertools.pairwise(ptr)]
    num_graphs = len(bounds) // num_branches
    readout = torch.zeros(num_graphs, num_branches, z.shape[1], dtype=torch.float64)
    weights = torch.zeros(z.shape[0] if index is None else len(index), dtype=torch.float64)
    for segment, (begin, end) in enumerate(bounds):
        branch, graph = divmod(segment, num_graphs)
        rows = z[begin:end] if index is None else z[index[begin:end].long()]
        times = torch.ones(end - begin).double() if count is None else count[begin:end].double()
        if w is None:
            alpha = times
        else:
            beta = torch.relu(rows @ w.double().view(num_branches, -1)[branch])
            mass = times * torch.exp(beta - (beta.max() if len(beta) else 0.0))
            alpha = mass / mass.sum()
        weights[begin:end] = alpha
        readout[graph, branch] = (alpha[:, None] * rows).sum(0)
    return readout.flatten(1), weights


float_dtypes = st.sampled_from([torch.float32, torch.float64])
index_dtypes = st.sampled_from([torch.int32, torch.int64])


@st.composite
def graph_batches(draw: st.DrawFn, weighted: bool = False) -> GraphBatch:
    """Batches with empty graphs, single nodes, isolated nodes, no features, every dtype."""
    return random_graphs(
        draw(st.lists(st.integers(0, 7), max_size=6)),
        draw(st.sampled_from([0.0, 0.2, 0.9])),
        draw(st.integers(0, 40)),
        dtype=draw(float_dtypes),
        index_dtype=draw(index_dtypes),
        weighted=weighted and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def ragged_readouts(draw: st.DrawFn) -> dict:
    """Arguments of a ragged readout: z, w, ptr, index, count, num_branches; rows unused and used often."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    dtype, width, branches = draw(float_dtypes), draw(st.integers(1, 40)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(0, 6), min_size=0, max_size=4)) * branches
    nnz = sum(sizes)
    rows = draw(st.integers(1, 9))
    indexed = draw(st.booleans())
    rows = rows if indexed else nnz
    index = torch.from_numpy(rng.integers(0, rows, nnz)).to(draw(index_dtypes)) if indexed else None
    return {
        "z": torch.from_numpy(rng.standard_normal((rows, width))).to(dtype),
        "w": torch.from_numpy(rng.standard_normal((branches, width))).to(dtype),
        "ptr": torch.tensor([0, *np.cumsum(sizes, dtype=np.int64)]),
        "index": index,
        "count": torch.from_numpy(rng.integers(1, 5, nnz)).to(torch.int32) if draw(st.booleans()) else None,
        "num_branches": branches,
    }


class _Recorder(TorchDispatchMode):
    """Keeps every call of an operation, and what a tensor held before it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        self.before += [(value, value.clone()) for value in tree_leaves(written)]
        result = func(*args, **kwargs or {})
        self.calls.append((func, args, kwargs or {}, result))
        return result


def played_back(step: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
    """What a CUDA graph does, on the CPU: ``trainer._capture`` with operations in the place of kernels.

    The calls of ``step`` are recorded and what they wrote is undone, as a capture runs nothing. A replay makes the same
    calls on the same tensors, and writes what they return where it was at the capture: no Python runs again.
    """
    with _Recorder() as recorder:
        result = step()
    for value, before in reversed(recorder.before):
        value.copy_(before)
    result.fill_(float("nan"))

    @torch.no_grad()
    def replay() -> None:
        for func, args, kwargs, kept in recorder.calls:
            made = func(*args, **kwargs)
            for old, new in zip(tree_leaves(kept), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)

    return replay, result


def work(graphs: GraphBatch, model: SPIN) -> list[torch.Tensor]:
    """Something of everything, large enough for threads."""
    rows = spin_fast.power_features(graphs.indptr, graphs.indices, graphs.x, 2, ptr=graphs.ptr)
    readout = spin_fast.sum_readout(rows, graphs.ptr)
    features = PowerFeatures.from_graphs(graphs, 2)
    model = copy.deepcopy(model)
    scores = model(features)
    scores.square().sum().backward()
    probabilities = spin_fast.training.predict_proba(model, graphs, "sym")
    return [rows, readout, probabilities, scores.detach(), *(parameter.grad for parameter in model.parameters())]


def same_by_any_threads(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``call`` returns, to the bit by 1, 2 and 3 threads; for tests with the fixture ``threads``."""
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(call())
    assert all(torch.equal(one, found[0]) for one in found)
    return found[0]


def send_work(graphs: GraphBatch, model: SPIN, channel: Any) -> None:
    """For a process, which imports this module, but not those of the tests."""
    channel.send([value.numpy() for value in work(graphs, model)])


def run_benchmarks(
    folder: Path, module: str, *options: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``pytest`` of a file of the benchmarks, or of all: in the checkout, or else of what is installed."""
    suite = Path(benchmark_module("harness").__file__).parents[1]
    here = suite.parent == ROOT
    plugin = [] if here else ["-p", "spin_fast.benchmarks.harness.plugin"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", suite / module, *plugin, *options],
        cwd=suite.parent if here else folder,  # the checkout would hide what is installed
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def benchmark_module(name: str):
    """Of this checkout where that is on the path, else of the installed package."""
    pytest.importorskip("cpuinfo", reason="the benchmarks need pytest-benchmark")
    spec = importlib.util.find_spec("benchmarks")
    here = spec is not None and spec.origin is not None and Path(spec.origin).parents[1] == ROOT
    return importlib.import_module(f"{'benchmarks' if here else 'spin_fast.benchmarks'}.{name}")
