"""Folders of a user's own graphs: TU text, GraphML, tables; and what is wrong with them."""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import networkx
import numpy as np
import pandas
import pytest
import torch
from helpers import equal, error_of, random_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from spin_fast import GraphBatch, datasets
from spin_fast.datasets import iter_folder, load_folder, nel

EDGES = "graph,source,target\nb,1,2\na,x,y\nb,2,1\na,y,y\n"
NODES = "graph,node,charge,mass\na,x,0.5,1\nb,2,-1,4\na,y,1.5,2\nb,1,0,3\nb,3,7,5\n"
GRAPHS = "graph,label\nb,mutagen\nempty,none\na,mutagen\n"


def write(folder: Path, **tables: str | None) -> Path:
    """Write the handmade tables; None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ({"edges": EDGES, "nodes": NODES, "graphs": GRAPHS} | tables).items():
        if text is not None:
            (folder / f"{name}.csv").write_text(text)
    return folder


def edges(graphs: GraphBatch) -> list[tuple[int, int]]:
    """Pairs (source, target)."""
    return list(zip(*graphs.edge_index.tolist(), strict=True))


# ---- tables ----


def test_tables(tmp_path: Path) -> None:
    read = load_folder(write(tmp_path))
    assert read.names == ["b", "empty", "a"]
    assert read.classes == ["mutagen", "none"]
    assert read.features == [{"column": "charge"}, {"column": "mass"}]
    assert read.num_attributes == 2
    graphs = read.graphs
    assert graphs.y.tolist() == [0, 1, 0]
    assert graphs.ptr.tolist() == [0, 3, 3, 5]
    assert graphs.x.tolist() == [[-1, 4], [0, 3], [7, 5], [0.5, 1], [1.5, 2]]
    assert sorted(edges(graphs)) == [(0, 1), (1, 0), (3, 4), (4, 4)]
    assert graphs.edge_weight is None


def test_direction_is_that_of_pyg(tmp_path: Path) -> None:
    write(tmp_path, edges="graph,source,target\na,x,y\n", graphs=None)
    assert edges(load_folder(tmp_path).graphs) == [(0, 1)]
    assert sorted(edges(load_folder(tmp_path, undirected=True).graphs)) == [(0, 1), (1, 0)]
    write(tmp_path, edges="graph,source,target\na,x,y\na,x,y\na,y,y\n")
    assert load_folder(tmp_path).graphs.num_edges == 3
    merged = load_folder(tmp_path, coalesce="sum", self_loops=False).graphs
    assert (merged.num_edges, merged.edge_weight.tolist()) == (1, [2])


def test_arcs_of_a_folder_that_load_takes(tmp_path: Path) -> None:
    write(tmp_path, edges="graph,source,target\na,x,y\na,x,y\na,y,y\n", graphs=None)
    options = {"undirected": True, "coalesce": "max", "self_loops": False}
    assert equal(datasets.load(tmp_path, **options), load_folder(tmp_path, **options).graphs)
    assert sorted(edges(datasets.load(tmp_path, **options))) == [(0, 1), (1, 0)]
    assert len(datasets.load("CSL", tmp_path, undirected=False, coalesce=None, self_loops=None)) == 150
    for name, value in options.items():
        message = error_of(lambda name=name, value=value: datasets.find("digits").read(**{name: value}))
        assert f"{name}={value!r} is impossible for digits" in message
    with pytest.raises(TypeError, match="sort_nodes is no option"):
        datasets.load("digits", sort_nodes=True)


def test_what_the_files_weigh(tmp_path: Path) -> None:
    """Weights that merging makes are none of theirs."""
    write(tmp_path / "plain", edges="graph,source,target\na,x,y\na,x,y\n")
    merged = load_folder(tmp_path / "plain", coalesce="sum")
    assert (merged.graphs.edge_weight.tolist(), merged.weighted) == ([2], False)
    write(tmp_path / "weighted", edges="graph,source,target,weight\na,x,y,3\n")
    assert load_folder(tmp_path / "weighted").weighted
    assert not load_folder(tmp_path / "weighted", edge_weight=None).weighted
    (tmp_path / "xml").mkdir()
    networkx.write_graphml(networkx.DiGraph([(0, 1, {"order": 2, "id": "e"})]), tmp_path / "xml" / "0.graphml")
    with pytest.warns(UserWarning, match=r"0\.graphml has edges with order, not read"):
        assert load_folder(tmp_path / "xml").graphs.edge_weight is None
    for number, times in enumerate((2, 1)):  # only the first file has something to merge
        graph = networkx.MultiDiGraph([(0, 1)] * times)
        networkx.write_graphml(graph, tmp_path / "xml" / f"{number}.graphml")
    merged = load_folder(tmp_path / "xml", coalesce="sum")
    assert (merged.graphs.edge_weight.tolist(), merged.weighted) == ([2, 1], False)


def test_tables_that_may_be_missing(tmp_path: Path) -> None:
    read = load_folder(write(tmp_path, graphs=None))
    assert read.names == ["a", "b"]
    assert (read.graphs.y, read.classes) == (None, None)
    read = load_folder(write(tmp_path / "unlabelled", graphs="graph\na\nb\n"))
    assert (read.names, read.classes) == (["a", "b"], None)
    read = load_folder(write(tmp_path / "blank", graphs="graph,label\na,\nb,\n"))
    assert (read.names, read.classes) == (["a", "b"], None)
    read = load_folder(write(tmp_path / "edges only", graphs=None, nodes=None))
    assert read.names == ["b", "a"]
    assert sorted(edges(read.graphs)) == [(0, 1), (1, 0), (2, 3), (3, 3)]
    assert read.graphs.x.tolist() == [[1], [1], [0], [2]]  # edges that end in the node
    assert (read.features, read.num_attributes) == ("degree", 0)
    read = load_folder(write(tmp_path / "no features", nodes="graph,node\na,x\na,y\nb,1\nb,2\n"))
    assert read.features == "degree"


def test_features_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    read = load_folder(tmp_path, features="mass")
    assert (read.graphs.x.shape, read.features) == ((5, 1), [{"column": "mass"}])
    assert load_folder(tmp_path, features="degree").graphs.x.squeeze(1).tolist() == [1, 1, 0, 0, 2]
    write(tmp_path)
    assert load_folder(tmp_path, features=["mass", "charge"]).graphs.x[0].tolist() == [4, -1]
    write(tmp_path, nodes=NODES.replace("mass", "number").replace(",5\n", ",16777217\n"))
    message = error_of(lambda: load_folder(tmp_path))
    assert "nodes.csv, line 6, column 'number' holds 16777217, which float32 would round" in message
    assert load_folder(tmp_path, dtype=torch.float64).graphs.x[2, 1] == 16777217
    assert "'volume'" in error_of(lambda: load_folder(tmp_path, features=["volume"]))


@pytest.mark.parametrize("number", [2**53 + 1, 2**63 - 1, 2**64 - 1, 2**64 + 1, 10**30 + 1])
def test_integers_that_float64_would_merge(number: int, tmp_path: Path) -> None:
    """They may be categories; as such they are read."""
    nodes = f"graph,node,number\na,x,{number - 1}\na,y,{number}\nb,1,{number}\nb,2,1\n"
    write(tmp_path, nodes=nodes)
    message = error_of(lambda: load_folder(tmp_path, dtype=torch.float64))
    assert re.search(
        rf"nodes.csv, line [23], column 'number' holds ({number - 1}|{number}), which float64 would", message
    )
    read = load_folder(tmp_path, features=[{"column": "number", "categories": "auto"}])
    assert read.graphs.num_features == 3
    if number < 2**63:
        (tmp_path / "xml").mkdir()
        graph = networkx.DiGraph()
        graph.add_node("x", number=number)
        networkx.write_graphml(graph, tmp_path / "xml" / "a.graphml")
        message = error_of(lambda: load_folder(tmp_path / "xml", dtype=torch.float64))
        assert f"'number' of node 'x' must hold integers that float64 holds exactly, got {number}" in message


def test_graphml_that_cannot_be_read(tmp_path: Path) -> None:
    for encoding in ("nosuch", "rot13"):
        (tmp_path / "a.graphml").write_text(f'<?xml version="1.0" encoding="{encoding}"?><graphml/>')
        assert re.search(
            r"a.graphml cannot be read \(.*encoding.*\); save it as UTF-8", error_of(lambda: load_folder(tmp_path))
        )
    (tmp_path / "a.graphml").unlink()
    os.mkfifo(tmp_path / "a.graphml")
    assert "a.graphml is no regular file" in error_of(lambda: load_folder(tmp_path))


def test_weights(tmp_path: Path) -> None:
    write(tmp_path, edges="graph,source,target,weight,length\na,x,y,0.5,2\nb,1,2,3,4\n")
    with pytest.warns(UserWarning, match=r"edges\.csv has edges with length, not read: weights are those named"):
        assert load_folder(tmp_path).graphs.edge_weight.tolist() == [3, 0.5]
    assert load_folder(tmp_path, edge_weight="length").graphs.edge_weight.tolist() == [4, 2]
    assert load_folder(tmp_path, edge_weight=None).graphs.edge_weight is None
    assert "'height'" in error_of(lambda: load_folder(tmp_path, edge_weight="height"))


def test_names_are_text(tmp_path: Path) -> None:
    """Leading zeros, NA, blanks and the mark of an encoding are what spreadsheets make of names."""
    folder = tmp_path / "names"
    folder.mkdir()
    (folder / "edges.csv").write_text("graph,source,target\n01,1,01\n1,NA,null\n", encoding="utf-8-sig")
    (folder / "graphs.csv").write_text("graph,label\n1,NA\n01,nan\n")
    read = load_folder(folder)
    assert read.names == ["1", "01"]
    assert read.graphs.num_nodes == 4
    assert read.classes == ["NA", "nan"]


def test_blanks_do_not_make_other_names(tmp_path: Path) -> None:
    """Neither before a name nor after it, which would be nodes and graphs of their own where no table lists them."""
    write(tmp_path, edges="graph,source,target\na, x,y\n a ,y , x\n", nodes=None, graphs="graph,label\na ,b\n")
    read = load_folder(tmp_path)
    assert (read.names, read.classes, read.graphs.num_nodes) == (["a"], ["b"], 2)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["2.0", "1", "10"], ["1", "2.0", "10"]),
        ([f"{2**53 + 1}", f"{2**53}", "1"], ["1", f"{2**53}", f"{2**53 + 1}"]),  # two are one number in float64
        (["b", "a", "10"], ["10", "a", "b"]),
    ],
)
def test_classes_are_sorted(tmp_path: Path, labels: list[str], classes: list[str]) -> None:
    table = "graph,label\n" + "".join(f"{graph},{label}\n" for graph, label in zip("abc", labels, strict=True))
    read = load_folder(write(tmp_path, graphs=table))
    assert read.classes == classes
    assert [read.classes[k] for k in read.graphs.y.tolist()] == labels


def test_classes_of_an_earlier_reading(tmp_path: Path) -> None:
    write(tmp_path)
    read = load_folder(tmp_path, classes=["none", "other", "mutagen"])
    assert read.graphs.y.tolist() == [2, 0, 2]
    assert read.classes == ["none", "other", "mutagen"]
    assert "the class 'none'" in error_of(lambda: load_folder(tmp_path, classes=["mutagen"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edges": "graph,from,to\na,x,y\n"}, ["edges.csv must have the column 'source'", "'from'"]),
        ({"edges": EDGES + "a,x,z\n"}, ["edges.csv, line 6, column 'target'", "node 'z'", "nodes.csv", "graph 'a'"]),
        ({"edges": EDGES + "c,x,x\n"}, ["edges.csv, line 6, column 'graph'", "'c'", "graphs.csv"]),
        ({"edges": EDGES + "a,,x\n"}, ["edges.csv, line 6, column 'source' is empty"]),
        ({"edges": EDGES + "\na,x,x\n"}, ["edges.csv, line 6, column 'graph' is empty"]),
        ({"edges": EDGES + "a,x,y,1\n"}, ["edges.csv", "line 6"]),
        ({"edges": "graph,source,target\na,x,y,1\n"}, ["edges.csv", "more fields"]),
        ({"graphs": "graph,label\n0,a,mutagen\n1,b,none\n"}, ["graphs.csv", "more fields"]),
        ({"edges": ""}, ["edges.csv"]),
        ({"nodes": NODES + "a,x,1,1\n"}, ["nodes.csv, line 7, column 'node' repeats node 'x' of graph 'a'"]),
        ({"nodes": NODES + "a,z,,1\n"}, ["nodes.csv, line 7, column 'charge' is empty"]),
        ({"nodes": NODES + "a,z,1\n"}, ["nodes.csv, line 7, column 'mass' is empty"]),
        ({"nodes": NODES + "a,z,inf,1\n"}, ["nodes.csv, line 7, column 'charge' must be finite"]),
        ({"nodes": NODES + "a,z,1,1e39\n"}, ["nodes.csv, line 7, column 'mass' must be finite as float32"]),
        ({"edges": EDGES.replace("\n", ",1\n").replace(",1", ",weight", 1).replace("y,y,1", "y,y,-inf")}, ["weight"]),
        ({"edges": EDGES + '" ",x,y\n'}, ["edges.csv, line 6, column 'graph' is empty"]),
        ({"nodes": NODES + "z,z,1,1\n"}, ["nodes.csv, line 7, column 'graph'", "'z'"]),
        ({"graphs": GRAPHS + "a,mutagen\n"}, ["graphs.csv, line 5, column 'graph' repeats 'a'"]),
        ({"graphs": GRAPHS + "c,\n"}, ["graphs.csv, line 5, column 'label' is empty"]),
        ({"graphs": "graph,label\na,0.5\nb,1\n"}, ["graphs.csv", "real numbers"]),
        (
            {"graphs": "graph,label\na,1\nb,nan\n"},
            ["graphs.csv has 'nan' as a label beside numbers; leave the label empty"],
        ),
        ({"graphs": "graph,label\na,1\nb,1.0\n"}, ["graphs.csv has the labels '1' and '1.0', which are one number"]),
        ({"graphs": "graph;label\na;1\n"}, ["graphs.csv must have the column 'graph'", "commas, not by ';'"]),
        ({"graphs": "graph,label\n"}, ["graphs.csv lists no graphs"]),
    ],
)
def test_wrong_tables_are_named(tmp_path: Path, changes: dict[str, str], words: list[str]) -> None:
    write(tmp_path, **changes)
    message = error_of(lambda: load_folder(tmp_path))
    assert all(word in message for word in [*words, str(tmp_path)])


@pytest.mark.parametrize("index", [None, "graph", "row numbers"])
def test_parquet(tmp_path: Path, index: str | None) -> None:
    pytest.importorskip("pyarrow")
    csv = load_folder(write(tmp_path / "csv"))
    (tmp_path / "parquet").mkdir()
    for name in ("edges", "nodes", "graphs"):
        table = pandas.read_csv(tmp_path / "csv" / f"{name}.csv")
        if index == "graph":
            table = table.set_index("graph")
        elif index == "row numbers":  # as after filtering
            table.index += 5
        table.to_parquet(tmp_path / "parquet" / f"{name}.parquet", index=index is not None)
    parquet = load_folder(tmp_path / "parquet")
    assert equal(csv.graphs, parquet.graphs)
    assert csv[1:] == parquet[1:]
    pandas.DataFrame({"graph": [1, 2], "source": [1, None], "target": [2, 3]}).to_parquet(
        tmp_path / "parquet" / "edges.parquet"
    )
    assert "edges.parquet, row 1, column 'source' is empty" in error_of(lambda: load_folder(tmp_path / "parquet"))
    (tmp_path / "parquet" / "edges.csv").write_text(EDGES)
    assert "edges.csv and edges.parquet" in error_of(lambda: load_folder(tmp_path / "parquet"))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edges.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        load_folder(tmp_path)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 10_000),
    weighted=st.booleans(),
    shuffled=st.booleans(),
)
def test_tables_hold_any_graphs(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, weighted: bool, shuffled: bool
) -> None:
    given_graphs = random_graphs(sizes, weighted=weighted, seed=seed)
    edge_index, rng = given_graphs.edge_index, np.random.default_rng(seed)
    graph_of_node = torch.arange(len(sizes)).repeat_interleave(given_graphs.num_nodes_per_graph).numpy()
    local = np.arange(given_graphs.num_nodes) - given_graphs.ptr.numpy()[graph_of_node]
    source, target = edge_index.numpy()
    edges = pandas.DataFrame({"graph": graph_of_node[target], "source": local[source], "target": local[target]})
    if given_graphs.edge_weight is not None:
        edges["weight"] = given_graphs.edge_weight.numpy()
    nodes = pandas.DataFrame({"graph": graph_of_node, "node": local})
    for column in range(3):
        nodes[f"x{column}"] = given_graphs.x[:, column].numpy()
    if shuffled:
        edges = edges.sample(frac=1, random_state=seed)
        nodes = nodes.iloc[np.argsort(rng.random(len(sizes))[graph_of_node], kind="stable")]  # graph by graph
    folder = tmp_path_factory.mktemp("tables")
    edges.to_csv(folder / "edges.csv", index=False)
    nodes.to_csv(folder / "nodes.csv.gz", index=False)
    pandas.DataFrame({"graph": range(len(sizes)), "label": range(len(sizes))}).to_csv(
        folder / "graphs.csv", index=False
    )
    read = load_folder(folder, dtype=torch.float64)
    want = GraphBatch.from_edge_index(
        edge_index,
        given_graphs.x,
        torch.from_numpy(graph_of_node),
        num_graphs=len(sizes),
        edge_weight=given_graphs.edge_weight,
        y=torch.arange(len(sizes)),
    )
    assert torch.equal(read.graphs.ptr, want.ptr)
    assert torch.equal(read.graphs.indices, want.indices)
    torch.testing.assert_close(read.graphs.x, want.x)
    assert torch.equal(read.graphs.y, want.y)
    if weighted and not shuffled:  # repeated edges are kept in the order of the file
        torch.testing.assert_close(read.graphs.edge_weight, want.edge_weight)


# ---- words as features, labels of any name: tables and GraphML ----

WORDS = "graph,node,element,mass,ring\na,x,N,14,1\na,y,C,12,0\nb,1,C,13,2\nb,2,O,16,0\nb,3,C,12,1\n"


def write_words(folder: Path, kind: str, nodes: str = WORDS) -> Path:
    """The same nodes in tables or in GraphML."""
    write(folder, nodes=nodes, graphs="graph\na\nb\n")
    if kind == "graphml":
        read = pandas.read_csv(folder / "nodes.csv", index_col=["graph", "node"], keep_default_na=False)
        for name, rows in read.groupby("graph"):
            graph = networkx.DiGraph()
            graph.add_nodes_from((node, row) for (_, node), row in rows.to_dict("index").items())
            networkx.write_graphml(graph, folder / f"{name}.graphml", infer_numeric_types=True)
        for table in folder.glob("*.csv"):
            table.unlink()
    return folder


@pytest.mark.parametrize("kind", ["tables", "graphml"])
def test_words_are_one_hot(tmp_path: Path, kind: str) -> None:
    read = load_folder(write_words(tmp_path / "known", kind))
    elements = {"column": "element", "categories": ["C", "N", "O"]}
    assert read.features == [{"column": "mass"}, {"column": "ring"}, elements]
    assert read.num_attributes == 2
    assert read.graphs.x.tolist() == [
        [14, 1, 0, 1, 0],
        [12, 0, 1, 0, 0],
        [13, 2, 1, 0, 0],
        [16, 0, 0, 0, 1],
        [12, 1, 1, 0, 0],
    ]
    assert datasets.find(tmp_path / "known").read().num_attributes == 2
    assert load_folder(tmp_path / "known", features="element").graphs.x.tolist() == read.graphs.x[:, 2:].tolist()
    assert load_folder(tmp_path / "known", features=["element", "mass"]).features == [{"column": "mass"}, elements]
    # Another folder has the columns of the first, whichever words occur in it.
    new = load_folder(write_words(tmp_path / "fewer", kind, WORDS.replace(",C,", ",O,")), features=read.features)
    assert new.graphs.x[:, 2:].argmax(1).tolist() == [1, 2, 2, 2, 2]
    assert new.features == read.features
    write_words(tmp_path / "other", kind, WORDS.replace("O,16", "Xe,16"))
    message = error_of(lambda: load_folder(tmp_path / "other", features=read.features))
    row = (
        "nodes.csv, line 5, column 'element'" if kind == "tables" else "b.graphml: node attribute 'element' of node '2'"
    )
    assert f"{row} holds 'Xe', which features have no category for: they know 'C', 'N', 'O'" in message
    assert "leave such graphs out, train with such words, or have them 0 in all columns by None" in message
    open_features = [*read.features[:2], elements | {"categories": [None, *elements["categories"]]}]
    new = load_folder(tmp_path / "other", features=open_features)
    assert new.graphs.x[:, 2:].tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert (new.features, new.widths) == (open_features, [2, 3])
    assert equal(load_folder(tmp_path / "known", features=open_features).graphs, read.graphs)
    chunks = list(iter_folder(tmp_path / "known", 1, features=read.features))
    assert equal(GraphBatch.concatenate(chunk.graphs for chunk in chunks), read.graphs)
    numbers = write_words(tmp_path / "numbers", kind, WORDS.replace(",12,", ",iron,").replace(",13,", ",iron,"))
    with pytest.raises(datasets.DatasetError, match="must be"):
        load_folder(numbers, features=read.features)  # what was a number must not turn into words


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    """A screen of thousands of graphs is not to be mended one graph after the other."""
    nodes = "graph,node,element\na,1,C\na,2,Xe\nb,1,He\nb,2,Xe\nc,1,C\n"
    write(tmp_path, nodes=nodes, graphs=None, edges="graph,source,target\na,1,2\n")
    message = error_of(lambda: load_folder(tmp_path, features={"column": "element", "categories": ["C", "N"]}))
    assert "nodes.csv, line 3, column 'element' holds 'Xe'" in message
    assert "3 node(s) in 2 of the 3 graph(s) read have such words" in message


@pytest.mark.parametrize("header", [",graph,node,mass", "Unnamed: 0,graph,node,mass", "graph,node, ,mass"])
def test_a_column_without_a_name_is_no_feature(header: str, tmp_path: Path) -> None:
    row = "0,a,1,12\n1,a,2,14\n" if header[0] in ",U" else "a,1,0,12\na,2,1,14\n"
    write(tmp_path, nodes=f"{header}\n{row}", graphs=None, edges="graph,source,target\na,1,2\n")
    message = error_of(lambda: load_folder(tmp_path))
    assert f"column {3 if header[0] == 'g' else 1} has no name; leave it out, as by to_csv(index=False)" in message
    assert load_folder(tmp_path, features="mass").graphs.x.tolist() == [[12], [14]]
    (tmp_path / "nodes.csv").write_text("graph,node,Unnamed: 0,mass\na,1,0,12\na,2,1,14\n")
    assert load_folder(tmp_path).graphs.num_features == 2  # somebody has called it so


@pytest.mark.parametrize("kind", ["tables", "graphml"])
def test_numbers_as_categories(tmp_path: Path, kind: str) -> None:
    write_words(tmp_path, kind)
    read = load_folder(tmp_path, features=["element", {"column": "ring", "categories": "auto"}, {"column": "mass"}])
    assert [item["column"] for item in read.features] == ["mass", "element", "ring"]
    assert read.features[2]["categories"] == ["0", "1", "2"]
    assert read.graphs.x[:, 4:].argmax(1).tolist() == [1, 0, 2, 0, 1]
    ring = {"column": "ring", "categories": ["2", "1", "7", "0"]}
    assert load_folder(tmp_path, features=ring).graphs.x.argmax(1).tolist() == [1, 3, 0, 3, 1]
    with pytest.raises(datasets.DatasetError, match="holds '2'"):
        load_folder(tmp_path, features={"column": "ring", "categories": ["0", "1"]})


@settings(max_examples=15)
@given(
    names=st.lists(st.text("a,[]{}\"' é", min_size=1).filter(str.strip), min_size=1, max_size=3, unique=True),
    words=st.lists(st.text(st.characters(exclude_categories=("C", "Z", "N"))), min_size=2, max_size=4, unique=True),
    seed=st.integers(0, 1000),
)
def test_words_and_names_are_any_text(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], words: list[str], seed: int
) -> None:
    words = sorted({f"w{word}" for word in words})
    names = [f"x{name}" for name in names]
    rng = np.random.default_rng(seed)
    values = {name: [words[k] for k in rng.integers(0, len(words), 6)] for name in names}
    folder = tmp_path_factory.mktemp("words")
    pandas.DataFrame({"graph": "g", "node": range(6)} | values).to_csv(folder / "nodes.csv", index=False)
    (folder / "edges.csv").write_text("graph,source,target\n")
    read = load_folder(folder)
    features = json.loads(json.dumps(read.features))  # as a checkpoint has it
    again = load_folder(folder, features=features)
    assert equal(again.graphs, read.graphs)
    first, decoded = 0, {}
    for item in features:
        codes = read.graphs.x[:, first : first + len(item["categories"])].argmax(1)
        decoded[item["column"]] = [item["categories"][code] for code in codes]
        first += len(item["categories"])
    assert decoded == values
    assert all(item["categories"] == sorted(item["categories"]) for item in features)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (WORDS.replace("C,13", "6,13"), ["line 2, column 'element' must be a number, got 'N', as line 4 holds 6"]),
        (WORDS.replace("14,1", "14?,1"), ["line 2, column 'mass' must be a number, got '14?', as line 3 holds 12"]),
        (WORDS.replace("C,13", ",13"), ["line 4, column 'element' is empty"]),
        (WORDS.replace("C,13", '" ",13'), ["line 4, column 'element' is empty"]),
        (WORDS.replace("C,13", "nan,13"), ["line 2, column 'element' must be a number", "line 4 holds nan"]),
    ],
)
def test_wrong_words_are_named(tmp_path: Path, nodes: str, words: list[str]) -> None:
    write_words(tmp_path, "tables", nodes)
    message = error_of(lambda: load_folder(tmp_path))
    assert all(word in message for word in [*words, "nodes.csv"])


def test_mixed_words_if_asked_for(tmp_path: Path) -> None:
    write_words(tmp_path, "tables", WORDS.replace("C,13", "06,13").replace("C,12", " C ,12"))
    read = load_folder(tmp_path, features=[{"column": "element", "categories": "auto"}])
    assert read.features == [{"column": "element", "categories": ["06", "C", "N", "O"]}]
    assert read.num_attributes == 0


def test_words_of_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_words(tmp_path, "tables")
    table = pandas.read_csv(tmp_path / "nodes.csv")
    (tmp_path / "nodes.csv").unlink()
    table["element"] = pandas.Categorical(table["element"], categories=["O", "N", "C", "never"])
    table.to_parquet(tmp_path / "nodes.parquet")
    table["small"] = np.array([0.1, 0.2, 0.1, 0.2, 0.1], np.float32)
    table.to_parquet(tmp_path / "nodes.parquet")
    numbers = [{"column": column, "categories": "auto"} for column in ("ring", "small")]
    read = load_folder(tmp_path, features=["element", *numbers])
    assert [item["categories"] for item in read.features] == [["C", "N", "O"], ["0", "1", "2"], ["0.1", "0.2"]]


@pytest.mark.parametrize("kind", ["csv", "parquet", "graphml"])
def test_words_are_the_same_in_every_format(tmp_path: Path, kind: str) -> None:
    """Without the blanks around them; where that leaves nothing, nothing is filled in."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")

    def folder(name: str, words: list[str], labels: list[str]) -> Path:
        path = tmp_path / name
        path.mkdir()
        nodes = pandas.DataFrame({"graph": [" a", "a", "b "], "node": ["x", "y ", "x"], "element": words})
        edges = pandas.DataFrame({"graph": ["a"], "source": [" x"], "target": ["y"]})
        tables = {"nodes": nodes, "edges": edges, "graphs": pandas.DataFrame({"graph": ["a", "b"], "t": labels})}
        for table, rows in tables.items() if kind != "graphml" else ():
            if kind == "csv":
                rows.to_csv(path / f"{table}.csv", index=False)
            else:
                rows.to_parquet(path / f"{table}.parquet")
        for graph, positions, label in (("a", [0, 1], labels[0]), ("b", [2], labels[1])) if kind == "graphml" else ():
            made = networkx.DiGraph(t=label)
            made.add_nodes_from((nodes["node"][k].strip(), {"element": words[k]}) for k in positions)
            made.add_edges_from([("x", "y")] if graph == "a" else [])
            networkx.write_graphml(made, path / f"{graph}.graphml")
        return path

    path = folder("filled in", [" C", "O", "C\t "], ["yes ", "yes"])
    for features in (
        None,
        {"column": "element", "categories": "auto"},
        {"column": "element", "categories": ["C", "O"]},
    ):
        read = load_folder(path, features=features, label="t")
        assert read.features == [{"column": "element", "categories": ["C", "O"]}]
        assert read.graphs.x.tolist() == [[1, 0], [0, 1], [1, 0]]
        assert (read.names, read.classes, read.graphs.num_edges) == (["a", "b"], ["yes"], 1)
    assert "'t' must be 0, 1 or empty as a task, got 'yes" in error_of(lambda: load_folder(path, label=["t"]))
    place = {
        "csv": "nodes.csv, line 3, column 'element'",
        "parquet": "nodes.parquet, row 1, column 'element'",
        "graphml": "a.graphml: node attribute 'element' of node 'y'",
    }[kind]
    for number, nothing in enumerate(("", "  ")):
        path = folder(f"empty {number}", ["C", nothing, "O"], [" 1.0", nothing])
        for features in (None, {"column": "element", "categories": "auto"}):
            message = error_of(lambda path=path, features=features: load_folder(path, features=features))
            assert f"{place} is empty; fill it in" in message
        read = load_folder(path, features="degree", label=["t"])
        assert read.graphs.y.nan_to_num(9).tolist() == [[1], [9]]
        message = error_of(lambda path=path: load_folder(path, features="degree", label="t"))
        assert "read it as a task with missing labels by label=['t'], or read no labels by label=None" in message


