"""Millions of graphs, from files to files: time and memory of each step, beside PyG's data set on disk.

    python -m spin_fast.benchmarks.studies.scale --root DIR --results DIR --folder DIR

The graphs are copies of ogbg-molhiv, in each of which every atom has, with a probability of 0.2, the features of
another one: so no copy is like another, and rows repeat less than in ogbg-molhiv. They stay in ``--folder``, with all
that is made of them: 8 GB for four million graphs. What is measured on a few is so on the first 100,000.

A step is a process of its own, with one thread. Run with ``--worker`` the module is such a process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.progress import track

from spin_fast import SPIN, GraphBatch, PowerFeatures, datasets, shards, training
from spin_fast._common.files import replacing

from ..harness import epochs, inputs, report
from ..harness.process import environment

NUM_GRAPHS, FEW = 4_000_000, 100_000
CHANGED = 0.2  # atoms that have the features of another one
BATCH_SIZE = 128
PLANNED_GRAPHS, PLANNED_MACHINES, CORES = (3_750_000, 100_000_000, 10_000_000_000), (1, 16, 1000), 16
GRADIENT, BANDWIDTH = 60_000, 1.25e9  # bytes; bytes per second of 10 Gbit/s
PER_RANK = (32, 128, 512, 2048)  # graphs per step of a rank
STEPS, EPOCHS = 50, 7  # of two ranks in an epoch; the median of the epochs counts
CHRT = shutil.which("chrt")
SHARD_SIZE = "500MB"
GRAPHS, FEW_GRAPHS, FEATURES, MODEL = "graphs", "few-graphs", "features.safetensors", "model.safetensors"
NOTE = (
    "Copies of ogbg-molhiv, each atom of which has the features of another one with a probability of "
    f"{CHANGED}: Parquet files with a row per graph. Three hops of `sym`; SPIN-sum, width {epochs.WIDTH}; batches "
    f"of {BATCH_SIZE}; PyG's GIN of that width and depth. A process of one thread for each step. Memory: what the "
    "process holds itself, and with the pages of files that it has mapped, which the system may take back."
)

KEPT: dict[str, Callable[[Any], str]] = {
    "deduplication": lambda of_branches: f"nodes per stored row {', '.join(f'{ratio:.3g}' for ratio in of_branches)}",
    "bytes": lambda number: f"{number / 1e9:.2f} GB of features",
    "seconds to make": lambda seconds: f"{seconds:.1f} s to make it",
    "seconds of an epoch": lambda seconds: f"{seconds:.1f} s for the second epoch",
    "seconds_per_epoch": lambda seconds: f"{seconds:.1f} s for an epoch",
    "mapped over in memory": lambda ratio: f"an epoch on mapped files takes {ratio:.2f} times as long as in memory",
}
"""What is told of a step beside its cost, by its name in the document that it prints."""


class Step(NamedTuple):
    """A command that prints a JSON document, and how many graphs it works on."""

    title: str
    command: Sequence[str | Path]
    num_graphs: int


class Cost(NamedTuple):
    """What a process has taken; memory in bytes."""

    seconds: float
    cpu_seconds: float
    own_memory: int
    with_mapped: int


def redrawn(graphs: GraphBatch, copy: int) -> GraphBatch:
    """The graphs in another order, some of whose nodes have the features of others."""
    generator = torch.Generator().manual_seed(copy)
    graphs = graphs[torch.randperm(len(graphs), generator=generator)]
    changed = torch.rand(graphs.num_nodes, generator=generator) < CHANGED
    others = torch.randint(graphs.num_nodes, (int(changed.sum()),), generator=generator)
    x = graphs.x.clone()
    x[changed] = graphs.x[others]
    return replace(graphs, x=x)


def draw(root: str | None, folder: Path, num_graphs: int) -> None:
    """Write the graphs, a file for each copy of the set."""
    graphs = datasets.load("ogbg-molhiv", root=root)
    folder.mkdir(parents=True, exist_ok=True)
    for copy in track(range(-(-num_graphs // len(graphs))), "drawing graphs", disable=None):
        file = folder / f"{copy:05}.parquet"
        if not file.exists():
            datasets.write_parquet(redrawn(graphs, copy)[: num_graphs - copy * len(graphs)], file)


def cost_of(command: Sequence[str | Path], folder: Path) -> tuple[Cost, dict[str, Any]]:
    """Run a command to its end, in one thread; also returns the document that it prints.

    Raises:
        RuntimeError: it fails; tells what it has printed last.
    """
    out, errors = folder / "stdout", folder / "stderr"
    with out.open("w") as stdout, errors.open("w") as stderr:
        start, own = time.perf_counter(), 0
        process = subprocess.Popen(
            command, cwd=folder, env=environment(OMP_NUM_THREADS="1"), stdout=stdout, stderr=stderr
        )
        while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            own = max(own, own_memory(process.pid))
            time.sleep(0.05)
        seconds = time.perf_counter() - start
    _, status, usage = ended
    if status:
        raise RuntimeError(f"{' '.join(map(str, command))} has failed: {errors.read_text()[-2000:]}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, own, 1024 * usage.ru_maxrss), json.loads(out.read_text())


def own_memory(process: int) -> int:
    """Bytes that a process holds at the moment, without the pages of mapped files."""
    with contextlib.suppress(OSError):  # it has ended
        if found := re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    return 0


def ours(folder: Path) -> dict[str, float]:
    """Train two epochs over the shards, with a hundredth of the graphs for validation; the second one counts."""
    features, chunk = shards.load(folder / FEATURES), next(datasets.iter_folder(folder / GRAPHS, 1))
    model = SPIN(chunk.graphs.num_features, epochs.WIDTH, 2, inputs.NUM_HOPS, attention=False)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    some = len(order) // 100 + 1
    validation, train = order[:some], order[some:]
    fit = training.fit(model, features, train, validation, epochs=2, batch_size=BATCH_SIZE)
    training.save_checkpoint(folder / MODEL, model, node_features=chunk.features, classes=["0", "1"])
    return {"seconds of an epoch": fit.epochs[-1].seconds, "graphs": len(train)}


def mapped(folder: Path) -> dict[str, float]:
    """Epochs over the first shard, mapped and in memory in turn, when the system has the file in memory."""
    file = min(folder.glob("features*.safetensors"))
    kinds = [PowerFeatures.load(file, mmap=mmap) for mmap in (True, False)]
    model = SPIN(kinds[0].num_features, epochs.WIDTH, 2, inputs.NUM_HOPS, attention=False)
    trainer, ratios = training.Trainer(model), []
    for epoch in range(EPOCHS):
        seconds = []
        for features in kinds:
            start = time.perf_counter()
            trainer.epoch(features, slice(FEW), BATCH_SIZE, torch.Generator().manual_seed(epoch))
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return {"mapped over in memory": statistics.median(ratios[1:])}


def theirs(folder: Path) -> dict[str, float]:
    """Make PyG's data set on disk of a few graphs, and train two epochs of a GIN on it; the second one counts."""
    from torch_geometric.loader import DataLoader

    from ..rivals import gnn, on_disk

    graphs = GraphBatch.concatenate([chunk.graphs for chunk in datasets.iter_folder(folder / FEW_GRAPHS, 10_000)])
    data = gnn.data_list(graphs, "GIN")
    start = time.perf_counter()
    on_disk_graphs = on_disk.Graphs(str(folder / "on-disk"), graphs.num_features)
    on_disk_graphs.extend(data, batch_size=10_000)
    made = time.perf_counter() - start
    loader = DataLoader(on_disk_graphs, BATCH_SIZE, shuffle=True)
    model = gnn.gin(graphs.num_features, epochs.WIDTH, 2, epochs.DEPTH)
    epoch = epochs.of(model, partial(gnn.loaded, loader, "edge_index"))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        epoch()
        seconds.append(time.perf_counter() - start)
    return {"seconds to make": made, "seconds of an epoch": seconds[-1], "graphs": len(graphs)}


