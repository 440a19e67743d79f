"""``spin-fast train`` under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from helpers.cli import invoke

from spin_fast import training

SMALL = ("--epochs", 3, "--hops", 1, "--hidden", 8, "--layers", 1, "--batch-size", 128, "--schedule", "constant")


def torchrun(*arguments: object, cwd: Path, restarts: int = 0) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--max-restarts", str(restarts), "-m", "spin_fast.cli"]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("SPIN_FAST_DATA", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launch, *map(str, arguments)], cwd=cwd, env=environment, **pipes)


def told(stderr: str) -> list[str]:
    """The lines that are not torchrun's own."""
    return [line for line in stderr.splitlines() if "spin-fast: " in line]


def log_of(folder: Path) -> pandas.DataFrame:
    return pandas.read_csv(folder / "log.csv").drop(columns="seconds")


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    process = torchrun("train", *SMALL, "--json", "--out", "two", cwd=tmp_path)
    invoke("train", *SMALL, "--out", tmp_path / "one")
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    assert stderr.count("1,797 graphs") == 1
    facts = json.loads(stdout)
    assert facts == json.loads((tmp_path / "two" / "result.json").read_bytes())
    assert facts["ranks"] == 2
    pandas.testing.assert_frame_equal(log_of(tmp_path / "two"), log_of(tmp_path / "one"), rtol=1e-4)
    names = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert training.load_checkpoint(tmp_path / "two" / "model.safetensors")[1]["ranks"] == 2
    more = [5 if option == 3 else option for option in SMALL]
    invoke("train", *more, "--resume", "--out", tmp_path / "two")
    assert log_of(tmp_path / "two")["epoch"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_ranks_read_shards(tmp_path: Path) -> None:
    """The first rank alone reads the graphs, to check that the features are of them."""
    features = ("--features", tmp_path / "f.safetensors")
    invoke("precompute", "digits", "--hops", 1, "--shard-size", "500KB", "--out", features[1])
    assert len([*tmp_path.glob("f~*")]) > 2
    process = torchrun("train", *SMALL, *features, "--json", "--out", "two", cwd=tmp_path)
    invoke("train", *SMALL, *features, "--out", tmp_path / "one")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    assert stderr.count("1,797 graphs") == 1
    pandas.testing.assert_frame_equal(log_of(tmp_path / "two"), log_of(tmp_path / "one"), rtol=1e-4)
    process = torchrun("train", "CSL", *SMALL, *features, "--out", "three", cwd=tmp_path)
    _, stderr = process.communicate(timeout=100)
    assert (process.returncode, stderr.count("f.safetensors is not of CSL")) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "nosuch"], "spin-fast: error: unknown data set 'nosuch'"),
        (["train", "--search"], "spin-fast: error: --search has processes of its own: run it without torchrun"),
        (["info", "digits"], "spin-fast: error: info works in one process: run it without torchrun"),
        (["train", "--epochs", "x"], "Invalid value for '--epochs'"),
    ],
)
def test_an_error_is_told_once(arguments: list, expected: str, tmp_path: Path) -> None:
    process = torchrun(*arguments, cwd=tmp_path)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert stderr.count(expected) == 1
    assert len(told(stderr)) <= 1
    assert not [*tmp_path.rglob("*.safetensors")]


def started(log: Path, *options: object, restarts: int = 0) -> subprocess.Popen[str]:
    """A run that has had two epochs."""
    process = torchrun("train", *options, "--out", log.parent, cwd=log.parents[1], restarts=restarts)
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < 3):
        time.sleep(0.01)
    return process


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, children))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption(number: int, tmp_path: Path) -> None:
    process = started(tmp_path / "run" / "log.csv", *SMALL[2:], "--epochs", 2000)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode != 0
    assert told(stderr) == []
    assert "the same command with --resume goes on from there" in stdout
    epochs = len(log_of(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "result.json").read_bytes())["epochs"] in (epochs, epochs - 1)
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_all(rank: int, tmp_path: Path) -> None:
    process = started(tmp_path / "run" / "log.csv", *SMALL[2:], "--epochs", 2000)
    start = time.monotonic()
    os.kill(workers_of(process)[rank], signal.SIGKILL)
    _, stderr = process.communicate(timeout=100)
    assert time.monotonic() - start < 30
    assert process.returncode == 1
    assert len(told(stderr)) <= 1
    assert "spin_fast/" not in stderr  # of a traceback
    before = len(log_of(tmp_path / "run"))
    invoke("train", *SMALL[2:], "--epochs", before + 2, "--resume", "--out", tmp_path / "run")
    assert log_of(tmp_path / "run")["epoch"].tolist() == [*range(1, before + 3)]


@pytest.mark.long
def test_torchrun_restarts_a_run_where_it_was(tmp_path: Path) -> None:
    options = *SMALL[2:], "--epochs", 200, "--patience", 200, "--resume"
    process = started(tmp_path / "run" / "log.csv", *options, restarts=1)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert stdout.count("nothing to go on from") == 1
    log = log_of(tmp_path / "run")
    assert log["epoch"].tolist() == [*range(1, 201)]
    invoke("train", *options[:-1], "--out", tmp_path / "whole")
    pandas.testing.assert_frame_equal(log[:20], log_of(tmp_path / "whole")[:20], rtol=1e-3)
