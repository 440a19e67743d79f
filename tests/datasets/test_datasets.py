"""Data sets: the figures of the files at hand, handmade files, what goes wrong, the generators, the splits."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers import DATA, equal, error_of
from torch import Tensor

from spin_fast import GraphBatch, PowerFeatures, datasets
from spin_fast.datasets import DatasetError, downloads, nel, ogb


@cache
def public(name: str, features: str | None = None) -> GraphBatch:
    """A public set, read once; a skip where its files are not at hand."""
    if name not in datasets.names(DATA):
        pytest.skip(f"no {name} in {DATA}: put the public files there or set SPIN_FAST_DATA")
    return datasets.load(name, DATA, features=features)


def public_file(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"no {DATA / name}: put the public files there or set SPIN_FAST_DATA")
    return DATA / name


def edges(graphs: GraphBatch) -> list[tuple[int, int]]:
    rows = torch.arange(graphs.num_nodes).repeat_interleave(graphs.degree)
    return list(zip(rows.tolist(), graphs.indices.tolist(), strict=True))


def self_loops(graphs: GraphBatch) -> int:
    rows = torch.arange(graphs.num_nodes, dtype=graphs.indices.dtype).repeat_interleave(graphs.degree)
    return int((rows == graphs.indices).sum())


def undirected_edges(graphs: GraphBatch) -> float:
    return (graphs.num_edges + self_loops(graphs)) / 2


# Two graphs: a triangle whose edge 1-2 is listed twice each way, with a self-loop (twice) and an isolated node 4; then
# a single edge from row 5 to column 6.
TINY = {
    "A": "1, 2\n2, 1\n1, 2\n2, 1\n2, 3\n3, 2\n1,3\n3,1\n3, 3\n3, 3\n5, 6\n",
    "graph_indicator": "1\n1\n1\n1\n2\n2\n",
    "graph_labels": "7\n-1\n",
    "node_labels": "2\n5\n2\n3\n5\n2\n",
    "node_attributes": "0.5, 1\n1.5, 2\n2.5, 3\n3.5, 4\n4.5, 5\n5.5, 6e0\n",
}


def write(folder: Path, name: str = "TINY", **changes: str | None) -> Path:
    """Write the handmade set into ``folder``; None leaves a file out."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, text in (TINY | changes).items():
        if text is not None:
            (folder / f"{name}_{part}.txt").write_text(text)
    return folder


def pack(folder: Path, archive: Path, inside: str = "", method: int = zipfile.ZIP_DEFLATED) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", method) as target:
        for file in sorted(folder.iterdir()):
            target.write(file, inside + file.name)
    return archive


# ---- the public files ----


@pytest.mark.parametrize(
    ("name", "num_graphs", "num_classes", "nodes", "edges", "width", "isolated"),
    [
        pytest.param("DD", 1178, 2, 284.32, 715.66, 89, 0, marks=pytest.mark.slow),
        ("NCI1", 4110, 2, 29.87, 32.30, 37, 428),
        ("PROTEINS", 1113, 2, 39.06, 72.82, 3, 5),
        ("PROTEINS_full", 1113, 2, 39.06, 72.82, 3, 5),
        ("ENZYMES", 600, 6, 32.63, 62.14, 21, 106),
        ("IMDB-BINARY", 1000, 2, 19.77, 96.53, 1, 0),
        ("IMDB-MULTI", 1500, 3, 13.00, 65.94, 1, 0),
        pytest.param("REDDIT-BINARY", 2000, 2, 429.63, 497.75, 1, 21, marks=pytest.mark.slow),
        pytest.param("COLLAB", 5000, 3, 74.49, 2457.78, 1, 0, marks=pytest.mark.slow),
        ("OHSU", 79, 2, 82.01, 199.66, 1, 0),
        ("Peking_1", 85, 2, 39.31, 77.35, 1, 0),
        ("CSL", 150, 10, 41.00, 82.00, 1, 0),
        pytest.param("ogbg-molhiv", 41127, 2, 25.51, 27.47, 9, None, marks=pytest.mark.slow),
    ],
)
def test_public_set_has_the_published_figures(
    name: str, num_graphs: int, num_classes: int, nodes: float, edges: float, width: int, isolated: int | None
) -> None:
    graphs = public(name)
    assert len(graphs) == num_graphs
    assert graphs.y is not None
    assert graphs.y.dtype == torch.int64
    assert graphs.y.unique().tolist() == list(range(num_classes))
    assert graphs.num_nodes / num_graphs == pytest.approx(nodes, abs=0.006)
    assert undirected_edges(graphs) / num_graphs == pytest.approx(edges, abs=0.006)
    assert graphs.num_features == width
    assert graphs.x.dtype == torch.float32
    if isolated is not None:
        assert int((graphs.degree == 0).sum()) == isolated


@pytest.mark.parametrize(("name", "edges"), [("IMDB-BINARY", 96531), ("IMDB-MULTI", 98903)])
def test_imdb_arcs_listed_twice_are_kept_once(name: str, edges: int) -> None:
    assert public(name).num_edges == 2 * edges


@pytest.mark.slow
def test_collab_keeps_its_self_loops_and_loads_fast() -> None:
    public_file("COLLAB.zip")
    public.cache_clear()
    start = time.perf_counter()
    graphs = public("COLLAB")
    assert time.perf_counter() - start < 60
    assert self_loops(graphs) == 2837
    assert graphs.num_edges == 24_574_995


def test_enzymes_attributes_come_before_labels() -> None:
    both = public("ENZYMES")
    attributes, labels = public("ENZYMES", "attribute"), public("ENZYMES", "label")
    assert (attributes.num_features, labels.num_features) == (18, 3)
    assert torch.equal(both.x, torch.cat([attributes.x, labels.x], dim=1))
    assert attributes.x[0, :3].tolist() == pytest.approx([11.0, 15.887014, 37.78])
    assert torch.equal(labels.x.sum(dim=1), torch.ones(labels.num_nodes))


