"""Where nodes are drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import random_graphs

from spin_fast import GraphBatch
from spin_fast.graphs.drawing import draw

networkx = pytest.importorskip("networkx")


def graph_of(pairs: list[tuple[int, int]], num_nodes: int, undirected: bool = True) -> GraphBatch:
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    return GraphBatch.from_edge_index(
        edges, torch.ones(num_nodes, 1), torch.zeros(num_nodes, dtype=torch.int64), undirected=undirected
    )


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 20, 150])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.6])
def test_no_two_nodes_coincide(num_nodes: int, density: float) -> None:
    graph = random_graphs([num_nodes], density)
    first, second = draw(graph), draw(graph)
    assert np.array_equal(first.positions, second.positions)
    assert first.positions.shape == (num_nodes, 2)
    apart = np.linalg.norm(first.positions[:, None] - first.positions, axis=2) + 9 * np.eye(num_nodes)
    assert apart.min() > 1e-3


@pytest.mark.parametrize("kind", [networkx.star_graph, networkx.path_graph, networkx.cycle_graph])
def test_large_graphs_without_shape(kind) -> None:
    """Leaves of a star are as far from everything."""
    drawn = draw(GraphBatch.from_networkx(kind(200), x=None)[[0]])
    assert np.isfinite(drawn.positions).all()
    assert len(np.unique(drawn.positions.round(6), axis=0)) == len(drawn.positions)


def test_lines() -> None:
    drawn = draw(graph_of([(0, 1), (1, 0), (2, 1), (2, 2), (1, 3), (1, 3)], 5, undirected=False))
    assert drawn.pairs == [(0, 1), (1, 3), (2, 1)]
    assert drawn.directed == [False, True, True]
    assert drawn.bonds == [1, 1, 1]
    assert drawn.labels == ["0", "1", "2", "3", "4"]


def test_components_are_apart() -> None:
    drawn = draw(graph_of([(0, 1), (1, 2), (3, 4)], 6))
    boxes = [drawn.positions[nodes] for nodes in ([0, 1, 2], [3, 4], [5])]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        gaps = np.maximum(boxes[one].min(0) - boxes[other].max(0), boxes[other].min(0) - boxes[one].max(0))
        assert gaps.max() >= 0.99


def test_molecules() -> None:
    pytest.importorskip("rdkit")
    ring = graph_of([(0, 1), *((i, i + 1) for i in range(1, 6)), (1, 6)], 7)
    drawn = draw(ring, "Oc1ccccc1")
    assert drawn.labels == ["O0", *(f"C{i}" for i in range(1, 7))]
    assert sorted(drawn.bonds) == [1, 1, 1, 1, 2, 2, 2]
    lengths = [np.linalg.norm(drawn.positions[u] - drawn.positions[v]) for u, v in drawn.pairs]
    assert lengths == pytest.approx([1] * 7, rel=0.05)
    for other in ("CCO", "OC1CCCCCC1", "not SMILES", None):
        assert draw(ring, other).labels == list(map(str, range(7)))
