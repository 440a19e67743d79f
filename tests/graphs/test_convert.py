"""Graphs of PyG, DGL, networkx and scipy, there and back."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import equal, graph_batches, random_graphs
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import GraphBatch
from spin_fast.graphs import convert

networkx = pytest.importorskip("networkx")
pyg = pytest.importorskip("torch_geometric.data")


@st.composite
def labelled(draw: st.DrawFn) -> GraphBatch:
    """Directed graphs with columns in order and 64-bit indices, as the converters make them, labels of all kinds."""
    graphs = draw(graph_batches(weighted=True))
    count = len(graphs)
    y = draw(
        st.sampled_from(
            [
                None,
                torch.arange(count) % 3,
                torch.linspace(-1, 1, count, dtype=graphs.x.dtype),
                torch.full((count, 2), torch.nan, dtype=graphs.x.dtype).index_fill(1, torch.tensor([1]), 0.5),
                torch.arange(3 * count).view(count, 3),
            ]
        )
    )
    indptr, indices, weight = graphs.indptr.tolist(), graphs.indices.long(), graphs.edge_weight
    order = [
        edge for v in range(graphs.num_nodes) for edge in sorted(range(*indptr[v : v + 2]), key=indices.__getitem__)
    ]
    return replace(
        graphs,
        indptr=graphs.indptr.long(),
        indices=indices[order],
        y=y,
        edge_weight=None if weight is None else weight[order],
    )


def same(a: GraphBatch, b: GraphBatch) -> bool:
    """Equal but for NaN, which is equal to itself here."""
    fill = -12345.0
    return equal(*(replace(g, y=g.y.nan_to_num(fill)) if g.y is not None and len(g.y) else g for g in (a, b)))


@given(graphs=labelled())
def test_pyg_there_and_back(graphs: GraphBatch) -> None:
    data = graphs.to_pyg()
    assert len(data) == len(graphs)
    if not data:
        return
    assert all(item.validate() for item in data)
    assert same(GraphBatch.from_pyg(data), graphs)
    assert same(GraphBatch.from_pyg(pyg.Batch.from_data_list(data)), graphs)
    assert same(GraphBatch.from_pyg(data[-1]), graphs[-1])
    batches = (pyg.Batch.from_data_list(part) for part in (data[:2], data[2:]) if part)
    assert same(GraphBatch.from_pyg(batches), graphs)


@given(graphs=labelled())
def test_networkx_there_and_back(graphs: GraphBatch) -> None:
    made = graphs.to_networkx(multigraph=True)
    assert [graph.number_of_nodes() for graph in made] == graphs.num_nodes_per_graph.tolist()
    if graphs.num_nodes == 0:  # nothing tells how wide features are
        return
    weight = None if graphs.edge_weight is None else "weight"
    y = None if graphs.y is None else "y"
    assert same(GraphBatch.from_networkx(made, x="x", y=y, edge_weight=weight, dtype=graphs.x.dtype), graphs)
    alone = GraphBatch.from_networkx(made[-1], edge_weight=weight, dtype=graphs.x.dtype)
    assert equal(alone, replace(graphs[-1], y=None, x=graphs[-1].degree.to(graphs.x.dtype)[:, None]))


@given(graphs=labelled(), layout=st.sampled_from(["csr", "csc", "coo"]))
def test_scipy_there(graphs: GraphBatch, layout: str) -> None:
    def matrix(graphs: GraphBatch) -> scipy.sparse.sparray:
        data = np.ones(graphs.num_edges) if graphs.edge_weight is None else graphs.edge_weight.numpy()
        shape = (graphs.num_nodes, graphs.num_nodes)
        return scipy.sparse.csr_array((data, graphs.indices.numpy(), graphs.indptr.numpy()), shape=shape)

    if layout != "csr":  # entries stored twice may add up
        graphs = GraphBatch.from_edge_index(
            graphs.edge_index,
            graphs.x,
            torch.arange(len(graphs)).repeat_interleave(graphs.num_nodes_per_graph),
            num_graphs=len(graphs),
            y=graphs.y,
            edge_weight=graphs.edge_weight,
            coalesce="sum",
        )
    if graphs.edge_weight is not None and bool((graphs.edge_weight == 1).all()):
        graphs = replace(graphs, edge_weight=None)

    def check(found: GraphBatch) -> None:
        wide = replace(found, indptr=found.indptr.long(), indices=found.indices.long())
        if graphs.edge_weight is not None:  # sums of repeats in another order
            torch.testing.assert_close(wide.edge_weight, graphs.edge_weight)
        assert same(replace(wide, edge_weight=graphs.edge_weight), graphs)

    check(GraphBatch.from_scipy(matrix(graphs).asformat(layout), graphs.x, ptr=graphs.ptr, y=graphs.y))
    if len(graphs):
        each = [matrix(graph).asformat(layout) for graph in graphs]
        check(GraphBatch.from_scipy(each, list(graphs.x.split(graphs.num_nodes_per_graph.tolist())), y=graphs.y))
        check(GraphBatch.from_scipy(each, graphs.x.numpy(), y=None if graphs.y is None else graphs.y.numpy()))


def test_to_pyg_shares_nothing() -> None:
    graphs = random_graphs([3, 2])
    before = graphs.x.clone()
    for data in graphs.to_pyg():
        data.x.zero_()
        assert data.edge_index.is_contiguous()
    assert torch.equal(graphs.x, before)


def triangle(**attributes) -> pyg.Data:
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return pyg.Data(**{"x": torch.eye(3), "edge_index": edge_index, **attributes})


class InMemory(pyg.InMemoryDataset):
    def __init__(self, items: list[pyg.Data]) -> None:
        super().__init__()
        self.data, self.slices = self.collate(items)


@given(graphs=labelled(), data=st.data())
def test_a_pyg_dataset_is_its_graphs(graphs: GraphBatch, data: st.DataObject) -> None:
    """Whether they are looked at one by one, or taken from the arrays in which it has them."""
    if len(graphs) < 2:  # PyG has the arrays of a single graph as they are
        return
    items = graphs.to_pyg()
    for item in items:
        if graphs.edge_weight is not None:
            item.edge_weight = item.edge_weight[:, None]
        item.num_nodes, item.degree = len(item.x), torch.rand(len(item.x), 2)
    dataset = InMemory(items)
    ids = data.draw(st.lists(st.integers(0, len(graphs) - 1), min_size=1, max_size=5))
    options = {
        "x": data.draw(st.sampled_from(["x", "degree", None])),
        "y": data.draw(st.sampled_from(["y", None])),
        "edge_weight": data.draw(st.sampled_from(["edge_weight", None])),
    }
    subset = torch.utils.data.Subset(dataset, ids)
    few, all_of_few = [items[i] for i in ids], torch.utils.data.Subset(dataset[ids], range(len(ids)))
    for chosen, some in ((dataset, items), (dataset[ids], few), (subset, few), (all_of_few, few)):
        expected = GraphBatch.from_pyg(some, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert, "_pyg_part", None)
            assert same(GraphBatch.from_pyg(chosen, **options), expected)
    assert GraphBatch.from_pyg(dataset, y=torch.arange(len(items))).y.tolist() == [*range(len(items))]


def test_pyg_datasets_that_make_graphs_in_their_own_way() -> None:
    class Doubled(InMemory):
        def get(self, idx: int) -> pyg.Data:
            item = super().get(idx)
            return item.update({"x": 2 * item.x})

    items = [triangle(y=torch.tensor([label])) for label in (2, 0, 1)]
    assert GraphBatch.from_pyg(Doubled(items)).x.amax() == 2
    crossing = InMemory([*items, triangle(edge_index=torch.tensor([[0, 3], [1, 0]]), y=torch.tensor([1]))])
    with pytest.raises(ValueError, match=r"edge_index must be in \[0, 3\), got 0..3 at 3"):
        GraphBatch.from_pyg(crossing)
    with pytest.raises(ValueError, match=r"y must have one entry per graph, 1, got shape \[3\] at 1"):
        GraphBatch.from_pyg(InMemory([triangle(y=torch.arange(n)) for n in (1, 3)]))
    for name in ("x", "y", "edge_weight"):
        with pytest.raises(ValueError, match="data must have 'z', got none at 0"):
            GraphBatch.from_pyg(InMemory(items), **{name: "z"})
    for empty in (InMemory(items)[[]], torch.utils.data.Subset(InMemory(items), [])):
        with pytest.raises(ValueError, match="data must hold at least one graph, got none"):
            GraphBatch.from_pyg(empty)


def test_a_pyg_dataset_that_was_changed_is_taken_as_it_is() -> None:
    def items(*values: int) -> list[pyg.Data]:
        return [triangle(x=torch.full((3, 1), float(i)), y=torch.tensor([i]), pos=torch.eye(3)) for i in values]

    dataset = InMemory(items(0, 1, 2))
    graphs = GraphBatch.from_pyg(dataset)
    graphs.x.neg_()
    assert GraphBatch.from_pyg(dataset).x.amin() == 0  # they share no memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_pyg_part", None)
        assert [item.y.item() for item in dataset] == [0, 1, 2]  # which the data set remembers
        assert GraphBatch.from_pyg(dataset).y.tolist() == [0, 1, 2]
        assert GraphBatch.from_pyg(dataset, x="pos").x.shape == (9, 3)
        assert GraphBatch.from_pyg(dataset, x=None).x.shape == (9, 1)
        dataset.slices = {name: ends[:3] for name, ends in dataset.slices.items()}
        assert GraphBatch.from_pyg(dataset).x.flatten().tolist() == [0] * 3 + [1] * 3
    dataset._data_list[1] = items(7)[0]
    assert GraphBatch.from_pyg(dataset).x.flatten().tolist() == [0] * 3 + [7] * 3
    dataset.get = lambda _: items(5)[0]
    assert GraphBatch.from_pyg(dataset).y.tolist() == [5, 5]


@pytest.mark.parametrize("ends", [[3, 4], [-1, -2], [0, 3], [-1, 0]])
def test_edges_to_nodes_of_other_graphs_are_refused(ends: list[int]) -> None:
    """Also those of which both ends are in the same other graph."""
    wrong = triangle(edge_index=torch.tensor([ends, ends]), y=torch.tensor([0]))
    items = [triangle(y=torch.tensor([0])), wrong, triangle(y=torch.tensor([0]))]
    low, high = min(ends), max(ends)
    for data in (items, InMemory(items), InMemory([*items, wrong])[[0, 1]]):
        with pytest.raises(ValueError, match=rf"edge_index must be in \[0, 3\), got {low}\.\.{high} at 1"):
            GraphBatch.from_pyg(data)


def test_pyg_dataset() -> None:
    dataset = InMemory([triangle(y=torch.tensor([label])) for label in (2, 0, 1)])
    assert GraphBatch.from_pyg(dataset).y.tolist() == [2, 0, 1]
    assert GraphBatch.from_pyg(dataset[[2, 1]]).y.tolist() == [1, 0]
    assert GraphBatch.from_pyg(torch.utils.data.Subset(dataset, [1, 0])).y.tolist() == [0, 2]
    dataset.transform = lambda data: data.update({"x": data.x * data.y})
    assert GraphBatch.from_pyg(dataset).x.amax(1).tolist() == [2, 2, 2, 0, 0, 0, 1, 1, 1]


def test_pyg_data_as_ogb_has_it() -> None:
    data = [triangle(x=torch.full((3, 9), i), edge_attr=torch.ones(3, 3), y=torch.tensor([[i]])) for i in range(2)]
    graphs = GraphBatch.from_pyg(data)
    assert graphs.x.dtype == torch.float32
    assert graphs.x[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert graphs.y.tolist() == [0, 1]
    assert graphs.edge_weight is None
    assert GraphBatch.from_pyg(data, dtype=torch.float64).x.dtype == torch.float64
    tasks = GraphBatch.from_pyg([triangle(y=torch.tensor([[0.0, torch.nan]])) for _ in range(2)]).y
    assert tasks.shape == (2, 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32])
def test_features_of_other_dtypes_become_float32(dtype: torch.dtype) -> None:
    graphs = GraphBatch.from_pyg(triangle(x=torch.eye(3).to(dtype)))
    assert graphs.x.dtype == torch.float32
    assert torch.equal(graphs.x, torch.eye(3))


def test_pyg_features_labels_and_weights_are_chosen() -> None:
    data = triangle(pos=torch.rand(3, 2), z=torch.tensor([8, 6, 7]), edge_attr=torch.tensor([[1.0], [2.0], [3.0]]), y=1)
    assert torch.equal(GraphBatch.from_pyg(data, x="pos").x, data.pos)
    assert GraphBatch.from_pyg(data, x="z").x.tolist() == [[8.0], [6.0], [7.0]]
    assert GraphBatch.from_pyg(data, edge_weight="edge_attr").edge_weight.tolist() == [3.0, 1.0, 2.0]
    assert GraphBatch.from_pyg(data).y.tolist() == [1]
    assert GraphBatch.from_pyg(data, y=None).y is None
    assert GraphBatch.from_pyg([data, data], y=[4, 5]).y.tolist() == [4, 5]
    assert GraphBatch.from_pyg(data, y=torch.tensor([0.5])).y.tolist() == [0.5]
    assert GraphBatch.from_pyg(triangle(edge_weight=torch.ones(3).double())).edge_weight.dtype == torch.float32


def test_degree_counts_the_arcs_that_are_kept() -> None:
    data = pyg.Data(edge_index=torch.tensor([[0, 0, 1, 1], [1, 1, 2, 1]]), num_nodes=4)
    assert GraphBatch.from_pyg(data, x=None).x.tolist() == [[0], [3], [1], [0]]
    changed = GraphBatch.from_pyg(data, x=None, undirected=True, coalesce="max", self_loops=False)
    assert changed.x.tolist() == [[1], [2], [1], [0]]


def test_pyg_batch_with_empty_and_with_unsorted_graphs() -> None:
    empty = pyg.Data(x=torch.empty(0, 3), edge_index=torch.empty(2, 0, dtype=torch.int64))
    batch = pyg.Batch.from_data_list([empty, triangle(), empty])
    assert GraphBatch.from_pyg(batch).ptr.tolist() == [0, 0, 3, 3]
    shuffled = triangle(x=torch.arange(3.0), edge_index=torch.tensor([[0], [2]]), batch=torch.tensor([1, 0, 1]))
    with pytest.raises(ValueError, match="batch must be ascending; sort_nodes=True"):
        GraphBatch.from_pyg(shuffled)
    graphs = GraphBatch.from_pyg(shuffled, sort_nodes=True)
    assert graphs.x.flatten().tolist() == [1, 0, 2]
    assert graphs.edge_index.tolist() == [[1], [2]]


def test_pyg_edge_index_class() -> None:
    from torch_geometric import EdgeIndex

    plain = triangle()
    graphs = GraphBatch.from_pyg(triangle(edge_index=EdgeIndex(plain.edge_index, sparse_size=(3, 3))))
    assert equal(graphs, GraphBatch.from_pyg(plain))
    assert type(graphs.indices) is torch.Tensor


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (3, {}, TypeError, "data must be a PyG Data, Batch or dataset, or a list of Data, got int"),
        ({}, {}, TypeError, "data must be a PyG Data, .* got dict"),
        ([], {}, ValueError, "data must hold at least one graph, got none"),
        ([triangle(), "a"], {}, TypeError, "data must hold torch_geometric.data.Data, got str at 1"),
        (pyg.HeteroData(), {}, TypeError, r"got HeteroData at 0; convert it by its to_homogeneous"),
        ([triangle(), triangle(x=None)], {}, ValueError, "data must have 'x', got none at 1; x=None takes the degree"),
        (triangle(x=np.eye(3)), {}, TypeError, "x must be a torch.Tensor, got ndarray"),
        (triangle(), {"x": torch.eye(3)}, TypeError, "x must be the name of an attribute or None, got Tensor"),
        (triangle(), {"edge_weight": 1}, TypeError, "edge_weight must be the name of an attribute or None, got int"),
        (triangle(), {"x": "z"}, ValueError, "data must have 'z', got none at 0"),
        (triangle(), {"edge_weight": "w"}, ValueError, "data must have 'w', got none at 0"),
        (triangle(edge_index=None), {}, ValueError, "data must have 'edge_index', got none at 0"),
        (triangle(edge_index=torch.ones(3, 2).long()), {}, ValueError, r"edge_index must have shape \[2, E\]"),
        (triangle(y=torch.arange(3)), {}, ValueError, r"y must have one entry per graph, 1, got shape \[3\] at 0"),
        ([triangle(y=1), triangle()], {}, ValueError, "y must be given in all graphs or in none, .* at 0 but not at 1"),
        ([triangle(), triangle(x=torch.eye(3).long())], {}, ValueError, "x must be alike .* float32 .* int64"),
        (triangle(edge_weight=torch.ones(3, 2)), {}, ValueError, r"edge_weight must have one number per edge, 3"),
        (triangle(), {"dtype": torch.float16}, TypeError, "dtype must be torch.float32, torch.float64 or None"),
        (triangle(x=torch.eye(3).cfloat()), {}, TypeError, "x must be real numbers, got complex64"),
        (triangle(x=torch.full((3, 1), 2**24 + 1)), {}, ValueError, "integers that float32 holds .* got 16777217"),
        (triangle(), {"y": ["a"]}, TypeError, "y must be numbers.*'a'"),
        (triangle(), {"y": [1, 2]}, ValueError, r"y must be .* 1 entries \(graphs\), got \[2\]"),
    ],
)
def test_bad_pyg_input_is_named(data, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        GraphBatch.from_pyg(data, **options)


def test_networkx_graphs_as_they_come() -> None:
    path = networkx.Graph([("b", "a"), ("a", "c"), ("c", "c")], y=1.5)
    networkx.set_node_attributes(path, {"b": 1, "a": 2, "c": 3}, "label")
    networkx.set_node_attributes(path, {"b": (0.5, 1), "a": [2, 3], "c": np.array([4, 5])}, "at")
    arrow = networkx.MultiDiGraph([(7, 3), (7, 3)], y=2)
    networkx.set_node_attributes(arrow, 0, "label")
    networkx.set_node_attributes(arrow, [0, 0], "at")
    graphs = GraphBatch.from_networkx([path, arrow], x=["label", "at"], y="y")
    assert graphs.x.tolist() == [[1, 0.5, 1], [2, 2, 3], [3, 4, 5], [0, 0, 0], [0, 0, 0]]  # in networkx's order
    assert graphs.y.tolist() == [1.5, 2]
    assert graphs.edge_index.tolist() == [[1, 0, 2, 1, 2, 3, 3], [0, 1, 1, 2, 2, 4, 4]]
    assert GraphBatch.from_networkx(arrow, coalesce="sum").edge_weight.tolist() == [2]
    assert GraphBatch.from_networkx(arrow, y=[3]).x.tolist() == [[0], [2]]  # the degree


def test_undirected_networkx_there_and_back() -> None:
    made = [networkx.karate_club_graph(), networkx.empty_graph(3), networkx.MultiGraph([(0, 1), (1, 0), (2, 2)])]
    for graph in made:
        networkx.set_edge_attributes(graph, {edge: i for i, edge in enumerate(graph.edges, 1)}, "weight")
    graphs = GraphBatch.from_networkx(made, edge_weight="weight", y=[0, 1, 2])
    assert graphs.num_edges == 2 * 78 + 4 + 1
    back = graphs.to_networkx(undirected=True, multigraph=True)
    for one, other in zip(made, back, strict=True):
        assert other.graph["y"] == made.index(one)
        ours, theirs = (networkx.to_numpy_array(g, nodelist=sorted(g)) for g in (one, other))
        assert (ours == theirs).all()
    assert equal(GraphBatch.from_networkx(back, x="x", y="y", edge_weight="weight"), graphs)
    simple = graphs[:2].to_networkx(undirected=True, x=None, y=None, edge_weight=None)
    assert networkx.utils.graphs_equal(simple[1], networkx.empty_graph(3))
    assert simple[0].edges == networkx.empty_graph(34).edges | made[0].edges


def test_to_networkx_loses_no_edges() -> None:
    edges = torch.tensor([[0, 1, 3, 2, 3, 3], [1, 0, 2, 3, 2, 3]])
    twice = GraphBatch.from_edge_index(edges, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]))
    with pytest.raises(ValueError, match=r"multigraph must be True .* got 1 -> 0 of graph 1 twice"):
        twice.to_networkx()
    with pytest.raises(ValueError, match=r"undirected must be False .* got 1 -> 0 of graph 1 without its reverse$"):
        twice.to_networkx(undirected=True)
    weighted = GraphBatch.from_edge_index(edges[:, :2], torch.ones(2, 1), edge_weight=torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="got 0 -> 1 of graph 0 without its reverse of the same weight"):
        weighted.to_networkx(undirected=True)
    with pytest.raises(TypeError, match="undirected must be a bool"):
        weighted.to_networkx(undirected=1)


def test_bad_networkx_input_is_named() -> None:
    graph = networkx.path_graph(2)
    uneven = networkx.path_graph(2)
    networkx.set_node_attributes(uneven, {0: [1], 1: [1, 2]}, "at")
    networkx.set_node_attributes(graph, "red", "colour")
    for bad, options, error, message in (
        (3, {}, TypeError, "graphs must be a networkx graph or a list, got int"),
        ([], {}, ValueError, "graphs must hold at least one graph, got none"),
        ([graph, 1], {}, TypeError, "graphs must hold networkx graphs, got int at 1"),
        ([graph, graph], {"x": "at"}, ValueError, "node 0 of graph 0 must have the attribute 'at', got none"),
        (graph, {"x": []}, ValueError, "x must name at least one node attribute"),
        (graph, {"x": "colour"}, TypeError, "node attribute 'colour' must be numbers.*'red'"),
        (uneven, {"x": "at"}, ValueError, "node attribute 'at' must be numbers, or vectors of one length"),
        (graph, {"edge_weight": "w"}, ValueError, r"edge \(0, 1\) of graph 0 must have the attribute 'w', got none"),
        (graph, {"y": "label"}, ValueError, r"graph 0 must have the attribute 'label' \(graph.graph\), got \[\]"),
    ):
        with pytest.raises(error, match=message):
            GraphBatch.from_networkx(bad, **options)


def test_scipy_matrices_as_they_come() -> None:
    dense = np.array([[0, 1, 0], [0, 0, 2], [0, 0, 0]])
    graph = GraphBatch.from_scipy(scipy.sparse.coo_matrix(dense), np.eye(3, dtype=np.int8))
    assert graph.edge_index.tolist() == [[1, 2], [0, 1]]  # row v gathers from its columns
    assert graph.edge_weight.tolist() == [1, 2]
    assert graph.x.dtype == torch.float32
    ones = GraphBatch.from_scipy(scipy.sparse.csc_array(dense > 0), undirected=True)
    assert ones.edge_weight is None
    assert ones.x.tolist() == [[1], [2], [1]]
    for x in (np.eye(3)[::-1], np.eye(3, dtype=">f8")[::-1], np.eye(3, dtype=np.longdouble)[::-1]):
        assert GraphBatch.from_scipy(scipy.sparse.coo_matrix(dense), x).x.tolist() == np.eye(3)[::-1].tolist()
    stored_zero = scipy.sparse.csr_array(([0.0, 1.0], ([0, 1], [1, 0])), shape=(2, 2))
    assert GraphBatch.from_scipy(stored_zero).edge_weight.tolist() == [0, 1]


def test_bad_scipy_input_is_named() -> None:
    two = scipy.sparse.eye_array(2, format="csr")
    for bad, options, error, message in (
        (np.eye(2), {}, TypeError, "adjacency must be a scipy sparse matrix or a list of them, got ndarray"),
        ([two, np.eye(2)], {}, TypeError, "adjacency must hold scipy sparse matrices, got ndarray at 1"),
        (two[:1], {}, ValueError, r"adjacency must hold square matrices of real numbers, got float64 \[1, 2\] at 0"),
        (two * 1j, {}, ValueError, "real numbers, got complex128"),
        (two, {"x": torch.ones(3, 1)}, ValueError, "x must have one row per node, 2, got 3"),
        ([two, two], {"x": [torch.ones(3, 1), torch.ones(1, 1)]}, ValueError, r"node, \[2, 2\], got \[3, 1\]"),
        (two, {"ptr": [0, 3]}, ValueError, r"ptr must rise from 0 to the number of nodes, 2, got \[0, 3\]"),
        (two, {"ptr": [0.0, 2.0]}, TypeError, "ptr must be integers"),
        ([two], {"ptr": [0, 2]}, ValueError, "ptr must be left out where adjacency is a list"),
        (
            scipy.sparse.csr_array(np.ones((2, 2))),
            {"ptr": [0, 1, 2]},
            ValueError,
            r"ptr must cut .* got entry \[0, 1\]",
        ),
    ):
        with pytest.raises(error, match=message):
            GraphBatch.from_scipy(bad, **options)


def stand_in(source: list[int], target: list[int], num_nodes: int, sizes: list[int] | None = None) -> SimpleNamespace:
    """What ``from_dgl`` reads of a DGLGraph, after DGL's documentation."""

    def edges(form: str = "uv", order: str = "eid") -> tuple[torch.Tensor, torch.Tensor]:
        assert (form, order) == ("uv", "eid")
        return torch.tensor(source), torch.tensor(target)

    return SimpleNamespace(
        edges=edges, ndata={}, edata={}, is_homogeneous=True, batch_num_nodes=lambda: torch.tensor(sizes or [num_nodes])
    )


