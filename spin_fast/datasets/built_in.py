"""Data sets without files: handwritten digits as graphs of inked pixels, and seeded random graphs, all in numpy.

Of Erdos-Renyi, random regular and power-law (Chung-Lu) graphs, the parameter that shapes them takes one value or one
per class: graph ``g`` has class ``g % C`` and is drawn with the value of its class, so that the label is what a model
has to read off the graph. One value gives a single class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .._common import check
from .._common.indexing import offsets
from ..graphs.batch import GraphBatch
from .common import assemble

SWITCHING_ROUNDS = 10
TOP_UP_ROUNDS = 50
HALF_OF_THE_NEIGHBOURS = ((0, 1), (1, 0), (1, 1), (1, -1))


def digits(*, dtype: torch.dtype = torch.float32) -> GraphBatch:
    """The 1,797 scans of 8 x 8 pixels that come with scikit-learn, about 33 nodes and 89 undirected edges each.

    A node is an inked pixel (ink > 0), its features are ``(ink / 16, row / 7, column / 7)``; an edge joins two inked
    pixels that touch, corners included.

    Args:
        dtype: float32 or float64, of the features.

    Returns:
        The graphs, ``x`` ``[N, 3]``, ``y`` int64 ``[1797]``: the digit 0..9.
    """
    from sklearn.datasets import load_digits

    scans = load_digits()
    ink = scans.images
    inked = ink > 0
    _, row, column = np.nonzero(inked)
    node = np.cumsum(inked).reshape(inked.shape) - 1
    ends: list[np.ndarray] = []
    for down, right in HALF_OF_THE_NEIGHBOURS:
        here = np.s_[:, : 8 - down, max(0, -right) : 8 - max(0, right)]
        there = np.s_[:, down:, max(0, right) : 8 + min(0, right)]
        both = inked[here] & inked[there]
        ends.append(np.stack([node[here][both], node[there][both]]))
    ptr = offsets(torch.from_numpy(inked.sum(axis=(1, 2))))
    x = torch.from_numpy(np.stack([ink[inked] / 16, row / 7, column / 7], axis=1)).to(dtype)
    y = torch.from_numpy(scans.target.astype(np.int64))
    return assemble(np.concatenate(ends, axis=1), ptr, x, y, undirected=True)


def erdos_renyi(
    num_graphs: int = 1000,
    num_nodes: int = 100,
    p: float | Sequence[float] = 0.05,
    num_features: int | None = 50,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
) -> GraphBatch:
    """Graphs in which each pair of nodes is joined with probability ``p``, independently of the others.

    Args:
        num_graphs: how many graphs.
        num_nodes: nodes of each.
        p: in [0, 1], one value or one per class; the label is which of them a graph was drawn with.
        num_features: columns of standard normal features; None for the degree.
        seed: the same seed gives the same bits.
        dtype: float32 or float64, of the features.

    Returns:
        The graphs, each undirected edge in both directions, ``y`` int64 ``[num_graphs]``.

    Raises:
        ValueError: a number is out of range.
    """

    def draw(rng: np.random.Generator, graphs: np.ndarray, chance: float) -> np.ndarray:
        if not 0 <= chance <= 1:
            raise ValueError(f"p must be in [0, 1], got {chance}")
        pairs = num_nodes * (num_nodes - 1) // 2
        graph, pair = np.divmod(_bernoulli(rng, len(graphs) * pairs, chance), max(pairs, 1))
        # Pair number j (j - 1) / 2 + i stands for the nodes i < j.
        j = ((1 + np.sqrt(8.0 * pair + 1)) / 2).astype(np.int64)
        j -= j * (j - 1) // 2 > pair
        return np.stack([pair - j * (j - 1) // 2, j]) + graphs[graph] * num_nodes

    return _draw_classes(draw, "p", p, num_graphs, num_nodes, num_features, seed, dtype)


def random_regular(
    num_graphs: int = 1000,
    num_nodes: int = 100,
    degree: int | Sequence[int] = 4,
    num_features: int | None = None,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
) -> GraphBatch:
    """Simple graphs in which every node has exactly ``degree`` neighbours.

    Each starts as a circulant graph and is mixed by random switches of two edges, which keep every degree; the outcome
    is close to uniform over all such graphs.

    Args:
        degree: below ``num_nodes``, and even where ``num_nodes`` is odd; one value or one per class. The label is which
            of them a graph has.
        num_graphs, num_nodes, num_features, seed, dtype: as for :func:`erdos_renyi`, and so is what it returns and
            raises.
    """

    def draw(rng: np.random.Generator, graphs: np.ndarray, neighbours: float) -> np.ndarray:
        if not 0 <= neighbours < max(num_nodes, 1) or neighbours != int(neighbours):
            raise ValueError(f"degree must be an integer in [0, {num_nodes}) for {num_nodes} nodes, got {neighbours}")
        if num_nodes * neighbours % 2:
            raise ValueError(f"degree must be even for an odd number of nodes, got {neighbours} for {num_nodes} nodes")
        node = np.arange(num_nodes)
        rings = [np.stack([node, (node + step) % num_nodes]) for step in range(1, int(neighbours) // 2 + 1)]
        if neighbours % 2:
            rings.append(np.stack([node, node + num_nodes // 2])[:, : num_nodes // 2])
        if not rings:
            return np.empty((2, 0), np.int64)
        one = np.concatenate(rings, axis=1)
        many = (one[:, None, :] + graphs[None, :, None] * num_nodes).reshape(2, -1)
        return _switch(rng, many, one.shape[1], num_graphs * num_nodes)

    return _draw_classes(draw, "degree", degree, num_graphs, num_nodes, num_features, seed, dtype)


def power_law(
    num_graphs: int = 1,
    num_nodes: int = 1_000_000,
    mean_degree: float = 20.0,
    exponent: float | Sequence[float] = 2.5,
    num_features: int | None = None,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
) -> GraphBatch:
    """Graphs whose degrees follow a power law ``k ** -exponent`` (Chung and Lu's model), a few hubs and many leaves.

    Both ends of an edge are drawn in proportion to the nodes' weights; self-loops and repeats are drawn anew, which
    flattens the largest hubs a little. A million nodes with twenty million edges take some ten seconds.

    Args:
        mean_degree: over all graphs of a class, met exactly up to rounding.
        exponent: above 2, one value or one per class; the label is which of them a graph was drawn with.
        num_graphs, num_nodes, num_features, seed, dtype: as for :func:`erdos_renyi`, and so is what it returns.

    Raises:
        ValueError: a number is out of range, or so many edges cannot be placed.
    """

    def draw(rng: np.random.Generator, graphs: np.ndarray, gamma: float) -> np.ndarray:
        if not gamma > 2:
            raise ValueError(f"exponent must be above 2, got {gamma}")
        if not check.number("mean_degree", mean_degree, 0) < max(num_nodes, 1):
            raise ValueError(f"mean_degree must be in [0, {num_nodes}) for {num_nodes} nodes, got {mean_degree}")
        wanted = round(len(graphs) * num_nodes * mean_degree / 2)
        # Shuffled, or else the hubs would be neighbours in memory, which no real graph offers.
        order = rng.permuted(np.tile(np.arange(num_nodes), (len(graphs), 1)), axis=1) + graphs[:, None] * num_nodes
        keys = np.empty(0, np.int64)
        for _ in range(TOP_UP_ROUNDS):
            missing = wanted - len(keys)
            if missing <= 0:
                break
            graph = rng.integers(len(graphs), size=missing + missing // 8 + 16)
            # The quantile function of the weights i ** (-1 / (gamma - 1)), i = 0 .. num_nodes.
            ranks = num_nodes * rng.random((2, len(graph))) ** ((gamma - 1) / (gamma - 2))
            ends = np.sort(order[graph, ranks.astype(np.int64)], axis=0)
            ends = ends[:, ends[0] < ends[1]]
            keys = np.unique(np.concatenate([keys, ends[0] * (num_graphs * num_nodes) + ends[1]]))
        if len(keys) < wanted:
            raise ValueError(f"mean_degree {mean_degree} is too large for exponent {gamma} and {num_nodes} nodes")
        keys = np.delete(keys, rng.choice(len(keys), len(keys) - wanted, replace=False, shuffle=False))
        return np.stack(np.divmod(keys, num_graphs * num_nodes))

    return _draw_classes(draw, "exponent", exponent, num_graphs, num_nodes, num_features, seed, dtype)


def csl(
    num_nodes: int = 41,
    skips: Sequence[int] = (2, 3, 4, 5, 6, 9, 11, 12, 13, 16),
    graphs_per_class: int = 15,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
) -> GraphBatch:
    """Circular skip links (Murphy et al., 2019): a ring, and from each node a link that skips to the ``s``-th next.

    The graphs of a class are one graph, its nodes numbered anew at random. All graphs are 4-regular and of one size, so
    that colour refinement (1-WL) sees no difference between any two, and no method bounded by it can do better than
    guess: neither message passing nor SPIN, whose rows are then the same for every node of every graph. It takes node
    features that tell nodes apart.

    Args:
        num_nodes: nodes of each graph, at least 5.
        skips: the ``s`` of each class, from 2 to below ``num_nodes / 2``. The published ones give ten graphs no two of
            which are isomorphic; others may not.
        graphs_per_class: how often each is numbered anew.
        seed: the same seed gives the same bits.
        dtype: float32 or float64, of the features.

    Returns:
        The graphs by class, each edge in both directions; ``x`` ``[N, 1]`` the degree, always 4; ``y`` int64.

    Raises:
        ValueError: a number is out of range.
    """
    rng = np.random.default_rng(check.integer("seed", seed, 0))
    check.integer("num_nodes", num_nodes, 5)
    check.integer("graphs_per_class", graphs_per_class, 1)
    skips = check.integers("skips", skips, 2)
    if not skips:
        raise ValueError("skips must hold at least one number, got none")
    if max(skips) >= num_nodes / 2:
        raise ValueError(f"skips must be below {num_nodes / 2} for {num_nodes} nodes, got {max(skips)}")
    num_graphs = len(skips) * graphs_per_class
    number = rng.permuted(np.tile(np.arange(num_nodes), (num_graphs, 1)), axis=1)
    number += np.arange(num_graphs)[:, None] * num_nodes
    node = np.arange(num_nodes)
    step = np.stack([np.ones(num_graphs, np.int64), np.repeat(skips, graphs_per_class)])
    start = np.broadcast_to(number, (2, num_graphs, num_nodes)).ravel()
    end = np.take_along_axis(number[None], (node + step[:, :, None]) % num_nodes, axis=2).ravel()
    ptr = torch.arange(num_graphs + 1) * num_nodes
    y = torch.arange(len(skips)).repeat_interleave(graphs_per_class)
    return assemble(np.stack([start, end]), ptr, None, y, undirected=True, dtype=dtype)


def _draw_classes(
    draw: Callable[[np.random.Generator, np.ndarray, float], np.ndarray],
    name: str,
    values: float | Sequence[float],
    num_graphs: int,
    num_nodes: int,
    num_features: int | None,
    seed: int,
    dtype: torch.dtype,
) -> GraphBatch:
    """Draw the undirected edges ``[2, ...]`` of each class by its value, and features."""
    rng = np.random.default_rng(check.integer("seed", seed, 0))
    check.integer("num_graphs", num_graphs, 1)
    check.integer("num_nodes", num_nodes, 1)
    per_class = np.atleast_1d(values)
    if per_class.dtype.kind not in "iuf" or per_class.ndim != 1 or not 1 <= len(per_class) <= num_graphs:
        raise ValueError(f"{name} must be one number or one per class, at most {num_graphs} (graphs), got {values!r}")
    number = np.arange(num_graphs)
    edges = [draw(rng, number[label :: len(per_class)], value) for label, value in enumerate(per_class.tolist())]
    x = None
    if num_features is not None:
        shape = (num_graphs * num_nodes, check.integer("num_features", num_features, 0))
        x = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    ptr, y = torch.arange(num_graphs + 1) * num_nodes, torch.from_numpy(number % len(per_class))
    return assemble(np.concatenate(edges, axis=1), ptr, x, y, undirected=True, dtype=dtype)


def _bernoulli(rng: np.random.Generator, trials: int, p: float) -> np.ndarray:
    """Which of ``trials`` trials succeed, ascending: only the successes are drawn, by the gaps between them."""
    if trials == 0 or p == 0:
        return np.empty(0, np.int64)
    hits = np.empty(0, np.int64)
    last = -1
    while last < trials:
        expected = (trials - last) * p
        # A gap beyond the end ends the walk; cut there, the sum of gaps cannot overflow for a tiny p.
        gaps = np.minimum(rng.geometric(p, int(expected + 4 * expected**0.5) + 16), trials + 1)
        more = last + np.cumsum(gaps)
        hits, last = np.concatenate([hits, more]), int(more[-1])
    return hits[hits < trials]


def _switch(rng: np.random.Generator, edges: np.ndarray, per_graph: int, num_nodes: int) -> np.ndarray:
    """Mix simple graphs ``[2, graphs * per_graph]``: edges ``a-b, c-d`` become ``a-d, c-b`` where they stay simple."""

    def key(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.minimum(one, other) * num_nodes + np.maximum(one, other)

    edges, half = edges.reshape(2, -1, per_graph), per_graph // 2
    for _ in range(SWITCHING_ROUNDS):
        edges = np.take_along_axis(edges, rng.random(edges.shape[1:]).argsort(axis=1)[None], axis=2)
        (a, c), (b, d) = edges[:, :, : 2 * half].reshape(2, len(edges[0]), 2, half).transpose(0, 2, 1, 3)
        turned = rng.random(c.shape) < 0.5
        c, d = np.where(turned, d, c), np.where(turned, c, d)
        new = np.stack([key(a, d), key(c, b)])
        _, which, times = np.unique(new, return_inverse=True, return_counts=True)
        simple = (times[which.reshape(new.shape)] == 1) & ~np.isin(new, key(*edges))
        switched = simple.all(axis=0) & (a != d) & (c != b)
        edges = np.concatenate(
            [
                np.stack([a, np.where(switched, d, b)]),
                np.stack([c, np.where(switched, b, d)]),
                edges[:, :, 2 * half :],
            ],
            axis=2,
        )
    return edges.reshape(2, -1)
