"""The programs that compare accuracies: a run of each kind, going on; and that what is quoted is what was run."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT, benchmark_module
from torch.nn import functional as F

from spin_fast import GraphBatch, NodeFeatures, datasets
from spin_fast.datasets import NodeDataset, Split

RESULTS = ROOT / "benchmarks" / "results"
committed = pytest.mark.skipif(not RESULTS.is_dir(), reason="no results beside the tests: this is not a checkout")


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch):
    module = benchmark_module("studies.ablations")
    for settings in (module.NODES, module.LINKS, module.GRAPHS):
        monkeypatch.setitem(settings, "epochs", 30)
    return module


def communities(size: int = 20) -> NodeDataset:
    """Two rings with chords, whose nodes have their class as feature."""
    node = torch.arange(size)
    ring = torch.cat([torch.stack([node, (node + step) % size]) for step in (1, 2, 3)], dim=1)
    edges = torch.cat([ring, ring + size], dim=1)
    y = torch.arange(2 * size) // size
    graphs = GraphBatch.from_edge_index(edges, F.one_hot(y).float(), undirected=True)
    return NodeDataset(graphs, y, Split(*torch.arange(2 * size).view(-1, 4).t()[:3]))


def test_regular_graphs_need_features_that_tell_nodes_apart(studies) -> None:
    pytest.importorskip("torch_geometric")
    graphs = datasets.csl(11, (2, 3), graphs_per_class=10)
    assert graphs.y is not None
    split = datasets.find("CSL").split(graphs.y)
    for readout in studies.READOUTS:
        alike = studies.classify_graphs(graphs, split, 0, readout=readout, operator="sym,adj")
        assert alike["test"] == alike["validation"] == 0.5  # all graphs get one class
    told = studies.classify_graphs(studies.with_walks(graphs, 6), split, 0)
    assert told["test"] == told["validation"] == 1
    assert 1 <= told["best_epoch"] <= 30


def test_node_features_are_fitted_on_the_training_graphs(studies) -> None:
    graphs = datasets.erdos_renyi(40, 6, p=(0.2, 0.7))
    assert graphs.y is not None
    node_features = NodeFeatures("one-hot")
    split = datasets.find("erdos-renyi").split(graphs.y)
    run = studies.classify_graphs(graphs, split, 1, readout="attention", node_features=node_features)
    assert 0 <= run["test"] <= 1
    assert node_features.max_degree_ == int(graphs[split.train].degree.max())


def test_nodes_and_links(studies) -> None:
    pytest.importorskip("torch_geometric")
    graph = communities()
    assert studies.classify_nodes(graph, 1, seed=0)["test"] == 1
    links = studies.predict_links(graph, 1, seed=0)
    assert links == studies.predict_links(graph, 1, seed=0)
    assert links["test"] > 0.6
    assert links["best_epoch"] % 5 == 0


def test_runs_are_kept(tmp_path: Path) -> None:
    study = benchmark_module("studies.study")
    file, done = tmp_path / "new" / "study.json", []

    def run(key: str) -> dict[str, Any]:
        if key == "b/1" and "a/0" not in done:
            done.append("a/0")
            raise KeyboardInterrupt
        done.append(key)
        return {"test": 0.5, "validation": 0.25}

    runs = {key: partial(run, key) for key in ("b/0", "b/1", "a/1")}
    with pytest.raises(KeyboardInterrupt):
        study.complete(file, {"width": 1}, runs)
    assert list(json.loads(file.read_text())["runs"]) == ["b/0"]
    assert list(study.complete(file, {"width": 1}, dict(reversed(runs.items())))) == ["a/1", "b/1", "b/0"]
    assert done == ["b/0", "a/0", "a/1", "b/1"]
    (path,) = file.parent.iterdir()
    assert path == file
    with pytest.raises(study.OtherSettings, match="made with other settings"):
        study.complete(file, {"width": 2}, runs)


def test_tables() -> None:
    study = benchmark_module("studies.study")
    tests = {"A/x/0": 0.5, "A/x/1": 0.7, "A/y/0": 1.0, "B/x/0": 0.25}
    done = {key: {"test": test, "validation": 0.5} for key, test in tests.items()}
    columns = {"s": {("A", "x"): "1", ("A", "y"): "2", ("B", "x"): ""}}
    of = study.Study("t", "", ("input", "model"), {}, dict, "AUC", columns=lambda _: columns)
    table = study.table(of, done)
    assert table.headers == ("input", "model", "test AUC, %", "validation, %", "s", "seeds")
    assert table.blocks == [
        [("A", "x", "60.0 ± 14.1", "50.0", "1", "2"), ("", "y", "100.0 ± 0.0", "50.0", "2", "1")],
        [("B", "x", "25.0 ± 0.0", "50.0", "", "1")],
    ]


def test_program(studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def runs(root: str | None) -> dict[str, Any]:
        return {
            f"G/{at}/{line}/{seed}": lambda: {"test": 0.5, "validation": 1.0}
            for at in "12"
            for line in "uv"
            for seed in "01"
        }

    study = studies.Study("Of: G", "A note.", ("input", "at", "line"), {"width": 3}, runs)
    monkeypatch.setattr(studies, "STUDIES", {"one": study, "other": study._replace(title="Other", plotted=False)})
    monkeypatch.setattr(sys, "argv", ["studies", "--results", str(tmp_path)])
    studies.main()
    assert {path.name for path in tmp_path.iterdir()} == {"of-g.png", "one.json", "other.json", "studies.md"}
    written = (tmp_path / "studies.md").read_text()
    assert "- Of: G. A note. Width 3.\n" in written
    assert "### Of: G\n\n[plot](of-g.png)\n\n| input | at | line | test accuracy, % |" in written
    assert "| G | 1 | u | 50.0 ± 0.0 | 100.0 | 2 |" in written
    assert "studies.md" in capsys.readouterr().out
    monkeypatch.setattr(studies, "STUDIES", {"one": study._replace(settings={"width": 4})})
    with pytest.raises(SystemExit):
        studies.main()
    assert "other settings" in capsys.readouterr().err


QUOTED = {
    "docs/guide/nodes-and-links.md": [
        *(f"nodes/Cora/{hops}/PAGNN" for hops in (0, 1, 2, 3, 5)),
        "links/Cora/2/LinkPredictor",
    ],
    "docs/guide/how-it-works.md": ["choices/CSL/degree, walks/sym/sum"],
    "docs/measured.md": [
        *(f"choices/NCI1/labels/sym/{readout}" for readout in ("sum", "attention", "size-aware attention")),
        "choices/NCI1/labels/sym,adj/sum",
        *(
            f"attributes/ENZYMES/{kind}/{readout}"
            for kind in ("as they are", "standardised")
            for readout in ("sum", "attention")
        ),
        *(f"choices/IMDB-BINARY/{degree} degree/sym/sum" for degree in ("raw", "log", "one-hot", "profile")),
        *(
            f"accuracy/{name}/{model}"
            for name in ("PROTEINS", "NCI1", "IMDB-BINARY")
            for model in ("SPIN-att", "SPIN-sum", "SPIN-sum, joint rows", "GIN")
        ),
    ],
    "README.md": [f"accuracy/NCI1/{model}" for model in ("SPIN-sum", "SPIN-sum, joint rows", "GIN")],
}
"""The runs whose figures a page shows."""


@committed
def test_what_is_quoted_was_run() -> None:
    """Tables are those of the runs beside them, and the pages have the figures of the tables."""
    pytest.importorskip("torch_geometric")
    of, report = benchmark_module("studies.study"), benchmark_module("harness.report")
    studies, accuracy = benchmark_module("studies.ablations"), benchmark_module("studies.accuracy")

    def kept(study: Any, folder: str, name: str, written: str) -> dict[str, Any]:
        """The scores of a study, whose table is in ``written``."""
        found = json.loads((RESULTS / folder / f"{name}.json").read_text())
        assert found["settings"] == study.settings
        assert list(found["runs"]) == list(study.runs(None))
        session = report.Session(counted=[of.table(study, found["runs"])])
        from_title_on = report.markdown(session, report.machine()).split("\n\n", 1)[1]
        assert from_title_on in (RESULTS / folder / written).read_text()
        return found["runs"]

    figures: dict[str, str] = {}

    def enter(name: str, done: dict[str, Any]) -> None:
        for words, group in of.by_words(done).items():
            figures["/".join((name, *words))] = of.percent(scores["test"] for scores in group)

    enter("accuracy", kept(accuracy.study_of(accuracy.DATASETS), "accuracy", "accuracy", "accuracy.md"))
    for name, study in studies.STUDIES.items():
        done = kept(study, "studies", name, "studies.md")
        assert not study.plotted or (RESULTS / "studies" / report.plot_name(study.title)).is_file()
        enter(name, done)
    for page, names in QUOTED.items():
        text = " ".join((ROOT / page).read_text().split())
        for name in names:
            assert figures[name] in text, f"{page} has not {figures[name]} of {name}"
