"""Which library and which instruction set run, and what is said where none does."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import cuda_kernels
import pytest
import torch
from helpers import ISAS, ROOT

import spin_fast
from spin_fast import ops


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
    assert info["isa_available"][0] == ISAS[0]
    assert info["built_for_torch"] == "2.10"


def test_every_op_has_a_cuda_kernel(native, tmp_path: Path) -> None:
    """In the installed library, loaded without a GPU."""
    setup = ROOT / "setup.py"
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
    assert set(on_cpu) == {*on_cuda, "spin_fast::training_steps"}  # a GPU plays back what has been captured


@pytest.mark.slow
def test_isa_can_be_chosen(native) -> None:
    for isa in native.isa_available():
        assert run(SHOW, SPIN_FAST_ISA=isa).stdout.split()[:2] == ["True", isa]


def test_unknown_isa_and_backend_are_clear_errors(native) -> None:
    result = run("import spin_fast", SPIN_FAST_ISA="avx9")
    assert result.returncode != 0
    assert f"ValueError: SPIN_FAST_ISA: must be one of {', '.join(ISAS)}, got 'avx9'" in result.stderr
    result = run("import spin_fast", SPIN_FAST_BACKEND="cuda")
    assert "ValueError: SPIN_FAST_BACKEND must be one of native, reference, got 'cuda'" in result.stderr
    with pytest.raises(ValueError, match=f"must be one of {', '.join(ISAS)}"):
        native.set_isa("sse")


@pytest.mark.slow
def test_reference_backend_by_choice_is_silent() -> None:
    result = run(SHOW, SPIN_FAST_BACKEND="reference")
    assert result.stdout.split() == ["False", "None", "SPIN_FAST_BACKEND=reference"]
    assert result.stderr == ""


@pytest.mark.slow
def test_what_is_set_to_nothing_is_unset() -> None:
    assert run(SHOW, SPIN_FAST_BACKEND="", SPIN_FAST_ISA="").stdout == run(SHOW).stdout


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


@pytest.mark.slow
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
from spin_fast.ops import native as native_module
info = spin_fast.build_info()
print(info["cuda"], spin_fast.native_available("cuda:1"), info.get("cuda_reason"), sep="|")
"""
USE = "print('imported', file=sys.stderr)\nfor _ in range(3): native_module.wants_cuda()"


def test_torch_without_cuda_has_no_cuda_kernels() -> None:
    info = spin_fast.build_info()
    assert info["cuda"] == spin_fast.native_available("cuda") == ("cuda_reason" not in info)
    assert not spin_fast.native_available("meta")
    if torch.version.cuda is None:
        assert "has no CUDA" in info["cuda_reason"] or not spin_fast.native_available()


@pytest.mark.slow
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


