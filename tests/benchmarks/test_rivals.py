"""Rivals that are evaluated as SPIN is: each learns, from the training graphs alone, and is what it is said to be."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import benchmark_module
from torch import Tensor, nn

from spin_fast import GraphBatch, datasets, training
from spin_fast.selection import Evaluation, TrainingSet, evaluate, spaces

pytest.importorskip("torch_geometric")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
QUICK = {"hidden_features": 16, "epochs": 20, "batch_size": 8, "learning_rate": 1e-2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSets": ("networks", QUICK),
    "GIN": ("networks", {**QUICK, "num_layers": 2, "dropout": 0.2}),
    "GCN": ("networks", {**QUICK, "num_layers": 2}),
    "GraphSAGE": ("networks", {**QUICK, "num_layers": 2, "aggregation": "sum"}),
    "ECC": ("networks", {**QUICK, "num_layers": 2}),
    "DGCNN": ("networks", {**QUICK, "num_layers": 2}),
    "DiffPool": ("networks", QUICK),
    "Forest": ("columns", {"num_trees": 20}),
    "LTP": ("columns", {"num_trees": 20}),
    "grakel": ("columns", {"library": "grakel"}),
    "subtree counts": ("columns", {"library": "spin_fast"}),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cycles_and_stars(number: int = 48) -> GraphBatch:
    """Graphs of 6 to 11 nodes, in turn cycles and stars; features are the degree, whether it is 1, and random signs."""
    edges, batch = [], []
    for graph in range(number):
        size = 6 + graph // 2 % 6
        node = torch.arange(size)
        ends = torch.stack([node, (node + 1) % size]) if graph % 2 == 0 else torch.stack([0 * node, node])[:, 1:]
        edges.append(ends + len(batch))
        batch += [graph] * size
    edge_index = torch.cat(edges, dim=1)
    degree = torch.bincount(edge_index.flatten(), minlength=len(batch)).float()
    sign = torch.randn(len(batch), generator=torch.Generator().manual_seed(0)).sign()
    y = torch.arange(number) % 2
    x = torch.stack([degree, (degree == 1).float(), sign], dim=1)
    return GraphBatch.from_edge_index(edge_index, x, torch.tensor(batch), y=y, undirected=True)


def settings_of(kind: str) -> Any:
    module, values = KINDS[kind]
    if kind == "grakel":
        pytest.importorskip("grakel")
    name = "WeisfeilerLehman" if "library" in values else kind
    return getattr(benchmark_module(f"rivals.{module}"), name)(**values)


@pytest.mark.parametrize("kind", KINDS)
def test_rivals_learn_the_same_again(kind: str) -> None:
    graphs = cycles_and_stars()
    settings, data = (
        settings_of(kind),
        TrainingSet.of(graphs, torch.arange(24), torch.arange(24, 36), training.accuracy),
    )
    trained = settings.train(data, 0)
    test = graphs[36:]
    scores = trained.model(test)
    assert scores.shape == (12, 2)
    assert trained.validation == 1
    assert training.accuracy(scores, test.y) > 0.9
    again = settings.train(TrainingSet.of(graphs, torch.arange(24), torch.arange(24, 36), training.accuracy), 0)
    assert torch.equal(again.model(test), scores)
    assert torch.equal(pickle.loads(pickle.dumps(trained.model))(test), scores)
    one_by_one = torch.cat([trained.model(test[graph]) for graph in range(12)])
    torch.testing.assert_close(one_by_one, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rivals_train_on_the_training_graphs_alone(kind: str) -> None:
    """Other labels of the validation graphs change what is measured, and nothing else."""
    graphs, settings = cycles_and_stars(), settings_of(kind)
    assert graphs.y is not None
    found = []
    for y in (graphs.y, torch.cat([graphs.y[:24], 1 - graphs.y[24:]])):
        labelled = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, graphs.x, y)
        data = TrainingSet.of(labelled, torch.arange(24), torch.arange(24, 36), training.accuracy)
        found.append(settings.train(data, 0, epochs=1))
    assert found[0].epochs == found[1].epochs == 1
    assert found[0].validation == pytest.approx(1 - found[1].validation)
    assert torch.equal(*(trained.model(graphs[36:]) for trained in found))


@pytest.mark.parametrize("kind", ["GIN", "WL"])
def test_evaluation_of_a_grid(kind: str) -> None:
    graphs, rivals = cycles_and_stars(), benchmark_module("rivals.evaluate")
    assert graphs.y is not None
    folds = datasets.stratified_folds(graphs.y, 2, validation=0.25)
    found = evaluate(graphs, folds, rivals.grid(kind, 2), num_runs=1, budgets=(2,))
    assert [len(fold.trials) for fold in found.folds] == [2, 2]
    assert found.mean_and_std()[0] > 0.8


def test_grids() -> None:
    rivals = benchmark_module("rivals.evaluate")
    assert all(rivals.grid(kind, 3) for kind in rivals.GRIDS)
    assert {of.one_hot for of in rivals.grid("GCN", one_hot=True)} == {True}
    searched, family = rivals.gin_space(), spaces.family()
    for name in ("learning_rate", "weight_decay", "batch_size", "hidden_features", "degree", "epochs"):
        assert searched[name] == family[name]
    drawn = rivals.grid(rivals.SEARCHED, 64)
    assert len({str(of) for of in drawn}) == 64
    assert drawn == rivals.grid(rivals.SEARCHED, 64)


def test_diverging_networks_say_so() -> None:
    data = TrainingSet.of(cycles_and_stars(), torch.arange(24), torch.arange(24, 36), training.accuracy)
    graph_sage = benchmark_module("rivals.networks").GraphSAGE
    with pytest.raises(training.Diverged):
        graph_sage(epochs=5, learning_rate=1e30).train(data, 0)


def test_directed_graphs_are_not_for_products() -> None:
    path = GraphBatch.from_edge_index(torch.tensor([[0], [1]]), torch.ones(2, 1), y=torch.tensor([0]))
    with pytest.raises(ValueError, match="undirected"):
        benchmark_module("rivals.networks").GIN().prepared(path)


def test_tasks_are_for_networks() -> None:
    graphs = cycles_and_stars()
    assert graphs.y is not None
    tasks = torch.stack([graphs.y, 1 - graphs.y], dim=1).float()
    labelled = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, graphs.x, tasks)
    data = TrainingSet.of(labelled, torch.arange(24), torch.arange(24, 36), training.rocauc)
    assert settings_of("GIN").train(data, 0).validation == 1
    with pytest.raises(ValueError, match="one class"):
        settings_of("Forest").train(data, 0)


def test_edge_conditioned_layers_are_pygs() -> None:
    layer_of = benchmark_module("rivals.networks").ECCLayer
    weights = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3 * 4))
    layer = layer_of(3, 4, weights)
    x, edge_index, feature = torch.randn(7, 3), torch.randint(7, (2, 20)), torch.randn(20, 2)
    theirs = super(layer_of, layer).forward(x, edge_index, feature)
    torch.testing.assert_close(layer(x, edge_index, feature), theirs)


def random_graphs() -> GraphBatch:
    """Sparse ones, so that most have several components, with few labels."""
    graphs = datasets.erdos_renyi(20, 14, 0.12, num_features=0)
    x = torch.randint(3, (graphs.num_nodes, 1), generator=torch.Generator().manual_seed(1)).float()
    return GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, x, torch.arange(20) % 2)


def test_edge_scores_are_those_of_networkx() -> None:
    networkx, columns = pytest.importorskip("networkx"), benchmark_module("rivals.columns")
    for graph in random_graphs():
        whole = networkx.Graph(graph.edge_index.t().tolist())
        edges = [tuple(sorted(edge)) for edge in whole.edges]
        betweenness = networkx.edge_betweenness_centrality(whole, normalized=False)
        neighbours = {node: set(whole[node]) for node in whole}
        jaccard = {(u, v): len(neighbours[u] & neighbours[v]) / len(neighbours[u] | neighbours[v]) for u, v in edges}
        found = columns.edge_scores(graph)
        assert np.allclose(np.sort(found[0]), sorted(betweenness.values()))
        assert np.allclose(np.sort(found[1]), sorted(jaccard.values()))


def test_local_degree_score() -> None:
    """Of a hub of degree 4, two nodes of degree 3 and others: by hand."""
    columns = benchmark_module("rivals.columns")
    edges = torch.tensor([[0, 0, 0, 0, 1, 1, 2], [1, 2, 3, 4, 2, 3, 4]])
    graph = GraphBatch.from_edge_index(edges, torch.ones(5, 1), undirected=True)
    second = 1 - np.log(2) / np.log(2)
    # Of nodes 1 and 2 the hub is the only larger neighbour; 3 and 4 have the hub first, then a node of degree 3.
    assert sorted(columns.edge_scores(graph)[2]) == sorted([1, 1, 1, 1, 0, second, second])


def test_degree_profile() -> None:
    columns = benchmark_module("rivals.columns")
    paths = GraphBatch.from_edge_index(
        torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.ones(6, 1), torch.tensor([0, 0, 0, 1, 1, 1]), undirected=True
    )
    degree, low, high, mean, deviation = columns.degree_profile(paths)
    assert [of.tolist() for of in degree] == [[1, 2, 1], [1, 1, 0]]
    assert [of.tolist() for of in low] == [[2, 1, 2], [1, 1, 0]]
    assert [of.tolist() for of in high] == [of.tolist() for of in mean] == [of.tolist() for of in low]
    assert [of.tolist() for of in deviation] == [[0, 0, 0], [0, 0, 0]]


def test_kernels_are_equal() -> None:
    pytest.importorskip("grakel")
    graphs, columns = random_graphs(), benchmark_module("rivals.columns")
    of_grakel, ours = (kernel(graphs[:12], 3)(graphs) for kernel in (columns.Grakel, columns.Counts))
    np.testing.assert_allclose(of_grakel, ours, atol=1e-12)


def test_classes_without_training_graphs_are_never_chosen() -> None:
    graphs = cycles_and_stars()
    assert graphs.y is not None
    y: Tensor = graphs.y.clone()
    y[24] = 3
    labelled = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, graphs.x, y)
    data = TrainingSet.of(labelled, torch.arange(24), torch.arange(24, 36), training.accuracy)
    for kind in ("Forest", "subtree counts"):
        scores = settings_of(kind).train(data, 0).model(graphs[36:])
        assert scores.shape == (12, 4)
        assert scores.argmax(1).max() == 1


def test_fingerprints() -> None:
    pytest.importorskip("rdkit", reason="fingerprints need RDKit")
    smiles = ["CCO", "OCC", "c1ccccc1", "CC1=[O+][Cu-3]2([O+]=C(CC)C1)[O+]=C(CC)CC(CC)=[O+]2"]
    graphs = benchmark_module("rivals.columns").fingerprints(smiles, torch.arange(4))
    assert (graphs.num_nodes, graphs.num_edges, graphs.num_features) == (4, 0, 2048)
    assert torch.equal(graphs.x[0], graphs.x[1])
    assert not torch.equal(graphs.x[0], graphs.x[2])


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rivals = benchmark_module("rivals.evaluate")

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
        rivals.main()
        return capsys.readouterr().out

    common = ("--settings", "2", "--folds", "1", "--runs", "1", "--out", str(tmp_path))
    assert "WL on CSL: accuracy" in run("WL", "CSL", *common)
    found = Evaluation.load(tmp_path / "evaluation.json")
    assert (found.about["space"], found.about["dataset"], len(found.folds)) == ("WL", "CSL", 1)
    with pytest.raises(SystemExit):
        run("WL", "CSL", *common)
    assert "fold 0" not in run("WL", "CSL", *common, "--resume")
    with pytest.raises(SystemExit):
        run("fingerprints", "CSL", *common, "--resume")
    assert "SMILES" in capsys.readouterr().err
