"""The command, run as its users run it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from spin_fast import SPIN, GraphBatch, NodeFeatures, PowerFeatures, datasets, native_available, training
from spin_fast.cli import app, info, precompute
from spin_fast.cli import predict as predict_command


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
    stdout = invoke("train", "digits", *options, "--no-batch-norm", "--no-deduplicate", "--out", out)
    model, metadata = training.load_checkpoint(out / "model.safetensors")
    assert model.config | {"attention": True, "num_hops": 1, "hidden_features": 8, "num_layers": 2} == model.config
    assert metadata["operator"] == "sym+adj"
    assert metadata["classes"] == list("0123456789")
    assert "0: 1x  1: 1x" in stdout


def test_going_on_after_an_interruption(tmp_path: Path) -> None:
    """To the numbers of a run without interruption."""
    command = ["train", "--epochs", 8, "--hops", 1, "--hidden", 8, "--layers", 1, "--batch-size", 128]
    command += ["--dropout", 0.1, "--schedule", "plateau", "--class-weight", "balanced"]
    log = tmp_path / "runs" / "digits" / "log.csv"
    process = subprocess.Popen(
        [sys.executable, "-m", "spin_fast.cli", *map(str, command)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    )
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < 3):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130, stderr
    assert "the same command with --resume goes on from there" in stdout
    assert training.load_checkpoint(log.parent / "model.safetensors")[0].config["hidden_features"] == 8
    models, logs = [], []
    for out in ("runs/digits", "whole"):  # there is nothing to go on from in "whole"
        stdout = invoke(*command, "--resume", "--out", tmp_path / out)
        assert ("nothing to go on from" in stdout) == (out == "whole")
        models.append(training.load_checkpoint(tmp_path / out / "model.safetensors")[0].state_dict())
        logs.append(pandas.read_csv(tmp_path / out / "log.csv").drop(columns="seconds"))
    assert logs[0]["epoch"].tolist() == list(range(1, 9))
    pandas.testing.assert_frame_equal(*logs, check_exact=True)
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


QUICK = ("--epochs", 2, "--hops", 0, "--layers", 1, "--hidden", 4, "--batch-size", 400, "--no-calibrate")


def test_what_keeps_a_run_from_going_on_is_named_by_its_option(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def error(*options: object, dataset: str = "digits") -> str:
        stderr = invoke("train", dataset, *QUICK, *options, "--resume", "--out", out, exit_code=1)
        assert stderr.count("\n") == 1
        assert stderr.endswith("without --resume training starts anew\n")
        return stderr

    invoke("train", *QUICK, "--out", out)
    for here, there in (
        ("--seed 1", "--seed 0"),
        ("--hidden 8", "--hidden 4"),
        ("--readout attention", "--readout sum"),
        ("--batch-norm", "--no-batch-norm"),
        ("--class-weight balanced", "--class-weight none"),
        ("--operator adj", "--operator sym"),
        ("--layers 2", "--layers 1"),
        ("--calibrate", "--no-calibrate"),
    ):
        assert f"error: {here}: the run in {out} has {there}; the same command goes on, " in error(*here.split())
    assert f"the run in {out} is of other node features or edges (see --node-features" in error("--degree", "log")
    assert "error: --epochs must be at least 2, as many as" in error("--epochs", 1)
    assert "error: --epochs and --schedule must give the learning rates of" in error("--epochs", 3)
    assert f"CSL: the run in {out} is of other graphs" in error(dataset="CSL")
    (out / "state.safetensors").write_bytes(b"something else")
    assert f"{out / 'state.safetensors'} is not a readable safetensors file" in error()


def test_another_fold_does_not_go_on(tmp_path: Path, data_root: Path) -> None:
    options = *QUICK, "--root", data_root, "--class-weight", "balanced", "--resume", "--out", tmp_path, "--fold"
    invoke("train", "IMDB-BINARY", *options, 0)
    error = invoke("train", "IMDB-BINARY", *options, 1, exit_code=1)
    assert f"--fold 1: the run in {tmp_path} has another split" in error


def test_a_run_replaces_the_files_of_the_one_before_when_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, accuracy = tmp_path / "runs" / "digits", training.accuracy

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in out.iterdir()}

    def ended_in(epoch: int, error: type[BaseException], *options: object) -> str:
        calls = []

        def metric(*arguments: torch.Tensor) -> float:
            calls.append(1)
            if len(calls) == epoch:
                raise error
            return accuracy(*arguments)

        metric.__qualname__ = "accuracy"
        with monkeypatch.context() as patch:
            patch.setattr("spin_fast.training.accuracy", metric)
            return CliRunner().invoke(app, ["train", *map(str, (*QUICK, *options))]).stdout

    facts = facts_of("train", *QUICK)
    first = files()
    assert sorted(first) == [
        "log.csv",
        "model.safetensors",
        "result.json",
        "state.safetensors",
        "training-curve.png",
    ]
    assert json.loads(first["result.json"]) == facts
    assert facts["result"] == str(Path("runs", "digits", "result.json"))
    said = f"runs/digits has a result, test accuracy {100 * facts['test']:.2f} %: this run replaces it"
    for error in (KeyboardInterrupt, MemoryError):
        assert said in ended_in(1, error, "--seed", 1)
        assert files() == first
    ended_in(2, MemoryError, "--seed", 1)  # where the model is still that of the first run
    assert sorted(files()) == ["log.csv", "model.safetensors", "state.safetensors", "training-curve.png"]
    stdout = invoke("train", *QUICK, "--seed", 1, "--resume")
    assert "has a result" not in stdout
    assert json.loads((out / "result.json").read_bytes())["seed"] == 1
    assert "has a result" not in invoke("train", *QUICK, "--seed", 1, "--resume")
    (out / "result.json").write_text("[]")
    assert "runs/digits has a result: this run replaces it" in invoke("train", *QUICK)


@pytest.mark.parametrize(
    "name", ["log.csv", "model.safetensors", "result.json", "training-curve.png", "state.safetensors"]
)
def test_train_finds_what_it_cannot_write_before_it_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "read", lambda *_, **options: pytest.fail("read before the place was found bad"))
    (tmp_path / name).mkdir()
    error = invoke("train", "--out", tmp_path, exit_code=1)
    assert error == f"spin-fast: error: {tmp_path / name} cannot be written: it is a folder\n"


def test_a_call_with_errors_leaves_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options in (
        ["nosuch"],
        ["nosuch", "--out", "a/b"],
        ["digits", "--fold", 3],
        ["digits", "--tensorboard", "--label=x"],
    ):
        invoke("train", *options, exit_code=1)
    invoke("precompute", "nosuch", "--out", "a/b.safetensors", exit_code=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "result.json").touch()
    result = CliRunner().invoke(app, ["train", "digits", "--label", "x"])
    assert (result.exit_code, result.stdout) == (1, "")
    (tmp_path / "file").touch()
    assert "file/a/log.csv cannot be written: " in invoke("train", "--out", "file/a", exit_code=1).replace(
        "model.safetensors", "log.csv"
    )


def test_termination_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, accuracy = [], training.accuracy

    def terminated(logits: torch.Tensor, y: torch.Tensor) -> float:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return accuracy(logits, y)

    monkeypatch.setattr("spin_fast.training.accuracy", terminated)
    before = signal.getsignal(signal.SIGTERM)
    options = ["--epochs", 5, "--hops", 0, "--layers", 1, "--batch-size", 400, "--out", tmp_path / "run"]
    result = CliRunner().invoke(app, ["train", *map(str, options)])
    assert result.exit_code == 143
    assert "interrupted after epoch 2: the same command with --resume goes on from there" in result.stdout
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(calls) == 4  # the last one is that of the test graphs
    assert training.load_checkpoint(tmp_path / "run" / "model.safetensors")[1]["dataset"] == "digits"


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    options = ["--epochs", 1, "--hops", 0, "--layers", 1, "--out", tmp_path / "run", "--tensorboard"]
    invoke("train", *options)
    names = sorted(path.name.partition(".")[0] for path in (tmp_path / "run").iterdir())
    assert names == ["events", "log", "model", "result", "state", "training-curve"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(datasets, "read", lambda *_, **options: pytest.fail("read before tensorboard was missed"))
    error = invoke("train", *options, exit_code=1)
    assert "TensorBoard logs need: pip install tensorboard" in error
    assert error.count("\n") == 1


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


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown data set 'nosuch'" in one_line_error(spin_fast("train", "nosuch", cwd=tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPIN_FAST_DATA", raising=False)

    def error(*arguments: object) -> str:
        stderr = invoke("train", *arguments, exit_code=1)
        assert stderr.count("\n") == 1
        return stderr

    (tmp_path / "data" / "EMPTY").mkdir(parents=True)
    assert "EMPTY" in error("EMPTY")
    (tmp_path / "data" / "BROKEN.zip").write_bytes(b"PK\x03\x04 this is no zip")
    assert "BROKEN.zip" in error("BROKEN")
    with zipfile.ZipFile(tmp_path / "data" / "OTHER.zip", "w") as archive:
        archive.writestr("readme.txt", "no graphs here")
    assert "OTHER" in error("OTHER")
    (tmp_path / "file").write_text("")
    assert "file" in error("--epochs", 1, "--out", tmp_path / "file" / "x")


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


def test_debug_shows_the_traceback() -> None:
    result = CliRunner().invoke(app, ["train", "nosuch", "--debug"])
    assert isinstance(result.exception, datasets.DatasetError)  # Python shows where it is from


def test_wrong_usage() -> None:
    for arguments in (("train", "--hops", "-1"), ("train", "--operator", "gcn"), ("train", "--nosuch"), ("nosuch",)):
        assert "Usage:" in invoke(*arguments, exit_code=2)
    assert "Missing argument" in invoke("predict", exit_code=2)


def test_help_has_an_example_each() -> None:
    for command in ("train", "predict", "precompute", "info", "bench"):
        assert f"Example: spin-fast {command}" in invoke(command, "--help")
    assert "train" in CliRunner().invoke(app, []).output
    assert invoke("--version").startswith("spin-fast 0.")


@pytest.mark.slow
def test_bench_runs(tmp_path: Path) -> None:
    result = spin_fast("bench", "--quick", "--results", tmp_path / "results", "--", "-k", "readout", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "results" / "results.json").is_file()


def invoke(*arguments: object, exit_code: int = 0) -> str:
    """The command in this process, for what needs no new one; its output, or its error of one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == exit_code, result.output
    return result.stderr if exit_code else result.stdout


