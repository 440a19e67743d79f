from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import graph_batches, random_graphs
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import GraphBatch
from spin_fast.graphs import ragged_arange


def equal(a: GraphBatch, b: GraphBatch) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("ptr", "indptr", "indices", "x", "y", "edge_weight")]
    return all(one is other or (one is not None and torch.equal(one, other)) for one, other in pairs)


@given(graphs=graph_batches(weighted=True), data=st.data())
def test_selection_equals_graph_by_graph(graphs: GraphBatch, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(graphs) - 1), max_size=5)) if len(graphs) else []
    chosen = graphs[ids]
    assert len(chosen) == len(ids)
    for position, graph in enumerate(ids):
        one = chosen[position]
        begin, end = graphs.ptr[graph], graphs.ptr[graph + 1]
        arcs = slice(int(graphs.indptr[begin]), int(graphs.indptr[end]))
        assert torch.equal(one.x, graphs.x[begin:end])
        assert torch.equal(one.indices, graphs.indices[arcs] - begin.to(graphs.indices.dtype))
        assert torch.equal(one.indptr, graphs.indptr[begin : end + 1] - graphs.indptr[begin])
        assert one.indices.dtype == graphs.indices.dtype


def test_every_kind_of_selection() -> None:
    graphs = random_graphs([2, 0, 3, 1])
    assert equal(graphs[1:3], graphs[[1, 2]])
    assert equal(graphs[::-1], graphs[[3, 2, 1, 0]])
    assert equal(graphs[-1], graphs[[3]])
    assert equal(graphs[np.array([2, 0])], graphs[torch.tensor([2, 0])])
    assert equal(graphs[torch.tensor([True, False, True, False])], graphs[[0, 2]])
    assert [graph.num_nodes for graph in graphs] == [2, 0, 3, 1]
    assert repr(graphs) == f"GraphBatch(4 graphs, 6 nodes, {graphs.num_arcs} arcs, 3 features, torch.float64, cpu)"
    for bad, error in ((4, IndexError), (-5, IndexError), ([0.5], TypeError), ("a", TypeError), ([True], IndexError)):
        with pytest.raises(error, match=r"graph id|mask"):
            graphs[bad]


def test_from_edge_index_gathers_along_the_arcs() -> None:
    edge_index = torch.tensor([[0, 2, 1, 4, 0], [1, 1, 0, 3, 1]])  # source, target; the arc 0 -> 1 twice
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    batch = torch.tensor([0, 0, 0, 2, 2])
    graphs = GraphBatch.from_edge_index(
        edge_index, torch.eye(5), batch, num_graphs=4, y=torch.arange(4), edge_weight=weight
    )
    assert graphs.ptr.tolist() == [0, 3, 3, 5, 5]
    assert graphs.indptr.tolist() == [0, 1, 4, 4, 5, 5]
    assert graphs.indices.tolist() == [1, 0, 0, 2, 4]
    assert graphs.edge_weight.tolist() == [3.0, 1.0, 5.0, 2.0, 4.0]
    assert len(GraphBatch.from_edge_index(edge_index, torch.eye(5))) == 1
    assert len(GraphBatch.from_edge_index(torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 3))) == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ptr": torch.tensor([0, 2, 4])}, ValueError, "ptr must end with the number of nodes"),
        ({"indices": torch.tensor([9] * 4)}, ValueError, "indices must be in"),
        ({"x": torch.ones(5, 2, dtype=torch.int64)}, TypeError, "x must be float32 or float64"),
        ({"y": torch.ones(3)}, ValueError, "y must be a tensor whose first axis has 2 entries"),
        ({"y": [0, 1]}, ValueError, "y must be a tensor"),
        ({"edge_weight": torch.ones(3)}, ValueError, "edge_weight must have shape"),
    ],
)
def test_bad_input_is_named(change: dict, error: type, message: str) -> None:
    good = {
        "ptr": torch.tensor([0, 2, 5]),
        "indptr": torch.tensor([0, 1, 2, 3, 4, 4]),
        "indices": torch.tensor([1, 0, 3, 2]),
        "x": torch.ones(5, 2),
    }
    GraphBatch(**good)
    with pytest.raises(error, match=message):
        GraphBatch(**good | change)


def test_from_edge_index_names_bad_input() -> None:
    x, edge_index = torch.ones(3, 1), torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"edge_index must be in \[0, 3\), got 1..3"):
        GraphBatch.from_edge_index(edge_index + 1, x)
    with pytest.raises(ValueError, match=r"edge_weight must have shape \[2\], got \[9\]"):
        GraphBatch.from_edge_index(edge_index, x, edge_weight=torch.ones(9))
    with pytest.raises(ValueError, match="batch must be ascending"):
        GraphBatch.from_edge_index(edge_index, x, torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match="num_graphs must be at least 2, got 1"):
        GraphBatch.from_edge_index(edge_index, x, torch.tensor([0, 0, 1]), num_graphs=1)
    with pytest.raises(ValueError, match="indices must stay inside the graph"):
        GraphBatch.from_edge_index(edge_index, x, torch.tensor([0, 0, 1]))


def test_ragged_arange() -> None:
    assert ragged_arange(torch.tensor([2, 9, 0]), torch.tensor([3, 0, 2])).tolist() == [2, 3, 4, 0, 1]
    assert ragged_arange(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)).tolist() == []


def test_non_contiguous_arrays() -> None:
    graphs = random_graphs([3, 4])
    pairs = {name: torch.stack([getattr(graphs, name)] * 2, 1)[:, 0] for name in ("ptr", "indptr", "indices", "x")}
    assert equal(GraphBatch(**pairs), graphs)
    assert graphs != random_graphs([3, 4])  # compared by identity


def test_arrays_are_contiguous() -> None:
    graphs = random_graphs([3, 2], num_features=4)
    columns = graphs.x.t().contiguous().t()
    assert not columns.is_contiguous()
    assert replace(graphs, x=columns).x.is_contiguous()


@given(graphs=graph_batches(), num_nodes=st.integers(0, 30), num_arcs=st.integers(0, 60))
def test_chunks_are_the_graphs_in_order(graphs: GraphBatch, num_nodes: int, num_arcs: int) -> None:
    """As many graphs as fit, or one."""
    bounds = list(graphs.chunks(num_nodes, num_arcs))

    def fits(part: GraphBatch) -> bool:
        return part.num_nodes <= num_nodes and part.num_arcs <= num_arcs

    for begin, end in bounds:
        assert fits(graphs[begin:end]) or end == begin + 1
        assert end == len(graphs) or not fits(graphs[begin : end + 1])
    assert [0, *(end for _, end in bounds)] == [*(begin for begin, _ in bounds), len(graphs)]
