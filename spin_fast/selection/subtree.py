"""Settings of a linear model on counts of subtree patterns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from .._common import check
from ..features.subtree_counts import Norm, SubtreeCounts, subtree_counts
from ..nn import SubtreeLinear
from ..training import loss_of, predict_chunks
from .training_set import Trained, TrainingSet

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MOST_STEPS = 1000  # of the optimiser


@dataclass(kw_only=True)
class SubtreeRecipe:
    """All settings from graphs to a fitted :class:`spin_fast.nn.SubtreeLinear`.

    It compares nodes by those columns of ``x`` that hold nothing but whole numbers in the training graphs: numbers that
    are measured would make nearly every node a pattern of its own.

    Args:
        num_hops, num_columns, norm, edge_types: those of :class:`spin_fast.nn.SubtreeLinear`.
        hash_seed: its ``seed``.
        C: inverse strengths of the L2 regularisation, those of scikit-learn's ``LogisticRegression``. The validation
            graphs choose among them.

    Raises:
        TypeError, ValueError: a wrong ``C``. What else is wrong is found when it is used.
    """

    num_hops: int = 3
    num_columns: int = 2**20
    norm: Norm | None = "l2"
    edge_types: bool = False
    hash_seed: int = 0
    C: Sequence[float] = (0.1, 1.0, 10.0, 100.0, 1000.0)

    def __post_init__(self) -> None:
        if isinstance(self.C, (int, float)) or not self.C or min(check.number("C", value, 0) for value in self.C) == 0:
            raise ValueError(f"C must hold numbers above 0, at least one, got {self.C!r}")

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        """Fit a new model; nothing in it is random, so that ``seed`` changes nothing, and it has no epochs."""
        model, known = self.fit(data), data.graphs[data.validation]
        assert known.y is not None
        scores = torch.cat(list(predict_chunks(model, known)))
        return Trained(float(data.metric(scores, known.y)), loss_of(scores, known.y).item(), 1, model)

    def fit(self, data: TrainingSet) -> SubtreeLinear:
        """Fit once for each ``C``, and return the model that is best on the validation graphs, at equal metric by loss.

        Raises:
            ValueError: no training graph has nodes; a task that is neither 0 nor 1 nor NaN.
        """
        y = data.graphs.y
        if y is not None and y.is_floating_point() and not bool(((y == 0) | (y == 1) | y.isnan()).all()):
            raise ValueError("y must be tasks of 0, 1 and NaN, of a logistic regression no shares between them")
        counts, features = data.made(f"subtree {self._options}", lambda: self._counts(data))
        matrix, y = counts.to_scipy(self.num_columns), data.graphs.y
        assert y is not None
        train, validation = data.train.cpu().numpy(), data.validation.cpu().numpy()
        columns = np.unique(matrix[train].indices)
        if len(columns) == 0:
            raise ValueError("data must have training graphs with nodes")
        matrix, labels, known = matrix[:, columns], y[data.train].cpu().numpy(), y[data.validation].cpu()

        def rank(weights: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
            scores = torch.from_numpy(matrix[validation] @ weights[0] + weights[1])
            metric = float(data.metric(scores, known))
            return -math.inf if math.isnan(metric) else metric, -loss_of(scores, known).item()

        with threadpool_limits(1):  # sums of several threads have other bits
            weight, bias = max((_fitted(matrix[train], labels, data.num_outputs, C) for C in self.C), key=rank)
        sizes = (data.graphs.num_features, data.num_outputs, len(columns))
        model = SubtreeLinear(*sizes, **self._options, features=features)
        state = {"columns": columns.astype(np.int64), "weight": weight, "bias": bias}
        model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
        model.multilabel, model.node_features = y.is_floating_point(), data.graphs.node_features
        return model.to(y.device).eval()

    @property
    def _options(self) -> dict[str, Any]:
        """The options of the counts."""
        options = {name: getattr(self, name) for name in ("num_hops", "num_columns", "norm", "edge_types")}
        return options | {"seed": self.hash_seed}

    def _counts(self, data: TrainingSet) -> tuple[SubtreeCounts, list[int] | None]:
        """The counts of all graphs, and the columns of ``x`` that they compare."""
        x = data.graphs[data.train].x
        whole = (x == x.round()).all(0)
        features = None if bool(whole.all()) else whole.nonzero()[:, 0].tolist()
        return subtree_counts(data.graphs, **self._options, features=features), features


def _fitted(rows: csr_array, y: np.ndarray, num_outputs: int, C: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights ``[K, num_outputs]`` and biases; of tasks, float ``y [G, T]``, each by its known labels."""
    if y.ndim == 1:
        return _of_classes(rows, y, num_outputs, C)
    weight, bias = np.empty((rows.shape[1], num_outputs)), np.empty(num_outputs)
    for task, labels in enumerate(y.T):
        known = ~np.isnan(labels)
        of, at = _of_classes(rows[known], labels[known].astype(np.int64), 2, C)
        weight[:, task], bias[task] = of[:, 1] - of[:, 0], at[1] - at[0]
    return weight, bias


def _of_classes(rows: csr_array, y: np.ndarray, num_classes: int, C: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights and biases of classes; one without graphs has odds of half a graph to all."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    weight, bias = np.zeros((rows.shape[1], num_classes)), np.full(num_classes, -math.log(2 * len(y) + 1))
    present = np.unique(y)
    if len(present) == 1:
        bias[present] = 0
    elif len(present) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # validation judges what there is after all steps
            model = LogisticRegression(C=C, max_iter=MOST_STEPS).fit(rows, y)
        coef, intercept = model.coef_, model.intercept_
        if len(present) == 2:
            coef, intercept = (np.concatenate([-of, of]) / 2 for of in (coef, intercept))
        weight[:, present], bias[present] = coef.T, intercept
    return weight, bias
