"""Peak memory of a call or a training run, in a process of its own, so that no freed memory is reused.

Run as a module it is that process, which prints the peak of its resident memory above what it was before.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from spin_fast import SPIN, GraphBatch, PowerFeatures, power_features
from spin_fast.datasets import erdos_renyi

from . import epochs
from .inputs import NUM_HOPS
from .process import environment

OURS = "spin_fast"
TRAINED = ("SPIN-att", "SPIN-sum", "GIN, DataLoader", "GIN, collated")
BATCH_SIZE = 128


def available() -> bool:
    """Whether this system tells, and can forget, the peak of a process."""
    return sys.platform == "linux" and Path("/proc/self/clear_refs").exists()


def measure(task: str, graphs: GraphBatch, contenders: Sequence[str]) -> dict[str, int]:
    """Bytes by contender of a task of ``TASKS``, one thread."""
    package = __package__ or ""
    peaks = {}
    with TemporaryDirectory() as place:
        file = Path(place) / "graphs.pt"
        torch.save((graphs.ptr, graphs.indptr, graphs.indices, graphs.x, graphs.y), file)
        for contender in contenders:
            command = [sys.executable, "-m", f"{package}.peak", str(file), task, contender]
            result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
            peaks[contender] = json.loads(result.stdout)
    return peaks


def _status(entry: str) -> int:
    """Bytes of an entry of the process's status."""
    found = re.search(rf"^{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _load(file: str) -> GraphBatch:
    return GraphBatch(*torch.load(file))


def _peak(call: Callable[[], object], above: int) -> int:
    """The peak of the process during a call, its result included, minus ``above`` bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    output = call()
    peak = _status("VmHWM") - above
    del output
    return peak


@torch.inference_mode()
def _powers(file: str, contender: str) -> int:
    """All hops by ours, or by a rival whose matrix is normalised beforehand; above what is there before the call."""
    graphs = _load(file)
    call: Callable[[], object]
    if contender == OURS:
        call = partial(power_features, graphs.indptr, graphs.indices, graphs.x, NUM_HOPS, ptr=graphs.ptr)
    else:
        from ..rivals import ops

        call = ops.powers(graphs, NUM_HOPS)[contender]
    return _peak(call, above=_status("VmRSS"))


def _training(file: str, contender: str) -> int:
    """From the graphs, as each keeps them in memory, to the end of the second epoch; above a process without them."""
    form: Callable[[GraphBatch], Any]
    if contender.startswith("SPIN"):
        form, prepare = _same, partial(_spin, contender == "SPIN-att")
    else:
        from ..rivals import gnn

        form, prepare = partial(gnn.data_list, family="GIN"), partial(_gin, contender == "GIN, collated")

    def run(graphs: Any) -> None:
        epoch = prepare(graphs)
        for _ in range(2):
            epoch()

    run(form(erdos_renyi(4, 10, (0.3, 0.6), 4)))  # what a first call allocates does not belong to the data
    empty = _status("VmRSS")
    graphs = form(_load(file))
    return _peak(partial(run, graphs), above=empty)


def _same(graphs: GraphBatch) -> GraphBatch:
    return graphs


def _spin(attention: bool, graphs: GraphBatch) -> epochs.Epoch:
    model = SPIN(graphs.num_features, epochs.WIDTH, _num_classes(graphs.y), epochs.DEPTH, attention=attention)
    return epochs.ours(model, PowerFeatures.from_graphs(graphs, epochs.DEPTH, node_rows=False), BATCH_SIZE)


def _gin(collated: bool, data: list[Any]) -> epochs.Epoch:
    from torch_geometric.loader import DataLoader

    from ..rivals import gnn

    num_classes = _num_classes(torch.cat([graph.y for graph in data]))
    model = gnn.gin(data[0].num_features, epochs.WIDTH, num_classes, epochs.DEPTH)
    if collated:
        return epochs.of(model, partial(epochs.shuffled, gnn.collated(data, BATCH_SIZE, "CSR")))
    return epochs.of(model, partial(gnn.loaded, DataLoader(data, BATCH_SIZE, shuffle=True), "edge_index"))


def _num_classes(y: Tensor | None) -> int:
    assert y is not None
    return int(y.max()) + 1


TASKS = {"powers": _powers, "training": _training}


def _main(file: str, task: str, contender: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps(TASKS[task](file, contender)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
