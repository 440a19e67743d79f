"""``fit`` with a state on disk: a run that went on has the numbers of one that was never interrupted."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers.training import new_model, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from spin_fast import SPIN, PowerFeatures, ops, training
from spin_fast._common import files
from spin_fast.training import trainer as trainers


def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Raise when so many steps have been made."""
    made, bind, plain_step = [], ops.bind_training_step, trainers._Adam.step

    def counted(original, *arguments):
        if len(made) == step:
            raise error
        made.append(1)
        return original(*arguments)

    def counting(*arguments, **options):
        bound = bind(*arguments, **options)
        return bound._replace(steps=lambda *batch: counted(bound.steps, *batch))

    monkeypatch.setattr(trainers, "CALL_SECONDS", 0)  # so a call makes one step
    monkeypatch.setattr(ops, "bind_training_step", counting)
    monkeypatch.setattr(trainers._Adam, "step", lambda self: counted(plain_step, self))


@pytest.mark.parametrize(
    ("options", "schedule", "error"),
    [
        ({}, "cosine", KeyboardInterrupt),
        ({}, "plateau", MemoryError),
        ({"dropout": 0.3}, "plateau", KeyboardInterrupt),
        ({"branches": "both"}, "cosine", KeyboardInterrupt),
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
        patch.setattr("spin_fast.training.resume.StateFile.SECONDS", 0.0)
        written = []
        patch.setattr(files, "write_tensors", lambda *saved: written.append(copy.deepcopy(saved)))
        training.fit(new_model(), *parts, state=state, **options)
        patch.undo()
        died = written[min(steps // 2, len(written) - 1)]
        files.write_tensors(*died)
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
        with pytest.raises(ValueError, match=r"must|is of another run") as caught:
            training.fit(
                model or new_model(), features, **parts | {"epochs": 2, "state": state, "resume": True} | options
            )
        return str(caught.value)

    for options in ({"batch_size": 8}, {"learning_rate": 1e-3}, {"weight_decay": 0.1}, {"class_weight": [1.0] * 10}):
        (name,) = options
        assert error(**options).startswith(f"{state} is of another run: {name}=")
    assert error(seed=1) == f"{state} is of another run: seed=0 there, seed=1 here; resume=False starts anew"
    assert "seed=0 there, seed=1 here; model.dropout=0.0 there" in error(seed=1, model=new_model(dropout=0.5))
    assert "metric='accuracy' there, metric=" in error(metric=lambda *_: 0.5)
    assert "schedule='cosine' there, schedule='step' here" in error(schedule="step")
    assert "train='64 graphs (" in error(train=range(63))
    assert "features.rows=" in error(replace(digits, rows=digits.rows * 1.5))
    assert error(state=None) == "resume must come with state, the file to go on from"
    fit = training.fit(new_model(), digits, **parts, epochs=2, state=state, resume=True)
    assert numbers(fit) == numbers(before)
    with pytest.raises(TypeError, match="resume must be a bool, got str"):
        training.fit(new_model(), digits, **parts, state=state, resume=str(state))


def test_weights_by_the_training_graphs_do_not_hide_that_these_differ(digits: PowerFeatures, tmp_path: Path) -> None:
    options = {"class_weight": "balanced", "epochs": 1, "state": tmp_path / "state"}
    training.fit(new_model(), digits, range(64), range(64, 96), **options)
    with pytest.raises(ValueError, match=r"is of another run: .*train='64 graphs \("):
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
    assert model.hops.layers[0].weight.untyped_storage().nbytes() == model.hops.layers[0].weight.nbytes


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


def test_a_run_that_is_over_tells_its_operator(tmp_path: Path, digits: PowerFeatures) -> None:
    options = {"epochs": 1, "state": tmp_path / "x", "resume": True}
    for model in (new_model(), new_model()):
        training.fit(model, digits, range(50), range(50, 99), **options)
        assert model.operator == digits.operator
