from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from helpers import played_back, random_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import spin_fast
from spin_fast import SPIN, PowerFeatures, datasets, training
from spin_fast._common import files
from spin_fast.training import checkpoints
from spin_fast.training import trainer as trainers
from spin_fast.training.checkpoints import save_state
from spin_fast.training.losses import class_weights
from spin_fast.training.resume import copied


@pytest.fixture(scope="module")
def digits() -> PowerFeatures:
    return PowerFeatures.from_graphs(datasets.load("digits")[:300], 2)


def new_model(seed: int = 0, **options) -> SPIN:
    torch.manual_seed(seed)
    return SPIN(3, 16, 10, 2, **options)


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
        runs.append(([epoch.loss for epoch in fit.epochs], model.attention.detach()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


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

        model = new_model()
        model.operator = operator
        with pytest.raises(MemoryError):
            training.fit(model, digits, range(64), range(64, 96), epochs=2, on_epoch=fail)
        assert (model.operator, model.multilabel) == (expected, None if failing == 1 else False)


@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_features_that_are_no_numbers_are_named(digits: PowerFeatures, value: float, name: str) -> None:
    rows = digits.rows.clone()
    rows[digits.row_of_node[0, 0]] = value
    with pytest.raises(ValueError, match=f"features must be finite, got {name} in the rows of the graphs to train on"):
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


def numbers(fit: training.Fit) -> list[tuple]:
    """All of a log but the seconds."""
    return [
        (epoch.number, epoch.loss, epoch.validation_loss, epoch.validation, epoch.learning_rate) for epoch in fit.epochs
    ]


def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Raise when so many steps have been made."""
    made, quick_step, plain_step = [], trainers._Adam.quick_step, trainers._Adam.step

    def counted(original, *arguments):
        if len(made) == step:
            raise error
        made.append(1)
        return original(*arguments)

    monkeypatch.setattr(trainers._Adam, "quick_step", lambda self: counted(quick_step, self))
    monkeypatch.setattr(trainers._Adam, "step", lambda self: counted(plain_step, self))


@pytest.mark.parametrize(
    ("options", "schedule", "error"),
    [
        ({}, "cosine", KeyboardInterrupt),
        ({}, "plateau", MemoryError),
        ({"dropout": 0.3}, "plateau", KeyboardInterrupt),
        ({"batch_norm": True, "attention": False}, "cosine", KeyboardInterrupt),
    ],
)
def test_going_on_gives_the_same_numbers(
    digits: PowerFeatures,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict,
    schedule: str,
    error: type[BaseException],
) -> None:
    """Bit for bit, interrupted in the middle of the 3rd epoch and again of the 5th; 4 steps make one."""
    state, parts = tmp_path / "state.safetensors", (digits, range(100), range(100, 160))
    settings = {"epochs": 7, "schedule": schedule, "class_weight": "balanced" if "dropout" in options else None}
    whole = new_model(**options)
    expected = training.fit(whole, *parts, **settings)
    for seed, steps, epochs in ((0, 10, 2), (1, 9, 4)):
        model = new_model(seed=seed, **options)
        with monkeypatch.context() as patch:
            interrupted_at(patch, steps, error)
            if error is KeyboardInterrupt:
                fit = training.fit(model, *parts, state=state, resume=True, **settings)
                assert fit.interrupted
                assert numbers(fit) == numbers(expected)[:epochs]
            else:
                with pytest.raises(error):
                    training.fit(model, *parts, state=state, resume=True, **settings)
    for _ in range(2):  # the second time there is nothing left to do
        model = new_model(seed=1, **options)
        fit = training.fit(model, *parts, state=state, resume=True, **settings)
        assert numbers(fit) == numbers(expected)
        assert (fit.best_epoch, fit.interrupted) == (expected.best_epoch, False)
        for name, value in model.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@settings(max_examples=10)
@given(
    steps=st.integers(1, 11),
    schedule=st.sampled_from(
        ["constant", "warmup-cosine", lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 6)]
    ),
    patience=st.integers(1, 3),
)
def test_a_run_that_died_goes_on_from_any_step(digits: PowerFeatures, steps: int, schedule, patience: int) -> None:
    """A killed process leaves the last state that was written, whatever came after."""
    parts, options = (digits, range(48), range(48, 96)), {"epochs": 5, "schedule": schedule, "patience": patience}
    expected = training.fit(new_model(), *parts, **options)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        state = Path(folder) / "state"
        patch.setattr("spin_fast.training.resume.RunFile.SECONDS", 0.0)
        written = []
        patch.setattr("spin_fast.training.resume.save_state", lambda *saved: written.append(copy.deepcopy(saved)))
        training.fit(new_model(), *parts, state=state, **options)
        patch.undo()
        died = written[min(steps // 2, len(written) - 1)]
        save_state(*died)
        model = new_model(seed=1)
        fit = training.fit(model, *parts, state=state, resume=True, **options)
    assert numbers(fit) == numbers(expected)


def test_more_epochs_and_patience(digits: PowerFeatures, tmp_path: Path) -> None:
    """Are those of a longer run, where that does not change what has been."""
    state, parts = tmp_path / "state", (digits, range(64), range(64, 96))

    def going_on(**options) -> training.Fit:
        return training.fit(new_model(), *parts, state=state, resume=True, **options)

    long = training.fit(new_model(), *parts, epochs=9, schedule="constant")
    short = training.fit(new_model(), *parts, epochs=4, schedule="constant", state=state)
    assert numbers(short) == numbers(long)[:4]
    assert numbers(going_on(epochs=9, schedule="constant")) == numbers(long)
    with pytest.raises(
        ValueError, match=r"epochs must be at least 9, as many as .*state has, got 8; resume=False starts"
    ):
        going_on(epochs=8, schedule="constant")
    flat = {"schedule": "constant", "metric": lambda *_: 0.5}
    assert len(training.fit(new_model(), *parts, epochs=9, patience=2, state=state, **flat).epochs) == 3
    assert len(going_on(epochs=9, patience=4, **flat).epochs) == 5
    with pytest.raises(
        ValueError, match=r"patience must not stop the run of .*state before its last epoch, got 3; resume"
    ):
        going_on(epochs=9, patience=3, **flat)
    training.fit(new_model(), *parts, epochs=3, state=state)
    with pytest.raises(ValueError, match=r"epochs and schedule must give the learning rates of .*state, .* in epoch 2"):
        going_on(epochs=4)


def test_what_a_run_cannot_go_on_with(digits: PowerFeatures, tmp_path: Path) -> None:
    state, parts = tmp_path / "state", {"train": range(64), "validation": range(64, 96)}
    before = training.fit(new_model(), digits, **parts, epochs=2, state=state)

    def error(features: PowerFeatures = digits, model: SPIN | None = None, **options) -> str:
        with pytest.raises(ValueError, match="must") as caught:
            training.fit(
                model or new_model(), features, **parts | {"epochs": 2, "state": state, "resume": True} | options
            )
        return str(caught.value)

    for options in ({"batch_size": 8}, {"learning_rate": 1e-3}, {"weight_decay": 0.1}, {"class_weight": [1.0] * 10}):
        (name,) = options
        assert error(**options).startswith(f"{name} must be ")
    assert error(seed=1) == f"seed must be 0 to go on from {state}, got 1; resume=False starts anew"
    assert error(metric=lambda *_: 0.5).startswith("metric must be 'accuracy' to go on")
    assert error(schedule="step").startswith("schedule must be 'cosine' to go on")
    assert error(train=range(63)).startswith("train must be the same 64 graphs in the same order to go on")
    assert error(model=new_model(dropout=0.5)).startswith("model must have dropout=0.0 to go on")
    assert error(replace(digits, rows=digits.rows * 1.5)).startswith("features must have the same rows to go on")
    assert error(state=None) == "resume must come with state, the file to go on from"
    fit = training.fit(new_model(), digits, **parts, epochs=2, state=state, resume=True)
    assert numbers(fit) == numbers(before)
    with pytest.raises(TypeError, match="resume must be a bool, got str"):
        training.fit(new_model(), digits, **parts, state=state, resume=str(state))


def test_weights_by_the_training_graphs_do_not_hide_that_these_differ(digits: PowerFeatures, tmp_path: Path) -> None:
    options = {"class_weight": "balanced", "epochs": 1, "state": tmp_path / "state"}
    training.fit(new_model(), digits, range(64), range(64, 96), **options)
    with pytest.raises(ValueError, match=r"^train must be the same 64 graphs in the same order to go on"):
        training.fit(new_model(), digits, range(9), range(64, 96), resume=True, **options)


def test_a_state_that_cannot_be_written_costs_no_weights(digits: PowerFeatures, tmp_path: Path) -> None:
    state, scores, best = tmp_path / "deep" / "state", iter([0.1, 0.9, 0.5]), []

    def metric(logits: torch.Tensor, y: torch.Tensor) -> float:
        score = next(scores)
        if score == 0.9:
            best.append(logits)
        if score == 0.5:  # what comes is the last epoch
            shutil.rmtree(state.parent)
            state.parent.touch()
        return score

    model = new_model()
    with pytest.raises(OSError, match=f"^{state} cannot be written"):
        training.fit(model, digits, range(64), range(64, 96), epochs=3, metric=metric, state=state)
    assert torch.equal(training.predict(model, digits, range(64, 96)), best[0])
    assert model.layers[0].weight.untyped_storage().nbytes() == model.layers[0].weight.nbytes


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


def test_captured_steps_go_on(digits: PowerFeatures, tmp_path: Path, captures: list[int]) -> None:
    """The learning rate is then a tensor on the device."""
    parts, state = (digits, range(100), range(100, 160)), tmp_path / "state"
    options = {"epochs": 6, "class_weight": "balanced"}
    expected = training.fit(new_model(), *parts, **options)
    scores = iter([0.1, 0.2, 0.3])
    metric = lambda logits, y: training.accuracy(logits, y) if next(scores, None) else interrupt()  # noqa: E731
    metric.__qualname__ = "accuracy"

    def interrupt() -> float:
        raise KeyboardInterrupt

    assert len(training.fit(new_model(), *parts, state=state, metric=metric, **options).epochs) == 3
    fit = training.fit(new_model(), *parts, state=state, resume=True, **options)
    assert numbers(fit) == numbers(expected)
    assert captures == [32, 4] * 3


def test_weighted_losses_are_those_of_torch() -> None:
    torch.manual_seed(0)
    logits, y, weights = torch.randn(9, 3), torch.randint(3, (9,)), torch.tensor([0.5, 2.0, 0.0])
    expected = torch.nn.functional.cross_entropy(logits, y, weights)
    torch.testing.assert_close(training.loss_of(logits, y, weights), expected)
    assert training.loss_of(logits, torch.full((9,), 2), weights) == 0
    tasks = torch.randint(2, (9, 3)).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, tasks, pos_weight=weights)
    torch.testing.assert_close(training.loss_of(logits, tasks, weights), expected)


def test_what_the_operation_does_not_compute_takes_autograds_way(native, digits: PowerFeatures) -> None:
    class Doubled(SPIN):
        def forward(self, features: PowerFeatures) -> torch.Tensor:
            return 2 * super().forward(features)

    models = [new_model() for _ in range(4)]
    models += [Doubled(3, 4, 10, 2), new_model(classifier_features=[4] * 8)]
    models[0].classifier[1] = torch.nn.Tanh()
    models[1].classifier[1].negative_slope = 0.5
    models[2].classifier = torch.nn.Linear(48, 10)
    torch.nn.utils.parametrizations.weight_norm(models[3].classifier[0])
    for model in models:
        expected = training.loss_of(model(digits[:8]), digits[:8].y)
        torch.testing.assert_close(training.Trainer(model).step(digits[:8]), expected.detach())


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


def test_weighted_steps_are_those_of_autograd(native, digits: PowerFeatures, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, results = torch.linspace(0, 3, 10, dtype=torch.float64), []
    features = replace(digits, rows=digits.rows.double())
    for fused in (True, False):
        monkeypatch.setattr(training.Trainer, "_is_standard", lambda *_, fused=fused: fused)
        model = new_model().double()
        trainer = training.Trainer(model, class_weight=weights)
        losses = [trainer.epoch(features, range(100), 32, torch.Generator().manual_seed(0)) for _ in range(3)]
        results.append(torch.cat([model.flatten_parameters(), torch.tensor(losses)]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


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
        (None, "graph.weight must be"),
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


def test_predict_order_and_batches(digits: PowerFeatures) -> None:
    model = new_model()
    ids = torch.tensor([5, 299, 5, 0])
    logits = training.predict(model, digits, ids)
    torch.testing.assert_close(logits, training.predict(model, digits, ids, batch_size=1))
    torch.testing.assert_close(logits, training.predict(model, digits)[ids])
    assert training.predict(model, digits[[]]).shape == (0, 10)
    assert not logits.requires_grad


@pytest.mark.parametrize("options", [{}, {"batch_norm": True, "attention": False}, {"size_aware": True}])
def test_probabilities_straight_from_graphs(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    graphs = random_graphs([4, 0, 1, 60, 3, 0, 9], dtype=torch.float32)
    model = SPIN(3, 16, 4, 2, **options)
    features = PowerFeatures.from_graphs(graphs, 2, "rw")
    expected = training.predict(model, features).softmax(1)
    for size in (4 << 20, 400, 1):
        monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", size)
        torch.testing.assert_close(training.predict_proba(model, graphs, "rw"), expected)
    assert training.predict_proba(model, graphs[:0], "rw").shape == (0, 4)
    with pytest.raises(TypeError, match="graphs must be a GraphBatch, got PowerFeatures"):
        training.predict_proba(model, features)
    with pytest.raises(ValueError, match="graphs must have 3 features as the model, got 5"):
        training.predict_proba(model, random_graphs([3], num_features=5))
    with pytest.raises(ValueError, match="operator must be one of"):
        training.predict_proba(model, graphs, "nosuch")


@pytest.mark.parametrize("options", [{}, {"attention": False, "batch_norm": True}, {"dropout": 0.1}])
def test_operators_side_by_side(tmp_path, monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    graphs = replace(random_graphs([4, 1, 60, 3, 0, 9] * 5, dtype=torch.float32), y=torch.arange(30) % 4)
    features = PowerFeatures.from_graphs(graphs, 2, ("sym", "adj"))
    model = SPIN(3, 16, 4, 2, num_operators=2, **options)
    model.calibrate(features)
    before = training.loss_of(training.predict(model, features), graphs.y)
    training.fit(model, features, slice(20), slice(20, None), epochs=3, batch_size=8)
    assert training.loss_of(training.predict(model, features), graphs.y) < before
    training.save_checkpoint(tmp_path / "x", model)
    model, _ = training.load_checkpoint(tmp_path / "x")
    monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", 5000)
    expected = training.predict(model, features).softmax(1)
    torch.testing.assert_close(training.predict_proba(model, graphs), expected)
    torch.testing.assert_close(training.predict_proba(model, graphs, ["sym", "adj"]), expected)
    model.operator = None
    with pytest.raises(ValueError, match=r"operator must name 2 operator\(s\) as the model has, got 'sym'"):
        training.predict_proba(model, graphs, "sym")


def knowing(operator: str | Sequence[str] | None, out_features: int = 4, **options: Any) -> SPIN:
    model = SPIN(3, 8, out_features, 2, **options)
    model.operator = operator
    return model


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


def test_a_run_that_is_over_tells_its_operator(tmp_path: Path, digits: PowerFeatures) -> None:
    options = {"epochs": 1, "state": tmp_path / "x", "resume": True}
    for model in (new_model(), new_model()):
        training.fit(model, digits, range(50), range(50, 99), **options)
        assert model.operator == digits.operator


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


def test_checkpoints_keep_the_operator(tmp_path: Path) -> None:
    def kept(model: SPIN, **metadata: Any) -> tuple[str | None, Any]:
        training.save_checkpoint(tmp_path / "x", model, **metadata)
        model, metadata = training.load_checkpoint(tmp_path / "x")
        return model.operator, metadata.get("operator")

    assert kept(knowing("rw")) == kept(knowing("rw"), operator="rw") == kept(knowing(None), operator="rw")
    assert kept(knowing("rw")) == ("rw", "rw")
    assert kept(knowing(("sym", "adj"), num_operators=2)) == ("sym,adj", "sym,adj")
    assert kept(knowing(None)) == kept(knowing(None), operator=None) == (None, None)
    for model, operator, message in (
        (knowing("rw"), "sym", "operator must be 'rw', which the model was trained with, got 'sym'"),
        (knowing(None), "gcn", "operator must be one of"),
        (knowing(None), "sym,adj", r"operator must name 1 operator\(s\)"),
    ):
        with pytest.raises(ValueError, match=message):
            training.save_checkpoint(tmp_path / "y", model, operator=operator)
    assert not (tmp_path / "y").exists()
    with pytest.raises(ValueError, match="operator must be one of"):
        knowing("gcn")


@pytest.mark.parametrize("operator", ["our own", 7, ["sym", "adj"], None])
def test_checkpoints_from_when_operator_was_any_metadata(tmp_path: Path, operator: Any) -> None:
    header = {"config": json.dumps(SPIN(3, 8, 4, 2).config), "metadata": json.dumps({"operator": operator})}
    files.write_tensors(tmp_path / "x", checkpoints.CHECKPOINT_FORMAT, SPIN(3, 8, 4, 2).state_dict(), header)
    model, metadata = training.load_checkpoint(tmp_path / "x")
    assert (model.operator, metadata) == (None, {"operator": operator})


def test_checkpoints_from_before_several_operators(tmp_path, digits: PowerFeatures) -> None:
    model = new_model()
    assert model.config.pop("num_operators") == 1
    training.save_checkpoint(tmp_path / "x", model)
    model, _ = training.load_checkpoint(tmp_path / "x")
    assert model.config["num_operators"] == 1
    assert len(training.predict(model, digits)) == 300


def test_probabilities_of_many_graphs_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of powers do not grow with the number of graphs, and no chunk is far from full."""
    graphs = random_graphs([4, 9, 20, 1], dtype=torch.float32)
    model = knowing("sym")
    expected = training.predict_proba(model, graphs)
    sizes, power_features = [], spin_fast.ops.power_features

    def recorded(*args, **options):
        powers = power_features(*args, **options)
        sizes.append((powers.untyped_storage().nbytes(), powers.nbytes))
        return powers

    monkeypatch.setattr(spin_fast.ops, "power_features", recorded)
    monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", 8000)
    result = training.predict_proba(model, graphs[list(range(4)) * 300])
    torch.testing.assert_close(result, expected.repeat(300, 1))
    assert max(memory for memory, _ in sizes) <= 8000
    assert all(used > 4000 for _, used in sizes[:-1])


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
    for wrong in (tasks[:, :1], torch.tensor([[0], [1], [1]])):
        with pytest.raises(ValueError, match=r"logits must have shape \[G, 2\] and y \[G\], or both \[G, T\] and y"):
            training.rocauc(logits, wrong)
    known = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 0, 1])
    )
    torch.testing.assert_close(training.loss_of(logits, tasks), known)


