"""Parquet files with a row per graph: reading in any chunks, writing, and what is wrong with them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from helpers import assert_same_features, equal, error_of, graph_batches
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from spin_fast import GraphBatch, PowerFeatures, datasets
from spin_fast.datasets import Folder, iter_folder, load_folder, write_parquet
from spin_fast.datasets import parquet as module

ROWS: dict[str, list[Any]] = {
    "graph": ["b", " empty ", "a"],
    "source": [[0, 1], [], [0, 1]],
    "target": [[1, 0], [], [1, 1]],
    "charge": [[-1, 0, 7], [], [0.5, 1.5]],
    "mass": [[4, 3, 5], [], [1, 2]],
    "label": ["mutagen", "none", "mutagen"],
    "toxic": [1, None, 0],
}


def write(path: Path, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write the handmade rows; None leaves a column out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: values for name, values in (ROWS | (changes or {})).items() if values is not None}
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def edges(graphs: GraphBatch) -> list[tuple[int, int]]:
    return list(zip(*graphs.edge_index.tolist(), strict=True))


def test_a_row_per_graph(tmp_path: Path) -> None:
    read = load_folder(write(tmp_path / "graphs.parquet"))
    graphs = read.graphs
    assert (read.names, read.classes) == (["b", "empty", "a"], ["mutagen", "none"])
    assert (read.features, read.num_attributes) == ([{"column": "charge"}, {"column": "mass"}], 2)
    assert (read.weighted, graphs.edge_weight) == (False, None)
    assert graphs.y.tolist() == [0, 1, 0]
    assert graphs.ptr.tolist() == [0, 3, 3, 5]
    assert graphs.x.tolist() == [[-1, 4], [0, 3], [7, 5], [0.5, 1], [1.5, 2]]
    assert edges(graphs) == [(1, 0), (0, 1), (3, 4), (4, 4)]
    assert (graphs.x.dtype, graphs.indices.dtype) == (torch.float32, torch.int64)
    assert equal(datasets.load(tmp_path / "graphs.parquet"), graphs)
    assert equal(datasets.load(tmp_path), graphs)
    read = load_folder(tmp_path, label=["toxic"], features="mass", dtype=torch.float64, undirected=True)
    assert read.tasks == ["toxic"]
    assert read.graphs.y.tolist()[::2] == [[1.0], [0.0]]
    assert read.graphs.y[1].isnan().all()
    assert read.graphs.x.tolist() == [[4], [3], [5], [1], [2]]
    assert read.graphs.num_edges == 7
    read = load_folder(tmp_path, label=None, features="degree")
    assert (read.graphs.y, read.features) == (None, "degree")
    assert read.graphs.x.flatten().tolist() == [1, 1, 0, 0, 2]


def test_what_may_be_left_out(tmp_path: Path) -> None:
    changes = {"graph": None, "charge": None, "mass": None, "label": None, "num_nodes": [3, 1, 2]}
    read = load_folder(write(tmp_path / "graphs.parquet", changes))
    assert (read.names, read.classes, read.graphs.y) == (["0", "1", "2"], None, None)
    assert read.graphs.x.flatten().tolist() == [1, 1, 0, 0, 0, 2]
    narrow = pyarrow.array(ROWS["source"], pyarrow.list_(pyarrow.int32()))
    assert load_folder(write(tmp_path / "graphs.parquet", {"source": narrow})).graphs.indices.dtype == torch.int64
    assert load_folder(
        write(tmp_path / "graphs.parquet", {"source": narrow, "target": narrow})
    ).graphs.indices.dtype == (torch.int32)
    assert load_folder(write(tmp_path / "graphs.parquet", {"label": [None] * 3})).graphs.y is None


def test_weights_vectors_and_words(tmp_path: Path) -> None:
    changes = {
        "weight": [[0.5, 2], [], [1, 3]],
        "mass": [[[1, 2], [3, 4], [5, 6]], [], [[7, 8], [9, 10]]],
        "element": [["O", " C ", "O"], [], ["N", "C"]],
    }
    path = write(tmp_path / "graphs.parquet", changes)
    read = load_folder(path)
    assert (read.weighted, read.graphs.edge_weight.tolist()) == (True, [2, 0.5, 1, 3])
    assert read.features[2] == {"column": "element", "categories": ["C", "N", "O"]}
    assert (read.num_attributes, read.widths) == (3, [3, 3])
    assert read.graphs.x.tolist()[:2] == [[-1, 1, 2, 0, 0, 1], [0, 3, 4, 1, 0, 0]]
    assert load_folder(path, edge_weight=None).graphs.edge_weight is None
    charges = load_folder(path, features={"column": "charge", "categories": "auto"})
    assert charges.features == [{"column": "charge", "categories": ["-1.0", "0.0", "0.5", "1.5", "7.0"]}]
    for known in ({}, {"features": read.features}, {"classes": read.classes}):
        parts = list(iter_folder(path, 2, **known))
        assert equal(GraphBatch.concatenate(part.graphs for part in parts), read.graphs)
        assert all(part[2:] == read[2:] for part in parts)
    message = error_of(lambda: load_folder(path, features={"column": "element", "categories": ["C", "O"]}))
    assert "row 2, column 'element' holds 'N', which features have no category for" in message


@given(
    graphs=graph_batches(weighted=True),
    num_graphs=st.integers(1, 4),
    row_group=st.integers(1, 5),
    with_labels=st.sampled_from(["none", "classes", "tasks"]),
    cuts=st.lists(st.integers(0, 6), max_size=3),
)
def test_what_is_written_is_read(
    graphs: GraphBatch, num_graphs: int, row_group: int, with_labels: str, cuts: list[int], tmp_path_factory: Any
) -> None:
    """All arrays, in whatever chunks they are written and read, from one file or several; features of a stream, too."""
    generator = torch.Generator().manual_seed(len(graphs))
    order = {
        "batch": torch.arange(len(graphs)).repeat_interleave(graphs.num_nodes_per_graph),
        "num_graphs": len(graphs),
    }
    y, label = None, None
    if with_labels == "classes":
        y, label = torch.arange(len(graphs)) % 3, "label"
    if with_labels == "tasks":
        y = torch.randint(0, 3, (len(graphs), 2), generator=generator).to(graphs.x.dtype)
        y, label = torch.where(y == 2, float("nan"), y), ["task_0", "task_1"]
    graphs = GraphBatch.from_edge_index(graphs.edge_index, graphs.x, **order, y=y, edge_weight=graphs.edge_weight)
    path = tmp_path_factory.mktemp("parquet")
    bounds = [0, *sorted(min(cut, len(graphs)) for cut in cuts), len(graphs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS", row_group)
        write_parquet((graphs[begin:end] for begin, end in pairwise(bounds)), path / "2.parquet")
        write_parquet(graphs[:2], path / "1.parquet")
        expected = GraphBatch.concatenate([graphs[:2], graphs])
        if graphs.num_features == 0:
            expected = replace(expected, x=expected.degree.to(expected.x.dtype)[:, None])
        options: dict[str, Any] = {"dtype": graphs.x.dtype, "label": label}
        if len(graphs) == 0:
            assert "holds no graphs" in error_of(lambda: load_folder(path, **options))
            return
        whole = load_folder(path, **options)
        assert_equal(whole.graphs, expected)
        chunks = [*iter_folder(path, num_graphs, **options)]
    assert all(len(chunk.names) == num_graphs for chunk in chunks[:-1])
    assert [name for chunk in chunks for name in chunk.names] == whole.names
    assert_equal(GraphBatch.concatenate(chunk.graphs for chunk in chunks), expected)
    made = PowerFeatures.from_chunks((chunk.graphs for chunk in chunks), 1)
    assert_same_features(made, PowerFeatures.from_graphs(expected, 1)) if with_labels != "tasks" else None


def assert_equal(one: GraphBatch, other: GraphBatch) -> None:
    """Equal arrays; NaN equals NaN."""
    if one.y is not None and one.y.is_floating_point():
        one, other = (replace(graphs, y=graphs.y.nan_to_num(7.0)) for graphs in (one, other))
    assert equal(one, other)


def test_names_are_written(tmp_path: Path) -> None:
    read = load_folder(write(tmp_path / "1.parquet"))
    write_parquet(read, tmp_path / "2.parquet")
    again = load_folder(tmp_path / "2.parquet")
    assert equal(again.graphs, read.graphs)
    assert (again.names, again.classes, again.features) == (read.names, read.classes, [{"column": "x"}])
    tasks = load_folder(tmp_path / "1.parquet", label=["toxic"])
    write_parquet(iter([tasks]), tmp_path / "2.parquet")
    assert load_folder(tmp_path / "2.parquet", label=["toxic"]).tasks == ["toxic"]


def test_only_some_graphs_are_in_memory(tmp_path: Path) -> None:
    """What is read next need not even be Parquet; a writer that fails leaves nothing."""
    graphs = datasets.load("digits")[:50]
    write_parquet((graphs for _ in range(3)), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_text("no Parquet")
    chunks = iter_folder(tmp_path, 30, classes=[*map(str, range(10))])
    assert [len(next(chunks).graphs) for _ in range(5)] == [30] * 5
    assert "2.parquet cannot be parsed" in error_of(lambda: next(chunks))

    def failing() -> Any:
        yield graphs
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_parquet(failing(), tmp_path / "3.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.parquet", "2.parquet"]


def test_files_of_a_folder_agree(tmp_path: Path) -> None:
    """On names, weights and labels; shards of a few graphs may be empty."""
    (tmp_path / "first").mkdir()
    named = datasets.load("digits")[:4]
    write_parquet(named, tmp_path / "1.parquet")
    whole = next(iter_folder(tmp_path / "1.parquet", 9))
    write_parquet(whole._replace(names=["p", "q", "r", "s"]), tmp_path / "2.parquet")
    message = f"2.parquet has the column 'graph', and {tmp_path / '1.parquet'} has not; all must have it"
    assert message in error_of(lambda: load_folder(tmp_path))
    for i in (1, 2, 3, 4, 5):
        write_parquet(iter_folder(tmp_path / "2.parquet", 1, shard=(i, 5)), tmp_path / "first" / f"{i}.parquet")
    assert load_folder(tmp_path / "first").names == ["p", "q", "r", "s"]


def test_a_chunk_without_labels(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    columns = {"num_nodes": [1, 1, 1], "source": [[]] * 3, "target": [[]] * 3, "label": ["a", "b", None]}
    write_table(pyarrow.table(columns), tmp_path / "1.parquet")
    for options in ({}, {"shard": (3, 3)}):
        chunks = iter_folder(tmp_path, 1, classes=["a", "b"], **options)
        assert "1.parquet, row 2, column 'label' is empty" in error_of(lambda chunks=chunks: [*chunks])
    numbers = columns | {"source": pyarrow.array([[2**63]] * 3, pyarrow.list_(pyarrow.uint64())), "label": [1, 1, 1]}
    write_table(pyarrow.table(numbers), tmp_path / "1.parquet")
    assert "1.parquet, row 0, column 'source' cannot be parsed" in error_of(lambda: load_folder(tmp_path))
    write_table(pyarrow.table(columns | {"num_nodes": [1, 2**62, 1]}), tmp_path / "1.parquet")
    assert "row 1, column 'num_nodes' must be below 2**40" in error_of(lambda: load_folder(tmp_path, label=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": None}, " must have the column 'source', got 'graph', 'target', "),
        (
            {"charge": None, "mass": None},
            "must have the column 'num_nodes', or one with a list of a value for each node",
        ),
        ({"num_nodes": [3, -1, 2]}, "row 1, column 'num_nodes' must be at least 0, got -1"),
        ({"num_nodes": [3, None, 2]}, "row 1, column 'num_nodes' is empty; fill it in"),
        ({"num_nodes": [3.5, 0, 2]}, "row 0, column 'num_nodes' must be an integer, got double"),
        (
            {"num_nodes": [3, 1, 2]},
            "row 1, column 'charge' must have a value for each of the 1 nodes of the graph, got 0",
        ),
        ({"source": [[0, 1], [], [0, 2]]}, "row 2, column 'source' names node 2, and the graph has 2, numbered from 0"),
        ({"target": [[0, -1], [], [0, 1]]}, "row 0, column 'target' names node -1, and the graph has 3"),
        ({"target": [[0, 1], [], [0]]}, "row 2, column 'target' must have as many entries as 'source', got 1"),
        ({"target": [[0, 1], None, [0]]}, "row 1, column 'target' is empty; fill it in"),
        ({"target": [[0, None], [], [0, 1]]}, "row 0, column 'target' has a gap; fill it in"),
        ({"target": [[0, 1.5], [], [0, 1]]}, "row 0, column 'target' must be a list of integers, got double"),
        ({"target": [1, 2, 3]}, "row 0, column 'target' must be a list, got int64"),
        ({"mass": [[1, 2, 3], [], [4]]}, "row 2, column 'mass' must have a value for each of the 2 nodes"),
        ({"mass": [[1, 2, 3], [], [4, None]]}, "row 2, column 'mass' has a gap; fill it in"),
        ({"mass": [[1, 2, 3], [], [4, float("nan")]]}, "row 2, column 'mass' must be finite as float32, got nan"),
        ({"mass": [[1, 2, 3], [], [4, 1e300]]}, "row 2, column 'mass' must be finite as float32, got 1e+300"),
        ({"mass": [[1, 2, 3], [], [4, 2**24 + 1]]}, "row 2, column 'mass' holds 16777217, which float32 would round"),
        (
            {"mass": [[[1], [2], [3]], [], [[4], [5, 6]]]},
            "row 2, column 'mass' must hold vectors of 1 numbers, got one of 2",
        ),
        ({"mass": [[b"1"] * 3, [], [b"2"] * 2]}, "column 'mass' must hold in each row a list of numbers"),
        ({"mass": [["C", "N", " "], [], ["C", "C"]]}, "row 0, column 'mass' is empty; fill it in"),
        ({"weight": [[1, 2], [], [3]]}, "row 2, column 'weight' must have as many entries as 'source', got 1"),
        ({"weight": [[[1], [2]], [], [[3], [4]]]}, "row 0, column 'weight' must be a list of numbers"),
        ({"weight": [["1", "2"], [], ["3", "4"]]}, "row 0, column 'weight' must hold numbers, got string"),
        ({"graph": ["a", " ", "b"]}, "row 1, column 'graph' is empty; fill it in"),
        ({"graph": [["a"], [], []]}, "row 0, column 'graph' must be a number or text, got list"),
        ({"label": ["a", None, "b"]}, "row 1, column 'label' is empty; fill in all, leave such graphs out, or read no"),
        (
            {"label": [1, None, 0]},
            "row 1, column 'label' is empty; fill in all, leave such graphs out, read it as a task",
        ),
        ({"label": [[1], [2], [3]]}, "row 0, column 'label' must be a number or text, got list"),
    ],
)
@pytest.mark.parametrize("row_group", [1, 100])
def test_wrong_rows_are_named(changes: dict[str, Any], message: str, row_group: int, tmp_path: Path) -> None:
    path = write(tmp_path / "graphs.parquet", changes, row_group_size=row_group)
    for call in (lambda: load_folder(path), lambda: list(iter_folder(path, 1)), lambda: list(iter_folder(path, 2))):
        assert re.search(f"^{re.escape(str(path))}.*{re.escape(message)}", error_of(call))


def test_wrong_tasks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "graphs.parquet", {"toxic": [1, 2, 0]})
    assert "row 1, column 'toxic' must be 0, 1 or empty as a task, got 2" in error_of(
        lambda: load_folder(path, label=["toxic"])
    )
    assert "must have the column 'absent'" in error_of(lambda: load_folder(path, label="absent"))
    assert "must have the column 'absent'" in error_of(lambda: load_folder(path, features="absent"))
    assert "must have the column 'absent'" in error_of(lambda: load_folder(path, edge_weight="absent"))
    assert "column 'label' must hold in each row a list" in error_of(lambda: load_folder(path, features="label"))
    write(tmp_path / "more.parquet", {"mass": None})
    assert "more.parquet must have the column 'mass'" in error_of(lambda: load_folder(tmp_path))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    graphs = datasets.load("digits")[:3]
    path = tmp_path / "graphs.parquet"
    for wrong, error, message in (
        ([], ValueError, "graphs must hold at least one GraphBatch, got none"),
        ([graphs, 3], TypeError, "graphs must be GraphBatches or Folders, got int"),
        (
            [graphs, replace(graphs, y=None)],
            ValueError,
            "graphs must be alike, got columns .* and in chunk 1 num_nodes",
        ),
        (
            replace(graphs, y=torch.rand(3, 2)),
            ValueError,
            r"y must be classes \[G\], or tasks \[G, T\] of 0, 1 and NaN",
        ),
        (replace(graphs, y=torch.rand(3)), ValueError, r"y must be classes .*, got float32 \[3\]"),
        (replace(graphs, x=graphs.x / 0), ValueError, "x must be finite"),
        (
            replace(graphs, edge_weight=torch.full([graphs.num_edges], torch.inf)),
            ValueError,
            "edge_weight must be finite",
        ),
        (
            Folder(replace(graphs, y=torch.ones(3, 1)), ["a", "b", "c"], None, None, 0, tasks=["x"]),
            ValueError,
            "tasks must not be called 'x', as another column is",
        ),
    ):
        with pytest.raises(error, match=message):
            write_parquet(wrong, path)
        assert not path.exists()
    with pytest.raises(ValueError, match=r"path must end with \.parquet"):
        write_parquet(graphs, tmp_path / "graphs.csv")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "graphs.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for call in (lambda: load_folder(path), lambda: write_parquet(datasets.load("digits")[:2], path)):
        with pytest.raises(ImportError, match=r"graphs.parquet needs a package that is missing: pip install pyarrow"):
            call()


def test_types_of_numbers_and_text(tmp_path: Path) -> None:
    """Of any width, in dictionaries that list more than occurs, and in lists of any kind."""
    for kind in (pyarrow.int8(), pyarrow.uint64(), pyarrow.float16(), pyarrow.float32(), pyarrow.decimal128(5, 1)):
        values = [[np.float16(v) if kind == pyarrow.float16() else v for v in row] for row in ROWS["mass"]]
        typed = pyarrow.array(values, pyarrow.large_list(kind))
        read = load_folder(write(tmp_path / "graphs.parquet", {"mass": typed}), features="mass")
        assert read.graphs.x.flatten().tolist() == [4, 3, 5, 1, 2]
    words = pyarrow.DictionaryArray.from_arrays([2, 0, 2, 2, 0], ["C", "unused", "O"])
    listed = pyarrow.ListArray.from_arrays([0, 3, 3, 5], words)
    names = pyarrow.array(["u", "v", "u"]).dictionary_encode()
    read = load_folder(write(tmp_path / "graphs.parquet", {"mass": listed, "graph": names, "label": names}))
    assert read.features[1] == {"column": "mass", "categories": ["C", "O"]}
    assert (read.names, read.classes) == (["u", "v", "u"], ["u", "v"])
