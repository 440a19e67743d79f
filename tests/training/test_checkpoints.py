"""Models in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training import knowing, new_model
from torch.nn.utils import prune

from spin_fast import SPIN, PowerFeatures, training
from spin_fast._common import files
from spin_fast.nn import Ensemble, SubtreeLinear
from spin_fast.training import checkpoints


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
    header = {
        "model": "SPIN",
        "config": json.dumps(SPIN(3, 8, 4, 2).config),
        "metadata": json.dumps({"operator": operator}),
        "frozen": "[]",
    }
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_checkpoint_round_trip(tmp_path, digits: PowerFeatures, dtype: torch.dtype) -> None:
    digits = replace(digits, rows=digits.rows.to(dtype))
    model = new_model(batch_norm=True, attention=False).to(dtype)
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


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    model = new_model()
    for parameter in model.hops.parameters():
        parameter.requires_grad_(False)
    training.save_checkpoint(tmp_path / "x", model)
    loaded, _ = training.load_checkpoint(tmp_path / "x")
    assert 0 < len(loaded.trained_parameters()) < len([*loaded.parameters()])
    assert [*loaded.trained_parameters()] == [*model.trained_parameters()]


def test_sizes_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    model = SPIN(np.int64(3), np.int64(8), 4, np.int32(2), dropout=np.float32(0.5))
    training.save_checkpoint(tmp_path / "x", model)
    loaded, _ = training.load_checkpoint(tmp_path / "x")
    assert loaded.config == model.config


def test_models_that_no_constructor_makes_are_refused(tmp_path: Path) -> None:
    """A file keeps the constructor's arguments, and weights: it would be read as another model."""

    class Scaled(SPIN):
        def forward(self, features: Any) -> torch.Tensor:
            return 10 * super().forward(features)

    changed, pruned, scaled = new_model(), new_model(), Scaled(**new_model().config)
    changed.classifier[1] = torch.nn.Tanh()
    prune.l1_unstructured(pruned.classifier[0], "weight", 0.3)
    other = r"one with other modules or parameters than SPIN\(\*\*model.config\) has"
    for model in (changed, pruned, scaled, Ensemble([new_model(), changed])):
        with pytest.raises(TypeError, match=rf"got ({other}|Scaled); keep"):
            training.save_checkpoint(tmp_path / "x", model)
    with pytest.raises(ValueError, match="preprocessing must be left out: it is the node_features of the model"):
        training.save_checkpoint(tmp_path / "x", new_model(), preprocessing="minmax")
    assert not (tmp_path / "x").exists()


def test_parameters_that_are_tied_are_kept_twice(tmp_path: Path) -> None:
    model = new_model()
    first, second = (of for of in model.hops.layers.parameters() if of.dim() > 1 and of.shape[-1] == of.shape[-2])
    second.data = first.data
    training.save_checkpoint(tmp_path / "x", model)
    found = training.load_checkpoint(tmp_path / "x")[0].state_dict()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


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


def error_of(path: Path) -> str | None:
    try:
        training.load_checkpoint(path)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("value", [10**7, 2**62, 10**30, -1, 0.5, "x", None, [10**7]])
@pytest.mark.parametrize("model", [SPIN(1, 2, 2, 1), SubtreeLinear(1, 2, num_weights=3)])
def test_arguments_that_are_damaged(model: SPIN | SubtreeLinear, value: Any, tmp_path: Path) -> None:
    """However many hops they say: nothing is made before its size is that of the arrays."""
    path, refused = tmp_path / "x", set()
    for name in model.config:
        facts = {"model": type(model).__name__, "config": json.dumps(model.config | {name: value}), "metadata": "{}"}
        files.write_tensors(path, checkpoints.CHECKPOINT_FORMAT, model.state_dict(), facts)
        error = error_of(path)
        assert error is None or f"{path} is damaged: " in error
        refused |= set() if error is None else {name}
    assert refused >= ({"num_hops"} if isinstance(model, SPIN) else {"num_weights"})