def real(source: list[int], target: list[int], num_nodes: int, sizes: list[int] | None = None):
    dgl = pytest.importorskip("dgl", reason="dgl is not installed: the stand-in alone is tested", exc_type=Exception)
    graph = dgl.graph((source, target), num_nodes=num_nodes)
    if sizes:
        bounds = np.cumsum([0, *sizes])
        inside = torch.bucketize(torch.tensor(source), torch.from_numpy(bounds[1:]), right=True)
        graph.set_batch_num_nodes(torch.tensor(sizes))
        graph.set_batch_num_edges(torch.bincount(inside, minlength=len(sizes)))
    return graph


@pytest.fixture(params=[stand_in, real], ids=["stand-in", "dgl"])
def dgl_graph(request: pytest.FixtureRequest):
    return request.param


def test_dgl_graphs(dgl_graph) -> None:
    def path(feature: float):
        graph = dgl_graph([2, 0, 1], [1, 1, 2], 3)
        graph.ndata["feat"] = torch.full((3, 2), feature)
        graph.edata["w"] = torch.tensor([[5.0], [6.0], [7.0]])
        return graph

    expected = {"edge_index": torch.tensor([[2, 0, 1], [1, 1, 2]]), "x": torch.ones(3, 2)}
    weight = torch.tensor([5.0, 6.0, 7.0])
    assert equal(GraphBatch.from_dgl(path(1)), GraphBatch.from_edge_index(**expected))
    weighted = GraphBatch.from_dgl(path(1), edge_weight="w")
    assert equal(weighted, GraphBatch.from_edge_index(**expected, edge_weight=weight))
    pairs = [(path(i), label) for i, label in enumerate((torch.tensor(3), torch.tensor([4]), 5))]
    graphs = GraphBatch.from_dgl(pairs)
    assert graphs.y.tolist() == [3, 4, 5]
    assert graphs.x[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert GraphBatch.from_dgl([path(0), path(1)], y=[0, 1]).y.tolist() == [0, 1]
    assert GraphBatch.from_dgl(path(0), x=None).x.tolist() == [[0], [2], [1]]
    tasks = [(path(0), torch.tensor([0.0, 1.0])), (path(0), torch.tensor([torch.nan, 1.0]))]
    assert GraphBatch.from_dgl(tasks).y.shape == (2, 2)


def test_batched_dgl_graphs(dgl_graph) -> None:
    batch = dgl_graph([1, 3], [0, 2], 4, [2, 0, 2])
    batch.ndata["attr"] = torch.arange(4)
    graphs = GraphBatch.from_dgl([(batch, torch.arange(3)), (batch, torch.arange(3))], x="attr", undirected=True)
    assert graphs.ptr.tolist() == [0, 2, 2, 4, 6, 6, 8]
    assert graphs.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert graphs[0].edge_index.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ValueError, match="y must have one entry per graph, 3, got shape"):
        GraphBatch.from_dgl([(batch, torch.arange(2))], x="attr")
    with pytest.raises(ValueError, match=r"graphs must have the node data 'feat', got \['attr'\] at 0"):
        GraphBatch.from_dgl(batch)
    with pytest.raises(TypeError, match="graphs must be a DGLGraph, a dataset, or a list of DGLGraphs, got int"):
        GraphBatch.from_dgl(3)
    with pytest.raises(TypeError, match=r"graphs must hold DGLGraphs, .* got str at 1"):
        GraphBatch.from_dgl([batch, "a"], x="attr")


