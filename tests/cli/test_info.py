"""``spin-fast info``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.cli import facts_of, invoke, small_set

from spin_fast.datasets import registry


def test_info_without_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIN_FAST_DATA", str(tmp_path))
    (tmp_path / "MINE.nel").touch()
    assert json.loads(invoke("info", "--json"))["datasets"][-1] == "MINE"
    assert "MINE" in invoke("info")


def test_info_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(registry.Missing, "read", lambda *_, **options: small_set(torch.tensor([0, 1, 1])))
    facts = facts_of("info", "small", "--hops", 2)
    assert facts["nodes"] == {"total": 9, "mean": 3, "median": 3, "min": 3, "max": 3}
    assert facts["edges"]["total"] == 2 * 7 + 1  # each edge, as they are directed; the repeated one once
    assert facts["density"] == {"mean": pytest.approx(13 / 18), "median": 1, "min": pytest.approx(1 / 6), "max": 1}
    assert (facts["isolated_nodes"], facts["self_loops"], facts["repeated_edges"]) == (1, 2, 1)
    assert (facts["directed"], facts["weighted"]) == (True, False)
    assert facts["features"] == {
        "width": 3,
        "dtype": "float32",
        "parts": [{"width": 1, "kind": "constant"}, {"width": 2, "kind": "one-hot"}],
        "columns": None,
        "unused": [],
    }
    assert facts["classes"] == [{"name": "no", "graphs": 1}, {"name": "yes", "graphs": 2}]
    assert facts["bytes"]["powers"] == 3 * 9 * 3 * 4
    assert facts["duplicates"] == {
        "graphs": 2,
        "distinct": 2,
        "contradicting": 2,
        "best_accuracy": pytest.approx(2 / 3),
    }
    assert facts["splits"] == []
    assert "10 graphs per class" in facts["splits_missing"]
    shown = invoke("info", "small")
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])
    for row in ("directed", "1 constant, 2 one-hot (float32)", "no:1  yes:2", "66.6667 %, 2 of all 3 graphs"):
        assert row in shown.replace("\u2502\n\u2502", " ") or row in " ".join(shown.replace("\u2502", " ").split())


def test_info_of_features(tmp_path: Path) -> None:
    path = tmp_path / "digits.safetensors"
    invoke("precompute", "digits", "--hops", 1, "--operator", "rw", "--out", path)
    facts = json.loads(invoke("info", path, "--json"))
    keys = ("graphs", "nodes", "labels", "columns", "dtype", "node_features", "operator", "hops", "files")
    assert [facts[key] for key in keys] == [1797, 58736, [1797], 3, "float32", None, "rw", 1, 1]
    assert "58,736" in invoke("info", path)
    invoke("precompute", "digits", "--hops", 1, "--operator", "rw", "--out", path, "--shards", 2)
    of_all = [json.loads(invoke("info", name, "--json")) for name in (path, f"{path}.index.json")]
    for sharded in of_all:
        assert [sharded[key] for key in keys[:-1]] == [facts[key] for key in keys[:-1]]
        assert sharded["files"] == 2
    path.with_name(f"{path.name}.index.json").write_text('{"format": "spin_fast features-index 1"}')
    assert "digits.safetensors.index.json" in invoke("info", path, exit_code=1)


@pytest.mark.parametrize(
    ("name", "expected", "isolated", "bound"),
    [("PROTEINS", (1113, 39.06, 72.82), 5, 1110 / 1113), ("IMDB-MULTI", (1500, 13.00, 65.94), 0, 949 / 1500)],
)
def test_info_on_real_data(name: str, expected: tuple, isolated: int, bound: float, data_root: Path) -> None:
    facts = facts_of("info", name, "--root", data_root)
    assert (facts["graphs"], round(facts["nodes"]["mean"], 2), round(facts["edges"]["mean"], 2)) == expected
    assert (facts["isolated_nodes"], facts["directed"]) == (isolated, False)
    assert facts["duplicates"]["best_accuracy"] == pytest.approx(bound, abs=2e-3)
    assert len(facts["splits"]) in (1, 11)  # the folds are not everywhere
    assert facts["bytes"]["features"] < facts["bytes"]["powers"]
    several = facts_of(
        "info", name, "--root", data_root, "--operator", "sym,adj", "--hops", 1, "--node-features", "degree"
    )
    assert (several["features"]["parts"], len(several["deduplication"])) == ([{"width": 1, "kind": "degree"}], 3)
    assert several["bytes"]["powers"] == 3 * facts["nodes"]["total"] * 4


def test_info_of_unusual_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = float("nan")
    for y, contradicting in (
        (torch.tensor([[0.0, nan], [nan, 1], [1, 1]]), 0),
        (torch.tensor([[0.0, 1], [0, 0], [1, nan]]), 2),
        (None, None),
    ):
        monkeypatch.setattr(registry.Missing, "read", lambda *_, y=y, **options: small_set(y, weight=True))
        facts = facts_of("info", "small")
        assert facts["duplicates"]["contradicting"] == contradicting
        assert facts["duplicates"]["best_accuracy"] is None
        assert facts["weighted"]
        assert (facts["tasks"] is None) == (y is None)
        assert ("no split" in invoke("info", "small")) == (facts["splits_missing"] is not None)
    assert facts["splits_missing"] == "there are no labels"
