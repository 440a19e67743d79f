"""Training and prediction over shards, one after the other, which need not be in memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import assert_same_features
from helpers.training import new_model, numbers
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import PowerFeatures, shards, training
from spin_fast.features.shards import ShardedFeatures, sharded
from spin_fast.training import Trainer

CUTS = (0, 100, 100, 230, 300)


@pytest.fixture(scope="module")
def in_files(digits: PowerFeatures, tmp_path_factory: pytest.TempPathFactory) -> ShardedFeatures:
    path = tmp_path_factory.mktemp("shards") / "digits.safetensors"
    parts = (digits[begin:end].take() for begin, end in pairwise(CUTS))
    assert len(shards.save(parts, path)) == 4
    return shards.load(path)


def test_loaded_shards_are_the_whole(in_files: ShardedFeatures, digits: PowerFeatures) -> None:
    assert (len(in_files), len(in_files.shards)) == (300, 4)
    for name in ("num_features", "num_hops", "num_operators", "operator"):
        assert getattr(in_files, name) == getattr(digits, name)
    assert torch.equal(in_files.y, digits[:300].y)
    assert repr(in_files).startswith("ShardedFeatures(4 shards, 300 graphs, ")
    ids = [299, 3, 100, 3, 229]
    assert_same_features(in_files[ids], PowerFeatures.concatenate([digits[[i]].take() for i in ids]))
    assert len(in_files[[]]) == 0


@given(st.lists(st.integers(0, 299)))
def test_parts_are_all_graphs_in_order(in_files: ShardedFeatures, ids: list[int]) -> None:
    found: dict[int, int] = {}
    for shard, of_shard, places in in_files.parts(torch.tensor(ids, dtype=torch.int64)):
        number = in_files.shards.index(shard)
        assert places.tolist() == sorted(places.tolist())
        assert len(places) == len(of_shard) > 0
        found |= {place: CUTS[number] + graph for place, graph in zip(places.tolist(), of_shard.tolist(), strict=True)}
    assert [found[place] for place in range(len(ids))] == ids


@pytest.mark.parametrize("kind", ["classes", "class weights", "graph weights", "tasks"])
def test_an_epoch_has_each_graph_once(digits: PowerFeatures, kind: str) -> None:
    """Its loss at a learning rate of 0 is that of all graphs in memory."""
    whole = digits[:300].take()
    if kind == "tasks":
        y = torch.nn.functional.one_hot(whole.y, 10).float()
        y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.3] = math.nan
        whole = replace(whole, labels=y)
    features = ShardedFeatures([whole[begin:end] for begin, end in pairwise(CUTS)])
    ids = torch.arange(10, 290)
    graph_weight = torch.rand(300) if kind == "graph weights" else None
    class_weight = torch.rand(10) if kind == "class weights" else None
    losses = []
    for of in (whole, features):
        trainer = Trainer(new_model(), learning_rate=0.0, class_weight=class_weight)
        losses.append(trainer.epoch(of, ids, 32, torch.Generator().manual_seed(3), graph_weight))
    assert math.isclose(*losses, rel_tol=1e-5)


@pytest.mark.parametrize("branches", ["hops", "both"])
def test_runs_are_the_same_and_go_on(in_files: ShardedFeatures, branches: str, tmp_path: Path) -> None:
    train, validation = torch.arange(0, 240), torch.arange(240, 300)

    def run(epochs: int, **options) -> tuple:
        model = new_model(branches=branches)
        fit = training.fit(model, in_files, train, validation, epochs=epochs, schedule="constant", **options)
        return numbers(fit), training.predict(model, in_files)

    whole, state = run(4), tmp_path / "state.safetensors"
    run(2, state=state)
    for other in (run(4), run(4, state=state, resume=True)):
        assert other[0] == whole[0]
        assert torch.equal(other[1], whole[1])
    assert run(1, seed=1)[0] != run(1)[0]


def test_learns_shard_by_shard(in_files: ShardedFeatures) -> None:
    model = new_model(attention=False, batch_norm=True)
    fit = training.fit(model, in_files, torch.arange(240), torch.arange(240, 300), epochs=12)
    assert fit.epochs[-1].loss < 0.5 * fit.epochs[0].loss
    assert fit.validation > 0.6


def test_one_shard_is_as_features_in_memory(digits: PowerFeatures) -> None:
    fits = []
    for features in (digits, sharded(digits)):
        model = new_model()
        fit = training.fit(model, features, torch.arange(240), torch.arange(240, 300), epochs=2)
        fits.append((numbers(fit), training.predict(model, features, [5, 3])))
    assert fits[0][0] == fits[1][0]
    assert torch.equal(fits[0][1], fits[1][1])


def test_predictions_are_those_in_memory(in_files: ShardedFeatures, digits: PowerFeatures) -> None:
    model = new_model()
    for ids in (None, [299, 0, 101, 0], []):
        expected = training.predict(model, digits[:300], ids)
        torch.testing.assert_close(training.predict(model, in_files, ids), expected)


def test_the_next_shard_is_read_ahead(in_files: ShardedFeatures, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shards, "_read_ahead", asked.append)
    for _ in in_files.parts(torch.tensor([299, 3, 150])):
        asked.append(Path("a shard"))
    assert [file.stem[-14:] for file in asked] == ["00001-of-00004", "a shard", "00003-of-00004", "a shard", "a shard"]
    monkeypatch.undo()
    for file in (in_files._files[0], Path("gone")):
        shards._read_ahead(file)


def test_shards_that_differ_are_refused(digits: PowerFeatures, tmp_path: Path) -> None:
    unlabelled = replace(digits, labels=None)
    with pytest.raises(ValueError, match=r"shards must be alike, got .* labels .* and .* no labels"):
        ShardedFeatures([digits, unlabelled])
    with pytest.raises(ValueError, match="shards must hold at least one PowerFeatures, got none"):
        ShardedFeatures([])
    with pytest.raises(TypeError, match="shards must hold PowerFeatures, got str"):
        ShardedFeatures(["digits"])
    path = tmp_path / "x.safetensors"
    files = shards.save([digits[:9].take(), digits[:4].take()], path)
    digits[:5].take().save(files[1])
    with pytest.raises(ValueError, match=rf"index\.json is damaged: {files[1]} must have 4 graphs, got 5"):
        shards.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        shards.load(tmp_path / "nothing.safetensors")
