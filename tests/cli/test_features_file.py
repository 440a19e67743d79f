"""``spin-fast train --features``: files of ``precompute``, and those of something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers.cli import edges_once, folder_of_graphs, invoke

from spin_fast import GraphBatch, PowerFeatures, datasets, training


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