DATES = pandas.to_datetime(["2020-01-01", "1970-01-01", "2021-01-01", "2022-01-01", None])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (DATES, "a date"),
        (DATES.tz_localize("UTC"), "a date"),
        ([*DATES.date[:4], None], "a date"),
        (DATES - DATES[0], "a duration"),
        ([[1, 2]] * 5, "a list"),
        ([[1]] * 5, "a list"),
        ([[], [1], None, [2], [3]], "a list"),
        ([{"x": 1}] * 5, "a mapping"),
        ([b"C"] * 5, "b'C'"),
        (pandas.period_range("2020", "2024", freq="Y"), r"Period\('2020', .*\)"),
    ],
)
def test_what_parquet_holds_besides_numbers_and_words(tmp_path: Path, values: object, kind: str) -> None:
    pytest.importorskip("pyarrow")
    names = list("abcde")
    write(tmp_path, edges="graph,source,target\n", nodes=None, graphs=None)
    nodes = pandas.DataFrame({"graph": names, "node": "x", "mass": range(5), "value": values})
    nodes.to_parquet(tmp_path / "nodes.parquet")
    choices: list = [None, "value"]
    are_words = kind not in ("a list", "a mapping", "b'C'")  # where asked for
    if not are_words:
        choices.append({"column": "value", "categories": "auto"})
    for features in choices:
        message = error_of(lambda features=features: load_folder(tmp_path, features=features))
        assert re.search(rf"nodes.parquet, row 0, column 'value' must be a number( or text)?, got {kind}$", message)
    assert load_folder(tmp_path, features="mass").graphs.x.flatten().tolist() == list(range(5))  # no one's business
    pandas.DataFrame({"graph": names, "value": values}).to_parquet(tmp_path / "graphs.parquet")
    message = error_of(lambda: load_folder(tmp_path, features="mass", label=["value"]))
    assert re.search(rf"graphs.parquet, row 0, column 'value' must be .*, got {kind}$", message)
    if not are_words:
        message = error_of(lambda: load_folder(tmp_path, features="mass", label="value"))
        assert re.search(rf"graphs.parquet, row 0, column 'value' must be .*, got {kind}$", message)


