"""The tables of speed in ``docs/measured.md`` and README, of the committed races.

    python -m spin_fast.benchmarks.studies.measured

writes each anew, in a checkout, behind its ``<!-- table: NAME -->``. A column is a data set, a row what was raced on a
CPU; what was not stays empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from spin_fast._common.files import replacing

RESULTS = Path(__file__).resolve().parent.parent / "results"
CPUS = ("Zen 3", "Zen 4", "Zen 5")
APART = "Zen 5, apart"  # cores that share no cache
FOLDERS = {"Zen 3": "zen3", "Zen 4": "zen4", "Zen 5": "zen5", APART: "zen5/two-threads"}  # of the races, in RESULTS
DATASETS = {
    "COLLAB": "COLLAB",
    "IMDB-M": "IMDB-MULTI",
    "IMDB-B": "IMDB-BINARY",
    "NCI1": "NCI1",
    "REDDIT-B": "REDDIT-BINARY",
    "molhiv": "ogbg-molhiv",
    "PROTEINS": "PROTEINS",
    "DD": "DD",
    "ENZYMES": "ENZYMES",
}

Race = Mapping[str, Any]
Shown = Callable[[Race], str]


class Row(NamedTuple):
    """What ``shown`` makes of the races of ``case``, whose inputs are data sets, or some ``graphs`` of each."""

    label: str
    cpu: str
    case: str
    shown: Shown
    graphs: str = ""
    threads: int = 1

    def cell(self, dataset: str) -> str:
        race = races(self.cpu).get((self.case, dataset + self.graphs, self.threads))
        return "" if race is None else self.shown(race)


@cache
def races(cpu: str) -> Mapping[tuple[str, str, int], Race]:
    """By case, input and number of threads.

    Raises:
        ValueError: a race is in two folders.
    """
    found: dict[tuple[str, str, int], Race] = {}
    for file in sorted((RESULTS / FOLDERS[cpu]).glob("*/results.json")):
        for race in json.loads(file.read_text())["races"]:
            key = (race["case"], race["input"], race["threads"])
            if key in found:
                raise ValueError(f"{file} has a race that another folder has, too: {key}")
            found[key] = race
    return found


# ---- What is shown of a race


def short(value: float) -> str:
    """A whole number, or two digits."""
    return f"{value:.{0 if value >= 9.95 else 1 if value >= 0.995 else 2}f}"


def fastest(race: Race, contenders: str) -> str | None:
    """Of those whose names match, the one that took the least time."""
    names = [name for name in race["seconds"] if re.fullmatch(contenders, name)]
    return min(names, key=lambda name: float(race["seconds"][name]["median"]), default=None)


def over(others: str | None, contenders: str) -> Shown:
    """The time of the fastest of ``contenders`` over that of the fastest of ``others``; in italics where timed once.

    None is ours, to which ratios were taken round by round.
    """

    def shown(race: Race) -> str:
        name, other = fastest(race, contenders), others and fastest(race, others)
        if name is None or (others and not other):
            return ""
        median = race["seconds"][name]["median"]
        ratio = short(median / race["seconds"][other]["median"] if other else race["ratios"][name]["median"])
        return f"*{ratio}*" if len(race["samples"][name]) == 1 else ratio

    return shown


def over_ours(contenders: str) -> Shown:
    return over(None, contenders)


def floors(race: Race) -> str:
    """Our time over that of the floor, round by round."""
    return short(race["floor"]["ours_over_it"]["median"])


def over_hops(race: Race) -> str:
    """The fastest rival over a copy and three hops: no hop, and 3/2 of what three hops take longer than one."""
    names = (fastest(race, SPARSE), "spin_fast, contents trusted", "one hop", "no hop")
    rival, three, one, none = (race["seconds"][name]["median"] for name in names)
    return short(rival / (none + 1.5 * (three - one)))


# ---- The tables

EPOCH, EPOCH_32 = "training epoch, batches of 128", "training epoch, batches of 32"
PREDICTION, ONE_BY_ONE = "prediction, precomputation included", "prediction, 64 graphs one by one"
FEATURES = "PowerFeatures.from_graphs"
NEW, REUSED = "power_features, new output", "power_features, output reused"
RAW, HOPS = "power_features, end to end from raw CSR, new output", "power_features, hops alone"
FORWARD, BOTH = "attention readout, forward", "attention readout, forward and backward"

GIN, BEST_GIN = "GIN edge_index, DataLoader", "GIN .*, collated.*"
GCN, BEST_GCN = "GCN edge_index, DataLoader", "GCN .*, collated.*"
COLLATED, PREDICTOR = "GIN edge_index, collated in the call", "SPIN-att, Predictor"
PLAIN = "SPIN-att, vectorised PyTorch"
PRODUCTS = "floor: arithmetic, large products"
POWERS, TOLD = "power_features, contents trusted", "told which rows are equal"
SPARSE, SIGN = "scipy.*|torch CSR.*", "PyG SIGN"
READOUTS, COMPILED = "PyG softmax.*|segment_reduce", "torch.compile"

BATCH, SMALL_BATCH = ", 128 graphs", ", 32 graphs"


def on(cpus: Sequence[str], label: str, case: str, shown: Shown, graphs: str = "", threads: int = 1) -> list[Row]:
    return [Row(label, cpu, case, shown, graphs, threads) for cpu in cpus]


def two_threads(label: str, case: str) -> list[Row]:
    return on((*CPUS, APART), label, f"{case}, scaling", over_ours("1 thread"), threads=2)


TABLES = {
    "speed": [
        *on(CPUS[::2], "GIN of PyG, DataLoader", EPOCH, over_ours(GIN)),
        *on(CPUS[::2], "GCN of PyG, DataLoader", EPOCH, over_ours(GCN)),
        *on(CPUS[::2], "GIN, tuned", EPOCH, over_ours(BEST_GIN)),
        *on(CPUS[::2], "SPIN in vectorised PyTorch", EPOCH, over_ours(PLAIN)),
        *on(CPUS[::2], "probabilities: GIN of PyG", PREDICTION, over_ours(GIN)),
        *on(CPUS[::2], "the same, a graph a call", ONE_BY_ONE, over_ours(COLLATED)),
    ],
    "epochs": [
        *on(CPUS, "PyG GIN, DataLoader", EPOCH, over_ours(GIN)),
        *on(CPUS, "batches of 32", EPOCH_32, over_ours(GIN)),
        *on(CPUS, "PyG GCN, DataLoader", EPOCH, over_ours(GCN)),
        *on(CPUS, "the best GIN", EPOCH, over_ours(BEST_GIN)),
        *on(CPUS, "batches of 32", EPOCH_32, over_ours(BEST_GIN)),
        *on(CPUS, "the best GCN", EPOCH, over_ours(BEST_GCN)),
        *on(CPUS, "SPIN-att in vectorised PyTorch", EPOCH, over_ours(PLAIN)),
        *on(CPUS, "the same, deduplicated", EPOCH, over_ours(f"{PLAIN}, deduplicated")),
        *on(CPUS, "SPIN-att, loop over graphs", EPOCH, over_ours("SPIN-att, loop over graphs")),
    ],
    "epochs of others of ours": [
        *on(CPUS, "SPIN-sum", EPOCH, over_ours("SPIN-sum")),
        *on(CPUS, "SPIN-sum, joint rows", EPOCH, over_ours("SPIN-sum, joint rows")),
    ],
    "epochs in products": [
        *on(CPUS, "ours", EPOCH, over(PRODUCTS, "SPIN-att")),
        *on(CPUS, "PyG GIN, DataLoader", EPOCH, over(PRODUCTS, GIN)),
        *on(CPUS, "the best GIN", EPOCH, over(PRODUCTS, BEST_GIN)),
    ],
    "predictions": [
        *on(CPUS, "PyG GIN, DataLoader", PREDICTION, over_ours(GIN)),
        *on(CPUS, "the best GIN", PREDICTION, over_ours(BEST_GIN)),
        *on(CPUS, "the best GCN", PREDICTION, over_ours(BEST_GCN)),
    ],
    "predictions in products": [
        *on(CPUS, "ours", PREDICTION, over(PRODUCTS, "SPIN-att")),
        *on(CPUS, "PyG GIN, DataLoader", PREDICTION, over(PRODUCTS, GIN)),
    ],
    "single graphs": [
        *on(CPUS, "PyG GIN, batch and all", ONE_BY_ONE, over_ours(COLLATED)),
        *on(CPUS, "PyG GIN, its batch made beforehand", ONE_BY_ONE, over(PREDICTOR, "GIN edge_index, collated")),
        *on(CPUS, "by `torch.compile`", ONE_BY_ONE, over(PREDICTOR, "GIN edge_index, torch.compile.*")),
    ],
    "two threads": [
        *two_threads("epoch, batches of 128", EPOCH),
        *two_threads("epoch, batches of 32", EPOCH_32),
        *two_threads("probabilities of graphs", "prediction from graphs"),
        *two_threads("`PowerFeatures.from_graphs`", "from_graphs"),
        *two_threads("a large product", "large product"),
    ],
    "rivals by two threads": [
        *on(CPUS, "epoch: PyG GIN, DataLoader", EPOCH, over_ours(GIN), threads=2),
        *on(CPUS, "batches of 32", EPOCH_32, over_ours(GIN), threads=2),
        *on(CPUS, "epoch: the best GIN", EPOCH, over_ours(BEST_GIN), threads=2),
        *on(CPUS, "batches of 32", EPOCH_32, over_ours(BEST_GIN), threads=2),
        *on(CPUS, "probabilities: PyG GIN, DataLoader", PREDICTION, over_ours(GIN), threads=2),
    ],
    "features": [
        *on(CPUS, "`from_graphs`", FEATURES, over(POWERS, "from_graphs")),
        *on(CPUS, "told which rows are equal", FEATURES, over(POWERS, TOLD)),
        *on(CPUS, "told the slot of each, too", FEATURES, over(POWERS, f"{TOLD} and the slot of each")),
        *on(CPUS, "`deduplicate=False`", FEATURES, over(POWERS, "from_graphs, deduplicate=False")),
    ],
    "powers": [
        *on(CPUS, "reused", REUSED, over_ours(SPARSE)),
        *on(CPUS, "bound: hops alone", HOPS, over_hops),
        *on(CPUS, "ours, in floors", REUSED, floors),
        *on(CPUS, "128 graphs, reused", REUSED, over_ours(SPARSE), BATCH),
        *on(CPUS, "bound: hops alone", HOPS, over_hops, BATCH),
        *on(CPUS, "new output", NEW, over_ours(SPARSE)),
        *on(CPUS, "from raw CSR, new output", RAW, over_ours(f"{SPARSE}|{SIGN}")),
    ],
    "readouts": [
        *on(CPUS, "forward: PyG, `segment_reduce`", FORWARD, over_ours(READOUTS)),
        *on(CPUS, "forward: `torch.compile`", FORWARD, over_ours(COMPILED)),
        *on(CPUS, "ours, in floors", FORWARD, floors),
        *on(CPUS, "both ways: PyG, `segment_reduce`", BOTH, over_ours(READOUTS)),
        *on(CPUS, "both ways: `torch.compile`", BOTH, over_ours(COMPILED)),
        *on(CPUS, "ours, in floors", BOTH, floors),
        *on(CPUS, "128 graphs, both ways: `torch.compile`", BOTH, over_ours(COMPILED), BATCH),
        *on(CPUS, "32 graphs, both ways: `torch.compile`", BOTH, over_ours(COMPILED), SMALL_BATCH),
    ],
}


def table(rows: Sequence[Row]) -> str:
    """In Markdown, without rows and columns of which nothing was raced; a label stands in the first of its rows."""
    raced = {name: dataset for name, dataset in DATASETS.items() if any(row.cell(dataset) for row in rows)}
    lines = [["", "CPU", *raced], ["---", "---", *("---:" for _ in raced)]]
    label = ""
    for row in rows:
        cells = [row.cell(dataset) for dataset in raced.values()]
        if any(cells):
            lines.append(["" if row.label == label else row.label, row.cpu, *cells])
            label = row.label
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(page: str) -> str:
    """The text of a page, its tables made anew."""
    place = re.compile(r"^(<!-- table: (.+) -->\n\n)(?:\|.*\n)*\n?", re.MULTILINE)
    return place.sub(lambda found: f"{found[1]}{table(TABLES[found[2]])}\n", page)


def main() -> None:
    checkout = RESULTS.parent.parent
    for path in (checkout / "docs" / "measured.md", checkout / "README.md"):
        with replacing(path) as part:
            part.write_text(with_tables(path.read_text()))
        print(f"written: {path}")


if __name__ == "__main__":
    main()
