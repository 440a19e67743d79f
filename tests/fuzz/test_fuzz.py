"""Some random cases of each kind, those that once failed, and that a wrong result is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import cases, oracle

HERE = Path(__file__).parent
CORPUS = [line.split(maxsplit=2)[:2] for line in (HERE / "corpus.txt").read_text().splitlines()]


@pytest.mark.parametrize("name", cases.CASES)
def test_random_cases(name: str) -> None:
    for number in range(20):
        cases.run(name, number)


@pytest.mark.parametrize(
    ("name", "loops"),
    [
        ("power_features", "powers"),
        ("readout", "readout"),
        ("step", "branch_readout"),
        ("branch", "branch_readout"),
        ("prediction", "branch_readout"),
    ],
)
def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, loops: str) -> None:
    right = getattr(oracle, loops)

    def wrong(*of: Any) -> Any:
        found = right(*of)
        return (found[0] * 1.001, *found[1:]) if isinstance(found, tuple) else found * 1.001

    monkeypatch.setattr(oracle, loops, wrong)
    with pytest.raises(AssertionError):
        test_random_cases(name)


@pytest.mark.parametrize("name", ["kept_files", "tu_files", "own_tables", "own_graphml", "own_parquet"])
def test_some_damaged_files_can_be_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Else a case would make files that are refused for another reason than their damage."""
    read, right = [], cases.survives
    monkeypatch.setattr(cases, "survives", lambda call: read.append(right(call)) or read[-1])
    for number in range(100):
        cases.run(name, number)
    assert sum(found is not None for found in read) >= 5


@pytest.mark.parametrize(("name", "number"), CORPUS)
def test_what_once_failed(name: str, number: str) -> None:
    cases.run(name, int(number))


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "fuzz", *arguments]
    # Not in the source folder, where spin_fast/ would hide what is installed.
    return subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_minute() -> None:
    result = fuzz("--seconds", "60", "--seed", "1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.long
def test_a_million_calls() -> None:
    result = fuzz("--seconds", "1e9", "--calls", "1000000", "--seed", "2")
    assert result.returncode == 0, result.stdout + result.stderr
