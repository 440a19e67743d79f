"""All commands on graphs of one's own: folders, labels, node features, edges."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers.cli import edges_once, facts_of, folder_of_graphs, invoke

from spin_fast import PowerFeatures, datasets, training
from spin_fast.cli import _trained
from spin_fast.cli._metric import of_class


def test_own_features_of_a_dataset(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    data, run = ["PROTEINS", "--root", data_root], "runs/PROTEINS/model.safetensors"
    options = [*data, "--node-features", "degree", "--hops", 1]
    assert "1 feature(s) per node" in invoke("precompute", *options, "--out", "x.safetensors")
    invoke("train", *options, "--epochs", 1, "--features", "x.safetensors")
    invoke("predict", run, *data)
    assert "preprocessing" not in training.load_checkpoint(run)[1]
    assert training.load_checkpoint(run)[0].config["in_features"] == 1
    assert "choose one of: label" in invoke("train", *data, "--node-features", "nosuch", exit_code=1)


@pytest.mark.parametrize("labels", [["star", "ring"], ["1", "-1"], ["[/]", "[bold]"]])
def test_a_folder_of_your_own(labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "known", labels)
    folder_of_graphs(tmp_path / "new", None, num_graphs=11)
    assert facts_of("info", "./known")["classes"] == [{"name": name, "graphs": 15} for name in sorted(labels)]
    trained = facts_of("train", "known", "--epochs", 15, "--hops", 1)
    assert trained["model"] == "runs/known/model.safetensors"
    edges = datasets.load("known/").num_edges / 30  # not half of them, for who lists each edge once
    assert f"{edges:.2f} directed edges on average" in invoke("precompute", "known", "--hops", 1)
    monkeypatch.setattr(_trained, "CHUNK_GRAPHS", 4)
    said = facts_of("predict", trained["model"], tmp_path / "new", "--out", "p.csv")
    assert (said["dataset"], said["graphs"]) == ("new", 11)
    table = pandas.read_csv("p.csv", dtype={"prediction": str})
    assert list(table) == ["graph", "name", "prediction", *(f"class_{name}" for name in sorted(labels))]
    assert table["graph"].tolist() == list(range(11))
    assert table["name"].tolist() == [f"mol {number}" for number in range(11)]
    assert table["prediction"].tolist() == [labels[number % 2] for number in range(11)]
    assert "1: " in invoke("precompute", "known/", "--hops", 1)
    assert Path("known.safetensors").is_file()
    assert "new has no labels to train by" in invoke("train", "./new", exit_code=1)


def test_words_as_node_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder gets the columns of training, and a word that was not there is an error."""
    monkeypatch.chdir(tmp_path)
    for name, labels in (("known", ["a", "b"]), ("new", ["a", "b"])):
        edges = pandas.read_csv(folder_of_graphs(tmp_path / name, labels) / "edges.csv")
        nodes = edges[["graph", "source"]].drop_duplicates().rename(columns={"source": "node"})
        nodes["element"] = np.where(nodes["node"] == 0, "N" if name == "known" else "C", "C")
        nodes.assign(mass=0.5 * nodes["node"]).to_csv(tmp_path / name / "nodes.csv", index=False)
    model = facts_of("train", "known/", "--epochs", 1, "--hops", 1, "--node-features", "element,mass")["model"]
    metadata = training.load_checkpoint(model)[1]
    assert metadata["node_features"] == [{"column": "mass"}, {"column": "element", "categories": ["C", "N"]}]
    Path("new/graphs.csv").write_text("graph,label\n" + "".join(f"mol {g},{'x' * (g % 2)}\n" for g in range(30)))
    invoke("predict", model, "new/", "--out", "p.csv")  # labels there are nobody's business
    net, _ = training.load_checkpoint(model)
    graphs = datasets.load("new/", features=metadata["node_features"], label=None)
    assert graphs.num_features == 3
    want = training.predict_proba(net, graphs, "sym")
    np.testing.assert_allclose(pandas.read_csv("p.csv").iloc[:, 3:].to_numpy(), want, rtol=1e-5)
    text = Path("new/nodes.csv").read_text()
    Path("new/nodes.csv").write_text(text.replace(",C,", ",Xe,", 1))
    error = invoke("predict", model, "new/", exit_code=1)
    assert "new/nodes.csv, line 2, column 'element' holds 'Xe'" in error
    assert error.endswith("by None among the categories, as --unknown-words does\n")
    invoke("predict", model, "new/", "--unknown-words", "--out", "p.csv")
    elements = {"column": "element", "categories": ["C", None, "N"]}
    graphs = datasets.load("new/", features=["mass", elements], label=None)
    assert graphs.num_features == 3
    want = training.predict_proba(net, graphs, "sym")
    np.testing.assert_allclose(pandas.read_csv("p.csv").iloc[:, 3:].to_numpy(), want, rtol=1e-5)
    assert "must have columns of words" in invoke("predict", model, "digits", "--unknown-words", exit_code=1)
    assert "node features: mass, element (2 words)" in invoke("train", "known/", "--epochs", 1, "--hops", 1)
    assert "mass, element (2 words)" in invoke("info", "known/")
    assert facts_of("info", "known/")["features"]["columns"] == metadata["node_features"]
    mass = {"column": "mass", "categories": "auto"}
    features = facts_of("info", "known/", "--node-features", json.dumps(mass))["features"]
    assert features["parts"] == [{"width": 8, "kind": "one-hot"}]
    both = json.dumps([mass, "element"])
    codes = [{"width": 8, "kind": "one-hot"}, {"width": 2, "kind": "one-hot"}]  # side by side, each by itself
    assert facts_of("info", "known/", "--node-features", both)["features"]["parts"] == codes
    assert "8 one-hot, 2 one-hot" in " ".join(invoke("info", "known/", "--node-features", both).split())
    invoke("info", "known/", "--node-features", '{"column": ', exit_code=2)