@pytest.mark.slow
def test_dd_one_hot_spans_the_labels_though_some_do_not_occur() -> None:
    x = public("DD").x
    assert x.shape[1] == 89
    assert int((x.sum(dim=0) > 0).sum()) == 82


@pytest.mark.parametrize("name", ["OHSU", "Peking_1"])
def test_nel_agrees_with_the_zip_graph_by_graph(name: str) -> None:
    listed, zipped = (
        nel.read(public_file(f"{name}.nel")).graphs,
        datasets.load_folder(public_file(f"{name}.zip")).graphs,
    )
    assert torch.equal(listed.ptr, zipped.ptr)
    assert torch.equal(listed.y, zipped.y)
    ends = listed.ptr.tolist()
    assert torch.equal(listed.indptr[ends], zipped.indptr[ends])
    assert listed.num_features == zipped.num_features == 1
    assert nel.read(DATA / f"{name}.nel", features="label").graphs.num_features == 190


@pytest.mark.slow
def test_molhiv_split_and_evaluator() -> None:
    graphs = public("ogbg-molhiv")
    y = graphs.y
    assert int(y.sum()) == 1443
    train, validation, test = datasets.find("ogbg-molhiv", DATA).split(y)
    assert (len(train), len(validation), len(test)) == (32901, 4113, 4113)
    assert torch.equal(torch.cat([train, validation, test]).sort().values, torch.arange(41127))
    pytest.importorskip("ogb")
    truth = y[test].unsqueeze(1)
    perfect = datasets.evaluator("ogbg-molhiv").eval({"y_true": truth, "y_pred": truth.double()})
    assert perfect == {"rocauc": 1.0}


# ---- digits ----


def test_digits_are_the_default() -> None:
    graphs = datasets.load()
    assert len(graphs) == 1797
    assert graphs.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert graphs.num_nodes / 1797 == pytest.approx(32.69, abs=0.01)
    assert graphs.num_edges / 2 / 1797 == pytest.approx(88.98, abs=0.01)
    assert self_loops(graphs) == 0
    assert equal(graphs, datasets.load("digits", "/nowhere"))
    assert datasets.load("digits", dtype=torch.float64).x.dtype == torch.float64


def test_a_digit_equals_its_slow_construction() -> None:
    from sklearn.datasets import load_digits

    for number in (0, 1796):
        scan = load_digits().images[number]
        pixels = [(row, column) for row in range(8) for column in range(8) if scan[row, column] > 0]
        touching = [
            (i, j)
            for i, (r, c) in enumerate(pixels)
            for j, (s, t) in enumerate(pixels)
            if i != j and abs(r - s) <= 1 and abs(c - t) <= 1
        ]
        graph = datasets.load()[number]
        assert edges(graph) == touching
        expected = torch.tensor([[scan[row, column] / 16, row / 7, column / 7] for row, column in pixels])
        torch.testing.assert_close(graph.x, expected.float())


# ---- handmade TU files ----


def test_tiny_set(tmp_path: Path) -> None:
    graphs = datasets.load_folder(write(tmp_path / "TINY"), dtype=torch.float64).graphs
    assert graphs.ptr.tolist() == [0, 4, 6]
    assert edges(graphs) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2), (4, 5)]
    assert graphs.y.tolist() == [1, 0]  # -1 < 7
    assert graphs.x.dtype == torch.float64
    assert graphs.x.argmax(dim=1).tolist() == [0, 3, 0, 1, 3, 0]
    assert graphs.num_features == 4  # 2..5, though no node has 4


@pytest.mark.parametrize(
    ("features", "changes", "expected"),
    [
        ("degree", {}, [[2], [2], [3], [0], [1], [0]]),
        (None, {"node_labels": None, "node_attributes": None}, [[2], [2], [3], [0], [1], [0]]),
        ("attribute", {}, [[0.5, 1], [1.5, 2], [2.5, 3], [3.5, 4], [4.5, 5], [5.5, 6]]),
        (None, {"node_labels": None}, [[0.5, 1], [1.5, 2], [2.5, 3], [3.5, 4], [4.5, 5], [5.5, 6]]),
        (
            None,
            {"node_labels": "0, 9\n1, 7\n1, 7\n0, 9\n0, 9\n0, 9\n"},
            [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0], *[[1, 0, 0, 0, 1]] * 3],
        ),
    ],
)
def test_tiny_features(
    tmp_path: Path, features: str | None, changes: dict[str, str | None], expected: list[list[float]]
) -> None:
    assert datasets.load_folder(write(tmp_path / "TINY", **changes), features=features).graphs.x.tolist() == expected


def test_the_name_decides_the_paper_choice(tmp_path: Path) -> None:
    write(tmp_path / "OHSU", "OHSU")
    write(tmp_path / "ENZYMES", "ENZYMES")
    assert datasets.load("OHSU", tmp_path).num_features == 1
    assert datasets.load("ENZYMES", tmp_path).x[1].tolist() == [1.5, 2, 0, 0, 0, 1]


def test_every_layout_gives_the_same_graphs(tmp_path: Path) -> None:
    expected = datasets.load_folder(write(tmp_path / "plain" / "TINY")).graphs
    source = tmp_path / "plain" / "TINY"
    write(tmp_path / "raw" / "TINY" / "raw")
    write(tmp_path / "direct")
    pack(source, tmp_path / "zip" / "TINY.zip", "TINY/")
    pack(source, tmp_path / "lzma" / "TINY.zip", "a/b/TINY/", zipfile.ZIP_LZMA)
    pack(source, tmp_path / "inner" / "TINY" / "TINY.zip")
    for root in ("plain", "raw", "direct", "zip", "lzma", "inner"):
        assert equal(datasets.load("TINY", tmp_path / root), expected), root
        assert datasets.names(tmp_path / root)[-1] == "TINY", root


