from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers import played_back, random_graphs

import spin_fast
from spin_fast import SPIN, PowerFeatures, datasets, training
from spin_fast import trainer as trainers


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


def test_a_metric_without_a_number_keeps_the_first_weights(digits: PowerFeatures) -> None:
    fit = training.fit(
        new_model(), digits, range(64), range(64, 96), epochs=9, patience=2, metric=lambda *_: float("nan")
    )
    assert len(fit.epochs) == 3
    assert training.loss_of(torch.ones(2, 1), torch.full((2, 1), float("nan"))) == 0


def test_divergence_is_an_error(digits: PowerFeatures) -> None:
    with pytest.raises(
        ValueError, match=r"training diverged: the loss of epoch [123] is nan; try a lower learning_rate"
    ):
        training.fit(new_model(), digits, range(64), range(64, 96), epochs=3, learning_rate=1e30)


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
    for size in (training.CHUNK_BYTES, 400, 1):
        monkeypatch.setattr(training, "CHUNK_BYTES", size)
        torch.testing.assert_close(training.predict_proba(model, graphs, "rw"), expected)
    assert training.predict_proba(model, graphs[:0], "rw").shape == (0, 4)
    with pytest.raises(TypeError, match="graphs must be a GraphBatch, got PowerFeatures"):
        training.predict_proba(model, features)
    with pytest.raises(ValueError, match="graphs must have 3 features as the model, got 5"):
        training.predict_proba(model, random_graphs([3], num_features=5))
    with pytest.raises(ValueError, match="operator must be one of"):
        training.predict_proba(model, graphs, "nosuch")


def test_probabilities_of_many_graphs_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of powers do not grow with the number of graphs, and no chunk is far from full."""
    graphs = random_graphs([4, 9, 20, 1], dtype=torch.float32)
    model = SPIN(3, 8, 2, 2)
    expected = training.predict_proba(model, graphs)
    sizes, power_features = [], spin_fast.ops.power_features

    def recorded(*args, **options):
        powers = power_features(*args, **options)
        sizes.append((powers.untyped_storage().nbytes(), powers.nbytes))
        return powers

    monkeypatch.setattr(spin_fast.ops, "power_features", recorded)
    monkeypatch.setattr(training, "CHUNK_BYTES", 8000)
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
    assert metadata == {"operator": "sym", "seed": 3}
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


def test_labels_of_another_kind_are_named(digits: PowerFeatures) -> None:
    for labels in (digits.labels.int(), digits.labels[:, None]):
        with pytest.raises(ValueError, match=r"y must be int64 classes \[G\], or float tasks"):
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

    monkeypatch.setattr("spin_fast.trainer._is_captured", lambda device: True)
    monkeypatch.setattr("spin_fast.trainer._capture", capture)
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
        patch.setattr("spin_fast.trainer._is_captured", lambda device: False)
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
            patch.setattr("spin_fast.trainer._is_captured", lambda device: False)
            plain = training.Trainer(copy.deepcopy(model))
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
        monkeypatch.setattr("spin_fast.trainer._is_captured", lambda device, captured=captured: captured)
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
