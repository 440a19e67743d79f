"""Where commands may write: never over their input, a file of another kind, or anything but a regular file."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .. import datasets
from .._common import files
from ..datasets.folder import kind_of
from ..selection.trials import OUTCOMES
from ..training.logs import COLUMNS

TABLES = ("edges", "nodes", "graphs")


def check_output(path: Path, is_own: Callable[[Path], bool], source: datasets.Source, *inputs: Path | None) -> None:
    """Check, before any work, that a command can write a file, and may replace the one that is there.

    Args:
        is_own: whether a file is one that this command writes.
        source: the data set that it reads.
        inputs: other files that it reads.
    """
    place = path.resolve()
    if any(read is not None and place == read.resolve() for read in (source.path, *inputs)):
        raise ValueError(f"--out {path} is read by this command; choose another name")
    folder = source.path if source.is_own else None
    if folder is not None and place.parent == folder.resolve():
        if place.name.partition(".")[0] in TABLES:
            raise ValueError(f"--out {path} would be read as a table of {folder}; choose another name")
        if place.suffix == ".parquet" and kind_of(folder) == "parquet":
            raise ValueError(f"--out {path} would be read as graphs of {folder}; choose another folder")
    files.check_writable(path, is_own)


def is_predictions(path: Path) -> bool:
    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import read_schema

            names = read_schema(path).names
        else:
            with path.open(newline="", encoding="utf-8") as file:
                names = next(csv.reader(file), [])
    except (OSError, ValueError, csv.Error):
        return False
    return (
        re.fullmatch(r"graph\n(name\n)?(prediction\n(class_.*\n)+|(task_.*\n)+)", "\n".join([*names, ""])) is not None
    )


def is_result(path: Path) -> bool:
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and {"dataset", "metric", "test"} <= facts.keys()


def is_picture(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(1024)
    is_png = head.startswith(b"\x89PNG") and b"Software\0spin_fast" in head
    return is_png or (b"<svg" in head and b"<dc:title>spin_fast</dc:title>" in head)


def _has_first_line(pattern: bytes, path: Path) -> bool:
    with path.open("rb") as file:
        return re.match(pattern, file.readline()) is not None


is_explanation = partial(_has_first_line, rb"node,(name,)?total,(member_1_)?within_")
is_log = partial(_has_first_line, ",".join(COLUMNS).encode() + rb"\s*$")
is_evaluation_table = partial(_has_first_line, b"# Evaluation: ")
is_trials = partial(_has_first_line, ",".join(OUTCOMES).encode())
