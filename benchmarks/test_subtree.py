"""Colour refinement against PyG's and against plain PyTorch; the counts against grakel's Weisfeiler-Lehman kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spin_fast import GraphBatch, reference, subtree_keys

from .harness import floors
from .harness.floors import Traffic
from .harness.inputs import NUM_BRANCHES, NUM_HOPS
from .harness.plugin import RaceRunner


def test_subtree_keys(race: RaceRunner, dataset: str, graphs: GraphBatch, threads: int) -> None:
    """Rivals get integer labels, or what they need of the edges, made beforehand."""
    arrays = (graphs.indptr, graphs.indices, graphs.x, NUM_HOPS)
    contenders = {
        "subtree_keys": partial(subtree_keys, *arrays),
        "subtree_keys, contents trusted": partial(subtree_keys, *arrays, check_invariants=False),
        "PyTorch": partial(reference.subtree_keys, *arrays),
        "PyG WLConv": pyg_colours(graphs),
    }
    expected = contenders["subtree_keys"]()
    assert torch.equal(contenders["PyTorch"](), expected)
    for keys, colours in zip(expected, contenders["PyG WLConv"](), strict=True):
        pairs = torch.stack([keys, colours]).unique(dim=1)
        assert pairs.shape[1] == len(keys.unique()) == len(colours.unique())
    writes = torch.empty(NUM_BRANCHES, graphs.num_nodes, dtype=torch.int64)
    least = floors.memory(Traffic((graphs.indptr, graphs.indices, graphs.x), writes), threads=threads)
    race("subtree_keys", dataset, contenders, least, ours=2)


def pyg_colours(graphs: GraphBatch) -> Callable[[], Tensor]:
    """PyG keeps a dictionary of the colours that it has met, and gets a new one at every call."""
    conv = pytest.importorskip("torch_geometric.nn").WLConv
    labels = graphs.x.unique(dim=0, return_inverse=True)[1]
    edge_index = graphs.edge_index.long()

    def colours() -> Tensor:
        found = [labels]
        for _ in range(NUM_HOPS):
            found.append(conv()(found[-1], edge_index))
        return torch.stack(found)

    return colours


@pytest.mark.prefer("NCI1", "PROTEINS", "IMDB-BINARY")
def test_subtree_counts(race: RaceRunner, dataset: str, graphs: GraphBatch) -> None:
    """The kernel matrix of all pairs of graphs, for which grakel is made; linear models need the counts alone."""
    pytest.importorskip("grakel", reason="the rival is grakel's kernel: pip install grakel")
    from spin_fast.sklearn import SubtreeCounts

    counts = SubtreeCounts(NUM_HOPS).fit(graphs)

    def kernel() -> np.ndarray:
        rows = counts.transform(graphs)
        return (rows @ rows.T).toarray()

    theirs = grakel_kernel(graphs)
    difference = np.abs(kernel() - theirs()).max()
    assert difference < 0.1, f"only collisions of columns may make a difference, got {difference}"
    contenders: dict[str, Callable[[], Any]] = {
        "counts": partial(counts.transform, graphs),
        "counts and kernel": kernel,
        "grakel": theirs,
    }
    race("Weisfeiler-Lehman subtree kernel", dataset, contenders, ours=2)


def grakel_kernel(graphs: GraphBatch) -> Callable[[], np.ndarray]:
    from grakel import Graph
    from grakel.kernels import VertexHistogram, WeisfeilerLehman

    labels = graphs.x.unique(dim=0, return_inverse=True)[1].tolist()
    made = []
    for graph, first in zip(graphs, graphs.ptr.tolist(), strict=False):
        edges = dict.fromkeys(map(tuple, graph.edge_index.T.tolist()), 1)
        made.append(Graph(edges, {node: labels[first + node] for node in range(graph.num_nodes)}))
    return lambda: WeisfeilerLehman(NUM_HOPS, base_graph_kernel=VertexHistogram, normalize=True).fit_transform(made)
