from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import equal, float_dtypes, graph_batches, index_dtypes, random_graphs
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import GraphBatch
from spin_fast._common.indexing import ragged_arange


@given(graphs=graph_batches(weighted=True), data=st.data())
def test_selection_equals_graph_by_graph(graphs: GraphBatch, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(graphs) - 1), max_size=5)) if len(graphs) else []
    chosen = graphs[ids]
    assert len(chosen) == len(ids)
    for position, graph in enumerate(ids):
        one = chosen[position]
        begin, end = graphs.ptr[graph], graphs.ptr[graph + 1]
        edges = slice(int(graphs.indptr[begin]), int(graphs.indptr[end]))
        assert torch.equal(one.x, graphs.x[begin:end])
        assert torch.equal(one.indices, graphs.indices[edges] - begin.to(graphs.indices.dtype))
        assert torch.equal(one.indptr, graphs.indptr[begin : end + 1] - graphs.indptr[begin])
        assert one.indices.dtype == graphs.indices.dtype


def test_every_kind_of_selection() -> None:
    graphs = random_graphs([2, 0, 3, 1])
    assert equal(graphs[1:3], graphs[[1, 2]])
    assert equal(graphs[::-1], graphs[[3, 2, 1, 0]])
    assert equal(graphs[1:3:-1], graphs[[]])
    assert equal(graphs[-1], graphs[[3]])
    assert equal(graphs[np.arange(4)[::-1]], graphs[::-1])
    for three in (torch.tensor(3), torch.tensor(3, dtype=torch.int32), np.int64(3), np.array(3), torch.tensor(-1)):
        assert equal(graphs[three], graphs[[3]])
    assert equal(graphs[np.array([2, 0])], graphs[torch.tensor([2, 0])])
    assert equal(graphs[torch.tensor([True, False, True, False])], graphs[[0, 2]])
    assert [graph.num_nodes for graph in graphs] == [2, 0, 3, 1]
    assert repr(graphs) == f"GraphBatch(4 graphs, 6 nodes, {graphs.num_edges} edges, 3 features, torch.float64, cpu)"
    scalars = ((torch.tensor(4), IndexError), (torch.tensor(0.5), TypeError), (torch.tensor(True), IndexError))
    for bad, error in (
        (4, IndexError),
        (-5, IndexError),
        ([0.5], TypeError),
        ("a", TypeError),
        ([True], IndexError),
        *scalars,
    ):
        with pytest.raises(error, match=r"graph id|mask"):
            graphs[bad]


def test_from_edge_index_gathers_along_the_edges() -> None:
    edge_index = torch.tensor([[0, 2, 1, 4, 0], [1, 1, 0, 3, 1]])  # source, target; the edge 0 -> 1 twice
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    batch = torch.tensor([0, 0, 0, 2, 2])
    graphs = GraphBatch.from_edge_index(
        edge_index, torch.eye(5), batch, num_graphs=4, y=torch.arange(4), edge_weight=weight
    )
    assert graphs.ptr.tolist() == [0, 3, 3, 5, 5]
    assert graphs.indptr.tolist() == [0, 1, 4, 4, 5, 5]
    assert graphs.indices.tolist() == [1, 0, 0, 2, 4]
    assert graphs.edge_weight.tolist() == [3.0, 1.0, 5.0, 2.0, 4.0]
    in_order = graphs.edge_index
    again = GraphBatch.from_edge_index(in_order, torch.eye(5), batch)
    in_order.fill_(99)
    assert torch.equal(again.indices, graphs.indices)
    assert len(GraphBatch.from_edge_index(edge_index, torch.eye(5))) == 1
    of_degree = GraphBatch.from_edge_index(edge_index, None, batch, edge_weight=weight.double())
    assert equal(of_degree, replace(of_degree, x=of_degree.degree.double()[:, None]))
    with pytest.raises(ValueError, match="batch must be given where x is None"):
        GraphBatch.from_edge_index(edge_index, None)
    for weights, got in (([1.0] * 5, "list"), (weight.long(), "int64")):
        with pytest.raises(TypeError, match=f"edge_weight must .*got {got}"):
            GraphBatch.from_edge_index(edge_index, None, batch, edge_weight=weights)  # type: ignore[arg-type]
    assert len(GraphBatch.from_edge_index(torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 3))) == 1