def test_checkpoint_round_trip(tmp_path, digits: PowerFeatures) -> None:
    model = new_model(batch_norm=True, attention=False)
    training.Trainer(model).epoch(digits, torch.arange(64), 32)
    path = tmp_path / "deep" / "model.safetensors"
    training.save_checkpoint(path, model, operator="sym", seed=3)
    loaded, metadata = training.load_checkpoint(path)
    assert metadata == {"operator": "sym", "multilabel": False, "seed": 3}
    assert not loaded.training
    with pytest.raises(TypeError, match="foo must be a JSON value, got Tensor"):
        training.save_checkpoint(path, model, seed=3, foo=torch.ones(2))
    assert torch.equal(training.predict(loaded, digits), training.predict(model, digits))
    assert list(path.parent.iterdir()) == [path]


def test_damaged_checkpoints_are_named(tmp_path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*model.safetensors does not exist"):
        training.load_checkpoint(path)
    training.save_checkpoint(path, new_model())
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        training.load_checkpoint(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="is no file of spin_fast checkpoint: its format is None"):
        training.load_checkpoint(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": torch.arange(0)}, "train must have at least one graph"),
        ({"validation": torch.arange(0)}, "validation must have at least one graph"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"learning_rate": -1}, "learning_rate must be finite and at least 0, got -1"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite and at least 0, got nan"),
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
        ({"learning_rate": "0.1"}, "learning_rate must be a float, got str"),
        ({"metric": "rocauc"}, "metric must be a function of class scores and labels, got str"),
        ({"model": torch.nn.Linear(2, 2)}, "model must be a SPIN, a PAGNN or another GraphClassifier, got Linear"),
    ):
        with pytest.raises(TypeError, match=message):
            training.fit(**{"model": new_model(), "features": digits} | parts | wrong)
    for weights, error in (("balanced", TypeError), (torch.ones(2), ValueError)):
        with pytest.raises(error, match="class_weight must "):
            training.Trainer(new_model(), class_weight=weights).step(digits)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        training.predict(new_model(), digits, batch_size=0)


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


@pytest.fixture
def captures(native, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Train on the CPU as on a GPU; the numbers of graphs for which a step has been captured."""
    sizes = []

    def capture(step, device: torch.device):
        sizes.append(len(step.__closure__[0].cell_contents))
        return played_back(step, device)

    monkeypatch.setattr("spin_fast.training.trainer._is_captured", lambda device: True)
    monkeypatch.setattr("spin_fast.training.trainer._capture", capture)
    return sizes


def three_epochs(features: PowerFeatures, ids: torch.Tensor, **options) -> tuple[list[float], torch.Tensor]:
    """Losses and parameters after epochs with a falling learning rate, exact in float32, and ragged last batches."""
    model = new_model(**options)
    trainer = training.Trainer(model, learning_rate=2**-8, weight_decay=2**-10)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(3):
        losses.append(trainer.epoch(features, ids, 32, generator))
        scheduler.step()
    return losses, model.flatten_parameters()


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_captured_steps_are_the_steps(
    digits: PowerFeatures, captures: list[int], selected: bool, attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the order of the graphs, every batch, the schedule, the loss."""
    features, ids = (digits[torch.arange(299, 99, -1)] if selected else digits), torch.arange(20, 120)
    losses, parameters = three_epochs(features, ids, attention=attention)
    assert captures == [32, 4]  # the first epoch has one batch of 4, the second captures it
    with monkeypatch.context() as patch:
        patch.setattr("spin_fast.training.trainer._is_captured", lambda device: False)
        expected_losses, expected = three_epochs(features, ids, attention=attention)
    assert losses == expected_losses
    assert torch.equal(parameters, expected)


@pytest.mark.parametrize("options", [{"batch_norm": True}, {"dropout": 0.1}, {"size_aware": True}])
def test_other_models_are_not_captured(digits: PowerFeatures, captures: list[int], options: dict) -> None:
    losses, _ = three_epochs(digits, torch.arange(64), **options)
    assert losses[-1] < losses[0]
    assert captures == []


def test_captures_last_as_long_as_their_memory(
    digits: PowerFeatures, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = new_model(), torch.arange(32)
    trainer = training.Trainer(model, learning_rate=2**-8)

    def captures_after(change) -> int:
        """How many three steps take, which must go on from the model and the settings as they then are."""
        captures.clear()
        change()
        with monkeypatch.context() as patch:
            patch.setattr("spin_fast.training.trainer._is_captured", lambda device: False)
            twin = SPIN(**model.config)  # a deep copy would give the parameters of the model other memory
            twin.load_state_dict(model.state_dict())
            plain = training.Trainer(twin)
            plain.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
            expected = [plain.epoch(digits, ids, 32, torch.Generator().manual_seed(0)) for _ in range(3)]
        assert [trainer.epoch(digits, ids, 32, torch.Generator().manual_seed(0)) for _ in range(3)] == expected
        return len(captures)

    (group,) = trainer.optimizer.param_groups
    assert captures_after(lambda: None) == 1
    assert captures_after(lambda: None) == 0
    assert captures_after(lambda: group.update(lr=2**-10)) == 0
    assert captures_after(lambda: group["lr"].fill_(2**-9)) == 0
    assert captures_after(lambda: group.update(weight_decay=0.5)) == 1
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert captures_after(lambda: model.load_state_dict(state)) == 0
    assert captures_after(lambda: model.load_state_dict(state, assign=True)) == 1
    settings = copy.deepcopy(trainer.optimizer.state_dict())
    assert captures_after(lambda: trainer.optimizer.load_state_dict(settings)) == 1
    captures.clear()
    moved = replace(digits, rows=digits.rows.clone())
    for _ in range(3):
        trainer.epoch(moved, ids, 32)
    assert captures == [32]


def test_sizes_that_keep_changing_are_not_all_captured(digits: PowerFeatures, captures: list[int]) -> None:
    trainer = training.Trainer(new_model())
    for _ in range(3):
        for size in range(1, 20):
            trainer.step(digits[:size])
    assert len(captures) == trainers._Captured.MOST_SIZES


def test_fit_with_captured_steps(digits: PowerFeatures, captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    for captured in (True, False):
        monkeypatch.setattr("spin_fast.training.trainer._is_captured", lambda device, captured=captured: captured)
        fits.append(training.fit(new_model(), digits, range(200), range(200, 300), epochs=4))
    assert captures == [32, 8]
    one, other = ([(epoch.loss, epoch.validation_loss) for epoch in fit.epochs] for fit in fits)
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-4)


def test_trainer_follows_a_model_of_another_dtype(digits: PowerFeatures) -> None:
    model = new_model()
    trainer = training.Trainer(model)
    trainer.epoch(digits, range(64), 32)
    model.double()
    assert trainer.epoch(replace(digits, rows=digits.rows.double()), range(64), 32) > 0
    assert {value.dtype for value in trainer.optimizer.state[trainer._flat].values()} == {torch.float32, torch.float64}


def test_losses_of_tasks_mask_what_is_missing() -> None:
    logits = torch.tensor([[0.5, float("inf")], [-1.0, 2.0]], requires_grad=True)
    y = torch.tensor([[1.0, float("nan")], [0.0, 1.0]])
    loss = training.loss_of(logits, y)
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad[0, 1] == 0
    assert torch.isfinite(logits.grad).all()