def test_a_graph_without_nodes(tmp_path: Path) -> None:
    graphs = datasets.load_folder(
        write(tmp_path / "TINY", graph_indicator="1\n1\n1\n1\n3\n3\n", graph_labels="7\n7\n-1\n")
    ).graphs
    assert graphs.ptr.tolist() == [0, 4, 4, 6]


def test_numbers_of_graphs_that_leave_gaps(tmp_path: Path) -> None:
    """They are refused before they take memory, unless a label each says that there are so many graphs."""
    indicator = "1\n1\n1\n1\n50000000\n50000000\n"
    with pytest.raises(datasets.DatasetError, match="has 6 nodes, but numbers graphs up to 50,000,000; number them"):
        datasets.load_folder(write(tmp_path / "TINY", graph_indicator=indicator, graph_labels=None))


def test_a_zip_with_a_file_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "TINY.zip", "w") as archive:
        for folder in ("one", "two"):
            for file in write(tmp_path / "TINY").iterdir():
                archive.write(file, f"{folder}/{file.name}")
    shutil.rmtree(tmp_path / "TINY")
    said = "TINY.zip holds one/TINY_A.txt and two/TINY_A.txt; keep one of them"
    with pytest.raises(datasets.DatasetError, match=said):
        datasets.load("TINY", tmp_path)
    with pytest.raises(datasets.DatasetError, match=said):
        datasets.load_folder(tmp_path / "TINY.zip")


def test_a_pipe_among_the_files(tmp_path: Path) -> None:
    (write(tmp_path / "TINY") / "TINY_A.txt").unlink()
    os.mkfifo(tmp_path / "TINY" / "TINY_A.txt")
    with pytest.raises(datasets.DatasetError, match=r"TINY_A\.txt is no regular file"):
        datasets.load_folder(tmp_path / "TINY")


def test_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "TINY")
    monkeypatch.setenv("SPIN_FAST_DATA", str(tmp_path))
    assert len(datasets.load("TINY")) == 2
    monkeypatch.delenv("SPIN_FAST_DATA")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TINY").rename(tmp_path / "data")
    assert len(datasets.load("TINY")) == 2


# ---- what goes wrong with TU files ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"A": "1, 2\n2, 7\n"}, ["TINY_A.txt", "line 2 ", "node 7", "1..6"]),
        ({"A": "1, 2\n2, 0\n"}, ["TINY_A.txt", "line 2 ", "node 0"]),
        ({"A": "1, 2\n4, 5\n"}, ["TINY_A.txt", "line 2 ", "node 4 of graph 1", "node 5 of graph 2"]),
        ({"A": "1, 2\n4, x\n"}, ["TINY_A.txt, line 2 must hold 2 int32", "'4, x'"]),
        ({"A": "1, 2\n\n4\n"}, ["TINY_A.txt, line 3 ", "'4'"]),
        ({"A": "1\n2\n"}, ["TINY_A.txt", "2 comma-separated"]),
        ({"A": "1, 2\n2, 3, 4\n"}, ["TINY_A.txt, line 2 ", "'2, 3, 4'"]),
        ({"A": "1, 3000000000\n"}, ["TINY_A.txt, line 1 ", "'1, 3000000000'"]),
        ({"A": ""}, ["TINY_A.txt is empty"]),
        ({"A": None}, ["holds no TINY_A.txt", "TINY_graph_indicator.txt"]),
        ({"graph_indicator": None}, ["holds no TINY_graph_indicator.txt"]),
        ({"graph_labels": None}, ["holds no TINY_graph_labels.txt"]),
        ({"graph_indicator": "1\n1\n1\n1\n2\n"}, ["TINY_node_labels.txt", "5", "got 6"]),
        ({"graph_indicator": "1\n1\n1\n1\n2\n2\n2\n"}, ["TINY_node_labels.txt", "7", "got 6"]),
        ({"graph_indicator": "1\n1\n1\n2\n1\n2\n"}, ["TINY_graph_indicator.txt", "line 5 ", "graph 1"]),
        ({"graph_indicator": "0\n0\n0\n0\n1\n1\n"}, ["TINY_graph_indicator.txt", "line 1 ", "graph 0"]),
        ({"graph_labels": f"1\n{2**53 + 1}\n"}, ["TINY_graph_labels.txt, line 2 must hold a class below 2**53"]),
        ({"graph_labels": f"-{2**70}\n1\n"}, ["TINY_graph_labels.txt, line 1 must hold a class below 2**53"]),
        ({"graph_labels": "1\n2\n3\n"}, ["TINY_graph_labels.txt has 3 lines", "graph 2"]),
        ({"graph_labels": "0.5\n2\n"}, ["TINY_graph_labels.txt", "real numbers"]),
        ({"graph_labels": "0, 1\n2, 1\n"}, ["TINY_graph_labels.txt", "2 columns"]),
        ({"graph_labels": "cat\ndog\n"}, ["TINY_graph_labels.txt, line 1 ", "'cat'"]),
        ({"node_labels": "1\n2\n"}, ["TINY_node_labels.txt", "6", "got 2"]),
        ({"node_labels": "0\n1000000000\n" + "0\n" * 4}, ["TINY_node_labels.txt", "0..1000000000", "degree"]),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, changes: dict[str, str | None], words: list[str]) -> None:
    folder = write(tmp_path / "TINY", **changes)
    unpacked = error_of(lambda: datasets.load("TINY", tmp_path))
    archive = pack(folder, tmp_path / "TINY.zip", "TINY/")
    packed = error_of(lambda: datasets.load("TINY", tmp_path))
    assert error_of(lambda: [*datasets.find("TINY", tmp_path).open().chunks(1)]) == packed
    for word in words:
        assert word in unpacked
        assert word in packed
    assert str(folder) in unpacked
    assert str(archive) in packed


