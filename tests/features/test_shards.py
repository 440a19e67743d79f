from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from helpers import assert_same_features, graph_batches, random_graphs
from hypothesis import given
from hypothesis import strategies as st

import spin_fast
from spin_fast import PowerFeatures, shards


@pytest.fixture(scope="module")
def graphs() -> spin_fast.GraphBatch:
    """Rows repeat, most of all in the second half."""
    made = random_graphs([5, 0, 9, 20] * 60, dtype=torch.float32)
    x = made.x.sign()
    x[len(x) // 2 :] = 1
    return replace(made, x=x, y=torch.arange(240))


@given(
    graphs=graph_batches(),
    operator=st.sampled_from(["adj", "rw,adj"]),
    max_bytes=st.integers(1, 6000),
    deduplicate=st.booleans(),
    node_rows=st.booleans(),
    cuts=st.lists(st.integers(0, 9), max_size=4),
)
def test_parts_are_the_features_of_their_graphs(
    graphs: spin_fast.GraphBatch, operator: str, max_bytes: int, deduplicate: bool, node_rows: bool, cuts: list[int]
) -> None:
    """Whatever the chunks in which the graphs come."""
    graphs = replace(graphs, x=graphs.x.sign(), y=torch.arange(len(graphs)))
    options = {"deduplicate": deduplicate, "node_rows": node_rows}
    parts = list(shards.compute(graphs, 1, operator, max_bytes=max_bytes, **options))
    sizes = [len(part) for part in parts]
    assert sum(sizes) == len(graphs)
    assert all(sizes) or len(graphs) == 0
    for part, (begin, end) in zip(parts, pairwise([0, *accumulate(sizes)]), strict=True):
        assert part.nbytes <= max(max_bytes - shards.HEADER_BYTES, 1) or len(part) <= 1
        alone = PowerFeatures.from_graphs(graphs[begin:end], 1, operator, **options)
        if (part.index is None) == (alone.index is None):
            assert_same_features(part, alone)
        assert torch.equal(part.y, graphs.y[begin:end])
    bounds = [0, *sorted(min(cut, len(graphs)) for cut in cuts), len(graphs)]
    chunks = (graphs[begin:end] for begin, end in pairwise(bounds))
    streamed = list(shards.compute(chunks, 1, operator, max_bytes=max_bytes, **options))
    assert len(streamed) == len(parts)
    for one, other in zip(streamed, parts, strict=True):
        assert_same_features(one, other)


@pytest.mark.parametrize("node_rows", [True, False])
def test_files_are_bounded_and_together_are_the_whole(
    graphs: spin_fast.GraphBatch, node_rows: bool, tmp_path: Path
) -> None:
    path, whole = tmp_path / "x.safetensors", PowerFeatures.from_graphs(graphs, 1, node_rows=node_rows)
    assert whole.index is not None
    whole[:3].take().save(path)  # what was there before
    files = shards.save(shards.compute(graphs, 1, max_bytes=12_000, node_rows=node_rows), path)
    number = len(files)
    assert number > 3
    tag = files[0].name[2:10]
    assert int(tag, 16) >= 0
    assert [file.name for file in files] == [f"x~{tag}-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "x.safetensors.index.json"])
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) <= 12_000
    assert min(sizes[1:-1]) > 4_000
    begin = 0
    for file in files:
        part = PowerFeatures.load(file)
        assert torch.equal(part.y, torch.arange(begin, begin + len(part)))
        begin += len(part)
    for given_path in (path, tmp_path / "x.safetensors.index.json"):
        assert_same_features(PowerFeatures.load(given_path), whole)


def test_what_fits_is_one_file(graphs: spin_fast.GraphBatch, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    shards.save(shards.compute(graphs, 1, max_bytes=12_000), path)
    assert shards.save(shards.compute(graphs, 1, max_bytes=10**9), path) == [path]
    assert_same_features(PowerFeatures.load(path), PowerFeatures.from_graphs(graphs, 1))
    assert not (tmp_path / "x.safetensors.index.json").exists()
    empty = spin_fast.GraphBatch(graphs.ptr[:1], graphs.indptr[:1], graphs.indices[:0], graphs.x[:0])
    assert shards.save(shards.compute(empty, 1, max_bytes=100), path) == [path]
    assert len(PowerFeatures.load(path)) == 0


def test_files_of_an_earlier_set_are_removed(graphs: spin_fast.GraphBatch, tmp_path: Path) -> None:
    path, index = tmp_path / "x.safetensors", tmp_path / "x.safetensors.index.json"
    whole = PowerFeatures.from_graphs(graphs, 1)
    names = (
        "x-00001-of-00099.safetensors",
        "y~00000000-00001-of-00002.safetensors",
        "x~00000000-00001-of-00002.txt",
        "x-20261123-00001-of-00002.safetensors",
    )
    others = [tmp_path / name for name in names]
    for other in others:
        whole.save(other)
    for max_bytes in (12_000, 20_000, 10**9, 20_000, 12_000, 12_000, 10**9):
        files = shards.save(shards.compute(graphs, 1, max_bytes=max_bytes), path)
        assert (len(files) == 1) == (max_bytes == 10**9)
        assert sorted(tmp_path.iterdir()) == sorted([*files, *others, *([index] if len(files) > 1 else [])])
        assert_same_features(PowerFeatures.load(path), whole)


def test_only_files_of_features_are_removed(graphs: spin_fast.GraphBatch, tmp_path: Path) -> None:
    path, index = tmp_path / "x.safetensors", tmp_path / "x.safetensors.index.json"
    files = shards.save(shards.compute(graphs, 1, max_bytes=12_000), path)
    content = json.loads(index.read_text())
    own, gone, precious = files[0], files[1], tmp_path / "precious.safetensors"
    own.write_text("what is here now is something else")
    gone.unlink()
    PowerFeatures.from_graphs(graphs, 1).save(precious)
    content["shards"][3]["file"] = precious.name
    index.write_text(json.dumps(content))
    shards.save(shards.compute(graphs, 1, max_bytes=10**9), path)
    assert sorted(tmp_path.iterdir()) == sorted([path, own, precious])
    for foreign in ("{", "[]", "{}"):
        index.write_text(foreign)
        with pytest.raises(FileExistsError, match=r"index\.json cannot be written: there is a file of another kind"):
            shards.save(shards.compute(graphs, 1, max_bytes=10**9), path)
        assert index.read_text() == foreign
    for damaged in (json.dumps(content | {"shards": 3}), json.dumps(content | {"shards": [3]})):
        index.write_text(damaged)
        shards.save(shards.compute(graphs, 1, max_bytes=10**9), path)
        assert sorted(tmp_path.iterdir()) == sorted([path, own, precious])


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("before", ["nothing", "a file", "files"])
@pytest.mark.parametrize("fails", ["the index", "a rename"])
def test_what_fails_late_leaves_what_was_there(
    graphs: spin_fast.GraphBatch, before: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace_file = tmp_path / "x.safetensors", Path.replace
    max_bytes = {"a file": 10**9, "files": 20_000}.get(before)
    if max_bytes is not None:
        shards.save(shards.compute(graphs, 1, max_bytes=max_bytes), path)
    there = contents(tmp_path)
    parts = list(shards.compute(replace(graphs, x=2 * graphs.x), 1, max_bytes=20_000))

    def replaces(file: Path, target: Path) -> Path:
        if fails == "a rename" and "-00002-of-" in target.name:
            raise OSError("disk full")
        return replace_file(file, target)

    def writes(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replaces)
        if fails == "the index":
            patch.setattr("spin_fast._common.files.write_json", writes)
        with pytest.raises(OSError, match="disk full"):
            shards.save(parts, path)
    assert contents(tmp_path) == there
    files = shards.save(parts, path)
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "x.safetensors.index.json"])


KILLED = """
import os, shutil, sys, torch
from pathlib import Path
from spin_fast import GraphBatch, PowerFeatures, shards

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
folder, path = Path("saved"), Path("saved/x.safetensors")
torch.set_num_threads(1)


def features(value, number):
    edges, batch = torch.empty(2, 0, dtype=torch.int64), torch.arange(number)
    graphs = GraphBatch.from_edge_index(edges, torch.full((number, 1), value), batch)
    return [PowerFeatures.from_graphs(graphs[g], 0) for g in range(number)]


def save_and_die(new, at):
    calls = 0

    def count(event, arguments):
        nonlocal calls
        calls += event in CHANGES or (event == "open" and arguments[2] & os.O_CREAT > 0)
        if calls == at:
            os._exit(9)

    sys.addaudithook(count)
    shards.save(new, path)
    os._exit(0)


def child(function, *arguments):
    if (process := os.fork()) == 0:
        function(*arguments)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


found = {}
for before, after in ((1, 2), (2, 1), (2, 2)):
    shards.save(features(1.0, before), "old/x.safetensors")
    new, at, killed = features(2.0, after), 1, 1
    while killed:
        shutil.copytree("old", folder)
        killed = child(save_and_die, new, at)
        rows = PowerFeatures.load(path).rows.unique().tolist()
        assert rows in ([1.0], [2.0]), (before, after, at, rows)
        found.setdefault((before, after), []).append(rows[0])
        names = shards.save(new, path)
        left = {file.name for file in folder.iterdir()} - {file.name for file in names} - {"x.safetensors.index.json"}
        assert not left, (before, after, at, left)
        shutil.rmtree(folder)
        at += 1
    shutil.rmtree("old")
    assert found[before, after] == sorted(found[before, after])
    assert found[before, after][0] == 1.0 < found[before, after][-1] == 2.0
print(sum(map(len, found.values())))
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_call_leaves_the_old_or_the_new_features(tmp_path: Path) -> None:
    """Before each call that changes the folder; the next writer removes what the dead one has left."""
    run = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 100


def test_two_writers_at_once_do_not_meet(graphs: spin_fast.GraphBatch, tmp_path: Path) -> None:
    """The one that ends last counts, and takes nothing from the other while that is at work."""
    path = tmp_path / "x.safetensors"

    def slow() -> Iterator[PowerFeatures]:
        for part in shards.compute(graphs, 1, max_bytes=12_000):
            shards.save(shards.compute(graphs[:100], 1, max_bytes=6_000), path)
            assert len(PowerFeatures.load(path)) == 100
            yield part

    files = shards.save(slow(), path)
    assert len(PowerFeatures.load(path)) == len(graphs)
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "x.safetensors.index.json"])


@pytest.mark.parametrize("load", [shards.load, PowerFeatures.load])
@pytest.mark.parametrize("sizes", [(3, 4), (1, 4), (4, 1)])
def test_shards_that_are_replaced_while_they_are_loaded(
    graphs: spin_fast.GraphBatch, load, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer comes between the index, or the look for it, and the files."""
    features, path = PowerFeatures.from_graphs(graphs, 1), tmp_path / "f.safetensors"

    def save(number: int) -> None:
        shards.save((features[i::number] for i in range(number)), path)

    save(sizes[0])
    load_file, read_index = PowerFeatures._load_file.__func__, spin_fast.features.storage.read_index

    def late(call):
        def after_a_writer(*args, **named):
            found = call(*args) if call is read_index else None
            if left.pop("writer", False):
                save(sizes[1])
            return found or call(*args, **named)

        return after_a_writer

    left = {"writer": True}
    monkeypatch.setattr(PowerFeatures, "_load_file", classmethod(late(load_file)))
    for module in (spin_fast.features.storage, shards):
        monkeypatch.setattr(module, "read_index", late(read_index))
    assert len(load(path)) == len(graphs)
    assert not left
    left["writer"] = False
    shards.index_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        load(path)


@pytest.mark.parametrize("load", [shards.load, PowerFeatures.load])
@pytest.mark.parametrize("path", [".", "/", "", "here/f"])
def test_what_is_no_file_is_said(load, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").touch()
    with pytest.raises(FileNotFoundError, match=r"is a folder|does not exist"):
        load(path)


def test_what_fails_leaves_what_was_there(graphs: spin_fast.GraphBatch, tmp_path: Path) -> None:
    def interrupted() -> Iterator[PowerFeatures]:
        yield PowerFeatures.from_graphs(graphs, 1)
        raise KeyboardInterrupt

    path = tmp_path / "x.safetensors"
    PowerFeatures.from_graphs(graphs, 2).save(path)
    with pytest.raises(KeyboardInterrupt):
        shards.save(interrupted(), path)
    with pytest.raises(ValueError, match="shards must hold at least one PowerFeatures, got none"):
        shards.save([], path)
    assert list(tmp_path.iterdir()) == [path]
    assert PowerFeatures.load(path).num_hops == 2


def test_nothing_is_computed_for_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    def never() -> Iterator[PowerFeatures]:
        yield pytest.fail("the place is bad")

    for path, error in ((tmp_path, OSError), (tmp_path / "x.json", ValueError)):
        with pytest.raises(error, match=str(path)):
            shards.save(never(), path)


def test_damaged_sets_are_named(graphs: spin_fast.GraphBatch, tmp_path: Path) -> None:
    path, index = tmp_path / "x", tmp_path / "x.index.json"
    files = shards.save(shards.compute(graphs, 1, max_bytes=12_000), path)
    content = json.loads(index.read_text())
    for change, message in (
        ({"shards": []}, f"{index} is damaged: parts must hold at least one"),
        ({"shards": [{"file": "x-1"}]}, f"{index} is damaged: shards must be a list of files and their num_graphs"),
        ({"shards": 3}, f"{index} is damaged: shards must be"),
        ({"shards": [{"file": "../x", "num_graphs": 1}]}, f"{index} is damaged: shards must be .*: Invalid name"),
        ({"shards": [*content["shards"][:1], {"file": files[1].name, "num_graphs": 9}]}, f"{files[1]} must have 9"),
        ({"shards": content["shards"][:1] * 2}, f"{index} is damaged: .* a file is named twice"),
        ({"shards": [{"file": index.name, "num_graphs": 1}]}, f"{index} is not a readable safetensors file"),
        ({"format": "spin_fast features-index 2"}, f"{index} has format .*; upgrade spin_fast"),
        ({"format": "something"}, f"{index} is no file of spin_fast features-index"),
    ):
        index.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            PowerFeatures.load(path)
    index.write_text(json.dumps(content | {"shards": [{"file": "x", "num_graphs": 1}]}))
    with pytest.raises(FileNotFoundError, match=f"features {path} does not exist"):
        PowerFeatures.load(path)
    index.write_text(json.dumps(content))
    PowerFeatures.from_graphs(graphs[: content["shards"][1]["num_graphs"]], 2).save(files[1])
    with pytest.raises(ValueError, match=f"{index} is damaged: parts must be alike, got 1 hops .* and 2 hops"):
        PowerFeatures.load(path)
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"features {files[1]} does not exist"):
        PowerFeatures.load(path)


def test_files_made_apart_are_joined(graphs: spin_fast.GraphBatch, tmp_path: Path) -> None:
    path, whole = tmp_path / "x.safetensors", PowerFeatures.from_graphs(graphs, 1)
    files = [tmp_path / f"x-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    for file, (begin, end) in zip(files, pairwise([0, 100, 100, 240]), strict=True):
        PowerFeatures.from_graphs(graphs[begin:end], 1).save(file)
    shards.save(shards.compute(graphs, 2, max_bytes=12_000), path)  # of an earlier call
    assert shards.join(path) == files
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "x.safetensors.index.json"])
    assert_same_features(PowerFeatures.load(path), whole)
    assert [len(shard) for shard in shards.load(path).shards] == [100, 0, 140]
    PowerFeatures.from_graphs(graphs[100:], 1).save(files[2], made_of="other settings")
    told = f"{files[2]} must be like the shards before it, but they differ: made of None, here other settings$"
    with pytest.raises(ValueError, match=told):
        shards.join(path)
    PowerFeatures.from_graphs(graphs[100:], 2).save(files[2])
    with pytest.raises(ValueError, match=r"they differ: arrays 1 hops of .*, here 2 hops"):
        shards.join(path)
    assert_same_features(PowerFeatures.load(files[1]), PowerFeatures.from_graphs(graphs[:0], 1))
    files[2].unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of 3 shards; .*{files[2]} by spin-fast .* --shard 3/3$"):
        shards.join(path)


def test_graphs_that_differ_in_the_sign_of_a_zero_are_identical(tmp_path: Path) -> None:
    loop = torch.tensor([[0], [0]])
    parts = [spin_fast.GraphBatch.from_edge_index(loop, torch.tensor([[zero, 1.0]])) for zero in (0.0, -0.0)]
    spin_fast.shards.save((spin_fast.PowerFeatures.from_graphs(part, 1) for part in parts), tmp_path / "z.safetensors")
    assert spin_fast.shards.load(tmp_path / "z.safetensors").identical_graphs().tolist() == [0, 0]
