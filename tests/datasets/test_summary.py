"""What ``datasets.summarize`` tells of graphs made by hand."""

from __future__ import annotations

import json

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import GraphBatch, datasets
from spin_fast.datasets import summary


def test_summary_of_three_graphs() -> None:
    """Two equal graphs whose labels differ, and one with a repeated self-loop; two nodes without a neighbour."""
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 4], [1, 0, 3, 2, 4, 4]])
    batch = torch.tensor([0, 0, 1, 1, 2, 2])
    graphs = GraphBatch.from_edge_index(edge_index, torch.ones(6, 1), batch, y=torch.tensor([0, 1, 1]))
    read = datasets.Folder(graphs, ["a", "b", "c"], ["no", "yes"], None, 0)
    split = datasets.Split(*(torch.tensor([graph]) for graph in (0, 2, 1)))
    facts = datasets.summarize(read, 2, ("sym", "adj"), {"mine": split})
    assert (facts["graphs"], facts["isolated_nodes"], facts["self_loops"], facts["repeated_edges"]) == (3, 2, 1, 1)
    assert facts["edges"] == {"total": 3, "mean": 1, "median": 1, "min": 1, "max": 1}
    assert facts["density"]["max"] == 1
    assert not facts["directed"]
    assert facts["classes"] == [{"name": "no", "graphs": 1}, {"name": "yes", "graphs": 2}]
    assert (facts["operator"], facts["hops"], facts["bytes"]["powers"]) == ("sym,adj", 2, 5 * 6 * 4)
    assert facts["duplicates"] == {
        "graphs": 2,
        "distinct": 2,
        "contradicting": 2,
        "best_accuracy": pytest.approx(2 / 3),
    }
    (mine,) = facts["splits"]
    assert mine == {"name": "mine", "train": 1, "validation": 1, "test": 1, "validation_seen": 0, "test_seen": 1}
    assert json.loads(json.dumps(facts)) == facts


@given(st.data())
def test_structure_agrees_with_networkx(data: st.DataObject) -> None:
    directed = data.draw(st.booleans())
    graphs = []
    for size in data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4)):
        pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)) if size else st.nothing()
        graph = networkx.DiGraph() if directed else networkx.Graph()
        graph.add_nodes_from(range(size))
        graph.add_edges_from(data.draw(st.lists(pairs, max_size=12)) if size else [])
        graphs.append(graph)
    facts = summary._structure(GraphBatch.from_networkx(graphs))
    if not facts["directed"] and directed:  # by chance each edge has its reverse
        graphs = [graph.to_undirected() for graph in graphs]
    assert facts["directed"] <= directed
    assert facts["nodes"]["total"] == sum(len(graph) for graph in graphs)
    assert facts["edges"]["total"] == sum(graph.number_of_edges() for graph in graphs)
    assert facts["edges"]["median"] == np.median([graph.number_of_edges() for graph in graphs])
    assert facts["self_loops"] == sum(networkx.number_of_selfloops(graph) for graph in graphs)
    for graph in graphs:
        graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    assert facts["isolated_nodes"] == sum(networkx.number_of_isolates(graph) for graph in graphs)
    assert facts["density"]["mean"] == pytest.approx(np.mean([networkx.density(graph) for graph in graphs]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
def test_bound_of_the_accuracy(graphs: list[tuple[int, int]]) -> None:
    """Against all that a classifier could answer for graphs of each kind."""
    kinds = [kind for kind, _ in graphs]
    first = torch.tensor([kinds.index(kind) for kind in kinds])
    found = summary._duplicates(first, torch.tensor([label for _, label in graphs]))
    right = sum(max(graphs.count((kind, label)) for label in range(3)) for kind in {*kinds})
    assert found["best_accuracy"] == right / len(graphs)
    assert found["graphs"] == sum(kinds.count(kind) > 1 for kind in kinds)
    assert found["contradicting"] == sum(len({label for k, label in graphs if k == kind}) > 1 for kind in kinds)


def test_duplicates_across_a_split() -> None:
    split = datasets.Split(*map(torch.tensor, ([0, 1, 2], [3, 4], [5, 6, 7])))
    seen = summary._overlap("x", split, torch.tensor([0, 0, 2, 2, 4, 4, 0, 2]))
    assert seen == {"name": "x", "train": 3, "validation": 2, "test": 3, "validation_seen": 1, "test_seen": 2}