def test_precompute_and_train_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = invoke("precompute", "digits", "--hops", 1)
    assert "1797/1797" in stdout
    assert "0: 71.1x  1: 1.04x" in stdout
    made = PowerFeatures.load("digits.safetensors")
    assert (len(made), made.num_hops, made.operator, made.row_of_node) == (1797, 1, "sym", None)
    lines = []
    for options in (["--features", "digits.safetensors"], ["--hops", 1, "--no-standardize"]):
        stdout = invoke("train", "--epochs", 2, "--out", tmp_path / str(len(lines)), *options)
        assert ("not standardised, which train without --features does" in stdout) == ("--features" in options)
        lines.append([line.split() for line in stdout.splitlines() if "accuracy" in line])
    assert lines[0] == lines[1] != []


def test_precompute_in_files_of_bounded_size(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, options = tmp_path / "deep" / "n.safetensors", ["--root", data_root, "--operator", "sym+adj", "--hops", 2]
    stdout = invoke("precompute", "PROTEINS", *options, "--shard-size", "300KB", "--node-rows", "--out", out)
    files = sorted(out.parent.glob("n-*-of-*.safetensors"))
    assert len(files) > 3
    assert f"{files[0].name} to {files[-1].name}" in " ".join(stdout.split())
    assert all(file.stat().st_size <= 300_000 for file in files)
    assert sum(len(PowerFeatures.load(file)) for file in files) == 1113
    whole = PowerFeatures.from_graphs(datasets.load("PROTEINS", data_root), 2, "sym+adj")
    assert torch.equal(PowerFeatures.load(out).dense_rows(), whole.dense_rows())
    options = ["--features", out, "--root", data_root, "--epochs", 1, "--dropout", 0.1, "--out", tmp_path / "run"]
    assert "0: 1.45e+04x" in invoke("train", "PROTEINS", *options)
    assert training.load_checkpoint(tmp_path / "run" / "model.safetensors")[1]["operator"] == "sym+adj"


def test_shards_below_the_largest_graph(tmp_path: Path) -> None:
    """A size is one that files keep to, or an error that names the smallest."""
    out = tmp_path / "x.safetensors"
    error = invoke(
        "precompute", folder_of_graphs(tmp_path / "own", None), "--out", out, "--shard-size", 10, exit_code=1
    )
    needed = int(re.search("--shard-size must be at least ([0-9,]+) bytes", error)[1].replace(",", ""))
    assert not list(tmp_path.glob("x*"))
    files = facts_of("precompute", tmp_path / "own", "--out", out, "--shard-size", needed)["files"]
    assert len(files) > 1
    assert all(Path(file).stat().st_size <= needed for file in files)


def test_features_of_something_else(tmp_path: Path) -> None:
    graphs, path, out = datasets.load("digits"), tmp_path / "x.safetensors", ["--out", tmp_path / "run"]

    def error(*options: object) -> str:
        return invoke("train", "--features", path, *options, *out, exit_code=1)

    assert "x.safetensors does not exist" in error()
    PowerFeatures.from_graphs(graphs[:-1], 1).save(path)
    assert "x.safetensors is not of digits: it has 1796 graphs with 3 feature(s), digits 1797 graphs" in error()
    PowerFeatures.from_graphs(graphs[list(range(1796, -1, -1))], 1).save(path)
    assert "is not of digits: its graphs have other sizes or labels" in error()
    PowerFeatures.from_graphs(replace(graphs, x=graphs.x.flip(1)), 1).save(path)
    assert "is not of digits: its graphs have other node features" in error()
    PowerFeatures.from_graphs(graphs, 1, node_rows=False).save(path)
    assert "--hops 2: --features" in error("--hops", 2)
    assert "x.safetensors has sym" in error("--operator", "rw")
    assert "must be made by spin-fast precompute --node-rows" in error("--dropout", 0.1)
    assert "must be made by spin-fast precompute --no-deduplicate" in error("--no-deduplicate")
    assert "--degree log: --features" in error("--degree", "log")
    assert "--standardize: --features" in error("--standardize")
    path.write_text("no features")
    assert "x.safetensors is not a readable safetensors file" in error()


def test_precompute_finds_errors_before_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "read", lambda *_, **options: pytest.fail("read before the place was found bad"))
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "x", ""), (tmp_path / "x.json", ".json")):
        error = invoke("precompute", "digits", "--out", place, exit_code=1)
        assert str(place) in error
        assert reason in error
    for size in ("many", "3XB", "-1GB", "0"):
        assert "must be a size such as 500MB" in " ".join(
            invoke("precompute", "digits", "--shard-size", size, exit_code=2).replace("│", "").split()
        )
    monkeypatch.undo()
    assert "unknown data set 'nosuch'" in invoke("precompute", "nosuch", "--out", tmp_path / "x", exit_code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("500kb", 500_000), ("3MiB", 3 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert precompute._bytes(text) == size


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    training.save_checkpoint(tmp_path / "model.safetensors", SPIN(3, 8, 10, 1, attention=False), operator="sym+adj")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predict(suffix: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", 1 << 18)
    out = tmp_path / "deep" / f"probabilities.{suffix}"
    assert "1,797 graphs" in invoke("predict", checkpoint, "digits", "--out", out)
    table = pandas.read_csv(out) if suffix == "csv" else pandas.read_parquet(out)
    assert list(table) == ["graph", "prediction", *(f"class_{i}" for i in range(10))]
    assert table["graph"].tolist() == list(range(1797))
    expected = training.predict_proba(training.load_checkpoint(checkpoint)[0], datasets.load("digits"))
    written = torch.tensor(table.iloc[:, 2:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, expected, rtol=1e-6, atol=1e-7)
    assert table["prediction"].astype(int).tolist() == expected.argmax(1).tolist()
    assert list(out.parent.iterdir()) == [out]


def test_predict_several_tasks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = replace(datasets.load("digits")[:7], y=torch.zeros(7, 10))
    monkeypatch.setattr(datasets, "read", lambda *_, **options: datasets.Folder(graphs, [], None, None, 0))
    invoke("predict", checkpoint, "digits", "--out", tmp_path / "x.csv")
    table = pandas.read_csv(tmp_path / "x.csv")
    assert list(table) == ["graph", *(f"task_{i}" for i in range(10))]
    (scores,) = training.predict_chunks(training.load_checkpoint(checkpoint)[0], graphs)
    written = torch.tensor(table.iloc[:, 1:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, scores.sigmoid(), rtol=1e-6, atol=1e-7)


def test_predict_makes_the_node_features_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = invoke("train", "--epochs", 1, "--hops", 1, "--degree", "one-hot", "--out", "run")
    graphs = datasets.load("digits")
    assert graphs.y is not None
    node_features = NodeFeatures("one-hot").fit(graphs, datasets.split("digits", graphs.y).train)
    prepared = node_features.transform(graphs)
    assert f"node features: {prepared.num_features}, 3 standardised on the training graphs" in stdout
    model, metadata = training.load_checkpoint("run/model.safetensors")
    assert NodeFeatures.from_dict(metadata["preprocessing"]).to_dict() == node_features.to_dict()
    invoke("predict", "run/model.safetensors", "digits", "--out", "x.csv")
    written = torch.tensor(pandas.read_csv("x.csv").iloc[:, 2:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, training.predict_proba(model, graphs), rtol=1e-6, atol=1e-7)
    scores = training.predict(model, PowerFeatures.from_graphs(prepared, 1))
    torch.testing.assert_close(written, scores.softmax(1), rtol=1e-4, atol=1e-6)


def test_own_features_of_a_dataset(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    data, run = ["PROTEINS", "--root", data_root], "runs/PROTEINS/model.safetensors"
    options = [*data, "--node-features", "degree", "--hops", 1]
    assert "1 feature(s) per node" in invoke("precompute", *options, "--out", "x.safetensors")
    invoke("train", *options, "--epochs", 1, "--features", "x.safetensors")
    invoke("predict", run, *data)
    assert "preprocessing" not in training.load_checkpoint(run)[1]
    assert training.load_checkpoint(run)[0].config["in_features"] == 1
    assert "choose one of: label" in invoke("train", *data, "--node-features", "nosuch", exit_code=1)


def test_predict_names_what_is_wrong(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(model: Path, dataset: str, out: str) -> str:
        return invoke("predict", model, dataset, "--out", tmp_path / out, exit_code=1)

    assert "x.txt" in error(checkpoint, "digits", "x.txt")
    assert "--out must end with .csv or .parquet" in error(checkpoint, "digits", "x.txt")
    assert "model.safetensors" in error(checkpoint, "digits", "model.safetensors/x.csv")
    assert "checkpoint" in error(tmp_path / "nosuch", "digits", "x.csv")
    assert "unknown data set 'nosuch'" in error(checkpoint, "nosuch", "x.csv")
    assert f"erdos-renyi has 50 feature(s) per node, and {checkpoint} takes 3" in error(
        checkpoint, "erdos-renyi", "x.csv"
    )
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "Parquet needs: pip install pyarrow" in error(checkpoint, "digits", "x.parquet")
    operator = training.load_checkpoint(checkpoint)[1]["operator"]
    other = "adj" if operator != "adj" else "sym"
    assert f"--operator {other}: {checkpoint} was trained with {operator}" in invoke(
        "predict", checkpoint, "digits", "--operator", other, "--out", tmp_path / "x.csv", exit_code=1
    )
    training.save_checkpoint(checkpoint, SPIN(3, 8, 10, 1))
    assert "--operator must be given" in error(checkpoint, "digits", "x.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def facts_of(*arguments: object) -> dict[str, Any]:
    """What a command says with --json, which must be all of stdout, under the keys that its help names."""
    facts = json.loads(invoke(*arguments, "--json"))
    assert isinstance(facts, dict)
    keys = re.search(r"Keys of --json: (.*?)\.", " ".join(invoke(arguments[0], "--help").split()))
    assert keys is not None
    assert list(facts) == keys[1].split(", ")
    return facts


def test_results_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = facts_of("precompute", "digits", "--hops", 1)
    assert (made["graphs"], made["files"], made["index"]) == (1797, ["digits.safetensors"], None)
    assert made["bytes"] == Path("digits.safetensors").stat().st_size
    trained = facts_of("train", "--features", "digits.safetensors", "--epochs", 2, "--seed", 3)
    assert trained["graphs"] == {"train": 1437, "validation": 180, "test": 180}
    assert trained["precomputation_seconds"] is None
    model, metadata = training.load_checkpoint(trained["model"])
    assert trained["test"] == metadata["test"]  # not rounded
    assert trained["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    said = facts_of("predict", trained["model"], "digits")
    classes = pandas.read_csv(said["out"])["prediction"].astype(str).value_counts().to_dict()
    assert {name: number for name, number in said["predicted"].items() if number} == classes
    result = CliRunner().invoke(app, ["info", "nosuch", "--json"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)


def test_json_has_neither_nan_nor_infinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spin_fast.training.accuracy", lambda logits, y: float("nan"))
    monkeypatch.setattr("spin_fast.cli.train.metric_of", lambda *_: ("accuracy", training.accuracy))
    assert facts_of("train", "--epochs", 1, "--hops", 0, "--out", tmp_path)["test"] is None


def test_info_without_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIN_FAST_DATA", str(tmp_path))
    (tmp_path / "MINE.nel").touch()
    assert json.loads(invoke("info", "--json"))["datasets"][-1] == "MINE"
    assert "MINE" in invoke("info")


# Three graphs: a triangle with a self-loop, the same with another label, and two nodes with an edge in one direction.
LOOPED = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0), (0, 0)]


def small_set(y: torch.Tensor | None, weight: bool = False) -> datasets.Folder:
    edges = [*LOOPED, *((u + 3, v + 3) for u, v in LOOPED), (6, 7), (6, 7)]
    graphs = GraphBatch.from_edge_index(
        torch.tensor(edges).t(),
        torch.tensor([[0.5, 1, 0]] * 7 + [[0.5, 0, 1]] * 2),
        torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]),
        y=y,
        edge_weight=torch.ones(len(edges)) if weight else None,
    )
    return datasets.Folder(graphs, ["a", "b", "c"], None if y is None else ["no", "yes"], None, 1)


def test_info_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(datasets, "read", lambda *_, **options: small_set(torch.tensor([0, 1, 1])))
    facts = facts_of("info", "small", "--hops", 2)
    assert facts["nodes"] == {"total": 9, "mean": 3, "median": 3, "min": 3, "max": 3}
    assert facts["edges"]["total"] == 2 * 7 + 1  # each edge, as they are directed; the repeated one once
    assert facts["density"] == {"mean": pytest.approx(13 / 18), "median": 1, "min": pytest.approx(1 / 6), "max": 1}
    assert (facts["isolated_nodes"], facts["self_loops"], facts["repeated_edges"]) == (1, 2, 1)
    assert (facts["directed"], facts["weighted"]) == (True, False)
    assert facts["features"] == {
        "width": 3,
        "dtype": "float32",
        "parts": [{"width": 1, "kind": "constant"}, {"width": 2, "kind": "one-hot"}],
        "columns": None,
        "unused": [],
    }
    assert facts["classes"] == [{"name": "no", "graphs": 1}, {"name": "yes", "graphs": 2}]
    assert facts["bytes"]["powers"] == 3 * 9 * 3 * 4
    assert facts["duplicates"] == {
        "graphs": 2,
        "distinct": 2,
        "contradicting": 2,
        "best_accuracy": pytest.approx(2 / 3),
    }
    assert facts["splits"] == []
    assert "10 graphs per class" in facts["splits_missing"]
    shown = invoke("info", "small")
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])
    for row in ("directed", "1 constant, 2 one-hot (float32)", "no:1  yes:2", "66.6667 %, 2 of all 3 graphs"):
        assert row in shown.replace("\u2502\n\u2502", " ") or row in " ".join(shown.replace("\u2502", " ").split())


@pytest.mark.parametrize(
    ("name", "expected", "isolated", "bound"),
    [("PROTEINS", (1113, 39.06, 72.82), 5, 1110 / 1113), ("IMDB-MULTI", (1500, 13.00, 65.94), 0, 949 / 1500)],
)
def test_info_on_real_data(name: str, expected: tuple, isolated: int, bound: float, data_root: Path) -> None:
    facts = facts_of("info", name, "--root", data_root)
    assert (facts["graphs"], round(facts["nodes"]["mean"], 2), round(facts["edges"]["mean"], 2)) == expected
    assert (facts["isolated_nodes"], facts["directed"]) == (isolated, False)
    assert facts["duplicates"]["best_accuracy"] == pytest.approx(bound, abs=2e-3)
    assert len(facts["splits"]) in (1, 11)  # the folds are not everywhere
    assert facts["bytes"]["features"] < facts["bytes"]["powers"]
    several = facts_of(
        "info", name, "--root", data_root, "--operator", "sym,adj", "--hops", 1, "--node-features", "degree"
    )
    assert (several["features"]["parts"], len(several["deduplication"])) == ([{"width": 1, "kind": "degree"}], 3)
    assert several["bytes"]["powers"] == 3 * facts["nodes"]["total"] * 4


def test_info_of_unusual_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = float("nan")
    for y, contradicting in (
        (torch.tensor([[0.0, nan], [nan, 1], [1, 1]]), 0),
        (torch.tensor([[0.0, 1], [0, 0], [1, nan]]), 2),
        (None, None),
    ):
        monkeypatch.setattr(datasets, "read", lambda *_, y=y, **options: small_set(y, weight=True))
        facts = facts_of("info", "small")
        assert facts["duplicates"]["contradicting"] == contradicting
        assert facts["duplicates"]["best_accuracy"] is None
        assert facts["weighted"]
        assert (facts["tasks"] is None) == (y is None)
        assert ("no split" in invoke("info", "small")) == (facts["splits_missing"] is not None)
    assert facts["splits_missing"] == "there are no labels"


@given(st.data())
def test_structure_agrees_with_networkx(data: st.DataObject) -> None:
    directed = data.draw(st.booleans())
    graphs = []
    for size in data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4)):
        pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)) if size else st.nothing()
        graph = networkx.DiGraph() if directed else networkx.Graph()
        graph.add_nodes_from(range(size))
        graph.add_edges_from(data.draw(st.lists(pairs, max_size=12)) if size else [])
        graphs.append(graph)
    facts = info._structure(GraphBatch.from_networkx(graphs))
    if not facts["directed"] and directed:  # by chance each edge has its reverse
        graphs = [graph.to_undirected() for graph in graphs]
    assert facts["directed"] <= directed
    assert facts["nodes"]["total"] == sum(len(graph) for graph in graphs)
    assert facts["edges"]["total"] == sum(graph.number_of_edges() for graph in graphs)
    assert facts["edges"]["median"] == np.median([graph.number_of_edges() for graph in graphs])
    assert facts["self_loops"] == sum(networkx.number_of_selfloops(graph) for graph in graphs)
    for graph in graphs:
        graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    assert facts["isolated_nodes"] == sum(networkx.number_of_isolates(graph) for graph in graphs)
    assert facts["density"]["mean"] == pytest.approx(np.mean([networkx.density(graph) for graph in graphs]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
def test_bound_of_the_accuracy(graphs: list[tuple[int, int]]) -> None:
    """Against all that a classifier could answer for graphs of each kind."""
    kinds = [kind for kind, _ in graphs]
    first = torch.tensor([kinds.index(kind) for kind in kinds])
    found = info._duplicates(first, torch.tensor([label for _, label in graphs]))
    right = sum(max(graphs.count((kind, label)) for label in range(3)) for kind in {*kinds})
    assert found["best_accuracy"] == right / len(graphs)
    assert found["graphs"] == sum(kinds.count(kind) > 1 for kind in kinds)
    assert found["contradicting"] == sum(len({label for k, label in graphs if k == kind}) > 1 for kind in kinds)


def folds_file(path: Path, num_graphs: int, num_folds: int) -> Path:
    parts = [list(range(fold, num_graphs, num_folds)) for fold in range(num_folds)]
    folds = []
    for fold, test in enumerate(parts):
        validation = parts[(fold + 1) % num_folds]
        train = sorted({*range(num_graphs)} - {*test} - {*validation})
        folds.append({"test": test, "model_selection": [{"train": train, "validation": validation}]})
    path.write_text(json.dumps(folds))
    return path


def test_published_folds(tmp_path: Path) -> None:
    path = folds_file(tmp_path / "folds.json", 1797, 4)
    trained = facts_of("train", "--splits", path, "--fold", 2, "--epochs", 1, "--hops", 0, "--out", tmp_path / "run")
    assert (trained["fold"], trained["graphs"]["test"]) == (2, 449)
    told = facts_of("info", "digits", "--splits", path, "--hops", 0)["splits"]
    assert [split["name"] for split in told] == [f"fold {number}" for number in range(4)]
    assert [split["name"] for split in facts_of("info", "digits", "--hops", 0)["splits"]] == ["drawn, seed 0"]
    assert "fold 3" in invoke("info", "digits", "--splits", path, "--fold", 3, "--hops", 0)
    assert "there are 4 folds" in invoke("info", "digits", "--splits", path, "--fold", 4, exit_code=1)
    assert "fold must be below 4" in invoke("train", "digits", "--splits", path, "--fold", 4, exit_code=1)
    assert "by --splits" in invoke("train", "--root", tmp_path, "--fold", 0, exit_code=1)


def test_duplicates_across_a_split() -> None:
    split = datasets.Split(*map(torch.tensor, ([0, 1, 2], [3, 4], [5, 6, 7])))
    seen = info._overlap("x", split, torch.tensor([0, 0, 2, 2, 4, 4, 0, 2]))
    assert seen == {"name": "x", "train": 3, "validation": 2, "test": 3, "validation_seen": 1, "test_seen": 2}


def folder_of_graphs(path: Path, labels: list[str] | None, num_graphs: int = 30) -> Path:
    """Rings and stars in tables of edges and graphs."""
    path.mkdir()
    names, edges = [f"mol {number}" for number in range(num_graphs)], []
    for number, name in enumerate(names):
        size = 4 + number // 2 % 4
        graph = (networkx.cycle_graph if number % 2 else networkx.star_graph)(size).to_directed()
        edges += [(name, source, target) for source, target in graph.edges]
    pandas.DataFrame(edges, columns=["graph", "source", "target"]).to_csv(path / "edges.csv", index=False)
    if labels is not None:
        y = [labels[number % 2] for number in range(num_graphs)]
        pandas.DataFrame({"graph": names, "label": y}).to_csv(path / "graphs.csv", index=False)
    return path


@pytest.mark.parametrize("labels", [["star", "ring"], ["1", "-1"], ["[/]", "[bold]"]])
def test_a_folder_of_your_own(labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "known", labels)
    folder_of_graphs(tmp_path / "new", None, num_graphs=11)
    assert facts_of("info", "./known")["classes"] == [{"name": name, "graphs": 15} for name in sorted(labels)]
    trained = facts_of("train", "known", "--epochs", 15, "--hops", 1)
    assert trained["model"] == "runs/known/model.safetensors"
    edges = datasets.load("known/").num_edges / 30  # not half of them, for who lists each edge once
    assert f"{edges:.2f} edges on average" in invoke("precompute", "known", "--hops", 1)
    monkeypatch.setattr(predict_command, "CHUNK_GRAPHS", 4)
    said = facts_of("predict", trained["model"], tmp_path / "new", "--out", "p.csv")
    assert (said["dataset"], said["graphs"]) == ("new", 11)
    table = pandas.read_csv("p.csv", dtype={"prediction": str})
    assert list(table) == ["graph", "name", "prediction", *(f"class_{name}" for name in sorted(labels))]
    assert table["graph"].tolist() == list(range(11))
    assert table["name"].tolist() == [f"mol {number}" for number in range(11)]
    assert table["prediction"].tolist() == [labels[number % 2] for number in range(11)]
    assert "1: " in invoke("precompute", "known/", "--hops", 1)
    assert Path("known.safetensors").is_file()
    assert "new has no labels to train by" in invoke("train", "./new", exit_code=1)


def test_predict_has_the_columns_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of nodes mean the same in another set, whichever of them it has."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, labels: list[int]) -> None:
        Path(name).mkdir()
        edges = "".join(f"{2 * g + 1}, {2 * g + 2}\n" for g in range(20))
        Path(name, "X_A.txt").write_text(edges)
        Path(name, "X_graph_indicator.txt").write_text("".join(f"{g + 1}\n" * 2 for g in range(20)))
        Path(name, "X_graph_labels.txt").write_text("1\n-1\n" * 10)
        Path(name, "X_node_labels.txt").write_text("".join(f"{label}\n" for label in labels))

    write("known", [1, 2, 3, 3] * 10)
    write("fewer", [3, 3, 2, 2] * 10)
    write("others", [2, 3, 4, 4] * 10)
    model = facts_of("train", "known/", "--epochs", 1, "--hops", 1)["model"]
    invoke("predict", model, "fewer/")
    net, _ = training.load_checkpoint(model)
    graphs = datasets.load("known/")[[1]]  # 3, 3
    want = training.predict_proba(net, graphs)[0].tolist()
    assert pandas.read_csv("probabilities.csv").iloc[0, 3:].tolist() == pytest.approx(want, rel=1e-5)
    assert "holds labels 2..4, but features only have columns for 1..3" in invoke(
        "predict", model, "others/", exit_code=1
    )


def test_words_as_node_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder gets the columns of training, and a word that was not there is an error."""
    monkeypatch.chdir(tmp_path)
    for name, labels in (("known", ["a", "b"]), ("new", ["a", "b"])):
        edges = pandas.read_csv(folder_of_graphs(tmp_path / name, labels) / "edges.csv")
        nodes = edges[["graph", "source"]].drop_duplicates().rename(columns={"source": "node"})
        nodes["element"] = np.where(nodes["node"] == 0, "N" if name == "known" else "C", "C")
        nodes.assign(mass=0.5 * nodes["node"]).to_csv(tmp_path / name / "nodes.csv", index=False)
    model = facts_of("train", "known/", "--epochs", 1, "--hops", 1, "--node-features", "element,mass")["model"]
    metadata = training.load_checkpoint(model)[1]
    assert metadata["node_features"] == [{"column": "mass"}, {"column": "element", "categories": ["C", "N"]}]
    Path("new/graphs.csv").write_text("graph,label\n" + "".join(f"mol {g},{'x' * (g % 2)}\n" for g in range(30)))
    invoke("predict", model, "new/", "--out", "p.csv")  # labels there are nobody's business
    net, _ = training.load_checkpoint(model)
    graphs = datasets.load("new/", features=metadata["node_features"], label=None)
    assert graphs.num_features == 3
    want = training.predict_proba(net, graphs, "sym")
    np.testing.assert_allclose(pandas.read_csv("p.csv").iloc[:, 3:].to_numpy(), want, rtol=1e-5)
    text = Path("new/nodes.csv").read_text()
    Path("new/nodes.csv").write_text(text.replace(",C,", ",Xe,", 1))
    error = invoke("predict", model, "new/", exit_code=1)
    assert "new/nodes.csv, line 2, column 'element' holds 'Xe'" in error
    assert "node features: mass, element (2 words)" in invoke("train", "known/", "--epochs", 1, "--hops", 1)
    assert "mass, element (2 words)" in invoke("info", "known/")
    assert facts_of("info", "known/")["features"]["columns"] == metadata["node_features"]
    mass = {"column": "mass", "categories": "auto"}
    features = facts_of("info", "known/", "--node-features", json.dumps(mass))["features"]
    assert features["parts"] == [{"width": 8, "kind": "one-hot"}]
    both = json.dumps([mass, "element"])
    codes = [{"width": 8, "kind": "one-hot"}, {"width": 2, "kind": "one-hot"}]  # side by side, each by itself
    assert facts_of("info", "known/", "--node-features", both)["features"]["parts"] == codes
    assert "8 one-hot, 2 one-hot" in " ".join(invoke("info", "known/", "--node-features", both).split())
    invoke("info", "known/", "--node-features", '{"column": ', exit_code=2)


def test_graphs_without_nodes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = facts_of("train", folder_of_graphs(tmp_path / "known", ["a", "b"]), "--epochs", 1, "--hops", 1)["model"]
    folder = folder_of_graphs(tmp_path / "new", ["a", "b"])
    with (folder / "graphs.csv").open("a") as file:
        file.write("TYPO1,a\n")
    said = "1 of 31 graphs has no nodes, it is TYPO1\n"
    result = CliRunner().invoke(app, ["predict", model, "new/", "--out", "p.csv", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["graphs"]) == (0, 31)
    assert said in result.stderr
    assert said in CliRunner().invoke(app, ["train", "new/", "--epochs", "1", "--hops", "1"]).stderr
    assert facts_of("info", "new/")["empty_graphs"] == 1
    with (folder / "graphs.csv").open("a") as file:
        file.write("TYPO2,a\n")
    monkeypatch.setattr(predict_command, "CHUNK_GRAPHS", 4)
    result = CliRunner().invoke(app, ["predict", model, "new/", "--out", "p.csv"])
    assert result.stderr.endswith("2 of 32 graphs have no nodes, the first is TYPO1\n")


@pytest.mark.parametrize("out", ["new/edges.csv", "new/../new/graphs.csv", "new/nodes.parquet", "model.csv"])
def test_predict_overwrites_nothing_that_it_reads(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "new", ["a", "b"])
    Path("model.csv").write_bytes(b"a model")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert f"--out {out} " in invoke("predict", "model.csv", "new/", "--out", out, exit_code=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_labels_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = pandas.read_csv(folder_of_graphs(tmp_path / "known", ["a", "b"]) / "graphs.csv")
    table["toxic"], table["soluble, or not"] = table.index % 2, (table.index % 3 > 0).astype(int)
    table = table.astype({"toxic": "Int64"})
    table.loc[[0, 7], "toxic"] = None
    table.rename(columns={"label": "kind"}).to_csv("known/graphs.csv", index=False)
    assert facts_of("info", "known/")["classes"] is None
    assert "--label names the column that has them" in invoke("train", "known/", exit_code=1)
    facts = facts_of("info", "known/", "--label", "kind")
    assert facts["classes"] == [{"name": "a", "graphs": 15}, {"name": "b", "graphs": 15}]
    assert facts_of("info", "known/", "--label", "")["classes"] is None
    error = invoke("precompute", "known/", "--label", "toxic", exit_code=1)
    assert "line 2, column 'toxic' is empty, and 1 more of 30" in error
    assert 'by --label "toxic,", or read no labels by --label ""' in error
    invoke("precompute", "known/", "--label", "toxic,", "--hops", 1)
    assert PowerFeatures.load("known.safetensors").y.shape == (30, 1)
    both = '["toxic", "soluble, or not"]'
    assert facts_of("info", "known/", "--label", both)["tasks"] == {
        "number": 2,
        "labelled": pytest.approx(58 / 60),
        "names": ["toxic", "soluble, or not"],
    }
    options = ("--epochs", 1, "--hops", 1, "--batch-size", 1)
    facts = facts_of("train", "known/", "--label", both, *options)
    error = invoke("train", "known/", "--label", "kind", *options, "--resume", exit_code=1)
    assert "known: the run in runs/known is of other graphs or labels (see --label, too)" in error
    model, metadata = facts["model"], training.load_checkpoint(facts["model"])[1]
    assert facts["metric"] == "ROC-AUC"
    assert metadata["task_names"] == ["toxic", "soluble, or not"]
    invoke("predict", model, "known/", "--out", "p.csv")
    predicted = pandas.read_csv("p.csv")
    net, graphs = training.load_checkpoint(model)[0], datasets.load("known/", label=None)
    np.testing.assert_allclose(predicted.iloc[:, 2:].to_numpy(), training.predict_proba(net, graphs), rtol=1e-5)
    assert list(predicted) == ["graph", "name", "task_toxic", "task_soluble, or not"]
    assert predicted.notna().all(axis=None)
    metric = ("--label", "kind", "--epochs", 1, "--hops", 1, "--out", "runs/kind", "--metric")
    assert [facts_of("train", "known/", *metric, name)["metric"] for name in ("accuracy", "rocauc")] == [
        "accuracy",
        "ROC-AUC",
    ]
    error = invoke("train", "known/", *metric, "accuracy", "--resume", exit_code=1)
    assert "known: the run in runs/kind has another metric (see --metric and --label)" in error
    assert "--metric rocauc is of two classes, and digits has 10" in invoke("train", "--metric", "rocauc", exit_code=1)
    assert "--label kind is impossible for digits" in invoke("info", "digits", "--label", "kind", exit_code=1)


def test_a_metric_that_is_nan_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "known", ["0", "0"])
    options = ("--label", "label,", "--epochs", 2, "--hops", 1, "--patience", 1)
    result = CliRunner().invoke(app, ["train", "known/", *map(str, options)])
    assert result.exit_code == 0, result.output
    expected = "spin-fast: warning: metric rocauc is NaN on the validation graphs: their loss chooses the epoch, and"
    assert [line for line in result.stderr.splitlines() if "NaN" in line] == [f"{expected} when to stop"]


@pytest.mark.parametrize("option", ["--undirected", "--label=kind", "--self-loops", "--node-features=degree"])
def test_a_mistyped_folder_is_not_there(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "mols", ["a", "b"])
    (tmp_path / "tu.zip").touch()
    for command in ("train", "info", "precompute"):
        assert "unknown data set 'mosl'" in invoke(command, "mosl", option, exit_code=1)
        assert "unknown data set 'tu.zip'; did you mean ./tu.zip?" in invoke(command, "tu.zip", option, exit_code=1)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--label", "it's", """tables has no table of graphs, which --label "it's" would be a column of"""),
        ("--label", 'it"s', """which --label 'it"s' would be"""),
        ("--label", "a, b,it's", """which --label "a,b,it's" would be"""),
        ("--label", '["a, b", "it\'s"]', """which --label '["a, b", "it\'"'"\'s"]' would be"""),
        ("--label", "[1]", "--label must be a name, or several, got [1]"),
        ("--label", "a,a", '--label must be different names, at least one, got ["a", "a"]'),
        (
            "--node-features",
            "it's",
            """tables has no table of nodes, which --node-features "it's" would be columns of""",
        ),
        ("--node-features", "{}", "--node-features must have 'column', a name, and maybe 'categories', got {}"),
        ("--node-features", "[1]", '--node-features must be names or of the form {"column": NAME, ...}, got [1]'),
        ("--node-features", '{"column": "a", "categories": []}', "--node-features must have as 'categories' different"),
    ],
)
def test_names_in_errors_are_as_they_are_typed(
    option: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "tables", None)
    for command in ("info", "train", "precompute"):
        error = invoke(command, "tables/", option, value, exit_code=1)
        assert said in error
        assert error.count("\n") == 1
    if "would be" in said:
        typed = shlex.split(re.search(f"which {option} (.*) would be", error)[1])
        assert invoke("info", "tables/", option, *typed, exit_code=1) == error  # what is said can be typed


