"""What README and guides show of measurements and of the files, against these."""

from __future__ import annotations

import importlib.util
import re

import pytest
from helpers import ROOT, benchmark_module

RESULTS = ROOT / "benchmarks" / "results" / "training" / "results.json"

pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="no benchmarks/results: this is not a checkout")


def test_the_tables_of_speed_are_of_the_committed_races(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = benchmark_module("studies.measured")
    monkeypatch.setattr(measured, "RESULTS", RESULTS.parent.parent)
    for page in ("docs/measured.md", "README.md"):
        text = (ROOT / page).read_text()
        again = "python -m spin_fast.benchmarks.studies.measured writes it anew"
        assert text.count("<!-- table: ") >= 1
        assert text == measured.with_tables(text), f"{page}: {again}"


def test_the_plot_is_of_the_committed_times() -> None:
    spec = importlib.util.spec_from_file_location("edges", ROOT / "docs" / "edges.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "edges.svg").read_text() == module.drawn(), "python docs/edges.py draws it anew"


@pytest.mark.slow
def test_the_tables_are_of_the_committed_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = benchmark_module("studies.tables")
    monkeypatch.setattr(tables, "TABLES", RESULTS.parent.parent / "tables")
    found = tables.evaluations()
    written = "python -m spin_fast.benchmarks.studies.tables writes it anew"
    assert (tables.TABLES / "tables.md").read_text() == tables.page(found), written
    assert tables.summary(found) in (ROOT / "README.md").read_text()


def test_the_life_of_a_step_names_files_that_are_there() -> None:
    page = (ROOT / "docs" / "guide" / "life-of-a-step.md").read_text()
    named = re.findall(r"`((?:\w+/)?\w+\.(?:py|cpp|cu|h|inl))`", page)
    assert len(named) > 20
    places = [ROOT / "spin_fast", ROOT / "csrc", ROOT / "csrc" / "cpu"]
    missing = {name for name in named if not any((place / name).is_file() for place in places)}
    assert not missing
    picture = (ROOT / "docs" / "life-of-a-step.svg").read_text()
    for names in re.findall(r'class="file">(.*?)<', picture):
        for name in names.split():
            places = [ROOT / "spin_fast", ROOT / "csrc" / "cpu", ROOT / "csrc" / "cuda"]
            assert any((place / name).is_file() for place in places), f"life-of-a-step.svg names {name}"
