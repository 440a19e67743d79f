"""Training by several processes, against training by one."""

from __future__ import annotations

import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from helpers.ranks import CASES, by_ranks, digits, everything, fitted, seeded
from helpers.training import new_model

from spin_fast import training
from spin_fast.training.ranks import Ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> Path:
    """One for all processes of pytest."""
    folder = tmp_path_factory.getbasetemp().parent / f"ranks-{testrun_uid}"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    with FileLock(folder / "lock"):
        results = folder / "results"
        if not results.exists():
            torch.save(by_ranks(3, everything, folder), results)
        return torch.load(results, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_one_process(case: str, ranks: list[dict]) -> None:
    """To rounding, in float64; and among each other bit for bit."""
    log, parameters, best = fitted(case)
    for number in (2, 3):
        results = [rank["cases"][case, number] for rank in ranks[:number]]
        for found_log, found, found_best in results:
            assert found_log == results[0][0]
            assert torch.equal(found, results[0][1])
            assert found_best == best
        assert len(found_log) == len(log)
        for line, expected in zip(found_log, log, strict=True):
            assert line == pytest.approx(expected, rel=1e-7)
            assert line[3] == expected[3]  # the metric, which counts graphs
        torch.testing.assert_close(found, parameters, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_the_case_of_early_stopping_stops_early(ranks: list[dict]) -> None:
    log, _, best = ranks[0]["cases"]["early stopping", 3]
    assert best + 2 == len(log) < 20


@pytest.mark.slow
def test_predictions_that_are_shared_out_are_the_same_bits(ranks: list[dict]) -> None:
    for rank in ranks[:2]:
        for number, scores in zip((159, 1, 0), rank["predicted"], strict=True):
            expected = training.predict(seeded(), digits(), torch.arange(160).flip(0)[:number])
            assert torch.equal(scores, expected)


@pytest.mark.slow
def test_two_ranks_give_the_same_bits_twice(ranks: list[dict]) -> None:
    for rank in ranks[:2]:
        (one, parameters), (other, again) = rank["again"]
        assert one == other == ranks[0]["again"][0][0]
        assert torch.equal(parameters, again)
        assert torch.equal(parameters, ranks[0]["again"][0][1])


@pytest.mark.slow
def test_the_first_rank_alone_calls_what_it_is_given(ranks: list[dict]) -> None:
    assert ranks[0]["seen"] == ([60, 60], [1, 2])
    assert ranks[1]["seen"] == ([], [])


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_and_other_numbers_of_ranks(ranks: list[dict]) -> None:
    for rank in ranks[:2]:
        (log, parameters), (expected, whole) = rank["went on"], rank["whole"]
        assert log == expected
        assert torch.equal(parameters, whole)
    parts, options = (digits(), range(44), range(100, 160)), {"epochs": 4, "schedule": "constant"}
    fit = training.fit(seeded(), *parts, **options)
    for name in ("2 to 1", "1 to 2"):
        log = ranks[0][name]
        assert [line[0] for line in log] == [1, 2, 3, 4]
        for line, epoch in zip(log, fit.epochs, strict=True):
            assert line[1:4] == pytest.approx((epoch.loss, epoch.validation_loss, epoch.validation), rel=1e-7)


@pytest.mark.slow
def test_what_ranks_refuse_all_of_them_tell(ranks: list[dict]) -> None:
    first, second = (rank["errors"] for rank in ranks[:2])
    assert first["batch norm"].startswith("ValueError: model must have no BatchNorm to be trained by several ranks")
    assert first["differs"] == (
        "ValueError: arguments must be the same on every rank, got on ranks 0 and 1 batch_size=5 and 6, seed=0 and 1"
    )
    assert first["state"].startswith("StateError: ")
    assert "is not a readable safetensors file" in first["state"]
    assert first["order"] == "ValueError: generator must be given to several ranks, seeded alike, got None"
    assert first["metric"] == second["metric"] == "RuntimeError: _Unreadable: a"
    assert first == second
    assert ranks[2]["outside"].startswith(
        "ArgumentTypeError: process_group must be a ProcessGroup of torch.distributed"
    )


@pytest.mark.slow
def test_plain_distributed_data_parallel_is_right(ranks: list[dict]) -> None:
    for rank in ranks[:2]:
        for name in ("flat", "fresh", "bucket views", "ours"):
            for of in ("gradients", "ddp"):
                torch.testing.assert_close(rank[of][name], rank[of]["one process"], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(rank["ddp"]["losses, ours"], rank["ddp"]["losses, one process"])


@pytest.mark.slow
def test_where_one_rank_ends_all_do(ranks: list[dict], folder: Path) -> None:
    for rank in ranks[:2]:
        assert rank["interrupted"][0] == "interrupted: True, epochs: 2"
    told, seconds = ranks[0]["killed"]
    assert told.startswith("another rank has ended, or cannot be reached: ")
    assert seconds < 10
    assert "killed" not in ranks[1]
    assert not [*folder.glob("*.part")]
    for how in ("interrupted", "killed"):
        options = {"epochs": 5, "state": folder / how, "resume": True}
        fit = training.fit(seeded(), digits(), range(44), range(100, 160), **options)
        assert [epoch.number for epoch in fit.epochs] == [1, 2, 3, 4, 5]


def test_a_group_that_is_none_is_refused() -> None:
    features = digits(torch.float32)
    with pytest.raises(
        TypeError, match=r"process_group must be a ProcessGroup of torch\.distributed, or None, got int"
    ):
        training.fit(new_model(), features, range(9), range(9, 18), process_group=2)


def test_a_rank_that_has_every_graph_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one, which is not spared what several do."""
    options = {"rank": 0, "world_size": 1}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", **options)
    try:
        for case in ("fused", "shards", "tasks", "graph weights", "autograd"):
            with monkeypatch.context() as patch:
                for module in ("fit", "trainer"):
                    patch.setattr(importlib.import_module(f"spin_fast.training.{module}"), "ranks_of", Ranks)
                log, parameters, best = fitted(case, dist.group.WORLD)
            expected_log, expected, expected_best = fitted(case)
            assert log == [pytest.approx(line, rel=1e-9) for line in expected_log]
            assert best == expected_best
            torch.testing.assert_close(parameters, expected)
    finally:
        dist.destroy_process_group()


def test_ranks_leave_a_destroyed_group_to_end(tmp_path: Path) -> None:
    """Threads of a group that lives when the interpreter ends may abort it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ranks = Ranks(dist.group.WORLD)
        ended = weakref.ref(dist.group.WORLD)
        assert ranks.sum(torch.ones(2)).tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
    assert ended() is None
    with pytest.raises(ValueError, match="process_group has been destroyed"):
        ranks.sum(torch.ones(2))