@pytest.mark.parametrize(
    ("module", "call", "package"),
    [
        ("torch_geometric.data", lambda: GraphBatch.from_pyg([]), "torch-geometric"),
        ("torch_geometric.data", lambda: random_graphs([2]).to_pyg(), "torch-geometric"),
        ("networkx", lambda: GraphBatch.from_networkx([]), "networkx"),
        ("networkx", lambda: random_graphs([2]).to_networkx(), "networkx"),
        ("scipy.sparse", lambda: GraphBatch.from_scipy([]), "scipy"),
    ],
)
def test_missing_library_is_named(module: str, call, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs a package that is missing: pip install {package}$"):
        call()


def test_graphs_of_another_library_are_no_lists() -> None:
    with pytest.raises(TypeError, match=r"graphs must be a DGLGraph, a dataset, or a list of DGLGraphs, got Graph$"):
        GraphBatch.from_dgl(networkx.path_graph(3))


def test_numbers_beyond_float32_are_refused() -> None:
    graph = networkx.path_graph(2)
    networkx.set_node_attributes(graph, {0: 1.0, 1: -1e39}, "mass")
    with pytest.raises(ValueError, match=r"'mass' of node 1 of graph 0 must be finite as float32, got -1e\+39"):
        GraphBatch.from_networkx(graph, x="mass")
    assert GraphBatch.from_networkx(graph, x="mass", dtype=torch.float64).x.min() == -1e39
    adjacency = scipy.sparse.csr_array([[0.0, 1e300], [1.0, 0.0]])
    with pytest.raises(ValueError, match="edge_weight must be finite as float32"):
        GraphBatch.from_scipy(adjacency, torch.ones(2, 1))
    with pytest.raises(ValueError, match="x must be finite as float32"):
        GraphBatch.from_scipy(adjacency, torch.full((2, 1), 1e300, dtype=torch.float64), dtype=torch.float32)
    infinite = torch.tensor([[torch.inf], [torch.nan]], dtype=torch.float64)  # stays what it is
    assert GraphBatch.from_scipy(scipy.sparse.eye_array(2), infinite, dtype=torch.float32).x.isinf().any()


def test_a_series_of_graphs_is_read_in_its_order() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"graph": [networkx.path_graph(n) for n in (2, 3, 4)], "label": [0, 1, 2]}).iloc[[2, 0, 1]]
    graphs = GraphBatch.from_networkx(table["graph"], y=table["label"])
    assert graphs.num_nodes_per_graph.tolist() == [4, 2, 3]
    assert graphs.y.tolist() == [2, 0, 1]
    some = table[table.label > 0]
    assert len(GraphBatch.from_networkx(some["graph"], y=some["label"])) == 2
    assert graphs[pandas.Series([2, 0], index=[7, 8])].y.tolist() == [1, 2]


