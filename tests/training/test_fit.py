"""``fit``: which epoch is kept, what it is given, what the model knows afterwards."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random_graphs
from helpers.training import knowing, new_model

from spin_fast import SPIN, NodeFeatures, PowerFeatures, training
from spin_fast.training.fit import seeded
from spin_fast.training.resume import copied


def test_learns_and_keeps_the_best_epoch(digits: PowerFeatures) -> None:
    model = new_model(attention=False, batch_norm=True)
    train, validation = torch.arange(240), torch.arange(240, 300)
    fit = training.fit(model, digits, train, validation, epochs=12)
    assert fit.epochs[-1].loss < 0.5 * fit.epochs[0].loss
    assert fit.validation == max(epoch.validation for epoch in fit.epochs)
    kept = training.predict(model, digits, validation)
    assert training.accuracy(kept, digits[validation].y) == fit.validation
    assert fit.validation > 0.6
    assert fit.seconds_per_epoch > 0


def test_same_seed_same_numbers(digits: PowerFeatures) -> None:
    runs = []
    for seed in (0, 0, 1):
        model = new_model(dropout=0.2)
        fit = training.fit(model, digits, torch.arange(200), torch.arange(200, 300), epochs=2, seed=seed)
        runs.append(([epoch.loss for epoch in fit.epochs], model.hops.attention.detach()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_of_a_fit_are_gone(digits: PowerFeatures, dropout: float) -> None:
    model = new_model(dropout=dropout)
    training.fit(model, digits, train=slice(50), validation=slice(50, 60), epochs=1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_task_without_labels_is_said(digits: PowerFeatures) -> None:
    tasks = torch.stack([digits.y % 2, digits.y % 3 % 2], 1).float()
    tasks[:50, 1] = torch.nan
    with pytest.warns(UserWarning, match=r"train has no known label of task\(s\) 1"):
        training.fit(
            SPIN(3, 4, 2, 2), replace(digits, labels=tasks), train=slice(50), validation=slice(50, 60), epochs=1
        )


def test_another_default_device(digits: PowerFeatures, tmp_path: Path) -> None:
    digits.save(tmp_path / "f.safetensors")
    model, ids = new_model(), [0, 3]
    before = training.predict(model, digits, ids)
    with torch.device("meta"):
        loaded = PowerFeatures.load(tmp_path / "f.safetensors")
        assert torch.equal(training.predict(model, loaded, ids), before)
        options = {"graph_weight": [1.0] * 300, "state": tmp_path / "state.safetensors", "epochs": 1}
        training.fit(model, loaded, train=slice(50), validation=slice(50, 60), **options)


def test_the_random_numbers_of_others_go_on(digits: PowerFeatures) -> None:
    model = new_model(dropout=0.2)
    state = torch.get_rng_state()
    training.fit(model, digits, torch.arange(200), torch.arange(200, 300), epochs=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_early_stopping_counts_epochs_without_a_rise(digits: PowerFeatures) -> None:
    scores = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    fit = training.fit(
        new_model(),
        digits,
        torch.arange(64),
        torch.arange(64, 96),
        epochs=6,
        patience=3,
        metric=lambda *_: next(scores),
    )
    assert [epoch.validation for epoch in fit.epochs] == [0.1, 0.5, 0.4, 0.5, 0.3]
    assert fit.best_epoch in (1, 3)


def test_parts_may_be_masks_and_lists(digits: PowerFeatures) -> None:
    seen = []
    mask = torch.zeros(300, dtype=torch.bool)
    mask[:40] = True
    model = new_model(dropout=0.1)  # takes each step by calling the model
    model.register_forward_pre_hook(lambda _, inputs: seen.append((model.training, inputs[0].ids)))
    training.fit(model, digits, mask, list(range(40, 60)), epochs=1, batch_size=400)
    assert [(mode, sorted(ids.tolist())) for mode, ids in seen] == [
        (True, list(range(40))),
        (False, list(range(40, 60))),
    ]


def test_where_the_metric_is_no_number_the_loss_decides(digits: PowerFeatures) -> None:
    def undefined(*_: torch.Tensor) -> float:
        return math.nan

    for learning_rate in (5e-3, 0.2):
        model, options = new_model(), {"epochs": 12, "learning_rate": learning_rate, "schedule": "constant"}
        with pytest.warns(
            UserWarning, match=r"metric .*\.undefined is NaN on the validation graphs: their loss"
        ) as said:
            fit = training.fit(model, digits, range(64), range(64, 96), patience=3, metric=undefined, **options)
        assert len(said) == 1
        assert said[0].filename == __file__
        losses = [epoch.validation_loss for epoch in fit.epochs]
        assert losses[fit.best_epoch] == min(losses)
        assert len(losses) == min(12, fit.best_epoch + 1 + 3)
        kept = training.loss_of(training.predict(model, digits, range(64, 96)), digits[range(64, 96)].y)
        assert kept.item() == min(losses)
    assert fit.best_epoch + 1 + 3 < 12  # it did stop early


def test_divergence_is_an_error(digits: PowerFeatures) -> None:
    with pytest.raises(
        ValueError, match=r"training diverged: the loss of epoch [123] is nan; try a lower learning_rate"
    ):
        training.fit(new_model(), digits, range(64), range(64, 96), epochs=3, learning_rate=1e30)


@pytest.mark.parametrize("operator", [None, "sym"])
def test_a_model_that_has_learnt_nothing_is_of_no_operator(digits: PowerFeatures, operator: str | None) -> None:
    for failing, expected in ((1, operator), (2, "sym")):

        def fail(epoch: training.Epoch, failing: int = failing) -> None:
            if epoch.number == failing:
                raise MemoryError

        made = NodeFeatures(standardize=False).fit(random_graphs([3]))
        model, features = new_model(), replace(digits, node_features=made)
        model.operator = operator
        with pytest.raises(MemoryError):
            training.fit(model, features, range(64), range(64, 96), epochs=2, on_epoch=fail)
        assert (model.operator, model.multilabel) == (expected, None if failing == 1 else False)
        assert model.node_features is (None if failing == 1 else features.node_features)


@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "infinity")])
@pytest.mark.parametrize(("graph", "purpose"), [(0, "train on"), (70, "validate by")])
def test_features_that_are_no_numbers_are_named(
    digits: PowerFeatures, value: float, name: str, graph: int, purpose: str
) -> None:
    rows = digits.rows.clone()
    rows[digits.row_of_node[-1, digits.node_ptr[graph]]] = value  # of two hops: no other graph has it
    with pytest.raises(ValueError, match=f"features must be finite, got {name} in the rows of the graphs to {purpose}"):
        training.fit(new_model(), replace(digits, rows=rows), range(64), range(64, 96), epochs=1)


def test_interruption_keeps_the_best_weights(digits: PowerFeatures) -> None:
    calls = []

    def metric(*_) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return float(len(calls))

    model = new_model()
    fit = training.fit(model, digits, torch.arange(64), torch.arange(64, 96), epochs=9, metric=metric)
    assert len(fit.epochs) == 2
    assert fit.best_epoch == 1
    assert fit.interrupted


def test_an_interrupted_epoch_leaves_the_model_in_evaluation_mode(
    digits: PowerFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch, calls = training.Trainer.epoch, []

    def cut(self: training.Trainer, *arguments: Any, **options: Any) -> float:
        calls.append(1)
        if len(calls) < 3:
            return epoch(self, *arguments, **options)
        self.model.train()
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "epoch", cut)
    model = new_model()
    assert training.fit(model, digits, range(64), range(64, 96), epochs=9).interrupted
    assert not model.training


def test_whatever_ends_training_the_best_weights_stay(digits: PowerFeatures) -> None:
    seen = []

    def metric(logits: torch.Tensor, y: torch.Tensor) -> float:
        seen.append(logits)
        if len(seen) == 3:
            raise MemoryError
        return 1 / len(seen)

    model = new_model()
    with pytest.raises(MemoryError):
        training.fit(model, digits, range(64), range(64, 96), epochs=3, metric=metric)
    assert torch.equal(training.predict(model, digits, range(64, 96)), seen[0])


def test_validation_on_training_graphs_is_said(digits: PowerFeatures, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match=r"validation has 2 graph\(s\) of train") as caught:
        training.fit(new_model(), digits[[5, 6, 7, 8, 6]], [0, 1, 2], [2, 3, 4], epochs=1)
    assert caught[0].filename == __file__
    training.fit(new_model(), digits, [0, 1, 1, 0], [2, 3, 3], epochs=1)  # a bootstrap
    assert not recwarn.list


def test_on_epoch_sees_each_new_epoch(digits: PowerFeatures, tmp_path: Path) -> None:
    parts, seen = (digits, range(32), range(32, 64)), []
    options = {"schedule": "constant", "state": tmp_path / "state", "on_epoch": seen.append}
    options["metric"] = lambda *_: np.float32(0.5)  # as some libraries give
    with pytest.raises(TypeError, match="on_epoch must be a function of an Epoch, or None, got int"):
        training.fit(new_model(), *parts, on_epoch=3)
    training.fit(new_model(), *parts, epochs=3, **options)
    fit = training.fit(new_model(), *parts, epochs=5, resume=True, **options)
    assert [epoch.number for epoch in seen] == [1, 2, 3, 4, 5]
    assert [epoch.loss for epoch in fit.epochs] == [epoch.loss for epoch in seen]


@pytest.mark.parametrize("way", ["fit", "epoch", "step"])
def test_a_model_learns_what_prepared_its_features(way: str) -> None:
    graphs = replace(random_graphs([4, 1, 6, 3, 0, 9] * 2, dtype=torch.float32), y=torch.arange(12) % 4)
    made = NodeFeatures("log").fit(graphs, range(8))
    features = PowerFeatures.from_graphs(made.transform(graphs), 2)
    model = SPIN(4, 8, 4, 2)

    def train(features: PowerFeatures) -> None:
        if way == "fit":
            training.fit(model, features, range(8), range(8, 12), epochs=1)
        elif way == "step":
            training.Trainer(model).step(features)
        else:
            training.Trainer(model).epoch(features, range(12), 4)

    train(features)
    assert model.node_features is features.node_features
    others = PowerFeatures.from_graphs(NodeFeatures("raw", standardize=False).fit(graphs).transform(graphs), 2)
    known = f"as the training graphs, by NodeFeatures {made.fingerprint}, got features prepared by"
    for unlike, told in ((others, "NodeFeatures"), (replace(features, node_features=None), "no NodeFeatures")):
        for use in (train, partial(training.predict, model)):
            with pytest.raises(ValueError, match=f"{known} {told}"):
                use(unlike)
    train(replace(features, node_features=NodeFeatures("log").fit(graphs, range(8))))  # an equal one
    made.fit(graphs, [5])  # for other features: nothing to those above
    expected = training.predict(model, features).softmax(1)
    for given in (graphs, model.node_features.transform(graphs)):
        torch.testing.assert_close(training.predict_proba(model, given), expected)
    model.node_features = None  # as if it had been trained on graphs as they are
    for use, given in ((train, others), (partial(training.predict_proba, model), made.transform(graphs))):
        with pytest.raises(ValueError, match="as the training graphs, by no NodeFeatures, got"):
            use(given)
    model.operator = None
    for features in (others, replace(others, node_features=None)):
        train(features)
        assert model.node_features is features.node_features
        model.operator = model.node_features = None


@pytest.mark.parametrize("way", ["fit", "epoch", "step", "autograd"])
def test_a_model_learns_its_operator(way: str) -> None:
    graphs = replace(random_graphs([4, 1, 6, 3, 0, 9] * 2, dtype=torch.float32), y=torch.arange(12) % 4)
    features, others = (PowerFeatures.from_graphs(graphs, 2, operator) for operator in ("sym+adj", "sym"))
    model = SPIN(3, 8, 4, 2, batch_norm=way == "autograd")
    assert model.operator is None
    with pytest.raises(ValueError, match="operator must be given: the model does not know"):
        training.predict_proba(model, graphs)
    trainer = training.Trainer(model)

    def train(features: PowerFeatures) -> None:
        if way == "fit":
            training.fit(model, features, range(8), range(8, 12), epochs=1)
        elif way == "step":
            trainer.step(features)
        else:
            trainer.epoch(features, range(12), 4)

    with pytest.raises(ValueError, match="y"):
        train(replace(features, labels=None))
    assert model.operator is None
    train(features)
    assert model.operator == "sym+adj"
    expected = training.predict(model, features).softmax(1)
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(training.predict_proba(same, graphs), expected)
        torch.testing.assert_close(training.predict_proba(same, graphs, ["sym+adj"]), expected)
        with pytest.raises(ValueError, match=r"operator must be 'sym\+adj', which the model was .* got 'sym'"):
            training.predict_proba(same, graphs, "sym")
    before = copied(model.state_dict())
    for wrong in (train, partial(training.predict, model)):
        with pytest.raises(ValueError, match=r"features must be of 'sym\+adj', which the model was .* got 'sym'"):
            wrong(others)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model(others).shape == (12, 4)
    model.operator = None
    train(others)
    assert model.operator == "sym"


@pytest.mark.parametrize("tasks", [False, True, None])
def test_a_model_learns_whether_it_is_for_tasks(tmp_path: Path, tasks: bool | None) -> None:
    graphs = replace(random_graphs([4, 1, 6, 3], dtype=torch.float32), y=torch.tensor([0, 1, 0, 1]))
    if tasks:
        graphs = replace(graphs, y=torch.tensor([[0.0, 1], [1, float("nan")], [0, 0], [1, 1]]))
    features, model = PowerFeatures.from_graphs(graphs, 2), knowing("sym", out_features=2)
    assert model.multilabel is None
    if tasks is not None:
        training.Trainer(model).step(features)
    training.save_checkpoint(tmp_path / "x", model)
    loaded, metadata = training.load_checkpoint(tmp_path / "x")
    assert model.multilabel is loaded.multilabel is tasks is metadata.get("multilabel")
    scores = training.predict(loaded, features)
    expected = scores.sigmoid() if tasks else scores.softmax(1)
    for same in (model, loaded, copy.deepcopy(model)):
        torch.testing.assert_close(training.predict_proba(same, graphs), expected)
    torch.testing.assert_close(
        model.probabilities(scores[:, :1]), scores[:, :1].sigmoid() if tasks is not False else torch.ones(4, 1)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": torch.arange(0)}, "train must have at least one graph"),
        ({"validation": torch.arange(0)}, "validation must have at least one graph"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"learning_rate": -1}, "learning_rate must be at least 0, got -1"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0, got nan"),
        (
            {"schedule": "linear"},
            "schedule must be one of constant, cosine, warmup-cosine, step, plateau, got 'linear'",
        ),
    ],
)
def test_bad_input_is_named(digits: PowerFeatures, options: dict, message: str) -> None:
    parts = {"train": torch.arange(8), "validation": torch.arange(8, 16)}
    with pytest.raises(ValueError, match=message):
        training.fit(new_model(), digits, **parts | options)
    with pytest.raises(TypeError, match="class_weight must be None, 'balanced' or a tensor of weights, got dict"):
        training.fit(new_model(), digits, **parts, class_weight={0: 1.0})
    for wrong, message in (
        ({"epochs": 1.5}, "epochs must be an int, got float"),
        ({"learning_rate": "0.1"}, "learning_rate must be a number, got str"),
        ({"metric": "rocauc"}, "metric must be a function of class scores and labels, got str"),
        ({"model": torch.nn.Linear(2, 2)}, "model must be a SPIN, a PAGNN or another GraphClassifier, got Linear"),
    ):
        with pytest.raises(TypeError, match=message):
            training.fit(**{"model": new_model(), "features": digits} | parts | wrong)
    for weights, error in (("balanced", TypeError), (torch.ones(2), ValueError)):
        with pytest.raises(error, match="class_weight must "):
            training.Trainer(new_model(), class_weight=weights).step(digits)
    for call in (training.predict, lambda model, of, batch_size: training.Trainer(model).epoch(of, [0], batch_size)):
        with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
            call(new_model(), digits, batch_size=0)


def test_labels_of_another_kind_are_named(digits: PowerFeatures) -> None:
    tasks = torch.zeros(len(digits), 10)
    for labels, message in (
        (digits.labels.int(), r"y must be int64 classes \[G\], or float tasks"),
        (digits.labels[:, None], r"y must be int64 classes \[G\], or float tasks"),
        (digits.labels.float(), r"y must be int64 classes \[G\], or float tasks .*float32 of shape \[300\]"),
        (tasks[:, :3], "y must have 10 tasks, the model's outputs, got 3"),
        (tasks.index_fill(0, torch.arange(8), float("nan")), "train must have at least one label that is known"),
        (tasks.index_fill(0, torch.arange(8, 16), float("nan")), "validation must have at least one label that is"),
        (tasks.index_fill(0, torch.tensor([1]), -2.5), "y must be tasks of 0, 1 and NaN, got values from -2.5 to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            training.fit(new_model(), replace(digits, labels=labels), range(8), range(8, 16))


def test_labels_are_needed() -> None:
    features = PowerFeatures.from_graphs(random_graphs([2, 3], dtype=torch.float32), 2)
    with pytest.raises(ValueError, match=r"features must have labels \(y\)"):
        training.fit(SPIN(3, 4, 2, 2), features, torch.tensor([0]), torch.tensor([1]))


def test_training_on_the_cpu_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda *_: pytest.fail("of a GPU"))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda *_: pytest.fail("of a GPU"))
    with seeded(3, torch.device("cpu")):
        drawn = torch.rand(2)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))