def test_a_name_of_each_node_is_no_category(tmp_path: Path) -> None:
    rows = "".join(f"g,{node},atom{node}\n" for node in range(1500))
    write(tmp_path, edges="graph,source,target\n", nodes=f"graph,node,id\n{rows}", graphs=None)
    assert "column 'id' holds 1,500 different words" in error_of(lambda: load_folder(tmp_path))
    listed = [{"column": "id", "categories": [f"atom{node}" for node in range(1500)]}]
    assert load_folder(tmp_path, features=listed).graphs.x.shape == (1500, 1500)


def test_words_of_graphml_in_parts(tmp_path: Path) -> None:
    write_words(tmp_path, "graphml")
    whole = load_folder(tmp_path)
    chunks = list(iter_folder(tmp_path, 1))
    assert all(chunk.features == whole.features for chunk in chunks)
    assert equal(GraphBatch.concatenate(chunk.graphs for chunk in chunks), whole.graphs)
    assert len(list(iter_folder(tmp_path, 1, features=["mass"]))) == 2
    single = networkx.DiGraph()
    single.add_node("only", element="O")
    networkx.write_graphml(single, tmp_path / "single.graphml")
    element = {"column": "element", "categories": ["C", "N", "O"]}
    assert [*iter_folder(tmp_path, 1, features=element)][2].graphs.x.tolist() == [[0, 0, 1]]
    (tmp_path / "single.graphml").unlink()
    graph = networkx.read_graphml(tmp_path / "b.graphml")
    graph.nodes["2"]["element"] = 8
    networkx.write_graphml(graph, tmp_path / "b.graphml")
    assert "of node '2' must be a word as in files before it, got 8" in error_of(lambda: load_folder(tmp_path))
    graph.nodes["2"]["element"] = "  "
    networkx.write_graphml(graph, tmp_path / "b.graphml")
    assert "of node '2' is empty" in error_of(lambda: load_folder(tmp_path))


