"""Published folds, drawn folds, and what is wrong with a file of folds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import error_of, random_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from spin_fast import datasets
from spin_fast.datasets import Split, stratified_folds

# Three folds of six graphs.
FOLDS: list[Any] = [
    {"test": [0, 3], "model_selection": [{"train": [5, 1, 4], "validation": [2]}]},
    {"test": [1, 4], "model_selection": [{"train": [0, 2, 3], "validation": [5]}]},
    {"test": [5, 2], "model_selection": [{"train": [0, 1, 3], "validation": [4]}]},
]


def write(path: Path, folds: object = FOLDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(folds))
    return path


def assert_splits(folds: list[Split], num_graphs: int) -> None:
    every = torch.arange(num_graphs)
    for fold in folds:
        assert torch.equal(torch.cat(fold).sort().values, every)
        assert all(part.dtype == torch.int64 and len(part) for part in fold)
    assert torch.equal(torch.cat([fold.test for fold in folds]).sort().values, every)


def test_published_splits_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "splits" / "TINY_splits.json")
    for root, splits in ((tmp_path, None), (None, path), (None, str(path.parent))):
        folds = datasets.find("TINY", root).published_splits(6, splits=splits)
        assert_splits(folds, 6)
        assert [part.tolist() for part in folds[0]] == [[5, 1, 4], [2], [0, 3]]
    assert datasets.find("other").published_splits(6, splits=path)[2].test.tolist() == [5, 2]
    path.rename(path.with_name("PROTEINS_full_splits.json"))
    assert len(datasets.find("PROTEINS", tmp_path).published_splits(6)) == 3


def test_split_takes_a_fold(tmp_path: Path) -> None:
    path, y = write(tmp_path / "splits" / "TINY_splits.json"), torch.zeros(6, 2)
    assert datasets.find("TINY", tmp_path).split(y, fold=1).test.tolist() == [1, 4]
    assert datasets.find("TINY", tmp_path / "absent").split(y, splits=path).test.tolist() == [0, 3]
    assert datasets.find("ogbg-molhiv").split(y, splits=path, fold=2).test.tolist() == [5, 2]
    with pytest.raises(ValueError, match="fold must be below 3, the number of folds of TINY, got 3"):
        datasets.find("TINY", tmp_path).split(y, fold=3)
    with pytest.raises(ValueError, match="fold must be at least 0"):
        datasets.find("TINY", tmp_path).split(y, fold=-1)
    message = error_of(lambda: datasets.find("OTHER", tmp_path).split(y, fold=0))
    assert str(tmp_path / "splits" / "OTHER_splits.json") in message


def test_own_folders_have_their_own_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the set of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPIN_FAST_DATA", raising=False)
    write(tmp_path / "data" / "splits" / "TINY_splits.json")
    (tmp_path / "sub" / "TINY").mkdir(parents=True)
    assert len(datasets.find("TINY").published_splits(6)) == 3
    for name in ("sub/TINY", tmp_path / "sub" / "TINY"):
        with pytest.raises(datasets.NoPublishedSplits, match=r"of TINY at \S*sub/splits/TINY_splits.json"):
            datasets.find(name).published_splits(6)
    beside = write(tmp_path / "sub" / "splits" / "TINY_splits.json", FOLDS[::-1])
    assert datasets.find("sub/TINY").split(torch.zeros(6, 1), fold=0).test.tolist() == [5, 2]
    assert datasets.find("sub/TINY").split(torch.zeros(6, 1), splits=beside.parent).test.tolist() == [5, 2]
    folder = tmp_path / "data" / "splits"
    assert datasets.find("sub/TINY").split(torch.zeros(6, 1), splits=folder).test.tolist() == [0, 3]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_split_of_ones_own(wrapped: bool, tmp_path: Path) -> None:
    """It may leave graphs out, but names none twice."""
    own = {"train": [4, 0], "validation": [5], "test": [2]}
    published = {"test": [2], "model_selection": [{"train": [4, 0], "validation": [5]}]}
    for split in (own, published):
        path = write(tmp_path / "own.json", [split] if wrapped else split)
        assert [part.tolist() for part in datasets.find("x/").split(torch.zeros(6, 2), splits=path)] == [
            [4, 0],
            [5],
            [2],
        ]
    with pytest.raises(ValueError, match="fold must be below 1"):
        datasets.find("x/").split(torch.zeros(6, 2), splits=path, fold=1)
    for change, words in (
        ({"test": [0]}, "own.json names graph 0 in train and in test"),
        ({"test": []}, "own.json has an empty part 'test'"),
        ({"test": [6]}, "own.json, test names graph 6, but there are the graphs 0..5"),
        ({"test": ["b"]}, "own.json, test must be a list of graph numbers"),
    ):
        path = write(tmp_path / "own.json", [own | change] if wrapped else own | change)
        assert words in error_of(lambda path=path: datasets.find("x/").split(torch.zeros(6, 2), splits=path))
    path = write(tmp_path / "own.json", {"train": [1], "test": [2]})
    assert "must have 'validation'" in error_of(lambda: datasets.find("x/").split(torch.zeros(6, 2), splits=path))


def test_what_cannot_be_drawn_names_the_file_to_write() -> None:
    message = error_of(lambda: datasets.find("x/").split(torch.zeros(9, dtype=torch.int64)))
    assert 'by splits, {"train": [...], "validation": [...], "test": [...]}' in message


def changed(fold: int, key: str, value: object) -> list[Any]:
    folds = json.loads(json.dumps(FOLDS))
    (folds[fold] if key in folds[fold] else folds[fold]["model_selection"][0])[key] = value
    return folds


@pytest.mark.parametrize(
    ("folds", "words"),
    [
        ({}, ["a list of folds", "got {}"]),
        ([], ["a list of folds"]),
        ([1], ["fold 0", "'model_selection'", "got 1"]),
        (changed(1, "model_selection", []), ["fold 1", "one pair"]),
        ([{"model_selection": FOLDS[0]["model_selection"]}], ["'test'"]),
        ([FOLDS[0], {"train": [0, 1, 3], "test": [2]}], ["fold 1 must have 'validation'"]),
        (changed(1, "test", [1, 9]), ["fold 1, test names graph 9", "0..5", "another set"]),
        (changed(1, "test", [1, -1]), ["fold 1, test names graph -1"]),
        (changed(1, "test", [1, 0]), ["fold 1 names graph 0 in train and in test"]),
        (changed(1, "train", [0, 2, 2]), ["fold 1 names graph 2 in train and in train"]),
        (changed(1, "train", [0, 2]), ["fold 1 leaves out 1 of 6 graphs, the first of them 3"]),
        (changed(1, "train", [0, 2.5, 3]), ["fold 1, train must be a list of graph numbers, got 2.5"]),
        (changed(1, "train", [0, 2**63]), ["fold 1, train must be a list of graph numbers, got 9223372036854775808"]),
        (changed(1, "validation", True), ["fold 1, validation must be a list of graph numbers, got true"]),
        (changed(1, "validation", []), ["fold 1 has an empty part 'validation'"]),
        ([FOLDS[0], FOLDS[0], FOLDS[2]], ["each of the 6 graphs in one fold", "6 entries, 4 of them"]),
        ([*FOLDS, FOLDS[0]], ["each of the 6 graphs in one fold", "8 entries, 6 of them"]),
        (FOLDS[:2], ["each of the 6 graphs in one fold", "4 entries"]),
    ],
)
def test_wrong_folds_are_named(tmp_path: Path, folds: object, words: list[str]) -> None:
    path = write(tmp_path / "any.json", folds)
    message = error_of(lambda: datasets.find("TINY").published_splits(6, splits=path))
    assert all(word in message for word in [*words, str(path)])


def test_files_that_are_no_folds(tmp_path: Path) -> None:
    assert "or a folder of such files; " + str(tmp_path / "absent.json does not exist") in error_of(
        lambda: datasets.find("TINY").published_splits(6, splits=tmp_path / "absent.json")
    )
    (tmp_path / "cut.json").write_text('[{"test": [1, 2')
    assert "cut.json cannot be parsed" in error_of(
        lambda: datasets.find("TINY").published_splits(6, splits=tmp_path / "cut.json")
    )
    (tmp_path / "noise.json").write_bytes(b"\xff\xfe\x00")
    assert "noise.json cannot be parsed" in error_of(
        lambda: datasets.find("TINY").published_splits(6, splits=tmp_path / "noise.json")
    )


@pytest.mark.parametrize(("name", "num_graphs"), [("ENZYMES", 600), ("PROTEINS", 1113), ("IMDB-BINARY", 1000)])
def test_public_folds_are_stratified(data_root: Path, name: str, num_graphs: int) -> None:
    if not (data_root / "splits").is_dir():
        pytest.skip(f"no splits/ in {data_root}")
    folds = datasets.find(name, data_root).published_splits(num_graphs)
    assert len(folds) == 10
    assert_splits(folds, num_graphs)
    y = datasets.load(name, data_root).y
    for fold in folds:
        shares = y[fold.test].bincount() / len(fold.test)
        torch.testing.assert_close(shares, y.bincount() / num_graphs, atol=0.02, rtol=0)
    assert "another set" in error_of(lambda: datasets.find(name, data_root).published_splits(num_graphs + 1))


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(10, 40), min_size=1, max_size=4),
    num_folds=st.integers(2, 10),
    seed=st.integers(0, 1000),
)
def test_folds_are_stratified_disjoint_and_seeded(sizes: list[int], num_folds: int, seed: int) -> None:
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]
    folds = stratified_folds(y, num_folds, seed=seed, validation=0.2)
    assert len(folds) == num_folds
    assert_splits(folds, len(y))
    for fold in folds:
        tested = y[fold.test].bincount(minlength=len(sizes))
        assert all(size // num_folds <= n <= -(-size // num_folds) for size, n in zip(sizes, tested, strict=True))
        assert (y[fold.validation].bincount(minlength=len(sizes)) > 0).all()
    again = stratified_folds(y, num_folds, seed=seed, validation=0.2)
    assert all(
        torch.equal(a, b) for one, other in zip(folds, again, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("labelled", "in_train"), [(50, 40), (95, None), (100, 80)])
def test_tasks_are_drawn_by_whether_there_is_a_label(labelled: int, in_train: int | None) -> None:
    y = torch.full((100, 2), torch.nan)
    y[torch.randperm(100, generator=torch.Generator().manual_seed(0))[:labelled], 1] = 1
    split = datasets.find("x/").split(y, seed=3)
    assert torch.equal(torch.cat(split).sort().values, torch.arange(100))
    assert [len(part) for part in split] == [80, 10, 10]
    if in_train is not None:  # where too few graphs have none, they are anywhere
        assert int(y[split.train, 1].nansum()) == in_train


@given(st.integers(0, 1000), st.integers(10, 40), st.integers(0, 1000))
def test_each_part_has_graphs_with_a_rare_label(order: int, positive: int, seed: int) -> None:
    y = torch.zeros(200, 2)
    y[:positive, 1], y[positive : positive + 60] = 1, torch.nan
    y = y[torch.randperm(200, generator=torch.Generator().manual_seed(order))]
    for part in datasets.find("x/").split(y, seed=seed):
        kinds = torch.stack([y[part].isnan().all(1), y[part, 1] == 0, y[part, 1] == 1]).sum(1)
        expected = len(part) * torch.tensor([60, 140 - positive, positive]) / 200
        assert ((kinds - expected).abs() <= 1).all()
        assert kinds[2] > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stratified_folds(torch.tensor([0] * 9 + [1] * 4), 5), "class 1 has 4"),
        (lambda: stratified_folds(torch.zeros(50, 2), 5), "is not one class per graph"),
        (lambda: datasets.find("x/").split(torch.full((50, 2), torch.nan)), "it takes 10 graphs with labels, got 0"),
        (lambda: stratified_folds(torch.arange(30) % 10, 3, validation=0.1), "cannot be held out"),
        (lambda: stratified_folds(torch.zeros(0, dtype=torch.int64), 3), "there are none"),
        (lambda: stratified_folds(torch.zeros(50, dtype=torch.int64), 1), "num_folds must be at least 2"),
        (lambda: stratified_folds(torch.zeros(50, dtype=torch.int64), 5, validation=1.0), "validation must be a share"),
        (lambda: stratified_folds(torch.zeros(50, dtype=torch.int64), 5, seed=-1), "seed must be at least 0"),
    ],
)
def test_folds_refuse(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_says_sizes_not_numbers() -> None:
    split = datasets.Split(torch.arange(5), torch.arange(2), torch.arange(3))
    assert repr(split) == "Split(train=5 ids, validation=2 ids, test=3 ids)"
    nodes = datasets.NodeDataset(random_graphs([4]), torch.zeros(4, dtype=torch.int64), split)
    assert repr(nodes) == f"NodeDataset(graphs={nodes.graphs!r}, y=[4], split={split!r})"
