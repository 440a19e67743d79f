"""SPIN as a classifier of scikit-learn."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import Tags, check_array, check_random_state, column_or_1d, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    assert_all_finite,
    check_consistent_length,
    check_is_fitted,
)
from torch import Tensor
from torch.nn import functional as F

from .. import training
from .._common import check
from .._common.indexing import are_alike, prepared_by
from .._common.progress import progress_bar
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import Degree
from ..nn import GraphModel
from ..selection import Recipe, Settings, TrainingSet, search, spaces
from ..selection.trials import check_ensemble
from ..training.fit import seeded
from ..training.schedules import Schedule
from .transformer import GraphEstimator, Graphs, check_finite

METRICS = {"accuracy": training.accuracy, "rocauc": training.rocauc, "ap": training.ap}
_SHARED = "validation has .* of train"


@dataclass(repr=False, eq=False)
class SPINClassifier(ClassifierMixin, GraphEstimator):
    """SPIN as an estimator of scikit-learn: precomputation, training with early stopping, prediction.

    ``X`` is a :class:`spin_fast.GraphBatch`, from which scikit-learn selects graphs as it selects rows of an array, in
    ``cross_val_score``, ``GridSearchCV`` and all else that splits by ids. Or it is :class:`spin_fast.PowerFeatures`
    made beforehand, with the same ``num_hops`` and ``operator``: then no fold and no candidate computes powers again.
    Lists of graphs of PyG, DGL, networkx or scipy are converted by the ``GraphBatch.from_*`` of their kind at every
    call.

    An int as ``random_state`` makes results reproducible bit for bit, with the same ``n_jobs``. With other numbers of
    threads torch's own products and sums may round otherwise, of which training with ``batch_norm``, ``size_aware``,
    ``dropout``, ``sample_weight`` or several labels per graph consists, and parts of prediction: that changes the last
    digits of scores, and such training may end elsewhere. A search has the same bits for any ``n_jobs``. Torch's own
    random state and number of threads are restored after each call, the latter after calls that do not overlap.

    It may be fitted in threads and in worker processes, as by ``cross_val_score(n_jobs=4)``.

    Node features are prepared by :class:`spin_fast.NodeFeatures`, fitted on the graphs to train on; those of
    ``PowerFeatures`` are taken as they are. Where ``NodeFeatures`` had transformed the graphs, or those of the
    ``PowerFeatures``, before, the model takes graphs as they were, too.

    Args:
        hidden_features, size_aware, num_layers, classifier_features, batch_norm, dropout: those of
            :class:`spin_fast.SPIN`; ``size_aware`` is for ``readout="attention"``.
        num_hops: ``R``; there are ``R + 1`` branches.
        operator: the graph operator: ``sym``, ``adj``, ``sym+adj`` or ``rw``; or several side by side, as in
            :meth:`spin_fast.PowerFeatures.from_graphs`.
        readout: ``"sum"`` or ``"attention"``.
        branches: ``"hops"``, ``"joint"`` or ``"both"``: what an MLP reads, one hop of a node, or all side by side.
        degree, max_degree, one_hot, standardize: those of :class:`spin_fast.NodeFeatures`.
        calibrate: scale the new weights by the training graphs, see :meth:`spin_fast.SPIN.calibrate`.
        epochs, batch_size, learning_rate, schedule, weight_decay: those of :func:`spin_fast.training.fit`.
        metric: what chooses the epoch, and the best of a search, on the graphs held out: ``"accuracy"``; of two
            classes, or of several labels per graph, :func:`"rocauc" <spin_fast.training.rocauc>` or
            :func:`"ap" <spin_fast.training.ap>` of the second class, which tell more where few graphs are of it, as
            long as some of those held out are; or a function of class scores and labels as
            :func:`spin_fast.training.fit` takes. Weights of classes and graphs count in ``"accuracy"`` alone.
            :meth:`score` is the accuracy in any case, as scikit-learn has it.
        class_weight: None, ``"balanced"``, or a dict from labels to the weights that their graphs have in the loss, and
            in the accuracy that the epoch is chosen by. Of several labels per graph ``"balanced"`` weighs each against
            its absence, in the loss alone.
        patience: stop after so many epochs without a better ``metric`` on the graphs held out.
        validation_fraction: the share of graphs that ``fit`` holds out, stratified by class (but not by several labels
            per graph), to choose the epoch by. With 0 it trains on all and chooses by them.
        search: instead of one model train many, and keep what is best on the graphs held out: a number of settings,
            drawn from those of :func:`spin_fast.selection.spaces.candidates`, or settings of your own, a list of
            :class:`spin_fast.selection.Recipe`. All other arguments of features, model and training are then not used.
            ``X`` must be graphs.
        ensemble: with ``search``, average the probabilities of so many of the best, at most of those that it trains to
            the end, a ninth or so of all.
        device: where to train, as torch names it; None for the device of ``X``.
        n_jobs: CPU threads, no more than CPUs; None for 1 (small batches gain little from more), -1 for all; of a
            search processes.
        random_state: an int, a ``numpy.random.RandomState``, or None: of the graphs held out, the weights, the order of
            the graphs and dropout.
        verbose: show progress bars on the terminal.

    Attributes:
        classes_: ``[C]`` the labels, sorted; of several labels per graph their numbers.
        n_features_in_: features of a node.
        node_features_: the fitted :class:`spin_fast.NodeFeatures` of the model; None if there are none.
        model_: the :class:`spin_fast.SPIN`, with the weights of the best epoch; it knows ``node_features_`` and the
            operator, as ``training.predict_proba`` asks and ``training.save_checkpoint`` keeps.
        history_: the epochs, each a :class:`spin_fast.training.Epoch` with ``loss``, ``validation_loss``,
            ``validation`` (the ``metric``), ``learning_rate`` and ``seconds``.
        best_epoch_: the position in ``history_`` of the epoch whose weights were kept.
        n_iter_: the number of epochs.
        trials_: with ``search`` the models that were tried, those that were trained to the end first, as
            :meth:`spin_fast.selection.Search.table` returns them; ``history_``, ``best_epoch_`` and ``n_iter_`` are not
            there, and ``model_`` may be any :class:`spin_fast.nn.GraphModel`.
    """

    hidden_features: int = 32
    num_hops: int = 3
    operator: str | Sequence[str] = "sym"
    readout: Literal["attention", "sum"] = "sum"
    _: KW_ONLY
    branches: Literal["hops", "joint", "both"] = "joint"
    size_aware: bool = False
    degree: Degree | None = None
    max_degree: int | None = None
    one_hot: bool | Sequence[int] = False
    standardize: bool | Literal["auto"] = "auto"
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
    metric: Literal["accuracy", "rocauc", "ap"] | training.Metric = "accuracy"
    class_weight: Literal["balanced"] | Mapping[Any, float] | None = None
    patience: int = 60
    validation_fraction: float = 0.1
    search: int | Sequence[Settings] | None = None
    ensemble: int = 0
    device: str | torch.device | None = None
    n_jobs: int | None = None
    random_state: int | np.random.RandomState | None = None
    verbose: bool | int = False

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> SPINClassifier:
        """Train a new model. Ctrl-C ends training with a warning; the model then has the best weights so far, or is the
        best of a search so far.

        Args:
            X: the graphs, see the class.
            y: ``[G]`` labels of any kind that sorts, strings too; or ``[G, T]`` of 0 and 1, several labels per graph;
                None for those of ``X``.
            sample_weight: ``[G]``, how often each graph counts in the loss, and in the accuracy that the epoch is
                chosen by; only the ratios matter; None for once. A graph of weight 0 is left out. What standardises
                node features and ``calibrate`` count every other graph once. Steps with weights are slower.

        Raises:
            TypeError, ValueError: name the argument and what is wrong with it. Labels of which some are unknown (OGB)
                train by :func:`spin_fast.training.fit`.
        """
        graphs = self._graphs(X, with_labels=y is None)
        y = _labels_of(graphs.y if y is None else y, self)
        check_consistent_length(graphs, y)
        check_finite(graphs)
        self._check_arguments(graphs)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, y, dtype=np.float64, ensure_non_negative=True)
        multilabel = y.ndim == 2
        classes, codes = (np.arange(y.shape[1]), y) if multilabel else np.unique(y, return_inverse=True)
        metric = self._metric(len(classes), multilabel)
        random = check_random_state(self.random_state)
        train, validation = self._split(y, sample_weight, random)
        class_weight = self._class_weight(classes, y[train], None if sample_weight is None else sample_weight[train])
        seed = int(random.randint(2**31 - 1))
        for name in ("history_", "best_epoch_", "n_iter_", "trials_"):  # of a fit before
            self.__dict__.pop(name, None)
        if self.search is not None:
            assert isinstance(graphs, GraphBatch)  # as is checked
            if sample_weight is not None:
                raise ValueError("sample_weight must be None with search, where all graphs count once")
            model = self._search(graphs, codes, train, validation, metric, seed)
            return self._keep(model, graphs, classes, multilabel)
        recipe = Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})
        with _threads(self.n_jobs):
            features = self._features(recipe, graphs, train)
            labels = torch.from_numpy(codes)
            features = _labelled(features, labels.to(features.rows.dtype) if multilabel else labels)
            shares = _shares(codes, class_weight, sample_weight)
            if self.metric == "accuracy" and shares is not None:
                metric = _weighted_accuracy(shares[validation])
            with seeded(seed, features.rows.device), warnings.catch_warnings():
                if self.validation_fraction == 0:  # as was asked for
                    warnings.filterwarnings("ignore", _SHARED, UserWarning)
                model = recipe.new_model(features, train, len(classes))
                result = training.fit(
                    model,
                    features,
                    train,
                    validation,
                    **recipe.fit_arguments | {"class_weight": class_weight},
                    graph_weight=sample_weight,
                    seed=seed,
                    metric=metric,
                    progress=bool(self.verbose),
                )
        self.history_, self.best_epoch_, self.n_iter_ = result.epochs, result.best_epoch, len(result.epochs)
        if result.interrupted:
            warnings.warn("Training interrupted by user.", stacklevel=2)
        return self._keep(model, graphs, classes, multilabel)

    def predict(self, X: Any) -> np.ndarray:
        """The labels ``[G]`` of the graphs, from ``classes_``; or ``[G, T]`` of 0 and 1.

        Raises:
            TypeError, ValueError: say what is wrong with ``X``, or which graphs have scores that are not finite.
        """
        scores = self._scores(X)
        return (scores > 0).long().numpy() if self._multilabel else self.classes_[scores.argmax(1).numpy()]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The class probabilities ``[G, C]``, in the order of ``classes_``; or ``[G, T]``, of each label on its own."""
        scores = self._scores(X)
        return (scores.sigmoid() if self._multilabel else scores.softmax(1)).numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithms of :meth:`predict_proba`."""
        scores = self._scores(X)
        return (F.logsigmoid(scores) if self._multilabel else scores.log_softmax(1)).numpy()

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores before softmax or sigmoid; of two classes ``[G]``, how much more the second has."""
        scores = self._scores(X)
        binary = not self._multilabel and scores.shape[1] == 2
        return (scores[:, 1] - scores[:, 0] if binary else scores).numpy()

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The accuracy on the graphs; ``y`` None takes the labels of ``X``.

        Of several labels per graph it is the share of graphs where all are right, as in all of scikit-learn.
        """
        graphs = self._graphs(X, with_labels=y is None)
        return super().score(graphs, _labels_of(graphs.y if y is None else y, self), sample_weight)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _check_arguments(self, graphs: Graphs) -> None:
        """Check the arguments that neither the model nor ``training.fit`` checks."""
        if check.number("validation_fraction", self.validation_fraction, 0) >= 1:
            raise ValueError(f"validation_fraction must be in [0, 1), got {self.validation_fraction}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ValueError(f"device must be one that torch has here, or None, got {self.device!r}") from error
        operator = check.operators(self.operator)
        if self.search is not None:
            self._check_search(graphs)
        elif self.ensemble != 0:
            raise ValueError(f"ensemble must be 0 without search, got {self.ensemble!r}")
        if isinstance(graphs, GraphBatch):
            return
        if self.degree is not None or self.one_hot is not False or self.standardize is True:
            name = "standardize" if self.one_hot is False else "one_hot"
            name = name if self.degree is None else "degree"
            raise ValueError(
                f"{name} must be left out where X is PowerFeatures, which have the powers already: prepare the graphs "
                "by NodeFeatures before"
            )
        if (graphs.num_hops, graphs.operator) != (self.num_hops, operator):
            raise ValueError(
                f"X must have {self.num_hops} hops of {operator!r} as the estimator's num_hops and operator say, "
                f"got {graphs.num_hops} of {graphs.operator!r}"
            )

    def _metric(self, num_classes: int, multilabel: bool) -> training.Metric:
        metric = METRICS.get(self.metric) if isinstance(self.metric, str) else self.metric
        if not callable(metric):
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, or a function, got {self.metric!r}")
        if self.metric in ("rocauc", "ap") and num_classes != 2 and not multilabel:
            raise ValueError(f"metric must not be {self.metric!r}, which is of two classes, where y has {num_classes}")
        return metric

    def _check_search(self, graphs: Graphs) -> None:
        if not isinstance(graphs, GraphBatch):
            raise TypeError(
                "X must be graphs with search, whose settings have features of their own, got PowerFeatures"
            )
        if isinstance(self.search, (int, np.integer)):
            check.integer("search", self.search, 1)
        elif not self.search or not all(hasattr(of, "train") for of in self.search):
            raise TypeError(f"search must be a number or settings such as Recipe, at least one, got {self.search!r}")
        for name, default in (("class_weight", None), ("device", None)):
            if getattr(self, name) is not default:
                raise ValueError(f"{name} must be {default} with search, got {getattr(self, name)!r}")
        if self.validation_fraction == 0:
            raise ValueError("validation_fraction must be above 0 with search, which selects by the graphs held out")

    def _class_weight(self, classes: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> Any:
        """Return ``class_weight`` for ``training.fit``, from labels and sample weights of the training graphs."""
        if self.class_weight is None:
            return None
        if y.ndim == 2:
            if self.class_weight != "balanced":
                raise ValueError(
                    f"class_weight must be None or 'balanced' for several labels per graph, got {self.class_weight!r}"
                )
            if weight is None:
                return "balanced"
            positive, negative = weight @ (y == 1), weight @ (y == 0)
            return np.divide(negative, positive, out=np.ones(y.shape[1]), where=(positive > 0) & (negative > 0))
        if not isinstance(self.class_weight, str):
            return compute_class_weight(self.class_weight, classes=classes, y=y)
        occur, weights = np.isin(classes, y), np.ones(len(classes))  # not all do, where sample weights are 0
        weights[occur] = compute_class_weight(self.class_weight, classes=classes[occur], y=y, sample_weight=weight)
        return weights

    def _split(
        self, y: np.ndarray, weight: np.ndarray | None, random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Split into training and validation graphs, without those of weight 0."""
        everything = np.arange(len(y)) if weight is None else np.flatnonzero(weight)
        if self.validation_fraction == 0:
            return everything, everything
        try:
            parts = train_test_split(
                everything,
                test_size=self.validation_fraction,
                stratify=y[everything] if y.ndim == 1 else None,
                random_state=random,
            )
        except ValueError as error:
            raise ValueError(
                f"validation_fraction must let fit hold out graphs of every class, got {self.validation_fraction} of "
                f"n_samples={len(everything)}: {error} Take another, or 0 to hold out none."
            ) from error
        return np.sort(parts[0]), np.sort(parts[1])

    def _features(self, recipe: Recipe, graphs: Graphs, train: np.ndarray) -> PowerFeatures:
        if self.device is not None:
            graphs = graphs.to(self.device)
        if isinstance(graphs, PowerFeatures):
            return graphs
        return recipe.features(graphs, train, progress=bool(self.verbose))

    def _search(
        self,
        graphs: GraphBatch,
        codes: np.ndarray,
        train: np.ndarray,
        validation: np.ndarray,
        metric: training.Metric,
        seed: int,
    ) -> GraphModel:
        """Return the best of many models, or the ensemble of the best."""
        y = torch.from_numpy(codes).to(graphs.x.device)
        graphs = replace(graphs, y=y.to(graphs.x.dtype) if y.dim() == 2 else y)
        with warnings.catch_warnings():
            if self.validation_fraction == 0:  # as was asked for
                warnings.filterwarnings("ignore", _SHARED, UserWarning)
            data = TrainingSet.of(graphs, torch.from_numpy(train), torch.from_numpy(validation), metric)
        settings = (
            spaces.candidates(int(self.search), seed=seed)
            if isinstance(self.search, (int, np.integer))
            else [*(self.search or [])]
        )
        budgets = spaces.budgets(settings)
        check_ensemble(self.ensemble, len(settings), len(budgets))
        total = spaces.search_epochs(settings, budgets)
        with progress_bar("epochs", total, bool(self.verbose)) as advance, _threads(1):
            found = search(
                data,
                settings,
                budgets=budgets,
                seed=seed,
                n_jobs=effective_n_jobs(self.n_jobs),
                on_trial=lambda trial: advance("", spaces.epochs_of(trial.settings, trial.budget)),
            )
        model = found.model(self.ensemble)
        self.trials_ = found.table()
        if found.interrupted:
            warnings.warn("Search interrupted by user.", stacklevel=3)
        return model

    def _keep(self, model: GraphModel, graphs: Graphs, classes: np.ndarray, multilabel: bool) -> SPINClassifier:
        self.model_: Any = model
        self.node_features_ = model.node_features
        self.classes_, self.n_features_in_, self._multilabel = classes, graphs.num_features, multilabel
        self._dtype = graphs.x.dtype if isinstance(graphs, GraphBatch) else graphs.rows.dtype
        return self

    def _num_features_of(self, graphs: Graphs) -> int:
        """The features that a node must have, which depends on what has transformed the graphs already."""
        if (made := self.node_features_) is None:
            return self.n_features_in_
        if are_alike(made, graphs.node_features):
            return made.num_columns
        return made.num_inputs if graphs.node_features is None else graphs.num_features

    def _scores(self, X: Any) -> Tensor:
        """Class scores ``[G, C]`` on the CPU."""
        check_is_fitted(self)
        graphs = self._graphs(X)
        self._check_features(graphs, self._num_features_of(graphs))
        graphs = graphs.to(next(self.model_.parameters()).device)
        if hasattr(self, "trials_") and isinstance(graphs, PowerFeatures):
            raise TypeError("X must be graphs where search has chosen the model, got PowerFeatures")
        with _threads(self.n_jobs), torch.inference_mode():
            if isinstance(graphs, GraphBatch):
                if graphs.x.dtype != self._dtype:
                    raise TypeError(
                        f"X must be {self._dtype} as in fit, got {graphs.x.dtype}: "
                        f"GraphBatch.from_pyg and its kin take dtype={self._dtype}"
                    )
                scores = torch.cat(list(training.predict_chunks(self.model_, graphs))).cpu()
            elif not are_alike(self.node_features_, graphs.node_features):
                wanted = "X must be a GraphBatch, or PowerFeatures of one that node_features_ has transformed"
                raise ValueError(f"{wanted}, got PowerFeatures of graphs prepared by {prepared_by(graphs)}")
            else:
                scores = training.predict(self.model_, graphs).cpu()
        if len(wrong := training.not_finite(scores)):
            raise ValueError(
                f"X has {len(wrong)} graph(s) whose scores are not finite, the first is {int(wrong[0])}; look for node "
                "features that are too large"
            )
        return scores