def by_ranks(folder: Path) -> dict[str, float]:
    """Milliseconds of a step over the first shard, by graphs per step of a rank: of one, or of those of torchrun."""
    number, group = int(os.environ.get("WORLD_SIZE", "1")), None
    if number > 1:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    features, found = shards.load(folder / FEATURES).shards[0], {}
    for size in PER_RANK:
        model = SPIN(features.num_features, epochs.WIDTH, 2, inputs.NUM_HOPS, attention=False)
        trainer = training.Trainer(model, process_group=group)
        ids = torch.arange(min(len(features), 2 * STEPS * size))
        seconds = []
        for epoch in range(EPOCHS):
            start = time.perf_counter()
            trainer.epoch(features, ids, size * number, torch.Generator().manual_seed(epoch))
            seconds.append((time.perf_counter() - start) / -(-len(ids) // (size * number)))
        found[str(size)] = 1e3 * statistics.median(seconds)
    if number > 1:
        dist.destroy_process_group()
    return found


WORKERS: dict[str, Callable[[Path], dict[str, float]]] = {
    "ours": ours,
    "mapped": mapped,
    "theirs": theirs,
    "ranks": by_ranks,
}


def steps(folder: Path, num_graphs: int) -> Iterator[Step]:
    """What is measured, one after the other: later steps take what earlier ones have made."""
    command = (sys.executable, "-m", "spin_fast.cli")
    worker = (sys.executable, "-m", f"{__package__}.scale", "--folder", folder, "--worker")
    graphs, few, features = folder / GRAPHS, folder / FEW_GRAPHS, folder / FEATURES
    precompute = (*command, "precompute", "--json", "--hops", str(inputs.NUM_HOPS), "--shard-size", SHARD_SIZE, "--out")
    predict = (*command, "predict", "--json", "--out", folder / "probabilities.parquet")
    yield Step("precompute", (*precompute, features, graphs), num_graphs)
    yield Step("fit, two epochs over the shards", (*worker, "ours"), num_graphs)
    yield Step("predict", (*predict, folder / MODEL, graphs), num_graphs)
    run = ("--epochs", "2", "--batch-size", str(BATCH_SIZE), "--threads", "1", "--out", folder / "run")
    yield Step(
        "train, two epochs of joint rows",
        (*command, "train", "--json", "--features", features, graphs, *run),
        num_graphs,
    )
    yield Step("epochs over one shard, mapped and in memory", (*worker, "mapped"), 2 * EPOCHS * FEW)
    yield Step("precompute", (*precompute, folder / "few.safetensors", few), FEW)
    yield Step("precompute --no-deduplicate", (*precompute, folder / "dense.safetensors", few, "--no-deduplicate"), FEW)
    yield Step("PyG: OnDiskDataset, two epochs of a GIN", (*worker, "theirs"), FEW)


def best_of_two(of_ranks: dict[str, dict[str, float]]) -> dict[str, float]:
    """Milliseconds of a step by two ranks, with SCHED_BATCH where it could be asked for."""
    return of_ranks.get("two, SCHED_BATCH", of_ranks["two"])


def plan(found: list[dict[str, Any]], of_ranks: dict[str, dict[str, float]]) -> report.Table:
    """What more graphs would take on more machines, from the rates of one core and what two ranks take for a step."""
    cost = {step["step"]: step for step in found[:3]}
    rates = {name: step["graphs"] / step["seconds"] for name, step in cost.items()}
    of_graph = cost["precompute"]["bytes"] / cost["precompute"]["graphs"]
    rows, one = [], of_ranks["one"]
    exchange = statistics.median(best_of_two(of_ranks)[size] - one[size] for size in one)
    for graphs in PLANNED_GRAPHS:
        for machines in PLANNED_MACHINES:
            ranks = machines * CORES
            step = 1e-3 * (one[str(BATCH_SIZE)] + math.log2(ranks) * exchange) + 2 * GRADIENT / BANDWIDTH
            epoch = graphs / (ranks * BATCH_SIZE) * step
            each = [graphs / (rates[name] * ranks) for name in ("precompute", "predict")]
            seconds = (f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in (each[0], epoch, each[1]))
            size = f"{graphs * of_graph / 1e9:,.0f}"
            rows.append((f"{graphs:,}", f"{machines:,}", size, *seconds, f"{ranks * BATCH_SIZE:,}"))
    headers = ("graphs", "machines", "GB of features", "precompute, s", "an epoch, s", "predict, s", "graphs per step")
    return report.Table("", headers, [rows], left=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m spin_fast.benchmarks.studies.scale", description="Measure what millions of graphs take."
    )
    parser.add_argument("--root", help="folder of the data sets (default: $SPIN_FAST_DATA, else data)")
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="where to keep graphs and features")
    parser.add_argument("--results", type=Path, default=Path("."), metavar="DIR", help="default: the current folder")
    parser.add_argument("--graphs", type=int, default=NUM_GRAPHS, metavar="NUMBER", help="default: %(default)s")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.worker is not None:
        torch.set_num_threads(1)
        told = WORKERS[options.worker](folder)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(told))
        return
    draw(options.root, folder / GRAPHS, options.graphs)
    draw(options.root, folder / FEW_GRAPHS, FEW)
    found = []
    for step in track([*steps(folder, options.graphs)], "measuring", disable=None):
        cost, told = cost_of(step.command, folder)
        kept = {name: value for name, value in told.items() if name in KEPT}
        found.append({"step": step.title, "graphs": step.num_graphs, **cost._asdict(), **kept})
        write(found, {}, options.results)
    worker = ("-m", f"{__package__}.scale", "--folder", folder, "--worker", "ranks")
    two = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    by = {"one": (sys.executable,), "two": two}
    if CHRT:
        by |= {f"{name}, SCHED_BATCH": (CHRT, "-b", "0", *two[:-1], of) for name, of in (("two", "2"), ("four", "4"))}
    of_ranks = {name: cost_of((*command, *worker), folder)[1] for name, command in by.items()}
    write(found, of_ranks, options.results)


