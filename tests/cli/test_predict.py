"""``spin-fast predict``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers.cli import facts_of, folder_of_graphs, invoke
from typer.testing import CliRunner

from spin_fast import SPIN, NodeFeatures, PowerFeatures, datasets, training
from spin_fast.cli import _trained, app
from spin_fast.datasets import registry
from spin_fast.datasets.reader import Whole


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    training.save_checkpoint(tmp_path / "model.safetensors", SPIN(3, 8, 10, 1, attention=False), operator="sym+adj")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predict(suffix: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", 1 << 18)
    out = tmp_path / "deep" / f"probabilities.{suffix}"
    assert "1,797 graphs" in invoke("predict", checkpoint, "digits", "--out", out)
    table = pandas.read_csv(out) if suffix == "csv" else pandas.read_parquet(out)
    assert list(table) == ["graph", "prediction", *(f"class_{i}" for i in range(10))]
    assert table["graph"].tolist() == list(range(1797))
    expected = training.predict_proba(training.load_checkpoint(checkpoint)[0], datasets.load("digits"))
    written = torch.tensor(table.iloc[:, 2:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, expected, rtol=1e-6, atol=1e-7)
    assert table["prediction"].astype(int).tolist() == expected.argmax(1).tolist()
    assert list(out.parent.iterdir()) == [out]


def test_predict_several_tasks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = replace(datasets.load("digits")[:7], y=torch.zeros(7, 10))
    read = Whole(datasets.Folder(graphs, [], None, None, 0))
    monkeypatch.setattr(registry.Known, "open", lambda *_, **options: read)
    invoke("predict", checkpoint, "digits", "--out", tmp_path / "x.csv")
    table = pandas.read_csv(tmp_path / "x.csv")
    assert list(table) == ["graph", *(f"task_{i}" for i in range(10))]
    (scores,) = training.predict_chunks(training.load_checkpoint(checkpoint)[0], graphs)
    written = torch.tensor(table.iloc[:, 1:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, scores.sigmoid(), rtol=1e-6, atol=1e-7)


def test_predict_makes_the_node_features_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = invoke("train", "--epochs", 1, "--hops", 1, "--degree", "one-hot", "--out", "run")
    graphs = datasets.load("digits")
    assert graphs.y is not None
    node_features = NodeFeatures("one-hot").fit(graphs, datasets.find("digits").split(graphs.y).train)
    prepared = node_features.transform(graphs)
    assert f"node features: {prepared.num_features}, 3 standardised on the training graphs" in stdout
    model, metadata = training.load_checkpoint("run/model.safetensors")
    assert NodeFeatures.from_dict(metadata["preprocessing"]).to_dict() == node_features.to_dict()
    invoke("predict", "run/model.safetensors", "digits", "--out", "x.csv")
    written = torch.tensor(pandas.read_csv("x.csv").iloc[:, 2:].to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(written, training.predict_proba(model, graphs), rtol=1e-6, atol=1e-7)
    scores = training.predict(model, PowerFeatures.from_graphs(prepared, 1))
    torch.testing.assert_close(written, scores.softmax(1), rtol=1e-4, atol=1e-6)


def test_predict_names_what_is_wrong(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(model: Path, dataset: str, out: str) -> str:
        return invoke("predict", model, dataset, "--out", tmp_path / out, exit_code=1)

    assert "x.txt" in error(checkpoint, "digits", "x.txt")
    assert "--out must end with .csv or .parquet" in error(checkpoint, "digits", "x.txt")
    assert "model.safetensors" in error(checkpoint, "digits", "model.safetensors/x.csv")
    assert "checkpoint" in error(tmp_path / "nosuch", "digits", "x.csv")
    assert "unknown data set 'nosuch'" in error(checkpoint, "nosuch", "x.csv")
    assert f"erdos-renyi has 50 feature(s) per node, and {checkpoint} takes 3" in error(
        checkpoint, "erdos-renyi", "x.csv"
    )
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "x.parquet, other than .csv, needs a package that is missing: pip install pyarrow" in error(
        checkpoint, "digits", "x.parquet"
    )
    operator = training.load_checkpoint(checkpoint)[1]["operator"]
    other = "adj" if operator != "adj" else "sym"
    assert f"--operator {other}: {checkpoint} was trained with {operator}" in invoke(
        "predict", checkpoint, "digits", "--operator", other, "--out", tmp_path / "x.csv", exit_code=1
    )
    training.save_checkpoint(checkpoint, SPIN(3, 8, 10, 1))
    assert "--operator must be given" in error(checkpoint, "digits", "x.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_predict_has_the_columns_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of nodes mean the same in another set, whichever of them it has."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, labels: list[int]) -> None:
        Path(name).mkdir()
        edges = "".join(f"{2 * g + 1}, {2 * g + 2}\n" for g in range(20))
        Path(name, "X_A.txt").write_text(edges)
        Path(name, "X_graph_indicator.txt").write_text("".join(f"{g + 1}\n" * 2 for g in range(20)))
        Path(name, "X_graph_labels.txt").write_text("1\n-1\n" * 10)
        Path(name, "X_node_labels.txt").write_text("".join(f"{label}\n" for label in labels))

    write("known", [1, 2, 3, 3] * 10)
    write("fewer", [3, 3, 2, 2] * 10)
    write("others", [2, 3, 4, 4] * 10)
    model = facts_of("train", "known/", "--epochs", 1, "--hops", 1)["model"]
    invoke("predict", model, "fewer/")
    net, _ = training.load_checkpoint(model)
    graphs = datasets.load("known/")[[1]]  # 3, 3
    want = training.predict_proba(net, graphs)[0].tolist()
    assert pandas.read_csv("probabilities.csv").iloc[0, 3:].tolist() == pytest.approx(want, rel=1e-5)
    assert "holds labels 2..4, but features only have columns for 1..3" in invoke(
        "predict", model, "others/", exit_code=1
    )


def test_graphs_without_nodes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = facts_of("train", folder_of_graphs(tmp_path / "known", ["a", "b"]), "--epochs", 1, "--hops", 1)["model"]
    folder = folder_of_graphs(tmp_path / "new", ["a", "b"])
    with (folder / "graphs.csv").open("a") as file:
        file.write("TYPO1,a\n")
    said = "1 of 31 graphs has no nodes, it is TYPO1\n"
    result = CliRunner().invoke(app, ["predict", model, "new/", "--out", "p.csv", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["graphs"]) == (0, 31)
    assert said in result.stderr
    assert said in CliRunner().invoke(app, ["train", "new/", "--epochs", "1", "--hops", "1"]).stderr
    assert facts_of("info", "new/")["empty_graphs"] == 1
    with (folder / "graphs.csv").open("a") as file:
        file.write("TYPO2,a\n")
    monkeypatch.setattr(_trained, "CHUNK_GRAPHS", 4)
    result = CliRunner().invoke(app, ["predict", model, "new/", "--out", "p.csv"])
    assert result.stderr.endswith("2 of 32 graphs have no nodes, the first is TYPO1\n")


@pytest.mark.parametrize("out", ["new/edges.csv", "new/../new/graphs.csv", "new/nodes.parquet", "model.csv"])
def test_predict_overwrites_nothing_that_it_reads(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "new", ["a", "b"])
    Path("model.csv").write_bytes(b"a model")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert f"--out {out} " in invoke("predict", "model.csv", "new/", "--out", out, exit_code=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_predict_takes_weights_as_training_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, labels in (("plain", ["a", "b"]), ("weighted", ["a", "b"])):
        folder_of_graphs(tmp_path / name, labels)
    edges = pandas.read_csv("weighted/edges.csv")
    edges.assign(weight=1 + np.arange(len(edges)) % 3).to_csv("weighted/edges.csv", index=False)
    tables = {}
    for known in ("plain", "weighted"):
        model = facts_of("train", f"{known}/", "--epochs", 1, "--hops", 1)["model"]
        for new in ("plain", "weighted"):
            if (known, new) == ("weighted", "plain"):
                error = invoke("predict", model, f"{new}/", exit_code=1)
                assert "plain/ has no edge weights, and the model was trained with them" in error
                continue
            invoke("predict", model, f"{new}/", "--out", "p.csv")
            tables[known, new] = Path("p.csv").read_text()
    assert tables["plain", "weighted"] == tables["plain", "plain"] != tables["weighted", "weighted"]


def test_predict_with_a_checkpoint_made_in_python(tmp_path: Path) -> None:
    """It may say less than that of a command, or other things."""
    model, out = tmp_path / "model.safetensors", ["--out", tmp_path / "deep" / "p.csv"]
    folder = f"{folder_of_graphs(tmp_path / 'new', None, num_graphs=3)}/"
    training.save_checkpoint(model, SPIN(1, 8, 2, 1))
    assert facts_of("predict", model, folder, "--operator", "sym", *out)["predicted"].keys() == {"0", "1"}
    said = CliRunner().invoke(app, ["predict", str(model), folder, "--operator", "sym", *map(str, out)]).stderr
    assert f"{model} does not say how its graphs were read" in said
    for classes in (["a", "b", "c"], ["a", "a"], 2):
        training.save_checkpoint(model, SPIN(1, 8, 2, 1), operator="sym", classes=classes)
        error = invoke("predict", model, folder, *out, exit_code=1)
        assert f"classes of {model} must be 2 different names, one per output, got {classes}" in error
    training.save_checkpoint(model, SPIN(3, 8, 2, 1), operator="sym")
    error = invoke("predict", model, folder, *out, exit_code=1)
    assert f"{folder} has 1 feature(s) per node, and {model} takes 3; node_features=... in save_checkpoint" in error
    training.save_checkpoint(model, SPIN(1, 8, 2, 1), operator="sym", node_features=["mass"])
    for dataset in (folder, "digits"):
        error = invoke("predict", model, dataset, *out, exit_code=1)
        assert f"{dataset} has no such node features as the model was trained on: mass" in error


def test_predict_with_a_model_in_float64(tmp_path: Path) -> None:
    """Features in float64 make one: graphs are read in its dtype, not to be refused by its weights."""
    torch.manual_seed(0)
    model, path, out = SPIN(3, 8, 10, 1).double(), tmp_path / "model.safetensors", tmp_path / "p.csv"
    training.save_checkpoint(path, model, operator="sym")
    invoke("predict", path, "digits", "--out", out)
    expected = training.predict_proba(model, datasets.load("digits", dtype=torch.float64), "sym").numpy()
    assert np.allclose(pandas.read_csv(out)["class_3"], expected[:, 3], rtol=0, atol=1e-6)


def test_predict_tasks_of_graphs_without_labels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"operator": "sym", "classes": None, "node_features": "degree"}
    model = SPIN(1, 8, 2, 1)
    model.multilabel = True
    training.save_checkpoint(tmp_path / "model.safetensors", model, **options)
    folder = folder_of_graphs(tmp_path / "new", None, num_graphs=3)
    said = facts_of("predict", tmp_path / "model.safetensors", folder, "--out", tmp_path / "p.csv")
    assert said["predicted"] is None
    assert list(pandas.read_csv(tmp_path / "p.csv")) == ["graph", "name", "task_0", "task_1"]
