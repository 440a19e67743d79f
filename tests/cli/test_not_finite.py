"""Scores that are not finite: blank in tables, null in JSON, counted on stderr, and never a model."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from helpers.cli import folder_of_graphs
from typer.testing import CliRunner

from spin_fast import SPIN, training
from spin_fast.cli import app


def with_masses(folder: Path, mass: str) -> Path:
    """The folder with a table of nodes, whose second graph has a ``mass`` of its own."""
    edges = pandas.read_csv(folder / "edges.csv")
    nodes = edges[["graph", "source"]].drop_duplicates().rename(columns={"source": "node"})
    nodes["mass"] = [mass if graph == "mol 1" else "0.5" for graph in nodes["graph"]]
    nodes.to_csv(folder / "nodes.csv", index=False)
    return folder


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("tasks", [False, True])
def test_predictions_are_blank(suffix: str, tasks: bool, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    model = SPIN(1, 8, 2, 1)
    model.multilabel = tasks
    path, out = tmp_path / "model.safetensors", tmp_path / f"p.{suffix}"
    training.save_checkpoint(path, model, operator="adj", node_features=[{"column": "mass"}])
    folder = with_masses(folder_of_graphs(tmp_path / "new", None, num_graphs=4), "3e38")
    result = CliRunner().invoke(app, ["predict", str(path), f"{folder}/", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert "1 of 4 graphs has scores that are not finite, which are left blank, it is mol 1\n" in result.stderr
    facts = json.loads(result.stdout)
    assert (facts["graphs"], facts["not_finite"]) == (4, 1)
    assert tasks or sum(facts["predicted"].values()) == 3
    table = pandas.read_csv(out) if suffix == "csv" else pandas.read_parquet(out)
    assert table.iloc[:, 2:].isna().any(axis=1).tolist() == [False, True, False, False]
    assert not table.iloc[1, 2:].notna().any()
    if suffix == "csv":
        assert out.read_text().splitlines()[2] == f"1,mol 1,{',' * (len(table.columns) - 3)}"
    else:
        from pyarrow.parquet import read_table

        assert [read_table(out)[name].null_count for name in table.columns[2:]] == [1] * (len(table.columns) - 2)


def test_a_run_without_finite_scores_saves_no_model(tmp_path: Path) -> None:
    options = ["--epochs", "1", "--batch-size", "2000", "--learning-rate", "1e20", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, ["train", "digits", *options])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("spin-fast: error: training diverged: neither metric nor loss")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log.csv"]


def test_a_test_graph_without_finite_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = with_masses(folder_of_graphs(tmp_path / "known", ["a", "b"]), "3e38")
    parts = {"test": [1, 2], "validation": list(range(3, 9)), "train": [0, *range(9, 30)]}
    Path("split.json").write_text(json.dumps(parts))
    options = ["--splits", "split.json", "--epochs", "1", "--hops", "1", "--operator", "adj", "--no-standardize"]
    result = CliRunner().invoke(app, ["train", f"{folder}/", *options, "--json"])
    assert result.exit_code == 0, result.output
    assert "1 of 2 graphs has scores that are not finite, so that the test has no result, it is 1\n" in result.stderr
    assert json.loads(result.stdout)["test"] is None
    assert training.load_checkpoint("runs/known/model.safetensors")[1]["test"] is None
    assert "test accuracy" in CliRunner().invoke(app, ["train", f"{folder}/", *options]).stdout
