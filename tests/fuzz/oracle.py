"""What the package computes, by loops over float64 numbers; nothing of the package is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

Array = np.ndarray
State = Mapping[str, Array]
Segment = tuple[Array, Array]  # the rows that it has, and how often


def falls(offsets: Array, end: int) -> bool:
    """Whether offsets do not ascend from 0 to ``end``."""
    values = [int(value) for value in offsets]
    return not values or values[0] != 0 or values[-1] != end or any(b < a for a, b in pairwise(values))


def outside(values: Array, begin: int, end: int) -> bool:
    """Whether a number is not in the range."""
    return any(not begin <= int(value) < end for value in values.flat)


def wrong_array(ptr: Array | None, indptr: Array, indices: Array, num_nodes: int) -> str | None:
    """The array of a block-diagonal adjacency that is wrong, if any is."""
    if len(indptr) != num_nodes + 1 or falls(indptr, len(indices)):
        return "indptr"
    if ptr is not None and falls(ptr, num_nodes):
        return "ptr"
    for first, last in pairwise(ptr) if ptr is not None else [(0, num_nodes)]:
        if outside(indices[int(indptr[first]) : int(indptr[last])], first, last):
            return "indices"
    return None


def wrong_segments(arrays: Mapping[str, Array], num_rows: int, branches: int = 1) -> str | None:
    """The array that is wrong, if any is, of segments and of the graphs chosen of them."""
    ptr, index, count, parts, ids = map(arrays.get, ("ptr", "index", "count", "parts", "ids"))
    assert ptr is not None
    if parts is not None:
        if outside(parts, 0, num_rows):
            return "parts"
        num_rows = len(parts)
    num_entries = num_rows if index is None else len(index)
    if count is not None and len(count) != num_entries:
        return "count"
    if falls(ptr, num_entries) or (len(ptr) - 1) % branches:
        return "ptr"
    if index is not None and outside(index, 0, num_rows):
        return "index"
    if count is not None and outside(count, 1, 2**31):
        return "count"
    return "ids" if ids is not None and outside(ids, 0, (len(ptr) - 1) // branches) else None


def powers(
    indptr: Array, indices: Array, x: Array, num_hops: int, operator: str, weight: Array | None
) -> tuple[Array, Array]:
    """All powers, and those of absolute values, by which errors are measured."""
    num_nodes = len(x)
    weights = np.ones(len(indices)) if weight is None else weight.astype(np.float64)
    degree = np.array([math.fsum(weights[indptr[v] : indptr[v + 1]]) for v in range(num_nodes)])

    def factor(v: int, u: int) -> float:
        if operator == "adj":
            return 1.0
        if operator == "rw":
            return 1.0 / degree[v] if degree[v] != 0 else 0.0
        both = degree[v] * degree[u]
        normalised = 1.0 / math.sqrt(degree[v]) / math.sqrt(degree[u]) if both != 0 else 0.0
        return normalised + (operator == "sym+adj")

    made, sizes = [x.astype(np.float64)], [np.abs(x.astype(np.float64))]
    for _ in range(num_hops):
        row, size = np.zeros_like(made[0]), np.zeros_like(made[0])
        for v in range(num_nodes):
            for e in range(indptr[v], indptr[v + 1]):
                by = weights[e] * factor(v, indices[e])
                row[v] += by * made[-1][indices[e]]
                size[v] += abs(by) * sizes[-1][indices[e]]
        made.append(row)
        sizes.append(size)
    return np.stack(made), np.stack(sizes)


def entries_of(arrays: Mapping[str, Array], branches: int = 1) -> list[list[Segment]]:
    """The segments of each branch."""
    ptr, every = arrays["ptr"], np.arange(arrays["ptr"][-1])
    index, count = arrays.get("index", every), arrays.get("count", np.ones_like(every))
    segments = [(index[first:last], count[first:last]) for first, last in pairwise(ptr.tolist())]
    number = len(segments) // branches
    return [segments[branch * number : (branch + 1) * number] for branch in range(branches)]


def readout(z: Array, w: Array | None, segments: list[Segment]) -> Array:
    """The sum of the rows of each segment, weighted by the attention of ``w`` if there is one."""
    out = np.zeros((len(segments), z.shape[1]))
    for s, (rows, times) in enumerate(segments):
        if w is not None and len(rows):
            logits = np.maximum(0, z[rows] @ w)
            times = times * np.exp(logits - logits.max())
            times = times / times.sum()
        out[s] = times @ z[rows]
    return out


def branch_readout(state: State, group: str, rows: list[Array], segments: list[list[Segment]], slope: float) -> Array:
    """The readouts of a group of branches side by side, by parameters with the names of those of a ``SPIN``."""
    w, readouts = state.get(f"{group}.attention"), []
    for branch, (z, of_branch) in enumerate(zip(rows, segments, strict=True)):
        for depth in range(sum(name.startswith(f"{group}.layers") for name in state) // 2):
            z = z @ state[f"{group}.layers.{depth}.weight"][branch] + state[f"{group}.layers.{depth}.bias"][branch]
            if f"{group}.norms.{depth}.weight" in state:
                scale, shift, mean, variance = (
                    state[f"{group}.norms.{depth}.{name}"].reshape(len(rows), -1)[branch]
                    for name in ("weight", "bias", "running_mean", "running_var")
                )
                z = (z - mean) / np.sqrt(variance + 1e-5) * scale + shift
            z = np.where(z > 0, z, slope * z)
        readouts.append(readout(z, None if w is None else w[branch], of_branch))
    return np.concatenate(readouts, axis=1)


def classifier(state: State, rows: Array, slope: float) -> Array:
    """The class scores of readouts."""
    for name in state:
        if name.startswith("classifier") and name.endswith("weight"):
            rows = rows if name == "classifier.0.weight" else np.where(rows > 0, rows, slope * rows)
            rows = rows @ state[name].T + state[name.replace("weight", "bias")]
    return rows


def colours(indptr: Array, indices: Array, labels: Sequence[bytes], num_hops: int) -> list[list[int]]:
    """Colour refinement: numbers of colours, by hop and node."""
    names: dict[object, int] = {}
    found = [[names.setdefault(("", label), len(names)) for label in labels]]
    for hop in range(num_hops):
        before = found[-1]
        seen = [tuple(sorted(before[u] for u in indices[indptr[v] : indptr[v + 1]])) for v in range(len(labels))]
        found.append([names.setdefault((hop, before[v], seen[v]), len(names)) for v in range(len(labels))])
    return found


def log_softmax(scores: Array) -> Array:
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def cross_entropy(scores: Array, y: Array, weight: Array) -> float:
    """The mean over graphs, each of its weight; 0 if all weigh 0."""
    losses = -log_softmax(scores)[np.arange(len(y)), y]
    return float(weight @ losses / max(weight.sum(), np.finfo(float).tiny))
