"""What ``datasets.summarize`` tells of graphs made by hand."""

from __future__ import annotations

import json

import pytest
import torch

from spin_fast import GraphBatch, datasets


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
