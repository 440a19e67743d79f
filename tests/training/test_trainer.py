"""Steps: fused, captured, and by autograd."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers.training import new_model

from spin_fast import SPIN, PowerFeatures, ops, training
from spin_fast.training import trainer as trainers


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


def test_calls_of_any_length_make_the_same_steps(
    native, digits: PowerFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, bind = [], ops.bind_training_step
    for seconds in (0.0, 1e-3, 3600.0):
        calls = []

        def counting(*arguments, calls=calls, **options):
            bound = bind(*arguments, **options)
            return bound._replace(steps=lambda ids, *rest: calls.append(len(ids)) or bound.steps(ids, *rest))

        with monkeypatch.context() as patch:
            patch.setattr(ops, "bind_training_step", counting)
            patch.setattr(trainers, "CALL_SECONDS", seconds)
            results.append(three_epochs(digits, torch.arange(100)))
        assert sum(calls) == 300
        if seconds == 0.0:
            assert calls == [32, 32, 32, 4] * 3
        if seconds == 3600.0:
            assert calls == [32, 68, 100, 100]  # the rate is known from the second call on
    for losses, parameters in results[1:]:
        assert losses == results[0][0]
        assert torch.equal(parameters, results[0][1])


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
