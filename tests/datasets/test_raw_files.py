"""TU sets and OGB's raw files: chunks of any size, and shards, are what is read as a whole."""

from __future__ import annotations

import gzip
import io
import signal
import weakref
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DATA, equal
from helpers.raw_files import Graph, check_chunks, graph_lists, known, lines, sources, write_ogb, write_tu
from hypothesis import assume, given
from hypothesis import strategies as st

from spin_fast import GraphBatch, datasets
from spin_fast.datasets import common


def edges_of(graphs: GraphBatch) -> list[tuple[int, int]]:
    rows = torch.arange(graphs.num_nodes).repeat_interleave(graphs.degree)
    return list(zip(rows.tolist(), graphs.indices.tolist(), strict=True))


def listed(graphs: list[Graph]) -> set[tuple[int, int]]:
    first = accumulate((size for size, _ in graphs), initial=0)
    return {(begin + i, begin + j) for begin, (_, edges) in zip(first, graphs, strict=False) for i, j in edges}


@given(
    graphs=graph_lists(),
    seed=st.integers(0, 99),
    zipped=st.booleans(),
    shuffled=st.booleans(),
    options=st.sampled_from(
        [
            {},
            {"features": "attribute+label[3..6,0..9]", "dtype": torch.float64},
            {"features": "degree", "undirected": True},
            {"features": "attribute", "coalesce": "sum", "undirected": True, "self_loops": True},
            {"label": None, "features": "label", "self_loops": False},
        ]
    ),
    num_graphs=st.integers(1, 10),
    num_shards=st.integers(1, 4),
    block=st.integers(1, 9),
)
def test_tu(
    graphs: list[Graph],
    seed: int,
    zipped: bool,
    shuffled: bool,
    options: dict[str, Any],
    num_graphs: int,
    num_shards: int,
    block: int,
    tmp_path_factory: Any,
) -> None:
    assume("label" not in options or len(graphs) <= sum(size for size, _ in graphs))
    root = tmp_path_factory.mktemp("tu")
    write_tu(root, graphs, np.random.default_rng(seed), zipped=zipped, shuffled=shuffled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "BLOCK_NUMBERS", block)
        sources = [datasets.find(root / ("SET.zip" if zipped else "SET"))]
        sources += [] if options.keys() - {"features", "dtype"} else [datasets.find("SET", root)]
        for source in sources:
            reader, whole = source.open(**options), source.read(**options)
            if options.get("features", "").startswith("attribute+"):
                assert whole.graphs.num_features == 17
                assert whole.features == options["features"]
            check_chunks(reader, whole, num_graphs, num_shards)
            if not options.keys() - {"features", "dtype"}:
                assert edges_of(whole.graphs) == sorted(listed(graphs))
            in_graphs = [g for g, (_, edges) in enumerate(graphs) for _ in edges]
            assert (reader.whole is None) or (shuffled and len({*in_graphs}) > 1)
            if reader.whole is not None:
                assert equal(known(reader.whole.graphs), known(whole.graphs))


@given(
    graphs=graph_lists(),
    seed=st.integers(0, 99),
    num_tasks=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    num_graphs=st.integers(1, 10),
    num_shards=st.integers(1, 4),
    block=st.integers(1, 9),
)
def test_ogb(
    graphs: list[Graph],
    seed: int,
    num_tasks: int,
    dtype: torch.dtype,
    num_graphs: int,
    num_shards: int,
    block: int,
    tmp_path_factory: Any,
) -> None:
    root = tmp_path_factory.mktemp("ogb")
    write_ogb(root, graphs, np.random.default_rng(seed), num_tasks=num_tasks)
    source = datasets.find("ogbg-set", root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "BLOCK_NUMBERS", block)
        reader, whole = source.open(dtype=dtype), source.read(dtype=dtype)
        assert reader.whole is None
        check_chunks(reader, whole, num_graphs, num_shards)
        assert edges_of(whole.graphs) == sorted(listed(graphs) | {(j, i) for i, j in listed(graphs)})