def test_a_label_with_gaps_can_be_read_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("it's", 'it"s', "to xic", "t"):
        folder = folder_of_graphs(tmp_path / name, None)
        names = [f"mol {number}" for number in range(30)]
        pandas.DataFrame({"graph": names, name: [*"01" * 14, "", ""]}).to_csv(folder / "graphs.csv", index=False)
        error = invoke("info", folder, "--label", name, exit_code=1)
        typed = shlex.split(re.search("missing labels by (--label .*), or read no labels", error)[1])
        assert facts_of("info", folder, *typed)["tasks"]["names"] == [name]


def test_predict_takes_weights_as_training_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, labels in (("plain", ["a", "b"]), ("weighted", ["a", "b"])):
        folder_of_graphs(tmp_path / name, labels)
    edges = pandas.read_csv("weighted/edges.csv")
    edges.assign(weight=1 + np.arange(len(edges)) % 3).to_csv("weighted/edges.csv", index=False)
    tables = {}
    for known in ("plain", "weighted"):
        model = facts_of("train", f"{known}/", "--epochs", 1, "--hops", 1)["model"]
        for new in ("plain", "weighted"):
            if (known, new) == ("weighted", "plain"):
                error = invoke("predict", model, f"{new}/", exit_code=1)
                assert "plain/ has no edge weights, and the model was trained with them" in error
                continue
            invoke("predict", model, f"{new}/", "--out", "p.csv")
            tables[known, new] = Path("p.csv").read_text()
    assert tables["plain", "weighted"] == tables["plain", "plain"] != tables["weighted", "weighted"]


