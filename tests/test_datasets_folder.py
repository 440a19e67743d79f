"""Folders of a user's own graphs: TU text, GraphML, tables; and what is wrong with them."""

from __future__ import annotations

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
from spin_fast.datasets import iter_folder, load_folder

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


def arcs(graphs: GraphBatch) -> list[tuple[int, int]]:
    """Pairs (source, target)."""
    return list(zip(*graphs.edge_index.tolist(), strict=True))


# ---- tables ----


def test_tables(tmp_path: Path) -> None:
    read = load_folder(write(tmp_path))
    assert read.names == ["b", "empty", "a"]
    assert read.classes == ["mutagen", "none"]
    assert read.features == ["charge", "mass"]
    assert read.num_attributes == 2
    graphs = read.graphs
    assert graphs.y.tolist() == [0, 1, 0]
    assert graphs.ptr.tolist() == [0, 3, 3, 5]
    assert graphs.x.tolist() == [[-1, 4], [0, 3], [7, 5], [0.5, 1], [1.5, 2]]
    assert sorted(arcs(graphs)) == [(0, 1), (1, 0), (3, 4), (4, 4)]
    assert graphs.edge_weight is None


def test_direction_is_that_of_pyg(tmp_path: Path) -> None:
    write(tmp_path, edges="graph,source,target\na,x,y\n", graphs=None)
    assert arcs(load_folder(tmp_path).graphs) == [(0, 1)]
    assert sorted(arcs(load_folder(tmp_path, undirected=True).graphs)) == [(0, 1), (1, 0)]
    write(tmp_path, edges="graph,source,target\na,x,y\na,x,y\na,y,y\n")
    assert load_folder(tmp_path).graphs.num_arcs == 3
    merged = load_folder(tmp_path, coalesce="sum", self_loops=False).graphs
    assert (merged.num_arcs, merged.edge_weight.tolist()) == (1, [2])


def test_arcs_of_a_folder_that_load_takes(tmp_path: Path) -> None:
    write(tmp_path, edges="graph,source,target\na,x,y\na,x,y\na,y,y\n", graphs=None)
    options = {"undirected": True, "coalesce": "max", "self_loops": False}
    assert equal(datasets.load(tmp_path, **options), load_folder(tmp_path, **options).graphs)
    assert sorted(arcs(datasets.load(tmp_path, **options))) == [(0, 1), (1, 0)]
    assert len(datasets.load("CSL", tmp_path, undirected=False, coalesce=None, self_loops=None)) == 150
    for name, value in options.items():
        message = error_of(lambda name=name, value=value: datasets.read("digits", **{name: value}))
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
    assert sorted(arcs(read.graphs)) == [(0, 1), (1, 0), (2, 3), (3, 3)]
    assert read.graphs.x.tolist() == [[1], [1], [0], [2]]  # arcs that end in the node
    assert (read.features, read.num_attributes) == ("degree", 0)
    read = load_folder(write(tmp_path / "no features", nodes="graph,node\na,x\na,y\nb,1\nb,2\n"))
    assert read.features == "degree"


def test_features_by_name(tmp_path: Path) -> None:
    write(tmp_path, nodes=NODES.replace("charge", "name").replace("0.5", "C"))
    message = error_of(lambda: load_folder(tmp_path))
    assert "nodes.csv, line 2, column 'name' must be a number, got 'C'" in message
    read = load_folder(tmp_path, features="mass")
    assert (read.graphs.x.shape, read.features) == ((5, 1), ["mass"])
    assert load_folder(tmp_path, features="degree").graphs.x.squeeze(1).tolist() == [1, 1, 0, 0, 2]
    write(tmp_path)
    assert load_folder(tmp_path, features=["mass", "charge"]).graphs.x[0].tolist() == [4, -1]
    write(tmp_path, nodes=NODES.replace("mass", "number").replace(",5\n", ",16777217\n"))
    message = error_of(lambda: load_folder(tmp_path))
    assert "nodes.csv, line 6, column 'number' holds 16777217, which float32 would round" in message
    assert load_folder(tmp_path, dtype=torch.float64).graphs.x[2, 1] == 16777217
    assert "'volume'" in error_of(lambda: load_folder(tmp_path, features=["volume"]))


def test_weights(tmp_path: Path) -> None:
    write(tmp_path, edges="graph,source,target,weight,length\na,x,y,0.5,2\nb,1,2,3,4\n")
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
        ({"graphs": "graph,label\n"}, ["graphs.csv lists no graphs"]),
    ],
)
def test_wrong_tables_are_named(tmp_path: Path, changes: dict[str, str], words: list[str]) -> None:
    write(tmp_path, **changes)
    message = error_of(lambda: load_folder(tmp_path))
    assert all(word in message for word in [*words, str(tmp_path)])


def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    csv = load_folder(write(tmp_path / "csv"))
    (tmp_path / "parquet").mkdir()
    for name in ("edges", "nodes", "graphs"):
        table = pandas.read_csv(tmp_path / "csv" / f"{name}.csv")
        table.to_parquet(tmp_path / "parquet" / f"{name}.parquet", index=False)
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

    def missing(_: object) -> None:
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr(pandas, "read_parquet", missing)
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
    if weighted and not shuffled:  # repeated arcs are kept in the order of the file
        torch.testing.assert_close(read.graphs.edge_weight, want.edge_weight)


