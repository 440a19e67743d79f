from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import equal

from spin_fast import datasets
from spin_fast.datasets import DatasetError

FILES = {
    "labels.csv": "1\n0\n1\n2\n",
    "edges.csv": "0,2\n1,2\n2,3\n",
    "features.txt": "0 5 1432\n\n7\n5 6\n",
    "split_train.csv": "3\n0\n",
    "split_valid.csv": "1\n",
    "split_test.csv": "2\n",
}


def write(folder: Path, **changes: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(changes.get(name.partition(".")[0], text))
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_handmade(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "Cora")
    if zipped:
        with zipfile.ZipFile(tmp_path / "Cora.zip", "w") as archive:
            for name in FILES:
                archive.write(folder / name, f"anywhere/{name}")
        shutil.rmtree(folder)
    graphs, y, split = cora = datasets.cora(tmp_path, dtype=torch.float64)
    assert cora.y is y
    assert graphs.edge_index.tolist() == [[2, 2, 0, 1, 3, 2], [0, 1, 2, 2, 2, 3]]
    assert [row.nonzero().flatten().tolist() for row in graphs.x] == [[0, 5, 1432], [], [7], [5, 6]]
    assert (graphs.x.dtype, graphs.x.shape, len(graphs)) == (torch.float64, (4, 1433), 1)
    assert y.tolist() == [1, 0, 1, 2]
    assert [part.tolist() for part in split] == [[3, 0], [1], [2]]
    assert (split.validation.dtype, y.dtype) == (torch.int64, torch.int64)
    monkeypatch.setenv("SPIN_FAST_DATA", str(tmp_path))
    assert datasets.cora(normalize=True).graphs.x.sum(1).tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": "0,4\n"}, r"Cora:edges\.csv must name nodes 0\.\.3"),
        ({"split_test": "-1\n"}, r"Cora:split_test\.csv must name nodes 0\.\.3"),
        ({"features": "0\n1\n"}, r"Cora:features\.txt must have 4 lines, as labels\.csv, got 2"),
        (
            {"features": "0\n1433\n2\n3\n"},
            r"Cora:features\.txt, line 2, cannot be parsed \(words must be in 0",
        ),
        ({"features": "0\nx\n2\n3\n"}, r"Cora:features\.txt, line 2, cannot be parsed"),
        ({"labels": "1\n0.5\n1\n2\n"}, r"Cora:labels\.csv, line 2 must hold 1 int32"),
        ({"labels": "1\n-1\n1\n2\n"}, r"Cora:labels\.csv must hold classes from 0"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    write(tmp_path / "Cora", **changes)
    with pytest.raises(DatasetError, match=message):
        datasets.cora(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"Cora needs Cora\.zip or Cora/ in .*; put it there"):
        datasets.cora(tmp_path)
    (write(tmp_path / "Cora") / "edges.csv").unlink()
    with pytest.raises(DatasetError, match=r"edges\.csv does not exist; the set is incomplete"):
        datasets.cora(tmp_path)
    with zipfile.ZipFile(tmp_path / "Cora.zip", "w") as archive:
        archive.writestr("Cora/README.txt", "")
    with pytest.raises(DatasetError, match=r"Cora\.zip holds no labels\.csv"):
        datasets.cora(tmp_path)


def test_public_set_has_the_published_figures(data_root: Path) -> None:
    if not (data_root / "Cora.zip").is_file():
        pytest.skip(f"no Cora.zip in {data_root}")
    graphs, y, split = datasets.cora(data_root)
    assert (graphs.num_nodes, graphs.num_edges, graphs.num_features) == (2708, 2 * 5278, 1433)
    assert y.bincount().tolist() == [351, 217, 418, 818, 426, 298, 180]
    assert y[split.train].bincount().tolist() == [20] * 7
    assert [len(part) for part in split] == [140, 500, 1000]
    assert len(torch.cat(split).unique()) == 1640
    assert int(graphs.x.sum()) == 49216
    both = graphs.edge_index
    assert set(map(tuple, both.t().tolist())) == set(map(tuple, both.flip(0).t().tolist()))


def test_comes_from_pyg_too(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    write(tmp_path / "Cora")
    graphs, y, _ = datasets.cora(tmp_path)
    (data,) = graphs.to_pyg()
    data.y = y
    from spin_fast import GraphBatch

    assert equal(GraphBatch.from_pyg(data, y=None), graphs)


def test_is_no_set_of_graphs() -> None:
    with pytest.raises(datasets.DatasetError, match=r"Cora is one graph whose nodes have labels.*datasets\.cora\(\)"):
        datasets.load("Cora")
