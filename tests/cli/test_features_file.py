"""``spin-fast train --features``: files of ``precompute``, and those of something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers import WatchedGraphs, random_graphs
from helpers.cli import edges_once, facts_of, folder_of_graphs, invoke

from spin_fast import GraphBatch, NodeFeatures, PowerFeatures, datasets, training
from spin_fast.cli import _features_file
from spin_fast.features import shards
from spin_fast.selection import Recipe


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
    assert "was made by spin-fast precompute --no-node-rows" in error("--dropout", 0.1)
    assert "must be made by spin-fast precompute --no-deduplicate" in error("--no-deduplicate", "--branches", "hops")
    assert "--degree log: --features" in error("--degree", "log")
    assert "--standardize: --features" in error("--standardize")
    path.write_text("no features")
    assert "x.safetensors is not a readable safetensors file" in error()


def test_features_of_graphs_that_were_transformed_twice(tmp_path: Path) -> None:
    """Both of what transformed them were fitted to the training graphs, or the file is refused."""
    graphs, path = datasets.load("digits"), tmp_path / "x.safetensors"
    train = datasets.find("digits").split(graphs.y).train
    for of_first in (train, None):
        once = NodeFeatures("log").fit(graphs, of_first).transform(graphs)
        twice = NodeFeatures("raw", standardize=True).fit(once, train).transform(once)
        PowerFeatures.from_graphs(twice, 1).save(path)
        call = ["train", "--features", path, "--epochs", 1, "--out", tmp_path / "run"]
        if of_first is None:
            assert "its node features were fitted to other graphs" in invoke(*call, exit_code=1)
        else:
            model, _ = training.load_checkpoint(facts_of(*call)["model"])
            expected = training.predict_proba(model, twice)
            assert torch.equal(training.predict_proba(model, graphs), expected)


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


def graphs_of(number: int, seed: int) -> GraphBatch:
    graphs = random_graphs([3, 5, 0, 7, 2, 4, 6, 1, 8, 3, 5, 4][:number] * 4, dtype=torch.float32, seed=seed)
    return replace(graphs, x=graphs.x - graphs.x.mean(), y=torch.arange(len(graphs)) % 2)


def test_no_more_than_a_chunk_of_graphs_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training from shards needs the graphs only to check that they are the same."""
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    Path("set").mkdir()
    for number in (1, 2):
        datasets.write_parquet(graphs_of(10 + number, number), f"set/{number}.parquet")
    invoke("precompute", "set/", "--hops", 2, "--shard-size", "6KB", "--out", "f.safetensors")
    features = shards.load("f.safetensors")
    assert (len(features.shards) > 3, len(features)) == (True, 92)
    small = ("--epochs", 4, "--hidden", 8, "--layers", 2)

    monkeypatch.setattr(_features_file, "CHUNK_GRAPHS", 7)
    watched = WatchedGraphs(monkeypatch)
    facts = facts_of("train", "set/", "--features", "f.safetensors", *small, "--out", "run")
    assert (watched.made, watched.most) == (14, 1)  # the last one while the next is made

    source = datasets.find("set/")
    split, recipe = source.split(features.y, seed=0), Recipe(hidden_features=8, num_layers=2, num_hops=2)
    torch.manual_seed(0)
    model = recipe.new_model(features, split.train, 2)
    fit = training.fit(model, features, split.train, split.validation, epochs=4)
    trained, metadata = training.load_checkpoint("run/model.safetensors")
    torch.testing.assert_close(trained.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert facts["validation"] == fit.validation
    assert facts["graphs"] == {"train": 73, "validation": 9, "test": 10}
    seen = torch.isin(features.identical_graphs(joint=True)[split.test], split.train)
    assert facts["test_seen"] == int(seen.sum())
    assert (metadata["directed"], metadata["weighted"], metadata["classes"]) == (True, False, ["0", "1"])
    invoke("predict", "run/model.safetensors", "set/", "--out", "p.csv")
    written = torch.tensor(pandas.read_csv("p.csv").iloc[:, 3:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, training.predict(model, features).softmax(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["sizes or labels", "node features", "edges"])
def test_one_graph_of_the_last_chunk_is_another(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_features_file, "CHUNK_GRAPHS", 7)
    graphs = graphs_of(12, 0)
    datasets.write_parquet(graphs, "set.parquet")
    invoke("precompute", "set.parquet", "--shard-size", "6KB", "--out", "f.safetensors")
    changed = {
        "sizes or labels": lambda: replace(graphs, y=torch.cat([graphs.y[:-1], 1 - graphs.y[-1:]])),
        "node features": lambda: replace(graphs, x=torch.cat([graphs.x[:-1], graphs.x[-1:] * 1.001])),
        "edges": lambda: replace(graphs, indices=torch.cat([graphs.indices[:-1], graphs.indices[-1:] ^ 1])),
    }
    datasets.write_parquet(changed[what](), "set.parquet")
    error = invoke("train", "set.parquet", "--features", "f.safetensors", "--out", "run", exit_code=1)
    assert f"f.safetensors is not of set.parquet: its graphs have other {what}" in error


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
