"""Peak memory of one call: measured in a process of its own, where nothing that was freed before is at hand.

Run as a module it is that process: it loads the graph, makes what a contender needs beforehand, calls it once, and
prints the peak of the resident memory above what it was before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from spin_fast import GraphBatch, power_features

OURS = "spin_fast"


class Peak(NamedTuple):
    """How far one call of a contender raised the memory of its process, its output included."""

    on: str
    contender: str
    output_bytes: int
    bytes: int


def available() -> bool:
    """Whether this system tells, and can forget, the peak of a process."""
    return sys.platform == "linux" and Path("/proc/self/clear_refs").exists()


def measure(on: str, graphs: GraphBatch, num_hops: int, contenders: list[str]) -> list[Peak]:
    """``power_features`` by ours and by rivals of :func:`benchmarks.op_rivals.powers`, one thread."""
    package = __package__ or ""
    folder = Path(__file__).parents[package.count(".") + 1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(folder)])}
    output_bytes = (num_hops + 1) * graphs.x.nbytes
    peaks = []
    with TemporaryDirectory() as place:
        file = Path(place) / "graph.pt"
        torch.save((graphs.ptr, graphs.indptr, graphs.indices, graphs.x), file)
        for contender in contenders:
            command = [sys.executable, "-m", f"{package}.peak", str(file), str(num_hops), contender]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            peaks.append(Peak(on, contender, output_bytes, json.loads(result.stdout)))
    return peaks


def _status(entry: str) -> int:
    """Bytes of an entry of the process's status."""
    found = re.search(rf"^{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _main(file: str, num_hops: str, contender: str) -> None:
    from . import op_rivals

    torch.set_num_threads(1)
    graphs, hops = GraphBatch(*torch.load(file)), int(num_hops)
    call: Callable[[], object]
    if contender == OURS:
        call = partial(power_features, graphs.indptr, graphs.indices, graphs.x, hops, ptr=graphs.ptr, checked=True)
    else:
        call = op_rivals.powers(graphs, hops)[contender]
    with torch.inference_mode():
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        output = call()
        print(json.dumps(_status("VmHWM") - before))
        del output


if __name__ == "__main__":
    _main(*sys.argv[1:])