@given(
    edges=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)), max_size=12),
    weighted=st.booleans(),
    undirected=st.booleans(),
    coalesce=st.sampled_from([None, "sum", "mean", "min", "max"]),
    self_loops=st.sampled_from([None, True, False]),
    dtype=float_dtypes,
    index_dtype=index_dtypes,
)
def test_arcs_are_changed_as_asked(edges, weighted, undirected, coalesce, self_loops, dtype, index_dtype) -> None:
    wanted = defaultdict(list)
    for source, target, weight in edges:
        if self_loops is False and source == target:
            continue
        for end in [(target, source), (source, target)][: 1 + (undirected and source != target)]:
            wanted[end].append(weight if weighted else 1)
    for node in range(4 if self_loops else 0):
        if not wanted[node, node]:
            wanted[node, node].append(1)
    merge = {"sum": sum, "mean": np.mean, "min": min, "max": max}
    repeated = any(len(weights) > 1 for weights in wanted.values())
    if coalesce is not None:
        wanted = {end: [merge[coalesce](weights)] for end, weights in wanted.items() if weights}
    graph = GraphBatch.from_edge_index(
        torch.tensor([edge[:2] for edge in edges], dtype=index_dtype).reshape(-1, 2).t(),
        torch.ones(4, 1, dtype=dtype),
        edge_weight=torch.tensor([edge[2] for edge in edges], dtype=dtype) if weighted else None,
        undirected=undirected,
        coalesce=coalesce,
        self_loops=self_loops,
    )
    assert (graph.edge_weight is not None) == (weighted or (coalesce == "sum" and repeated))
    assert graph.indices.dtype == index_dtype
    weights = torch.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    found = defaultdict(list)
    for (source, target), weight in zip(graph.edge_index.t().tolist(), weights.tolist(), strict=True):
        found[target, source].append(weight)
    assert list(found) == sorted(end for end, of_edge in wanted.items() if of_edge)
    for end, of_edge in found.items():
        assert sorted(of_edge) == pytest.approx(sorted(wanted[end]))


def test_repeated_arcs_keep_their_order() -> None:
    weight = torch.tensor([3.0, 1.0, 2.0, 9.0])
    graph = GraphBatch.from_edge_index(
        torch.tensor([[0, 0, 0, 1], [1, 1, 1, 0]]), torch.ones(2, 1), edge_weight=weight, undirected=True
    )
    assert graph.indices.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert graph.edge_weight.tolist() == [9.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 9.0]  # as given, then the reverses


@given(batch=st.lists(st.integers(0, 3), max_size=10), data=st.data())
def test_sorting_nodes_by_graph(batch: list[int], data: st.DataObject) -> None:
    pairs = [(u, v) for u, a in enumerate(batch) for v, b in enumerate(batch) if a == b]
    edges = data.draw(st.lists(st.sampled_from(pairs), max_size=15)) if pairs else []
    x = torch.arange(float(len(batch)))[:, None]
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    graphs = GraphBatch.from_edge_index(
        edge_index, x, torch.tensor(batch, dtype=torch.int64), num_graphs=4, sort_nodes=True
    )
    for number, graph in enumerate(graphs):
        names = [int(name) for name in graph.x[:, 0]]
        assert names == [node for node, other in enumerate(batch) if other == number]
        found = sorted((names[u], names[v]) for u, v in graph.edge_index.t().tolist())
        assert found == sorted((u, v) for u, v in edges if batch[u] == number)


@given(graphs=graph_batches(weighted=True), labelled=st.booleans(), data=st.data())
def test_concatenation_undoes_slices(graphs: GraphBatch, labelled: bool, data: st.DataObject) -> None:
    if labelled:
        graphs = replace(graphs, y=torch.arange(len(graphs)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(graphs)), max_size=3)))
    parts = [graphs[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(graphs)], strict=True)]
    assert equal(GraphBatch.concatenate(parts), graphs)
    assert equal(GraphBatch.concatenate(iter([graphs])), graphs)
    if len(graphs):
        assert equal(GraphBatch.concatenate(graphs), graphs)


