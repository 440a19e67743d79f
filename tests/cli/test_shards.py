"""One job of many: ``--shard``, ``--shards``, ``--resume`` and ``--join``, and processes that are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import networkx
import pandas
import pytest
import torch
from helpers import WatchedGraphs, assert_same_features, random_graphs
from helpers.cli import facts_of, invoke
from helpers.raw_files import sources

from spin_fast import SPIN, PowerFeatures, datasets, training
from spin_fast.cli import _trained, precompute, predict
from spin_fast.datasets import registry
from spin_fast.features import power_features

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
    monkeypatch.setattr(_trained, "CHUNK_GRAPHS", 4)
    watched = WatchedGraphs(monkeypatch)
    invoke(*PREDICT, "p.parquet", "--shards", 3)
    assert (watched.made, watched.most) == (15, 0)


PRECOMPUTE = ("precompute", "set/", "--hops", 2, "--out")


@pytest.mark.parametrize("options", [(), ("--no-node-rows",), ("--no-deduplicate", "--operator", "adj,rw")])
@pytest.mark.parametrize("number", [1, 4, pytest.param(60, marks=pytest.mark.slow)])
def test_features_in_shards_are_those_of_one_run(
    number: int, options: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "CHUNK_GRAPHS", 7)
    whole_facts = facts_of(*PRECOMPUTE, "whole.safetensors", *options)
    whole = PowerFeatures.load("whole.safetensors")
    deduplicate = "--no-deduplicate" not in options
    operator, node_rows = whole.operator, "--no-node-rows" not in options
    graphs = datasets.load(place / "set")
    assert_same_features(whole, PowerFeatures.from_graphs(graphs, 2, operator, deduplicate, node_rows=node_rows))
    files = [f"f-{one:05}-of-{number:05}.safetensors" for one in range(1, number + 1)]
    for one in range(1, number + 1):
        said = facts_of(*PRECOMPUTE, "out/f.safetensors", "--shard", f"{one}/{number}", *options)
        assert said["graphs"] == 55 * one // number - 55 * (one - 1) // number
        assert said["dataset"] == "set"
        assert [Path(file).name for file in said["files"]] == [files[one - 1]]
    PowerFeatures.from_graphs(graphs, 0).save("out/f.safetensors")  # of an earlier run
    for _ in range(2):
        said = facts_of("precompute", "set/", "--out", "out/f.safetensors", "--join")
        assert names(place / "out") == [*files, "f.safetensors.index.json"]
        assert (said["graphs"], said["operator"], said["hops"]) == (55, operator, 2)
        assert [Path(file).name for file in said["files"]] == files
        joined = PowerFeatures.load("out/f.safetensors")
        assert_same_features(joined, whole)
    assert whole_facts["deduplication"] == pytest.approx(whole.deduplication)


@pytest.mark.parametrize("which", [0, 1])
def test_raw_files_in_shards(which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sets of TU and OGB by name: features and predictions are those of graphs that are read as a whole."""
    monkeypatch.chdir(tmp_path)
    name, graphs = [(source.name, source.read().graphs) for source in sources(tmp_path)][which]
    for module in (precompute, _trained):
        monkeypatch.setattr(module, "CHUNK_GRAPHS", 7)
    monkeypatch.setattr(registry.Known, "read", None)  # only some graphs at a time
    features = PowerFeatures.from_graphs(graphs, 2)
    command = ("precompute", name, "--root", ".", "--hops", 2, "--out")
    told = invoke(*command, "whole.safetensors")
    assert f"{name}: 40 graphs, {graphs.y.max() + 1} classes, 3.00 nodes and" in told
    assert ("there are also: node attributes, which --node-features attribute+label uses" in told) == (which == 0)
    assert_same_features(PowerFeatures.load("whole.safetensors"), features)
    for number in (1, 2, 3):
        invoke(*command, "f.safetensors", "--shard", f"{number}/3")
    invoke(*command, "f.safetensors", "--join")
    assert_same_features(PowerFeatures.load("f.safetensors"), features)

    torch.manual_seed(0)
    model = SPIN(graphs.num_features, 8, 2, 2)
    training.save_checkpoint("model.safetensors", model, operator="sym")
    invoke("predict", "model.safetensors", name, "--root", ".", "--out", "p.csv", "--shards", 3)
    tables = [read(file) for file in sorted(tmp_path.glob("p-*.csv"))]
    assert [table["graph"].tolist() for table in tables] == [[*range(13)], [*range(13, 26)], [*range(26, 40)]]
    scores = torch.tensor(pandas.concat(tables)[["class_0", "class_1"]].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(scores, training.predict_proba(model, graphs, operator="sym"), rtol=1e-5, atol=1e-6)


def test_graphs_are_computed_as_they_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a chunk is in memory, and of files of bounded size one file and a chunk; the result is the same."""
    whole = PowerFeatures.from_graphs(datasets.load(place / "set"), 2)
    monkeypatch.setattr(precompute, "CHUNK_GRAPHS", 4)
    monkeypatch.setattr(power_features, "CHUNK_BYTES", 400)
    watched = WatchedGraphs(monkeypatch)
    said = invoke(*PRECOMPUTE, "f.safetensors")
    assert "set: 55 graphs, 4.00 nodes and" in said
    assert (watched.made, watched.most) == (14, 0)
    assert_same_features(PowerFeatures.load("f.safetensors"), whole)
    watched.start()
    files = facts_of(*PRECOMPUTE, "f.safetensors", "--shard-size", "6KB")["files"]
    assert len(files) > 3
    assert all(Path(file).stat().st_size <= 6000 for file in files)
    assert (watched.made, watched.most <= 6) == (14, True)
    assert_same_features(PowerFeatures.load("f.safetensors"), whole)
    assert "--shard-size must be at least" in invoke(*PRECOMPUTE, "f.safetensors", "--shard-size", 30, exit_code=1)


def test_words_and_classes_are_those_of_all_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GraphML, too, of which a shard has one class or no graphs; repeated edges are merged alike."""
    monkeypatch.chdir(tmp_path)
    Path("set").mkdir()
    for number, word in enumerate(["C", "N", "O", "Cl"]):
        graph = networkx.MultiDiGraph([(0, 1), *[(1, 0)] * (number + 1)], label=f"class {number}")
        networkx.set_node_attributes(graph, word, "element")
        networkx.write_graphml(graph, f"set/{number}.graphml")
    for coalesce in ((), ("--coalesce", "sum")):
        whole = PowerFeatures.from_graphs(datasets.load("set/", **({"coalesce": "sum"} if coalesce else {})), 2)
        for one in range(1, 6):
            said = invoke(*PRECOMPUTE, "f.safetensors", "--shard", f"{one}/5", *coalesce)
            assert f"{int(one > 1)} graphs, 4 classes, {2 * (one > 1)}.00 nodes" in said
            assert "node features: element (4 words)" in said
        invoke("precompute", "set/", "--out", "f.safetensors", "--join")
        assert_same_features(PowerFeatures.load("f.safetensors"), whole)
        assert whole.y.tolist() == [0, 1, 2, 3]
    assert "lists each edge in both directions already" in invoke(
        *PRECOMPUTE, "g.safetensors", "--undirected", exit_code=1
    )
    assert not Path("g.safetensors").exists()


@pytest.mark.parametrize("dataset", ["set/", "digits"])
def test_all_shards_of_features_one_after_the_other(dataset: str, place: Path) -> None:
    command = ("precompute", dataset, "--hops", 2, "--out", "f.safetensors", "--shards", 4, "--resume")
    whole = PowerFeatures.from_graphs(datasets.load(dataset), 2)
    files = [f"f-{one:05}-of-00004.safetensors" for one in range(1, 5)]
    PowerFeatures.from_graphs(datasets.load(dataset), 0).save("f.safetensors")  # of an earlier run
    said = facts_of(*command)
    assert ([*map(str, said["files"])], said["kept"], said["graphs"]) == (files, [], len(whole))
    assert said["index"] == "f.safetensors.index.json"
    assert_same_features(PowerFeatures.load("f.safetensors"), whole)
    before = {file: Path(file).stat().st_mtime_ns for file in files}
    Path(files[1]).unlink()
    assert facts_of(*command)["kept"] == [files[0], *files[2:]]
    assert [file for file in files if Path(file).stat().st_mtime_ns != before[file]] == files[1:2]
    assert_same_features(PowerFeatures.load("f.safetensors"), whole)
    assert "4 file(s) that were there" in invoke(*command)
    for options, told in (
        (("--shard", "1/4"), "--shard is one of the shards that --shards makes"),
        (("--join",), "leave --shard, --shards and --shard-size out"),
        (("--shard-size", "1MB"), "give one of both"),
        (("--hops", 3), "f-00001-of-00004.safetensors has hops 2, and this run 3"),
    ):
        assert told in invoke(*command, *options, exit_code=1)


def test_a_set_that_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for one in (1, 2, 3):
        said = invoke("precompute", "digits", "--hops", 1, "--shard", f"{one}/3")
        assert f"digits, shard {one} of 3: 599 graphs, 10 classes" in said
        assert f"1 hops of digits, shard {one} of 3" in said
    assert "digits-00001-of-00003.safetensors to digits-00003-of" in invoke("precompute", "digits", "--join")
    whole = PowerFeatures.from_graphs(datasets.load("digits"), 1)
    assert_same_features(PowerFeatures.load("digits.safetensors"), whole)


def test_joining_what_does_not_belong_together(place: Path) -> None:
    join = ("precompute", "set/", "--out", "f.safetensors", "--join")
    assert "f.safetensors has no shards beside it, such as f-00001-of-00016" in invoke(*join, exit_code=1)
    invoke(*PRECOMPUTE, "f.safetensors", "--shard", "1/2")
    made_by = "f-00002-of-00002.safetensors by spin-fast precompute DATASET --out f.safetensors --shard 2/2\n"
    assert f"the options of the others, such as {made_by}" in invoke(*join, exit_code=1)
    second = (*PRECOMPUTE, "f.safetensors", "--shard", "2/2")
    invoke(*second, "--undirected")
    differ = "read {'features': None}, here {'features': None, 'undirected': True}\n"
    told = f"f-00002-of-00002.safetensors must be like the shards before it, but they differ: {differ}"
    assert told in invoke(*join, exit_code=1)
    Path("f-00001-of-00003.safetensors").write_bytes(Path("f-00001-of-00002.safetensors").read_bytes())
    assert "got one of 2 and one of 3; remove those of the others" in invoke(*join, exit_code=1)
    assert "is one of 3 shards, and there are to be 2" in invoke(*second, exit_code=1)
    assert not Path("f.safetensors.index.json").exists()
    Path("f-00001-of-00003.safetensors").unlink()
    said = invoke(*second, "--resume", exit_code=1)
    assert "--resume: f-00002-of-00002.safetensors has read" in said
    invoke(*second)
    invoke(*join)


def test_an_index_names_no_shard_that_is_replaced(place: Path) -> None:
    """Else a run that is killed, or a job of many, would leave features of two runs under one name."""
    make = ("precompute", "set/", "--out", "f.safetensors", "--hops", 1)
    invoke(*make, "--shards", 2)
    invoke(*make, "--shards", 2, "--resume")
    invoke(*make, "--shard", "1/2", "--resume")
    assert len(PowerFeatures.load("f.safetensors"))
    invoke(*make, "--shard", "1/2", "--self-loops")
    with pytest.raises(FileNotFoundError, match=r"f\.safetensors does not exist"):
        PowerFeatures.load("f.safetensors")


def test_resuming_a_shard_of_features(place: Path) -> None:
    command = (*PRECOMPUTE, "f.safetensors", "--shard", "2/4", "--resume")
    first = facts_of(*command)
    assert (first["kept"], first["graphs"]) == ([], 14)
    file = place / "f-00002-of-00004.safetensors"
    before = file.stat().st_mtime_ns
    again = facts_of(*command)
    assert again == first | {"kept": again["files"]}
    assert file.stat().st_mtime_ns == before
    assert "has hops 2, and this run 3" in invoke(*command, "--hops", 3, exit_code=1)
    others = place / "g-00002-of-00004.safetensors"
    PowerFeatures.load(file).save(others, made_of="[1]")
    told = invoke(*PRECOMPUTE, "g.safetensors", *command[-3:], exit_code=1)
    assert f"--resume: {others.name} has " in told
    assert "choose another --out" in told
    for options, message in (
        (("--shard", "1/2", "--shard-size", "1MB"), "give one of both"),
        (("--shard", "1/2", "--join"), "leave --shard, --shards and --shard-size out"),
        (("--resume",), "--resume needs --shard"),
    ):
        assert message in invoke(*PRECOMPUTE, "f.safetensors", *options, exit_code=1)


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
        for line in arguments.split(";"):
            try:
                app(line.split())
            except SystemExit as end:
                if end.code:
                    os._exit(end.code)
        os._exit(0)  # at once
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status, time.monotonic() - began


whole, sharded = sys.argv[1:]
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


@pytest.mark.long
def test_features_that_are_killed_go_on(place: Path) -> None:
    datasets.write_parquet(random_graphs(SIZES * 2000, dtype=torch.float32), place / "set" / "3.parquet")
    command = "precompute set/ --out"
    shards = [f"{command} out/f.safetensors --shard {number}/8 --resume" for number in range(1, 9)]
    killed_at_random_moments(f"{command} whole.safetensors", ";".join(shards))
    assert names(place / "out") == [f"f-{number:05}-of-00008.safetensors" for number in range(1, 9)]
    invoke(*command.split(), "out/f.safetensors", "--join")
    assert_same_features(PowerFeatures.load("out/f.safetensors"), PowerFeatures.load("whole.safetensors"))


def test_a_shard_may_be_symmetric_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    columns = {"num_nodes": [2, 2], "source": [[0], [0, 1]], "target": [[1], [1, 0]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "set" / "1.parquet")
    for options in ((), ("--shard", "2/2")):
        facts = facts_of("precompute", "set/", "--undirected", "--hops", 1, "--out", "f.safetensors", *options)
        assert facts["graphs"] == 2 - len(options) // 2