def test_an_attribute_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "TINY", node_attributes="0.5, 1\n1.5\n" + "1, 1\n" * 4)
    message = error_of(lambda: datasets.load("TINY", tmp_path, features="attribute"))
    assert "TINY_node_attributes.txt, line 2 must hold 2 float32" in message


@pytest.mark.parametrize(
    ("changes", "features", "words"),
    [
        ({"node_attributes": None}, "attribute", ["impossible", "choose one of: label, degree"]),
        ({"node_labels": None}, "attribute+label", ["impossible", "choose one of: attribute, degree"]),
        ({}, "colour", ["'colour'", "label, attribute, attribute+label, degree"]),
    ],
)
def test_impossible_features(tmp_path: Path, changes: dict[str, str | None], features: str, words: list[str]) -> None:
    write(tmp_path / "TINY", **changes)
    message = error_of(lambda: datasets.load("TINY", tmp_path, features=features))
    assert all(word in message for word in [*words, str(tmp_path / "TINY")])


@pytest.mark.parametrize("damage", ["noise", "cut", "flipped", "empty"])
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_damaged_zip(tmp_path: Path, damage: str, method: int) -> None:
    archive = pack(write(tmp_path / "source", A=TINY["A"] * 2000), tmp_path / "TINY.zip", "TINY/", method)
    whole = archive.read_bytes()
    start = whole.index(b"TINY_A.txt") + 40
    damaged = {
        "noise": np.random.default_rng(0).bytes(4096),
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:start] + bytes(255 - byte for byte in whole[start : start + 20]) + whole[start + 20 :],
        "empty": b"",
    }
    archive.write_bytes(damaged[damage])
    message = error_of(lambda: datasets.load("TINY", tmp_path))
    assert str(archive) in message
    assert "get the file again" in message or "get it again" in message
    assert "TINY" not in datasets.names(tmp_path) or damage == "flipped"


def test_zip_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "readme.txt").write_text("hello")
    archive = pack(tmp_path / "source", tmp_path / "OTHER.zip")
    message = error_of(lambda: datasets.load("OTHER", tmp_path))
    assert f"{archive} holds no OTHER_A.txt" in message
    assert "readme.txt" in message
    assert "OTHER" not in datasets.names(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "EMPTY").mkdir()
    message = error_of(lambda: datasets.load("EMPTY", tmp_path))
    assert f"{tmp_path / 'EMPTY'} holds no EMPTY_A.txt" in message
    assert "nothing" in message


def test_unknown_name(tmp_path: Path) -> None:
    write(tmp_path / "TINY")
    message = error_of(lambda: datasets.load("tinny", tmp_path))
    for word in ("'tinny'", "did you mean TINY?", "digits, erdos-renyi", f"Found in {tmp_path}: TINY", "tinny.zip"):
        assert word in message
    assert "did you mean digits?" in error_of(lambda: datasets.load("digit", tmp_path))
    absent = error_of(lambda: datasets.load("TINY", tmp_path / "absent"))
    assert f"{tmp_path / 'absent'} (which is no folder): nothing" in absent
    assert "SPIN_FAST_DATA" in absent


@pytest.mark.parametrize("name", ["digits", "erdos-renyi"])
def test_features_of_a_built_in_set_are_fixed(name: str) -> None:
    assert name in error_of(lambda: datasets.load(name, features="degree"))


# ---- .nel ----

NEL = "n 1 n_3\nn 2 n_5\nn 3 n_3\ne 1 2 0.5\ne 3 2 2\ne 3 3 4\ng Graph a\nx 1\n\nn 1 n_4\ng Graph b\nx -1\n"


def test_handmade_nel(tmp_path: Path) -> None:
    (tmp_path / "LIST.nel").write_text(NEL)
    pack(write(tmp_path / "LIST", "LIST"), tmp_path / "LIST.zip")
    graphs = datasets.load("LIST", tmp_path)  # not the zip
    assert graphs.ptr.tolist() == [0, 3, 4]
    assert edges(graphs) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)]
    assert graphs.y.tolist() == [1, 0]
    assert graphs.x.tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert graphs.edge_weight is None
    assert datasets.load("LIST", tmp_path, features="degree").x.tolist() == [[1], [2], [2], [0]]
    (tmp_path / "LIST.nel").write_text(NEL.replace("n_4", "carbon"))
    assert datasets.load("LIST", tmp_path).x.argmax(dim=1).tolist() == [1, 2, 1, 0]


def test_what_files_call_classes(tmp_path: Path) -> None:
    (tmp_path / "LIST.nel").write_text(NEL)
    write(tmp_path / "TINY", "TINY")
    for name, classes, features in (("LIST", ["-1", "1"], "label[3..5]"), ("TINY", ["-1", "7"], "label[2..5]")):
        found = datasets.find(name, tmp_path).read()
        assert (found.classes, found.features, found.names) == (classes, features, ["0", "1"])
        assert equal(found.graphs, datasets.load(name, tmp_path))
        assert not datasets.find(name, tmp_path).is_own
    assert datasets.find("TINY", tmp_path).read(features="attribute").num_attributes == 2
    assert datasets.find(tmp_path / "TINY").read().names == ["1", "2"]  # its own names, by its path
    assert datasets.find(tmp_path / "TINY").path == tmp_path / "TINY"
    digits = datasets.find("digits").read()
    assert (digits.classes, digits.features, digits.num_attributes) == (list("0123456789"), None, 3)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("e 3 2 2", "e 3 4 2", ["line 5 ", "node 4"]),
        ("e 3 2 2", "e 3 2 two", ["line 5 ", "two"]),
        ("e 3 2 2", "e 3 2", ["line 5 ", "'e 3 2'"]),
        ("g Graph a", "edge 1 2", ["line 7 ", "'edge 1 2'"]),
        ("x 1\n", "", ["line 9 ", "repeats node 1"]),
        ("x -1\n", "", ["line 11 ", "'x class'"]),
        ("x -1\n", "x 0.5\n", ["line 12 ", "0.5"]),
        (NEL, "", ["no nodes"]),
        (NEL, "x 1\n", ["no nodes"]),
    ],
)
def test_wrong_nel(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    (tmp_path / "LIST.nel").write_text(NEL.replace(old, new))
    message = error_of(lambda: datasets.load("LIST", tmp_path))
    assert all(word in message for word in [*words, "LIST.nel"])


def test_nel_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "LIST.nel").write_bytes(b"n 1 \xff\xfe\x00")
    assert "LIST.nel cannot be parsed" in error_of(lambda: datasets.load("LIST", tmp_path))
    (tmp_path / "LIST.nel").write_text(NEL)
    assert "impossible" in error_of(lambda: datasets.load("LIST", tmp_path, features="attribute"))


