"""Writes made-up TU sets, and such as those of OGB."""

from __future__ import annotations

import gzip
import zipfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from spin_fast import datasets

Graph = tuple[int, list[tuple[int, int]]]  # the number of nodes, and edges between nodes numbered from 0


def lines(table: Any) -> str:
    return "".join(", ".join(map(str, row)) + "\n" for row in np.asarray(table).tolist())


def write_tu(root: Path, graphs: list[Graph], rng: np.random.Generator, *, zipped: bool, shuffled: bool) -> None:
    """``SET.zip`` or ``SET/``; two columns of labels 3 to 6, three of attributes."""
    first = [*accumulate((size for size, _ in graphs), initial=0)]
    ends = [(first[g] + i + 1, first[g] + j + 1) for g, (_, edges) in enumerate(graphs) for i, j in edges]
    num_nodes = first[-1]
    texts = {
        "A": lines(rng.permutation(ends) if shuffled else ends),
        "graph_indicator": "".join(f"{g + 1}\n" * size for g, (size, _) in enumerate(graphs)),
        "graph_labels": lines(rng.integers(-1, 2, (len(graphs), 1))),
        "node_labels": lines(rng.integers(3, 7, (num_nodes, 2))),
        "node_attributes": lines(rng.standard_normal((num_nodes, 3))),
    }
    if zipped:
        with zipfile.ZipFile(root / "SET.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for part, text in texts.items():
                archive.writestr(f"SET/SET_{part}.txt", text)
    else:
        (root / "SET").mkdir()
        for part, text in texts.items():
            (root / "SET" / f"SET_{part}.txt").write_text(text)


def write_ogb(root: Path, graphs: list[Graph], rng: np.random.Generator, *, num_tasks: int) -> None:
    """``ogbg_set/``; of three tasks some labels are missing."""
    labels = rng.integers(0, 2, (len(graphs), num_tasks)).astype(float)
    texts = {
        "num-node-list": lines([[size] for size, _ in graphs]),
        "num-edge-list": lines([[len(edges)] for _, edges in graphs]),
        "edge": lines([end for _, edges in graphs for end in edges]),
        "node-feat": lines(rng.integers(0, 99, (sum(size for size, _ in graphs), 4))),
        "graph-label": lines(labels) if num_tasks < 3 else lines(labels).replace("1.0,", ","),
    }
    folder = root / "ogbg_set" / "raw"
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / f"{file}.csv.gz").write_bytes(gzip.compress(text.encode()))


def sources(root: Path) -> list[datasets.Source]:
    """A TU set and one of OGB, of 40 graphs with 3 nodes and 4 edges each."""
    graphs: list[Graph] = [(3, [(0, 1), (1, 0), (1, 2), (2, 2)])] * 40
    write_tu(root, graphs, np.random.default_rng(0), zipped=True, shuffled=False)
    write_ogb(root, graphs, np.random.default_rng(0), num_tasks=1)
    return [datasets.find(name, root) for name in ("SET", "ogbg-set")]