def edges_once(path: Path) -> Path:
    """The same folder with each edge in one direction."""
    edges = pandas.read_csv(path / "edges.csv")
    edges[edges["source"] < edges["target"]].to_csv(path / "edges.csv", index=False)
    return path


def test_edges_that_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--undirected`` all is as with both directions, and nothing is silently directed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    monkeypatch.setenv("COLUMNS", "200")
    labels = ["a, b", "c"]
    folder_of_graphs(tmp_path / "both", labels)
    folder_of_graphs(tmp_path / "new", None, num_graphs=5)
    edges_once(folder_of_graphs(tmp_path / "once", labels))
    edges_once(folder_of_graphs(tmp_path / "new_once", None, num_graphs=5))
    hint = "directed{} if each edge is listed once, for both directions, add --undirected"
    small = ["--epochs", 1, "--hops", 1, "--layers", 1]
    assert hint.format(":") in invoke("train", "once/", *small)
    assert hint.format(";") in invoke("info", "once/")
    assert "--undirected" not in invoke("info", "both/") + invoke("info", "once/", "--undirected")
    assert facts_of("info", "once/", "--undirected") == facts_of("info", "both/") | {"dataset": "once"}
    model = facts_of("train", "once/", "--undirected", *small)["model"]
    other = facts_of("train", "both/", *small)["model"]
    assert training.load_checkpoint(model)[1]["edge_options"] == {"undirected": True}

    def predicted(model: str, folder: str, *options: str) -> str:
        invoke("predict", model, folder, *options, "--out", "p.csv")
        return Path("p.csv").read_text()

    want = predicted(other, "new/")
    assert '"class_a, b"' in want
    assert predicted(model, "new_once/") == want
    assert predicted(model, "new/", "--no-undirected") == predicted(other, "new_once/", "--undirected") == want
    assert "--no-undirected takes them" in invoke("predict", model, "new/", exit_code=1)
    assert "add --undirected if each edge is listed once" in invoke("predict", other, "new_once/", exit_code=1)
    assert predicted(other, "new_once/", "--no-undirected") != want
    for command in ("train", "info", "precompute"):
        error = invoke(command, "both/", "--undirected", exit_code=1)
        assert "--undirected: both/ lists each edge in both directions already" in error
        for option in ("--undirected", "--coalesce=sum", "--no-self-loops", "--self-loops"):
            error = invoke(command, "digits", option, exit_code=1)
            assert f"{option.replace('=', ' ')} is impossible for digits" in error


