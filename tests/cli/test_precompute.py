"""``spin-fast precompute``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers.cli import facts_of, folder_of_graphs, invoke

from spin_fast import PowerFeatures, datasets, training
from spin_fast.cli import precompute
from spin_fast.datasets import registry
from spin_fast.features import shards


def test_precompute_and_train_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = invoke("precompute", "digits", "--hops", 1)
    assert "1797/1797" in stdout
    assert "0: 71.1x  1: 1.04x" in stdout
    made = PowerFeatures.load("digits.safetensors")
    assert (len(made), made.num_hops, made.operator) == (1797, 1, "sym")
    assert made.row_of_node is not None
    lines = []
    for options in (["--features", "digits.safetensors"], ["--hops", 1, "--no-standardize"]):
        stdout = invoke("train", "--epochs", 2, "--out", tmp_path / str(len(lines)), *options)
        assert ("not standardised, which train without --features does" in stdout) == ("--features" in options)
        lines.append([line.split() for line in stdout.splitlines() if "accuracy" in line])
    assert lines[0] == lines[1] != []


def test_precompute_in_files_of_bounded_size(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, options = tmp_path / "deep" / "n.safetensors", ["--root", data_root, "--operator", "sym+adj", "--hops", 2]
    stdout = invoke("precompute", "PROTEINS", *options, "--shard-size", "300KB", "--out", out)
    files = sorted(out.parent.glob("n~*-of-*.safetensors"))
    assert len(files) > 3
    assert f"{files[0].name} to {files[-1].name}" in " ".join(stdout.split())
    assert all(file.stat().st_size <= 300_000 for file in files)
    assert sum(len(PowerFeatures.load(file)) for file in files) == 1113
    whole = PowerFeatures.from_graphs(datasets.load("PROTEINS", data_root), 2, "sym+adj")
    assert torch.equal(PowerFeatures.load(out).dense_rows(), whole.dense_rows())
    options = ["--features", out, "--root", data_root, "--epochs", 1, "--dropout", 0.1, "--out", tmp_path / "run"]
    shares = shards.load(out).deduplication
    assert shares == pytest.approx(
        [43471 / sum(len(PowerFeatures.load(file).branch_rows()[0][branch]) for file in files) for branch in range(3)]
    )
    assert f"0: {shares[0]:.3g}x" in invoke("train", "PROTEINS", *options)
    assert training.load_checkpoint(tmp_path / "run" / "model.safetensors")[1]["operator"] == "sym+adj"


def test_shards_below_the_largest_graph(tmp_path: Path) -> None:
    """A size is one that files keep to, or an error that names the smallest."""
    out = tmp_path / "x.safetensors"
    error = invoke(
        "precompute", folder_of_graphs(tmp_path / "own", None), "--out", out, "--shard-size", 10, exit_code=1
    )
    needed = int(re.search("--shard-size must be at least ([0-9,]+) bytes", error)[1].replace(",", ""))
    assert not list(tmp_path.glob("x*"))
    files = facts_of("precompute", tmp_path / "own", "--out", out, "--shard-size", needed)["files"]
    assert len(files) > 1
    assert all(Path(file).stat().st_size <= needed for file in files)


def test_precompute_finds_errors_before_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry.Known, "read", lambda *_, **options: pytest.fail("read before the place was found bad")
    )
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "x", ""), (tmp_path / "x.json", ".json")):
        error = invoke("precompute", "digits", "--out", place, exit_code=1)
        assert str(place) in error
        assert reason in error
    for size in ("many", "3XB", "-1GB", "0"):
        assert "must be a size such as 500MB" in " ".join(
            invoke("precompute", "digits", "--shard-size", size, exit_code=2).replace("│", "").split()
        )
    monkeypatch.undo()
    assert "unknown data set 'nosuch'" in invoke("precompute", "nosuch", "--out", tmp_path / "x", exit_code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("500kb", 500_000), ("3MiB", 3 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert precompute._bytes(text) == size
