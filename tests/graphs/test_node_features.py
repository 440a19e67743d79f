from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

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
    assert NodeFeatures().fit(whole).transform(whole).x is whole.x
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


@settings(max_examples=60, deadline=None)
@given(data=st.data(), degree=st.sampled_from([None, *preprocessing.DEGREES]), one_hot=st.sampled_from([False, [1]]))
def test_chunks_of_graphs_change_no_bit(
    data: st.DataObject, degree: preprocessing.Degree | None, one_hot: bool | list[int]
) -> None:
    """Wherever they are cut, with blocks of nodes that are smaller and larger than chunks."""
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(any))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=5)))
    train = data.draw(st.none() | st.lists(st.integers(0, len(sizes) - 1), min_size=1, unique=True))
    rng = np.random.default_rng(len(sizes))
    x = np.stack([rng.normal(1e3, 1e-2, sum(sizes)), rng.integers(-2, 3, sum(sizes)), rng.integers(0, 2, sum(sizes))])
    graphs = graphs_with(
        torch.tensor(x.T.copy(), dtype=data.draw(st.sampled_from([torch.float32, torch.float64]))), sizes
    )
    options = {"one_hot": one_hot, "columns": data.draw(st.sampled_from([None, [0, 2]])), "keep_x": True}
    chunks = (graphs[begin:end] for begin, end in pairwise([0, *cuts, len(sizes)]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(preprocessing, "BLOCK", data.draw(st.sampled_from([1, 7, 1 << 16])))
        if train is not None and not sum(sizes[graph] for graph in train):
            with pytest.raises(ValueError, match="graphs must have nodes in the training part"):
                NodeFeatures(degree, **options).fit(chunks, train)
            return
        whole = NodeFeatures(degree, **options).fit(graphs, train)
        again = NodeFeatures(degree, **options).fit(chunks, train)
        assert again.to_dict() == whole.to_dict()
    made = (
        NodeFeatures(degree, **options | {"standardize": False, "columns": None}).fit(graphs, train).transform(graphs)
    )
    made = (made if train is None else made[train]).x.double()[:, whole.columns_]
    np.testing.assert_allclose(whole.mean_, made.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(whole.scale_, made.numpy().std(0), rtol=1e-6)


def test_only_a_chunk_is_in_memory() -> None:
    alive: list[weakref.ref] = []

    def chunks() -> Iterator[GraphBatch]:
        for _ in range(5):
            assert all(memory() is None for memory in alive)
            graphs = typed()
            memory = graphs.x.numpy().copy()
            alive.append(weakref.ref(memory))
            graphs = replace(graphs, x=torch.from_numpy(memory))
            del memory
            yield graphs
            del graphs

    assert NodeFeatures("profile").fit(chunks(), [0, 8, 23]).columns_ == [0, 1, 5, 6, 7, 8, 9]


def test_wrong_chunks() -> None:
    graphs = typed()
    with pytest.raises(ValueError, match=r"alike in all chunks, got 5 features in float32 on cpu .* and 3 features"):
        NodeFeatures().fit([graphs, replace(graphs, x=graphs.x[:, 1:4].contiguous())])
    with pytest.raises(
        TypeError, match="ids must be numbers of graphs where these come in chunks, got a slice or a ma"
    ):
        NodeFeatures().fit([graphs], slice(3))
    for ids in ([5], [-1]):
        with pytest.raises(IndexError, match="ids must be from 0 to 4, numbers of graphs, got"):
            NodeFeatures().fit([graphs[:2], graphs[2:]], ids)
    with pytest.raises(ValueError, match="graphs must have nodes in the training part"):
        NodeFeatures().fit(iter(()))
    for wrong in (5, [5]):
        with pytest.raises(TypeError, match="graphs must be a GraphBatch"):
            NodeFeatures().fit(wrong)  # type: ignore[arg-type,type-var]


def test_which_graphs_it_was_fitted_to() -> None:
    graphs = typed()
    fitted = NodeFeatures().fit(graphs, [3, 0])
    assert fitted.ids_sha256_ == NodeFeatures("log").fit(graphs, [0, 3]).ids_sha256_
    assert fitted.ids_sha256_ == preprocessing.ids_sha256(torch.tensor([3, 0]))
    assert fitted.ids_sha256_ != NodeFeatures().fit(graphs).ids_sha256_ == NodeFeatures().fit([graphs]).ids_sha256_
    assert (
        fitted.fingerprint == NodeFeatures().fit([graphs], [0, 3]).fingerprint != NodeFeatures().fit(graphs).fingerprint
    )
    state = fitted.to_dict()
    del state["ids_sha256_"]
    assert NodeFeatures.from_dict(state).ids_sha256_ is None


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


def test_a_file(tmp_path: Path) -> None:
    made = NodeFeatures("one-hot", columns=[0, 1]).fit(typed(), [0, 3])
    path = tmp_path / "deep" / "x.json"
    made.save(path)
    assert vars(NodeFeatures.load(path)) == vars(made)
    text = path.read_text()
    assert json.loads(text)["format"] == "spin_fast node-features 1"
    for damaged, message in (
        (text[:-9], "is not a JSON file"),
        (text.replace("features 1", "features 2"), "this version reads 'spin_fast node-features 1'; upgrade spin_fast"),
        (text.replace("node-features 1", "features 1"), "is no file of spin_fast node-features"),
        (text.replace("mean_", "main_"), "x.json is damaged: state must be what NodeFeatures.to_dict has told"),
        (text.replace('"node_features"', '"features"'), "x.json is damaged"),
    ):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=message) as error:
            NodeFeatures.load(path)
        assert str(path) in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"node-features .*none\.json does not exist"):
        NodeFeatures.load(tmp_path / "none.json")


def test_a_checkpoint_carries_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    graphs = typed()
    made = NodeFeatures("log").fit(graphs, [0, 3])
    model = spin_fast.SPIN(6, 4, 2, 1)
    prepared = spin_fast.training.predict_proba(model, made.transform(graphs), "sym")
    model.operator, model.node_features = "sym", made
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
        {"ids_sha256_": 7},
        {"columns_": [0, 1, 6]},
        {"mean_": [0.0, float("nan"), 0.0]},
        {"scale_": [1.0, 1.0, 0.0]},
        None,
    ],
    ids=str,
)
def test_damaged_state(damage: dict[str, object] | None) -> None:
    state = NodeFeatures("log").fit(typed()).to_dict()
    needed = state.keys() - {"ids_sha256_"}
    damaged = [state | damage] if damage else [{k: v for k, v in state.items() if k != name} for name in needed]
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
        ({"columns": 5}, "columns must be a sequence of ints, got int"),
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
    made = NodeFeatures().fit(graphs)
    with pytest.raises(ValueError, match="x must be finite in the training graphs to be standardised; column 1 is not"):
        made.fit(replace(graphs, x=x))
    with pytest.raises(ValueError, match="must be fitted before"):  # what a failure leaves is not used
        made.transform(graphs)


