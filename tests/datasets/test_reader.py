"""Ranges of the graphs of a source: together they are the whole, and nothing else is read."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from helpers import assert_same_features, equal, random_graphs
from helpers.cli import folder_of_graphs

from spin_fast import GraphBatch, PowerFeatures, datasets
from spin_fast.datasets import Folder, iter_folder, load_folder, write_parquet

WORDS = ["C", "N", "O", "Cl", "Xe"]


def write_graphml(folder: Path) -> Path:
    """Graphs without nodes and without edges come first, then words and classes that occur once."""
    folder.mkdir()
    for number in range(7):
        graph = networkx.DiGraph(label=f"class {number % 3}" if number else "rare")
        for node in range([0, 1, 2, 3, 1, 4, 2][number]):
            graph.add_node(node, mass=number + node / 2, element=WORDS[(number + node) % 5])
        graph.add_edges_from([(node, node - 1) for node in range(1, len(graph))], weight=number + 0.5)
        networkx.write_graphml(graph, folder / f"g{number}.graphml")
    return folder


def write_rows(folder: Path) -> Path:
    """Several files with several row groups, one of them without rows."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir()
    rows: dict[str, list[Any]] = {
        "source": [[*range(1, size)] for size in (0, 1, 2, 3, 1, 4, 2)],
        "target": [[*range(size - 1)] if size else [] for size in (0, 1, 2, 3, 1, 4, 2)],
        "mass": [[[number, node] for node in range(size)] for number, size in enumerate((0, 1, 2, 3, 1, 4, 2))],
        "element": [
            [WORDS[(number + node) % 5] for node in range(size)] for number, size in enumerate((0, 1, 2, 3, 1, 4, 2))
        ],
        "label": ["rare", *"abcabc"],
    }
    table = pyarrow.table(rows)
    for name, begin, end, size in (("1", 0, 3, 2), ("2", 3, 3, 2), ("3", 3, 7, 3)):
        parquet.write_table(table.slice(begin, end - begin), folder / f"{name}.parquet", row_group_size=size)
    return folder


def write_tables(folder: Path) -> Path:
    return folder_of_graphs(folder, ["a", "b"], 7)


def joined(chunks: list[Folder]) -> GraphBatch:
    return GraphBatch.concatenate(chunk.graphs for chunk in chunks)


@pytest.mark.parametrize("write", [write_graphml, write_rows, write_tables])
def test_shards_are_the_whole(write: Any, tmp_path: Path) -> None:
    whole = load_folder(write(tmp_path / "set"))
    assert len(whole.graphs) == 7
    for of in (1, 2, 3, 6, 7, 11):
        shards = [[*iter_folder(tmp_path / "set", 2, shard=(number, of))] for number in range(1, of + 1)]
        for number, chunks in enumerate(shards, 1):
            assert sum(len(chunk.graphs) for chunk in chunks) == 7 * number // of - 7 * (number - 1) // of
            assert [len(chunk.names) for chunk in chunks] == [len(chunk.graphs) for chunk in chunks]
            assert all(chunk._replace(nodes=whole.nodes)[2:] == whole[2:] for chunk in chunks)
            assert len(chunks) == 1 or all(0 < len(chunk.names) <= 2 for chunk in chunks)
        chunks = [chunk for chunks in shards for chunk in chunks]
        assert [name for chunk in chunks for name in chunk.names] == whole.names
        assert [name for chunk in chunks for name in chunk.nodes or []] == (whole.nodes or [])
        assert equal(joined(chunks), whole.graphs)


@pytest.mark.parametrize("suffix", ["graphml", "parquet"])
def test_chunks_with_repeated_edges_and_without_are_alike(suffix: str, tmp_path: Path) -> None:
    for number in range(4):
        graph = networkx.MultiDiGraph([(0, 1), *[(1, 0)] * number])
        if suffix == "graphml":
            networkx.write_graphml(graph, tmp_path / f"{number}.graphml")
        else:
            pytest.importorskip("pyarrow")
            write_parquet(GraphBatch.from_networkx([graph]), tmp_path / f"{number}.parquet")
    chunks = [chunk for number in (1, 2, 3) for chunk in iter_folder(tmp_path, 1, shard=(number, 3), coalesce="sum")]
    assert equal(joined(chunks), load_folder(tmp_path, coalesce="sum").graphs)
    (empty,) = iter_folder(tmp_path, 1, shard=(1, 5), coalesce="sum")
    assert empty.graphs.edge_weight.tolist() == []
    features = PowerFeatures.from_chunks((chunk.graphs for chunk in chunks), 1)
    assert_same_features(features, PowerFeatures.from_graphs(joined(chunks), 1))
    assert all(chunk.graphs.edge_weight is None for chunk in iter_folder(tmp_path, 1, coalesce="max"))


