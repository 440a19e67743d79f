"""Which library and which instruction set run, and what is said where none does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spin_fast


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=Path(__file__).parent,  # not the checkout: its folder spin_fast would hide the installed package
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SHOW = "import spin_fast; i = spin_fast.build_info(); print(i['native'], i.get('isa'), i.get('reason'))"
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "spin_fast._C":
            raise {error}
sys.meta_path.insert(0, Hide())
"""

CUDA_KERNELS = """
import ctypes, os, runpy
from pathlib import Path
import torch, spin_fast
os.environ.setdefault("CXX", "c++")
for folder in runpy.run_path({setup!r})["CudaLibrary"].torch_with_cuda(Path({folder!r})):
    ctypes.CDLL(folder + "/libtorch_cuda.so")
torch.ops.load_library({library!r})
for key in ("CPU", "CUDA"):
    ops = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    print(key, *sorted(op for op in ops if op.startswith("spin_fast::")))
"""


def test_build_info(native) -> None:
    info = spin_fast.build_info()
    assert spin_fast.native_available()
    assert info["isa"] in info["isa_available"]
    assert info["isa_available"][0] == "baseline"
    assert info["built_for_torch"] == "2.10"


def test_every_op_has_a_cuda_kernel(native, tmp_path: Path) -> None:
    """In the installed library, loaded without a GPU."""
    setup = Path(__file__).parents[1] / "setup.py"
    library = next(Path(spin_fast.__file__).parent.glob("_C_cuda*.so"), None)
    if library is None:
        assert os.environ.get("SPIN_FAST_CUDA") != "1", "SPIN_FAST_CUDA=1, but what is installed has no _C_cuda"
        pytest.skip("this installation was built without CUDA")
    if not setup.is_file():
        pytest.skip("no setup.py beside the tests: this is not a checkout")
    result = run(CUDA_KERNELS.format(setup=str(setup), folder=str(tmp_path), library=str(library)))
    assert result.returncode == 0, result.stderr
    (_, *on_cpu), (_, *on_cuda) = (line.split() for line in result.stdout.splitlines()[-2:])
    assert on_cpu
    assert set(on_cuda) == set(on_cpu)


def test_isa_can_be_chosen(native) -> None:
    for isa in native.isa_available():
        assert run(SHOW, SPIN_FAST_ISA=isa).stdout.split()[:2] == ["True", isa]


def test_unknown_isa_and_backend_are_clear_errors(native) -> None:
    result = run("import spin_fast", SPIN_FAST_ISA="avx9")
    assert result.returncode != 0
    assert "ValueError: SPIN_FAST_ISA: must be one of baseline, avx2, avx512, got 'avx9'" in result.stderr
    result = run("import spin_fast", SPIN_FAST_BACKEND="cuda")
    assert "ValueError: SPIN_FAST_BACKEND must be one of native, reference, got 'cuda'" in result.stderr
    with pytest.raises(ValueError, match="must be one of baseline, avx2, avx512"):
        native.set_isa("sse")


def test_reference_backend_by_choice_is_silent() -> None:
    result = run(SHOW, SPIN_FAST_BACKEND="reference")
    assert result.stdout.split() == ["False", "None", "SPIN_FAST_BACKEND=reference"]
    assert result.stderr == ""


def test_missing_library_is_reported_once_and_the_reference_takes_over() -> None:
    error = 'ModuleNotFoundError("No module named spin_fast._C", name=name)'
    code = HIDE.format(error=error) + (
        "import torch, spin_fast\n"
        "for _ in range(3):\n"
        "    print(spin_fast.sum_readout(torch.ones(4, 2), torch.tensor([0, 1, 4])).tolist())\n"
    )
    result = run(code)
    assert result.stdout.splitlines() == ["[[1.0, 1.0], [3.0, 3.0]]"] * 3
    assert result.stderr.count("RuntimeWarning") == 1
    assert "has no compiled library" in result.stderr
    assert "Reinstall with a C++ compiler" in result.stderr or "Run from another folder" in result.stderr
    assert "SPIN_FAST_BACKEND=reference" in result.stderr