# ---- GraphML ----


def write_graphml(folder: Path) -> list[networkx.Graph]:
    """A ring with an isolated node, one directed arc, and an empty graph."""
    folder.mkdir(parents=True, exist_ok=True)
    ring = networkx.cycle_graph(4, create_using=networkx.Graph)
    ring.add_node(4)
    arc = networkx.DiGraph([("u", "v")])
    graphs = [ring, arc, networkx.Graph()]
    for number, graph in enumerate(graphs):
        for node, data in graph.nodes(data=True):
            data |= {"mass": graph.degree(node) + 0.5, "charge": number}
        graph.graph["label"] = ["ring", "arc", "ring"][number]
        networkx.write_graphml(graph, folder / f"g{2 - number}.graphml")
    return graphs


def test_graphml(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    read = load_folder(tmp_path)
    assert read.names == ["g0", "g1", "g2"]
    assert read.classes == ["arc", "ring"]
    assert read.features == ["charge", "mass"]
    assert read.num_attributes == 2
    graphs = read.graphs
    assert graphs.y.tolist() == [1, 0, 1]
    assert graphs.ptr.tolist() == [0, 0, 2, 7]
    assert graphs.x[:2].tolist() == [[1, 1.5], [1, 1.5]]
    assert graphs.x[2:, 1].tolist() == [2.5, 2.5, 2.5, 2.5, 0.5]
    assert graphs.num_arcs == 1 + 8
    assert arcs(graphs)[0] == (0, 1)
    both = load_folder(tmp_path, undirected=True).graphs
    assert both.num_arcs == 2 + 8  # undirected files have both arcs already
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
    """Directed, with self-loops and repeated arcs, which need a multigraph."""
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
    if weighted and graphs.num_arcs:
        assert read.graphs.edge_weight.sum() == pytest.approx(graphs.edge_weight.sum().item())


def test_graphml_in_chunks(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    whole = load_folder(tmp_path)
    for size in (1, 2, 5):
        chunks = list(iter_folder(tmp_path, size, features=["charge", "mass"], classes=whole.classes))
        assert [name for chunk in chunks for name in chunk.names] == whole.names
        assert equal(GraphBatch.concatenate(chunk.graphs for chunk in chunks), whole.graphs)
        assert all(len(chunk.graphs) <= size for chunk in chunks)
    assert [chunk.graphs.y for chunk in iter_folder(tmp_path, 2)] == [None, None]


def test_reading_in_chunks_reads_no_further(tmp_path: Path) -> None:
    write_graphml(tmp_path)
    (tmp_path / "g9.graphml").write_text("no XML")
    chunks = iter_folder(tmp_path, 3)
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
    assert load_folder(tmp_path).classes == ["arc", "ring"]


def test_weights_of_graphml(tmp_path: Path) -> None:
    first, second, none = networkx.path_graph(3), networkx.path_graph(2), networkx.empty_graph(2)
    networkx.set_edge_attributes(first, 0.5, "weight")
    for name, graph in (("a", none), ("b", first), ("c", none)):
        networkx.write_graphml(graph, tmp_path / f"{name}.graphml")
    assert load_folder(tmp_path).graphs.edge_weight.tolist() == [0.5] * 4
    assert load_folder(tmp_path, edge_weight=None).graphs.edge_weight is None
    networkx.write_graphml(second, tmp_path / "d.graphml")
    assert "d.graphml has no edge weights" in error_of(lambda: load_folder(tmp_path))
    assert load_folder(tmp_path, edge_weight=None).graphs.num_arcs == 6
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
    assert len(next(iter_folder(tmp_path, 9, features="mass")).graphs) == 4
    networkx.set_node_attributes(other, "iron", "charge")
    networkx.write_graphml(other, tmp_path / "h.graphml")
    assert "h.graphml: node attribute 'charge' must be numbers" in error_of(lambda: load_folder(tmp_path))


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
    assert "unknown" in error_of(lambda: load_folder(third, features="label[0..]"))


def test_infinite_attributes_of_tu_text(tmp_path: Path) -> None:
    write_tu(tmp_path, node_attributes="1\n3\ninf\n7\n")
    assert "TINY_node_attributes.txt, line 3 must hold" in error_of(lambda: load_folder(tmp_path))


def test_what_is_no_folder_of_graphs(tmp_path: Path) -> None:
    assert "does not exist" in error_of(lambda: load_folder(tmp_path / "absent"))
    (tmp_path / "notes.txt").write_text("")
    assert "is a file" in error_of(lambda: load_folder(tmp_path / "notes.txt"))
    message = error_of(lambda: load_folder(tmp_path))
    assert "holds no graphs (it holds notes.txt)" in message
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
    assert datasets.num_node_attributes("mine", tmp_path) == 2
    assert datasets.metric("./mine") == "accuracy"
    monkeypatch.setenv("SPIN_FAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "CSL").mkdir()
    assert len(datasets.load("CSL")) == 150  # what is built in goes before a folder that happens to be here
    assert "absent does not exist" in error_of(lambda: datasets.load("./absent"))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"features": 3}, TypeError, "features must be a list of names"),
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
