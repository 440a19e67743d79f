"""One job of many: ``--shard``, ``--shards``, ``--resume`` and ``--join``, and processes that are killed."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers import random_graphs
from helpers.cli import facts_of, invoke

from spin_fast import SPIN, GraphBatch, datasets, training
from spin_fast.cli import _trained, predict

pytest.importorskip("pyarrow")

SIZES = [3, 5, 0, 7, 2, 4, 6, 1, 8, 3, 5]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and 55 graphs in ``set/``, in two files."""
    monkeypatch.chdir(tmp_path)
    Path("set").mkdir()
    for name in "12":
        graphs = random_graphs(SIZES * (2 if name == "1" else 3), dtype=torch.float32, seed=int(name))
        datasets.write_parquet(graphs, f"set/{name}.parquet")
    new_model(Path("model.safetensors"), 0)
    return tmp_path


def new_model(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    training.save_checkpoint(path, SPIN(3, 8, 3, 2), operator="sym")
    return path


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def read(path: Path) -> pandas.DataFrame:
    return pandas.read_csv(path, keep_default_na=False) if path.suffix == ".csv" else pandas.read_parquet(path)


PREDICT = ("predict", "model.safetensors", "set/", "--out")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("number", [1, 4, 60])
def test_predictions_in_shards_are_those_of_one_run(
    number: int, suffix: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke(*PREDICT, f"whole.{suffix}")
    whole = read(place / f"whole.{suffix}")
    monkeypatch.setattr(_trained, "CHUNK_GRAPHS", 7)
    monkeypatch.setattr(predict, "ROWS", 11)
    said = facts_of(*PREDICT, f"all/p.{suffix}", "--shards", number)
    files = [f"p-{one:05}-of-{number:05}.{suffix}" for one in range(1, number + 1)]
    assert names(place / "all") == files == [Path(file).name for file in said["files"]]
    assert (said["graphs"], said["kept"]) == (55, [])
    tables = [read(place / "all" / file) for file in files]
    assert [len(table) for table in tables] == [55 * i // number - 55 * (i - 1) // number for i in range(1, number + 1)]
    assert all(list(table) == list(whole) for table in tables)
    table = pandas.concat(tables, ignore_index=True).astype(whole.dtypes)
    pandas.testing.assert_frame_equal(table, whole, rtol=1e-6)
    one = facts_of(*PREDICT, f"one/p.{suffix}", "--shard", f"{number}/{number}")
    assert names(place / "one") == files[-1:]
    assert (place / "one" / files[-1]).read_bytes() == (place / "all" / files[-1]).read_bytes()
    assert one["graphs"] == len(tables[-1])


def test_resuming_keeps_what_is_complete(place: Path) -> None:
    command = (*PREDICT, "p.parquet", "--shards", 5, "--resume")
    files = [place / f"p-{number:05}-of-00005.parquet" for number in range(1, 6)]
    assert facts_of(*command)["kept"] == []
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    files[1].unlink()
    files[3].write_bytes(b"")  # as mktemp leaves it
    leftover = place / f"{files[0].name}.0123abcd.part"
    leftover.mkdir()
    said = facts_of(*command)
    assert [Path(file).name for file in said["kept"]] == [files[number].name for number in (0, 2, 4)]
    assert said["graphs"] == 22
    assert all(file.read_bytes() == before[file][0] for file in files)
    assert files[0].stat().st_mtime_ns == before[files[0]][1]
    assert not leftover.exists()
    assert "55 graphs, 55 of them in 5 file(s) that were there" in invoke(*command)
    assert facts_of(*PREDICT, "p.parquet", "--shard", "2/5", "--resume")["graphs"] == 0
    for _ in range(2):
        assert "p.parquet: 55 graphs" in invoke(*PREDICT, "p.parquet", "--resume")


def test_resuming_with_something_else(place: Path) -> None:
    command = (*PREDICT, "p.parquet", "--shards", 2)
    resume = (*command, "--resume")
    invoke(*command)
    content = {file: file.read_bytes() for file in place.glob("p-*")}
    (place / "model.safetensors").rename(place / "known")
    new_model(place / "model.safetensors", 1)
    assert "--resume: p-00001-of-00002.parquet has model " in invoke(*resume, exit_code=1)
    (place / "known").rename(place / "model.safetensors")
    assert "has edge_options {}, and this run {'undirected': True}" in invoke(*resume, "--undirected", exit_code=1)
    (place / "set" / "2.parquet").rename(place / "2.parquet")
    assert "has num_graphs 55, and this run 22; choose another --out, or leave" in invoke(*resume, exit_code=1)
    (place / "2.parquet").rename(place / "set" / "2.parquet")
    (place / "set").rename(place / "other")
    assert "has dataset set, and this run other" in invoke(*resume[:2], "other/", *resume[3:], exit_code=1)
    (place / "other").rename(place / "set")
    told = "p-00001-of-00002.parquet is one of 2 shards, and there are to be 3; remove such files"
    assert told in invoke(*PREDICT, "p.parquet", "--shard", "1/3", exit_code=1)
    assert {file: file.read_bytes() for file in place.glob("p-*")} == content
    old = place / "p-00001-of-00002.parquet"
    read(old).to_parquet(old)
    assert "has model None, and this run" in invoke(*resume, exit_code=1)
    read(old)[["graph"]].to_parquet(old)
    assert "there is a file of another kind" in invoke(*resume, exit_code=1)


@pytest.mark.parametrize("text", ["3", "0/2", "3/2", "1/0", "-1/2", "1.5/2", "a/b", "1/2/3"])
def test_shards_that_there_are_not(text: str, place: Path) -> None:
    said = " ".join(invoke(*PREDICT, "p.csv", f"--shard={text}", exit_code=2).replace("│", "").split())
    assert "must be such as 3/16, the third of 16 shards" in said


def test_options_that_exclude_each_other(place: Path) -> None:
    assert "--resume needs --out with a name *.parquet" in invoke(*PREDICT, "p.csv", "--resume", exit_code=1)
    both = ("--shard", "1/2", "--shards", 2)
    assert "give one of both" in invoke(*PREDICT, "p.csv", *both, exit_code=1)


def test_no_more_than_a_chunk_is_in_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref] = []
    from_parts = GraphBatch._from_parts.__func__

    def watched(cls: type[GraphBatch], *arguments: Any) -> GraphBatch:
        assert all(x() is None for x in made)
        graphs = from_parts(cls, *arguments)
        made.append(weakref.ref(graphs.x))
        return graphs

    monkeypatch.setattr(_trained, "CHUNK_GRAPHS", 4)
    monkeypatch.setattr(GraphBatch, "_from_parts", classmethod(watched))
    invoke(*PREDICT, "p.parquet", "--shards", 3)
    assert len(made) == 15


KILLED = """
import os, random, shutil, signal, sys, time
import networkx, pandas, pyarrow.parquet, rich.progress, scipy.sparse, torch  # so that work is what is killed
from spin_fast.cli import app

torch.set_num_threads(1)
random.seed(0)


def run(arguments, seconds=None):
    began = time.monotonic()
    if (process := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            app(arguments)
        except SystemExit as end:
            os._exit(end.code or 0)  # at once
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status, time.monotonic() - began


whole, sharded = (arguments.split() for arguments in sys.argv[1:3])
run(whole)
_, seconds = run(sharded)
done = 8
killed = []
while len(killed) < 20:
    if done == 8:
        shutil.rmtree("out")
    status, _ = run(sharded, random.uniform(0, seconds))
    done = len([name for name in os.listdir("out") if not name.endswith(".part")]) if os.path.isdir("out") else 0
    if status:
        killed.append(done)
assert any(0 < done < 8 for done in killed), killed
assert run(sharded)[0] == 0
"""


def killed_at_random_moments(whole: str, sharded: str) -> None:
    line = [sys.executable, "-c", KILLED, whole, sharded]
    run = subprocess.run(line, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.long
def test_predictions_that_are_killed_go_on(place: Path) -> None:
    graphs = random_graphs(SIZES * 2000, dtype=torch.float32)
    datasets.write_parquet(graphs, place / "set" / "3.parquet")
    command = "predict model.safetensors set/"
    killed_at_random_moments(f"{command} --out whole.parquet", f"{command} --out out/p.parquet --shards 8 --resume")
    files = [f"p-{number:05}-of-00008.parquet" for number in range(1, 9)]
    assert names(place / "out") == files
    table = pandas.concat([read(place / "out" / file) for file in files], ignore_index=True)
    whole = read(place / "whole.parquet")
    assert len(whole) == 22055
    pandas.testing.assert_frame_equal(table, whole, rtol=1e-6)
