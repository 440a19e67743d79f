"""``spin-fast train``: interruptions, ``--resume``, and the files of earlier runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pandas
import pytest
import torch
from helpers.cli import QUICK, facts_of, invoke
from safetensors.torch import save_file
from typer.testing import CliRunner

from spin_fast import training
from spin_fast.cli import app
from spin_fast.datasets import registry
from spin_fast.selection import Evaluation
from spin_fast.training.resume import STATE_FORMAT


@pytest.mark.slow
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


def test_what_keeps_a_run_from_going_on_is_named_by_its_option(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def error(*options: object, dataset: str = "digits") -> str:
        stderr = invoke("train", dataset, *QUICK, *options, "--resume", "--out", out, exit_code=1)
        assert stderr.count("\n") == 1
        assert stderr.endswith("; training without --resume starts anew\n")
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
        said = error(*here.split())
        assert f"error: {out / 'state.safetensors'} is of another run: " in said
        assert f"{there} there, {here} here" in said
    several = error("--seed", 1, "--hidden", 8)
    assert "--seed 0 there, --seed 1 here" in several
    assert "--hidden 4 there, --hidden 8 here" in several
    assert "features.num_features=3 there, features.num_features=4 here" in error("--degree", "log")
    assert "error: --epochs must be at least 2, as many as" in error("--epochs", 1)
    assert "error: --epochs and --schedule must give the learning rates of" in error("--epochs", 3)
    assert "features.graphs=1797 there, features.graphs=150 here" in error(dataset="CSL")
    state = out / "state.safetensors"
    save_file({"x": torch.ones(1)}, state, {"format": STATE_FORMAT, "record": "{}"})
    assert f"{state} is damaged: it must have the settings of a run" in error()
    state.write_bytes(b"something else")
    assert f"{state} is not a readable safetensors file" in error()
    said = f"{state} cannot be written: there is a file of another kind; remove it"
    assert said in invoke("train", *QUICK, "--out", out, exit_code=1)


def test_another_fold_does_not_go_on(tmp_path: Path, data_root: Path) -> None:
    options = *QUICK, "--root", data_root, "--class-weight", "balanced", "--resume", "--out", tmp_path, "--fold"
    invoke("train", "IMDB-BINARY", *options, 0)
    error = invoke("train", "IMDB-BINARY", *options, 1, exit_code=1)
    assert re.search(r"train='810 graphs \(.*\)' there, train='810 graphs \(.*\)' here", error)


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
    (out / "result.json").write_text('{"dataset": "digits", "metric": "accuracy", "test": null}')
    assert "runs/digits has a result: this run replaces it" in invoke("train", *QUICK)


@pytest.mark.parametrize(
    "name", ["log.csv", "model.safetensors", "result.json", "training-curve.png", "state.safetensors"]
)
def test_train_finds_what_it_cannot_write_before_it_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        registry.Known, "read", lambda *_, **options: pytest.fail("read before the place was found bad")
    )
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


OFTEN = """
import sys
from spin_fast.training.resume import StateFile
StateFile.SECONDS = 0.2
from spin_fast.cli import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("train --epochs 1000 --patience 1000 --hops 1 --hidden 8 --layers 1 --batch-size 400", "log.csv"),
        ("evaluate digits --space space.json --folds 10 --runs 2 --jobs 1", "evaluation.json"),
    ],
)
def test_runs_that_are_killed_go_on(command: str, file: str, tmp_path: Path) -> None:
    """Twenty times, at random moments; to the numbers of a run that was left alone."""
    space = {"num_hops": [0, 1], "hidden_features": [4], "num_layers": [1], "epochs": [9], "batch_size": [400]}
    (tmp_path / "space.json").write_text(json.dumps(space))

    def run(out: str, seconds: float | None = None) -> int:
        words = [sys.executable, "-c", OFTEN, *command.split(), "--out", out, "--resume"]
        process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        process.kill()
        return process.wait()

    def numbers(out: str) -> object:
        if file == "log.csv":
            return pandas.read_csv(tmp_path / out / file).drop(columns="seconds").to_dict()
        return Evaluation.load(tmp_path / out / file).scores()

    assert run("whole") == 0
    moments, kills = Random(0), 0
    while kills < 20:
        if run("killed", moments.uniform(1, 8)) == 0:
            assert numbers("killed") == numbers("whole")
            shutil.rmtree(tmp_path / "killed")
        else:
            kills += 1
    assert run("killed") == 0
    assert numbers("killed") == numbers("whole")
    assert not [*(tmp_path / "killed").glob("*.part")]
