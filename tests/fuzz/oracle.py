"""What the package computes, by loops over float64 numbers; nothing of the package is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Array = np.ndarray


def wrong_array(ptr: Array | None, indptr: Array, indices: Array, num_nodes: int) -> str | None:
    """The array of a block-diagonal adjacency that is wrong, if any is."""
    for name, offsets, end in (("indptr", indptr, len(indices)), ("ptr", ptr, num_nodes)):
        if offsets is not None:
            values = [int(value) for value in offsets]
            if values[0] != 0 or values[-1] != end or any(b < a for a, b in pairwise(values)):
                return name
    for first, last in pairwise(ptr) if ptr is not None else [(0, num_nodes)]:
        for column in indices[int(indptr[first]) : int(indptr[last])]:
            if not first <= column < last:
                return "indices"
    return None


def wrong_segments(ptr: Array, index: Array | None, count: Array | None, num_rows: int) -> str | None:
    """The array of the segments of a readout that is wrong, if any is."""
    values = [int(value) for value in ptr]
    end = num_rows if index is None else len(index)
    if values[0] != 0 or values[-1] != end or any(b < a for a, b in pairwise(values)):
        return "ptr"
    if index is not None and any(not 0 <= row < num_rows for row in index):
        return "index"
    if count is not None and any(number < 1 for number in count):
        return "count"
    return None


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


def entries_of(ptr: Array, index: Array | None, count: Array | None) -> list[list[tuple[int, int]]]:
    """For each segment the rows that it has, and how often."""
    return [
        [(int(e if index is None else index[e]), int(1 if count is None else count[e])) for e in range(first, last)]
        for first, last in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)
    ]


def sum_readout(z: Array, segments: list[list[tuple[int, int]]]) -> Array:
    out = np.zeros((len(segments), z.shape[1]))
    for s, entries in enumerate(segments):
        for row, times in entries:
            out[s] += times * z[row].astype(np.float64)
    return out


def attention_readout(z: Array, w: Array, segments: list[list[tuple[int, int]]]) -> Array:
    out = np.zeros((len(segments), z.shape[1]))
    for s, entries in enumerate(segments):
        if not entries:
            continue
        logits = [max(0.0, float(np.dot(z[row].astype(np.float64), w.astype(np.float64)))) for row, _ in entries]
        scales = [times * math.exp(logit - max(logits)) for logit, (_, times) in zip(logits, entries, strict=True)]
        for scale, (row, _) in zip(scales, entries, strict=True):
            out[s] += scale / math.fsum(scales) * z[row].astype(np.float64)
    return out


def mlp(rows: Array, weights: Sequence[Array], biases: Sequence[Array], slope: float) -> Array:
    """Linear layers, each with its LeakyReLU."""
    for weight, bias in zip(weights, biases, strict=True):
        rows = (
            np.array([[math.fsum(row * column) for column in weight.T] for row in rows]).reshape(-1, len(bias)) + bias
        )
        rows = np.where(rows > 0, rows, slope * rows)
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


def cross_entropy(scores: Array, y: Array) -> float:
    """The mean over graphs."""
    losses = [
        max(row) + math.log(math.fsum(np.exp(row - max(row)))) - row[label]
        for row, label in zip(scores, y, strict=True)
    ]
    return math.fsum(losses) / len(losses)