# ---- OGB ----

OGB = {
    "raw/num-node-list": "2\n1\n3\n",
    "raw/num-edge-list": "1\n0\n2\n",
    "raw/edge": "0,1\n0,1\n1,2\n",
    "raw/node-feat": "5,0\n6,1\n7,0\n5,0\n5,0\n6,2\n",
    "raw/graph-label": "1\n0\n1\n",
    "split/scaffold/train": "2\n",
    "split/scaffold/valid": "0\n",
    "split/scaffold/test": "1\n",
}


def write_ogb(folder: Path, changes: dict[str, str | None] | None = None) -> Path:
    for file, text in (OGB | (changes or {})).items():
        path = folder / f"{file}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.mark.parametrize("folder", ["ogbg_molmine", "ogbg-molmine"])
def test_handmade_ogb(tmp_path: Path, folder: str) -> None:
    write_ogb(tmp_path / folder)
    assert datasets.names(tmp_path)[-1] == "ogbg-molmine"
    graphs = datasets.load("ogbg-molmine", tmp_path, dtype=torch.float64)
    assert graphs.ptr.tolist() == [0, 2, 3, 6]
    assert edges(graphs) == [(0, 1), (1, 0), (3, 4), (4, 3), (4, 5), (5, 4)]
    assert graphs.x.tolist() == [[5, 0], [6, 1], [7, 0], [5, 0], [5, 0], [6, 2]]
    assert (graphs.x.dtype, graphs.y.dtype, graphs.y.tolist()) == (torch.float64, torch.int64, [1, 0, 1])
    assert [part.tolist() for part in datasets.find("ogbg-molmine", tmp_path).split(graphs.y)] == [[2], [0], [1]]
    assert equal(datasets.load("ogbg_molmine", tmp_path, dtype=torch.float64), graphs)


def test_ogb_labels_may_be_missing_or_many(tmp_path: Path) -> None:
    write_ogb(tmp_path / "ogbg_molmine", {"raw/graph-label": "1,0\n,1\n0,\n"})
    y = datasets.load("ogbg-molmine", tmp_path).y
    torch.testing.assert_close(y, torch.tensor([[1, 0], [torch.nan, 1], [0, torch.nan]]), equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"raw/edge": None}, ["edge.csv.gz", "does not exist"]),
        ({"raw/edge": "0,1\n0,1\n1,3\n"}, ["edge.csv.gz", "line 3 ", "node 3", "0..2"]),
        ({"raw/edge": "0,1\n0,1\n"}, ["edge.csv.gz", "3, got 2"]),
        ({"raw/node-feat": "5,0\n"}, ["node-feat.csv.gz", "6, got 1"]),
        ({"raw/graph-label": "0.5\n1\n2\n"}, ["graph-label.csv.gz", "regression set"]),
        ({"raw/graph-label": "1\n0\n"}, ["graph-label.csv.gz", "3, got 2"]),
        ({"raw/num-edge-list": "1\n2\n"}, ["num-edge-list.csv.gz", "3, got 2"]),
        ({"raw/node-feat": "5,0\n5,carbon\n"}, ["node-feat.csv.gz, line 2 ", "'5,carbon'"]),
    ],
)
def test_wrong_ogb_files_are_named(tmp_path: Path, changes: dict[str, str | None], words: list[str]) -> None:
    write_ogb(tmp_path / "ogbg_molmine", changes)
    message = error_of(lambda: datasets.load("ogbg-molmine", tmp_path))
    assert error_of(lambda: [*datasets.find("ogbg-molmine", tmp_path).open().chunks(1)]) == message
    assert all(word in message for word in [*words, str(tmp_path)])


def test_damaged_gzip(tmp_path: Path) -> None:
    edges = write_ogb(tmp_path / "ogbg_molmine") / "raw" / "edge.csv.gz"
    for damaged in (b"no gzip at all", gzip.compress(OGB["raw/edge"].encode())[:-9]):
        edges.write_bytes(damaged)
        assert "edge.csv.gz cannot be read" in error_of(lambda: datasets.load("ogbg-molmine", tmp_path))


def test_ogb_is_asked_wrongly(tmp_path: Path) -> None:
    y = torch.tensor([0, 1, 1])
    assert "ogbg_molhiv/" in error_of(lambda: datasets.load("ogbg-molhiv", tmp_path))
    assert "unknown data set" in error_of(lambda: datasets.find("ogbg-molhiv", tmp_path).split(y))
    write_ogb(tmp_path / "ogbg_molmine", {"split/scaffold/test": "2\n"})
    assert "scaffold" in error_of(lambda: datasets.find("ogbg-molmine", tmp_path).split(y))
    write_ogb(tmp_path / "ogbg_molmine", {"split/scaffold/test": None})
    (tmp_path / "ogbg_molmine/split/scaffold/test.csv.gz").unlink()
    assert "test.csv.gz does not exist" in error_of(lambda: datasets.find("ogbg-molmine", tmp_path).split(y))
    assert "fixed" in error_of(lambda: datasets.load("ogbg-molmine", tmp_path, features="degree"))
    pytest.importorskip("ogb")
    assert "TINY" in error_of(lambda: datasets.evaluator("TINY"))


