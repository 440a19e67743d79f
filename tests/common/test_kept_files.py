"""All kinds of files that are kept: when they are damaged, and when the disk is full."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spin_fast import SPIN, GraphBatch, PowerFeatures, shards, training
from spin_fast.features.storage import index_of
from spin_fast.selection import Evaluation
from spin_fast.selection.evaluation import Fold
from spin_fast.training import Epoch
from spin_fast.training.resume import StateFile, TrainingState

EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
FEATURES = PowerFeatures.from_graphs(GraphBatch.from_edge_index(EDGES, torch.ones(3, 1), y=torch.tensor([1])), 1)
STATE = TrainingState().after(Epoch(1, 0.5, 0.5, 0.5, 0.1, 1.0), {"w": torch.ones(2)}, {"parameters": torch.ones(2)})
FOLD = Fold(0, 0, 0.5, [0.5], [1], [], [], [], 1.0, 1.0)


@dataclass
class Kind:
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


def state_file(path: Path) -> StateFile:
    return StateFile(path, {"seed": 1}, torch.ones(2))


KINDS = {
    "features": Kind(FEATURES.save, PowerFeatures.load),
    "shards": Kind(lambda path: shards.save([FEATURES, FEATURES], path), PowerFeatures.load),
    "checkpoint": Kind(
        lambda path: training.save_checkpoint(
            path, SPIN(1, 2, 2, 1, num_layers=1, classifier_features=()), operator="sym"
        ),
        training.load_checkpoint,
    ),
    "state": Kind(lambda path: state_file(path).keep(STATE, now=True), lambda path: state_file(path).read(STATE)),
    "evaluation": Kind(lambda path: Evaluation({"folds": 1}, [{}], [FOLD]).save(path), Evaluation.load),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def error_of(kind: Kind, path: Path) -> str | None:
    try:
        kind.read(path)
    except (ValueError, FileNotFoundError) as error:  # an index may name other files
        return str(error)
    return None


@kinds
def test_every_damage_is_one_error_that_names_the_file(kind: Kind, tmp_path: Path) -> None:
    """Cut at each length, or one bit flipped in each byte; what is only another value is read."""
    path = tmp_path / "kept"
    kind.write(path)
    file = path if path.exists() else index_of(path)
    whole, read = file.read_bytes(), 0
    cut = [whole[:size] for size in range(len(whole) - 1)]
    flipped = [whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in cut + flipped:
        file.write_bytes(damaged)
        error = error_of(kind, path)
        read += error is None
        assert error is None or str(tmp_path) in error
    assert read < len(whole)


@kinds
def test_a_full_disk_leaves_the_old_file(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    kind.write(path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot be written"):
            kind.write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
