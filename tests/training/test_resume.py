from __future__ import annotations

import json
import math
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spin_fast import PAGNN, SPIN, PowerFeatures, datasets
from spin_fast._common import files
from spin_fast.features.shards import sharded
from spin_fast.training.resume import (
    STATE_FORMAT,
    Epoch,
    StateError,
    StateFile,
    TrainingState,
    restore,
    sample_of,
    settings_of,
    snapshot,
)
from spin_fast.training.trainer import Trainer

values = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan])


def epoch_of(number: int, validation: float, validation_loss: float) -> Epoch:
    return Epoch(number, 1.0, validation_loss, validation, 5e-3, 0.1)


@given(st.lists(st.tuples(values, values), max_size=9), st.integers(1, 4))
@example([(math.nan, 1.0), (math.nan, 0.5), (math.nan, 0.5)], 2)
def test_which_epoch_is_kept_and_when_it_is_over(scores: list[tuple[float, float]], patience: int) -> None:
    run = TrainingState(best={"weights": torch.tensor(-1.0)})
    for number, score in enumerate(scores):
        run = run.after(epoch_of(number + 1, *score), {"weights": torch.tensor(float(number))}, {})
    metrics = [metric for metric, _ in scores if not math.isnan(metric)]
    best = max(metrics, default=math.nan)
    lowest = min((loss for _, loss in scores if not math.isnan(loss)), default=math.nan)
    at_best = [number for number, (metric, _) in enumerate(scores) if metric == best or not metrics]
    losses = [scores[number][1] for number in at_best]
    if not metrics and all(map(math.isnan, losses)):
        assert (run.best_epoch, run.best["weights"]) == (0, -1)
    else:
        assert run.best_epoch in at_best
        assert run.best["weights"] == run.best_epoch
        if not any(map(math.isnan, losses)):
            assert run.best_epoch == at_best[losses.index(min(losses))]
    falls = [number for number, loss in enumerate(losses) if loss == lowest]
    risen = at_best[0] if metrics else falls[0] if falls else 0  # the loss decides where there is no metric
    assert run.is_over(100, patience) == (len(scores) > 0 and len(scores) - 1 - risen >= patience)
    assert run.is_over(len(scores), 100)
    assert not run.is_over(len(scores) + 1, 100)


def test_a_run_keeps_copies() -> None:
    weights = {"a": torch.zeros(2)}
    run = TrainingState().after(epoch_of(1, 0.5, 1.0), weights, {})
    weights["a"] += 1
    assert run.best["a"].tolist() == [0, 0]


@pytest.fixture(scope="module")
def digits() -> PowerFeatures:
    return PowerFeatures.from_graphs(datasets.load("digits")[:60], 1)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"batch_norm": True}])
def test_restoring_undoes_an_epoch(digits: PowerFeatures, options: dict) -> None:
    trainer, order = Trainer(SPIN(3, 4, 10, 1, **options)), torch.Generator()
    trainer.epoch(digits, range(50), 8, order)
    run = TrainingState(best=trainer.model.state_dict(), last=snapshot(trainer, order))
    first, after = (trainer.epoch(digits, range(50), 8, order) for _ in range(2))
    assert first != after
    restore(trainer, order, run)
    assert trainer.epoch(digits, range(50), 8, order) == first


@pytest.fixture(scope="module")
def dense() -> PowerFeatures:
    return PowerFeatures.from_graphs(datasets.load("digits")[:150], 1, deduplicate=False)


@settings(max_examples=20)
@given(graph=st.integers(0, 149), branch=st.integers(0, 1))
def test_other_features_of_any_graph_are_seen(dense: PowerFeatures, graph: int, branch: int) -> None:
    rows, ptr = dense.rows.view(2, -1, 3).clone(), dense.node_ptr
    rows[branch, ptr[graph] : ptr[graph + 1]] *= 1.1
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    one, other = (
        sample_of(replace(dense, rows=values), order[:100], order[100:]) for values in (dense.rows, rows.view(-1, 3))
    )
    assert not torch.allclose(one, other, rtol=1e-3)