def test_concatenation_of_unlike_batches() -> None:
    graphs = random_graphs([2, 3])
    narrow = random_graphs([1, 2], index_dtype=torch.int32, seed=1)
    assert GraphBatch.concatenate([narrow, narrow]).indices.dtype == torch.int32
    both = GraphBatch.concatenate([narrow, graphs])
    assert both.indices.dtype == both.indptr.dtype == torch.int64
    assert equal(both[2:], graphs)
    for bad, error, message in (
        ([], ValueError, "batches must hold at least one GraphBatch, got none"),
        ([graphs, 1], TypeError, "batches must hold GraphBatches, got int"),
        ([graphs, replace(graphs, y=torch.ones(2))], ValueError, "y must be given in all graphs or in none"),
        ([graphs, replace(graphs, x=graphs.x[:, 1:])], ValueError, r"x must be alike .* \[\*, 3\] .* \[\*, 2\]"),
        ([graphs, replace(graphs, x=graphs.x.float())], ValueError, "x must be alike .* float64 .* float32"),
        ([graphs, random_graphs([2], weighted=True)], ValueError, "edge_weight must be given in all .* at 1 but .* 0"),
    ):
        with pytest.raises(error, match=message):
            GraphBatch.concatenate(bad)


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
    with pytest.raises(ValueError, match="batch must be ascending; sort_nodes=True sorts"):
        GraphBatch.from_edge_index(edge_index, x, torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match="batch must not be negative, got -1"):
        GraphBatch.from_edge_index(edge_index, x, torch.tensor([0, -1, 0]), sort_nodes=True)
    with pytest.raises(ValueError, match="coalesce must be one of sum, mean, min, max or None, got 'first'"):
        GraphBatch.from_edge_index(edge_index, x, coalesce="first")
    for flag in ("undirected", "self_loops", "sort_nodes"):
        with pytest.raises(TypeError, match=f"{flag} must be a bool, got str"):
            GraphBatch.from_edge_index(edge_index, x, **{flag: "yes"})
    with pytest.raises(ValueError, match="num_graphs must be at least 2, got 1"):
        GraphBatch.from_edge_index(edge_index, x, torch.tensor([0, 0, 1]), num_graphs=1)
    with pytest.raises(ValueError, match=r"edge_index must .* got 1 -> 2 at position 1, from graph 0 to 1"):
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


@given(graphs=graph_batches(), num_nodes=st.integers(0, 30), num_edges=st.integers(0, 60))
def test_chunks_are_the_graphs_in_order(graphs: GraphBatch, num_nodes: int, num_edges: int) -> None:
    """As many graphs as fit, or one."""
    bounds = list(graphs.chunks(num_nodes, num_edges))

    def fits(part: GraphBatch) -> bool:
        return part.num_nodes <= num_nodes and part.num_edges <= num_edges

    for begin, end in bounds:
        assert fits(graphs[begin:end]) or end == begin + 1
        assert end == len(graphs) or not fits(graphs[begin : end + 1])
    assert [0, *(end for _, end in bounds)] == [*(begin for begin, _ in bounds), len(graphs)]


@pytest.mark.parametrize("sort_nodes", [False, True])
def test_arcs_between_graphs_are_named_as_they_were_given(sort_nodes: bool) -> None:
    batch = torch.tensor([0, 0, 1, 0] if sort_nodes else [0, 0, 1, 1])
    edge_index = torch.tensor([[1, 0, 2], [0, 1, 1]])
    with pytest.raises(ValueError, match=r"edge_index .* got 2 -> 1 at position 2, from graph 1 to 0$"):
        GraphBatch.from_edge_index(edge_index, torch.ones(4, 1), batch, undirected=True, sort_nodes=sort_nodes)
    with pytest.raises(ValueError, match="y must be a tensor"):
        GraphBatch.from_edge_index(edge_index[:, :2], torch.ones(4, 1), y=torch.ones(3))


def test_to_takes_no_dtype() -> None:
    """It would change indices, too, and a file of such features could not be read."""
    with pytest.raises(TypeError, match=r"device must be a torch\.device, .* got torch\.float64"):
        random_graphs([3]).to(torch.float64)  # type: ignore[arg-type]
