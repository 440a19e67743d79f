"""``spin-fast explain``."""

from __future__ import annotations

import gzip
from pathlib import Path

import networkx
import numpy as np
import pandas
import pytest
import torch
from helpers.cli import facts_of, folder_of_graphs, invoke

from spin_fast import SPIN, datasets, training
from spin_fast._common import files
from spin_fast.nn import Ensemble, SubtreeLinear

HOPS = ["within_0_hops", "within_1_hop"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a model of digits."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    training.save_checkpoint("model.safetensors", SPIN(3, 8, 10, 1, attention=False), operator="sym")
    return tmp_path


def test_explain(place: Path) -> None:
    facts = facts_of("explain", "model.safetensors", "digits", "--graph", 7, "--out", "deep/x.png")
    explained = training.explain(training.load_checkpoint("model.safetensors")[0], datasets.load("digits")[[7]])
    table = pandas.read_csv("deep/x.csv")
    assert list(table) == ["node", "total", *HOPS]
    np.testing.assert_allclose(table[HOPS].to_numpy().T, explained.contributions)
    np.testing.assert_allclose(table["total"], explained.totals)
    assert table["node"].tolist() == list(range(len(table)))
    assert facts["score"] == float(explained.scores)
    assert facts["sum"] == pytest.approx(facts["score"] - facts["constant"])
    assert sum(facts["branches"].values()) == pytest.approx(facts["sum"])
    assert table["total"].sum() == pytest.approx(facts["sum"])
    assert (facts["graph"], facts["name"], facts["nodes"]) == (7, None, len(table))
    assert facts["target"] == str(int(explained.targets))
    assert [item["node"] for item in facts["top"]] == table["total"].abs().nlargest(10).index.tolist()
    assert Path("deep/x.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path("deep").iterdir()) == ["x.csv", "x.png"]


def test_explain_tells_and_draws_the_same_again(place: Path) -> None:
    command = ["explain", "model.safetensors", "digits", "--graph", 0, "--class", 3, "--out", "x.svg"]
    shown = invoke(*command)
    drawn, table = Path("x.svg").read_bytes(), Path("x.csv").read_bytes()
    for text in (
        "digits, graph 0: class 3, probability",
        "constant",
        "neighbourhoods within 1 hop",
        "of node",
        "others",
    ):
        assert text in shown
    assert invoke(*command) == shown
    assert (Path("x.svg").read_bytes(), Path("x.csv").read_bytes()) == (drawn, table)


@pytest.mark.parametrize("branches", ["hops", "both"])
def test_attention(branches: str, place: Path) -> None:
    model = SPIN(1, 8, 2, 1, branches=branches, num_operators=2)
    training.save_checkpoint("own.safetensors", model, operator="sym,adj", classes=["no", "yes"])
    folder_of_graphs(place / "new", None)
    facts = facts_of("explain", "own.safetensors", "new/", "--graph", "mol 4", "--class", "yes")
    assert (facts["graph"], facts["name"], facts["target"]) == (4, "mol 4", "yes")
    table = pandas.read_csv("explanation.csv")
    names = ["within_0_hops", "within_1_hop_by_sym", "within_1_hop_by_adj"]
    names += ["within_1_hop_joint"] if branches == "both" else []
    assert list(table) == ["node", "name", "total", *names, *(f"attention_{name}" for name in names)]
    np.testing.assert_allclose(table[[f"attention_{name}" for name in names]].sum(), 1, rtol=1e-6)
    assert Path("explanation.png").stat().st_size > 1000


def test_an_ensemble(place: Path) -> None:
    linear = SubtreeLinear(3, 10, 64, num_hops=0, num_columns=64)
    torch.nn.init.normal_(linear.weight)
    members = [SPIN(3, 8, 10, 1), linear, SPIN(3, 8, 10, 0, attention=False)]
    members[0].operator = members[2].operator = "sym"
    training.save_checkpoint("several.safetensors", Ensemble(members))
    command = ["explain", "several.safetensors", "digits", "--graph", 7, "--out", "x.png"]
    facts = facts_of(*command)
    graph, model = datasets.load("digits")[[7]], training.load_checkpoint("several.safetensors")[0]
    explained, probabilities = training.explain(model, graph), training.predict_proba(model, graph)[0]
    assert facts["quantity"] == "probability"
    assert facts["score"] == facts["probability"] == pytest.approx(float(probabilities.max()))
    assert facts["target"] == str(int(probabilities.argmax()))
    table = pandas.read_csv("x.csv")
    names = [f"member_1_{name}" for name in HOPS] + ["member_2_within_0_hops", "member_3_within_0_hops"]
    assert list(table) == ["node", "total", *names, *(f"attention_{name}" for name in names[:2])]
    np.testing.assert_allclose(table[names].to_numpy().T, explained.contributions)
    assert facts["constant"] + table["total"].sum() == pytest.approx(facts["probability"])
    assert [*facts["branches"]] == names
    shown = invoke(*command)  # over the files that are there
    assert "by member 3" in shown
    assert "digits, graph 7: class" in shown


@pytest.mark.parametrize("kind", ["tables", "graphml"])
def test_nodes_have_their_names(kind: str, place: Path) -> None:
    training.save_checkpoint("own.safetensors", SPIN(1, 8, 2, 1), operator="sym")
    Path("new").mkdir()
    if kind == "tables":  # names may repeat in other graphs, and come in any order
        Path("new/edges.csv").write_text("graph,source,target\nwater,O,H1\nbleach,Cl,O\nwater,O,H2\n")
    else:
        for name, edges in {"bleach": [("Cl", "O")], "water": [("O", "H1"), ("O", "H2")]}.items():
            networkx.write_graphml(networkx.Graph(edges), f"new/{name}.graphml")
    command = ["explain", "own.safetensors", "new/", "--graph", "water", "--undirected", "--out", "x.svg"]
    facts = facts_of(*command)
    table = pandas.read_csv("x.csv")
    assert table["name"].tolist() == ["O", "H1", "H2"]
    assert {item["node"]: item["name"] for item in facts["top"]} == dict(enumerate(table["name"]))
    shown = invoke(*command)  # over the table that is there
    assert "neighbourhoods of node 0, O" in shown
    assert all(name in Path("x.svg").read_text() for name in ("<!-- O -->", "<!-- H1 -->", "<!-- H2 -->"))


def test_names_are_no_markup(place: Path) -> None:
    training.save_checkpoint("own.safetensors", SPIN(1, 8, 2, 1), operator="sym")
    Path("new").mkdir()
    Path("new/edges.csv").write_text("graph,source,target\na$^$,[/b],[e]\na$^$,[e],$^$\n")
    shown = invoke("explain", "own.safetensors", "new/", "--graph", "a$^$", "--undirected", "--out", "x.svg")
    assert all(f"node {node}, {name}" in shown for node, name in enumerate(("[/b]", "[e]", "$^$")))
    assert "<!-- $^$ -->" in Path("x.svg").read_text()


def test_a_name_goes_before_a_number(place: Path) -> None:
    training.save_checkpoint("own.safetensors", SPIN(1, 8, 2, 1), operator="sym")
    folder_of_graphs(place / "new", None, num_graphs=4)
    names = {"mol 0": "2", "mol 1": "x", "mol 2": "y", "mol 3": "z"}
    edges = pandas.read_csv("new/edges.csv")
    edges.assign(graph=edges["graph"].map(names)).to_csv("new/edges.csv", index=False)
    for wanted, number, name in (("2", 0, "2"), ("1", 1, "x"), ("z", 3, "z")):
        facts = facts_of("explain", "own.safetensors", "new/", "--graph", wanted)
        assert (facts["graph"], facts["name"]) == (number, name)


def test_tasks_must_be_named(place: Path) -> None:
    model = SPIN(1, 8, 2, 1)
    model.multilabel = True
    training.save_checkpoint("own.safetensors", model, operator="sym", task_names=["toxic", "active"])
    folder_of_graphs(place / "new", None)
    command = ["explain", "own.safetensors", "new/", "--graph", 0]
    assert "--task must be given, one of toxic, active" in invoke(*command, exit_code=1)
    assert "--task must be one of toxic, active, got b" in invoke(*command, "--task", "b", exit_code=1)
    assert facts_of(*command, "--task", "active")["target"] == "active"


def test_explain_names_what_is_wrong(place: Path) -> None:
    def error(*options: object, dataset: str = "digits") -> str:
        return invoke("explain", "model.safetensors", dataset, *options, exit_code=1)

    assert "--graph must be one of 0 to 1796, the graphs of digits, got 1797" in error("--graph", 1797)
    assert "--graph must be one of 0 to 1796" in error("--graph", -1)
    assert "--class must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, got x" in error("--graph", 0, "--class", "x")
    assert "--out must end with .png or .svg, got x.pdf" in error("--graph", 0, "--out", "x.pdf")
    assert "erdos-renyi has 50 feature(s) per node" in error("--graph", 0, dataset="erdos-renyi")
    Path("x.csv").write_text("node,mass\n")
    assert "x.csv cannot be written: there is a file of another kind" in error("--graph", 0, "--out", "x.png")
    folder_of_graphs(place / "new", None)
    Path("new/graphs.csv").write_text("graph\nmol 0\nnothing\n")
    Path("new/edges.csv").write_text("graph,source,target\nmol 0,1,2\n")
    training.save_checkpoint("model.safetensors", SPIN(1, 8, 2, 1), operator="sym")
    assert "--graph nothing: it has no nodes" in error("--graph", "nothing", dataset="new/")
    assert sorted(path.name for path in place.iterdir()) == ["model.safetensors", "new", "x.csv"]


def test_a_picture_that_fails_leaves_no_table(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["explain", "model.safetensors", "digits", "--graph", 0, "--out", "new/x.png"]
    invoke(*command)
    before = [Path(f"new/x.{suffix}").read_bytes() for suffix in ("png", "csv")]

    def fails(path: Path, *_: object, **__: object) -> None:
        Path(path).write_bytes(b"half of it")
        with (
            pytest.raises(BlockingIOError, match=r"x\.csv is being written"),
            files.locked(Path("new/x.csv"), is_file=True),
        ):
            pass
        raise OSError("the disk is full")

    monkeypatch.setattr("spin_fast.plots.explained_graph", fails)
    command[4] = 1
    assert "new/x.png cannot be written: the disk is full" in invoke(*command, exit_code=1)
    assert [Path(f"new/x.{suffix}").read_bytes() for suffix in ("png", "csv")] == before
    assert len([*Path("new").iterdir()]) == 2
    with files.locked(Path("new/x.csv"), is_file=True):
        assert "new/x.csv is being written by process" in invoke(*command, exit_code=1)


def test_molecules_have_smiles(tmp_path: Path) -> None:
    (tmp_path / "ogbg_molx" / "raw").mkdir(parents=True)
    source = datasets.find("ogbg-molx", tmp_path)
    assert source.smiles(0) is None
    (tmp_path / "ogbg_molx" / "mapping").mkdir()
    with gzip.open(tmp_path / "ogbg_molx" / "mapping" / "mol.csv.gz", "wt") as file:
        file.write('y,smiles,mol_id\n0,CCO,a\n1,"C,N",b\n')
    assert [source.smiles(graph) for graph in range(3)] == ["CCO", "C,N", None]
    assert datasets.find("digits").smiles(0) is None
