"""``spin-fast precompute --degree``, ``--one-hot`` and ``--standardize``, and training on what it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_same_features, random_graphs
from helpers.cli import QUICK, facts_of, folds_file, invoke

from spin_fast import NodeFeatures, PowerFeatures, datasets, shards, training
from spin_fast.cli import _fitting, precompute

pytest.importorskip("pyarrow")

OUT = ("--out", "f.safetensors")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Graphs of three classes in ``set/``, of numbers, and in ``whole/``, of categories; with three folds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    monkeypatch.setattr(precompute, "CHUNK_GRAPHS", 7)
    monkeypatch.setattr(_fitting, "CHUNK_GRAPHS", 5)
    graphs = random_graphs([3, 5, 0, 7, 2, 4, 6, 1, 8, 3, 5] * 6, dtype=torch.float32)
    node = torch.arange(graphs.num_nodes)
    x = torch.stack([node % 13, node % 2], dim=1).float()
    graphs = replace(graphs, x=x, y=torch.arange(len(graphs)) % 3)
    for name, some in (("set", replace(graphs, x=x.sqrt())), ("whole", graphs)):
        Path(name).mkdir()
        datasets.write_parquet(some[:40], f"{name}/1.parquet")
        datasets.write_parquet(some[40:], f"{name}/2.parquet")
    Path("splits").mkdir()
    folds_file(Path("splits/set_splits.json"), len(graphs), 3)
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        ("--standardize",),
        ("--degree", "log", "--seed", 3),
        ("--degree", "one-hot", "--no-standardize", "--splits", "split.json"),
    ],
)
def test_training_is_that_on_the_graphs(options: tuple[object, ...], place: Path) -> None:
    """To the same weights, and to a model that takes graphs as they are."""
    parts = {"train": [*range(50, 4, -1)], "validation": [*range(5)], "test": [*range(51, 60)]}
    Path("split.json").write_text(json.dumps(parts))
    invoke("precompute", "set/", "--hops", 1, *options, *OUT)
    split = [*options[-2:]] if len(options) > 2 else []
    train = ("train", "set/", *QUICK[:2], *QUICK[4:])
    invoke(*train, "--features", "f.safetensors", *split, "--out", "a")
    invoke(*train, "--hops", 1, *options, "--out", "b")
    (one, told), (other, expected) = (training.load_checkpoint(f"{run}/model.safetensors") for run in "ab")
    assert told == expected
    assert one.node_features is not None
    assert one.node_features.fingerprint == other.node_features.fingerprint
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    for run in "ab":
        invoke("predict", f"{run}/model.safetensors", "set/", "--out", f"{run}.csv")
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()


@pytest.mark.parametrize(
    ("name", "options", "split"),
    [
        ("set", ("--standardize",), ("--fold", 1)),
        ("whole", ("--degree", "profile"), ("--seed", 2)),
        ("whole", ("--one-hot", "--degree", "one-hot"), ()),
    ],
)
@pytest.mark.parametrize("number", [1, 4])
def test_shards_are_those_of_one_run(
    name: str, options: tuple[object, ...], split: tuple[object, ...], number: int, place: Path
) -> None:
    options = (*options, *split)
    invoke("precompute", name + "/", *options, *OUT)
    whole = PowerFeatures.load("f.safetensors")
    said = json.loads(invoke("precompute", name + "/", *options, "--fit-only", "--json"))
    fitted = NodeFeatures.load(f"{name}.json")
    assert said["file"] == f"{name}.json"
    assert (said["features"], said["standardized"]) == (whole.num_features, len(fitted.columns_))
    for shard in range(1, number + 1):
        take = ("--fitted", f"{name}.json", "--out", "o/f.safetensors", "--shard", f"{shard}/{number}")
        invoke("precompute", name + "/", *take)
    invoke("precompute", name + "/", "--out", "o/f.safetensors", "--join")
    joined = PowerFeatures.load("o/f.safetensors")
    assert_same_features(joined, whole)
    assert [of.node_features.fingerprint for of in (joined, shards.load("o/f.safetensors"))] == [fitted.fingerprint] * 2
    invoke("train", name + "/", "--features", "o/f.safetensors", *QUICK[:2], *QUICK[4:], *split, "--out", "run")
    learnt = training.load_checkpoint("run/model.safetensors")[0].node_features
    assert learnt is not None
    assert learnt.fingerprint == fitted.fingerprint
    invoke("precompute", name + "/", "--fitted", f"{name}.json", "--out", "g.safetensors")
    assert_same_features(PowerFeatures.load("g.safetensors"), whole)


def test_files_of_bounded_size(place: Path) -> None:
    """What they tell of node features is part of it."""
    graphs = datasets.load("whole/")
    x = torch.arange(graphs.num_nodes).float()[:, None] + 1e6
    datasets.write_parquet(replace(graphs, x=x), "whole/1.parquet")
    Path("whole/2.parquet").unlink()
    options = ("--one-hot", "--hops", 0, "--no-deduplicate", *OUT, "--shard-size")
    error = invoke("precompute", "whole/", *options, 10, exit_code=1)
    needed = int(re.search("--shard-size must be at least ([0-9,]+) bytes", error)[1].replace(",", ""))
    files = facts_of("precompute", "whole/", *options, needed + 5000)["files"]
    assert len(files) > 3
    assert all(Path(file).stat().st_size <= needed + 5000 for file in files)
    assert PowerFeatures.load("f.safetensors").num_features > 150


def test_features_of_another_split(place: Path) -> None:
    """Those that learnt from what are now test graphs are refused."""
    train = ("train", "set/", "--features", "f.safetensors", *QUICK[:2], *QUICK[4:], "--out", "run")
    invoke("precompute", "set/", "--standardize", "--fold", 1, *OUT)
    for other in ((), ("--fold", 2)):
        error = invoke(*train, *other, exit_code=1)
        assert "its node features were fitted to other graphs than these training graphs; give --seed, --fold" in error
    invoke(*train, "--fold", 1, "--seed", 5)
    assert (
        "--degree log: --features f.safetensors has the hops already, and it comes before them; give it to"
        in invoke(*train, "--degree", "log", exit_code=1)
    )
    assert "not of whole: its graphs have other node features" in invoke("train", "whole/", *train[2:], exit_code=1)
    invoke("precompute", "whole/", "--degree", "log", *OUT)  # learns nothing
    invoke("train", "whole/", *train[2:], "--seed", 7)
    assert "not of set: it has 66 graphs with 2 feature(s), set 66 graphs with 1" in invoke(
        *train, "--node-features", "degree", exit_code=1
    )


def test_options_that_do_not_go_together(place: Path) -> None:
    def error(*options: object) -> str:
        return invoke("precompute", "set/", *OUT, *options, exit_code=1)

    told = "--degree log: all shards need what is fitted once: give it to precompute --fit-only --out FILE.json instead"
    assert told in error("--degree", "log", "--shard", "1/2")
    assert "--fit-only is for node features that are fitted to training graphs: add --deg" in error("--fit-only")
    assert "--fold is for node features that are fitted" in error("--fold", 1)
    for option in ((), ("--out", "x.json", "--shard-size", "1MB"), ("--out", "x.json", "--join")):
        assert "--fit-only writes one --out FILE.json" in error("--standardize", "--fit-only", *option)
    assert "none.json does not exist" in error("--fitted", "none.json")
    invoke("precompute", "set/", "--standardize", "--fit-only", "--out", "n.json")
    fitted = ("--fitted", "n.json")
    assert "--one-hot: --fitted n.json says what to do with node features: leave it out" in error("--one-hot", *fitted)
    assert "--seed: --fitted n.json says" in error("--seed", 0, *fitted)
    assert "--fit-only writes a file for --fitted: give one of both" in error("--fit-only", *fitted)
    assert "graphs must have 2 features as fitted, got 1" in error(*fitted, "--node-features", "degree")
    Path("n.json").write_text(Path("n.json").read_text().replace("mean_", "main_"))
    assert "n.json is damaged: state must be what NodeFeatures.to_dict has told" in error(*fitted)
    Path("x.json").write_text("{}")
    assert "there is a file of another kind" in error("--standardize", "--fit-only", "--out", "x.json")
    assert "set/ has no labels to train by" in error("--standardize", "--label", "")
    assert not Path("f.safetensors").exists()


def test_shards_that_were_fitted_otherwise(place: Path) -> None:
    shard = ("precompute", "set/", *OUT, "--shard")
    invoke("precompute", "set/", "--standardize", "--fit-only")
    invoke(*shard, "1/2", "--fitted", "set.json")
    assert facts_of(*shard, "1/2", "--fitted", "set.json", "--resume")["kept"] == ["f-00001-of-00002.safetensors"]
    assert "--resume: f-00001-of-00002.safetensors has node_features " in invoke(*shard, "1/2", "--resume", exit_code=1)
    invoke("precompute", "set/", "--standardize", "--seed", 1, "--fit-only")
    invoke(*shard, "2/2", "--fitted", "set.json")
    assert "must be like the shards before it, but they differ: node_features " in invoke(
        *shard[:-1], "--join", exit_code=1
    )


def test_all_shards_by_one_job_fit_once(place: Path) -> None:
    whole = facts_of("precompute", "set/", "--standardize", "--out", "whole.safetensors")
    facts_of("precompute", "set/", "--standardize", *OUT, "--shards", 2)
    assert_same_features(PowerFeatures.load("f.safetensors"), PowerFeatures.load("whole.safetensors"))
    assert "leave --join, --shards and --shard-size out" in invoke(
        "precompute", "set/", "--standardize", "--fit-only", "--shards", 2, exit_code=1
    )
    assert whole["graphs"] == len(shards.load("f.safetensors"))