def test_the_sample_of_many_graphs_is_spread(monkeypatch: pytest.MonkeyPatch, digits: PowerFeatures) -> None:
    monkeypatch.setattr("spin_fast.training.resume.SAMPLED", 5)
    monkeypatch.setattr("spin_fast.training.resume.SAMPLE_SUMS", 2)
    parts = torch.arange(41), torch.arange(41, 44)
    sums = [digits[ids].dense_rows().abs().sum(1).flatten() for ids in ([0, 10, 20], [30, 40], [41, 42], [43])]
    torch.testing.assert_close(sample_of(digits, *parts), torch.stack(sums))


def test_settings_are_the_same_in_every_process(digits: PowerFeatures) -> None:
    class Readout:
        def __call__(self, z: torch.Tensor, ptr: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
            return z[ptr[:-1]]

    readouts = Readout(), Readout()
    one, other = (
        settings_of(PAGNN([torch.nn.Linear(3, 2)] * 2, readout), sharded(digits), torch.arange(5), torch.arange(5))
        for readout in readouts
    )
    assert "Readout object" in one["model.modules"]
    assert one == other


def test_files_are_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "deep" / "state.safetensors", [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file, run, kept = StateFile(path, {"seed": 1}, torch.ones(2)), TrainingState(), []
    file.keep(run, now=True)
    assert not path.exists()
    for number, seconds in enumerate((0, 4, 4, 4, 4), start=1):
        now[0] += seconds
        run = run.after(epoch_of(number, math.nan, 1.0), {}, {"parameters": torch.tensor([float(number)])})
        file.keep(run)
        kept.append(len(StateFile(path, {"seed": 1}, torch.ones(2)).read(run).epochs))
    assert kept == [1, 1, 1, 4, 4]
    file.keep(run, now=True)
    found = StateFile(path, {"seed": 1}, torch.ones(2)).read(run)
    assert len(found.epochs) == found.last["parameters"].item() == 5
    assert math.isnan(found.epochs[0].validation)
    assert list(path.parent.iterdir()) == [path]


def test_what_differs_is_listed(tmp_path: Path, digits: PowerFeatures) -> None:
    path, run = tmp_path / "state.safetensors", TrainingState()
    model, ids = SPIN(3, 4, 10, 1), torch.arange(9)
    sample = sample_of(digits, ids[:5], ids[5:])

    def settings(
        model: torch.nn.Module = model,
        features: PowerFeatures = digits,
        train: torch.Tensor = ids[:5],
        validation: torch.Tensor = ids[5:],
        seed: int = 0,
    ) -> dict:
        return settings_of(model, sharded(features), train, validation, seed=seed)

    frozen, calibrated = SPIN(3, 4, 10, 1), SPIN(3, 4, 10, 1)
    calibrated.calibrate(digits)
    frozen.hops.layers.requires_grad_(False)
    layers = [torch.nn.Linear(3, 10)] * 2
    StateFile(path, settings(), sample).keep(run.after(epoch_of(1, 0.5, 1.0), {}, {}), now=True)
    assert len(StateFile(path, settings(), sample).read(run).epochs) == 1
    for other, differ in (
        (settings(seed=1), {"seed": (0, 1)}),
        (
            settings(frozen),
            {
                "model.frozen": (
                    "",
                    " ".join(f"hops.layers.{name}" for name, _ in frozen.hops.layers.named_parameters()),
                )
            },
        ),
        (settings(calibrated), {"model.calibrated": (False, True)}),
        (settings(SPIN(3, 4, 10, 1, attention=False), seed=1), {"seed": (0, 1), "model.attention": (True, False)}),
        (settings(SPIN(3, 16, 10, 1)), {"model.hidden_features": (4, 16)}),
        (settings(PAGNN(layers, "sum")), {"model.class": ("SPIN", "PAGNN")}),
        (settings(train=ids[:5].flip(0)), {"train": ...}),
        (settings(features=digits[:59]), {"features.graphs": (60, 59), "features.labels": ...}),
        (settings(features=replace(digits, operator="adj")), {"features.operator": ("sym", "adj")}),
        (settings(features=digits[list(range(59, -1, -1))]), {"features.sizes": ..., "features.labels": ...}),
        (settings(features=replace(digits, labels=digits.labels.flip(0))), {"features.labels": ...}),
    ):
        with pytest.raises(StateError) as caught:
            StateFile(path, other, sample).read(run)
        found = caught.value.differences
        assert {name: ... if value is ... else found[name] for name, value in differ.items()} == differ
        assert {name: other[name] for name in found} == {name: here for name, (_, here) in found.items()}
        assert str(caught.value).endswith("; resume=False starts anew")
        assert all(f"{name}={here!r} here" in str(caught.value) for name, (_, here) in found.items())
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    dense = PowerFeatures.from_graphs(datasets.load("digits")[:60], 1, deduplicate=False)
    assert len(StateFile(path, settings(), sample_of(dense, ids[:5], ids[5:])).read(run).epochs) == 1
    scaled = replace(digits, rows=digits.rows * 1.001)
    with pytest.raises(StateError, match=r"is of another run: features\.rows="):
        StateFile(path, settings(), sample_of(scaled, ids[:5], ids[5:])).read(run)


def test_every_kind_of_damage_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, settings, sample = tmp_path / "state.safetensors", {"seed": 1}, torch.ones(2)
    last = {"parameters": torch.ones(3), "random.order": torch.Generator().get_state()}
    run = TrainingState().after(epoch_of(1, 0.5, 1.0), {"weight": torch.ones(2)}, last)
    file = StateFile(path, settings, sample)
    with pytest.raises(FileNotFoundError, match=r"training-state .* does not exist"):
        file.read(run)
    file.keep(run)
    tensors, header = files.read_tensors(path, STATE_FORMAT)
    record = json.loads(header["record"])
    (epoch,) = record["epochs"]
    content, format = path.read_bytes(), {"format": STATE_FORMAT}
    no_run = "it must have the settings of a run, and its epochs as lines of a log, numbered from 1"

    def write(record: object) -> None:
        save_file(tensors, path, format | {"record": json.dumps(record)})

    def write_tensors(**changed: torch.Tensor | None) -> None:
        kept = {name: value for name, value in (tensors | changed).items() if value is not None}
        save_file(kept, path, format | {"record": json.dumps(record)})

    for damage, message in (
        (lambda: path.write_bytes(b""), "is not a readable safetensors file"),
        (lambda: path.write_bytes(content[:-3]), "is not a readable safetensors file"),
        (lambda: path.write_bytes(b"PK" + content), "is not a readable safetensors file"),
        (lambda: save_file(tensors, path), "is no file of spin_fast training-state"),
        (
            lambda: save_file(tensors, path, {"format": "spin_fast training-state 2"}),
            "has format .*-state 2', .*; an older one wrote it",
        ),
        (lambda: save_file(tensors, path, {"format": "spin_fast training-state 99"}), "upgrade spin_fast"),
        (lambda: save_file(tensors, path, format), no_run),
        (lambda: save_file(tensors, path, format | {"record": "{"}), no_run),
        (lambda: write([1]), no_run),
        (lambda: write({}), no_run),
        (lambda: write(record | {"settings": 3}), no_run),
        (lambda: write(record | {"epochs": None}), no_run),
        (lambda: write(record | {"settings": {}}), "is of another run: seed=None there, seed=1 here"),
        (lambda: write(record | {"epochs": []}), no_run),
        (lambda: write(record | {"epochs": [3]}), no_run),
        (lambda: write(record | {"epochs": [{"number": 1}]}), no_run),
        (lambda: write(record | {"epochs": [epoch, epoch]}), no_run),
        (lambda: write(record | {"epochs": [epoch | {"loss": "1"}]}), no_run),
        (lambda: write_tensors(sample=None), r"sample must be torch.float32 \[2\], got nothing"),
        (lambda: write_tensors(parameters=None), r"parameters must be torch.float32 \[3\], got nothing"),
        (lambda: write_tensors(parameters=torch.ones(1)), r"parameters must be .* got torch.float32 \[1\]"),
        (lambda: write_tensors(parameters=torch.ones(3).half()), r"parameters must be .* got torch.float16 \[3\]"),
        (lambda: write_tensors(**{"best.weight": torch.ones(3)}), r"best.weight must be .* got torch.float32 \[3\]"),
        (lambda: write_tensors(**{"random.order": torch.zeros_like(last["random.order"])}), "random.order: "),
    ):
        damage()
        with pytest.raises(ValueError, match=message) as caught:
            StateFile(path, settings, sample).read(run)
        assert str(path) in str(caught.value)
        assert str(caught.value).endswith("; resume=False starts anew")
    path.write_bytes(content)
    assert len(StateFile(path, settings, sample).read(run).epochs) == 1
    with pytest.raises(IsADirectoryError, match="cannot be written"):
        StateFile(tmp_path, settings, sample)
