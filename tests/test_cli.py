"""The command, run as its users run it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from spin_fast import native_available, training


def spin_fast(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spin_fast.cli", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | environment
    environment.pop("SPIN_FAST_DATA", None)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def one_line_error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


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
    assert table["test graphs seen in training"].startswith("0 of 180 ")
    for name in ("time per epoch", "graphs per second", "nodes per stored row", "kernels"):
        assert table[name]
    assert png_size(tmp_path / table["training curve"])[0] >= 800
    model, metadata = training.load_checkpoint(tmp_path / table["model"])
    assert metadata["dataset"] == "digits"
    assert model.config["in_features"] == 3


def test_train_options_reach_the_model(tmp_path: Path) -> None:
    options = ["--readout=attention", "--operator=sym+adj", "--hops=1", "--hidden=8", "--layers=2", "--epochs=1"]
    options += ["--no-batch-norm", "--no-deduplicate", "--out", "here"]
    result = spin_fast("train", "digits", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    model, metadata = training.load_checkpoint(tmp_path / "here" / "model.safetensors")
    assert model.config | {"attention": True, "num_hops": 1, "hidden_features": 8, "num_layers": 2} == model.config
    assert metadata["operator"] == "sym+adj"
    assert "0: 1x  1: 1x" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NCI1", "PROTEINS", "IMDB-BINARY", "DD", "OHSU", "COLLAB", "ogbg-molhiv"])
def test_trains_on_real_data(name: str, tmp_path: Path, data_root: Path) -> None:
    result = spin_fast("train", name, "--root", data_root, "--epochs", 1, "--batch-size", 128, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert ("test ROC-AUC" if name == "ogbg-molhiv" else "test accuracy") in result.stdout
    assert (tmp_path / "runs" / name / "model.safetensors").is_file()


def test_reference_path_trains(tmp_path: Path) -> None:
    result = spin_fast("train", "--epochs", 1, "--hops", 1, cwd=tmp_path, SPIN_FAST_BACKEND="reference")
    assert result.returncode == 0, result.stderr
    assert "reference (SPIN_FAST_BACKEND=reference)" in result.stdout


def test_errors_are_one_line(tmp_path: Path) -> None:
    assert "unknown data set 'nosuch'" in one_line_error(spin_fast("train", "nosuch", cwd=tmp_path))
    (tmp_path / "data" / "EMPTY").mkdir(parents=True)
    assert "EMPTY" in one_line_error(spin_fast("train", "EMPTY", cwd=tmp_path))
    (tmp_path / "data" / "BROKEN.zip").write_bytes(b"PK\x03\x04 this is no zip")
    assert "BROKEN.zip" in one_line_error(spin_fast("train", "BROKEN", cwd=tmp_path))
    with zipfile.ZipFile(tmp_path / "data" / "OTHER.zip", "w") as archive:
        archive.writestr("readme.txt", "no graphs here")
    assert "OTHER" in one_line_error(spin_fast("train", "OTHER", cwd=tmp_path))
    (tmp_path / "file").write_text("")
    assert "file" in one_line_error(spin_fast("train", "--epochs", 1, "--out", tmp_path / "file" / "x", cwd=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert "--device cuda: torch " in one_line_error(spin_fast("train", "--device", "cuda", cwd=tmp_path))
    assert "torch finds no GPU" in spin_fast("info", cwd=tmp_path).stdout


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_trains_on_a_device(device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    result = spin_fast("train", "--device", device, "--epochs", 2, "--hops", 1, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    gpu = device == "cuda" or (device == "auto" and native_available("cuda") and torch.cuda.is_available())
    assert ("CPU thread(s)" in result.stdout) != gpu


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = spin_fast("train", "nosuch", "--debug", cwd=tmp_path)
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_wrong_usage(tmp_path: Path) -> None:
    for arguments in (("train", "--hops", "-1"), ("train", "--operator", "gcn"), ("train", "--nosuch"), ("nosuch",)):
        result = spin_fast(*arguments, cwd=tmp_path)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_help_has_an_example_each(tmp_path: Path) -> None:
    for command in ("train", "info", "bench"):
        result = spin_fast(command, "--help", cwd=tmp_path)
        assert result.returncode == 0
        assert f"Example: spin-fast {command}" in result.stdout
    assert "train" in spin_fast("--help", cwd=tmp_path).stdout


def test_info(tmp_path: Path) -> None:
    result = spin_fast("info", "digits", cwd=tmp_path)
    assert result.returncode == 0
    assert (
        "digits: 1,797 graphs, 10 classes, 32.69 nodes and 88.98 edges on average, 3 feature(s) per node"
        in result.stdout
    )
    assert "nodes per stored row by branch, sym over 3 hops: 0: " in result.stdout
    assert "graphs that no SPIN can tell from another one: 0" in result.stdout
    assert spin_fast("--version", cwd=tmp_path).stdout.startswith("spin-fast 0.")


@pytest.mark.slow
def test_bench_runs(tmp_path: Path) -> None:
    result = spin_fast("bench", "--quick", "--results", tmp_path / "results", "--", "-k", "readout", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "results" / "results.json").is_file()