def test_equal_degrees_have_equal_logarithms() -> None:
    """However many stand beside them: vectors of a loop and its remainder agree."""
    assert len(torch.cat([torch.full((size,), 11.0, dtype=torch.float64).log1p() for size in range(40)]).unique()) == 1


def test_graphs_tell_what_has_transformed_them() -> None:
    graphs = typed()
    made, nothing = NodeFeatures("log").fit(graphs), NodeFeatures(standardize=False).fit(graphs)
    once = made.transform(graphs)
    assert graphs.node_features is None
    for same in (once, once[1:3], once[[2, 0]], once.cpu(), replace(once, y=torch.arange(5)), copy.deepcopy(once)):
        assert same.node_features.to_dict() == made.to_dict()
    assert made.transform(once) is once  # and does not standardise it twice
    assert NodeFeatures("log").fit(graphs, range(5)).transform(once[:2]).x.equal(once[:2].x)
    assert made.transform(nothing.fit(once).transform(once)).x.equal(once.x)
    with pytest.raises(ValueError, match=f"{nothing.fit(graphs).fingerprint} were fitted on, which nothing had"):
        nothing.transform(once)
    assert GraphBatch.concatenate([once[:2], made.transform(graphs[2:])]).node_features is not None
    assert len(GraphBatch.concatenate([nothing.transform(graphs[:2]), graphs[2:]])) == 5
    with pytest.raises(ValueError, match=r"alike, got graphs prepared by NodeFeatures .* and by no NodeFeatures"):
        GraphBatch.concatenate([once, replace(once, node_features=None)])
    with pytest.raises(TypeError, match="node_features must be fitted NodeFeatures or None, got NodeFeatures"):
        replace(graphs, node_features=NodeFeatures())


def test_what_was_fitted_on_transformed_graphs_transforms_these_first(tmp_path: Path) -> None:
    graphs = typed()
    first = NodeFeatures("log").fit(graphs, [0, 3])
    once = first.transform(graphs)
    second = NodeFeatures("one-hot", standardize=True).fit(once, [0, 3])
    twice = second.transform(once)
    second.save(tmp_path / "second.json")
    assert NodeFeatures.load(tmp_path / "second.json").to_dict() == second.to_dict()
    for made in (second, NodeFeatures.load(tmp_path / "second.json"), twice.node_features):
        for at in (graphs, once, twice):
            assert made.transform(at).x.equal(twice.x)
    third = NodeFeatures(columns=[0]).fit([twice[:2], twice[2:]])
    assert third.transform(graphs).x.equal(third.transform(twice).x)
    other = NodeFeatures("log").fit(graphs, [4]).transform(graphs)
    for made in (first, second, third):
        with pytest.raises(ValueError, match=f"NodeFeatures {first.fingerprint} were fitted on, which nothing had"):
            made.transform(other)
    with pytest.raises(ValueError, match=r"alike in all chunks, got 5 features .* by no NodeFeatures and 5"):
        NodeFeatures().fit([graphs, replace(once, x=graphs.x)])
    with pytest.raises(ValueError, match=r"state must be what NodeFeatures\.to_dict has told"):
        NodeFeatures.from_dict(second.to_dict() | {"previous_": {}})
    with pytest.raises(ValueError, match=r"num_features_ must be \d+, as previous_ makes"):
        NodeFeatures.from_dict(second.to_dict() | {"previous_": second.to_dict()})
