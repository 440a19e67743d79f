"""``spin-fast evaluate``: spaces, folds, files, going on; ``spin-fast train --search``."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pandas
import pytest
from helpers.cli import facts_of, folder_of_graphs, invoke
from typer.testing import CliRunner

from spin_fast import datasets, nn, training
from spin_fast.cli import app
from spin_fast.selection import Evaluation, trials

SPACE = {"num_hops": [0, 1], "hidden_features": [4], "num_layers": [1], "epochs": [2], "batch_size": [400]}


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SPACE))
    return path


def test_files_and_facts(tmp_path: Path, space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["evaluate", "digits", "--space", space, "--folds", 2, "--runs", 2, "--ensemble", 1, "--jobs", 1]
    facts = facts_of(*arguments)
    folder = Path("runs/digits/small")
    found = Evaluation.load(folder / "evaluation.json")
    assert (facts["mean"], facts["std"]) == found.mean_and_std()
    assert facts["scores"] == found.scores()
    assert facts["ensemble_mean"] == found.mean_and_std(ensemble=True)[0]
    assert (facts["dataset"], facts["space"], facts["folds"], facts["settings"]) == ("digits", "small.json", 2, 2)
    assert len(facts["duplicates"]) == 2
    assert facts["unscored"] == [[0, 0], [0, 0]]
    assert found.about["budgets"] == [1, 1, None]
    table = (folder / "evaluation.md").read_text()
    assert table.startswith("# Evaluation: small.json on digits\n")
    assert "count as 0" not in table
    assert table.count("\n| ") == 3
    assert (folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")

    assert "has an evaluation; add --resume" in invoke(*arguments, exit_code=1)
    before = found.folds.pop()
    found.save(folder / "evaluation.json")
    again = facts_of(*arguments, "--resume")
    assert again["scores"] == facts["scores"]
    assert Evaluation.load(folder / "evaluation.json").folds[1].trials[0][:3] == before.trials[0][:3]
    assert "but it has runs: 2, not 1" in invoke(*arguments[:-4], "--runs", 1, "--resume", exit_code=1)


def test_what_diverges_is_marked(tmp_path: Path) -> None:
    space = tmp_path / "far.json"
    space.write_text(json.dumps(SPACE | {"num_hops": [0], "learning_rate": [1e20]}))
    arguments = ["--space", space, "--folds", 2, "--runs", 1, "--jobs", 1, "--out", tmp_path]
    said = facts_of("evaluate", "digits", *arguments)["unscored"]
    assert said == [[899], [898]]
    assert [fold.unscored for fold in Evaluation.load(tmp_path / "evaluation.json").folds] == said
    marked = "- fold 1, run 1: 898 test graphs without a finite score count as 0\n"
    assert marked in (tmp_path / "evaluation.md").read_text()


def test_an_own_folder_and_the_family(tmp_path: Path) -> None:
    folder = folder_of_graphs(tmp_path / "mine", ["ring", "star"])
    out = tmp_path / "out"
    arguments = ["--settings", 1, "--folds", 2, "--runs", 1, "--jobs", 1, "--out", out]
    facts = facts_of("evaluate", f"{folder}/", *arguments)
    assert facts["settings"] == 1
    found = Evaluation.load(out / "evaluation.json")
    assert found.folds[0].trials == []
    assert found.candidates[0]["epochs"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "other"], "--space must be spin, paper-att, paper-sum, or a .json file, got other"),
        (["--space", "none.json"], "none.json cannot be read"),
        (["--space", "paper-sum"], "the paper has settings for DD"),
        (["--folds", 2, "--splits", "x.json"], "--folds 2: the folds are those of --splits x.json"),
        (
            ["--folds", 2, "--ensemble", 9],
            "--ensemble must be at most 8, since the search trains no more of its 64 settings to the end, got 9",
        ),
    ],
)
def test_mistakes(arguments: list[object], message: str, tmp_path: Path) -> None:
    assert message in invoke("evaluate", "digits", *arguments, "--out", tmp_path / "out", exit_code=1)


def test_other_files_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "evaluation.md").write_text("# Mine\n")
    assert "evaluation.md cannot be written" in invoke("evaluate", "digits", "--out", out, exit_code=1)


@pytest.mark.parametrize("ensemble", [0, 2])
def test_train_by_search(tmp_path: Path, ensemble: int) -> None:
    folder, out = folder_of_graphs(tmp_path / "mine", ["ring", "star"]), tmp_path / "out"
    space = tmp_path / "small.json"
    space.write_text(json.dumps(SPACE | {"learning_rate": [1e-1, 1e-2], "epochs": [20], "hidden_features": [2, 4, 8]}))
    (out / "log.csv").parent.mkdir()
    (out / "log.csv").write_text("")
    (out / "result.json").write_text("")
    search = ["--search", "--space", space, "--jobs", 1, "--out", out, "--ensemble", ensemble]
    facts = json.loads(invoke("train", f"{folder}/", *search, "--json"))
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "trials.csv", "result.json"}
    assert facts == json.loads((out / "result.json").read_text())
    assert len(facts["chosen"]) == max(ensemble, 1)
    model, metadata = training.load_checkpoint(out / "model.safetensors")
    assert metadata["test"] == facts["test"]
    assert isinstance(model, nn.Ensemble) == (ensemble > 0)
    rows = pandas.read_csv(out / "trials.csv")
    assert len(rows) == 12 + 4 + 2
    if not ensemble:
        assert rows["validation"][0] == facts["validation"]
    read = datasets.find(f"{folder}/").read().graphs
    test = datasets.find(f"{folder}/").split(read.y).test
    right = training.predict_proba(model, read[test]).argmax(1) == read.y[test]
    assert right.double().mean().item() == facts["test"]
    invoke("train", f"{folder}/", "--epochs", 1, "--out", out)
    assert not (out / "trials.csv").exists()
    search[search.index(out)] = out = tmp_path / "again"
    invoke("train", f"{folder}/", *search)
    table = tmp_path / "p.csv"
    invoke("predict", out / "model.safetensors", f"{folder}/", "--out", table)
    assert set(pandas.read_csv(table)["prediction"]) <= {"ring", "star"}


@pytest.mark.parametrize("command", [["train", "--search"], ["evaluate", "--folds", 2]])
def test_termination_leaves_nothing(command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def terminated(*_: object, **__: object) -> None:
        assert len([*tmp_path.glob("spin_fast-*")]) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    monkeypatch.setattr("spin_fast.selection.trials.run", terminated)
    name, *options = command
    options += ["--settings", 6, "--jobs", 2, "--out", tmp_path / "out"]
    before = signal.getsignal(signal.SIGTERM)
    assert "interrupted" in invoke(name, "digits", *options, exit_code=130)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [*tmp_path.glob("spin_fast-*")] == []


def test_termination_keeps_the_best_model_so_far(tmp_path: Path, space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trials.run

    def terminated(*arguments: Any) -> Iterator[trials.Trial]:
        yield from islice(run(*arguments), 2)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("spin_fast.selection.trials.run", terminated)
    options = ["--search", "--space", space, "--jobs", 1, "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, ["train", "digits", *map(str, options)])
    assert result.exit_code == 143
    assert "interrupted after 2 models: the best of these is kept" in result.stdout
    assert json.loads((tmp_path / "out" / "result.json").read_text())["interrupted"]
    assert len(pandas.read_csv(tmp_path / "out" / "trials.csv")) == 2
    training.load_checkpoint(tmp_path / "out" / "model.safetensors")


def test_going_on_with_another_label(tmp_path: Path, space: Path) -> None:
    folder = folder_of_graphs(tmp_path / "mine", ["ring", "star"])
    table = pandas.read_csv(folder / "graphs.csv")
    table["other"] = table["label"].map({"ring": "star", "star": "ring"})
    table.to_csv(folder / "graphs.csv", index=False)
    splits = tmp_path / "split.json"
    splits.write_text(json.dumps({"train": [*range(10)], "validation": [10, 11], "test": [12, 13]}))
    arguments = ["evaluate", f"{folder}/", "--space", space, "--splits", splits, "--jobs", 1, "--out", tmp_path / "out"]
    invoke(*arguments, "--label", "label")
    assert "it has label: ['label'], not ['other']" in invoke(*arguments, "--label", "other", "--resume", exit_code=1)


def test_options_that_a_search_chooses(tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"]
    assert "--hidden: --search chooses it" in invoke("train", "--search", "--hidden", 8, *out, exit_code=1)
    assert "--resume is of training without --search" in invoke("train", "--search", "--resume", *out, exit_code=1)
    assert "--ensemble is of --search" in invoke("train", "--ensemble", 3, *out, exit_code=1)
