"""The races, as somebody runs them who has only the package: which there are, and what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import benchmark_module, run_benchmarks


def races(folder: Path, *options: str) -> set[str]:
    """The names of those that these options choose."""
    result = run_benchmarks(folder, "", "--datasets", "digits", "--collect-only", "-q", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    return {line for line in result.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_what_a_visitor_gets(tmp_path: Path) -> None:
    """The operations, an epoch and prediction; few enough for five minutes. The rest is for --full."""
    pytest.importorskip("torch_geometric")
    names = ["test_power_features", "test_readout", "test_training_epoch", "test_prediction"]
    by_default, full = races(tmp_path), races(tmp_path, "--full")
    assert by_default < full
    assert len(by_default) <= 20
    assert all(any(name in race for race in by_default) for name in names)
    assert not any(name in race for race in by_default for name in ("test_edges", "test_one_large_graph"))


@pytest.mark.slow
def test_results_replace_nothing_of_others(tmp_path: Path) -> None:
    file, others, own = tmp_path / "file", tmp_path / "others", tmp_path / "own"
    file.write_text("mine")
    for folder, content in ((others, {"races": []}), (own, {"machine": {}, "notes": [], "races": []})):
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(content))
    for folder, wrong in ((file, "must be a folder"), (others, "must be a new folder"), (own, "")):
        result = run_benchmarks(tmp_path, "", "--datasets", "digits", "--collect-only", "-q", "--results", str(folder))
        assert result.returncode == (4 if wrong else 0), result.stdout + result.stderr
        assert f"--results {folder} {wrong}" in result.stderr or not wrong


def test_results_that_cannot_be_written_leave_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = benchmark_module("harness.report")
    report.write(report.Session(), report.machine(), tmp_path, plots=False)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    write = Path.write_text

    def half(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="the disk is full"):
        report.write(report.Session(notes=["new"]), report.machine(), tmp_path, plots=False)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before
    report.check_folder(tmp_path)


@pytest.mark.slow
def test_without_torch_geometric(tmp_path: Path) -> None:
    """A table for each race that there is, and how to get the others."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch_geometric'] = None\n")
    options = ["--quick", "--rounds", "1", "-k", "(tiny and sum_readout) or prediction"]
    result = run_benchmarks(tmp_path, "", *options, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    live, summary = result.stdout.split("\nsummary")
    assert "[1/1] 1 graph of 30 nodes, 1 thread: sum_readout" in live
    assert "1 graph of 30 nodes, 1 thread: sum_readout" in summary
    for said in (live, summary):
        assert "pip install torch-geometric" in " ".join(said.split())