@pytest.mark.slow
def test_library_of_cuda_kernels_is_loaded(native) -> None:
    (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.so")  # any library: what matters is what is said
    result = run(CUDA.format(origin=str(library)) + USE)
    assert result.stdout.strip() == "True|True|None"
    assert result.stderr == "imported\n"


@pytest.mark.slow
def test_import_leaves_the_gpu_alone() -> None:
    """So that a process may fork after it."""
    assert run("import torch, spin_fast; print(torch.cuda.is_initialized())").stdout.strip() == "False"


def test_import_is_light() -> None:
    heavy = ("pandas", "scipy", "sklearn", "ogb", "torch_geometric", "matplotlib", "rich", "typer", "safetensors")
    heavy += ("dgl", "networkx", "torch._dynamo", "sympy")
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


IDS, WIDTHS, PTR = torch.tensor([0, 1]), [4, 2], torch.tensor([0, 2, 3])
RAW = {
    "power_features": {
        "indptr": torch.tensor([0, 1, 2, 2]),
        "indices": torch.tensor([1, 0]),
        "x": torch.ones(3, 5),
        "num_hops": 2,
        "operator": "sym",
        "ptr": PTR,
        "edge_weight": torch.ones(2),
        "check_invariants": True,
        "float64_sums": False,
    },
    "power_features_backward": {
        "indptr": torch.tensor([0, 1, 2, 2]),
        "indices": torch.tensor([1, 0]),
        "grad": torch.ones(3, 3, 5),
        "operator": "sym",
        "ptr": PTR,
        "edge_weight": None,
        "check_invariants": True,
    },
    "sum_readout": {
        "z": torch.ones(3, 4),
        "ptr": PTR,
        "index": None,
        "count": None,
        "num_branches": 1,
        "shared": False,
        "check_invariants": True,
    },
    "sum_readout_backward": {
        "grad": torch.ones(2, 4),
        "ptr": PTR,
        "index": None,
        "count": None,
        "num_branches": 1,
        "num_rows": 3,
        "shared": False,
        "check_invariants": True,
    },
    "attention_readout": {
        "z": torch.ones(3, 4),
        "w": torch.ones(4),
        "ptr": PTR,
        "index": torch.tensor([0, 1, 1]),
        "count": torch.ones(3, dtype=torch.int32),
        "shared": False,
        "check_invariants": True,
    },
    "attention_readout_backward": {
        "grad": torch.ones(2, 4),
        "grad_alpha": torch.ones(3),
        "z": torch.ones(3, 4),
        "w": torch.ones(4),
        "ptr": PTR,
        "index": torch.tensor([0, 1, 1]),
        "count": torch.ones(3, dtype=torch.int32),
        "readout": torch.ones(2, 4),
        "alpha": torch.ones(3),
        "shared": False,
        "check_invariants": True,
    },
    "branch_readout": {
        "rows": torch.ones(3, 5),
        "crow_indices": None,
        "col_indices": None,
        "num_features": 5,
        "parameters": torch.zeros(24 + 10 + 2),
        "parts": None,
        "ptr": PTR,
        "index": None,
        "count": None,
        "ids": IDS,
        "num_branches": 1,
        "widths": WIDTHS,
        "attention": True,
        "negative_slope": 0.01,
        "tf32": False,
        "shared": False,
        "check_invariants": True,
    },
    "branch_readout_backward": {
        "grad": torch.ones(2, 2),
        "rows": torch.ones(3, 5),
        "crow_indices": None,
        "col_indices": None,
        "num_features": 5,
        "parameters": torch.zeros(44 + 10 + 2),
        "parts": torch.tensor([[0, 1], [2, 2]]),
        "ptr": PTR,
        "index": torch.tensor([0, 1, 1]),
        "count": torch.ones(3, dtype=torch.int32),
        "ids": IDS,
        "num_branches": 1,
        "widths": WIDTHS,
        "attention": True,
        "negative_slope": 0.01,
        "tf32": False,
        "shared": False,
        "check_invariants": True,
        "with_rows": True,
    },
    "training_step": {
        "rows": torch.ones(3, 5),
        "crow_indices": None,
        "col_indices": None,
        "num_features": 5,
        "parameters": torch.zeros(24 + 10 + 2 + 44 + 10 + 2 + 10),
        "labels": torch.tensor([0, 1]),
        "class_weight": torch.ones(2),
        "ptr": PTR,
        "index": None,
        "count": None,
        "parts": torch.tensor([[0, 1], [2, 2]]),
        "joint_ptr": PTR.clone(),
        "joint_index": torch.tensor([0, 1, 1]),
        "joint_count": torch.ones(3, dtype=torch.int32),
        "ids": IDS,
        "num_branches": 1,
        "widths": WIDTHS,
        "classifier_widths": [2],
        "attention": True,
        "negative_slope": 0.01,
        "tf32": False,
        "check_invariants": True,
    },
    "subtree_keys": {
        "indptr": torch.tensor([0, 1, 2, 2]),
        "indices": torch.tensor([0, 1]),
        "x": torch.ones(3, 5),
        "edge_type": torch.tensor([0, 1]),
        "num_hops": 2,
        "seed": 0,
        "check_invariants": True,
    },
    "distinct_rows": {
        "powers": torch.ones(2, 3, 5),
        "ptr": PTR,
        "wide_index": False,
        "hash_bits": 64,
        "check_invariants": True,
    },
}
FLAT = RAW["training_step"]["parameters"]
RAW["training_steps"] = RAW["training_step"] | {
    "batch_size": 1,
    "gradient": torch.zeros_like(FLAT),
    "exp_avg": torch.zeros_like(FLAT),
    "exp_avg_sq": torch.zeros_like(FLAT),
    "num_steps": torch.zeros(()),
    "learning_rate": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "eps": 1e-8,
}
RAW["power_features_out"] = RAW["power_features"] | {"out": torch.zeros(3, 3, 5)}
HUGE = 2**62
NONE = {"rows": torch.ones(0, 3), "num_features": 3, "parameters": torch.ones(0), "ptr": PTR[:1], "ids": None}
COLUMNS = torch.tensor([0, 1], dtype=torch.int32)
SPARSE = {"rows": torch.ones(2), "crow_indices": torch.tensor([0, 1, 1, 2], dtype=torch.int32), "col_indices": COLUMNS}
# What a call of an op itself refuses, and what it says; a GPU cannot see contents.
OF_METADATA = [
    ("power_features", {"x": None}, "x must be a torch.Tensor, got None"),
    ("power_features", {"x": torch.ones(3, 5).t()}, "x must be contiguous"),
    ("power_features", {"x": torch.ones(3, 5).int()}, "x must be .* or float16, got int32"),
    ("power_features", {"num_hops": -1}, "num_hops must be at least 0, got -1"),
    ("power_features", {"num_hops": HUGE}, f"num_hops must be at most 1048575, got {HUGE}"),
    ("power_features_out", {"num_hops": 2**63 - 1}, "num_hops must be at most 1048575, got 9223372036854775807"),
    ("power_features_out", {"out": torch.ones(2, 3, 5)}, r"out must have shape \[3, ., 5\], got \[2, 3, 5\]"),
    ("power_features", {"operator": "gcn"}, "operator must be one of adj, sym, sym.adj, rw, got 'gcn'"),
    ("power_features", {"indptr": PTR}, r"indptr must have shape \[4\], got \[3\]"),
    ("power_features", {"indices": IDS.int()}, "indices must be int64, got int32"),
    ("power_features", {"ptr": PTR[:0]}, "ptr must have at least one entry, got none"),
    ("power_features", {"edge_weight": torch.ones(3)}, r"edge_weight must have shape \[2\], got \[3\]"),
    ("power_features_backward", {"grad": torch.ones(3, 3, 5).half()}, "grad must be float32 or float64, got float16"),
    ("power_features_backward", {"grad": torch.ones(0, 3, 5)}, "grad must have at least 1 branch, got 0"),
    ("sum_readout", {"z": torch.ones(3)}, r"z must have shape \[\*, \*\], got \[3\]"),
    ("sum_readout", {"index": torch.ones(3)}, "index must be int32 or int64, got float32"),
    (
        "power_features_out",
        {"x": torch.ones(2**63 - 1, 0), "num_hops": 0, "out": torch.ones(1, 2**63 - 1, 0)},
        "indptr must make sizes below 2.63, got 9223372036854775807 . 1",
    ),
    ("sum_readout", {"num_branches": 0}, "num_branches must be at least 1, got 0"),
    ("sum_readout", {"num_branches": HUGE}, f"num_branches must be at most 1048576, got {HUGE}"),
    (
        "sum_readout",
        {"z": torch.ones(0, HUGE), "ptr": PTR[:1], "num_branches": 4},
        f"z must make sizes below 2.63, got 4 . {HUGE}",
    ),
    ("sum_readout", {"num_branches": 3}, r"ptr must have a multiple of 3 segments \(branches\), got 2"),
    ("sum_readout", {"shared": True, "num_branches": 2}, "z must have as many rows in each of 2 branches, got 3"),
    ("sum_readout_backward", {"grad": torch.ones(3, 4)}, r"grad must have shape \[2, 4\], got \[3, 4\]"),
    ("sum_readout_backward", {"num_rows": HUGE}, f"num_rows must make sizes below 2.63, got {HUGE + 2} . 8"),
    ("sum_readout_backward", {"num_rows": 2**63 - 1}, "num_rows must make sizes below 2.63, got 92.* . 2"),
    ("sum_readout_backward", {"num_rows": -1}, "num_rows must be at least 0, got -1"),
    ("sum_readout_backward", {"num_branches": HUGE}, f"num_branches must be at most 1048576, got {HUGE}"),
    ("attention_readout", {"z": None}, "z must be a torch.Tensor, got None"),
    ("attention_readout", {"w": None}, "w must be a torch.Tensor, got None"),
    ("attention_readout", {"w": torch.ones(5)}, r"w must have shape \[4\], got \[5\]"),
    ("attention_readout", {"shared": True}, "index and count must be None"),
    ("branch_readout", {"num_branches": 4, "widths": [HUGE]}, f"widths must make sizes below 2.63, got 6 . {HUGE}"),
    ("branch_readout", NONE | {"num_branches": HUGE, "widths": [4]}, f"num_branches must be at most .*, got {HUGE}"),
    (
        "branch_readout",
        NONE | {"num_branches": 4, "widths": [2**60]},
        f"widths must make sizes below 2.63, got 4 . {5 * 2**60}",
    ),
    ("branch_readout_backward", {"widths": [HUGE]}, f"widths must make sizes below 2.63, got 11 . {HUGE}"),
    ("branch_readout", {"negative_slope": float("inf")}, "negative_slope must be finite, got inf"),
    ("branch_readout", {"negative_slope": float("nan")}, "negative_slope must be at least 0, got nan"),
    ("branch_readout", {"num_features": 4}, r"rows must have shape \[\*, 4\], got \[3, 5\]"),
    ("branch_readout", {"num_features": -1}, "num_features must be at least 0, got -1"),
    ("branch_readout", {"col_indices": COLUMNS}, "crow_indices must come with col_indices"),
    ("branch_readout", SPARSE | {"rows": torch.ones(3, 5)}, r"rows must have shape \[\*\], got \[3, 5\]"),
    ("branch_readout", SPARSE | {"col_indices": COLUMNS[1:]}, r"col_indices must have shape \[2\], got \[1\]"),
    ("branch_readout", SPARSE | {"crow_indices": PTR}, "crow_indices must be int32, got int64"),
    ("branch_readout", SPARSE | {"crow_indices": COLUMNS[:0]}, "crow_indices must have at least one entry, got none"),
    ("training_step", {"num_branches": -HUGE}, f"num_branches must be at least 1, got -{HUGE}"),
    ("training_step", {"num_branches": HUGE}, f"num_branches must be at most 1048576, got {HUGE}"),
    (
        "training_step",
        {"widths": [3], "classifier_widths": [HUGE]},
        f"classifier_widths must make sizes below 2.63, got 7 . {HUGE}",
    ),
    (
        "training_step",
        {"num_branches": 4, "widths": [HUGE]},
        f"widths must make sizes below 2.63, got 6 . {HUGE}",
    ),
    ("training_step", {"widths": [4, 0]}, "widths must be at least 1, got 0"),
    ("training_step", {"classifier_widths": []}, "classifier_widths must have 1 to 8 layers, got 0"),
    ("training_step", {"negative_slope": -1.0}, "negative_slope must be at least 0, got -1"),
    ("training_step", {"parameters": torch.ones(9)}, r"parameters must have shape \[102\], got \[9\]"),
    ("training_step", {"labels": torch.ones(2)}, "labels must be int64, got float32"),
    ("training_steps", {"ids": None}, "ids must be a torch.Tensor, got None"),
    ("training_steps", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ("training_steps", {"gradient": torch.zeros(9)}, r"gradient must have shape \[102\], got \[9\]"),
    ("training_steps", {"exp_avg": FLAT.double()}, "exp_avg must be float32, got float64"),
    ("training_steps", {"exp_avg_sq": torch.zeros(204)[::2]}, "exp_avg_sq must be contiguous"),
    ("training_steps", {"num_steps": torch.zeros(1)}, r"num_steps must have shape \[\], got \[1\]"),
    ("subtree_keys", {"x": torch.ones(3, 5).half()}, "x must be float32 or float64, got float16"),
    ("subtree_keys", {"edge_type": torch.ones(3).long()}, r"edge_type must have shape \[2\], got \[3\]"),
    ("subtree_keys", {"num_hops": HUGE}, f"num_hops must be at most 1048575, got {HUGE}"),
    ("distinct_rows", {"powers": torch.ones(0, 3, 5)}, "powers must have at least 1 branch, got 0"),
    ("distinct_rows", {"powers": torch.ones(HUGE, 0, 5)}, f"powers must have at most 1048576 branches, got {HUGE}"),
    ("distinct_rows", {"hash_bits": 65}, r"hash_bits must be in \[0, 64\], got 65"),
]
OF_CONTENTS = [
    (
        "branch_readout",
        SPARSE | {"col_indices": COLUMNS - 1},
        r"col_indices must be in \[0, 5\), got col_indices\[0\] = -1",
    ),
    ("branch_readout_backward", SPARSE, "rows must be dense to have a gradient"),
    ("power_features", {"indices": IDS + 2}, r"indices must be in \[0, 3\), got indices\[1\] = 3"),
    (
        "power_features",
        {"edge_weight": -torch.ones(2)},
        "edge_weight must give no negative row sum .*, got -1 at node 0",
    ),
    ("sum_readout", {"ptr": PTR + 1}, "ptr must start with 0, got 1"),
    ("subtree_keys", {"indices": IDS + 2}, r"indices must be in \[0, 3\), got indices\[1\] = 3"),
    ("attention_readout", {"index": PTR + 1}, r"index must be in \[0, 3\), got index\[1\] = 3"),
    ("training_step", {"ids": IDS + 1}, r"ids must be in \[0, 2\), got ids\[1\] = 2"),
    ("training_steps", {"ids": IDS + 1}, r"ids must be in \[0, 2\), got ids\[1\] = 2"),
    ("training_step", {"labels": IDS + 1}, r"labels must be in \[0, 2\), got labels\[1\] = 2"),
    ("distinct_rows", {"ptr": PTR[:2]}, "ptr must end with the number of nodes, 3, got 2"),
]


@pytest.mark.parametrize("backend", [ISAS[0], "cuda"], indirect=True)
def test_an_op_refuses_by_name(backend: str) -> None:
    for op, change, message in OF_METADATA + (OF_CONTENTS if backend != "cuda" else []):
        call = getattr(torch.ops.spin_fast, op)
        call(*RAW[op].values())
        with pytest.raises(ValueError, match=f"^{message}"):
            call(*(RAW[op] | change).values())


LEADING = ("x", "grad", "z", "rows", "powers")  # the others must be where these are


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_an_op_refuses_tensors_of_two_devices(backend: str) -> None:
    kernels = cuda_kernels.kernels()
    if not isinstance(kernels, cuda_kernels.Emulated):
        pytest.skip("tensors are elsewhere only where the kernels are emulated")
    for op in cuda_kernels.OPS:
        arguments = RAW[op]
        for name, value in arguments.items():
            if not torch.is_tensor(value):
                continue
            named = "[a-z_]*" if name in LEADING else name
            message = f"^{named} must be on the device of the op, cuda:-?[01], got cuda:-?[01]$"
            with kernels.elsewhere(value), pytest.raises(ValueError, match=message):
                getattr(torch.ops.spin_fast, op)(*arguments.values())


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_what_is_too_large_for_a_launch_is_named(backend: str) -> None:
    ptr = torch.zeros(70_001, dtype=torch.int64).index_fill(0, torch.tensor([70_000]), 3)
    change = {"grad": torch.ones(1, 70_000), "ptr": ptr, "num_branches": 70_000}
    message = "^num_branches must make at most 2147483647 x 65535 x 65535 blocks of threads, got 1 x 70000 x 1$"
    with pytest.raises(ValueError, match=message):
        torch.ops.spin_fast.sum_readout_backward(*(RAW["sum_readout_backward"] | change).values())


def test_too_little_memory_is_told_as_torch_does(native) -> None:
    arguments = RAW["sum_readout_backward"] | {"index": torch.tensor([0, 1, 2])}
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator: can't allocate memory: .* \[1099511627776, 4\]"):
        torch.ops.spin_fast.sum_readout_backward(*(arguments | {"num_rows": 2**40}).values())


def test_too_many_segments_are_not_said_to_be_entries(native, tmp_path: Path) -> None:
    size = 2**31 + 1
    try:
        ptr = torch.from_file(str(tmp_path / "ptr"), shared=True, size=size, dtype=torch.int64)  # takes no memory
    except RuntimeError as error:
        pytest.skip(f"no file with holes: {error}")
    arguments = {"grad": torch.ones(2**31, 0), "ptr": ptr, "index": torch.tensor([0]), "check_invariants": False}
    with pytest.raises(ValueError, match=r"^ptr must have at most 2147483647 segments, got 2147483648$"):
        torch.ops.spin_fast.sum_readout_backward(*(RAW["sum_readout_backward"] | arguments).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"branches": 0}, "branches must be at least 1, got 0"),
        ({"branches": HUGE}, f"branches must be at most 1048576, got {HUGE}"),
        ({"nodes": -3}, "nodes must be at least 0, got -3"),
        ({"nodes": HUGE}, f"nodes must make sizes below 2.63, got {HUGE} . 32"),
        ({"width": -1}, "width must be at least 0, got -1"),
        ({"width": HUGE}, f"width must make sizes below 2.63, got {HUGE} . 8"),
        ({"graphs": -1}, "graphs must be at least 0, got -1"),
        ({"graphs": HUGE}, f"graphs must make sizes below 2.63, got {HUGE} . 8"),
    ],
)
def test_room_for_distinct_rows_is_checked(native, change: dict, message: str) -> None:
    sizes = {"branches": 2, "nodes": 3, "width": 4, "graphs": 1, "bytes": 4, "wide_index": False, "node_rows": True}
    sizes |= {"sparse": None, "operators": []}
    native.DistinctRows(*sizes.values())
    with pytest.raises(ValueError, match=f"^{message}$"):
        native.DistinctRows(*(sizes | change).values())