SMALL = ("CSL", "ENZYMES", "IMDB-BINARY", "IMDB-MULTI", "NCI1", "OHSU.zip", "PROTEINS", "Peking_1.zip")
LARGE = ("COLLAB", "DD", "PROTEINS_full", "REDDIT-BINARY", "ogbg-molhiv")


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_public_sets(name: str) -> None:
    source = datasets.find(DATA / name if name.endswith(".zip") else name, DATA)
    if source.path is None or not source.path.exists():
        pytest.skip(f"no {name} in {DATA}: put the public files there or set SPIN_FAST_DATA")
    reader, whole = source.open(), source.read()
    assert reader.whole is None
    check_chunks(reader, whole, 1024, 1)
    check_chunks(reader, whole, 1000, 3)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name of a file and how many lines of it are read at once, of every time that any are."""
    read, seen = common.Numbers.read, []

    def watched(self: common.Numbers, lines: int | None = None) -> np.ndarray:
        table = read(self, lines)
        seen.append((Path(self._where).name, len(table)))
        return table

    monkeypatch.setattr(common.Numbers, "read", watched)
    return seen


def test_only_a_chunk_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int]]
) -> None:
    """Of what there is of nodes and edges, and nothing after the shard of a file that tells how much there is."""
    monkeypatch.setattr(common, "BLOCK_NUMBERS", 20)
    for source in sources(tmp_path):
        reader = source.open()
        assert len(reader) == 40
        assert reader.whole is None
        reads.clear()
        made: list[weakref.ref] = []
        for chunk in reader.chunks(4, (2, 4)):
            assert all(graphs() is None for graphs in made)
            made.append(weakref.ref(chunk.graphs))
            assert len(chunk.names) == (2 if len(made) == 3 else 4)
            del chunk
        assert len(made) == 3
        assert {file.partition(":")[2] or file for file, _ in reads} <= {
            *("SET_A.txt", "SET_node_labels.txt", "edge.csv.gz", "node-feat.csv.gz")
        }
        for file in {file for file, _ in reads}:
            sizes = [lines for name, lines in reads if name == file]
            assert max(sizes) <= 16
            assert sum(sizes) == (20 if "edge" in file or "_A" in file else 15) * 4


def test_a_file_is_parsed_once_as_a_whole(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    for source in sources(tmp_path):
        reads.clear()
        source.read()
        sizes = {file: sum(lines for name, lines in reads if name == file) for file, _ in reads}
        assert max(sizes.values()) == 160


def test_what_comes_after_a_shard_may_be_wrong(tmp_path: Path) -> None:
    """In the files of OGB, which are not looked through."""
    source = sources(tmp_path)[1]
    path = tmp_path / "ogbg_set" / "raw" / "edge.csv.gz"
    whole = source.read()
    for text, error in (("9, 9\n", "line 160 names node 9"), ("", "160, got 159"), ("0, 0\n" * 3, "160, got 162")):
        right = lines([(0, 1), (1, 0), (1, 2), (2, 2)] * 40)
        path.write_bytes(gzip.compress((right.removesuffix("2, 2\n") + text).encode()))
        reader = source.open()
        (chunk,) = reader.chunks(40, (1, 2))
        assert equal(chunk.graphs, whole.graphs[:20])
        with pytest.raises(datasets.DatasetError, match=error):
            list(reader.chunks(7, (2, 2)))
    path.write_bytes(gzip.compress(b"0, 1\n" * 70))
    with pytest.raises(datasets.DatasetError, match="160, got 70"):
        list(source.open().chunks(7, (2, 2)))


def test_negative_numbers_of_nodes(tmp_path: Path) -> None:
    source = sources(tmp_path)[1]
    path = tmp_path / "ogbg_set" / "raw" / "num-node-list.csv.gz"
    path.write_bytes(gzip.compress(b"3\n-3\n9\n" + b"3\n" * 37))
    with pytest.raises(datasets.DatasetError, match=r"num-node-list\.csv\.gz, line 2 must be at least 0, got -3"):
        source.read()


@pytest.mark.parametrize("read", [1, 2])
def test_an_interruption_is_no_fault_of_the_file(read: int) -> None:
    """A signal that comes while pandas asks for more is a KeyboardInterrupt in C, of which it makes a ParserError."""

    class Interrupted(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            if self.reads == read:
                signal.raise_signal(signal.SIGINT)
            return super().read(size)

    stream = Interrupted("".join(f"{i},{i}\n" for i in range(200_000)).encode())
    with pytest.raises(KeyboardInterrupt):
        common.Numbers(stream, "x", np.int32, columns=2).read()
