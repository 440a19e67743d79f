"""The wheel: built, installed into a fresh virtual environment, imported and run there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = """
import torch, spin_fast
print(spin_fast.__file__)
print(spin_fast.build_info())
from spin_fast import datasets
features = spin_fast.PowerFeatures.from_graphs(datasets.load("digits")[:20], 2)
print(spin_fast.SPIN(3, 8, 10, 2)(features).shape)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "setup.py").is_file(), reason="no setup.py beside the tests: this is not a checkout"
    ),
]


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    result = subprocess.run(
        list(map(str, command)),
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def build_wheel(folder: Path, **environment: str) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run_in_fresh_environment(wheel: Path, folder: Path, code: str, **environment: str) -> str:
    """Install the wheel alone; its dependencies are lent by the environment that runs the tests."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--quiet", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    output = run(python, "-c", code, cwd=folder, **environment)
    assert str(site) in output.splitlines()[0]
    return output


def test_native_wheel(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("spin_fast/_C.") for name in names)
    assert "spin_fast/py.typed" in names
    assert {"spin_fast/benchmarks/rivals.py", "spin_fast/benchmarks/floors.c"} <= set(names)
    assert not any(name.startswith(("tests/", "csrc/")) for name in names)
    output = run_in_fresh_environment(wheel, tmp_path / "venv", RUN)
    assert "'native': True" in output
    assert "torch.Size([20, 10])" in output


def test_pure_python_wheel(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel", SPIN_FAST_NATIVE="0")
    assert wheel.name.endswith("py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    output = run_in_fresh_environment(wheel, tmp_path / "venv", RUN)
    assert "'native': False" in output
    assert "torch.Size([20, 10])" in output
    assert output.count("RuntimeWarning") == 1


def test_no_compiler_is_one_clear_message() -> None:
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=os.environ | {"CXX": "/nowhere/g++"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert "no C++ compiler found" in result.stderr
    assert "apt install g++" in result.stderr
    assert "SPIN_FAST_NATIVE=0" in result.stderr


def test_wrong_flag_is_named() -> None:
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=os.environ | {"SPIN_FAST_NATIVE": "maybe"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "SPIN_FAST_NATIVE must be 0 or 1, got 'maybe'" in result.stderr
