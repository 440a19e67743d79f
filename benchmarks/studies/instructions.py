"""Instructions of our calls, which unlike times do not depend on the machine's hour: a guard against slowdowns.

    python -m spin_fast.benchmarks.studies.instructions --root DIR --results DIR

Counted with valgrind's callgrind, one thread, by the AVX2 kernels (callgrind knows no AVX-512), as a user makes the
calls: with Python's part of them and their checks. Another compiler, Python or torch counts other numbers.

Run with ``--worker`` the module is the process that valgrind watches: it makes the calls that it is told.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.progress import track

from spin_fast import (
    SPIN,
    PowerFeatures,
    attention_readout,
    build_info,
    datasets,
    power_features,
    subtree_keys,
    sum_readout,
)
from spin_fast._common.files import replacing
from spin_fast.training import Trainer, predict, predict_proba

from ..harness import inputs, report
from ..harness.process import environment

DATASETS = ("COLLAB", "REDDIT-BINARY", "IMDB-BINARY", "NCI1", "PROTEINS", "ENZYMES", "DD", "ogbg-molhiv")
WIDTH, BATCH_SIZE = 32, 128
NOTE = (
    "Of whole data sets, three hops, one thread, the AVX2 kernels: counted by `python -m "
    "spin_fast.benchmarks.studies.instructions` with valgrind's callgrind, with Python's part of a call and its "
    "checks of contents."
)
EMPTY = "nothing"  # a call that does nothing: what the counting itself costs
CALLS = (
    "power_features",
    "power_features, contents trusted",
    "sum_readout",
    "attention_readout",
    "attention_readout and gradients",
    "subtree_keys",
    "PowerFeatures.from_graphs",
    f"training step, {BATCH_SIZE} graphs",
    "predict",
    "predict_proba",
)


def calls_of(dataset: str, root: str | None) -> dict[str, Callable[[], Any]]:
    """The calls on a data set, each of which has been made once."""
    graphs = datasets.load(dataset, root=root)
    torch.manual_seed(0)
    out = torch.empty(inputs.NUM_BRANCHES, *graphs.x.shape)
    powers = partial(power_features, graphs.indptr, graphs.indices, graphs.x, inputs.NUM_HOPS, ptr=graphs.ptr, out=out)
    z, w = inputs.branches(graphs, WIDTH)
    leaves = (z.clone().requires_grad_(), w.clone().requires_grad_())
    weight = torch.randn(len(graphs), inputs.NUM_BRANCHES * WIDTH)
    features = PowerFeatures.from_graphs(graphs, inputs.NUM_HOPS)
    assert graphs.y is not None
    num_outputs = 1 if graphs.y.dim() == 2 else int(graphs.y.max()) + 1
    model = SPIN(graphs.num_features, WIDTH, num_outputs, inputs.NUM_HOPS)
    batch = torch.randperm(len(features))[:BATCH_SIZE]
    made: tuple[Callable[[], Any], ...] = (
        powers,
        partial(powers, check_invariants=False),
        partial(sum_readout, z, graphs.ptr),
        partial(attention_readout, z, w, graphs.ptr),
        lambda: torch.autograd.grad(attention_readout(*leaves, graphs.ptr), leaves, weight),
        partial(subtree_keys, graphs.indptr, graphs.indices, graphs.x, inputs.NUM_HOPS),
        partial(PowerFeatures.from_graphs, graphs, inputs.NUM_HOPS),
        partial(Trainer(model).epoch, features, batch, BATCH_SIZE),
        partial(predict, model, features),
        partial(predict_proba, model, graphs, "sym"),
    )
    calls = dict(zip(CALLS, made, strict=True))
    for call in calls.values():
        call()
    return calls | {EMPTY: lambda: None}


def work(dataset: str, root: str | None) -> None:
    """Make the calls whose names come in, and tell when each is done."""
    torch.set_num_threads(1)
    calls = calls_of(dataset, root)
    print("ready", flush=True)
    for line in sys.stdin:
        calls[line.rstrip()]()
        print("done", flush=True)


class Counter:
    """Counts instructions of a worker."""

    def __init__(self, dataset: str, root: str | None, folder: Path) -> None:
        self._file = folder / "counts"
        package = __package__ or ""
        watched = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={self._file}")
        where = () if root is None else ("--root", root)
        self._worker = subprocess.Popen(
            [*watched, sys.executable, "-m", f"{package}.instructions", "--worker", dataset, *where],
            env=environment(PYTHONHASHSEED="0", SPIN_FAST_ISA="avx2"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "errors").open("w"),
            text=True,
        )
        self._answer("ready")
        self._control("--instr=on")

    def _answer(self, expected: str) -> None:
        assert self._worker.stdout is not None
        if (answer := self._worker.stdout.readline().strip()) != expected:
            raise RuntimeError(f"the worker has ended: {(self._file.parent / 'errors').read_text()[-2000:]}{answer}")

    def _control(self, request: str) -> None:
        subprocess.run(["callgrind_control", request, str(self._worker.pid)], check=True, capture_output=True)

    def count(self, name: str) -> int:
        """Instructions of a call."""
        assert self._worker.stdin is not None
        self._control("--zero")
        print(name, file=self._worker.stdin, flush=True)
        self._answer("done")
        self._control("--dump")
        newest = max(self._file.parent.glob("counts.*"), key=lambda path: int(path.suffix[1:]))
        found = re.search(r"^totals: (\d+)", newest.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1])

    def close(self) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait()


def counted(dataset: str, root: str | None = None, calls: Sequence[str] = CALLS) -> dict[str, int]:
    """Instructions of the calls on a data set.

    Raises:
        FileNotFoundError: valgrind is not installed. RuntimeError: a call has failed.
    """
    with TemporaryDirectory() as folder:
        counter = Counter(dataset, root, Path(folder))
        for name in (EMPTY, *calls):  # the first one of each translates the code
            counter.count(name)
        empty = counter.count(EMPTY)
        found = {name: counter.count(name) - empty for name in calls}
        counter.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m spin_fast.benchmarks.studies.instructions", description="Count the instructions of our calls."
    )
    parser.add_argument("--root", help="folder of the data sets (default: $SPIN_FAST_DATA, else data)")
    parser.add_argument("--results", type=Path, default=Path("."), metavar="DIR", help="default: the current folder")
    parser.add_argument("--datasets", nargs="+", default=DATASETS, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options.worker, options.root)
    found = {}
    for dataset in track(options.datasets, "counting"):
        found[dataset] = counted(dataset, options.root)
        write(found, options.results)


def write(found: dict[str, dict[str, int]], folder: Path) -> None:
    """Write ``instructions.json``, and a table of thousands of instructions."""
    built = built_with()
    with replacing(folder / "instructions.json") as file:
        file.write_text(json.dumps({"built_with": built, "instructions": found}, indent=2) + "\n")
    rows = [(name, *(f"{counts[name] / 1e3:,.0f}" for counts in found.values())) for name in CALLS]
    table = report.markdown_rows(report.Table("", ("call", *found), [rows]))
    told = ", ".join(f"{name} {version}" for name, version in built.items())
    with replacing(folder / "instructions.md") as file:
        file.write_text(
            "\n".join(["# Thousands of instructions per call", "", NOTE, f"Counted with {told}.", "", *table, ""])
        )


def built_with() -> dict[str, str]:
    """What decides on the numbers beside our code."""
    return {"compiler": build_info()["compiler"], "torch": torch.__version__, "Python": platform.python_version()}


if __name__ == "__main__":
    main()
