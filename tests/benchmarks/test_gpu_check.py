"""The scripts and benchmarks of the GPU, where there is none: their logic, their figures, and that all of it runs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, benchmark_module, run_benchmarks

import spin_fast
from spin_fast import GraphBatch

CHECK = ROOT / "scripts" / "gpu_check.sh"
pytestmark = pytest.mark.skipif(not CHECK.is_file(), reason="no scripts beside the tests: this is not a checkout")


FAKE = """#!/usr/bin/env bash
case "$*" in
  *get_device_capability*) [[ -n ${NO_GPU:-} ]] && echo "no GPU: torch 0 finds none" && exit 1
    printf '9.0\\nFAKE 1\\n' ;;
  *native_available*) echo "${KERNELS:-ok}" ;;
  *"import xdist"*) exit 1 ;;
  *build_ext*) echo "built for $TORCH_CUDA_ARCH_LIST"; exit "${BUILD:-0}" ;;
  *benchmarks/test_gpu.py*) echo "benchmarks: $*"
    sleep "${BENCHMARKS:-0}" || exit
    while (($# > 1)); do
      [[ $1 == --results ]] && echo {} > "$2/results.json"
      shift
    done ;;
  *tests) echo "tests: $*"; exit "${TESTS:-0}" ;;
  *gpu_small.py*) echo "gpu_small: done" ;;
esac
"""
CHECKER = """#!/usr/bin/env bash
echo "========= COMPUTE-SANITIZER"
case " $* " in
  *" racecheck "*) echo "========= ERROR SUMMARY: 3 errors"; exit 9 ;;