TASKS = "graph,label,toxic,soluble,kind\na,1,,1,x\nempty,,0,,y\nb,0,1,0,y\n"


def write_tasks(folder: Path, kind: str, table: str = TASKS) -> Path:
    """Labels in a table, or as attributes of graphs in GraphML."""
    write(folder, nodes=None, graphs=table)
    if kind == "graphml":
        for row in pandas.read_csv(folder / "graphs.csv", dtype="str").to_dict("records"):
            name = row.pop("graph")
            known = {key: value for key, value in row.items() if value == value}
            known |= {key: int(value) for key, value in known.items() if key in ("toxic", "soluble")}
            networkx.write_graphml(networkx.DiGraph([("u", "v")], **known), folder / f"{name}.graphml")
        for file in folder.glob("*.csv"):
            file.unlink()
    return folder


@pytest.mark.parametrize("kind", ["tables", "graphml"])
def test_labels_of_any_name(tmp_path: Path, kind: str) -> None:
    write_tasks(tmp_path, kind)
    order = ["a", "empty", "b"] if kind == "tables" else ["a", "b", "empty"]
    read = load_folder(tmp_path, label="kind")
    assert read.names == order
    assert (read.classes, read.tasks) == (["x", "y"], None)
    assert read.graphs.y.tolist() == [0, 1, 1]
    read = load_folder(tmp_path, label=["soluble", "toxic"], dtype=torch.float64)
    assert (read.classes, read.tasks) == (None, ["soluble", "toxic"])
    want = {"a": [1, 9], "empty": [9, 0], "b": [0, 1]}  # 9 for missing
    assert read.graphs.y.nan_to_num(9).tolist() == [want[name] for name in order]
    assert read.graphs.y.dtype == torch.float64
    assert datasets.load(tmp_path, label=["toxic"]).y.shape == (3, 1)
    chunks = list(iter_folder(tmp_path, 2, label=["soluble", "toxic"], dtype=torch.float64))
    assert [chunk.graphs.y.shape for chunk in chunks] == [(2, 2), (1, 2)]
    torch.testing.assert_close(torch.cat([chunk.graphs.y for chunk in chunks]), read.graphs.y, equal_nan=True)
    for label in (None, ["label"]):
        read = load_folder(tmp_path, label=label)
        assert (read.graphs.y is None) == (label is None)
    assert datasets.find(tmp_path).read(label=None).num_attributes == 0
    for label in ("size", ["toxic", "size"]):
        assert "'size'" in error_of(lambda label=label: load_folder(tmp_path, label=label))
    assert "'kind' must be 0, 1 or empty as a task, got 'x'" in error_of(lambda: load_folder(tmp_path, label=["kind"]))