def _labels_of(y: Any, estimator: BaseEstimator) -> np.ndarray:
    """Return labels ``[G]``, or ``[G, T]`` of 0 and 1, as an array; the estimator is named in errors."""
    if y is None:
        raise ValueError(
            f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None "
            "and X has no labels."
        )
    y = y.cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 2 and y.shape[1] != 1:
        y = check_array(y, dtype=None, input_name="y")
        if not np.isin(y, (0, 1)).all():
            raise ValueError("y must be one label per graph, or 0 and 1 for each of several, got other values")
        return y.astype(np.int64)
    y = column_or_1d(y, warn=True)
    missing = ("None", "nan", "<NA>")  # the last is of pandas
    if y.dtype == object and any(not isinstance(label, str) and str(label) in missing for label in y):
        raise ValueError("Input y contains None or NaN: each graph must have a label")
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    return y


def _labelled(features: PowerFeatures, y: Tensor) -> PowerFeatures:
    """The features with other labels, ``[G]`` or ``[G, T]``, of the selected graphs."""
    labels = y = y.to(features.rows.device)
    if features.ids is not None:
        labels = y.new_zeros(features.node_ptr.numel() - 1, *y.shape[1:])
        labels[features.ids] = y
        if not torch.equal(labels[features.ids], y):  # a graph is selected twice, with two labels
            features, labels = features.take(), y
    labelled = copy.copy(features)  # not a new object: its contents are checked already, its joint rows found
    object.__setattr__(labelled, "labels", labels)
    return labelled


@contextmanager
def _threads(n_jobs: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(effective_n_jobs(n_jobs), os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shares(codes: np.ndarray, class_weight: Any, sample_weight: np.ndarray | None) -> np.ndarray | None:
    """The weight of each graph in the accuracy; None if all weigh the same."""
    if class_weight is None or codes.ndim == 2:
        return sample_weight
    return class_weight[codes] * (1 if sample_weight is None else sample_weight)


def _weighted_accuracy(shares: np.ndarray) -> training.Metric:
    """The weighted accuracy: the epoch is then chosen by the weights that the loss has."""

    def accuracy(logits: Tensor, y: Tensor) -> float:
        right = ((logits > 0) == (y > 0.5)).double().mean(1) if y.is_floating_point() else logits.argmax(1) == y
        return float(np.average(right.cpu().numpy(), weights=shares))

    return accuracy