def test_evaluator_without_ogb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.graphproppred", None)
    with pytest.raises(ImportError, match="pip install ogb"):
        ogb.evaluator("ogbg-molhiv")


# Tasks of the official classification sets, and the metric of their leaderboards.
OFFICIAL = {
    "ogbg-molhiv": (1, "rocauc"),
    "ogbg-molpcba": (128, "ap"),
    "ogbg-molbace": (1, "rocauc"),
    "ogbg-molbbbp": (1, "rocauc"),
    "ogbg-molclintox": (2, "rocauc"),
    "ogbg-molmuv": (17, "ap"),
    "ogbg-molsider": (27, "rocauc"),
    "ogbg-moltox21": (12, "rocauc"),
    "ogbg-moltoxcast": (617, "rocauc"),
    "ogbg-molchembl": (1310, "rocauc"),
}


@pytest.mark.parametrize(("name", "num_tasks", "metric"), [(name, *facts) for name, facts in OFFICIAL.items()])
def test_every_classification_set_of_ogb(tmp_path: Path, name: str, num_tasks: int, metric: str) -> None:
    """Labels of several tasks are missing as an empty field or as the word nan, or none is missing."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (3, num_tasks)).astype(float)
    if num_tasks > 2:
        labels[rng.random(labels.shape) < 0.3] = np.nan
    text = {missing: "\n".join(",".join(missing if np.isnan(v) else f"{v:.1f}" for v in row) for row in labels) + "\n"
            for missing in ("", "nan")}  # fmt: skip
    for missing in text:
        write_ogb(tmp_path / name.replace("-", "_"), {"raw/graph-label": text[missing]})
        y = datasets.load(name, tmp_path).y
        if num_tasks == 1:
            assert (y.dtype, y.tolist()) == (torch.int64, labels[:, 0].tolist())
        else:
            torch.testing.assert_close(y, torch.from_numpy(labels).float(), equal_nan=True)
    assert [part.tolist() for part in datasets.find(name, tmp_path).split(y)] == [[2], [0], [1]]
    assert datasets.find(name, tmp_path).read().num_attributes == 0
    assert datasets.find(name).metric == metric


def test_official_sets_are_those_of_ogb() -> None:
    """Against the table that OGB's own package reads."""
    package = pytest.importorskip("ogb")
    master = pandas.read_csv(Path(package.__file__).parent / "graphproppred" / "master.csv", index_col=0, dtype=str)
    for name, facts in master.items():
        binary = facts["task type"] == "binary classification" and facts["data type"] == "mol"
        assert (name in ogb.SETS) == binary
        assert (name in ogb.OTHERS) != binary
        if binary:
            assert ogb.SETS[name] == (facts["download_name"], facts["eval metric"])
            assert OFFICIAL[name] == (int(facts["num tasks"]), facts["eval metric"])
            assert facts["url"].removeprefix("http:") == f"{downloads.OGB_URL}/{ogb.SETS[name][0]}.zip"[len("https:") :]


def test_metric() -> None:
    assert datasets.find("ogbg_molhiv").metric == "rocauc"
    assert datasets.find("ogbg-molmine").metric == "rocauc"
    assert datasets.find("DD").metric == datasets.find("digits").metric == "accuracy"
    assert "ogbg-molesol is a regression set" in error_of(lambda: datasets.find("ogbg_molesol").metric)


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbl-collab", "ogbg-ppa", "ogbg_code2"])
def test_sets_that_are_not_read_are_not_offered(name: str, tmp_path: Path) -> None:
    for download in (False, True):
        message = error_of(lambda download=download: datasets.load(name, tmp_path, download=download))
        assert "which is not read; choose one of ogbg-molhiv" in message


# ---- generators ----

GENERATORS: dict[str, Callable[..., GraphBatch]] = {
    "erdos-renyi": lambda seed=0, **more: datasets.erdos_renyi(20, 30, 0.2, 4, seed=seed, **more),
    "random-regular": lambda seed=0, **more: datasets.random_regular(20, 30, 4, 4, seed=seed, **more),
    "power-law": lambda seed=0, **more: datasets.power_law(20, 30, 4, 2.5, 4, seed=seed, **more),
}


def assert_simple(graphs: GraphBatch) -> None:
    """No self-loop, no repeated edge, both directions of each edge."""
    listed = edges(graphs)
    assert self_loops(graphs) == 0
    assert len(set(listed)) == len(listed)
    assert {(j, i) for i, j in listed} == set(listed)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_gives_the_same_bits(name: str) -> None:
    generate = GENERATORS[name]
    graphs = generate(seed=3, dtype=torch.float64)
    assert_simple(graphs)
    assert graphs.x.shape == (600, 4)
    assert equal(graphs, generate(seed=3, dtype=torch.float64))
    other = generate(seed=4)
    assert edges(other) != edges(graphs)
    assert not torch.equal(other.x, graphs.x.float())


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_sets_have_two_classes_in_turn(name: str) -> None:
    graphs = datasets.load(name)
    assert len(graphs) == 1000
    assert graphs.y.tolist() == [0, 1] * 500
    edges_of = graphs.indptr[graphs.ptr].diff().float()
    if name != "power-law":  # there the classes have equally many edges, spread differently
        assert edges_of[0::2].mean() < edges_of[1::2].mean()