def test_labels_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = pandas.read_csv(folder_of_graphs(tmp_path / "known", ["a", "b"]) / "graphs.csv")
    table["toxic"], table["soluble, or not"] = table.index % 2, (table.index % 3 > 0).astype(int)
    table = table.astype({"toxic": "Int64"})
    table.loc[[0, 7], "toxic"] = None
    table.rename(columns={"label": "kind"}).to_csv("known/graphs.csv", index=False)
    assert facts_of("info", "known/")["classes"] is None
    assert "--label names the column that has them" in invoke("train", "known/", exit_code=1)
    facts = facts_of("info", "known/", "--label", "kind")
    assert facts["classes"] == [{"name": "a", "graphs": 15}, {"name": "b", "graphs": 15}]
    assert facts_of("info", "known/", "--label", "")["classes"] is None
    error = invoke("precompute", "known/", "--label", "toxic", exit_code=1)
    assert "line 2, column 'toxic' is empty, and 1 more of 30" in error
    assert 'by --label "toxic,", or read no labels by --label ""' in error
    invoke("precompute", "known/", "--label", "toxic,", "--hops", 1)
    assert PowerFeatures.load("known.safetensors").y.shape == (30, 1)
    both = '["toxic", "soluble, or not"]'
    assert facts_of("info", "known/", "--label", both)["tasks"] == {
        "number": 2,
        "labelled": pytest.approx(58 / 60),
        "names": ["toxic", "soluble, or not"],
    }
    options = ("--epochs", 1, "--hops", 1, "--batch-size", 1)
    assert "30 graphs, 2 task(s) with 58 of 60 labels, " in invoke("train", "known/", "--label", both, *options)
    facts = facts_of("train", "known/", "--label", both, *options)
    error = invoke("train", "known/", "--label", "kind", *options, "--resume", exit_code=1)
    assert "runs/known/state.safetensors is of another run: features.labels=" in error
    model, metadata = facts["model"], training.load_checkpoint(facts["model"])[1]
    assert facts["metric"] == "ROC-AUC"
    assert metadata["task_names"] == ["toxic", "soluble, or not"]
    invoke("predict", model, "known/", "--out", "p.csv")
    predicted = pandas.read_csv("p.csv")
    net, graphs = training.load_checkpoint(model)[0], datasets.load("known/", label=None)
    np.testing.assert_allclose(predicted.iloc[:, 2:].to_numpy(), training.predict_proba(net, graphs), rtol=1e-5)
    assert list(predicted) == ["graph", "name", "task_toxic", "task_soluble, or not"]
    assert predicted.notna().all(axis=None)
    metric = ("--label", "kind", "--epochs", 1, "--hops", 1, "--out", "runs/kind", "--metric")
    names = ("accuracy", "rocauc", "ap")
    assert [facts_of("train", "known/", *metric, name)["metric"] for name in names] == [
        "accuracy",
        "ROC-AUC",
        "AP of b",
    ]
    error = invoke("train", "known/", *metric, "accuracy", "--resume", exit_code=1)
    assert "--metric ap there, --metric accuracy here" in error
    for name in names[1:]:
        error = invoke("train", "--metric", name, exit_code=1)
        assert f"--metric {name} is of two classes, and digits has 10" in error
    assert "--label kind is impossible for digits" in invoke("info", "digits", "--label", "kind", exit_code=1)


