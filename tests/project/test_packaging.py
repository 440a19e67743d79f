"""Wheels and sdist: built, installed into a fresh virtual environment, imported and run there."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from helpers import ROOT

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


@pytest.fixture(autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """They build in one folder."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "wheel.lock"):
        yield


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


def build_wheel(folder: Path, sources: Path = ROOT, **environment: str) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, sources, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run_in_fresh_environment(wheel: Path, folder: Path, code: str, **environment: str) -> str:
    """Install the wheel alone; its dependencies are lent by the environment that runs the tests."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--quiet", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(lent) + "\n")
    output = run(python, "-c", code, cwd=folder, **environment)
    assert str(site) in output.splitlines()[0]
    return output


def test_native_wheel(tmp_path: Path) -> None:
    """Without CUDA, also where an earlier build had it; what is installed is tested with it, in test_native.py."""
    left = ROOT / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "spin_fast"
    left.mkdir(parents=True, exist_ok=True)
    (left / f"_C_cuda{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    wheel = build_wheel(tmp_path / "wheel", SPIN_FAST_CUDA="0")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("spin_fast/_C.") for name in names)
    assert not any(name.startswith("spin_fast/_C_cuda") for name in names)
    assert "spin_fast/py.typed" in names
    assert {"spin_fast/benchmarks/rivals/gnn.py", "spin_fast/benchmarks/harness/floors.c"} <= set(names)
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


def test_sdist_compiles_and_tests_itself_elsewhere(tmp_path: Path) -> None:
    """Without nvcc, and without optimisation, which takes a fifth of the time."""
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=ROOT, SPIN_FAST_NATIVE="0")
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    sources = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert sorted(path.name for path in sources.glob("csrc/*/*")) == sorted(path.name for path in ROOT.glob("csrc/*/*"))
    wheel = build_wheel(tmp_path / "wheel", sources, SPIN_FAST_CUDA="0", CXXFLAGS="-O0")
    output = run_in_fresh_environment(wheel, tmp_path / "venv", RUN)
    assert "'native': True" in output
    options = ["-c", sources / "pyproject.toml", "-n", "0", "-p", "no:cacheprovider", "-k", "not cuda"]
    run(tmp_path / "venv/bin/python", "-m", "pytest", *options, sources / "tests/features", cwd=tmp_path)


def test_flags_reach_the_compiler(tmp_path: Path) -> None:
    """Also by way of ninja; one that makes it stop at once."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path]
    environment = os.environ | {"SPIN_FAST_CUDA": "0", "CXXFLAGS": "-include 'no such/header.h'"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "no such/header.h: No such file" in result.stdout + result.stderr


def refused(**environment: str) -> str:
    """What setup.py says."""
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    return result.stderr


def test_no_compiler_is_one_clear_message() -> None:
    said = refused(CXX="/nowhere/g++")
    assert "no C++ compiler found" in said
    assert "apt install g++" in said
    assert "SPIN_FAST_NATIVE=0" in said


def test_windows_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match=r"Install in WSL.* SPIN_FAST_NATIVE=0"):
        setup["require_compiler"]()


def test_no_cuda_compiler_is_one_clear_message() -> None:
    said = refused(SPIN_FAST_CUDA="1", CUDA_HOME="/nowhere")
    assert "SPIN_FAST_CUDA=1, but no nvcc found (looked in /nowhere/bin)" in said
    assert "leave SPIN_FAST_CUDA out" in said


def test_wrong_architecture_is_named(tmp_path: Path) -> None:
    """Before anything is compiled."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    said = refused(SPIN_FAST_CUDA="1", CUDA_HOME=str(tmp_path), TORCH_CUDA_ARCH_LIST="9.0;sm_80")
    assert "TORCH_CUDA_ARCH_LIST must list numbers such as 8.0;9.0+PTX, got 'sm_80'" in said


def test_older_toolkit_compiles_for_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'compute_80\\ncompute_90\\n'\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    flags = runpy.run_path(str(ROOT / "setup.py"))["architecture_flags"](str(nvcc))
    assert [flag.split(",code=")[1] for flag in flags] == ["sm_80", "sm_90", "compute_90"]


@pytest.mark.parametrize("name", ["SPIN_FAST_NATIVE", "SPIN_FAST_CUDA"])
def test_wrong_flag_is_named(name: str) -> None:
    assert f"{name} must be 0 or 1, got 'maybe'" in refused(**{name: "maybe"})
