"""Tables of nodes and edges: chunks of any size, and shards, are what is read as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from helpers import equal, error_of
from helpers.raw_files import Graph, check_chunks, graph_lists, known
from hypothesis import assume, given
from hypothesis import strategies as st

from spin_fast import datasets
from spin_fast.datasets import common, iter_folder, load_folder, tables

WORDS = ["C", "N", "O", "S", "Cl"]
TOXIC = ["0", "1", ""]


def frames(graphs: list[Graph], random: np.random.Generator) -> dict[str, pandas.DataFrame]:
    """Tables of graphs, whose names and those of nodes are words, and whose numbers are integers for the most part."""
    names = [f"g{number}" for number in random.permutation(len(graphs))]
    label = [f"class {number % 3}" for number in random.permutation(len(graphs))]
    nodes = [(names[g], f"v{v}") for g, (size, _) in enumerate(graphs) for v in random.permutation(size)]
    edges = [(names[g], f"v{i}", f"v{j}") for g, (_, ends) in enumerate(graphs) for i, j in ends]
    mass = random.integers(0, 9, len(nodes)) + 0.5 * (random.random(len(nodes)) < 0.2)
    weight = random.integers(1, 9, len(edges)) + 0.25 * (random.random(len(edges)) < 0.2)
    return {
        "graphs": pandas.DataFrame({"graph": names, "label": label, "toxic": random.choice(TOXIC, len(graphs))}),
        "nodes": pandas.DataFrame(nodes, columns=["graph", "node"]).assign(
            mass=[f"{value:g}" for value in mass],
            element=random.choice(WORDS, len(nodes)),
            charge=random.integers(-2, 3, len(nodes)),
        ),
        "edges": pandas.DataFrame(edges, columns=["graph", "source", "target"]).assign(
            weight=[f"{value:g}" for value in weight], bond=random.choice(["1", "2", "aromatic", ""], len(edges))
        ),
    }


def write(folder: Path, made: dict[str, pandas.DataFrame], suffix: str, rows: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    for name, frame in made.items():
        path = folder / f"{name}{suffix}"
        if suffix == ".parquet":
            numbers = {column: np.float64 for column in ("mass", "weight") if column in frame}
            frame.astype(numbers).to_parquet(path, row_group_size=rows, index=False)
        else:
            frame.to_csv(path, index=False)
    return folder


@given(
    graphs=graph_lists(),
    seed=st.integers(0, 99),
    suffix=st.sampled_from([".csv", ".csv.gz", ".parquet"]),
    given_tables=st.sampled_from(["graphs nodes edges", "nodes edges", "graphs edges", "edges"]),
    shuffled=st.sampled_from(["", "nodes", "edges"]),
    options=st.sampled_from(
        [
            {},
            {"features": ["element", {"column": "mass"}], "label": ["toxic"], "dtype": torch.float64},
            {"features": "degree", "undirected": True, "edge_weight": None},
            {"features": {"column": "charge", "categories": "auto"}, "coalesce": "sum", "self_loops": True},
            {
                "features": {"column": "element", "categories": [*WORDS, "X"]},
                "classes": [f"class {n}" for n in range(4)],
            },
            {"label": None, "coalesce": "sum", "edge_weight": None, "self_loops": False},
        ]
    ),
    num_graphs=st.integers(1, 10),
    num_shards=st.integers(1, 4),
    block=st.integers(1, 30),
)
def test_chunks(
    graphs: list[Graph],
    seed: int,
    suffix: str,
    given_tables: str,
    shuffled: str,
    options: dict[str, Any],
    num_graphs: int,
    num_shards: int,
    block: int,
    tmp_path_factory: Any,
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    made = {name: frame for name, frame in frames(graphs, np.random.default_rng(seed)).items() if name in given_tables}
    assume("nodes" in made or options.get("features", "degree") == "degree")
    assume("graphs" in made or not isinstance(options.get("label"), list))
    if shuffled in made:
        made[shuffled] = made[shuffled].sample(frac=1, random_state=seed)
    folder = write(tmp_path_factory.mktemp("tables"), made, suffix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "BLOCK_NUMBERS", block)
        reader, whole = datasets.find(folder).open(**options), load_folder(folder, **options)
        check_chunks(reader, whole, num_graphs, num_shards)
        order = {name: number for number, name in enumerate(whole.names)}
        numbers = [frame["graph"].map(order).tolist() for name, frame in made.items() if name != "graphs"]
        in_order = all(of == sorted(of) for of in numbers)
        assert (reader.whole is None) == in_order
        if reader.whole is not None:
            assert equal(known(reader.whole.graphs), known(whole.graphs))


NODES = "graph,node,a\n" + "".join(f"{graph},{node},{graph * 10 + node}\n" for graph in range(6) for node in range(3))
EDGES = "graph,source,target\n" + "".join(f"{graph},{node},0\n" for graph in range(6) for node in range(3))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "BLOCK_NUMBERS", 6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("nodes", "edges", "options", "told"),
    [
        (NODES.replace("4,1,41", "4,1,"), EDGES, {}, "nodes.csv, line 15, column 'a' is empty"),
        (
            NODES.replace("4,1,41", "4,1,x"),
            EDGES,
            {},
            "line 15, column 'a' must be a number, got 'x'",
        ),
        (NODES.replace("4,1,41", "4,1,1e39"), EDGES, {}, "nodes.csv, line 15, column 'a' must be finite as float32"),
        (NODES.replace("4,1,41", "4,1,16777217"), EDGES, {}, "nodes.csv, line 15, column 'a' holds 16777217"),
        (NODES.replace("4,1,41", "4,1,41,1"), EDGES, {}, "line 15"),
        (
            NODES.replace("4,1,41", "4,0,41"),
            EDGES,
            {},
            "nodes.csv, line 15, column 'node' repeats node '0' of graph '4'",
        ),
        (NODES.replace("4,1,41", "4,,41"), EDGES, {}, "nodes.csv, line 15, column 'node' is empty"),
        (NODES, EDGES.replace("4,1,0", "4,9,0"), {}, "edges.csv, line 15, column 'source' names node '9'"),
        (NODES, EDGES.replace("4,1,0", "7,1,0"), {}, "edges.csv, line 15, column 'graph' names '7', which"),
        (
            NODES,
            EDGES,
            {"features": {"column": "a", "categories": [str(number) for number in range(40)]}},
            "nodes.csv, line 14, column 'a' holds '40'",
        ),
        (NODES, EDGES, {"edge_weight": "w"}, "edges.csv must have the column 'w'"),
        (NODES, EDGES, {"features": "b"}, "nodes.csv must have the column 'b'"),
        (NODES[:13], EDGES, {}, "nodes.csv lists no graphs"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, nodes: str, edges: str, options: dict[str, Any], told: str) -> None:
    (tmp_path / "nodes.csv").write_text(nodes)
    (tmp_path / "edges.csv").write_text(edges)
    assert told in error_of(lambda: load_folder(tmp_path, **options))
    for size in (1, 4):
        assert told in error_of(lambda size=size: list(iter_folder(tmp_path, size, **options)))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("others", "value", "streams"),
    [
        ("1", "0.5", True),
        ("1", "18446744073709551615", False),
        ("1", "True", False),
        ("0.5", "True", False),
        ("True", "False", True),
        ("x", "True", False),
        ("x", "7x", True),
    ],
)
def test_a_column_is_what_all_rows_make_it(tmp_path: Path, others: str, value: str, streams: bool) -> None:
    """Pandas may take some rows for integers, others for floats, truths or text."""
    lines = [line.rpartition(",")[0] for line in NODES.splitlines()[1:]]
    rows = [f"{line},{others if row < 16 else value}" for row, line in enumerate(lines)]  # the last block has value
    (tmp_path / "nodes.csv").write_text("\n".join(["graph,node,a", *rows]) + "\n")
    (tmp_path / "edges.csv").write_text(EDGES)
    reader = datasets.find(tmp_path).open(dtype=torch.float64)
    try:
        whole = load_folder(tmp_path, dtype=torch.float64)
    except datasets.DatasetError as error:
        told = str(error)
    else:
        assert (reader.whole is None) == streams
        return check_chunks(reader, whole, 2, 1)
    assert told == error_of(lambda: list(reader.chunks(2)))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_only_a_chunk_is_in_memory(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    made = frames([(3, [(0, 1), (1, 2)])] * 40, np.random.default_rng(0))
    reader = datasets.find(write(tmp_path, made, suffix)).open()
    read, seen = tables.Rows.read, []

    def watched(self: tables.Rows, lines: int | None = None) -> tables.Table:
        table = read(self, lines)
        seen.append(table.shape[0])
        return table

    monkeypatch.setattr(tables.Rows, "read", watched)
    assert len(reader) == 40
    assert max(seen) == 1  # a block
    assert reader.whole is None
    assert [len(chunk.names) for chunk in reader.chunks(4, (2, 4))] == [4, 4, 2]
    assert max(seen) == 12