def test_tasks_of_graphml_are_as_in_tables(tmp_path: Path) -> None:
    labels = ["0", "1.0", "", " ", True, 0.0, 1]
    for number, label in enumerate(labels):
        networkx.write_graphml(networkx.DiGraph(t=label, empty=""), tmp_path / f"{number}.graphml")
    assert load_folder(tmp_path, label=["t"]).graphs.y.nan_to_num(9).flatten().tolist() == [0, 1, 9, 9, 1, 0, 1]
    assert load_folder(tmp_path, label=["empty"]).graphs.y.isnan().all()
    assert load_folder(tmp_path, label="empty").classes is None
    networkx.write_graphml(networkx.DiGraph(t=2), tmp_path / "7.graphml")
    message = error_of(lambda: load_folder(tmp_path, label=["t"]))
    assert "7.graphml: graph attribute 't' must be 0, 1 or empty as a task, got 2" in message
    for label in ("toxic", ["empty", "toxic"]):
        message = error_of(lambda label=label: load_folder(tmp_path, label=label))
        assert "has no file with the graph attribute 'toxic'; they have empty, t" in message
    names = ",\n".join(map(str, range(8)))
    (tmp_path / "graphs.csv").write_text(f"graph,kind\n{names},\n")
    message = error_of(lambda: load_folder(tmp_path, label="toxic"))
    assert "'toxic'; they have empty, t, its table of graphs kind" in message


def test_numbers_in_messages_are_plain(tmp_path: Path) -> None:
    write(tmp_path, graphs="graph,t\na,1\nb,2\n")
    assert "must be 0, 1 or empty as a task, got 2" in error_of(lambda: load_folder(tmp_path, label=["t"]))


