"""Logs of the epochs of a training run, for ``training.fit(on_epoch=...)``."""

from __future__ import annotations

import csv
import warnings
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

from .._common import files
from .fit import Epoch

COLUMNS = ["epoch", *(column.name for column in fields(Epoch)[1:])]


class CsvLog:
    """A CSV file with one line per epoch, written when the epoch ends, so that the file can be watched.

    A new run replaces the file; a resumed one keeps the lines of the epochs before, and warns where some are damaged.

    Args:
        path: the file; its columns are ``COLUMNS``.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._next = 0  # the number of the epoch that can be appended; 0 before the first
        files.check_writable(self.path)

    def __call__(self, epoch: Epoch) -> None:
        if epoch.number != self._next:
            lines = [COLUMNS, *self._before(epoch.number)]
            with files.replacing(self.path) as temporary, temporary.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(lines)
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(vars(epoch).values())
        self._next = epoch.number + 1

    def _before(self, number: int) -> list[list[str]]:
        if number == 1 or not self.path.is_file():
            return []
        text = self.path.read_text(encoding="ascii", errors="replace")
        header, *found = [line.split(",") for line in text.splitlines()] or [[]]
        if header != COLUMNS:
            return []
        lines = [line for line in found if _is_whole(line) and int(line[0]) < number]
        if [int(line[0]) for line in lines] != [*range(1, number)]:
            warnings.warn(f"{self.path} is damaged: it lacks epochs before {number}", stacklevel=3)
        return lines


def _is_whole(line: list[str]) -> bool:
    """Whether it is a line of the log, all of numbers."""
    try:
        return len(line) == len(COLUMNS) and line[0].isdecimal() and bool([*map(float, line)])
    except ValueError:
        return False


class TensorBoardLog(AbstractContextManager["TensorBoardLog"]):
    """Event files for ``tensorboard --logdir``; a context manager, which closes them.

    They replace those of earlier runs in the same folder, from the first new epoch on.

    Args:
        folder: where they are written.
        metric: the name under which the metric is shown.

    Raises:
        ImportError: tensorboard is not installed.
    """

    SECONDS = 10  # between two writes to the file

    def __init__(self, folder: str | Path, metric: str = "metric") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"{error}; TensorBoard logs need: pip install tensorboard") from error
        self._folder, self._metric, self._make = Path(folder), metric, SummaryWriter
        self._writer: Any = None

    def __call__(self, epoch: Epoch) -> None:
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=epoch.number, flush_secs=self.SECONDS)
        values = {
            "loss/training": epoch.loss,
            "loss/validation": epoch.validation_loss,
            f"{self._metric}/validation": epoch.validation,
            "learning rate": epoch.learning_rate,
            "seconds per epoch": epoch.seconds,
        }
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch.number)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def __exit__(self, *_: object) -> None:
        self.close()