def test_erdos_renyi_respects_p() -> None:
    for chance in (0.05, 0.5, 0.9):
        graphs = datasets.erdos_renyi(200, 60, chance, seed=1)
        pairs = 200 * 60 * 59 / 2
        assert abs(graphs.num_edges / 2 - pairs * chance) < 5 * (pairs * chance * (1 - chance)) ** 0.5
    whole = datasets.erdos_renyi(3, 40, 1.0)
    assert torch.equal(whole.degree, torch.full((120,), 39, dtype=whole.degree.dtype))
    assert_simple(whole)
    assert datasets.erdos_renyi(3, 40, 0.0).num_edges == datasets.erdos_renyi(3, 1, 0.5).num_edges == 0
    assert datasets.erdos_renyi(5, 7, 1e-300).num_edges == 0
    assert datasets.erdos_renyi().x.shape == (100_000, 50)


def test_erdos_renyi_pairs_are_equally_likely() -> None:
    graphs = datasets.erdos_renyi(4000, 6, 0.5, seed=2)
    counts = torch.zeros(6, 6)
    for i, j in edges(graphs):
        counts[i % 6, j % 6] += 1
    off_diagonal = counts[~torch.eye(6, dtype=torch.bool)]
    assert (off_diagonal - 2000).abs().max() < 5 * (4000 * 0.25) ** 0.5


@pytest.mark.parametrize(
    ("num_nodes", "degree"), [(10, 3), (11, 4), (10, 0), (10, 9), (10, 5), (2, 1), (1, 0), (50, 30)]
)
def test_regular_degrees_are_exact(num_nodes: int, degree: int) -> None:
    graphs = datasets.random_regular(12, num_nodes, degree)
    assert graphs.degree.tolist() == [degree] * (12 * num_nodes)
    assert graphs.x.squeeze(1).tolist() == [degree] * (12 * num_nodes)
    assert_simple(graphs)


def test_regular_graphs_are_mixed() -> None:
    graphs = datasets.random_regular(3000, 8, 3, seed=5)
    counts = torch.zeros(8, 8)
    for i, j in edges(graphs):
        counts[i % 8, j % 8] += 1
    assert (counts[~torch.eye(8, dtype=torch.bool)] / 3000 - 3 / 7).abs().max() < 0.05  # 5.5 standard errors


def test_power_law_has_the_heavier_tail() -> None:
    graphs = datasets.power_law(2, 50_000, 10, (2.2, 4.0))
    heavy, light = (graph.degree.float() for graph in graphs)
    assert heavy.max() > 5 * light.max()
    assert graphs.num_edges == 2 * 50_000 * 10
    assert light.mean() == pytest.approx(10)
    erdos = datasets.erdos_renyi(1, 50_000, 10 / 50_000, None)
    assert light.max() > 3 * erdos.degree.max()


@pytest.mark.slow
def test_power_law_exponent() -> None:
    degree = datasets.power_law(1, 200_000, 20, 3.0, seed=1).degree.double()
    tail = degree[degree >= 40]
    assert 1 + 1 / (tail / 39.5).log().mean() == pytest.approx(3.0, abs=0.15)  # Hill's estimate


