"""All settings from graphs to a trained SPIN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import training
from .._common import check
from .._common.indexing import GraphIds, graph_ids
from ..features.power_features import PowerFeatures
from ..features.shards import ShardedFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import Degree, NodeFeatures
from ..nn.spin import CALIBRATION_GRAPHS, SPIN
from ..training.fit import seeded
from ..training.losses import ClassWeight
from ..training.schedules import Schedule
from .training_set import Trained, TrainingSet

READOUTS = ("attention", "sum")


@dataclass(kw_only=True)
class Recipe:
    """All settings from graphs to a trained :class:`spin_fast.SPIN`.

    Args:
        degree, max_degree, one_hot, standardize: those of :class:`spin_fast.NodeFeatures`.
        num_hops, operator: those of :meth:`spin_fast.PowerFeatures.from_graphs`.
        readout: ``"sum"`` or ``"attention"``.
        branches, size_aware, hidden_features, num_layers, classifier_features, batch_norm, dropout: those of
            :class:`spin_fast.SPIN`.
        calibrate: scale the new weights by the training graphs, see :meth:`spin_fast.SPIN.calibrate`.
        epochs, batch_size, learning_rate, schedule, weight_decay, class_weight, patience: those of
            :func:`spin_fast.training.fit`.

    Raises:
        TypeError, ValueError: an unknown ``readout``, or wrong ``epochs``. What else is wrong is found when it is used.
    """

    degree: Degree | None = None
    max_degree: int | None = None
    one_hot: bool | Sequence[int] = False
    standardize: bool | Literal["auto"] = "auto"
    num_hops: int = 3
    operator: str | Sequence[str] = "sym"
    branches: Literal["hops", "joint", "both"] = "joint"
    readout: Literal["attention", "sum"] = "sum"
    size_aware: bool = False
    hidden_features: int = 32
    num_layers: int = 3
    classifier_features: Sequence[int] = (32, 32)
    batch_norm: bool = False
    dropout: float = 0.0
    calibrate: bool = True
    epochs: int = 100
    batch_size: int = 32
    learning_rate: float = 5e-3
    schedule: Schedule = "cosine"
    weight_decay: float = 0.0
    class_weight: ClassWeight = None
    patience: int = 60

    def __post_init__(self) -> None:
        if self.readout not in READOUTS:
            raise ValueError(f"readout must be one of {', '.join(READOUTS)}, got {self.readout!r}")
        check.integer("epochs", self.epochs, 1)

    @property
    def needs_node_rows(self) -> bool:
        """Whether the model asks the features for the rows of their nodes."""
        return self.dropout > 0 or self.branches != "hops"

    def node_features(self) -> NodeFeatures:
        """The preparation of node features, not fitted yet."""
        return NodeFeatures(self.degree, max_degree=self.max_degree, one_hot=self.one_hot, standardize=self.standardize)

    def features(self, graphs: GraphBatch, train: GraphIds, *, progress: bool = False) -> PowerFeatures:
        """Compute the features of all graphs, prepared by what is fitted to the graphs ``train``."""
        graphs, node_rows = self.node_features().fit(graphs, train).transform(graphs), self.needs_node_rows
        return PowerFeatures.from_graphs(graphs, self.num_hops, self.operator, node_rows=node_rows, progress=progress)

    def new_model(self, features: PowerFeatures | ShardedFeatures, train: GraphIds, out_features: int) -> SPIN:
        """A model with random weights, calibrated on the graphs ``train`` where the recipe says so."""
        some = features[graph_ids(train, len(features))[:CALIBRATION_GRAPHS]]
        model = SPIN(
            features.num_features,
            self.hidden_features,
            out_features,
            features.num_hops,
            num_operators=features.num_operators,
            branches=self.branches,
            attention=self.readout == "attention",
            size_aware=self.size_aware,
            num_layers=self.num_layers,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
            classifier_features=self.classifier_features,
        ).to(some.rows.device, some.rows.dtype)
        if self.calibrate:
            model.calibrate(some)
        return model

    @property
    def fit_arguments(self) -> dict[str, Any]:
        """The arguments of :func:`spin_fast.training.fit` that the recipe has."""
        names = ("epochs", "batch_size", "learning_rate", "schedule", "weight_decay", "class_weight", "patience")
        return {name: getattr(self, name) for name in names}

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        """Compute features, unless settings before have computed the same, and train a new model."""
        preparation = (self.degree, self.max_degree, self.one_hot, self.standardize)
        key = str((preparation, self.num_hops, check.operators(self.operator), self.needs_node_rows))
        features = data.made(key, lambda: self.features(data.graphs, data.train))
        with seeded(seed, features.rows.device):
            model = self.new_model(features, data.train, data.num_outputs)
            arguments = self.fit_arguments | {"epochs": self.epochs if epochs is None else min(epochs, self.epochs)}
            fit = training.fit(model, features, data.train, data.validation, **arguments, seed=seed, metric=data.metric)
        if fit.interrupted:  # by Ctrl-C, which is to end more than this model
            raise KeyboardInterrupt
        kept = fit.epochs[fit.best_epoch]
        return Trained(kept.validation, kept.validation_loss, len(fit.epochs), model.eval())
