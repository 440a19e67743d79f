from __future__ import annotations

import math
import sys
from pathlib import Path

import pandas
import pytest

from spin_fast.training import Epoch
from spin_fast.training.logs import CsvLog, TensorBoardLog


def epoch(number: int, loss: float = 0.1) -> Epoch:
    return Epoch(number, loss, 1 / 3, float("nan"), 5e-3, 0.25)


def test_csv_grows_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.csv"
    log = CsvLog(path)
    assert not path.exists()
    for number in (1, 2, 3):
        log(epoch(number))
        table = pandas.read_csv(path)
        assert table["epoch"].tolist() == list(range(1, number + 1))
    assert list(table) == ["epoch", "loss", "validation_loss", "validation", "learning_rate", "seconds"]
    assert float(path.read_text().splitlines()[3].split(",")[2]) == 1 / 3
    assert math.isnan(table["validation"][0])
    assert list(path.parent.iterdir()) == [path]


def test_csv_goes_on_without_repeating(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CsvLog(path)
    for number in (1, 2, 3, 4):
        log(epoch(number, loss=1.0))
    path.write_text(path.read_text() + "5,0.")  # as a dying process may leave it
    log = CsvLog(path)
    for number in (3, 4):
        log(epoch(number, loss=2.0))
    assert pandas.read_csv(path)[["epoch", "loss"]].to_numpy().tolist() == [[1, 1], [2, 1], [3, 2], [4, 2]]
    log(epoch(1, loss=3.0))  # another run
    assert pandas.read_csv(path)["loss"].tolist() == [3.0]
    path.write_text("something else\n")
    CsvLog(path)(epoch(2))
    assert pandas.read_csv(path)["epoch"].tolist() == [2]


@pytest.mark.parametrize("damage", [b"\xff", b"\0", b'"', b"x", b"\n", b"\r", b",", b"", b"\xc2\xb2"])
def test_lines_that_are_damaged_are_left_out(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CsvLog(path)
    for number in (1, 2, 3):
        log(epoch(number))
    whole = path.read_bytes()
    place = whole.index(b"\n2,") + 1
    path.write_bytes(whole[:place] + damage + whole[place + 2 :])
    with pytest.warns(UserWarning, match=r"log.csv is damaged: it lacks epochs before 4"):
        CsvLog(path)(epoch(4))
    assert pandas.read_csv(path)["epoch"].tolist() == [1, 3, 4]


def test_a_csv_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="cannot be written: it is a folder"):
        CsvLog(tmp_path)


def test_tensorboard_shows_a_run_that_went_on_as_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for numbers, loss in (((1, 2, 3, 4), 1.0), ((3, 4, 5), 2.0)):
        with TensorBoardLog(tmp_path, metric="accuracy") as log:
            for number in numbers:
                log(epoch(number, loss))
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = ["loss/training", "loss/validation", "accuracy/validation", "learning rate", "seconds per epoch"]
    assert sorted(events.Tags()["scalars"]) == sorted(scalars)
    assert [(event.step, event.value) for event in events.Scalars("loss/training")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
    ]


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="TensorBoard logs need: pip install tensorboard"):
        TensorBoardLog(tmp_path)