def test_library_that_does_not_load_is_reported_with_the_reason() -> None:
    result = run(HIDE.format(error='ImportError("libtorch.so: undefined symbol: torch_parallel_for")') + SHOW)
    assert result.stdout.startswith("False None the compiled library does not load: libtorch.so: undefined symbol")
    assert result.stderr.count("RuntimeWarning") == 1
    assert "Reinstall spin_fast against this torch" in result.stderr


CUDA = """
import importlib.machinery, sys, torch
torch.version.cuda = "13.0"
class Find:
    def find_spec(self, name, path=None, target=None):
        if name == "spin_fast._C_cuda":
            return importlib.machinery.ModuleSpec(name, None, origin={origin!r})
sys.meta_path.insert(0, Find())
import spin_fast
from spin_fast import _native
info = spin_fast.build_info()
print(info["cuda"], spin_fast.native_available("cuda:1"), info.get("cuda_reason"), sep="|")
"""
USE = "print('imported', file=sys.stderr)\nfor _ in range(3): _native.wants_cuda()"


def test_torch_without_cuda_has_no_cuda_kernels() -> None:
    info = spin_fast.build_info()
    assert info["cuda"] == spin_fast.native_available("cuda") == ("cuda_reason" not in info)
    assert not spin_fast.native_available("meta")
    if torch.version.cuda is None:
        assert "has no CUDA" in info["cuda_reason"] or not spin_fast.native_available()


@pytest.mark.parametrize(
    ("origin", "reason", "mend"),
    [
        (None, "this installation has no CUDA kernels (spin_fast/_C_cuda)", "Reinstall with the CUDA toolkit"),
        (__file__, f"the library of the CUDA kernels does not load: {__file__}: ", "Reinstall spin_fast against this"),
    ],
)
def test_missing_cuda_kernels_are_reported_when_first_wanted(
    native, origin: str | None, reason: str, mend: str
) -> None:
    result = run(CUDA.format(origin=origin) + USE)
    assert result.stdout.startswith(f"False|False|{reason}")
    at_import, when_used = result.stderr.split("imported\n")
    assert at_import == ""
    assert when_used.count("RuntimeWarning") == 1
    assert reason in when_used
    assert mend in when_used
    assert run(CUDA.format(origin=origin) + USE, SPIN_FAST_BACKEND="reference").stderr == "imported\n"


def test_library_of_cuda_kernels_is_loaded(native) -> None:
    (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.so")  # any library: what matters is what is said
    result = run(CUDA.format(origin=str(library)) + USE)
    assert result.stdout.strip() == "True|True|None"
    assert result.stderr == "imported\n"


def test_import_leaves_the_gpu_alone() -> None:
    """So that a process may fork after it."""
    assert run("import torch, spin_fast; print(torch.cuda.is_initialized())").stdout.strip() == "False"


def test_import_is_light() -> None:
    heavy = ("pandas", "scipy", "sklearn", "ogb", "torch_geometric", "matplotlib", "rich", "typer", "safetensors")
    heavy += ("dgl", "networkx")
    result = run(f"import sys, spin_fast; print([name for name in {heavy} if name in sys.modules])")
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["_C", "_C_cuda"])
def test_libraries_keep_to_the_stable_abi(native, name: str) -> None:
    """One binary for torch 2.10 and all that is newer; the audit knows in which release each symbol appeared."""
    pytest.importorskip("torch_abi_audit", reason="torch-abi-audit is not installed (it needs Python 3.11)")
    library = next(Path(spin_fast.__file__).parent.glob(f"{name}.*so"), None)
    if library is None:
        pytest.skip(f"this installation has no {name}")
    command = [Path(sys.executable).parent / "torch-abi-audit", "--json", "--check", "torch", library]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    (found,) = [part["torch"] for part in report["extensions"] + report["bundled_libs"]]
    assert found["uses_torch"]
    assert found["stable"], found["unstable_symbols"]
    assert not found["unknown_shim_symbols"]
    assert found["min_torch_version"] == spin_fast.build_info()["built_for_torch"] + ".0"