def test_labels_that_are_partly_filled_in(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tables", "tables", TASKS + "c,,,,\n")
    message = error_of(lambda: load_folder(tmp_path / "tables"))
    assert "graphs.csv, line 3, column 'label' is empty, and 1 more of 4 graphs have no label" in message
    assert "label=['label'], or read no labels by label=None" in message
    assert "as a task" not in error_of(lambda: load_folder(write(tmp_path / "words", graphs=GRAPHS + "c,\n")))
    message = error_of(lambda: load_folder(write_tasks(tmp_path / "graphml", "graphml")))
    assert "empty.graphml has no graph attribute 'label', but other files have" in message
    assert "label=None" in message


def test_no_labels_at_all(tmp_path: Path) -> None:
    write_tasks(tmp_path, "tables", "graph,label,t\na,,\nempty,,\nb,,\n")
    assert load_folder(tmp_path).graphs.y is None
    assert load_folder(tmp_path, label=["t"]).graphs.y.isnan().all()
    (tmp_path / "graphs.csv").unlink()
    assert "label='t' is impossible for" in error_of(lambda: load_folder(tmp_path, label="t"))
    assert load_folder(tmp_path).graphs.y is None


# ---- GraphML ----


def write_graphml(folder: Path) -> list[networkx.Graph]:
    """A ring with an isolated node, one directed edge, and an empty graph."""
    folder.mkdir(parents=True, exist_ok=True)
    ring = networkx.cycle_graph(4, create_using=networkx.Graph)
    ring.add_node(4)
    edge = networkx.DiGraph([("u", "v")])
    graphs = [ring, edge, networkx.Graph()]
    for number, graph in enumerate(graphs):
        for node, data in graph.nodes(data=True):
            data |= {"mass": graph.degree(node) + 0.5, "charge": number}
        graph.graph["label"] = ["ring", "edge", "ring"][number]
        networkx.write_graphml(graph, folder / f"g{2 - number}.graphml")
    return graphs


def test_graphml(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    read = load_folder(tmp_path)
    assert read.names == ["g0", "g1", "g2"]
    assert read.classes == ["edge", "ring"]
    assert read.features == [{"column": "charge"}, {"column": "mass"}]
    assert read.num_attributes == 2
    graphs = read.graphs
    assert graphs.y.tolist() == [1, 0, 1]
    assert graphs.ptr.tolist() == [0, 0, 2, 7]
    assert graphs.x[:2].tolist() == [[1, 1.5], [1, 1.5]]
    assert graphs.x[2:, 1].tolist() == [2.5, 2.5, 2.5, 2.5, 0.5]
    assert graphs.num_edges == 1 + 8
    assert edges(graphs)[0] == (0, 1)
    both = load_folder(tmp_path, undirected=True).graphs
    assert both.num_edges == 2 + 8  # undirected files have both directions already
    assert load_folder(tmp_path, features="degree").graphs.x.squeeze(1).tolist() == [0, 1, 2, 2, 2, 2, 0]
    assert load_folder(tmp_path, features=["mass"], dtype=torch.float64).graphs.x.shape == (7, 1)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any),
    seed=st.integers(0, 10_000),
    weighted=st.booleans(),
)
def test_graphml_holds_any_graphs(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, weighted: bool
) -> None:
    """Directed, with self-loops and repeated edges, which need a multigraph."""
    graphs = replace(random_graphs(sizes, weighted=weighted, seed=seed), y=torch.arange(len(sizes)))
    folder = tmp_path_factory.mktemp("graphml")
    for number, graph in enumerate(
        graphs.to_networkx(y="label", multigraph=True, edge_weight="weight" if weighted else None)
    ):
        for _, data in graph.nodes(data=True):
            data |= {f"x{column}": value for column, value in enumerate(data.pop("x"))}
        networkx.write_graphml(graph, folder / f"{number}.graphml")
    read = load_folder(folder, dtype=torch.float64)
    want = GraphBatch.from_networkx(graphs.to_networkx(multigraph=True), x="x", dtype=torch.float64)
    assert torch.equal(read.graphs.ptr, want.ptr)
    assert torch.equal(read.graphs.indptr, want.indptr)
    assert torch.equal(read.graphs.indices, want.indices)
    assert torch.equal(read.graphs.x, want.x)
    assert read.graphs.y.tolist() == list(range(len(sizes)))
    if weighted and graphs.num_edges:
        assert read.graphs.edge_weight.sum() == pytest.approx(graphs.edge_weight.sum().item())