@pytest.mark.parametrize("option", ["--undirected", "--label=kind", "--self-loops", "--node-features=degree"])
def test_a_mistyped_folder_is_not_there(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "mols", ["a", "b"])
    (tmp_path / "tu.zip").touch()
    for command in ("train", "info", "precompute"):
        assert "unknown data set 'mosl'" in invoke(command, "mosl", option, exit_code=1)
        assert "unknown data set 'tu.zip'; did you mean ./tu.zip?" in invoke(command, "tu.zip", option, exit_code=1)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--label", "it's", """--label "it's" is impossible for tables, which has no table of graphs"""),
        ("--label", 'it"s', """--label 'it"s' is impossible for"""),
        ("--label", "a, b,it's", """--label "a,b,it's" is impossible for"""),
        ("--label", '["a, b", "it\'s"]', """--label '["a, b", "it\'"'"\'s"]' is impossible for"""),
        ("--label", "[1]", "--label must be a name, several in a list, or None, got [1]"),
        ("--label", "a,a", "--label must be different names, at least one, got ['a', 'a']"),
        (
            "--node-features",
            "it's",
            """--node-features "it's" is impossible for tables, which has no table of nodes""",
        ),
        ("--node-features", "{}", "--node-features must have 'column', a name, and maybe 'categories', got {}"),
        ("--node-features", "[1]", '--node-features must be names or of the form {"column": NAME, ...}, got [1]'),
        ("--node-features", '{"column": "a", "categories": []}', "--node-features must have as 'categories' different"),
    ],
)
def test_names_in_errors_are_as_they_are_typed(
    option: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "tables", None)
    for command in ("info", "train", "precompute"):
        error = invoke(command, "tables/", option, value, exit_code=1)
        assert said in error
        assert error.count("\n") == 1
    if "is impossible" in said:
        typed = shlex.split(re.search(f"{option} (.*) is impossible for", error)[1])
        assert invoke("info", "tables/", option, *typed, exit_code=1) == error  # what is said can be typed


def test_a_label_with_gaps_can_be_read_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("it's", 'it"s', "to xic", "t"):
        folder = folder_of_graphs(tmp_path / name, None)
        names = [f"mol {number}" for number in range(30)]
        pandas.DataFrame({"graph": names, name: [*"01" * 14, "", ""]}).to_csv(folder / "graphs.csv", index=False)
        error = invoke("info", folder, "--label", name, exit_code=1)
        typed = shlex.split(re.search("missing labels by (--label .*), or read no labels", error)[1])
        assert facts_of("info", folder, *typed)["tasks"]["names"] == [name]


def test_one_class_cannot_be_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of_graphs(tmp_path / "one", ["a", "a"])
    for command in ("train", "evaluate"):
        assert "one/ must have at least two classes to learn, got one" in invoke(command, "one/", exit_code=1)
    assert not Path("runs").exists()


def test_the_class_of_average_precision_is_said(capsys: pytest.CaptureFixture) -> None:
    y = torch.tensor([0, 1, 1])
    assert of_class("AP", ["active", "inactive"], y) == "AP of inactive"
    assert "AP is of inactive, which 67% of the graphs are; of active it is where" in capsys.readouterr().err
    assert of_class("AP", ["active", "inactive"], 1 - y) == "AP of inactive"
    assert of_class("ROC-AUC", ["active", "inactive"], y) == "ROC-AUC"
    assert capsys.readouterr().err == ""


def test_edges_that_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--undirected`` all is as with both directions, and nothing is silently directed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    monkeypatch.setenv("COLUMNS", "200")
    labels = ["a, b", "c"]
    folder_of_graphs(tmp_path / "both", labels)
    folder_of_graphs(tmp_path / "new", None, num_graphs=5)
    edges_once(folder_of_graphs(tmp_path / "once", labels))
    edges_once(folder_of_graphs(tmp_path / "new_once", None, num_graphs=5))
    hint = "directed{} if each edge is listed once, for both directions, add --undirected"
    small = ["--epochs", 1, "--hops", 1, "--layers", 1]
    assert hint.format(":") in invoke("train", "once/", *small)
    assert hint.format(";") in invoke("info", "once/")
    assert "--undirected" not in invoke("info", "both/") + invoke("info", "once/", "--undirected")
    assert facts_of("info", "once/", "--undirected") == facts_of("info", "both/") | {"dataset": "once"}
    model = facts_of("train", "once/", "--undirected", *small)["model"]
    other = facts_of("train", "both/", *small)["model"]
    assert training.load_checkpoint(model)[1]["edge_options"] == {"undirected": True}

    def predicted(model: str, folder: str, *options: str) -> str:
        invoke("predict", model, folder, *options, "--out", "p.csv")
        return Path("p.csv").read_text()

    want = predicted(other, "new/")
    assert '"class_a, b"' in want
    assert predicted(model, "new_once/") == want
    assert predicted(model, "new/", "--no-undirected") == predicted(other, "new_once/", "--undirected") == want
    assert "add --no-undirected where its reverse is listed too" in invoke("predict", model, "new/", exit_code=1)
    assert "add --undirected if each edge is listed once" in invoke("predict", other, "new_once/", exit_code=1)
    assert predicted(other, "new_once/", "--no-undirected") != want
    for command in ("train", "info", "precompute"):
        error = invoke(command, "both/", "--undirected", exit_code=1)
        assert "--undirected: both/ lists each edge in both directions already" in error
        edges = Path("both/edges.csv").read_text()
        Path("both/edges.csv").write_text(edges[: edges[:-1].rindex("\n") + 1])  # one reverse is missing
        assert "lists each edge in both directions already" in invoke(command, "both/", "--undirected", exit_code=1)
        Path("both/edges.csv").write_text(edges)
        for option in ("--undirected", "--coalesce=sum", "--no-self-loops", "--self-loops"):
            error = invoke(command, "digits", option, exit_code=1)
            assert f"{option.replace('=', ' ')} is impossible for digits" in error