esac
[[ -n ${REFUSE:-} ]] && echo "========= Device not supported" && exit 255
shift "$(($(printf '%s\\n' "$@" | grep -n gpu_small | cut -d: -f1) - 2))"
"$@" && echo "========= ERROR SUMMARY: 0 errors"
"""


def check(folder: Path, *arguments: str, checker: bool = True, **environment: str) -> tuple[int, str, dict[str, str]]:
    """Run gpu_check.sh with a python3 and a compute-sanitizer that only pretend; the outcomes by step."""
    home = folder / "cuda"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    python, sanitizer = folder / "python", home / "bin" / "compute-sanitizer"
    for path, text in ((python, FAKE), (sanitizer, CHECKER)):
        path.write_text(text)
        path.chmod(0o755)
    if not checker:
        sanitizer.unlink()
    result = subprocess.run(
        [CHECK, "--results", str(folder / "results"), *arguments],
        env=os.environ | {"PYTHON": str(python), "CUDA_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    table = folder / "results" / "checks.md"
    cells = [line.split("|") for line in table.read_text().splitlines()[4:]] if table.is_file() else []
    return result.returncode, result.stdout + result.stderr, {row[1].strip(): row[3].strip() for row in cells}


def test_without_a_gpu_one_line_says_so() -> None:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([CHECK], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"gpu_check: no GPU: torch {torch.__version__} finds none\n"


def test_wrong_arguments_are_answered_with_the_usage(tmp_path: Path) -> None:
    for arguments in (["compile"], ["--results"]):
        code, said, _ = check(tmp_path, *arguments)
        assert code == 2
        assert "memcheck" in said


def test_steps_are_independent(tmp_path: Path) -> None:
    code, said, outcomes = check(tmp_path, TESTS="1")
    assert code == 1
    assert list(outcomes) == ["build", "tests", "memcheck", "racecheck", "synccheck", "benchmarks"]
    expected = {name: "ok" for name in outcomes} | {
        "tests": "failed: exit code 1",
        "racecheck": "failed: ERROR SUMMARY: 3 errors",
    }
    assert outcomes == expected
    assert "built for 9.0" in said
    assert f"--results {tmp_path}/results" in said
    assert (tmp_path / "results" / "checks.md").read_text().startswith("FAKE 1\n")


def test_single_steps(tmp_path: Path) -> None:
    code, said, outcomes = check(tmp_path, "--quick", "benchmarks", "build")
    assert (code, outcomes) == (0, {"build": "ok", "benchmarks": "ok"})
    assert "--device cuda --quick" in said
    assert (tmp_path / "results" / "checks.md").read_text().startswith("FAKE 1, quick\n")


@pytest.mark.parametrize("checker", [True, False])
def test_a_sanitizer_that_is_missing_or_refuses_is_skipped(tmp_path: Path, checker: bool) -> None:
    code, _, outcomes = check(tmp_path, "memcheck", "synccheck", checker=checker, REFUSE="1", PATH="/usr/bin:/bin")
    assert code == 0
    assert outcomes["memcheck"].startswith("skipped: ")
    assert ("Device not supported" if checker else "no compute-sanitizer found") in outcomes["synccheck"]


def test_without_kernels_nothing_passes(tmp_path: Path) -> None:
    code, _, outcomes = check(tmp_path, "build", "tests", "memcheck", BUILD="3", KERNELS="no CUDA kernels")
    assert code == 1
    assert list(outcomes.values()) == ["failed: exit code 3", *["failed: no CUDA kernels"] * 2]


@pytest.mark.slow
def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    code, _, outcomes = check(tmp_path, "benchmarks", BENCHMARKS="60", GPU_CHECK_SECONDS="6")
    assert (code, outcomes) == (1, {"benchmarks": "failed: out of time"})


@pytest.mark.slow
def test_small_calls_run(native) -> None:
    """What compute-sanitizer watches on a GPU, on the CPU."""
    command = [sys.executable, ROOT / "scripts" / "gpu_small.py", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(Path(spin_fast.__file__).parents[1])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("gpu_small: done\n")


@pytest.mark.slow
def test_benchmarks_run(native, tmp_path: Path) -> None:
    """All races of the GPU, small and on the CPU."""
    pytest.importorskip("torch_geometric")
    results_folder = tmp_path / "results"
    options = ["--device", "cpu", "--quick", "--rounds", "1", "--budget", "0.01", "--no-plots"]
    options += ["--results", results_folder]
    options += ["-k", "not (readout and not dtype0) and not REDDIT and not molhiv"]  # one type, width and data set tell
    result = run_benchmarks(tmp_path, "test_gpu.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((results_folder / "results.json").read_text())
    assert {race["case"].partition(",")[0] for race in results["races"]} == {
        "training epoch",
        "attention readout",
        "sum readout",
        "power_features",
        "precomputation",
    }
    assert {goal["unit"] for goal in results["goals"]} == {"x", "ms", "%"}
    assert {path.name for path in results_folder.iterdir()} == {"results.json", "results.md"}
    for path in results_folder.iterdir():
        for private in (platform.node(), str(ROOT), str(tmp_path)):
            assert private not in path.read_text()


def test_bytes_that_count() -> None:
    gpu = benchmark_module("harness.gpu")
    z, ptr = torch.empty(10, 8), torch.tensor([0, 4, 10])
    rows, readouts, weights, offsets = 10 * 8 * 4, 2 * 8 * 4, 10 * 4, 3 * 8
    assert gpu.readout_bytes("sum", z, ptr, False) == rows + offsets + readouts
    assert gpu.readout_bytes("sum", z, ptr, True) == readouts + offsets + rows
    assert gpu.readout_bytes("attention", z, ptr, False) == rows + offsets + readouts + weights
    assert gpu.readout_bytes("attention", z, ptr, True) == 2 * rows + weights + offsets + 2 * readouts
    assert gpu.readout_bytes("sum", z.bfloat16(), ptr, False) == rows // 2 + offsets + readouts
    graphs = GraphBatch(ptr, torch.arange(11), torch.arange(10), torch.zeros(10, 3))
    edges, x = 8 * (11 + 10), 10 * 3 * 4
    assert gpu.power_bytes(graphs, graphs.x, 3) == offsets + edges + x + 4 * x
    assert gpu.power_bytes(graphs, graphs.x, 3, whole=True) == offsets + 3 * (edges + x) + 4 * x


def test_a_floor_moves_so_many_bytes() -> None:
    gpu = benchmark_module("harness.gpu")
    for call in gpu.floors(4096, "cpu")["copy"].values():
        assert call().nbytes == 2048  # written, and as many read


@pytest.mark.parametrize("num_rows", [1, 1000, 100_000])
def test_segments_have_all_rows(num_rows: int) -> None:
    gpu = benchmark_module("harness.gpu")
    for kind in gpu.SEGMENTS:
        ptr = gpu.segments(kind, num_rows)
        assert (ptr[0], ptr[-1]) == (0, num_rows)
        assert (ptr.diff() >= 0).all()
    assert gpu.segments("one segment", num_rows).tolist() == [0, num_rows]


def test_stand_ins_have_the_statistics_of_the_data_sets() -> None:
    inputs = benchmark_module("harness.inputs")
    for dataset, facts in inputs.STATISTICS.items():
        graphs = inputs.stand_in(dataset, 2000)
        assert (len(graphs), graphs.num_features) == (2000, facts.features)
        assert graphs.num_nodes / 2000 == pytest.approx(facts.nodes, rel=0.1)
        assert graphs.num_edges / 4000 == pytest.approx(facts.edges, rel=0.1)
    assert inputs.real_or_stand_in("NCI1", "/nowhere").name == "NCI1 (stand-in)"


def test_answers_of_nvidia_smi() -> None:
    gpu = benchmark_module("harness.gpu")
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.draw")
    answer = "580.1, 1980 MHz, [N/A], [Not Supported]\n"
    assert gpu.parsed(fields, answer) == {"driver_version": "580.1", "clocks.sm": "1980 MHz"}
    assert gpu.parsed(fields, "") == {}


def test_goals_in_the_table() -> None:
    report, race = benchmark_module("harness.report"), benchmark_module("harness.race")
    times = report.Goal("epoch", "NCI1", 20, "x", race.Spread(24, 25, 26))
    share = report.Goal("readout", "rows", 0.85, "%", race.Spread(0.8, 0.81, 0.9))
    time = report.Goal("epoch", "NCI1", 5e-3, "ms", race.Spread(3e-3, 4e-3, 6e-3))
    assert times.row == ("epoch", "NCI1", "≥ 20 x", "25.0 x", "24.0–26.0", "yes")
    assert share.row == ("readout", "rows", "≥ 85 %", "81.0 %", "80.0–90.0", "**no**")
    assert time.row == ("epoch", "NCI1", "≤ 5 ms", "4.00 ms", "3.00–6.00", "yes")
    session = report.Session(goals=[times, share, time])
    assert [table.title for table in session.tables()] == ["goals on the GPU"]
    one = race.Race("gpu", "epoch", "NCI1", 1, device="cuda")
    assert (one.place, one.clock) == ("GPU", "wall time")