def test_graphml_in_chunks(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    whole = load_folder(tmp_path)
    for size in (1, 2, 5):
        chunks = list(iter_folder(tmp_path, size, features=["charge", "mass"], classes=whole.classes))
        assert [name for chunk in chunks for name in chunk.names] == whole.names
        assert equal(GraphBatch.concatenate(chunk.graphs for chunk in chunks), whole.graphs)
        assert all(len(chunk.graphs) <= size for chunk in chunks)
    assert [(chunk.classes, chunk.graphs.y.tolist()) for chunk in iter_folder(tmp_path, 2)] == [
        (["edge", "ring"], [1, 0]),
        (["edge", "ring"], [1]),
    ]
    assert "has no file with the graph attribute 'kind'" in error_of(
        lambda: next(iter_folder(tmp_path, 1, label="kind"))
    )


def test_reading_in_chunks_reads_no_further(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    (tmp_path / "g9.graphml").write_text("no XML")
    chunks = iter_folder(tmp_path, 3, classes=["edge", "ring"])
    assert next(chunks).names == ["g0", "g1", "g2"]
    assert "g9.graphml, line 1, column 1 is not XML" in error_of(lambda: next(chunks))


def test_tables_in_chunks(tmp_path: Path) -> None:
    write(tmp_path)
    chunks = list(iter_folder(tmp_path, 2))
    assert [chunk.names for chunk in chunks] == [["b", "empty"], ["a"]]
    assert equal(GraphBatch.concatenate(chunk.graphs for chunk in chunks), load_folder(tmp_path).graphs)


def test_labels_of_graphml_in_a_table(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    (tmp_path / "graphs.csv").write_text("graph,label\ng2,7\ng0.graphml,10\ng1,7\n")
    read = load_folder(tmp_path)
    assert (read.classes, read.graphs.y.tolist()) == (["7", "10"], [1, 0, 0])
    for table, words in (
        ("graph,label\ng2,7\ng0,10\n", "no label for g1.graphml"),
        ("graph,label\ng2,7\ng0,10\ng1,7\ng3,7\n", "line 5, column 'graph' names 'g3'"),
        ("graph,label\ng2,7\ng0,10\ng1,7\ng0.graphml,7\n", "line 5, column 'graph' repeats 'g0'"),
    ):
        (tmp_path / "graphs.csv").write_text(table)
        assert words in error_of(lambda: load_folder(tmp_path))
    (tmp_path / "graphs.csv").write_text("graph\ng2\n")
    assert load_folder(tmp_path).classes == ["edge", "ring"]


def test_weights_of_graphml(tmp_path: Path) -> None:
    first, second, none = networkx.path_graph(3), networkx.path_graph(2), networkx.empty_graph(2)
    networkx.set_edge_attributes(first, 0.5, "weight")
    for name, graph in (("a", none), ("b", first), ("c", none)):
        networkx.write_graphml(graph, tmp_path / f"{name}.graphml")
    assert load_folder(tmp_path).graphs.edge_weight.tolist() == [0.5] * 4
    assert load_folder(tmp_path, edge_weight=None).graphs.edge_weight is None
    networkx.write_graphml(second, tmp_path / "d.graphml")
    assert "d.graphml has no edge weights" in error_of(lambda: load_folder(tmp_path))
    assert load_folder(tmp_path, edge_weight=None).graphs.num_edges == 6
    assert "b.graphml" in error_of(lambda: load_folder(tmp_path, edge_weight="length"))


KEYS = (
    "<graphml xmlns='http://graphml.graphdrawing.org/xmlns'>"
    "<key id='f' for='node' attr.name='f' attr.type='double'/>"
    "<key id='w' for='edge' attr.name='weight' attr.type='double'/>"
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<graphml>\n  <graph", ["line 2", "is not XML"]),
        ("<svg/>", ["no GraphML file"]),
        ("", ["is not XML"]),
        ("<graphml><graph edgedefault='directed'/><graph edgedefault='directed'/></graphml>", ["several graphs"]),
        ("<graphml><graph\nid='a'/><graph\nid='b'/></graphml>", ["several graphs"]),
        ("<g:graphml xmlns:g='g'><g:graph/><g:graph/></g:graphml>", ["several graphs"]),
        ("<graphml><graph><node id='a'/><node id='a'/></graph></graphml>", ["repeats node 'a'"]),
        ("<graphml><graph><node/></graph></graphml>", ["node without an id"]),
        ("<graphml><graph><node id='a'/><edge source='a' target='b'/></graph></graphml>", ["names node 'b'"]),
        ("<graphml><graph><node id='a'/><edge source='a'/></graph></graphml>", ["lacks an end"]),
        (KEYS + "<graph><node id='a'><data key='f'>NaN</data></node></graph></graphml>", ["'f' of node 'a'", "nan"]),
        (
            KEYS + "<graph><node id='a'/><edge source='a' target='a'><data key='w'>INF</data></edge></graph></graphml>",
            ["edge attribute 'weight' must be finite"],
        ),
    ],
)
def test_wrong_graphml_is_named(tmp_path: Path, content: str, words: list[str]) -> None:
    (tmp_path / "bad.graphml").write_text(content)
    message = error_of(lambda: load_folder(tmp_path))
    assert all(word in message for word in [*words, "bad.graphml"])


def test_graphml_of_any_encoding_and_with_comments(tmp_path: Path) -> None:
    text = f"<?xml version='1.0' encoding='UTF-16'?>{KEYS}<!-- <graph > --><graph><node id='ö'/></graph></graphml>"
    (tmp_path / "a.graphml").write_text(text, encoding="utf-16")
    assert load_folder(tmp_path).graphs.num_nodes == 1


def test_graphml_that_differs_from_file_to_file(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    other = networkx.path_graph(2)
    networkx.set_node_attributes(other, 1.0, "mass")
    networkx.write_graphml(other, tmp_path / "h.graphml")
    message = error_of(lambda: load_folder(tmp_path))
    assert all(word in message for word in ("h.graphml", "charge, mass", "features"))
    assert "h.graphml has no graph attribute 'label'" in error_of(lambda: load_folder(tmp_path, features="mass"))
    assert len(next(iter_folder(tmp_path, 9, features="mass", label=None)).graphs) == 4
    networkx.set_node_attributes(other, "iron", "charge")
    networkx.write_graphml(other, tmp_path / "h.graphml")
    assert "h.graphml: node attribute 'charge' must be numbers" in error_of(lambda: load_folder(tmp_path))
    networkx.set_node_attributes(other, {0: "iron", 1: 2}, "charge")
    networkx.write_graphml(other, tmp_path / "f.graphml")
    assert (
        "f.graphml: node attribute 'charge' of node '0' must be a number, got 'iron', as node '1' holds 2; correct it"
        in error_of(lambda: load_folder(tmp_path))
    )


def test_without_networkx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_graphml(tmp_path)
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ImportError, match="pip install networkx"):
        load_folder(tmp_path)


# ---- TU text, and what a path may be ----

TU = {"A": "1, 2\n2, 1\n3, 4\n", "graph_indicator": "1\n1\n2\n2\n", "graph_labels": "1\n-1\n"}


def write_tu(folder: Path, name: str = "TINY", **changes: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, text in (TU | changes).items():
        if text is not None:
            (folder / f"{name}_{part}.txt").write_text(text)
    return folder


def test_tu_text_of_any_name(tmp_path: Path) -> None:
    write_tu(tmp_path / "any" / "raw", "TINY", node_attributes="1, 2\n3, 4\n5, 6\n7, 8\n", node_labels="3\n3\n4\n3\n")
    read = load_folder(tmp_path / "any", features="attribute+label")
    assert (read.names, read.classes) == (["1", "2"], ["-1", "1"])
    assert (read.features, read.num_attributes, read.graphs.num_features) == ("attribute+label[3..4]", 2, 4)
    assert read.graphs.y.tolist() == [1, 0]
    assert load_folder(tmp_path / "any", classes=["1", "0", "-1"]).graphs.y.tolist() == [0, 2]
    assert "the class '1'" in error_of(lambda: load_folder(tmp_path / "any", classes=["-1"]))
    assert load_folder(tmp_path / "any").features == "label[3..4]"
    unlabelled = write_tu(tmp_path / "unlabelled", graph_labels=None)
    read = load_folder(unlabelled)
    assert (read.graphs.y, read.classes, read.names, read.features) == (None, None, ["1", "2"], "degree")
    both = load_folder(unlabelled, undirected=True, coalesce="max").graphs
    assert both.x.squeeze(1).tolist() == [1, 1, 1, 1]
    with zipfile.ZipFile(tmp_path / "TINY.zip", "w") as archive:
        for part, text in TU.items():
            archive.writestr(f"TINY/TINY_{part}.txt", text)
    assert load_folder(tmp_path / "TINY.zip").graphs.y.tolist() == [1, 0]


def test_node_labels_of_an_earlier_reading(tmp_path: Path) -> None:
    """A label has the same column in all files, or other graphs would mean something else to a model."""
    first = load_folder(write_tu(tmp_path / "a", node_labels="-1, 5\n0, 5\n2, 7\n0, 5\n"))
    assert (first.features, first.graphs.num_features) == ("label[-1..2,5..7]", 7)
    second = write_tu(tmp_path / "b", node_labels="0, 6\n0, 7\n1, 6\n0, 6\n", node_attributes="1\n2\n3\n4\n")
    assert load_folder(second).graphs.num_features == 4
    x = load_folder(second, features=first.features).graphs.x
    assert x[:, :4].argmax(1).tolist() == [1, 1, 2, 1]
    assert x[:, 4:].argmax(1).tolist() == [1, 2, 1, 1]
    both = load_folder(second, features=f"attribute+{first.features}")
    assert torch.equal(both.graphs.x[:, 1:], x)
    assert (both.features, both.num_attributes) == ("attribute+label[-1..2,5..7]", 1)
    third = write_tu(tmp_path / "c", node_labels="0, 6\n3, 7\n1, 6\n0, 6\n")
    message = error_of(lambda: load_folder(third, features=first.features))
    assert "TINY_node_labels.txt holds labels 0..3,6..7, but features only have columns for -1..2,5..7" in message
    assert "0..3" in error_of(lambda: load_folder(third, features="label[0..3]"))
    assert "is impossible for" in error_of(lambda: load_folder(third, features="label[0..]"))


def test_labels_of_tu_text_can_be_left_alone(tmp_path: Path) -> None:
    write_tu(tmp_path, graph_labels="1\n\n")
    assert "has 1 lines" in error_of(lambda: load_folder(tmp_path))
    assert load_folder(tmp_path, label=None).graphs.y is None
    assert "label='kind' is impossible" in error_of(lambda: load_folder(tmp_path, label="kind"))
    assert "label='kind' is impossible" in error_of(lambda: datasets.load("digits", label="kind"))


def test_a_list_of_nodes_and_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"n 1 {g}\nn 2 {g + 1}\ne 1 2 0.5\ng x\nx {2 * g - 1}\n" for g in range(2))
    (tmp_path / "MINE.nel").write_text(text)
    want = datasets.find("MINE", tmp_path).read()
    read = load_folder(tmp_path / "MINE.nel")
    assert equal(read.graphs, want.graphs)
    assert read[1:] == want[1:]
    assert read.classes == ["-1", "1"]
    assert load_folder(tmp_path / "MINE.nel", label=None).graphs.y is None
    assert load_folder(tmp_path / "MINE.nel", classes=["1", "-1"], self_loops=True).graphs.y.tolist() == [1, 0]
    assert f"name one of them, such as {tmp_path / 'MINE.nel'}" in error_of(lambda: load_folder(tmp_path))
    assert equal(datasets.load("MINE.nel", tmp_path), want.graphs)
    monkeypatch.chdir(tmp_path)
    assert equal(datasets.load("MINE.nel", tmp_path / "absent"), want.graphs)
    with zipfile.ZipFile(tmp_path / "MINE.nel.zip", "w") as archive:
        archive.writestr("MINE.nel", text)
    for path in ("MINE.nel.zip", tmp_path / "MINE.nel.zip"):
        assert "MINE.nel.zip holds a .nel file; unpack it" in error_of(lambda path=path: load_folder(path))


def test_infinite_attributes_of_tu_text(tmp_path: Path) -> None:
    write_tu(tmp_path, node_attributes="1\n3\ninf\n7\n")
    assert "TINY_node_attributes.txt, line 3 must hold" in error_of(lambda: load_folder(tmp_path))


def test_what_is_no_folder_of_graphs(tmp_path: Path) -> None:
    assert "does not exist" in error_of(lambda: load_folder(tmp_path / "absent"))
    (tmp_path / "notes.txt").write_text("")
    assert "is a file" in error_of(lambda: load_folder(tmp_path / "notes.txt"))
    message = error_of(lambda: load_folder(tmp_path))
    assert "holds no graphs (it holds notes.txt)" in message
    for name in ("set.zip", "set.nel"):
        (tmp_path / name).write_text("")
        expected = f"is a folder of {name[3:]} files; name one of them, such as {tmp_path / name}"
        assert expected in error_of(lambda: load_folder(tmp_path))
    write(tmp_path)
    write_tu(tmp_path)
    assert "several formats (TINY_A.txt, edges.csv)" in error_of(lambda: load_folder(tmp_path))
    write_tu(tmp_path / "two")
    write_tu(tmp_path / "two", "MORE")
    assert "several sets, MORE, TINY" in error_of(lambda: load_folder(tmp_path / "two"))


def test_load_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = load_folder(write(tmp_path / "mine")).graphs
    assert equal(datasets.load(str(tmp_path / "mine")), want)
    assert equal(datasets.load(tmp_path / "mine"), want)
    assert equal(datasets.load("mine", tmp_path), want)  # by name, where data sets are
    assert "mine" in datasets.names(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert equal(datasets.load("mine", tmp_path / "absent"), want)  # or here
    assert equal(datasets.load("./mine"), want)
    assert datasets.load("./mine", features=["mass"]).num_features == 1
    assert datasets.find("mine", tmp_path).read().num_attributes == 2
    assert datasets.find("./mine").metric == "accuracy"
    monkeypatch.setenv("SPIN_FAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "CSL").mkdir()
    assert len(datasets.load("CSL")) == 150  # what is built in goes before a folder that happens to be here
    assert "absent does not exist" in error_of(lambda: datasets.load("./absent"))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"features": 3}, TypeError, "features must be names"),
        ({"features": ["mass", 3]}, TypeError, "features must be names"),
        ({"features": {"name": "mass"}}, ValueError, "features must have 'column'"),
        ({"features": [{"column": "mass", "categorical": True}]}, ValueError, "features must have 'column'"),
        ({"features": ["mass", {"column": "mass"}]}, ValueError, "features must be different"),
        ({"features": [{"column": "mass", "categories": []}]}, ValueError, "different words"),
        ({"features": [{"column": "mass", "categories": ["a", "a"]}]}, ValueError, "different words"),
        ({"features": [{"column": "mass", "categories": [1, 2]}]}, ValueError, "different words"),
        ({"features": [{"column": "mass", "categories": "number"}]}, ValueError, "different words"),
        ({"label": 3}, TypeError, "label must be a name"),
        ({"label": [1]}, TypeError, "label must be a name"),
        ({"label": []}, ValueError, "label must be different names, at least one"),
        ({"label": ["a"], "classes": ["0", "1"]}, ValueError, "classes must be None where label is a list"),
        ({"features": []}, ValueError, "features must be different names, at least one"),
        ({"features": ["mass", "mass"]}, ValueError, "features must be different"),
        ({"classes": "ab"}, TypeError, "classes must be a list of names"),
        ({"classes": [1, 2]}, TypeError, "classes must be a list of names"),
        ({"dtype": torch.int64}, TypeError, "dtype must be float32 or float64"),
        ({"undirected": 1}, TypeError, "undirected must be a bool"),
        ({"coalesce": "all"}, ValueError, "coalesce must be one of"),
        ({"sort_nodes": True}, TypeError, "sort_nodes is no option"),
        ({"directed": True}, TypeError, "directed is no option"),
    ],
)
@pytest.mark.parametrize("kind", ["tables", "graphml"])
def test_arguments_are_checked(
    tmp_path: Path, kind: str, options: dict[str, object], error: type[Exception], words: str
) -> None:
    write(tmp_path) if kind == "tables" else write_graphml(tmp_path)
    with pytest.raises(error, match=words):
        load_folder(tmp_path, **options)
    with pytest.raises(ValueError, match="num_graphs must be at least 1"):
        iter_folder(tmp_path, 0)


