"""No call takes more instructions than when its number was committed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import DATA, ROOT, benchmark_module

FILE = ROOT / "benchmarks" / "results" / "instructions" / "instructions.json"
COMMITTED = json.loads(FILE.read_text()) if FILE.exists() else {"instructions": {}}
ALLOWED = 1.05


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}: put the public files there or set SPIN_FAST_DATA")
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "ENZYMES" else pytest.mark.long)
        for name in COMMITTED["instructions"]
    ],
)
def test_no_call_takes_more_instructions(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # another process imports what is installed, not this folder
    module = benchmark_module("studies.instructions")
    if (built := module.built_with()) != COMMITTED["built_with"]:
        pytest.skip(f"counted with {COMMITTED['built_with']}, here is {built}")
    found, before = module.counted(dataset, str(DATA)), COMMITTED["instructions"][dataset]
    ratios = {name: found[name] / number for name, number in before.items()}
    assert max(ratios.values()) <= ALLOWED, ratios
