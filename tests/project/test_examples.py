"""The scripts in examples/ run, and print a result that they could not have guessed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DATA, ROOT

SLOW = ("cross_validation", "ray_predict", "torch_loop")
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
pytestmark = pytest.mark.skipif(not EXAMPLES, reason="no examples beside the tests: this is not a checkout")
SET = "IMDB-BINARY"


def run(script: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    threads = {"OMP_NUM_THREADS": "1"}  # beside other processes of pytest -n
    environment = os.environ | threads | {"SPIN_FAST_DATA": str(DATA.absolute())}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in EXAMPLES],
    ids=lambda script: script.stem,
)
def test_example(script: Path, tmp_path: Path) -> None:
    if script.stem == "cross_validation" and not (DATA / f"{SET}.zip").is_file():
        pytest.skip(f"no {SET}.zip in {DATA}")
    if script.stem == "ray_predict":
        pytest.importorskip("ray.data")
    assert len(script.read_text().splitlines()) < 60
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    percent = re.search(r"(\d+\.\d)%", done.stdout.splitlines()[-1])
    assert percent is not None, done.stdout
    assert float(percent[1]) > 60
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_is_missing(tmp_path: Path) -> None:
    done = run(ROOT / "examples" / "cross_validation.py", tmp_path, "MUTAG", "--root", str(tmp_path))
    assert done.returncode == 1
    assert "MUTAG" in done.stderr
    assert "--download" in done.stderr
    assert "Traceback" not in done.stderr
