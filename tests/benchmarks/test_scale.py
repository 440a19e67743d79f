"""The study of millions of graphs, on a few."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import benchmark_module

from spin_fast import GraphBatch, datasets


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch):
    """The module, for which a synthetic family stands in for ogbg-molhiv."""
    module = benchmark_module("studies.scale")
    graphs = datasets.erdos_renyi(40, 8, (0.3, 0.6), num_features=9)
    monkeypatch.setattr(module.datasets, "load", lambda *_, **__: graphs)
    return module


def test_no_copy_is_like_another(scale) -> None:
    graphs = scale.datasets.load("ogbg-molhiv")
    ordered = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, torch.arange(320.0).view(-1, 1), graphs.y)
    one, other = scale.redrawn(ordered, 0), scale.redrawn(ordered, 1)
    assert one.num_nodes_per_graph.sort()[0].tolist() == graphs.num_nodes_per_graph.sort()[0].tolist()
    assert not torch.equal(one.x, other.x)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    changed = (one.x != ordered[order].x).double().mean()
    assert 0.1 < changed < 0.3
    assert torch.equal(one.indices, ordered[order].indices)


def test_a_command_that_fails_is_told(scale, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has failed: (?s:.*)no such thing"):
        scale.cost_of([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path)
    code = "import time; held = bytearray(50_000_000); time.sleep(0.5); print('{}')"
    cost, told = scale.cost_of([sys.executable, "-c", code], tmp_path)
    assert told == {}
    assert cost.with_mapped > cost.own_memory > 50_000_000
    assert cost.seconds > 0.5 > cost.cpu_seconds


@pytest.mark.slow
def test_program(scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric")
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(scale, "FEW", 30)
    monkeypatch.setattr(sys, "argv", ["scale", "--folder", str(tmp_path), "--results", str(tmp_path), "--graphs", "70"])
    scale.main()
    found = json.loads((tmp_path / "scale.json").read_text())["steps"]
    assert [step["graphs"] for step in found] == [70, 70, 70, 70, 420, 30, 30, 30]
    assert all(step["seconds"] > 0 and step["own_memory"] > 0 for step in found)
    assert found[1]["seconds of an epoch"] > 0
    assert found[3]["seconds_per_epoch"] > 0
    assert found[4]["mapped over in memory"] > 0
    assert found[-1]["seconds to make"] > 0
    assert "| 2048 |" in (tmp_path / "scale.md").read_text()
    assert "| fit, two epochs over the shards | 70 |" in (tmp_path / "scale.md").read_text()