def spectra(graphs: GraphBatch) -> list[tuple[float, ...]]:
    """Eigenvalues of the adjacency of graphs of one size, which no renumbering changes."""
    adjacency = torch.zeros(len(graphs), graphs.num_nodes // len(graphs), graphs.num_nodes // len(graphs)).double()
    graph = torch.arange(len(graphs)).repeat_interleave(graphs.num_nodes_per_graph)
    source, target = graphs.edge_index.long()
    adjacency[graph[target], target - graphs.ptr[graph[target]], source - graphs.ptr[graph[source]]] = 1
    assert torch.equal(adjacency, adjacency.mT)
    return [tuple(values) for values in torch.linalg.eigvalsh(adjacency).round(decimals=6).tolist()]


def test_csl() -> None:
    graphs = datasets.csl()
    assert_simple(graphs)
    assert graphs.y.bincount().tolist() == [15] * 10
    assert graphs.num_nodes_per_graph.tolist() == [41] * 150
    assert graphs.x.tolist() == [[4]] * (150 * 41)
    found = spectra(graphs)
    assert len(set(found)) == 10  # no two classes are isomorphic
    assert len(set(zip(found, graphs.y.tolist(), strict=True))) == 10  # and each is one graph
    one, other = graphs[0], graphs[1]
    assert sorted(edges(one)) != sorted(edges(other))  # numbered anew
    assert equal(graphs, datasets.csl())
    assert not torch.equal(graphs.indices, datasets.csl(seed=1).indices)
    assert datasets.csl(7, [2, 3], 4, dtype=torch.float64).x.shape == (56, 1)


def test_csl_without_its_file(tmp_path: Path) -> None:
    assert equal(datasets.load("CSL", tmp_path), datasets.csl())
    assert equal(datasets.load("CSL", tmp_path, features="degree"), datasets.csl())
    assert "no labels or attributes" in error_of(lambda: datasets.load("CSL", tmp_path, features="label"))
    write(tmp_path, "CSL")
    assert len(datasets.load("CSL", tmp_path)) == 2


def test_csl_is_the_published_set() -> None:
    if not (DATA / "CSL.zip").exists():
        pytest.skip(f"no CSL.zip in {DATA}")
    published, drawn = public("CSL"), datasets.csl()
    assert torch.equal(published.y, drawn.y)
    assert torch.equal(published.x, drawn.x)
    assert spectra(published) == spectra(drawn)


def test_no_spin_tells_csl_apart() -> None:
    features = PowerFeatures.from_graphs(datasets.csl(), num_hops=4)
    assert len(set(features.identical_graphs().tolist())) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: datasets.erdos_renyi(p=1.5), "p must be in"),
        (lambda: datasets.erdos_renyi(2, p=(0.1, 0.2, 0.3)), "p must be one number or one per class"),
        (lambda: datasets.erdos_renyi(0), "num_graphs must be at least 1"),
        (lambda: datasets.erdos_renyi(seed=-1), "seed must be at least 0"),
        (lambda: datasets.erdos_renyi(2, num_features=-1), "num_features must be at least 0"),
        (lambda: datasets.random_regular(2, 5, 3), "degree must be even"),
        (lambda: datasets.random_regular(2, 5, 5), r"degree must be an integer in \[0, 5\)"),
        (lambda: datasets.power_law(1, 10, 3, 2.0), "exponent must be above 2"),
        (lambda: datasets.power_law(1, 10, 10, 3.0), "mean_degree must be in"),
        (lambda: datasets.power_law(1, 100, 99, 2.1), "mean_degree 99 is too large"),
        (lambda: datasets.csl(4), "num_nodes must be at least 5"),
        (lambda: datasets.csl(10, [2, 5]), "skips must be below 5.0 for 10 nodes, got 5"),
        (lambda: datasets.csl(10, [1]), "skips must be at least 2"),
        (lambda: datasets.csl(10, []), "skips must hold at least one"),
        (lambda: datasets.csl(skips=3), "skips must be a sequence of ints, got int"),
        (lambda: datasets.erdos_renyi(p="half"), "p must be one number or one per class, .*, got 'half'"),
        (lambda: datasets.power_law(1, 10, "a"), "mean_degree must be a number, got str"),
    ],
)
def test_generators_refuse(call: Callable[[], GraphBatch], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


# ---- splits and the rest ----


def test_split_is_stratified_disjoint_covering_and_seeded() -> None:
    y = torch.tensor([0] * 500 + [1] * 300 + [2] * 200)
    parts = datasets.find("any").split(y)
    assert [len(part) for part in parts] == [800, 100, 100]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
    for part, share in zip(parts, (0.8, 0.1, 0.1), strict=True):
        assert part.dtype == torch.int64
        assert y[part].bincount().tolist() == [round(500 * share), round(300 * share), round(200 * share)]
    again, other = datasets.find("any").split(y, seed=0), datasets.find("any").split(y, seed=1)
    assert all(map(torch.equal, parts, again))
    assert not torch.equal(parts.test, other.test)


@pytest.mark.parametrize("sizes", [[10, 10], [10, 11, 12], [10] * 10, [13, 5000], [10]])
def test_split_has_every_class_everywhere(sizes: list[int]) -> None:
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    for seed in range(5):
        parts = datasets.find("any").split(y, seed=seed)
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(y)))
        assert all(len(y[part].unique()) == len(sizes) for part in parts)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (torch.tensor([0] * 50 + [1] * 9), "class 1 has 9"),
        (torch.empty(0, dtype=torch.int64), "there are none"),
        (torch.zeros(50, 2, dtype=torch.int64), r"torch.int64 \[50, 2\]"),
        (torch.full((50,), torch.nan), "not one class per graph"),
    ],
)
def test_split_refuses(y: Tensor, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        datasets.find("any").split(y)


def test_dtype_must_be_float32_or_float64(tmp_path: Path) -> None:
    write(tmp_path / "TINY")
    for name in ("digits", "TINY"):
        with pytest.raises(TypeError, match="float32 or float64"):
            datasets.load(name, tmp_path, dtype=torch.int64)


def test_import_is_light() -> None:
    heavy = ("pandas", "scipy", "sklearn", "ogb", "torch_geometric", "networkx", "matplotlib", "pooch", "requests")
    code = f"import sys, spin_fast.datasets; print([name for name in {heavy} if name in sys.modules])"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "[]"


def test_attributes_come_first_and_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "TINY")
    (tmp_path / "LIST.nel").write_text(NEL)

    def count(name: str, root: Path | None = None, **features: str) -> int:
        return datasets.find(name, root).read(**features).num_attributes

    assert count("TINY", tmp_path) == 0
    assert count("TINY", tmp_path, features="attribute+label") == count("TINY", tmp_path, features="attribute") == 2
    assert count("TINY", tmp_path, features="degree") == count("LIST", tmp_path) == count("CSL", tmp_path) == 0
    assert "unknown data set" in error_of(lambda: count("NONE", tmp_path))
    for name, graphs in (
        ("digits", datasets.load()),
        ("erdos-renyi", datasets.erdos_renyi(2)),
        ("random-regular", datasets.random_regular(2)),
        ("power-law", datasets.power_law(2, 100)),
    ):
        counts = torch.equal(graphs.x, graphs.degree.unsqueeze(1).to(graphs.x.dtype))
        assert count(name) == (0 if counts else graphs.num_features)


def test_names_are_loadable_files(tmp_path: Path) -> None:
    write(tmp_path / "TINY")
    write_ogb(tmp_path / "ogbg_molmine")
    (tmp_path / "LIST.nel").write_text(NEL)
    (tmp_path / "notes").mkdir()
    shutil.copy(pack(tmp_path / "TINY", tmp_path / "TINY.zip"), tmp_path / "OTHER.zip")  # holds TINY_A.txt only
    found = datasets.names(tmp_path)
    built_in = ["digits", "erdos-renyi", "random-regular", "power-law", "CSL"]
    assert found == [*built_in, "LIST", "TINY", "ogbg-molmine"]
    assert all(len(datasets.load(name, tmp_path)) > 0 for name in found)
    assert datasets.names(tmp_path / "absent") == built_in


def test_weights_and_labels_by_name_are_none_of_tu_text(tmp_path: Path) -> None:
    folder = write(tmp_path / "TINY")
    for name, told in ("edge_weight", "whose edges have no named weights"), ("label", "whose labels have no names"):
        assert f"{name}='mass' is impossible for {folder}, {told}" in error_of(
            lambda name=name: datasets.load_folder(folder, **{name: "mass"})
        )
