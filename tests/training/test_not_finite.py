"""Scores that are not finite: never a class, never the best epoch, never a saved model."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spin_fast import SPIN, GraphBatch, PowerFeatures, datasets, training
from spin_fast.training.losses import loss_of


def new_model(**options) -> SPIN:
    torch.manual_seed(0)
    return SPIN(3, 8, 10, 2, **options)


def graph_too_large(graphs: GraphBatch, number: int) -> GraphBatch:
    x = graphs.x.clone()
    x[graphs.ptr[number] : graphs.ptr[number + 1]] = 3e38
    return replace(graphs, x=x)


def test_metrics_are_nan() -> None:
    y, tasks = torch.tensor([0, 1, 1]), torch.tensor([[0.0], [1.0], [1.0]])
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.tensor([[1.0, 0], [0, 1], [0, value]])
        for metric in (training.accuracy, training.rocauc, training.ap):
            assert math.isnan(metric(logits, y))
            assert math.isnan(metric(logits[:, 1:], tasks))


def test_probabilities_are_nan() -> None:
    scores = torch.tensor([[0.0, 0], [0, math.inf], [-math.inf, 0], [math.nan, 0]])
    model = SPIN(3, 8, 2, 2)
    model.multilabel = False
    assert model.probabilities(scores).isnan().tolist() == [[False] * 2, *[[True] * 2] * 3]
    model.multilabel = True
    assert model.probabilities(scores).isnan().tolist() == [[False] * 2, [False, True], [True, False], [True, False]]


def test_predict_proba_counts_them() -> None:
    graphs = graph_too_large(datasets.load("digits")[:9], 5)
    with pytest.warns(UserWarning, match=r"1 of 9 graph\(s\) have scores that are not finite, the first is 5") as said:
        probabilities = training.predict_proba(new_model(), graphs, "adj")
    assert said[0].filename == __file__
    assert probabilities.isnan().any(1).nonzero().tolist() == [[5]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_epoch_with_such_scores_is_never_the_best(
    digits: PowerFeatures, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Whatever the metric, and the loss of it, would say."""
    calls, predict = [], training.predict

    def predicted(*arguments) -> torch.Tensor:
        calls.append(1)
        logits = predict(*arguments).clone()
        if len(calls) == 2:
            logits[0] = torch.where(torch.arange(10) == digits.labels[200], 0.0, -math.inf)
            logits[0, (digits.labels[200] + 1) % 10] = value
        return logits

    monkeypatch.setattr(sys.modules["spin_fast.training.fit"], "predict", predicted)
    scores = iter([0.5, 0.4])
    with pytest.warns(UserWarning, match=r"1 validation graph\(s\) have scores that are not finite in epoch 2"):
        fit = training.fit(new_model(), digits, range(200), range(200, 300), epochs=3, metric=lambda *_: next(scores))
    assert [epoch.validation for epoch in fit.epochs] == [0.5, pytest.approx(math.nan, nan_ok=True), 0.4]
    assert math.isnan(fit.epochs[1].validation_loss)
    assert fit.best_epoch == 0


def test_no_epoch_with_finite_scores_is_an_error(digits: PowerFeatures, tmp_path: Path) -> None:
    model, state = new_model(), tmp_path / "state"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.warns(UserWarning, match="scores that are not finite in epoch 1"),
        pytest.raises(ValueError, match=r"training diverged: neither metric nor loss .* lower learning_rate"),
    ):
        training.fit(
            model, digits, range(200), range(200, 300), epochs=1, batch_size=200, learning_rate=1e20, state=state
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.operator, model.multilabel) == (None, None)
    assert not state.exists()


def test_a_model_of_nan_is_not_saved(tmp_path: Path) -> None:
    model = new_model(batch_norm=True)
    training.save_checkpoint(tmp_path / "finite", model)
    model.hops.layers[0].bias.data[0] = math.nan
    with pytest.raises(ValueError, match=r"finite parameters, got NaN or infinity in hops\.layers\.0\.bias"):
        training.save_checkpoint(tmp_path / "x", model)
    assert not (tmp_path / "x").exists()


def test_the_estimator_predicts_no_class() -> None:
    pytest.importorskip("sklearn")
    from spin_fast.sklearn import SPINClassifier

    graphs = datasets.load("digits")[:60]
    classifier = SPINClassifier(8, 1, epochs=1, standardize=False, validation_fraction=0).fit(graphs)
    for method in ("predict", "predict_proba", "predict_log_proba", "decision_function"):
        with pytest.raises(ValueError, match=r"X has 1 graph\(s\) whose scores are not finite, the first is 7"):
            getattr(classifier, method)(graph_too_large(graphs, 7))


def test_huge_scores_that_are_finite_are_scores(digits: PowerFeatures) -> None:
    scores = torch.tensor([[3e38, -3e38], [0, 1]])
    assert training.accuracy(scores, torch.tensor([0, 1])) == 1
    assert loss_of(scores, torch.tensor([0, 1])) < 1
