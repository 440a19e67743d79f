"""Runs the command, and writes what it reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx
import pandas
import torch
from typer.testing import CliRunner

from spin_fast import GraphBatch, datasets
from spin_fast.cli import app


def spin_fast(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spin_fast.cli", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | environment
    environment.pop("SPIN_FAST_DATA", None)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def one_line_error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


QUICK = ("--epochs", 2, "--hops", 0, "--layers", 1, "--hidden", 4, "--batch-size", 400, "--no-calibrate")


def invoke(*arguments: object, exit_code: int = 0) -> str:
    """The command in this process, for what needs no new one; its output, or its error of one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == exit_code, result.output
    return result.stderr if exit_code else result.stdout


def facts_of(*arguments: object) -> dict[str, Any]:
    """What a command says with --json, which must be all of stdout, under the keys that its help names."""
    facts = json.loads(invoke(*arguments, "--json"))
    assert isinstance(facts, dict)
    keys = re.search(r"Keys of --json: (.*?)\.", " ".join(invoke(arguments[0], "--help").split()))
    assert keys is not None
    assert list(facts) == keys[1].split(", ")
    return facts


# Three graphs: a triangle with a self-loop, the same with another label, and two nodes with an edge in one direction.
LOOPED = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0), (0, 0)]


def small_set(y: torch.Tensor | None, weight: bool = False) -> datasets.Folder:
    edges = [*LOOPED, *((u + 3, v + 3) for u, v in LOOPED), (6, 7), (6, 7)]
    graphs = GraphBatch.from_edge_index(
        torch.tensor(edges).t(),
        torch.tensor([[0.5, 1, 0]] * 7 + [[0.5, 0, 1]] * 2),
        torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]),
        y=y,
        edge_weight=torch.ones(len(edges)) if weight else None,
    )
    return datasets.Folder(graphs, ["a", "b", "c"], None if y is None else ["no", "yes"], None, 1)


def folds_file(path: Path, num_graphs: int, num_folds: int) -> Path:
    parts = [list(range(fold, num_graphs, num_folds)) for fold in range(num_folds)]
    folds = []
    for fold, test in enumerate(parts):
        validation = parts[(fold + 1) % num_folds]
        train = sorted({*range(num_graphs)} - {*test} - {*validation})
        folds.append({"test": test, "model_selection": [{"train": train, "validation": validation}]})
    path.write_text(json.dumps(folds))
    return path


def folder_of_graphs(path: Path, labels: list[str] | None, num_graphs: int = 30) -> Path:
    """Rings and stars in tables of edges and graphs."""
    path.mkdir()
    names, edges = [f"mol {number}" for number in range(num_graphs)], []
    for number, name in enumerate(names):
        size = 4 + number // 2 % 4
        graph = (networkx.cycle_graph if number % 2 else networkx.star_graph)(size).to_directed()
        edges += [(name, source, target) for source, target in graph.edges]
    pandas.DataFrame(edges, columns=["graph", "source", "target"]).to_csv(path / "edges.csv", index=False)
    if labels is not None:
        y = [labels[number % 2] for number in range(num_graphs)]
        pandas.DataFrame({"graph": names, "label": y}).to_csv(path / "graphs.csv", index=False)
    return path


def edges_once(path: Path) -> Path:
    """The same folder with each edge in one direction."""
    edges = pandas.read_csv(path / "edges.csv")
    edges[edges["source"] < edges["target"]].to_csv(path / "edges.csv", index=False)
    return path