def test_checks_of_contents_check_metadata_first(backend: str) -> None:
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    ops.check_csr(indptr, indices, None, 2)
    with pytest.raises(ValueError, match=r"indptr must have shape \[4\], got \[3\]"):
        ops.check_csr(indptr, indices, None, 3)
    with pytest.raises(TypeError, match="indices must be int64, got int32"):
        ops.check_csr(indptr, indices.int(), None, 2)
    ops.check_segments(PTR, None, None, 3)
    with pytest.raises(ValueError, match="ptr must have at least one entry"):
        ops.check_segments(PTR[:0], None, None, 3)
    with pytest.raises(ValueError, match=r"count must have shape \[3\], got \[1\]"):
        ops.check_segments(PTR, None, torch.ones(1, dtype=torch.int32), 3)


def test_rows_of_another_branch_are_refused(backend: str) -> None:
    ptr, row_ptr = torch.tensor([0, 2, 4]), torch.tensor([0, 2, 3])
    ops.check_segments(ptr, torch.tensor([1, 0, 2, 2]), None, 3, row_ptr)
    ops.check_segments(ptr, torch.tensor([1, 0, 2, 1]), None, 3)
    with pytest.raises(ValueError, match=r"index must be in \[2, 3\), the rows of branch 1, got index\[3\] = 1"):
        ops.check_segments(ptr, torch.tensor([1, 0, 2, 1]), None, 3, row_ptr)
    with pytest.raises(ValueError, match="ptr must give branch 0 its rows, 0 to 2, got 0 to 1"):
        ops.check_segments(torch.tensor([0, 1, 3]), None, None, 3, row_ptr)


def test_every_file_of_csrc_is_compiled_or_a_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a changed header rebuilds what includes it, without ninja too."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("no setup.py beside the tests: this is not a checkout")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPIN_FAST_CUDA", "0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    setup = runpy.run_path("setup.py")
    (extension,) = setup["native_extensions"]()["ext_modules"]
    headers = {str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.h")}
    for built, folder in ((extension, "cpu"), (setup["CudaLibrary"]("nvcc").extension, "cuda")):
        known = {*built.sources, *built.depends}
        assert known >= headers | {str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/{folder}/*.*")}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_call_on_this_thread_keeps_value_and_error(native, number: int, threads: None) -> None:
    torch.set_num_threads(number)
    values, called = torch.ones(1 << 20), []
    native.on_this_thread(lambda: called.append((threading.get_ident(), float(values.sum()))))
    assert called == [(threading.get_ident(), 1 << 20)]
    with pytest.raises(ZeroDivisionError):
        native.on_this_thread(lambda: 1 / 0)
    assert float(values.sum()) == 1 << 20
