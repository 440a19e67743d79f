"""What README and guides show of measurements and of the files, against these."""

from __future__ import annotations

import importlib.util
import json
import re
from decimal import Decimal

import pytest
from helpers import ROOT, benchmark_module

RESULTS = ROOT / "benchmarks" / "results" / "training" / "results.json"
RACES = {  # of the CPU
    "AVX2": ROOT / "benchmarks" / "results" / "avx2" / "training" / "results.json",
    "AVX-512": ROOT / "benchmarks" / "results" / "avx512" / "training" / "results.json",
    "AVX-512, single graphs": ROOT / "benchmarks" / "results" / "avx512" / "single-graphs" / "results.json",
}
pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="no benchmarks/results: this is not a checkout")

EPOCH, PREDICTION = "training epoch, batches of 128", "prediction, precomputation included"
ONE_BY_ONE = "prediction, 64 graphs one by one"
GIN, TUNED = r"GIN edge_index, DataLoader", r"GIN .*, collated.*"
ROWS = {  # of README's table: the CPU, the case, and the rivals of which the fastest counts
    "GIN of PyG, DataLoader": ("AVX2", EPOCH, GIN),
    "GCN of PyG, DataLoader": ("AVX2", EPOCH, r"GCN edge_index, DataLoader"),
    "GIN, tuned: collated once, CSR or `torch.compile`": ("AVX2", EPOCH, TUNED),
    "SPIN in vectorised PyTorch": ("AVX2", EPOCH, r"SPIN-att, vectorised PyTorch"),
    "class probabilities from graphs: GIN of PyG": ("AVX2", PREDICTION, GIN),
    "AVX-512: GIN of PyG, DataLoader": ("AVX-512", EPOCH, GIN),
    "AVX-512: GIN, tuned": ("AVX-512", EPOCH, TUNED),
    "AVX-512: class probabilities from graphs: GIN of PyG": ("AVX-512", PREDICTION, GIN),
    "AVX-512: the same, a graph a call": (
        "AVX-512, single graphs",
        ONE_BY_ONE,
        r"GIN edge_index, collated in the call",
    ),
}
LONG_NAMES = {"IMDB-M": "IMDB-MULTI", "IMDB-B": "IMDB-BINARY", "REDDIT-B": "REDDIT-BINARY", "molhiv": "ogbg-molhiv"}


def test_readme_has_the_committed_ratios() -> None:
    races = {
        (cpu, race["case"], race["input"]): race
        for cpu, file in RACES.items()
        for race in json.loads(file.read_text())["races"]
        if race["threads"] == 1
    }
    lines = [line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if line[:1] == "|"]
    inputs = lines[0]
    table = {row[0]: row[1:] for row in lines if len(row) == len(inputs) + 1}
    assert table.keys() == ROWS.keys()
    for row, (cpu, case, rivals) in ROWS.items():
        for name, shown in zip(inputs, table[row], strict=True):
            ratios = races[cpu, case, LONG_NAMES.get(name, name)]["ratios"]
            ratio = min(ratios[rival]["median"] for rival in ratios if re.fullmatch(rivals, rival))
            half = 0.5 * 10 ** Decimal(shown).as_tuple().exponent
            assert abs(float(shown) - ratio) <= 1.01 * half, f"{row}, {name}: {shown}, but {ratio:.4g}"


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
