"""Peak memory of a call or a training run, in a process of its own, where nothing that was freed before is at hand.

Run as a module it is that process: it loads the graphs, makes what a contender needs beforehand, calls it once, and
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

from spin_fast import SPIN, GraphBatch, PowerFeatures, power_features

from . import epochs
from .inputs import NUM_HOPS

OURS = "spin_fast"
TRAINED = ("SPIN-att", "SPIN-sum", "GIN, DataLoader", "GIN, collated")
BATCH_SIZE = 128


class Peak(NamedTuple):
    """How far one call of a contender raised the memory of its process, its output included."""

    on: str
    contender: str
    output_bytes: int
    bytes: int


def available() -> bool:
    """Whether this system tells, and can forget, the peak of a process."""
    return sys.platform == "linux" and Path("/proc/self/clear_refs").exists()


def measure(task: str, graphs: GraphBatch, contenders: list[str]) -> dict[str, int]:
    """Bytes by contender of a task of ``TASKS``, one thread."""
    package = __package__ or ""
    folder = Path(__file__).parents[package.count(".") + 1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(folder)])}
    peaks = {}
    with TemporaryDirectory() as place:
        file = Path(place) / "graphs.pt"
        torch.save((graphs.ptr, graphs.indptr, graphs.indices, graphs.x, graphs.y), file)
        for contender in contenders:
            command = [sys.executable, "-m", f"{package}.peak", str(file), task, contender]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            peaks[contender] = json.loads(result.stdout)
    return peaks


def _status(entry: str) -> int:
    """Bytes of an entry of the process's status."""
    found = re.search(rf"^{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _powers(graphs: GraphBatch, contender: str) -> Callable[[], object]:
    """All hops by ours, or by a rival whose matrix is normalised beforehand."""
    if contender == OURS:
        return partial(power_features, graphs.indptr, graphs.indices, graphs.x, NUM_HOPS, ptr=graphs.ptr, checked=True)
    from . import op_rivals

    return op_rivals.powers(graphs, NUM_HOPS)[contender]


def _training(graphs: GraphBatch, contender: str) -> Callable[[], object]:
    """All that there is to do from the graphs to the end of the second epoch: features or batches, then training."""
    assert graphs.y is not None
    shape = graphs.num_features, epochs.WIDTH, int(graphs.y.max()) + 1, epochs.DEPTH
    if contender.startswith("SPIN"):

        def prepare(graphs: GraphBatch) -> epochs.Epoch:
            model = SPIN(*shape, attention=contender == "SPIN-att")
            return epochs.ours(model, PowerFeatures.from_graphs(graphs, epochs.DEPTH), BATCH_SIZE)

    else:
        from torch_geometric.loader import DataLoader

        from . import rivals

        def prepare(graphs: GraphBatch) -> epochs.Epoch:
            data, model = rivals.data_list(graphs, "GIN"), rivals.gin(*shape)
            if contender == "GIN, DataLoader":
                return epochs.of(
                    model, partial(rivals.loaded, DataLoader(data, BATCH_SIZE, shuffle=True), "edge_index")
                )
            return epochs.of(model, partial(epochs.shuffled, rivals.collated(data, BATCH_SIZE, "CSR")))

    def run(graphs: GraphBatch) -> None:
        epoch = prepare(graphs)
        for _ in range(2):
            epoch()

    run(graphs[:2])  # code and buffers that come with the first call are not part of the data's memory
    return partial(run, graphs)


TASKS = {"powers": _powers, "training": _training}


def _main(file: str, task: str, contender: str) -> None:
    torch.set_num_threads(1)
    call = TASKS[task](GraphBatch(*torch.load(file)), contender)
    with torch.inference_mode(task == "powers"):
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        output = call()
        print(json.dumps(_status("VmHWM") - before))
        del output


if __name__ == "__main__":
    _main(*sys.argv[1:])
