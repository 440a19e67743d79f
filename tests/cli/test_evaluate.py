"""``spin-fast evaluate``: spaces, folds, files, going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli import facts_of, folder_of_graphs, invoke

from spin_fast.selection import Evaluation

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
    assert found.about["budgets"] == [1, 1, None]
    table = (folder / "evaluation.md").read_text()
    assert table.startswith("# Evaluation: small.json on digits\n")
    assert table.count("\n| ") == 3
    assert (folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")

    assert "has an evaluation; add --resume" in invoke(*arguments, exit_code=1)
    before = found.folds.pop()
    found.save(folder / "evaluation.json")
    again = facts_of(*arguments, "--resume")
    assert again["scores"] == facts["scores"]
    assert Evaluation.load(folder / "evaluation.json").folds[1].trials[0][:3] == before.trials[0][:3]
    assert "but it has runs: 2, not 1" in invoke(*arguments[:-4], "--runs", 1, "--resume", exit_code=1)


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
        (["--folds", 2, "--ensemble", 9], "ensemble must be at most 8"),
    ],
)
def test_mistakes(arguments: list[object], message: str, tmp_path: Path) -> None:
    assert message in invoke("evaluate", "digits", *arguments, "--out", tmp_path / "out", exit_code=1)


def test_other_files_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "evaluation.md").write_text("# Mine\n")
    assert "evaluation.md cannot be written" in invoke("evaluate", "digits", "--out", out, exit_code=1)
