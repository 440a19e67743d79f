"""What all commands share: usage, help, errors of one line, ``--json``, completion; ``bench``."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pandas
import pytest
from helpers.cli import QUICK, facts_of, invoke, one_line_error, small_set, spin_fast
from joblib.externals.loky import process_executor
from typer.testing import CliRunner

from spin_fast import datasets, training
from spin_fast.cli import app
from spin_fast.cli._errors import one_line_warnings
from spin_fast.datasets import registry


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
    assert "error: --one-hot must name columns of whole numbers; column 0 has others" in error("digits", "--one-hot")


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


def test_bench_hands_its_options_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of those that a checkout gives its tests, which run side by side."""
    given: list[str] = []
    monkeypatch.setattr(pytest, "main", lambda arguments: given.extend(arguments) or 3)
    options = ["--quick", "--root", "data", "--datasets", "digits,NCI1", "--results", "there"]
    invoke("bench", *options, "--", "-k", "readout", exit_code=3)
    pairs = dict(itertools.pairwise(given))
    assert (pairs["--pyargs"], pairs["-o"], pairs["-k"]) == ("spin_fast.benchmarks", "addopts=", "readout")
    assert {"--quick", "--root=data", "--datasets=digits,NCI1", "--results=there"} <= set(given)


@pytest.mark.slow
def test_bench_runs(tmp_path: Path) -> None:
    result = spin_fast("bench", "--quick", "--results", tmp_path / "results", "--", "-k", "readout", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "results" / "results.json").is_file()


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


def test_download_is_offered_and_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("train", "info", "precompute"):
        assert "Download it by --download" in invoke(command, "MUTAG", "--root", tmp_path, exit_code=1)
    asked = []
    monkeypatch.setattr(registry.Missing, "downloaded", lambda source: asked.append(source.name) or source)
    monkeypatch.setattr(registry.Missing, "read", lambda *_, **options: small_set(None))
    invoke("info", "MUTAG")
    assert asked == []
    invoke("info", "MUTAG", "--download")
    assert asked == ["MUTAG"]


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


@pytest.mark.slow
def test_who_reads_may_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spin_fast.cli", "info", "digits", "--hops", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert not re.search("Traceback|error|Broken", process.stderr.read())
        assert process.wait(120) == 1


COMMAND = f"{sys.executable} -m spin_fast.cli"


@pytest.mark.parametrize(
    ("line", "exit_code", "lines"),
    [
        pytest.param("info >&-", 0, 0, marks=pytest.mark.slow),
        pytest.param("info nosuch >&- 2>&- <&-", 1, 0, marks=pytest.mark.slow),
        ("train --help | head -1", 0, 1),
    ],
)
def test_streams_that_are_closed(line: str, exit_code: int, lines: int, tmp_path: Path) -> None:
    run = subprocess.run(f"{COMMAND} {line}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr, run.stdout.count("\n")) == (exit_code, "", lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "line", [*(pytest.param(line, marks=pytest.mark.slow) for line in ("--help", "train --help")), "info digits"]
)
def test_a_full_disk_is_told_in_one_line(line: str, tmp_path: Path) -> None:
    command = f"{COMMAND} {line} > /dev/full"
    run = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "spin-fast: error: [Errno 28] No space left on device\n")


@pytest.mark.slow
def test_a_terminal_of_ascii(tmp_path: Path) -> None:
    options = ["--hops", 0, "--out", "naïve.safetensors"]
    result = spin_fast("precompute", "digits", *options, cwd=tmp_path, LANG="C", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert "na?ve.safetensors" in result.stdout
    assert (tmp_path / "naïve.safetensors").is_file()


def test_numbers_without_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["train", "digits", "--seed", 2**32], "--seed must be below 2**32, got 4294967296"),
        (["train", "digits", "--seed", 10**20], "--seed must be below 2**32, got 1"),
        (["train", "digits", "--hops", 10**20], "num_hops must be below 2**63, got 1"),
        (["evaluate", "digits", "--seed", 10**20], "--seed must be below 2**32, got 1"),
        (["evaluate", "digits", "--folds", 10**20], "num_folds must be below 2**63, got 1"),
        (["train", "digits", *QUICK, "--threads", 10**20, "--out", "run"], None),
        (["precompute", "digits", "--hops", 0, "--shard-size", "9" * 9 + "GB"], None),
    ):
        said = invoke(*arguments, exit_code=0 if message is None else 1)
        assert message is None or message in said
    assert "must be a size such as 500MB" in invoke("precompute", "digits", "--shard-size", f"{10**400}GB", exit_code=2)


@pytest.mark.parametrize("command", ["train", "evaluate", "precompute", "predict x", "explain x"])
def test_out_must_name_a_place(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "must name a place; the folder at hand is ." in invoke(*command.split(), "digits", "--out", "", exit_code=2)
    assert list(tmp_path.iterdir()) == []


def test_warnings_are_one_line_and_leave_out_workers_that_joblib_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    replaced = "A worker stopped while some jobs were given to the executor."
    source = inspect.getsource(process_executor)
    assert replaced.rsplit(" ", 1)[0] in source
    with one_line_warnings():
        warnings.warn(replaced, UserWarning, stacklevel=1)
        warnings.warn("first\nsecond", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "spin-fast: warning: first second\n"
