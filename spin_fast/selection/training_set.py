"""What a selection may see, and what it selects from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .. import training
from .._common import files
from ..graphs.batch import GraphBatch
from ..nn import GraphModel
from ..training import Metric
from ..training.losses import check_labels, warn_of_shared

Made = TypeVar("Made")
KEPT = 2  # of what settings share; one data set may have features of hundreds of megabytes


@dataclass
class TrainingSet:
    """Graphs to learn from, without any test graph.

    Attributes:
        graphs: with labels.
        train: ids of the graphs to train on.
        validation: ids of the graphs that choose the epoch and the settings.
        metric: from class scores and labels to a number that should rise.
        num_outputs: classes, or tasks; those that only test graphs have are among them.
        folder: where processes share what they have made; None to make it in memory.
    """

    graphs: GraphBatch
    train: Tensor
    validation: Tensor
    metric: Metric
    num_outputs: int
    folder: Path | None = None
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, graphs: GraphBatch, train: Tensor, validation: Tensor, metric: Metric) -> TrainingSet:
        """Leave out all graphs but those of ``train`` and ``validation``, ids in ``graphs``."""
        if (y := graphs.y) is None:
            raise ValueError("graphs must have labels (y) to train on")
        known, ids = torch.cat([train, validation]), torch.arange(len(train) + len(validation), device="cpu")
        outputs = y.shape[-1] if y.is_floating_point() or not y.numel() else int(y.max()) + 1
        check_labels(y[known], outputs, read=True)
        warn_of_shared(validation, train, stacklevel=3)
        return cls(graphs[known], ids[: len(train)], ids[len(train) :], metric, outputs)

    @contextmanager
    def shared(self, n_jobs: int) -> Iterator[TrainingSet]:
        """The same for so many processes, which share what they make while this lasts.

        They do so in a temporary folder; those of processes that have been killed are removed.
        """
        if n_jobs == 1 or self.folder is not None:
            yield self
            return
        with files.temporary_folder(Path(tempfile.gettempdir()) / "spin_fast-search") as folder:
            folder.chmod(0o700)  # it is beside those of other users
            yield replace(self, folder=folder, _made={})

    def made(self, key: str, make: Callable[[], Made]) -> Made:
        """What ``make`` returns for ``key``, such as features that several settings share; the last few are kept."""
        if key not in self._made:
            while len(self._made) >= KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = make() if self.folder is None else self._mapped(key, make)
        found: Made = self._made[key]
        return found

    def _mapped(self, key: str, make: Callable[[], Made]) -> Made:
        """The same in a file, which all processes map; two that want it first at the same time both make it."""
        assert self.folder is not None
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.pt"
        if not path.exists():
            with files.replacing(path) as temporary:
                torch.save(make(), temporary)
        found: Made = torch.load(path, mmap=True, weights_only=False)
        return found


class Trained(NamedTuple):
    """A trained model.

    Attributes:
        validation: the metric on the validation graphs, at the kept epoch.
        loss: the validation loss there, which decides between equal metrics.
        epochs: how many it was trained for.
        model: gives class scores ``[G, C]`` of graphs as they were read.
    """

    validation: float
    loss: float
    epochs: int
    model: GraphModel | Callable[[GraphBatch], Tensor]

    def scores(self, graphs: GraphBatch) -> Tensor:
        """Class scores ``[G, C]``."""
        if isinstance(self.model, GraphModel):
            return torch.cat(list(training.predict_chunks(self.model, graphs)))
        return self.model(graphs)


class Settings(Protocol):
    """Settings that can be trained with: a :class:`Recipe`, or those of another method; a dataclass."""

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        """Train a new model; ``epochs`` is a budget smaller than its own."""


def facts_of(settings: Any) -> dict[str, Any]:
    """Settings, with the name of their class, as values of JSON."""
    facts = {"kind": type(settings).__name__} | dataclasses.asdict(settings)
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def differing(facts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of several settings the values that are not the same in all."""
    values: dict[str, set[str]] = {}
    for of in facts:
        for name, value in of.items():
            values.setdefault(name, set()).add(str(value))
    return [{name: value for name, value in of.items() if len(values[name]) > 1} for of in facts]
