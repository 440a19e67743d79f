from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import random_graphs

import spin_fast
from spin_fast import SPIN, PowerFeatures, datasets, training


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
    with pytest.raises(ValueError, match="is not a checkpoint of this version"):
        training.load_checkpoint(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": torch.arange(0)}, "train must have at least one graph"),
        ({"validation": torch.arange(0)}, "validation must have at least one graph"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, got 'linear'"),
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
