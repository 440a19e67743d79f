"""Writes made-up TU sets, and such as those of OGB; compares what is read of them in chunks with the whole."""

from __future__ import annotations

import gzip
import zipfile
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from spin_fast import GraphBatch, datasets
from spin_fast.datasets import Folder, Reader

from . import equal

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


@st.composite
def graph_lists(draw: Any) -> list[Graph]:
    """Graphs without nodes and without edges among them; the last has a node, and there is an edge."""
    sizes = [*draw(st.lists(st.integers(0, 5), max_size=8)), draw(st.integers(1, 3))]
    graphs: list[Graph] = []
    for size in sizes:
        node = st.integers(0, max(size - 1, 0))
        graphs.append((size, draw(st.lists(st.tuples(node, node), max_size=6 if size else 0))))
    if not any(edges for _, edges in graphs):
        graphs[-1][1].append((0, 0))
    return graphs


def known(graphs: GraphBatch) -> GraphBatch:
    """With another number for labels that are missing, which is equal to itself, and weights if any might have some."""
    y = None if graphs.y is None else graphs.y.nan_to_num(7)
    weight = graphs.x.new_ones(graphs.num_edges) if graphs.edge_weight is None else graphs.edge_weight
    return replace(graphs, y=y, edge_weight=weight)


def check_chunks(reader: Reader, whole: Folder, num_graphs: int, num_shards: int) -> None:
    expected = known(whole.graphs)
    assert len(reader) == len(whole.names) == len(expected)
    chunks: list[Folder] = []
    for number in range(1, num_shards + 1):
        shard = None if num_shards == 1 else (number, num_shards)
        for chunk in reader.chunks(num_graphs, shard):
            begin = sum(len(chunk.names) for chunk in chunks)
            chunks.append(chunk._replace(graphs=known(chunk.graphs)))
            assert len(chunk.names) <= num_graphs
            assert chunk.names == whole.names[begin : begin + len(chunk.names)]
            assert chunk[2:] == whole._replace(nodes=chunk.nodes)[2:]
            assert equal(chunks[-1].graphs, expected[begin : begin + len(chunk.names)])
    assert sum(len(chunk.names) for chunk in chunks) == len(whole.names)
    if whole.nodes is not None:
        assert [name for chunk in chunks for name in chunk.nodes or []] == whole.nodes