def test_numbers_beyond_float32_are_refused_by_name(tmp_path: Path) -> None:
    """They would be infinite, and nothing would say so."""
    write_tu(tmp_path / "tu", node_attributes="1\n3\n1e300\n7\n")
    assert "TINY_node_attributes.txt, line 3 must hold 1 float32" in error_of(lambda: load_folder(tmp_path / "tu"))
    assert load_folder(tmp_path / "tu", features="attribute", dtype=torch.float64).graphs.x.max() == 1e300
    (tmp_path / "xml").mkdir()
    path = tmp_path / "xml" / "bad.graphml"
    nodes = "".join(f"<node id='{node}'><data key='f'>{value}</data></node>" for node, value in ("a1", ("b", "1e300")))
    path.write_text(f"{KEYS}<graph>{nodes}</graph></graphml>")
    message = error_of(lambda: load_folder(tmp_path / "xml"))
    assert "bad.graphml: attribute 'f' of node 'b' must be finite as float32, got 1e+300" in message
    edge = "<edge source='a' target='a'><data key='w'>1e39</data></edge>"
    path.write_text(f"{KEYS}<graph><node id='a'/>{edge}</graph></graphml>")
    assert "bad.graphml: edge_weight must be finite as float32, got 1e+39" in error_of(lambda: load_folder(path.parent))
    nel_file = tmp_path / "x.nel"
    nel_file.write_text("n 1 a\nn 2 b\ne 1 2 1e300\nx 1\n")
    assert nel.read(nel_file).graphs.num_edges == 2  # weights are not read


def test_a_misspelt_task_of_graphml_is_named_in_chunks_too(tmp_path: Path) -> None:
    for number in range(3):
        graph = networkx.path_graph(2)
        networkx.set_node_attributes(graph, 1.5, "mass")
        graph.graph["toxic"] = number % 2
        networkx.write_graphml(graph, tmp_path / f"{number}.graphml")
    for label in (["toxicc"], ["toxic", "solubl"]):
        told = error_of(lambda label=label: load_folder(tmp_path, label=label))
        assert "no file with the graph attribute" in told
        assert error_of(lambda label=label: next(iter_folder(tmp_path, 1, label=label))) == told


def test_defaults_of_graphml(tmp_path: Path) -> None:
    (tmp_path / "a.graphml").write_text("""<?xml version="1.0" encoding="UTF-8"?>
        <graphml xmlns="http://graphml.graphdrawing.org/xmlns">
        <key id="c" for="node" attr.name="color" attr.type="string"><default>yellow</default></key>
        <key id="w" for="edge" attr.name="weight" attr.type="double"><default>2.5</default></key>
        <graph edgedefault="directed"><node id="n0"><data key="c">green</data></node><node id="n1"/>
        <edge source="n0" target="n1"/><edge source="n1" target="n0"><data key="w">1.0</data></edge></graph></graphml>
        """)
    read = load_folder(tmp_path)
    assert read.graphs.x.tolist() == [[1, 0], [0, 1]]
    assert read.features == [{"column": "color", "categories": ["green", "yellow"]}]
    assert sorted(read.graphs.edge_weight.tolist()) == [1.0, 2.5]
    file = tmp_path / "a.graphml"
    file.write_text(file.read_text().replace("<default>yellow</default>", "<default/>"))
    assert "node 'n1' must have the attribute 'color', got none" in error_of(lambda: load_folder(tmp_path))


def test_columns_of_one_name_in_parquet_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([["a"], [0], [1], [2]], names=["graph", "source", "target", "source"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "edges.parquet")
    assert "edges.parquet must have one column 'source', got several" in error_of(lambda: load_folder(tmp_path))


def test_weights_that_would_be_rounded(tmp_path: Path) -> None:
    write(tmp_path, nodes=None, graphs=None, edges="graph,source,target,weight\na,0,1,16777216\na,1,0,16777217\n")
    told = error_of(lambda: load_folder(tmp_path))
    assert "edges.csv, line 3, column 'weight' holds 16777217, which float32 would round" in told
    assert load_folder(tmp_path, dtype=torch.float64).graphs.edge_weight.max() == 16777217


def test_words_that_python_reads_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, graphs="graph,label\na,10_1\nb,9_2\n", nodes=None)
    assert load_folder(tmp_path).classes == ["10_1", "9_2"]
