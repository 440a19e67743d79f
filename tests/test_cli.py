"""The command, run as its users run it."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch
from typer.testing import CliRunner

from spin_fast import SPIN, NodeFeatures, PowerFeatures, datasets, native_available, training
from spin_fast.cli import app, precompute


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
    error = invoke(*command, "--resume", "--seed", 1, "--out", tmp_path / "whole", exit_code=1)
    assert "seed must be 0 to go on from" in error


def test_termination_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, accuracy = [], training.accuracy

    def terminated(logits: torch.Tensor, y: torch.Tensor) -> float:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return accuracy(logits, y)

    monkeypatch.setattr(training, "accuracy", terminated)
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
    assert names == ["events", "log", "model", "state", "training-curve"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "TensorBoard logs need: pip install tensorboard" in invoke("train", *options, exit_code=1)


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


def invoke(*arguments: object, exit_code: int = 0) -> str:
    """The command in this process, for what needs no new one; its output, or its error of one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == exit_code, result.output
    return result.stderr if exit_code else result.stdout


def test_precompute_and_train_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Example: spin-fast precompute" in invoke("precompute", "--help")
    stdout = invoke("precompute", "digits", "--hops", 1)
    assert "1797/1797" in stdout
    assert "0: 71.1x  1: 1.04x" in stdout
    made = PowerFeatures.load("digits.safetensors")
    assert (len(made), made.num_hops, made.operator, made.row_of_node) == (1797, 1, "sym", None)
    lines = []
    for options in (["--features", "digits.safetensors"], ["--hops", 1, "--no-standardize"]):
        stdout = invoke("train", "--epochs", 2, *options)
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


def test_features_of_something_else(tmp_path: Path) -> None:
    graphs, path, out = datasets.load("digits"), tmp_path / "x.safetensors", ["--out", tmp_path / "run"]

    def error(*options: object) -> str:
        return invoke("train", "--features", path, *options, *out, exit_code=1)

    assert "x.safetensors does not exist" in error()
    PowerFeatures.from_graphs(graphs[:-1], 1).save(path)
    assert "x.safetensors is not of digits: it has 1796 graphs with 3 feature(s), digits 1797 graphs" in error()
    PowerFeatures.from_graphs(graphs[list(range(1796, -1, -1))], 1).save(path)
    assert "is not of digits: its graphs have other sizes or labels" in error()
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
    monkeypatch.setattr(datasets, "load", lambda *_, **__: pytest.fail("read before the place was known to be bad"))
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
    monkeypatch.setattr(training, "CHUNK_BYTES", 1 << 18)
    out = tmp_path / "deep" / f"probabilities.{suffix}"
    assert "1,797 graphs" in invoke("predict", checkpoint, "digits", "--out", out)
    table = pandas.read_csv(out) if suffix == "csv" else pandas.read_parquet(out)
    assert list(table) == ["graph", "prediction", *(f"class_{i}" for i in range(10))]
    assert table["graph"].tolist() == list(range(1797))
    expected = training.predict_proba(training.load_checkpoint(checkpoint)[0], datasets.load("digits"), "sym+adj")
    written = torch.tensor(table.iloc[:, 2:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, expected, rtol=1e-6, atol=1e-7)
    assert table["prediction"].tolist() == expected.argmax(1).tolist()
    assert list(out.parent.iterdir()) == [out]


def test_predict_several_tasks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = datasets.load("digits")[:7]
    monkeypatch.setattr(datasets, "load", lambda *_, **__: replace(graphs, y=torch.zeros(7, 10)))
    invoke("predict", checkpoint, "digits", "--out", tmp_path / "x.csv")
    table = pandas.read_csv(tmp_path / "x.csv")
    assert list(table) == ["graph", *(f"task_{i}" for i in range(10))]
    (scores,) = training.predict_chunks(training.load_checkpoint(checkpoint)[0], graphs, "sym+adj")
    written = torch.tensor(table.iloc[:, 1:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, scores.sigmoid(), rtol=1e-6, atol=1e-7)


def test_predict_makes_the_node_features_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = invoke("train", "--epochs", 1, "--hops", 1, "--degree", "one-hot", "--out", "run")
    graphs = datasets.load("digits")
    assert graphs.y is not None
    node_features = NodeFeatures("one-hot").fit(graphs, datasets.split("digits", graphs.y).train)
    graphs = node_features.transform(graphs)
    assert f"node features: {graphs.num_features}, 3 standardised on the training graphs" in stdout
    model, metadata = training.load_checkpoint("run/model.safetensors")
    assert NodeFeatures.from_dict(metadata["preprocessing"]).to_dict() == node_features.to_dict()
    invoke("predict", "run/model.safetensors", "digits", "--out", "x.csv")
    written = torch.tensor(pandas.read_csv("x.csv").iloc[:, 2:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, training.predict_proba(model, graphs), rtol=1e-6, atol=1e-7)


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
    assert "graphs must have 3 features as the model, got 50" in error(checkpoint, "erdos-renyi", "x.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "Parquet needs: pip install pyarrow" in error(checkpoint, "digits", "x.parquet")
    training.save_checkpoint(checkpoint, SPIN(3, 8, 10, 1))
    assert "--operator must be given" in error(checkpoint, "digits", "x.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


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