def write(found: list[dict[str, Any]], of_ranks: dict[str, dict[str, float]], folder: Path) -> None:
    """Write ``scale.json`` and tables of it."""
    machine = report.machine()
    with replacing(folder / "scale.json") as file:
        content = {"machine": machine, "steps": found, "milliseconds of a step by ranks": of_ranks}
        file.write_text(json.dumps(content, indent=2) + "\n")
    headers = ("step", "graphs", "seconds", "graphs per second", "GB, own", "GB, with mapped files")
    rows, facts = [], []
    for step in found:
        memory = (f"{step[name] / 1e9:.2f}" for name in ("own_memory", "with_mapped"))
        rate = step["graphs"] / step["seconds"]
        rows.append((step["step"], f"{step['graphs']:,}", f"{step['seconds']:.0f}", f"{rate:,.0f}", *memory))
        told = "; ".join(tell(step[name]) for name, tell in KEPT.items() if name in step)
        facts += [f"- {step['step']}, {step['graphs']:,} graphs: {told}"] if told else []
    table = report.markdown_rows(report.Table("", headers, [rows]))
    lines = ["# Millions of graphs", "", NOTE, "", *table, "", *facts, ""]
    if of_ranks:
        headers = ("graphs per step of a rank", *(f"{name}, ms" for name in of_ranks), "graphs per second, times")
        rows, two = [], best_of_two(of_ranks)
        for size, one in of_ranks["one"].items():
            steps = (f"{times[size]:.2f}" for times in of_ranks.values())
            rows.append((size, *steps, f"{2 * one / two[size]:.2f}"))
        lines += [
            "Steps over the first shard, by one process and by those of torchrun (gloo), medians of epochs; four ranks "
            "share two cores, and the last column compares two with one:",
            "",
            *report.markdown_rows(report.Table("", headers, [rows], left=0)),
            "",
            f"Computed, not measured: machines of {CORES} cores, each as fast as one here; a step is that of "
            f"{BATCH_SIZE} graphs per rank, and for each doubling of the ranks what the second one adds to it here, "
            f"with a gradient of {GRADIENT:,} bytes at {BANDWIDTH / 1e9:.2f} GB/s, both ways:",
            "",
            *report.markdown_rows(plan(found, of_ranks)),
            "",
        ]
    with replacing(folder / "scale.md") as file:
        file.write_text("\n".join([*lines, report.describe(machine), ""]))


if __name__ == "__main__":
    main()