def test_integers_beside_other_columns_are_not_rounded() -> None:
    graph = networkx.path_graph(2)
    networkx.set_node_attributes(graph, {0: 2**24, 1: 2**24 + 1}, "id")
    networkx.set_node_attributes(graph, 0.5, "mass")
    with pytest.raises(ValueError, match=r"attribute 'id' of node 1 of graph 0 must hold integers that float32 holds"):
        GraphBatch.from_networkx(graph, x=["id", "mass"])
    assert GraphBatch.from_networkx(graph, x=["id", "mass"], dtype=torch.float64).x[1, 0] == 2**24 + 1
    networkx.set_edge_attributes(graph, 2**24 + 1, "weight")
    with pytest.raises(ValueError, match="edge_weight must hold integers that float32 holds exactly, got 16777217"):
        GraphBatch.from_networkx(graph, edge_weight="weight")


def test_arrays_of_any_strides() -> None:
    backwards = np.arange(3)[::-1]
    graphs = random_graphs([2, 3, 4])
    for ids in (backwards, backwards[:1]):
        assert equal(graphs[ids], graphs[ids.tolist()])
    one = GraphBatch.from_scipy(
        scipy.sparse.eye(1, format="csr"), np.ones((2, 3))[::-1][:1], y=np.array([1, 2])[::-1][:1]
    )
    assert one.y.tolist() == [2]


def test_the_value_that_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match=r"y must be numbers, or vectors of one length, got None"):
        GraphBatch.from_networkx([networkx.path_graph(2)] * 3, y=[0, 1, None])
