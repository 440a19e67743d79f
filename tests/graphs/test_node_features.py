from __future__ import annotations

import json
from dataclasses import replace

import networkx
import numpy as np
import pytest
import torch
from helpers import equal, random_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import spin_fast
from spin_fast import GraphBatch, NodeFeatures, PowerFeatures
from spin_fast.graphs import node_features as preprocessing


def graphs_with(x: torch.Tensor, sizes: list[int]) -> GraphBatch:
    return replace(random_graphs(sizes), x=x)


def typed(dtype: torch.dtype = torch.float32) -> GraphBatch:
    """Nodes with a real attribute, a whole one, a one-hot label of two columns, and a constant."""
    rng = np.random.default_rng(1)
    label = rng.integers(0, 2, 60)
    columns = [rng.normal(1e4, 1e-2, 60), rng.integers(-300, 800, 60), label, 1 - label, np.full(60, 0.1)]
    return graphs_with(torch.tensor(np.stack(columns, 1), dtype=dtype), [10, 20, 0, 25, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standardises_on_the_training_graphs_as_scikit_learn_does(dtype: torch.dtype) -> None:
    from sklearn.preprocessing import StandardScaler

    graphs, train = typed(dtype), [0, 3]
    of_train = np.r_[0:10, 30:55]
    fitted = NodeFeatures().fit(graphs, train)
    assert fitted.columns_ == [0, 1]
    made = fitted.transform(graphs)
    x = graphs.x.double().numpy()
    scaler = StandardScaler().fit(x[of_train, :2])
    assert made.x.dtype == dtype
    np.testing.assert_allclose(made.x[:, :2], scaler.transform(x[:, :2]), rtol=1e-6, atol=1e-6)
    assert torch.equal(made.x[:, 2:], graphs.x[:, 2:])
    assert equal(replace(made, x=graphs.x), graphs)
    std, mean = torch.std_mean(made.x.double()[of_train, :2], dim=0, correction=0)
    torch.testing.assert_close((std, mean), (torch.ones_like(std), torch.zeros_like(mean)), rtol=1e-6, atol=1e-6)


def test_what_is_not_in_the_training_part_does_not_matter() -> None:
    graphs = typed()
    changed = graphs.x.clone()
    changed[10:30] = float("nan")
    one, other = (NodeFeatures("one-hot").fit(of, [0, 3]).to_dict() for of in (graphs, replace(graphs, x=changed)))
    assert one == other
    mask = torch.tensor([True, False, False, True, False])
    assert NodeFeatures("one-hot").fit(graphs, mask).to_dict() == one


def test_which_columns_are_standardised() -> None:
    graphs = typed()
    whole = replace(graphs, x=graphs.x[:, 1:4].contiguous())
    assert NodeFeatures().fit(whole).columns_ == []  # whole numbers alone may be categories
    assert NodeFeatures().fit(whole).transform(whole) is whole
    assert NodeFeatures(standardize=True).fit(whole).columns_ == [0]
    assert NodeFeatures(standardize=False).fit(graphs).columns_ == []
    assert NodeFeatures(columns=[3, 0, 3, 4]).fit(graphs).columns_ == [0, 3]  # the constant one cannot be
    assert NodeFeatures(columns=[0]).fit(whole).columns_ == [0]
    assert NodeFeatures("log").fit(graphs).columns_ == [0, 1, 5]
    assert NodeFeatures("one-hot").fit(graphs).columns_ == [0, 1]
    assert NodeFeatures("raw", keep_x=False, standardize=True).fit(graphs).columns_ == [0]
    extreme = replace(graphs, x=torch.tensor([[0.1]]).expand(60, 1).contiguous())
    assert NodeFeatures().fit(extreme).columns_ == []


def test_degrees() -> None:
    graphs = typed()
    degree = graphs.degree.float()[:, None]
    settings = {"keep_x": False, "standardize": False}

    def made(kind: preprocessing.Degree, **more: object) -> torch.Tensor:
        return NodeFeatures(kind, **settings | more).fit(graphs).transform(graphs).x

    assert torch.equal(made("raw"), degree)
    torch.testing.assert_close(made("log"), torch.log1p(degree), rtol=1e-7, atol=0)
    assert torch.equal(made("one-hot"), torch.nn.functional.one_hot(graphs.degree).float())
    assert torch.equal(made("log", keep_x=True), torch.cat([graphs.x, made("log")], 1))
    plain = replace(graphs, x=degree)
    in_place = NodeFeatures("log").fit(plain).transform(plain)
    assert torch.equal(in_place.x, made("log"))
    beside = NodeFeatures("log", keep_x=True).fit(plain).transform(plain)
    assert torch.equal(beside.x, torch.cat([degree, made("log")], 1))


def test_profile_of_the_neighbours_degrees() -> None:
    graph = networkx.lollipop_graph(4, 3)
    graph.add_node("alone")
    graphs = GraphBatch.from_networkx(graph)
    made = NodeFeatures("profile").fit(graphs).transform(graphs).x
    for row, node in zip(made, graph, strict=True):
        of_neighbours = [graph.degree[other] for other in graph[node]] or [0]
        of = np.array([graph.degree[node], *(f(of_neighbours) for f in (np.min, np.max, np.mean, np.std))])
        np.testing.assert_allclose(row, np.log1p(of), rtol=1e-6)


def test_largest_degree_with_a_column() -> None:
    graphs = GraphBatch.from_networkx(networkx.star_graph(5))
    x = NodeFeatures("one-hot", max_degree=2).fit(graphs).transform(graphs).x
    assert x.tolist() == [[0.0, 0.0, 1.0]] + [[0.0, 1.0, 0.0]] * 5


def test_categories_of_the_training_graphs_become_columns() -> None:
    x = torch.tensor([[7.0, 0.5, 2.0], [3.0, 1.5, 2.0], [9.0, 0.0, -1.0]])
    graphs = graphs_with(x, [2, 1])
    fitted = NodeFeatures(one_hot=[0, 2], standardize=False).fit(graphs, [0])
    assert fitted.categories_ == [[3, 7], None, [2]]
    assert fitted.transform(graphs).x.tolist() == [[0, 1, 0.5, 1], [1, 0, 1.5, 1], [0, 0, 0, 0]]
    whole = NodeFeatures(one_hot=True).fit(replace(graphs, x=x[:, [0, 2]]))
    assert whole.categories_ == [[3, 7, 9], [-1, 2]]
    with pytest.raises(ValueError, match="one_hot must name columns of whole numbers; column 1 has others"):
        NodeFeatures(one_hot=True).fit(graphs)
    with pytest.raises(ValueError, match="one_hot must be less than 3, the number of columns, got 3"):
        NodeFeatures(one_hot=[3]).fit(graphs)
    for value in (torch.inf, torch.nan, 1e30):
        with pytest.raises(ValueError, match="one_hot must name columns of whole numbers; column 0 has others"):
            NodeFeatures(one_hot=True).fit(graphs_with(torch.tensor([[1.0], [value]]), [2]))
    with pytest.raises(ValueError, match="x must be finite in columns to be encoded; column 0 is not"):
        fitted.transform(replace(graphs, x=x / 0))
    path = GraphBatch.from_networkx(networkx.path_graph(3))  # x is the degree
    assert NodeFeatures("log", one_hot=True).fit(path).transform(path).x.shape == (3, 3)
    many = graphs_with(torch.arange(5000.0)[:, None], [5000])
    with pytest.raises(ValueError, match="one_hot must name columns of at most 4096 values; column 0 has 5000"):
        NodeFeatures(one_hot=True).fit(many)


def test_degrees_larger_than_in_training_share_the_last_column() -> None:
    star = [(0, v) for v in range(1, 6)] + [(6, 7)]
    edges = torch.tensor(star + [(v, u) for u, v in star]).t()
    graphs = GraphBatch.from_edge_index(edges, torch.zeros(8, 0), torch.tensor([0] * 6 + [1] * 2))
    fitted = NodeFeatures("one-hot").fit(graphs, [1])
    x = fitted.transform(graphs).x
    assert fitted.max_degree_ == 1
    assert x.tolist() == [[0.0, 1.0]] * 8
    assert NodeFeatures("one-hot").fit(graphs, [0]).transform(graphs).x[0].tolist() == [0.0] * 5 + [1.0]


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    degree=st.sampled_from([None, "raw", "log"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_rows_stay_equal(data: st.DataObject, degree: preprocessing.Degree | None, dtype: torch.dtype) -> None:
    """Whatever stands beside them, so that they are stored once; and a graph alone becomes what it is among others."""
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
    pool = torch.tensor(data.draw(st.lists(st.floats(-1e5, 1e5, width=32), min_size=2, max_size=4)), dtype=dtype)
    chosen = np.random.default_rng(0).integers(0, len(pool), (sum(sizes), 2))
    graphs = graphs_with(pool[torch.tensor(chosen)], sizes)
    fitted = NodeFeatures(degree, standardize=True).fit(graphs)
    made = fitted.transform(graphs)
    before = torch.cat([graphs.x, graphs.degree[:, None].to(dtype)], 1) if degree else graphs.x
    assert len(made.x.unique(dim=0)) <= len(before.unique(dim=0))
    for graph in range(len(graphs)):
        assert torch.equal(fitted.transform(graphs[graph]).x, made[graph].x)


def test_deduplication_survives() -> None:
    rng = np.random.default_rng(0)
    graphs = graphs_with(torch.tensor(rng.normal(size=(7, 2)))[rng.integers(0, 7, 3000)], [30] * 100)
    made = NodeFeatures().fit(graphs, range(50)).transform(graphs)
    plain, standardized = (PowerFeatures.from_graphs(of, 1).row_ptr[1] for of in (graphs, made))
    assert plain == standardized == 7


def test_blocks_of_nodes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = typed()
    whole = NodeFeatures("raw").fit(graphs)
    monkeypatch.setattr(preprocessing, "BLOCK", 7)
    blocks = NodeFeatures("raw").fit(graphs)
    assert blocks.columns_ == whole.columns_
    np.testing.assert_allclose(blocks.mean_ + blocks.scale_, whole.mean_ + whole.scale_, rtol=1e-9)
    made = blocks.transform(graphs)
    assert not torch.equal(made.x[:, 0], graphs.x[:, 0])
    monkeypatch.undo()
    assert torch.equal(blocks.transform(graphs).x, made.x)


def test_input_is_left_as_it_is() -> None:
    graphs = typed()
    before = graphs.x.clone()
    NodeFeatures().fit(graphs).transform(graphs)
    assert torch.equal(graphs.x, before)


@pytest.mark.parametrize("fitted", [False, True])
def test_round_trip_through_json(fitted: bool) -> None:
    graphs = typed()
    for made in (
        NodeFeatures(),
        NodeFeatures("one-hot", max_degree=1, keep_x=True),
        NodeFeatures("log", columns=[np.int64(0), 1]),
        NodeFeatures("profile", one_hot=[3]),
    ):
        if fitted:
            made.fit(graphs, [0, 3])
        again = NodeFeatures.from_dict(json.loads(json.dumps(made.to_dict(), allow_nan=False)))
        assert vars(again) == vars(made)
        assert repr(again) == repr(made)
        if fitted:
            assert torch.equal(again.transform(graphs).x, made.transform(graphs).x)


def test_a_checkpoint_carries_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    graphs = typed()
    made = NodeFeatures("log").fit(graphs, [0, 3])
    model = spin_fast.SPIN(6, 4, 2, 1)
    model.operator = "sym"
    prepared = spin_fast.training.predict_proba(model, made.transform(graphs))
    model.node_features = made
    spin_fast.training.save_checkpoint(tmp_path / "x", model)
    again, metadata = spin_fast.training.load_checkpoint(tmp_path / "x")
    assert again.node_features is not None
    assert vars(again.node_features) == vars(made)
    assert metadata["preprocessing"] == made.to_dict()
    assert torch.equal(spin_fast.training.predict_proba(again, graphs), prepared)


@pytest.mark.parametrize(
    "damage",
    [
        {"degree": "cubic"},
        {"mean_": [1.0]},
        {"mean_": None},
        {"columns_": [0, -1]},
        {"keeps_x_": "yes"},
        {"num_features_": 2.5},
        {"max_degree_": 3},
        {"more": 1},
        None,
    ],
    ids=str,
)
def test_damaged_state(damage: dict[str, object] | None) -> None:
    state = NodeFeatures("log").fit(typed()).to_dict()
    damaged = [state | damage] if damage else [{k: v for k, v in state.items() if k != name} for name in state]
    for one in [*damaged, *([[], None, {}] if damage is None else [])]:
        with pytest.raises(ValueError, match=r"state must be what NodeFeatures\.to_dict has told"):
            NodeFeatures.from_dict(one)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"degree": "cubic"}, "degree must be one of raw, log, one-hot, profile or None, got 'cubic'"),
        ({"keep_x": None}, "keep_x must be True, False or 'auto', got None"),
        ({"standardize": "yes"}, "standardize must be True, False or 'auto', got 'yes'"),
        ({"keep_x": False}, "keep_x must not be False without degree"),
        ({"columns": [-1]}, "columns must be at least 0, got -1"),
        ({"columns": [0.5]}, "columns must be an int, got float"),
        ({"columns": [0], "standardize": False}, "columns must be None where standardize is False"),
        ({"max_degree": 3}, "max_degree must be None where degree is None: it is of one-hot degrees"),
        ({"degree": "one-hot", "max_degree": -1}, "max_degree must be at least 0, got -1"),
        ({"one_hot": [-1]}, "one_hot must be at least 0, got -1"),
        ({"one_hot": 1}, "one_hot must be a bool or numbers of columns, got int"),
        ({"degree": "log", "one_hot": True, "keep_x": False}, "one_hot must be left out where keep_x is False"),
    ],
)
def test_wrong_arguments(wrong: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        NodeFeatures(**wrong)  # type: ignore[arg-type]


def test_wrong_graphs() -> None:
    graphs = typed()
    with pytest.raises(ValueError, match="must be fitted before"):
        NodeFeatures().transform(graphs)
    with pytest.raises(TypeError, match="graphs must be a GraphBatch, got Tensor"):
        NodeFeatures().fit(graphs.x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="graphs must have nodes in the training part"):
        NodeFeatures().fit(graphs, [2])
    with pytest.raises(ValueError, match="columns must be less than 5, the number of columns, got 5"):
        NodeFeatures(columns=[5]).fit(graphs)
    with pytest.raises(ValueError, match="graphs must have 5 features as fitted, got 2"):
        NodeFeatures().fit(graphs).transform(replace(graphs, x=graphs.x[:, :2]))
    x = graphs.x.clone()
    x[3, 1] = float("nan")
    with pytest.raises(ValueError, match="x must be finite in the training graphs to be standardised; column 1 is not"):
        NodeFeatures().fit(replace(graphs, x=x))


def test_equal_degrees_have_equal_logarithms() -> None:
    """However many stand beside them: vectors of a loop and its remainder agree."""
    assert len(torch.cat([torch.full((size,), 11.0, dtype=torch.float64).log1p() for size in range(40)]).unique()) == 1
