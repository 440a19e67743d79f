"""The recipe of a linear model on subtree counts against scikit-learn on the same matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers import random_graphs
from helpers.cli import facts_of, invoke
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from spin_fast import GraphBatch, datasets, training
from spin_fast.datasets import registry
from spin_fast.datasets.reader import Whole
from spin_fast.nn import SubtreeLinear
from spin_fast.selection import SubtreeRecipe, Trained, TrainingSet
from spin_fast.sklearn import SubtreeCounts

TRAIN, VALIDATION, REST = torch.arange(60), torch.arange(60, 80), torch.arange(80, 100)
COLUMNS = 2**12  # scikit-learn has a weight for each
KNOWN, HELD_OUT = TRAIN.numpy(), VALIDATION.numpy()


def labelled(y: torch.Tensor) -> GraphBatch:
    return replace(random_graphs([4, 6, 3, 0, 9] * 20, dtype=torch.float32, signs=True), y=y)


def fitted(y: torch.Tensor, **options) -> tuple[Trained, SubtreeLinear, GraphBatch]:
    graphs = labelled(y)
    data = TrainingSet.of(graphs, TRAIN, VALIDATION, training.accuracy)
    recipe = SubtreeRecipe(num_hops=2, num_columns=COLUMNS, **options)
    return recipe.train(data, 0), recipe.fit(data), graphs


@pytest.mark.parametrize("classes", [2, 3])
def test_it_is_the_logistic_regression_of_scikit_learn(classes: int) -> None:
    strengths = (0.1, 10.0)
    trained, model, graphs = fitted(torch.arange(100) // 2 % classes, C=strengths)
    matrix, y = SubtreeCounts(2, n_features=COLUMNS).fit_transform(graphs), graphs.y.numpy()
    others = [LogisticRegression(C=C, max_iter=1000).fit(matrix[KNOWN], y[KNOWN]) for C in strengths]
    scores = [other.score(matrix[HELD_OUT], y[HELD_OUT]) for other in others]
    losses = [-other.predict_log_proba(matrix[HELD_OUT])[range(20), y[HELD_OUT]].mean() for other in others]
    best = min(range(len(strengths)), key=lambda number: (-scores[number], losses[number]))
    assert trained[:3] == (scores[best], pytest.approx(losses[best]), 1)
    wanted = torch.from_numpy(others[best].predict_proba(matrix))
    torch.testing.assert_close(training.predict_proba(model, graphs), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(trained.model(graphs[REST]), trained.model(graphs)[REST])


def test_classes_without_training_graphs() -> None:
    y = torch.arange(100) % 2
    y[70], y[71] = 3, 4
    trained, model, graphs = fitted(y)
    probabilities = training.predict_proba(model, graphs)
    assert probabilities.shape == (100, 5)
    assert (probabilities[:, 2:] < 0.01).all()
    assert np.isfinite(trained.loss)
    _, model, graphs = fitted(y.clamp(min=3))  # a single class
    assert (training.predict_proba(model, graphs).argmax(1) == 3).all()


def test_tasks_are_fitted_to_their_known_labels(tmp_path: Path) -> None:
    y = torch.stack([torch.arange(100) % 2, torch.arange(100) // 3 % 2, *torch.ones(2, 100)], dim=1).float()
    y[::3, 0] = y[::4, 1] = y[:, 3] = torch.nan
    _, model, graphs = fitted(y, C=(10.0,))
    matrix, probabilities = (
        SubtreeCounts(2, n_features=COLUMNS).fit_transform(graphs),
        training.predict_proba(model, graphs),
    )
    for task in (0, 1):
        known = KNOWN[~y[TRAIN, task].isnan().numpy()]
        other = LogisticRegression(C=10, max_iter=1000).fit(matrix[known], y[known, task].numpy())
        wanted = torch.from_numpy(expit(other.decision_function(matrix)))
        torch.testing.assert_close(probabilities[:, task], wanted, rtol=1e-6, atol=1e-6)
    assert (probabilities[:, 2] > 0.99).all()  # all known labels are equal
    assert (probabilities[:, 3] == 0.5).all()  # none is known
    training.save_checkpoint(tmp_path / "x", model)
    assert torch.equal(training.predict_proba(training.load_checkpoint(tmp_path / "x")[0], graphs), probabilities)


def test_measured_numbers_are_not_compared() -> None:
    graphs = labelled(torch.arange(100) % 2)
    noise = torch.rand(graphs.num_nodes, 1, generator=torch.Generator().manual_seed(0))
    mixed = replace(graphs, x=torch.cat([noise, graphs.x], dim=1))
    sets = [TrainingSet.of(of, TRAIN, VALIDATION, training.accuracy) for of in (graphs, mixed)]
    one, other = (SubtreeRecipe().fit(of) for of in sets)
    assert (one.config["features"], other.config["features"]) == (None, [1, 2, 3])
    assert torch.equal(one(graphs), other(mixed))


def test_what_is_wrong_is_named() -> None:
    empty = replace(labelled(torch.arange(100) % 2)[3::5], y=torch.arange(20) % 2)
    with pytest.raises(ValueError, match="data must have training graphs with nodes"):
        SubtreeRecipe().fit(TrainingSet.of(empty, torch.arange(9), torch.arange(9, 20), training.accuracy))
    with pytest.raises(ValueError, match=r"C must hold numbers above 0, at least one, got \(\)"):
        SubtreeRecipe(C=())
    for wrong in ((0.0,), 1.0):
        with pytest.raises(ValueError, match="C must hold numbers above 0"):
            SubtreeRecipe(C=wrong)  # type: ignore[arg-type]
    for y, message in (
        (torch.arange(20) % 2 - 1, r"y must be classes in \[0, 1\), .* got -1 to 0"),
        (torch.full((20, 1), 2.0), "y must be tasks of 0, 1 and NaN, got values from 2 to 2"),
        (torch.zeros(20, 1, dtype=torch.int64), r"y must be int64 classes \[G\], or float tasks"),
        (None, r"must have labels \(y\) to train on"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingSet.of(replace(empty, y=y), torch.arange(9), torch.arange(9, 20), training.accuracy)
    shares = replace(labelled(torch.arange(100) % 2), y=torch.full((100, 1), 0.5))
    with pytest.raises(ValueError, match="y must be tasks of 0, 1 and NaN, of a logistic regression no shares"):
        SubtreeRecipe().fit(TrainingSet.of(shares, torch.arange(50), torch.arange(50, 100), training.accuracy))


def test_predict_and_info_in_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, model, graphs = fitted(torch.arange(100) % 2)
    read = datasets.Folder(graphs, [*map(str, range(len(graphs)))], None, None, 0)
    monkeypatch.setattr(registry.Known, "open", lambda *_, **options: Whole(read))
    training.save_checkpoint("model.safetensors", model, dataset="digits", classes=["no", "yes"])
    facts = facts_of("predict", "model.safetensors", "digits", "--out", "x.csv")
    assert (facts["graphs"], facts["operator"]) == (100, None)
    table = pandas.read_csv("x.csv")
    assert list(table) == ["graph", "prediction", "class_no", "class_yes"]
    assert np.array_equal(table.iloc[:, 2:].to_numpy(), training.predict_proba(model, graphs).numpy())
    error = invoke("predict", "model.safetensors", "digits", "--operator", "sym", "--out", "x.csv", exit_code=1)
    assert "--operator sym: model.safetensors is a SubtreeLinear, which has none" in error
    shown = invoke("info", "model.safetensors")
    for row in ("SubtreeLinear", "num_hops", '["no", "yes"]'):
        assert row in shown
