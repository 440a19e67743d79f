"""Ensemble: mean of probabilities, files, bad members."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers.cli import invoke

from spin_fast import PAGNN, SPIN, GraphBatch, NodeFeatures, datasets, training
from spin_fast.nn import Ensemble, GraphModel, SubtreeLinear
from spin_fast.nn.ensemble import mean_scores
from spin_fast.selection import SubtreeRecipe, TrainingSet


@pytest.fixture(scope="module")
def graphs() -> GraphBatch:
    return datasets.load("digits")[:60]


def members(graphs: GraphBatch, out_features: int = 10) -> list[GraphModel]:
    found: list[GraphModel] = []
    for number, (operator, degree) in enumerate((("sym", None), ("adj", "log"), ("sym,adj", None))):
        torch.manual_seed(number)
        node_features = NodeFeatures(degree, standardize=number != 2).fit(graphs)
        width = node_features.transform(graphs).num_features
        branches = "both" if number else "hops"
        model = SPIN(width, 8, out_features, 2, num_operators=1 + operator.count(","), branches=branches)
        model.operator, model.node_features = operator, node_features
        found.append(model.eval())
    return found


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 22])
def test_the_probabilities_are_the_mean(graphs: GraphBatch, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = members(graphs)
    expected = torch.stack([training.predict_proba(part, graphs) for part in parts]).mean(0)
    monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", chunk_bytes)
    torch.testing.assert_close(training.predict_proba(Ensemble(parts), graphs), expected)
    assert training.predict_proba(Ensemble(parts), graphs[:0]).shape == (0, 10)


def test_of_tasks(graphs: GraphBatch, tmp_path: Path) -> None:
    parts = members(graphs, out_features=3)
    for part in parts:
        part.multilabel = True
    expected = torch.stack([training.predict_proba(part, graphs) for part in parts]).mean(0)
    torch.testing.assert_close(training.predict_proba(Ensemble(parts), graphs), expected)
    training.save_checkpoint(tmp_path / "x", Ensemble(parts))
    loaded, _ = training.load_checkpoint(tmp_path / "x")
    for part, again in zip(parts, loaded.members, strict=True):
        assert torch.equal(training.predict_proba(again, graphs), training.predict_proba(part, graphs))


def test_a_single_output_is_a_task(graphs: GraphBatch) -> None:
    parts = members(graphs, out_features=1)
    expected = torch.stack([training.predict_proba(part, graphs) for part in parts]).mean(0)
    torch.testing.assert_close(training.predict_proba(Ensemble(parts), graphs), expected)


@pytest.mark.parametrize("tasks", [False, True])
def test_mean_scores_of_certain_models(tasks: bool) -> None:
    scores = torch.tensor([[800.0, -800.0], [900.0, -900.0]])[:, None]
    mean = mean_scores(list(scores), tasks)
    assert mean.isfinite().all()
    assert (mean[:, 0] > mean[:, 1]).all()


def test_it_is_the_same_from_a_file(graphs: GraphBatch, tmp_path: Path) -> None:
    train, validation = torch.arange(40), torch.arange(40, 60)
    data = TrainingSet.of(graphs, train, validation, training.accuracy)
    linear = SubtreeRecipe(num_hops=1, C=(1.0,)).fit(data)
    parts = members(graphs)
    for part in parts:
        part.multilabel = False
    model = Ensemble([*parts, linear])
    before = training.predict_proba(model, graphs)
    path = tmp_path / "model.safetensors"
    training.save_checkpoint(path, model, dataset="digits", config=3)
    loaded, metadata = training.load_checkpoint(path)
    assert isinstance(loaded, Ensemble)
    assert isinstance(loaded.members[3], SubtreeLinear)
    assert [member.operator for member in loaded.members] == ["sym", "adj", "sym,adj", None]
    assert metadata == {"dataset": "digits", "config": 3, "multilabel": False}
    assert torch.equal(training.predict_proba(loaded, graphs), before)
    invoke("predict", path, "digits", "--out", tmp_path / "p.csv")
    reversed_path = tmp_path / "reversed.safetensors"
    training.save_checkpoint(reversed_path, Ensemble([*loaded.members][::-1]), dataset="digits")
    invoke("predict", reversed_path, "digits", "--out", tmp_path / "reversed.csv")
    invoke("explain", reversed_path, "digits", "--graph", 3, "--out", tmp_path / "e.png")
    tables = [pandas.read_csv(tmp_path / name).iloc[:, 2:].to_numpy() for name in ("p.csv", "reversed.csv")]
    np.testing.assert_allclose(*tables, atol=1e-5)
    shown = invoke("info", path)
    assert "Ensemble" in shown
    assert "SubtreeLinear" in shown


def test_members_may_not_know_whether_they_have_tasks(graphs: GraphBatch) -> None:
    parts = members(graphs)
    parts[1].multilabel = False
    assert Ensemble(parts).multilabel is False
    parts[0].multilabel = True
    with pytest.raises(ValueError, match="members must have the same multilabel, got"):
        Ensemble(parts)


def test_bad_members(graphs: GraphBatch, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="members must be models of graphs, at least one"):
        Ensemble([])
    with pytest.raises(TypeError, match="members must be models of graphs"):
        Ensemble([torch.nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="members must be models of graphs, at least one, and no ensembles"):
        Ensemble([Ensemble(members(graphs))])
    with pytest.raises(ValueError, match="members must be different models"):
        Ensemble(members(graphs)[:1] * 2)
    with pytest.raises(ValueError, match="members must have the same out_features, got"):
        Ensemble([*members(graphs), *members(graphs, out_features=3)])
    with pytest.raises(ValueError, match="members must take graphs of as many features each, got 2, 3"):
        Ensemble([SPIN(width, 4, 10, num_hops=1) for width in (3, 2)])
    with pytest.raises(ValueError, match="graphs must have 3 features as fitted, got 2"):
        training.predict_proba(Ensemble(members(graphs)), replace(graphs, x=graphs.x[:, :2]))
    of_any_modules = PAGNN([torch.nn.Linear(3, 10) for _ in range(3)])
    with pytest.raises(TypeError, match="whose arguments a checkpoint holds, got PAGNN"):
        training.save_checkpoint(tmp_path / "x", Ensemble([of_any_modules]))
