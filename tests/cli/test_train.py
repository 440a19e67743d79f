"""``spin-fast train``: options, devices, outputs, splits."""

from __future__ import annotations

import math
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.cli import facts_of, folder_of_graphs, folds_file, invoke, spin_fast
from typer.testing import CliRunner

from spin_fast import datasets, native_available, training
from spin_fast.cli import app
from spin_fast.cli._metric import metric_of
from spin_fast.datasets import registry


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.slow
def test_train_with_nothing_else(tmp_path: Path) -> None:
    result = spin_fast("train", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = dict(line.strip("│ ").split("│") for line in result.stdout.splitlines() if line.count("│") == 3)
    table = {name.strip(): value.strip() for name, value in rows.items()}
    assert float(table["test accuracy"].split("%")[0]) >= 93
    assert table["duplicates"].startswith("0 of the test graphs ")
    assert table["settings"] == "sym over 3 hops, seed 0"
    for name in ("time per epoch", "graphs per second", "nodes per stored row", "kernels"):
        assert table[name]
    assert png_size(tmp_path / table["training curve"])[0] >= 800
    model, metadata = training.load_checkpoint(tmp_path / table["model"])
    assert metadata["dataset"] == "digits"
    assert model.config["in_features"] == 3


def test_train_options_reach_the_model(tmp_path: Path) -> None:
    out = tmp_path / "here"
    options = ["--readout=attention", "--operator=sym+adj", "--hops=1", "--hidden=8", "--layers=2", "--epochs=1"]
    options.append("--branches=both")
    stdout = invoke("train", "digits", *options, "--no-batch-norm", "--no-deduplicate", "--out", out)
    model, metadata = training.load_checkpoint(out / "model.safetensors")
    expected = {"attention": True, "num_hops": 1, "hidden_features": 8, "num_layers": 2, "branches": "both"}
    assert model.config | expected == model.config
    assert metadata["operator"] == "sym+adj"
    assert metadata["classes"] == list("0123456789")
    assert "0: 1x  1: 1x" in stdout


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    options = ["--epochs", 1, "--hops", 0, "--layers", 1, "--out", tmp_path / "run", "--tensorboard"]
    invoke("train", *options)
    names = sorted(path.name.partition(".")[0] for path in (tmp_path / "run").iterdir())
    assert names == ["events", "log", "model", "result", "state", "training-curve"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(registry.Known, "read", lambda *_, **options: pytest.fail("read before tensorboard was missed"))
    error = invoke("train", *options, exit_code=1)
    assert "TensorBoard logs need: pip install tensorboard" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("NCI1", "PROTEINS", "IMDB-BINARY", "OHSU")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("DD", "COLLAB", "ogbg-molhiv")),
    ],
)
def test_trains_on_real_data(name: str, tmp_path: Path, data_root: Path) -> None:
    result = spin_fast("train", name, "--root", data_root, "--epochs", 1, "--batch-size", 128, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert ("test ROC-AUC" if name == "ogbg-molhiv" else "test accuracy") in result.stdout
    assert (tmp_path / "runs" / name / "model.safetensors").is_file()


@pytest.mark.slow
def test_reference_path_trains(tmp_path: Path) -> None:
    result = spin_fast("train", "--epochs", 1, "--hops", 1, cwd=tmp_path, SPIN_FAST_BACKEND="reference")
    assert result.returncode == 0, result.stderr
    assert "reference (SPIN_FAST_BACKEND=reference)" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert "--device cuda: torch " in invoke("train", "--device", "cuda", "--out", tmp_path, exit_code=1)
    assert "torch finds no GPU" in invoke("info")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_trains_on_a_device(device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    stdout = invoke("train", "--device", device, "--epochs", 2, "--hops", 1, "--out", tmp_path)
    gpu = device == "cuda" or (device == "auto" and native_available("cuda") and torch.cuda.is_available())
    assert ("CPU thread(s)" in stdout) != gpu


def test_json_has_neither_nan_nor_infinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spin_fast.training.accuracy", lambda logits, y: float("nan"))
    monkeypatch.setattr("spin_fast.cli.train.metric_of", lambda *_: ("accuracy", training.accuracy))
    assert facts_of("train", "--epochs", 1, "--hops", 0, "--out", tmp_path)["test"] is None


def test_published_folds(tmp_path: Path) -> None:
    path = folds_file(tmp_path / "folds.json", 1797, 4)
    trained = facts_of("train", "--splits", path, "--fold", 2, "--epochs", 1, "--hops", 0, "--out", tmp_path / "run")
    assert (trained["fold"], trained["graphs"]["test"]) == (2, 449)
    told = facts_of("info", "digits", "--splits", path, "--hops", 0)["splits"]
    assert [split["name"] for split in told] == [f"fold {number}" for number in range(4)]
    assert [split["name"] for split in facts_of("info", "digits", "--hops", 0)["splits"]] == ["drawn, seed 0"]
    assert "fold 3" in invoke("info", "digits", "--splits", path, "--fold", 3, "--hops", 0)
    for command in ("info", "train"):
        assert "--fold must be below 4" in invoke(command, "digits", "--splits", path, "--fold", 4, exit_code=1)
    assert "by --splits" in invoke("train", "--root", tmp_path, "--fold", 0, exit_code=1)


def test_a_metric_that_is_nan_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "known", ["0", "0"])
    options = ("--label", "label,", "--epochs", 2, "--hops", 1, "--patience", 1)
    result = CliRunner().invoke(app, ["train", "known/", *map(str, options)])
    assert result.exit_code == 0, result.output
    expected = "spin-fast: warning: metric rocauc is NaN on the validation graphs: their loss chooses the epoch, and"
    assert [line for line in result.stderr.splitlines() if "NaN" in line] == [f"{expected} when to stop"]


def test_one_hot_codes_go_into_the_model(tmp_path: Path) -> None:
    model, table = tmp_path / "model.safetensors", tmp_path / "p.csv"
    options = ["--epochs", 1, "--hops", 1, "--layers", 1, "--batch-size", 200]
    stdout = invoke("train", "power-law", "--one-hot", *options, "--out", tmp_path)
    (width,) = re.findall(r"node features: (\d+), 0 standardised", stdout)
    trained, _ = training.load_checkpoint(model)
    assert trained.config["in_features"] == int(width) == len(trained.node_features.categories_[0])
    invoke("predict", model, "power-law", "--out", table)
    assert len(table.read_text().splitlines()) == 1001
    stored = tmp_path / "features.safetensors"
    invoke("precompute", "power-law", "--hops", 1, "--out", stored)
    error = invoke("train", "power-law", "--one-hot", "--features", stored, "--out", tmp_path, exit_code=1)
    assert f"--one-hot: --features {stored} has the hops already" in error


def test_the_score_of_ogb_of_one_class_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Evaluator:
        def eval(self, both: dict[str, np.ndarray]) -> dict[str, float]:
            assert len(np.unique(both["y_true"])) == 2
            return {"rocauc": 0.75}

    monkeypatch.setattr(datasets, "evaluator", lambda name: Evaluator())
    _, score = metric_of(SimpleNamespace(name="ogbg-molhiv", metric="rocauc"), None, None)
    assert score(torch.rand(4, 2), torch.tensor([0, 1, 0, 1])) == 0.75
    assert math.isnan(score(torch.rand(4, 2), torch.tensor([0, 0, 0, 0])))