def test_repeated_edges_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that ``--coalesce`` makes are none of the files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    for name in ("plain", "weighted"):
        folder_of_graphs(tmp_path / name, ["star", "ring"])
        edges = pandas.read_csv(f"{name}/edges.csv")
        edges = pandas.concat([edges, edges[:20]])
        edges = edges.assign(weight=1 + np.arange(len(edges)) % 3) if name == "weighted" else edges
        edges.to_csv(f"{name}/edges.csv", index=False)
    small = ["--epochs", 1, "--hops", 1, "--layers", 1, "--coalesce", "sum", "--no-self-loops"]
    metadata, tables = {}, {}
    for known in ("plain", "weighted"):
        model = facts_of("train", f"{known}/", *small)["model"]
        metadata[known] = training.load_checkpoint(model)[1]
        assert metadata[known]["edge_options"] == {"coalesce": "sum", "self_loops": False}
        if known == "weighted":
            assert "plain/ has no edge weights" in invoke("predict", model, "plain/", exit_code=1)
        for new in ("plain", "weighted")[known == "weighted" :]:
            invoke("predict", model, f"{new}/", "--out", "p.csv")
            tables[known, new] = Path("p.csv").read_text()
    assert (metadata["plain"]["weighted"], metadata["weighted"]["weighted"]) == (False, True)
    assert tables["plain", "plain"] == tables["plain", "weighted"] != tables["weighted", "weighted"]
    assert "trained with --coalesce sum --no-self-loops" in invoke("predict", model, "digits", exit_code=1)


def test_features_that_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spin_fast.plots.training_curve", lambda *_, **options: None)  # the slowest part
    monkeypatch.setenv("COLUMNS", "200")
    Path("X").mkdir()
    for part, text in (
        ("A", "".join(f"{2 * g + 1}, {2 * g + 2}\n{2 * g + 2}, {2 * g + 1}\n" for g in range(20))),
        ("graph_indicator", "".join(f"{g + 1}\n" * 2 for g in range(20))),
        ("graph_labels", "1\n-1\n" * 10),
        ("node_labels", "0\n1\n1\n" * 13 + "0\n"),
        ("node_attributes", "0.5\n" * 40),
    ):
        Path("X", f"X_{part}.txt").write_text(text)
    for choice, unused, hint in (
        (None, ["attribute"], "node attributes, which --node-features attribute+label uses"),
        ("degree", ["label", "attribute"], None),
        ("attribute+label", [], None),
    ):
        options = ["X/", *([] if choice is None else ["--node-features", choice])]
        assert facts_of("info", *options)["features"]["unused"] == unused
        for command in (["info"], ["precompute"], ["train", "--epochs", 1, "--hops", 0]):
            stdout = invoke(*command, *options)
            assert ("uses" in stdout) == (hint is not None)
            assert hint is None or hint in stdout


def test_own_features_of_a_list(tmp_path: Path) -> None:
    """Predict reads a .nel file as train did."""
    graph = "n 1 1\nn 2 2\ne 1 2 1\nx {}\n"
    (tmp_path / "L.nel").write_text("".join(graph.format(g % 2) for g in range(20)))
    options = ["L", "--root", tmp_path]
    model = facts_of("train", *options, "--node-features", "degree", "--epochs", 1, "--out", tmp_path / "run")["model"]
    assert facts_of("predict", model, *options, "--out", tmp_path / "p.csv")["graphs"] == 20
