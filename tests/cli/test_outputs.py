"""No command overwrites its input, a file of another kind, or what is no regular file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import QUICK, folder_of_graphs, invoke

from spin_fast import SPIN, training

NEL = "n 1 1\nn 2 2\ne 1 2 1\nx {}\n"


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of graphs, tables of graphs, a model, and files of others."""
    monkeypatch.chdir(tmp_path)
    Path("L.nel").write_text("".join(NEL.format(number % 2) for number in range(40)))
    folder_of_graphs(tmp_path / "tables", ["a", "b"])
    training.save_checkpoint("model.safetensors", SPIN(1, 8, 2, 1), operator="sym", node_features="degree")
    Path("foreign").write_text("graph,label\n1,2\n")
    Path("foreign.csv").write_text("graph,label\n1,2\n")
    os.mkfifo("pipe")
    Path("link").symlink_to("L.nel")
    Path("rows").mkdir()
    Path("rows/1.parquet").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("L.nel", "--out L.nel is read by this command"),
        ("tables/../L.nel", "is read by this command"),
        ("link", "is read by this command"),
        ("model.safetensors", "model.safetensors cannot be written: there is a file of another kind"),
        ("tables/edges.csv", "there is a file of another kind"),
        ("foreign", "there is a file of another kind"),
        ("pipe", "it is no regular file"),
        ("/dev/null", "/dev/null cannot be written: it is no regular file"),
    ],
)
def test_precompute(place: Path, out: str, reason: str) -> None:
    before = content_of(place)
    assert reason in invoke("precompute", "./L.nel", "--out", out, exit_code=1)
    assert content_of(place) == before


def test_precompute_replaces_features_alone(place: Path) -> None:
    command = ["precompute", "./L.nel", "--hops", 1, "--out", "x.safetensors"]
    Path("x.safetensors").touch()  # as mktemp leaves it
    for _ in range(2):
        invoke(*command)
    index = Path("x.safetensors.index.json")
    index.write_text('{"weight_map": {}}')
    assert "x.safetensors.index.json cannot be written: there is a file" in invoke(*command, exit_code=1)
    index.unlink()
    for _ in range(2):
        invoke(*command, "--shard-size", 4000)
    assert len(list(place.glob("x~*-of-00002.safetensors"))) == 2


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("tables/edges.csv", "--out tables/edges.csv would be read as a table of tables"),
        ("tables/nodes.parquet", "would be read as a table of tables"),
        ("rows/p.parquet", "--out rows/p.parquet would be read as graphs of rows; choose another folder"),
        ("foreign.csv", "foreign.csv cannot be written: there is a file of another kind"),
        ("pipe.csv", "it is no regular file"),
    ],
)
def test_predict(place: Path, out: str, reason: str) -> None:
    Path("pipe").rename("pipe.csv")
    before = content_of(place)
    dataset = "rows/" if out.startswith("rows/") else "tables/"
    assert reason in invoke("predict", "model.safetensors", dataset, "--out", out, exit_code=1)
    assert content_of(place) == before


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("dataset", ["L", "tables/"])
def test_predict_replaces_predictions(place: Path, suffix: str, dataset: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    for _ in range(2):
        invoke("predict", "model.safetensors", dataset, "--root", ".", "--out", f"p.{suffix}")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "state.safetensors", "log.csv", "result.json", "training-curve.png"]
)
def test_train(place: Path, name: str) -> None:
    run = place / "run"
    run.mkdir()
    for content in (b"mine", b'{"a": 1}', b"\x89PNG\r\n\x1a\nmine"):
        (run / name).write_bytes(content)
        error = invoke("train", "digits", *QUICK, "--out", run, exit_code=1)
        assert f"{run / name} cannot be written: there is a file of another kind; remove it" in error
        assert content_of(run) == {run / name: content}


def test_train_replaces_its_own_files(place: Path) -> None:
    for _ in range(2):
        invoke("train", "digits", *QUICK, "--out", "run")
    assert len(content_of(place / "run")) == 5


def test_one_run_at_a_time_writes_to_a_folder(place: Path) -> None:
    """Another one is refused before it works; who only reads is not."""
    run, quick = place / "run", ("--settings", 2, "--jobs", 1)
    holder = ["import sys; from pathlib import Path; from spin_fast._common import files"]
    holder += ["lock = files.locked(Path('run')); lock.__enter__(); print(flush=True); sys.stdin.read()"]
    line = [sys.executable, "-c", "; ".join(holder)]
    with subprocess.Popen(line, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for command in (("train", *QUICK), ("train", "--search", *quick), ("evaluate", "L", *quick)):
            said = invoke(*command, "--root", ".", "--out", "run", exit_code=1)
            assert f"run is being written by process {process.pid} on " in said
        Path("model.safetensors").rename(run / "model.safetensors")
        invoke("predict", run / "model.safetensors", "L.nel", "--out", "run/p.csv")
        process.kill()
    (run / "model.safetensors").unlink()
    invoke("train", *QUICK, "--out", "run")
    assert not [*run.glob(".lock*")]