def test_features_of_other_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of features does not say which edges were meant: its hops do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    edges_once(folder_of_graphs(tmp_path / "once", ["star", "ring"]))
    nodes = [(f"mol {graph}", node, (graph * node) % 3) for graph in range(30) for node in range(4 + graph // 2 % 4)]
    nodes += [(f"mol {graph}", 4 + graph // 2 % 4, 1) for graph in range(0, 30, 2)]  # stars have one more
    pandas.DataFrame(nodes, columns=["graph", "node", "mass"]).to_csv("once/nodes.csv", index=False)
    made = ["--operator", "sym,adj", "--hops", 2, "--out", "x.safetensors"]
    choices: list[list[str]] = [[], ["--undirected"], ["--undirected", "--self-loops"]]
    for options in choices:
        invoke("precompute", "once/", *options, *made)
        for others in choices:
            train = ["train", "once/", "--features", "x.safetensors", "--epochs", 1, "--layers", 1, *others]
            if others == options:
                invoke(*train)
            else:
                error = invoke(*train, exit_code=1)
                assert "x.safetensors is not of once: its graphs have other edges; give --undirected" in error


def test_edges_of_some_graphs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To compute hops of all of them would take as long as training without the file."""
    graphs, path = datasets.load("digits"), tmp_path / "x.safetensors"
    PowerFeatures.from_graphs(graphs, 1, "sym,adj").save(path)
    from_graphs, computed = PowerFeatures.from_graphs.__func__, []

    def counted(cls: type[PowerFeatures], graphs: GraphBatch, *arguments: Any, **options: Any) -> PowerFeatures:
        computed.append(len(graphs))
        return from_graphs(cls, graphs, *arguments, **options)

    monkeypatch.setattr(PowerFeatures, "from_graphs", classmethod(counted))
    options = ["--features", path, "--epochs", 1, "--layers", 1, "--batch-size", 400, "--out", tmp_path / "run"]
    invoke("train", "digits", *options)
    assert computed == [256]
    every = GraphBatch.from_edge_index(
        graphs.edge_index,
        graphs.x,
        torch.arange(len(graphs)).repeat_interleave(graphs.num_nodes_per_graph),
        y=graphs.y,
        self_loops=True,
    )
    PowerFeatures.from_graphs(every, 1, "sym,adj").save(path)
    assert "its graphs have other edges" in invoke("train", "digits", *options, exit_code=1)


def test_repeated_edges_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that ``--coalesce`` makes are none of the files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    for name in ("plain", "weighted"):
        folder_of_graphs(tmp_path / name, ["star", "ring"])
        edges = pandas.read_csv(f"{name}/edges.csv")
        edges = pandas.concat([edges, edges[:20]])
        edges = edges.assign(weight=1 + np.arange(len(edges)) % 3) if name == "weighted" else edges
        edges.to_csv(f"{name}/edges.csv", index=False)
    small = ["--epochs", 1, "--hops", 1, "--layers", 1, "--coalesce", "sum", "--no-self-loops"]
    metadata, tables = {}, {}
    for known in ("plain", "weighted"):
        model = facts_of("train", f"{known}/", *small)["model"]
        metadata[known] = training.load_checkpoint(model)[1]
        assert metadata[known]["edge_options"] == {"coalesce": "sum", "self_loops": False}
        if known == "weighted":
            assert "plain/ has no edge weights" in invoke("predict", model, "plain/", exit_code=1)
        for new in ("plain", "weighted")[known == "weighted" :]:
            invoke("predict", model, f"{new}/", "--out", "p.csv")
            tables[known, new] = Path("p.csv").read_text()
    assert (metadata["plain"]["weighted"], metadata["weighted"]["weighted"]) == (False, True)
    assert tables["plain", "plain"] == tables["plain", "weighted"] != tables["weighted", "weighted"]
    assert "trained with --coalesce sum --no-self-loops" in invoke("predict", model, "digits", exit_code=1)


def test_features_that_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    monkeypatch.setenv("COLUMNS", "200")
    Path("X").mkdir()
    for part, text in (
        ("A", "".join(f"{2 * g + 1}, {2 * g + 2}\n{2 * g + 2}, {2 * g + 1}\n" for g in range(20))),
        ("graph_indicator", "".join(f"{g + 1}\n" * 2 for g in range(20))),
        ("graph_labels", "1\n-1\n" * 10),
        ("node_labels", "0\n1\n1\n" * 13 + "0\n"),
        ("node_attributes", "0.5\n" * 40),
    ):
        Path("X", f"X_{part}.txt").write_text(text)
    for choice, unused, hint in (
        (None, ["attribute"], "node attributes, which --node-features attribute+label uses"),
        ("degree", ["label", "attribute"], None),
        ("attribute+label", [], None),
    ):
        options = ["X/", *([] if choice is None else ["--node-features", choice])]
        assert facts_of("info", *options)["features"]["unused"] == unused
        for command in (["info"], ["precompute"], ["train", "--epochs", 1, "--hops", 0]):
            stdout = invoke(*command, *options)
            assert ("uses" in stdout) == (hint is not None)
            assert hint is None or hint in stdout


def test_predict_with_a_checkpoint_made_in_python(tmp_path: Path) -> None:
    """It may say less than that of a command, or other things."""
    model, out = tmp_path / "model.safetensors", ["--out", tmp_path / "deep" / "p.csv"]
    folder = f"{folder_of_graphs(tmp_path / 'new', None, num_graphs=3)}/"
    training.save_checkpoint(model, SPIN(1, 8, 2, 1))
    assert facts_of("predict", model, folder, "--operator", "sym", *out)["predicted"].keys() == {"0", "1"}
    for classes in (["a", "b", "c"], ["a", "a"], 2):
        training.save_checkpoint(model, SPIN(1, 8, 2, 1), operator="sym", classes=classes)
        error = invoke("predict", model, folder, *out, exit_code=1)
        assert f"classes of {model} must be 2 different names, one per output, got {classes}" in error
    training.save_checkpoint(model, SPIN(3, 8, 2, 1), operator="sym")
    error = invoke("predict", model, folder, *out, exit_code=1)
    assert f"{folder} has 1 feature(s) per node, and {model} takes 3; node_features=... in save_checkpoint" in error
    training.save_checkpoint(model, SPIN(1, 8, 2, 1), operator="sym", node_features=["mass"])
    for dataset in (folder, "digits"):
        error = invoke("predict", model, dataset, *out, exit_code=1)
        assert f"{dataset} has no such node features as the model was trained on: mass" in error


def test_own_features_of_a_list(tmp_path: Path) -> None:
    """Predict reads a .nel file as train did."""
    graph = "n 1 1\nn 2 2\ne 1 2 1\nx {}\n"
    (tmp_path / "L.nel").write_text("".join(graph.format(g % 2) for g in range(20)))
    options = ["L", "--root", tmp_path]
    model = facts_of("train", *options, "--node-features", "degree", "--epochs", 1, "--out", tmp_path / "run")["model"]
    assert facts_of("predict", model, *options, "--out", tmp_path / "p.csv")["graphs"] == 20


def test_predict_tasks_of_graphs_without_labels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"operator": "sym", "classes": None, "node_features": "degree"}
    model = SPIN(1, 8, 2, 1)
    model.multilabel = True
    training.save_checkpoint(tmp_path / "model.safetensors", model, **options)
    folder = folder_of_graphs(tmp_path / "new", None, num_graphs=3)
    said = facts_of("predict", tmp_path / "model.safetensors", folder, "--out", tmp_path / "p.csv")
    assert said["predicted"] is None
    assert list(pandas.read_csv(tmp_path / "p.csv")) == ["graph", "name", "task_0", "task_1"]


def test_download_is_offered_and_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("train", "info", "precompute"):
        assert "Download it by --download" in invoke(command, "MUTAG", "--root", tmp_path, exit_code=1)
    asked = []
    monkeypatch.setattr(datasets, "read", lambda *_, download, **options: asked.append(download) or small_set(None))
    invoke("info", "MUTAG")
    invoke("info", "MUTAG", "--download")
    assert asked == [False, True]


def completions(words: str, shell: str = "bash") -> list[str]:
    environment = {"_SPIN_FAST_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "_TYPER_COMPLETE_ARGS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    result = CliRunner().invoke(app, [], env=environment, prog_name="spin-fast")
    assert result.exit_code == 0, result.output
    return result.stdout.split()


def test_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "MINE.nel").touch()
    (tmp_path / "MINE2.nel").touch()
    monkeypatch.setenv("SPIN_FAST_DATA", str(tmp_path / "nothing"))
    assert completions("spin-fast pre") == ["predict", "precompute"]
    assert completions("spin-fast train --read") == ["--readout"]
    assert completions("spin-fast train --readout s") == ["sum"]
    assert completions("spin-fast info dig") == ["digits"]
    assert completions(f"spin-fast info --root {tmp_path} MI") == ["MINE", "MINE2"]
    monkeypatch.setenv("SPIN_FAST_DATA", str(tmp_path))
    assert completions("spin-fast predict model MI") == ["MINE", "MINE2"]
    assert completions("spin-fast predict mod") == []  # files: the shell's own business
    assert completions("spin-fast train ./MI") == []
    assert "MINE2" in " ".join(completions("spin-fast train MI", "zsh"))
    script = CliRunner().invoke(app, ["--show-completion"], env={"SHELL": "/bin/bash"}, prog_name="spin-fast")
    assert "_SPIN_FAST_COMPLETE" in script.output or script.exit_code  # where no shell runs the tests, none is found


def test_who_reads_may_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spin_fast.cli", "info", "digits", "--hops", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert not re.search("Traceback|error|Broken", process.stderr.read())
        assert process.wait(120) == 1


@pytest.mark.parametrize("options", [["--operator", "sym,adj"], ["--operator", "sym", "--operator", "adj"]])
def test_operators_side_by_side(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "  2: " in invoke("precompute", "digits", "--hops", 1, *options)
    made = PowerFeatures.load("digits.safetensors")
    assert (made.operator, made.num_hops, made.num_branches) == ("sym,adj", 1, 3)
    assert "has sym,adj" in invoke("train", "--features", "digits.safetensors", "--operator", "adj", exit_code=1)
    train = ["train", "--features", "digits.safetensors", "--hops", 1, "--epochs", 1, "--out", "run"]
    assert "  2: " in invoke(*train, *options)
    model, metadata = training.load_checkpoint("run/model.safetensors")
    assert (model.num_branches, metadata["operator"]) == (3, "sym,adj")
    invoke("predict", "run/model.safetensors", "digits", "--out", "x.csv")
    written = torch.tensor(pandas.read_csv("x.csv").iloc[:, 2:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, training.predict(model, made).softmax(1), rtol=1e-5, atol=1e-6)
    assert "operator must be one of" in invoke("train", "--operator", "sym,gcn", exit_code=2)
    assert "each once" in invoke("train", "--operator", "sym", *options, exit_code=1)
