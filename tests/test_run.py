from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import PAGNN, SPIN, PowerFeatures, datasets
from spin_fast._run import Epoch, Run, RunFile, restore, sample_of, settings_of, snapshot
from spin_fast.trainer import Trainer

values = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan])


def epoch_of(number: int, validation: float, validation_loss: float) -> Epoch:
    return Epoch(number, 1.0, validation_loss, validation, 5e-3, 0.1)


@given(st.lists(st.tuples(values, values), max_size=9), st.integers(1, 4))
def test_which_epoch_is_kept_and_when_it_is_over(scores: list[tuple[float, float]], patience: int) -> None:
    run = Run(best={"weights": torch.tensor(-1.0)})
    for number, score in enumerate(scores):
        run = run.after(epoch_of(number + 1, *score), {"weights": torch.tensor(float(number))}, {})
    metrics = [metric for metric, _ in scores if not math.isnan(metric)]
    best = max(metrics, default=math.nan)
    at_best = [number for number, (metric, _) in enumerate(scores) if metric == best or not metrics]
    losses = [scores[number][1] for number in at_best]
    if not metrics and all(map(math.isnan, losses)):
        assert (run.best_epoch, run.best["weights"]) == (0, -1)
    else:
        assert run.best_epoch in at_best
        assert run.best["weights"] == run.best_epoch
        if not any(map(math.isnan, losses)):
            assert run.best_epoch == at_best[losses.index(min(losses))]
    risen = at_best[0] if metrics else 0
    assert run.is_over(100, patience) == (len(scores) > 0 and len(scores) - 1 - risen >= patience)
    assert run.is_over(len(scores), 100)
    assert not run.is_over(len(scores) + 1, 100)


def test_a_run_keeps_copies() -> None:
    weights = {"a": torch.zeros(2)}
    run = Run().after(epoch_of(1, 0.5, 1.0), weights, {})
    weights["a"] += 1
    assert run.best["a"].tolist() == [0, 0]


@pytest.fixture(scope="module")
def digits() -> PowerFeatures:
    return PowerFeatures.from_graphs(datasets.load("digits")[:60], 1)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"batch_norm": True}])
def test_restoring_undoes_an_epoch(digits: PowerFeatures, options: dict) -> None:
    trainer, order = Trainer(SPIN(3, 4, 10, 1, **options)), torch.Generator()
    trainer.epoch(digits, range(50), 8, order)
    run = Run(best=trainer.model.state_dict(), last=snapshot(trainer, order))
    first, after = (trainer.epoch(digits, range(50), 8, order) for _ in range(2))
    assert first != after
    restore(trainer, order, run)
    assert trainer.epoch(digits, range(50), 8, order) == first


def test_settings_are_the_same_in_every_process(digits: PowerFeatures) -> None:
    class Readout:
        def __call__(self, z: torch.Tensor, ptr: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
            return z[ptr[:-1]]

    readouts = Readout(), Readout()
    one, other = (
        settings_of(PAGNN([torch.nn.Linear(3, 2)] * 2, readout), digits, torch.arange(5), torch.arange(5))
        for readout in readouts
    )
    assert "Readout object" in one["model.modules"]
    assert one == other


def test_files_are_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "deep" / "state.safetensors", [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file, run, kept = RunFile(path, {"seed": 1}, torch.ones(2)), Run(), []
    file.keep(run, now=True)
    assert not path.exists()
    for number, seconds in enumerate((0, 4, 4, 4, 4), start=1):
        now[0] += seconds
        run = run.after(epoch_of(number, math.nan, math.inf), {}, {"parameters": torch.tensor([float(number)])})
        file.keep(run)
        kept.append(len(RunFile(path, {"seed": 1}, torch.ones(2)).read().epochs))
    assert kept == [1, 1, 1, 4, 4]
    file.keep(run, now=True)
    found = RunFile(path, {"seed": 1}, torch.ones(2)).read()
    assert len(found.epochs) == found.last["parameters"].item() == 5
    assert math.isnan(found.epochs[0].validation)
    assert found.epochs[0].validation_loss == math.inf
    assert list(path.parent.iterdir()) == [path]


def test_settings_and_damage_are_named(tmp_path: Path, digits: PowerFeatures) -> None:
    path = tmp_path / "state.safetensors"
    model, ids = SPIN(3, 4, 10, 1), torch.arange(9)
    settings = settings_of(model, digits, ids[:5], ids[5:], seed=0)
    sample = sample_of(digits, ids[:5])
    frozen = SPIN(3, 4, 10, 1)
    frozen.layers.requires_grad_(False)
    RunFile(path, settings, sample).keep(Run().after(epoch_of(1, 0.5, 1.0), {}, {}), now=True)
    assert len(RunFile(path, settings, sample).read().epochs) == 1
    for name, other in (
        ("seed", settings_of(model, digits, ids[:5], ids[5:], seed=1)),
        ("model.trained parameters", settings_of(frozen, digits, ids[:5], ids[5:], seed=0)),
        ("model.attention", settings_of(SPIN(3, 4, 10, 1, attention=False), digits, ids[:5], ids[5:], seed=0)),
        ("train", settings_of(model, digits, ids[:5].flip(0), ids[5:], seed=0)),
        ("validation", settings_of(model, digits, ids[:5], ids[6:], seed=0)),
        (
            "features: labels",
            settings_of(model, replace(digits, labels=digits.labels.flip(0)), ids[:5], ids[5:], seed=0),
        ),
        ("features: sizes", settings_of(model, digits[list(range(59, -1, -1))], ids[:5], ids[5:], seed=0)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be .* to go on from {path}, got "):
            RunFile(path, other, sample).read()
    dense = PowerFeatures.from_graphs(datasets.load("digits")[:60], 1, deduplicate=False)
    assert len(RunFile(path, settings, sample_of(dense, ids[:5])).read().epochs) == 1
    scaled = replace(digits, rows=digits.rows * 1.001)
    with pytest.raises(ValueError, match=r"features must have the rows of .* to go on from it, got others"):
        RunFile(path, settings, sample_of(scaled, ids[:5])).read()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"state\.safetensors is not a readable safetensors file"):
        RunFile(path, settings, sample).read()
    with pytest.raises(FileNotFoundError, match=r"training-state .* does not exist"):
        RunFile(tmp_path / "other", settings, sample).read()
    with pytest.raises(IsADirectoryError, match="cannot be written"):
        RunFile(tmp_path, settings, sample)
