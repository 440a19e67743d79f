"""Losses and metrics; weights of classes and graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training import new_model, numbers

from spin_fast import SPIN, PowerFeatures, training
from spin_fast.training.losses import class_weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_where_no_label_is_known_the_loss_is_zero(digits: PowerFeatures, dtype: torch.dtype) -> None:
    logits, y = torch.ones(3, 2, dtype=dtype, requires_grad=True), torch.full((3, 2), math.nan, dtype=dtype)
    for graph_weight in (None, torch.ones(3)):
        loss = training.loss_of(logits, y, graph_weight=graph_weight)
        loss.backward()
        assert loss == 0
        assert logits.grad.count_nonzero() == 0
    if dtype in (torch.float32, torch.float64):
        labels = (digits.labels[:, None] == torch.arange(10)).to(dtype)
        labels[::2] = math.nan
        features = replace(digits, rows=digits.rows.to(dtype), labels=labels)
        fit = training.fit(new_model().to(dtype), features, range(30), range(30, 60), epochs=1, batch_size=1)
        assert 0 < fit.epochs[0].validation_loss < math.inf


def test_tasks_of_another_shape_than_the_scores_are_named() -> None:
    for y in (torch.ones(3), torch.ones(3, 2), torch.ones(2, 1)):
        with pytest.raises(ValueError, match=r"y must have the shape of logits, \[3, 1\], as float tasks, got \["):
            training.loss_of(torch.zeros(3, 1), y)


def test_weighted_losses_are_those_of_torch() -> None:
    torch.manual_seed(0)
    logits, y, weights = torch.randn(9, 3), torch.randint(3, (9,)), torch.tensor([0.5, 2.0, 0.0])
    expected = torch.nn.functional.cross_entropy(logits, y, weights)
    torch.testing.assert_close(training.loss_of(logits, y, weights), expected)
    assert training.loss_of(logits, torch.full((9,), 2), weights) == 0
    tasks = torch.randint(2, (9, 3)).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, tasks, pos_weight=weights)
    torch.testing.assert_close(training.loss_of(logits, tasks, weights), expected)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    y = torch.tensor([0, 0, 0, 3, 3, 1])
    weights = class_weights("balanced", y, 5)
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=y.numpy())
    assert weights[[0, 1, 3]].numpy() == pytest.approx(expected)
    assert weights[[2, 4]].tolist() == [1, 1]
    nan = float("nan")
    tasks = torch.tensor([[1.0, nan, 0], [0, 1, 0], [0, nan, 0], [0, nan, nan]])
    assert class_weights("balanced", tasks, 3).tolist() == [3, 1, 1]


@pytest.mark.parametrize("tasks", [False, True])
def test_the_loss_of_an_epoch_counts_graphs_by_their_weights(digits: PowerFeatures, tasks: bool) -> None:
    """Whatever the batches: with a learning rate of 0, the loss of an epoch is that of all its graphs at once."""
    if tasks:
        labels = torch.nn.functional.one_hot(digits.labels, 10).float()
        labels[::3, ::2] = float("nan")
        digits = replace(digits, labels=labels)
    model, ids = new_model(), torch.arange(100)
    weights = class_weights("balanced", digits[ids].y, 10)
    weights[3] = 0
    for class_weight in (None, weights.float()):
        trainer = training.Trainer(model, learning_rate=0.0, class_weight=class_weight)
        expected = training.loss_of(training.predict(model, digits, ids), digits[ids].y, class_weight).item()
        for batch_size in (1, 7, 100):
            assert trainer.epoch(digits, ids, batch_size) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("class_weight", [None, [0.0, 1, 2, 1, 1, 1, 1, 1, 1, 3]])
def test_graph_weights_are_repetitions(digits: PowerFeatures, class_weight: list[float] | None, tasks: bool) -> None:
    """In the loss, its gradient and the loss of an epoch; on a selection, where a graph may be twice, too."""
    times = torch.tensor([2, 0, 1, 3] * 3)
    ids = torch.tensor([7, 3, 3, 150, 20, 21, 22, 23, 24, 299, 0, 1])
    if tasks:
        labels = torch.nn.functional.one_hot(digits.labels, 10).float()
        labels[::3, ::2] = float("nan")
        digits = replace(digits, labels=labels)
    digits = replace(digits, rows=digits.rows.double())
    weights = None if class_weight is None else torch.tensor(class_weight, dtype=torch.float64)
    selected, repeated = digits[ids], digits[ids.repeat_interleave(times)]
    model, twin = new_model().double(), new_model().double()
    expected = training.loss_of(twin(repeated), repeated.y, weights)
    torch.testing.assert_close(training.loss_of(model(selected), selected.y, weights, times.double()), expected)
    trainer, other = (training.Trainer(each, class_weight=weights) for each in (model, twin))
    for _ in range(3):
        loss = trainer.epoch(selected, range(12), 99, graph_weight=times.float())
        assert loss == pytest.approx(other.epoch(repeated, range(18), 99))
    torch.testing.assert_close(model.flatten_parameters(), twin.flatten_parameters())
    trainer = training.Trainer(model, learning_rate=0.0, class_weight=weights)
    losses = [trainer.epoch(selected, range(12), size, graph_weight=times.double()) for size in (1, 5, 12)]
    assert losses == pytest.approx(losses[:1] * 3)


def test_fit_with_graph_weights(tmp_path: Path, digits: PowerFeatures) -> None:
    weight = torch.ones(300)
    weight[digits.labels > 4] = 0
    options = {"epochs": 8, "batch_size": 16, "learning_rate": 0.02}
    model = new_model()
    fit = training.fit(model, digits, range(200), range(200, 300), graph_weight=weight, state=tmp_path / "x", **options)
    assert training.predict(model, digits).argmax(1).max() <= 4
    logits, counted = training.predict(model, digits, range(200, 300)), weight[200:] > 0
    best = fit.epochs[fit.best_epoch]
    expected = training.loss_of(logits[counted], digits.labels[200:][counted])
    assert best.validation_loss == pytest.approx(expected.item(), rel=1e-4)
    assert best.validation == training.accuracy(logits, digits.labels[200:])
    same = training.fit(
        new_model(),
        digits,
        range(200),
        range(200, 300),
        graph_weight=weight.tolist(),
        state=tmp_path / "x",
        resume=True,
        **options,
    )
    assert same.epochs == fit.epochs
    for wrong, message in (
        (None, "is of another run: graph_weight="),
        (torch.ones(200), r"graph_weight must have shape \[300\], got \[200\]"),
        (torch.full((300,), float("nan")), "graph_weight must be finite"),
        (-weight, "graph_weight must be finite, at least 0 and not all 0, got values from -1 to -?0"),
        (torch.arange(300) < 200, "graph_weight must not be all 0 in validation"),
    ):
        with pytest.raises(ValueError, match=message):
            training.fit(
                new_model(),
                digits,
                range(200),
                range(200, 300),
                graph_weight=wrong,
                state=tmp_path / "x",
                resume=True,
                **options,
            )
    with pytest.raises(TypeError, match="graph_weight must be None or a tensor of weights, got str"):
        training.fit(new_model(), digits, range(200), range(200, 300), graph_weight="balanced")


@pytest.mark.parametrize("tasks", [False, True])
def test_only_ratios_of_graph_weights_matter(digits: PowerFeatures, tasks: bool) -> None:
    weight, y = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), digits.labels
    y = (y[:, None] == torch.arange(10)).float() if tasks else y
    features, logits = replace(digits, labels=y), torch.randn(300, 10)
    losses, logs = [], []
    for scale in (1, 1e-300, 1e-46, 1e-40, 1e38, 1e300):
        options = {"epochs": 2, "graph_weight": weight * scale}
        logs.append(numbers(training.fit(new_model(), features, range(90), range(90, 120), **options)))
        losses.append(training.loss_of(logits, y, None, weight * scale).item())
        assert logs[-1] == [pytest.approx(epoch, rel=1e-5) for epoch in logs[0]]
        assert losses[-1] == pytest.approx(losses[0])
    for scale in (1e-40, 1e38):
        assert training.loss_of(logits, y, None, (weight * scale).float()).item() == pytest.approx(losses[0], rel=1e-3)
    weight[:90] *= 1e-60  # what the graphs of validation weigh does not matter to those of train
    fit = training.fit(new_model(), features, range(90), range(90, 120), epochs=2, graph_weight=weight)
    assert numbers(fit) == [pytest.approx(epoch, rel=1e-5) for epoch in logs[0]]


def test_weights_turn_a_rare_class_up(digits: PowerFeatures) -> None:
    rare = replace(digits, labels=(digits.labels == 8).long())
    ids, found = torch.arange(200), []
    for class_weight in ([1.0, 0.0], None, "balanced", [0.0, 1.0]):
        torch.manual_seed(0)
        model = SPIN(3, 16, 2, 2, attention=False)
        training.fit(model, rare, ids, range(200, 300), epochs=4, class_weight=class_weight, metric=lambda *_: 0.0)
        found.append(training.predict(model, rare, ids).softmax(1)[:, 1].mean().item())
    assert found[0] < 0.1
    assert found[0] < found[1] < found[2] < found[3]
    assert found[3] > 0.9


def test_losses_and_metrics() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    y = torch.tensor([0, 1, 1])
    assert training.accuracy(logits, y) == pytest.approx(2 / 3)
    assert training.rocauc(logits, y) == 1.0
    tasks = torch.tensor([[1.0, float("nan")], [0.0, 1.0], [float("nan"), float("nan")]])
    assert training.accuracy(logits, tasks) == 1.0
    assert training.accuracy(-logits[:, :1], tasks[:, :1]) == 0.5
    assert math.isnan(training.rocauc(logits[:1], y[:1]))
    assert training.rocauc(logits[:, :1], tasks[:, :1]) == 1.0
    more = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, float("nan")], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    scores = torch.tensor([[2.0, 0.0, 5.0], [1.0, 1.0, 5.0], [3.0, 2.0, 5.0], [0.0, 3.0, 5.0]])
    assert training.rocauc(scores, more) == (1.0 + 0.25) / 2  # the third has one label only
    assert training.ap(logits, y) == 1.0
    assert training.ap(scores, more) == (1.0 + (1 / 2 + 2 / 4) / 2) / 2
    for metric in (training.rocauc, training.ap):
        for wrong in (tasks[:, :1], torch.tensor([[0], [1], [1]])):
            with pytest.raises(
                ValueError, match=r"logits must have shape \[G, 2\] and y \[G\], or both \[G, T\] and y"
            ):
                metric(logits, wrong)
    for wrong in (tasks[:, :1], y[:2]):
        with pytest.raises(ValueError, match=r"logits must have shape \[G, C\] and y \[G\], or both \[G, T\] and y"):
            training.accuracy(logits, wrong)
    known = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 0, 1])
    )
    torch.testing.assert_close(training.loss_of(logits, tasks), known)


def test_losses_of_tasks_mask_what_is_missing() -> None:
    logits = torch.tensor([[0.5, float("inf")], [-1.0, 2.0]], requires_grad=True)
    y = torch.tensor([[1.0, float("nan")], [0.0, 1.0]])
    loss = training.loss_of(logits, y)
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad[0, 1] == 0
    assert torch.isfinite(logits.grad).all()