def test_chunks_without_labels(tmp_path: Path) -> None:
    """They have none where no graph has; where classes are given they are as much a mistake as a gap."""
    for number, label in enumerate(["a", "b", None, None]):
        graph = networkx.DiGraph([(0, 1)], **({} if label is None else {"label": label}))
        networkx.write_graphml(graph, tmp_path / f"{number}.graphml")
    told = r"2\.graphml has no graph attribute 'label', (but|and) (?!.*task)"
    for size in (1, 2, 3, 4):
        with pytest.raises(datasets.DatasetError, match=told):
            list(iter_folder(tmp_path, size, classes=["a", "b"]))
    for number in (0, 1):
        (tmp_path / f"{number}.graphml").unlink()
    assert [chunk.graphs.y for chunk in iter_folder(tmp_path, 1)] == [None, None]
    assert [chunk.graphs.y for chunk in iter_folder(tmp_path, 1, label=None)] == [None, None]


def test_what_is_outside_is_not_read(tmp_path: Path) -> None:
    """Where options tell words and classes, files and row groups outside may be damaged."""
    known = load_folder(write_rows(tmp_path / "rows"))
    from pyarrow import parquet

    path = tmp_path / "rows" / "3.parquet"
    group = parquet.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    begin = group.dictionary_page_offset or group.data_page_offset
    content[begin : begin + group.total_compressed_size] = b"\xff" * group.total_compressed_size
    path.write_bytes(content)
    options: dict[str, Any] = {"features": known.features, "classes": known.classes}
    chunks = [
        chunk for number in range(1, 7) for chunk in iter_folder(tmp_path / "rows", 9, shard=(number, 7), **options)
    ]
    assert equal(joined(chunks), known.graphs[:6])
    with pytest.raises(datasets.DatasetError, match=r"3\.parquet cannot be"):
        list(iter_folder(tmp_path / "rows", 9, shard=(7, 7), **options))
    path.write_bytes(b"PAR1")
    with pytest.raises(datasets.DatasetError, match=r"3\.parquet cannot be"):
        list(iter_folder(tmp_path / "rows", 9, shard=(1, 7), **options))

    known = load_folder(write_graphml(tmp_path / "files"))
    options = {"features": known.features, "classes": known.classes}
    for number in (4, 6):
        (tmp_path / "files" / f"g{number}.graphml").write_text("no XML")
    (chunk,) = iter_folder(tmp_path / "files", 9, shard=(2, 3), **options)
    assert chunk.names == ["g2", "g3"]
    assert equal(chunk.graphs, known.graphs[2:4])
    with pytest.raises(datasets.DatasetError, match=r"g4\.graphml"):
        list(iter_folder(tmp_path / "files", 9, shard=(3, 3), **options))


@pytest.mark.parametrize(
    ("shard", "error", "message"),
    [
        (3, TypeError, "shard must be a pair such as"),
        ((1, 2, 3), TypeError, "shard must be a pair such as"),
        ((1, 2.0), TypeError, "shard must be an int, got float"),
        ((0, 2), ValueError, "shard must be at least 1, got 0"),
        ((3, 2), ValueError, r"shard must be one of those there are, counted from 1, got \(3, 2\)"),
    ],
)
def test_shards_that_there_are_not(shard: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        iter_folder(write_tables(tmp_path / "set"), 2, shard=shard)


def test_chunks_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    write_parquet(random_graphs([4] * 60, dtype=torch.float32), tmp_path / "1.parquet")
    made: list[weakref.ref] = []
    from_parts = GraphBatch._from_parts.__func__

    def watched(cls: type[GraphBatch], *arguments: Any) -> GraphBatch:
        assert all(graphs() is None for graphs in made)
        graphs = from_parts(cls, *arguments)
        made.append(weakref.ref(graphs.x))
        return graphs

    monkeypatch.setattr(GraphBatch, "_from_parts", classmethod(watched))
    for chunk in iter_folder(tmp_path, 7, shard=(2, 3)):
        assert len(chunk.graphs) in (7, 6)
        del chunk
    assert len(made) == 3
