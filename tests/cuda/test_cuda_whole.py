"""What users do, on a GPU from beginning to end: commands, estimator, evaluation, explanations, files.

Each runs on the CPU too, so that a machine without a GPU tests that the test is right.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from cuda_kernels import needs_gpu
from helpers import random_graphs
from helpers.cli import facts_of, invoke

from spin_fast import SPIN, GraphBatch, NodeFeatures, PowerFeatures, datasets, training
from spin_fast.selection import Recipe, SubtreeRecipe, evaluate
from spin_fast.sklearn import SPINClassifier

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
TRAIN = ("--epochs", 2, "--schedule", "constant", "--hops", 1, "--hidden", 8, "--batch-size", 256)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def graphs_of_two_kinds(num_graphs: int = 60) -> GraphBatch:
    graphs = random_graphs([3 + i % 9 for i in range(num_graphs)], density=0.4, dtype=torch.float32)
    return replace(graphs, x=graphs.x.round(), y=torch.arange(num_graphs) % 2)


def test_commands(device: str, tmp_path: Path) -> None:
    on = ("--device", device)
    run, out = tmp_path / "run", tmp_path / "probabilities.csv"
    assert facts_of("train", *TRAIN, *on, "--out", run)["test"] > 0.1  # of ten digits
    invoke("train", *TRAIN, "--epochs", 3, *on, "--out", run, "--resume")
    tables = []
    for place in (device, "cpu"):
        invoke("predict", run / "model.safetensors", "digits", "--device", place, "--out", out)
        tables.append(pandas.read_csv(out).filter(like="class_"))
    np.testing.assert_allclose(*tables, rtol=1e-3, atol=1e-5)
    invoke("explain", run / "model.safetensors", "digits", "--graph", 3, *on, "--out", tmp_path / "graph.png")
    features = tmp_path / "features.safetensors"
    invoke("precompute", "digits", "--hops", 1, "--out", features)
    invoke("train", *TRAIN, "--features", features, *on, "--metric", "accuracy", "--out", tmp_path / "stored")


@pytest.mark.parametrize("options", [{}, {"class_weight": "balanced", "branches": "hops", "readout": "attention"}])
def test_estimator(device: str, options: dict) -> None:
    graphs = graphs_of_two_kinds()
    labels = np.array(["a", "b"])[graphs.y.numpy()]
    for given in (graphs, graphs.to(device)):
        model = SPINClassifier(hidden_features=8, epochs=2, device=device, random_state=0, **options)
        model.fit(given, labels)
        probabilities = pickle.loads(pickle.dumps(model)).predict_proba(given)
        assert probabilities.shape == (60, 2)
        np.testing.assert_allclose(probabilities, model.predict_proba(graphs), rtol=1e-4, atol=1e-6)
        assert 0 <= model.score(given, labels) <= 1


@pytest.mark.parametrize("recipe", [Recipe(epochs=2, hidden_features=8), SubtreeRecipe()])
def test_evaluation(device: str, recipe: Recipe | SubtreeRecipe) -> None:
    split = datasets.Split(torch.arange(30), torch.arange(30, 40), torch.arange(40, 60))
    for metric in (training.accuracy, training.rocauc):
        done = evaluate(graphs_of_two_kinds().to(device), [split], [recipe], metric=metric, num_runs=2)
        assert np.isfinite(done.folds[0].test).all()


MODELS: dict[str, Callable[[], SPIN]] = {
    "SPIN": lambda: SPIN(3, 8, 2, 2),
    "joint": lambda: SPIN(3, 8, 2, 2, branches="joint", batch_norm=True, dropout=0.1),
    "size aware": lambda: SPIN(3, 8, 2, 2, size_aware=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_library(device: str, name: str, tmp_path: Path) -> None:
    graphs = graphs_of_two_kinds().to(device)
    prepared = NodeFeatures().fit(graphs, range(40))
    graphs = prepared.transform(graphs)
    features = PowerFeatures.from_graphs(graphs, 2)
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    model.operator = "sym"
    model.calibrate(features)
    fit = training.fit(model, features, range(40), range(40, 60), epochs=2, class_weight="balanced")
    assert all(np.isfinite(epoch.loss) for epoch in fit.epochs)
    scores = training.predict(model, features)
    from_graphs = training.predict_proba(model, graphs, "sym")
    torch.testing.assert_close(model.probabilities(scores), from_graphs, rtol=1e-4, atol=1e-5)
    explained = training.explain(model, graphs[:5], "sym")
    expected = scores[range(5), explained.targets].double()
    torch.testing.assert_close(explained.scores, expected, rtol=1e-3, atol=1e-4)
    training.save_checkpoint(tmp_path / "model.safetensors", model)
    loaded, _ = training.load_checkpoint(tmp_path / "model.safetensors")
    torch.testing.assert_close(training.predict(loaded.eval(), features.cpu()), scores.cpu(), rtol=1e-4, atol=1e-5)
    features.save(tmp_path / "features.safetensors")
    again = PowerFeatures.load(tmp_path / "features.safetensors").to(device)
    assert torch.equal(training.predict(model, again), scores)


def test_graphs_move(device: str) -> None:
    graphs = graphs_of_two_kinds().to(device)
    assert len(graphs.to_pyg()) == 60
    again = GraphBatch.from_edge_index(graphs.edge_index, graphs.x, torch.repeat_interleave(graphs.num_nodes_per_graph))
    assert torch.equal(again.degree, graphs.degree)
    joined = GraphBatch.concatenate([graphs[:20], graphs[20:]])
    assert torch.equal(joined.indices, graphs.indices)
    features = PowerFeatures.from_graphs(graphs, 2)
    assert features.identical_graphs().device == features.rows.device
    nodes = features.nodes()
    assert nodes.num_graphs == graphs.num_nodes
