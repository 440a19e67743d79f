"""SPINClassifier among scikit-learn's own tools, and its checks of estimators."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import networkx
import numpy as np
import pandas
import pytest
import torch
from helpers import random_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import VotingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils import _safe_indexing
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_dense_data, parametrize_with_checks
from sklearn.utils.validation import check_array

from spin_fast import SPIN, GraphBatch, NodeFeatures, PowerFeatures, training
from spin_fast.nn import Ensemble
from spin_fast.selection import Recipe, SubtreeRecipe
from spin_fast.sklearn import NodeFeaturesTransformer, SPINClassifier, SubtreeCounts
from spin_fast.training.losses import class_weights

NAMES = np.array(["ring", "path", "star"])


class TakesRows:
    """Takes arrays, as the checks of scikit-learn want: a row is a graph of one node."""

    def _graphs(self, X: Any, with_labels: bool = False) -> GraphBatch:
        if isinstance(X, GraphBatch):
            return X
        x = torch.tensor(check_array(X, dtype=np.float64, ensure_all_finite=False))
        ptr = torch.arange(len(x) + 1)
        return GraphBatch(ptr, indptr=torch.zeros_like(ptr), indices=ptr[:0], x=x)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.two_d_array = True
        return tags


class RowClassifier(TakesRows, SPINClassifier):
    pass


class RowTransformer(TakesRows, NodeFeaturesTransformer):
    """Returns arrays, too."""

    def transform(self, X: Any) -> Any:
        return super().transform(X).x.numpy()

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        return super().fit_transform(X, y).x.numpy()


class RowCounts(TakesRows, SubtreeCounts):
    pass


SMALL = {"hidden_features": 8, "num_layers": 2, "classifier_features": (8,), "epochs": 12, "random_state": 0}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        RowClassifier(num_hops=0, learning_rate=0.02, validation_fraction=0, **SMALL),
        RowTransformer("log"),
        RowCounts(1, n_features=64),
    ],
    expected_failed_checks=lambda _: {"check_sample_weight_equivalence_on_dense_data": "see the test of it"},
)
def test_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def test_sample_weights_are_repetitions() -> None:
    """Where nothing counts graphs but the loss: not their batches, nor what is fitted to their features before."""
    options = {"batch_size": 1000, "calibrate": False, "standardize": False, "validation_fraction": 0}
    for more in ({}, {"class_weight": "balanced"}, {"batch_norm": False, "readout": "attention"}):
        estimator = RowClassifier(num_hops=0, learning_rate=0.02, **options, **SMALL).set_params(**more)
        check_sample_weight_equivalence_on_dense_data("RowClassifier", estimator)


@pytest.fixture(scope="module")
def graphs() -> GraphBatch:
    """Sixty rings, paths and stars of 4 to 12 nodes, with the degree as feature; labels 0, 1, 2."""
    rng = np.random.default_rng(0)
    kinds = (networkx.cycle_graph, networkx.path_graph, lambda n: networkx.star_graph(n - 1))
    made = [kinds[graph % 3](int(rng.integers(4, 13))) for graph in range(60)]
    return GraphBatch.from_networkx(made, y=[graph % 3 for graph in range(60)])


@pytest.fixture(scope="module")
def features(graphs: GraphBatch) -> PowerFeatures:
    return PowerFeatures.from_graphs(graphs, 2)


@pytest.fixture
def classifier() -> SPINClassifier:
    return SPINClassifier(num_hops=2, branches="hops", **{**SMALL, "epochs": 30})


@settings(max_examples=20)
@given(key=st.lists(st.integers(-60, 59), max_size=8) | st.lists(st.booleans(), min_size=60, max_size=60))
def test_scikit_learn_selects_by_ids(graphs: GraphBatch, features: PowerFeatures, key: list[int] | list[bool]) -> None:
    ids = np.array(key, dtype=np.int64 if len(key) < 60 else bool)
    chosen, rows = _safe_indexing(graphs, ids), _safe_indexing(features, ids)
    assert isinstance(chosen, GraphBatch)
    assert torch.equal(chosen.x, graphs[ids].x)
    assert torch.equal(chosen.y, graphs[ids].y)
    assert isinstance(rows, PowerFeatures)
    assert rows.rows is features.rows
    assert torch.equal(rows.ids, features[ids].ids)


def test_graphs_are_no_arrays(graphs: GraphBatch, features: PowerFeatures) -> None:
    assert graphs.shape == features.shape == (60,)
    for value in (graphs, features):
        with pytest.raises(TypeError, match="array"):
            np.asarray(value)


def test_methods_agree(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    y = NAMES[graphs.y]
    assert classifier.fit(graphs, y) is classifier
    assert classifier.classes_.tolist() == sorted(NAMES)
    probabilities, scores = classifier.predict_proba(graphs), classifier.decision_function(graphs)
    assert probabilities.shape == scores.shape == (60, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(classifier.predict_log_proba(graphs), np.log(probabilities), rtol=1e-5, atol=1e-6)
    predicted = classifier.predict(graphs)
    assert (predicted == classifier.classes_[scores.argmax(1)]).all()
    assert classifier.score(graphs, y) == (predicted == y).mean() > 0.8
    assert classifier.n_features_in_ == 1
    assert classifier.n_iter_ == len(classifier.history_) > classifier.best_epoch_
    assert classifier.predict_proba(graphs[:0]).shape == (0, 3)
    two = graphs[graphs.y < 2]
    margin = classifier.fit(two).decision_function(two)
    assert margin.shape == (40,)
    np.testing.assert_allclose(1 / (1 + np.exp(-margin)), classifier.predict_proba(two)[:, 1], atol=1e-6)


def test_training_is_that_of_fit(graphs: GraphBatch, features: PowerFeatures, classifier: SPINClassifier) -> None:
    classifier.set_params(validation_fraction=0.2, readout="attention").fit(features)
    random = np.random.RandomState(0)
    train, validation = train_test_split(np.arange(60), test_size=0.2, stratify=graphs.y, random_state=random)
    seed = random.randint(2**31 - 1)
    torch.manual_seed(seed)
    model = SPIN(1, 8, 3, 2, num_layers=2, classifier_features=(8,))
    model.calibrate(features[np.sort(train)])
    fit = training.fit(model, features, np.sort(train), np.sort(validation), epochs=30, patience=60, seed=seed)
    assert [epoch.loss for epoch in fit.epochs] == [epoch.loss for epoch in classifier.history_]
    expected = training.predict(model, features).softmax(1).numpy()
    assert np.array_equal(classifier.predict_proba(features), expected)


def test_all_kinds_of_graphs(graphs: GraphBatch, features: PowerFeatures, classifier: SPINClassifier) -> None:
    y = NAMES[graphs.y]
    pyg, nx = graphs.to_pyg(), graphs.to_networkx(x=None, undirected=True)
    expected = classifier.fit(graphs, y).predict_proba(graphs)
    objects = np.empty(60, dtype=object)
    objects[:] = nx
    for X in (features, pyg, nx, objects, list(graphs), list(features)):
        made = clone(classifier).fit(X, y)
        np.testing.assert_allclose(made.predict_proba(X), expected, atol=1e-4)
        assert made.score(X, y) == classifier.score(graphs, y)
    assert clone(classifier).fit(pyg).classes_.tolist() == [0, 1, 2]
    assert clone(classifier).fit(pyg).score(pyg) == classifier.score(graphs, y)
    unlabelled = [data.__class__(x=data.x, edge_index=data.edge_index) for data in pyg]
    assert (classifier.predict(unlabelled) == classifier.predict(graphs)).all()
    for data in pyg:
        data.num_nodes = data.num_nodes
        del data.x
    assert clone(classifier).fit(pyg, y).score(pyg, y) == classifier.score(graphs, y)  # the degree, as x is


def test_attributes_of_networkx_are_not_left_out_unsaid(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    measured = graphs.to_networkx(x="size", undirected=True)
    with pytest.warns(UserWarning, match=r"X has attributes that are not read, 'size': give GraphBatch.from_networkx"):
        clone(classifier).fit(measured, NAMES[graphs.y])


def test_search_computes_no_powers_again(
    features: PowerFeatures, classifier: SPINClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PowerFeatures, "from_graphs", None)
    X, test, y, y_test = train_test_split(features, NAMES[features.y], stratify=features.y, random_state=0)
    assert X.rows is features.rows
    search = GridSearchCV(classifier, {"readout": ["sum", "attention"], "hidden_features": [4, 8]}, cv=2)
    search.fit(X, y)
    assert search.best_estimator_.score(test, y_test) == search.score(test, y_test) > 0.5
    assert not any(np.isnan(search.cv_results_["mean_test_score"]))


def test_searches_in_threads_give_the_same(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    """Torch's random state belongs to all threads."""
    classifier.set_params(dropout=0.2, epochs=5)
    alone = cross_val_predict(classifier, graphs, graphs.y, method="predict_proba", cv=4)
    with joblib.parallel_config("threading", n_jobs=4):
        assert np.array_equal(cross_val_predict(classifier, graphs, graphs.y, method="predict_proba", cv=4), alone)


def test_meta_estimators(graphs: GraphBatch, features: PowerFeatures, classifier: SPINClassifier) -> None:
    y, classifier = NAMES[graphs.y], classifier.set_params(epochs=3)
    calibrated = CalibratedClassifierCV(classifier, cv=2).fit(features, y)
    voting = VotingClassifier([("a", classifier), ("b", clone(classifier).set_params(readout="attention"))])
    voted = voting.set_params(voting="soft").fit(features, y).predict_proba(features)
    assert calibrated.predict_proba(features).shape == voted.shape == (60, 3)
    assert make_pipeline("passthrough", classifier).fit(graphs, y).score(graphs, y) == classifier.fit(graphs, y).score(
        graphs, y
    )
    assert cross_val_predict(classifier, graphs, y, cv=2, method="predict_proba").shape == (60, 3)


def test_reproducible_and_leaves_torch_alone(
    graphs: GraphBatch, features: PowerFeatures, classifier: SPINClassifier, threads: None
) -> None:
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    one = classifier.set_params(batch_norm=True, dropout=0.1, epochs=2).fit(features).predict_proba(features)
    torch.rand(1)
    other = clone(classifier).set_params(n_jobs=2).fit(features).predict_proba(features)
    assert np.array_equal(one, other)
    torch.set_rng_state(before)
    classifier.set_params(random_state=np.random.RandomState(1)).fit(graphs)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("backend", [pytest.param("loky", marks=pytest.mark.slow), "multiprocessing", "threading"])
def test_fits_in_workers(backend: str, threads: None) -> None:
    """Where processes are forked, torch's threads are not there any more, and nothing waits for them."""
    graphs = random_graphs([50] * 40, 0.1, 40, dtype=torch.float32)
    graphs = replace(graphs, y=torch.arange(40) % 2)
    classifier = SPINClassifier(**SMALL | {"epochs": 2}, num_hops=1, dropout=0.1, batch_norm=True)
    expected = cross_val_predict(classifier, graphs, graphs.y.numpy(), cv=2, method="predict_proba")
    torch.set_num_threads(2)
    (graphs.x @ graphs.x.T).sum()  # starts them
    with joblib.parallel_config(backend, n_jobs=2):
        found = cross_val_predict(classifier, graphs, graphs.y.numpy(), cv=2, method="predict_proba")
    assert np.array_equal(found, expected)


def test_features_that_were_prepared(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    """The model knows by what, so that it takes graphs as they were."""
    made = NodeFeatures(standardize=True).fit(graphs)
    prepared = PowerFeatures.from_graphs(made.transform(graphs), 2)
    classifier.fit(prepared, graphs.y)
    assert classifier.node_features_.to_dict() == made.to_dict()
    np.testing.assert_allclose(classifier.predict_proba(graphs), classifier.predict_proba(prepared), rtol=1e-4)


@pytest.mark.parametrize("degree", [None, "log"])
@pytest.mark.parametrize("options", [{}, {"standardize": False}, {"degree": "log"}])
def test_a_model_of_transformed_graphs_takes_them_as_they_were(
    graphs: GraphBatch, classifier: SPINClassifier, options: dict[str, Any], degree: Any, tmp_path: Path
) -> None:
    scaled = replace(graphs, x=1000 + 0.5 * graphs.x)
    pipeline = make_pipeline(NodeFeaturesTransformer(degree), classifier.set_params(**options)).fit(scaled, graphs.y)
    made = pipeline[0].node_features_.transform(scaled)
    expected = pipeline.predict_proba(scaled)
    training.save_checkpoint(tmp_path / "model.safetensors", pipeline[-1].model_)
    model, _ = training.load_checkpoint(tmp_path / "model.safetensors")
    for at in (scaled, made, model.node_features.transform(made)):
        np.testing.assert_allclose(training.predict_proba(model, at), expected, rtol=1e-5)
        assert np.array_equal(pipeline[-1].predict_proba(at), expected)
    powers = PowerFeatures.from_graphs(model.node_features.transform(scaled), 2)
    np.testing.assert_allclose(pipeline[-1].predict_proba(powers), expected, rtol=1e-5)
    other = NodeFeatures(degree, standardize=True).fit(scaled, [0, 1]).transform(scaled)
    with pytest.raises(ValueError, match="were fitted on, which nothing had transformed, got graphs prepared by"):
        pipeline[-1].predict(other)


def test_pickle(features: PowerFeatures, classifier: SPINClassifier) -> None:
    data = pickle.dumps(classifier.fit(features))
    assert len(data) < 8000 + 2 * sum(parameter.nbytes for parameter in classifier.model_.parameters())
    assert np.array_equal(pickle.loads(data).predict_proba(features), classifier.predict_proba(features))
    assert "SPINClassifier" in classifier._repr_html_()
    with pytest.raises(NotFittedError):
        clone(pickle.loads(data)).predict(features)


def test_node_features_are_those_of_the_training_graphs(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    """As if made by hand, and the same for graphs to predict; powers made beforehand are taken as they are."""
    scaled = replace(graphs, x=torch.cat([1000 + 0.5 * graphs.x, graphs.x], dim=1))
    train, _ = train_test_split(np.arange(60), test_size=0.1, stratify=graphs.y, random_state=np.random.RandomState(0))
    by_hand = NodeFeatures("log").fit(scaled, np.sort(train))
    plain, made = clone(classifier).set_params(standardize=False), by_hand.transform(scaled)
    expected = plain.fit(made).predict_proba(made[:7])
    classifier.set_params(degree="log").fit(scaled)
    assert classifier.node_features_.to_dict() == by_hand.to_dict()
    assert np.array_equal(classifier.predict_proba(scaled[:7]), expected)
    assert (classifier.n_features_in_, classifier.model_.config["in_features"]) == (2, 3)
    rows = PowerFeatures.from_graphs(scaled, 2)
    told = (
        "or PowerFeatures of one that node_features_ has transformed, got PowerFeatures of graphs prepared by no Node"
    )
    with pytest.raises(ValueError, match=f"X must be a GraphBatch, {told}Features"):
        classifier.set_params(degree=None).fit(scaled).predict(rows)
    assert clone(classifier).fit(rows).node_features_ is None
    for parameters in ({"degree": "log"}, {"standardize": True}):
        with pytest.raises(ValueError, match=f"{next(iter(parameters))} must be left out where X is PowerFeatures"):
            clone(classifier).set_params(**parameters).fit(rows)


@pytest.mark.filterwarnings("error")
def test_node_features_in_a_pipeline(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    """Fitted on the training graphs of each fold, searched, cloned, and the same as by hand."""
    y = NAMES[graphs.y]
    scaled = replace(graphs, x=torch.cat([1000 + 0.5 * graphs.x, graphs.x], dim=1))
    classifier.set_params(epochs=8)
    pipeline = Pipeline([("features", NodeFeaturesTransformer("log", columns=[0])), ("spin", classifier)])
    pipeline.set_params(spin__standardize=False)
    made = NodeFeatures("log", columns=[0]).fit(scaled)
    expected = clone(pipeline[-1]).fit(made.transform(scaled), y).predict_proba(made.transform(scaled))
    assert np.array_equal(pipeline.fit(scaled, y).predict_proba(scaled), expected)
    assert pipeline[0].node_features_.to_dict() == made.to_dict()
    assert (pipeline.n_features_in_, pipeline[-1].n_features_in_) == (2, 3)
    assert clone(pipeline).get_params()["features__columns"] == [0]
    assert np.array_equal(pickle.loads(pickle.dumps(pipeline)).predict_proba(scaled), expected)
    again = clone(pipeline).set_params(spin__standardize="auto").fit(scaled)  # standardised twice
    assert again.score(scaled) > 0.5
    search = GridSearchCV(pipeline, {"features__degree": ["log", "one-hot", None], "features__columns": [None]}, cv=2)
    assert search.fit(scaled, y).score(scaled, y) > 0.5
    assert not any(np.isnan(search.cv_results_["mean_test_score"]))
    assert "NodeFeaturesTransformer" in pipeline._repr_html_()


def test_a_pipeline_takes_lists_of_graphs(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    pipeline = make_pipeline(NodeFeaturesTransformer("log", keep_x=True), classifier.set_params(epochs=3))
    expected = clone(pipeline).fit(graphs).predict_proba(graphs)
    for X, y in (
        (graphs.to_pyg(), None),
        (graphs.to_networkx(undirected=True), graphs.y.numpy()),
        (list(graphs), None),
    ):
        made = clone(pipeline).fit(X, y)
        np.testing.assert_allclose(made.predict_proba(X), expected, atol=1e-4)
        assert made.score(X, graphs.y.numpy()) > 0.3
        assert made[0].fit_transform(X, y).num_features == made[0].transform(X).num_features == 2


def test_wrong_data_of_the_transformer(graphs: GraphBatch, features: PowerFeatures) -> None:
    transformer = NodeFeaturesTransformer("log")
    with pytest.raises(NotFittedError):
        transformer.transform(graphs)
    with pytest.raises(TypeError, match="X must be graphs, of which no powers are computed yet, got PowerFeatures"):
        transformer.fit(features)
    with pytest.raises(ValueError, match="degree must be one of raw, log, one-hot, profile or None, got 'cubic'"):
        clone(transformer).set_params(degree="cubic").fit(graphs)
    wide = replace(graphs, x=graphs.x.expand(-1, 2))
    with pytest.raises(ValueError, match="X has 2 features, but NodeFeaturesTransformer is expecting 1 features"):
        transformer.fit(graphs).transform(wide)


@pytest.mark.parametrize(("value", "name"), [(torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity")])
def test_what_is_not_finite_is_named(graphs: GraphBatch, classifier: SPINClassifier, value: float, name: str) -> None:
    """In features and in edge weights, when fitting and after."""

    def spoilt(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[3] = value
        return tensor

    weights = torch.ones(graphs.num_edges)
    for part, wrong in (
        ("features", replace(graphs, x=spoilt(graphs.x))),
        ("edge weights", replace(graphs, edge_weight=spoilt(weights))),
    ):
        for estimator in (clone(classifier).set_params(epochs=1), NodeFeaturesTransformer("log"), SubtreeCounts()):
            message = f"Input X contains {name}: {part} must be finite"
            with pytest.raises(ValueError, match=message):
                estimator.fit(wrong, graphs.y.numpy())
            estimator.fit(graphs, graphs.y.numpy())
            apply = estimator.predict if isinstance(estimator, SPINClassifier) else estimator.transform
            with pytest.raises(ValueError, match=message):
                apply(wrong)


def test_operators_side_by_side(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    probabilities = classifier.set_params(operator=("sym", "adj")).fit(graphs).predict_proba(graphs)
    features = PowerFeatures.from_graphs(graphs, 2, "sym,adj")
    np.testing.assert_allclose(clone(classifier).fit(features).predict_proba(features), probabilities, atol=1e-4)
    with pytest.raises(ValueError, match="must have 2 hops of 'sym'"):
        classifier.set_params(operator="sym").fit(features)


@pytest.mark.parametrize("metric", ["rocauc", "ap"])
def test_the_metric_chooses_the_epoch(graphs: GraphBatch, classifier: SPINClassifier, metric: str) -> None:
    is_star = (graphs.y == 2).long()
    classifier.set_params(validation_fraction=0, metric=metric, epochs=12).fit(graphs, is_star)
    scores = training.predict_proba(classifier.model_, graphs).log()
    kept = classifier.history_[classifier.best_epoch_]
    assert kept.validation == max(epoch.validation for epoch in classifier.history_)
    assert getattr(training, metric)(scores, is_star) == pytest.approx(kept.validation)
    tasks = np.stack([is_star, graphs.y == 1], 1)
    kept = classifier.fit(graphs, tasks).history_[classifier.best_epoch_]
    scores = training.predict_proba(classifier.model_, graphs).logit()
    assert getattr(training, metric)(scores, torch.from_numpy(tasks).float()) == pytest.approx(kept.validation)
    with pytest.raises(ValueError, match=f"metric must not be '{metric}', which is of two classes, where y has 3"):
        clone(classifier).fit(graphs)


def test_a_metric_of_ones_own(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    classifier.set_params(metric=lambda scores, y: scores.shape[1] / 8, epochs=2).fit(graphs)
    assert [epoch.validation for epoch in classifier.history_] == [0.375, 0.375]
    classifier.set_params(search=[Recipe(num_hops=1, epochs=2)]).fit(graphs)
    assert [trial["validation"] for trial in classifier.trials_] == [0.375]
    for wrong in ("auc", None, 3):
        with pytest.raises(ValueError, match="metric must be one of accuracy, rocauc, ap, or a function, got"):
            clone(classifier).set_params(metric=wrong).fit(graphs)


def test_class_weight(features: PowerFeatures, classifier: SPINClassifier) -> None:
    """A class with all the weight is all that is predicted; balanced weights are those of scikit-learn."""
    y = NAMES[features.y]
    classifier.set_params(class_weight={"path": 0.0, "star": 0.0}).fit(features, y)
    assert set(classifier.predict(features)) == {"ring"}
    assert classifier.history_[classifier.best_epoch_].validation == 1
    uneven = features[[0, 3, 6, 9, 1]]
    losses = [
        classifier.set_params(validation_fraction=0, class_weight=weight).fit(uneven).history_[0].loss
        for weight in ("balanced", {0: 5 / 8, 1: 5 / 2}, None)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("class_weight", [None, "balanced"])
def test_graphs_without_weight_are_as_if_they_were_not_there(
    graphs: GraphBatch, classifier: SPINClassifier, class_weight: str | None
) -> None:
    y, weight = NAMES[graphs.y], np.random.default_rng(0).integers(0, 2, 60) * 3.0
    classifier.set_params(epochs=5, class_weight=class_weight, validation_fraction=0.2)
    expected = clone(classifier).fit(graphs[weight > 0], y[weight > 0])
    made = classifier.fit(graphs, y, sample_weight=weight)
    np.testing.assert_allclose(made.predict_proba(graphs), expected.predict_proba(graphs), atol=1e-4)
    assert made.history_[-1].validation == pytest.approx(expected.history_[-1].validation)
    with pytest.raises(ValueError, match=r"got 0\.2 of n_samples=2"):
        classifier.fit(graphs, y, sample_weight=np.arange(60) < 2)
    # a class may have no weight at all
    assert set(classifier.set_params(epochs=20).fit(graphs, y, y != "star").predict(graphs)) == {"path", "ring"}
    assert classifier.classes_.tolist() == ["path", "ring", "star"]


@pytest.mark.parametrize("scale", [1e-46, 1e-40, 1e38])
def test_weights_of_any_scale(features: PowerFeatures, classifier: SPINClassifier, scale: float) -> None:
    weight = np.random.default_rng(0).uniform(1, 2, 60)
    logs = [clone(classifier).set_params(epochs=2).fit(features, None, times * weight).history_ for times in (1, scale)]
    assert [epoch.loss for epoch in logs[1]] == pytest.approx([epoch.loss for epoch in logs[0]])
    assert [epoch.validation for epoch in logs[1]] == pytest.approx([epoch.validation for epoch in logs[0]])


@pytest.mark.parametrize("several", [False, True])
def test_weights_decide_where_labels_differ(features: PowerFeatures, classifier: SPINClassifier, several: bool) -> None:
    """Every graph is there with both labels, one of three times the weight of the other."""
    twice, y, weight = features[np.repeat(np.arange(60), 2)], np.tile([0, 1], 60), np.tile([1, 3], 60)
    y = np.stack([y, 1 - y], axis=1) if several else NAMES[y]
    classifier.set_params(validation_fraction=0).fit(twice, y, sample_weight=weight)
    expected = [0.75, 0.25] if several else [0.75, 0.25][:: 1 if NAMES[1] < NAMES[0] else -1]
    np.testing.assert_allclose(classifier.predict_proba(features), np.tile(expected, (60, 1)), atol=0.1)
    assert classifier.history_[classifier.best_epoch_].validation == pytest.approx(0.75)


@pytest.mark.parametrize("kind", ["graphs", "features", "selection", "labels of X"])
def test_several_labels_per_graph(
    graphs: GraphBatch, features: PowerFeatures, classifier: SPINClassifier, kind: str
) -> None:
    y = np.stack([graphs.y == 0, graphs.num_nodes_per_graph > 8], axis=1).astype(int)
    X: Any = graphs if kind == "graphs" else features
    if kind == "selection":
        ids = np.random.default_rng(0).permutation(60)
        X, y = features[ids], y[ids]
    given = None if kind == "labels of X" else y
    X = X if given is not None else replace(features, labels=torch.tensor(y).float())
    classifier.set_params(epochs=60, learning_rate=0.02, batch_size=16).fit(X, given)
    assert (classifier.classes_.tolist(), classifier.model_.config["out_features"]) == ([0, 1], 2)
    scores, probabilities, predicted = (
        method(X) for method in (classifier.decision_function, classifier.predict_proba, classifier.predict)
    )
    assert scores.shape == probabilities.shape == predicted.shape == (60, 2)
    np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-scores)), rtol=1e-5)
    np.testing.assert_allclose(classifier.predict_log_proba(X), np.log(probabilities), rtol=1e-4, atol=1e-6)
    assert predicted.dtype.kind == "i"
    assert np.array_equal(predicted, scores > 0)
    assert classifier.score(X, given) == (predicted == y).all(1).mean() > 0.7
    assert classifier.history_[classifier.best_epoch_].validation > 0.7


def test_several_labels_in_scikit_learns_tools(features: PowerFeatures, classifier: SPINClassifier) -> None:
    y = np.stack([features.y == 0, features.y != 1], axis=1)
    classifier.set_params(epochs=3)
    search = GridSearchCV(classifier, {"class_weight": [None, "balanced"]}, cv=2, scoring="roc_auc").fit(features, y)
    assert not any(np.isnan(search.cv_results_["mean_test_score"]))
    with pytest.raises(ValueError, match="class_weight must be None or 'balanced' for several labels per graph"):
        classifier.set_params(class_weight={0: 1, 1: 2}).fit(features, y)


def test_features_of_a_file(tmp_path: Path, features: PowerFeatures, classifier: SPINClassifier) -> None:
    features.save(tmp_path / "features.safetensors")
    mapped = PowerFeatures.load(tmp_path / "features.safetensors")
    expected = classifier.fit(features[:45]).predict_proba(features[45:])
    assert np.array_equal(clone(classifier).fit(mapped[:45]).predict_proba(mapped[45:]), expected)


def test_labels_of_a_selection(features: PowerFeatures, classifier: SPINClassifier) -> None:
    """Labels given go with the selection, even where it has a graph twice, and the features keep their own."""
    ids = np.random.default_rng(0).permutation(60)
    before = features.labels.clone()
    by_label = classifier.fit(features[ids], NAMES[features.y[ids]]).predict(features)
    assert (by_label == NAMES[features.y]).mean() > 0.8
    assert torch.equal(features.labels, before)
    twice = features[np.repeat(ids, 2)]
    classifier.set_params(validation_fraction=0).fit(twice, np.tile(["no", "yes"], 60))
    np.testing.assert_allclose(classifier.predict_proba(features), 0.5, atol=0.1)


@pytest.mark.filterwarnings("error")
def test_no_graphs_held_out(graphs: GraphBatch, classifier: SPINClassifier) -> None:
    few = graphs[:3]
    with pytest.raises(ValueError, match=r"validation_fraction must .*every class, got 0.1 of n_samples=3"):
        classifier.fit(few)
    classifier.set_params(validation_fraction=0).fit(few)
    assert classifier.history_[classifier.best_epoch_].validation == classifier.score(few) == 1


def test_interrupted(graphs: GraphBatch, classifier: SPINClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch, losses = training.Trainer.epoch, []

    def interrupted(*args: Any) -> float:
        if len(losses) == 2:
            raise KeyboardInterrupt
        losses.append(epoch(*args))
        return losses[-1]

    monkeypatch.setattr(training.Trainer, "epoch", interrupted)
    with pytest.warns(UserWarning, match="interrupted by user"):
        classifier.fit(graphs)
    assert classifier.n_iter_ == 2
    assert classifier.predict(graphs).shape == (60,)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"readout": "mean"}, ValueError, "readout must be one of attention, sum, got 'mean'"),
    ({"operator": "laplace"}, ValueError, "operator must be one of adj, sym, sym+adj, rw, got 'laplace'"),
    ({"validation_fraction": 1.0}, ValueError, "validation_fraction must be in [0, 1), got 1.0"),
    ({"validation_fraction": "all"}, TypeError, "validation_fraction must be a number, got str"),
    ({"num_hops": 3}, ValueError, "X must have 3 hops of 'sym' as the estimator's num_hops and operator say, got 2"),
    ({"hidden_features": 0}, ValueError, "hidden_features must be at least 1, got 0"),
    ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
    ({"schedule": "never"}, ValueError, "schedule must be one of"),
    ({"device": "gpu"}, ValueError, "device must be one that torch has here, or None, got 'gpu'"),
    ({"class_weight": {7: 1.0}}, ValueError, "The classes, [0, 1, 2], are not in class_weight"),
    ({"class_weight": "even"}, ValueError, "'class_weight' parameter"),
]


@pytest.mark.parametrize(("parameters", "error", "message"), WRONG)
def test_wrong_parameters(
    features: PowerFeatures,
    classifier: SPINClassifier,
    parameters: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    classifier.set_params(**parameters)
    with pytest.raises(error, match=re.escape(message)):
        classifier.fit(features)
    assert not hasattr(classifier, "model_")


def test_wrong_data(graphs: GraphBatch, features: PowerFeatures, classifier: SPINClassifier) -> None:
    def raises(error: type[Exception], message: str, X: Any, y: Any = None) -> None:
        with pytest.raises(error, match=re.escape(message)):
            classifier.fit(X, y)

    nan = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, torch.full_like(graphs.x, torch.nan), graphs.y)
    raises(TypeError, "X must be a GraphBatch, PowerFeatures, or a list of graphs of PyG", np.zeros((3, 2)))
    raises(TypeError, "got a single Graph: wrap it in a list", networkx.path_graph(3))
    raises(TypeError, "got a single Data: wrap it in a list", graphs.to_pyg()[0])
    raises(TypeError, "got an empty list", [])
    raises(TypeError, "got list of str", ["a", "b"])
    raises(ValueError, "Input X contains NaN", nan)
    raises(ValueError, "inconsistent numbers of samples: [60, 59]", graphs, np.zeros(59))
    raises(ValueError, "y must be one label per graph, or 0 and 1 for each", graphs, np.full((60, 2), 3))
    raises(ValueError, "Input y contains NaN", graphs, np.full((60, 2), np.nan))
    raises(ValueError, "Input y contains NaN", graphs, np.full(60, np.nan))
    for missing in (None, np.nan, pandas.NA):
        raises(ValueError, "Input y contains None or NaN", graphs, np.array(["a", missing] * 30, dtype=object))
    raises(ValueError, "Unknown label type: continuous", graphs, np.linspace(0, 1, 60))
    raises(ValueError, "target y is None and X has no labels", graphs.to_networkx())
    for weight, message in ((np.ones(59), "sample_weight.shape == "), (-np.ones(60), "Negative values"), (["a"], "a")):
        with pytest.raises(ValueError, match=message):
            classifier.fit(graphs, graphs.y, sample_weight=weight)

    classifier.fit(graphs)
    wide = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, graphs.x.expand(-1, 2), graphs.y)
    with pytest.raises(ValueError, match="X has 2 features, but SPINClassifier is expecting 1 features as input"):
        classifier.predict(wide)
    with pytest.raises(ValueError, match="features must be of 'sym', which the model was trained with, got 'rw'"):
        classifier.predict(PowerFeatures.from_graphs(graphs, 2, "rw"))
    with pytest.raises(ValueError, match="must have 2 hops"):
        classifier.predict(PowerFeatures.from_graphs(graphs, 1))
    double = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, graphs.x.double(), graphs.y)
    with pytest.raises(TypeError, match=r"X must be torch.float32 as in fit, got torch.float64"):
        classifier.predict(double)
    assert clone(classifier).fit(double).predict_proba(double).dtype == np.float64


@pytest.mark.parametrize("several", [False, True])
def test_search(graphs: GraphBatch, several: bool) -> None:
    y = np.stack([graphs.y == 0, graphs.num_nodes_per_graph > 8], axis=1).astype(int) if several else NAMES[graphs.y]
    small = {"hidden_features": 8, "num_layers": 2, "epochs": 30, "learning_rate": 0.02, "batch_size": 16}
    recipes = [Recipe(num_hops=hops, **small) for hops in (0, 1, 2)]
    recipes += [SubtreeRecipe(num_hops=hops) for hops in (1, 2)]
    options: dict[str, Any] = {"validation_fraction": 0.3, "random_state": 0, "search": recipes}
    best = SPINClassifier(**options).fit(graphs, y)
    assert len(best.trials_) == 5 + 2 + 1
    assert best.trials_[0]["validation"] == max(of["validation"] for of in best.trials_ if of["budget"] is None)
    assert best.score(graphs, y) > 0.7
    both = SPINClassifier(**options | {"search": recipes[1:4:2] * 5, "ensemble": 2, "n_jobs": 2}).fit(graphs, y)
    assert isinstance(both.model_, Ensemble)
    assert both.score(graphs, y) > 0.7
    again = pickle.loads(pickle.dumps(both))
    assert np.array_equal(again.predict_proba(graphs), both.predict_proba(graphs))
    for wrong, message in (
        ({"search": 0}, "search must be at least 1"),
        ({"search": []}, "search must be a number or settings"),
        ({"search": np.int64(0)}, "search must be at least 1"),
        ({"search": None, "ensemble": 2}, "ensemble must be 0 without search, got 2"),
        (
            {"ensemble": 2},
            "ensemble must be at most 1, since the search trains no more of its 5 settings to the end, got 2",
        ),
        ({"validation_fraction": 0}, "validation_fraction must be above 0 with search"),
        ({"class_weight": "balanced"}, "class_weight must be None with search"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            SPINClassifier(**options | wrong).fit(graphs, y)
    with pytest.raises(ValueError, match="sample_weight must be None with search"):
        SPINClassifier(**options).fit(graphs, y, np.ones(60))
    with pytest.raises(TypeError, match="X must be graphs with search"):
        SPINClassifier(**options).fit(PowerFeatures.from_graphs(graphs, 1), y)
    with pytest.raises(TypeError, match="X must be graphs where search"):
        best.predict(PowerFeatures.from_graphs(graphs, 1))
    assert not hasattr(best.set_params(search=None, epochs=1).fit(graphs, y), "trials_")
    assert not hasattr(best.set_params(search=recipes[:1]).fit(graphs, y), "history_")


def test_balanced_weights_of_several_labels_count_graphs_as_their_weights_do() -> None:
    y, weight = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 1], [1, 0, 1]]), np.array([3, 1, 2, 4])
    found = SPINClassifier(class_weight="balanced")._class_weight(np.arange(3), y, weight.astype(float))
    repeated = torch.from_numpy(y.repeat(weight, axis=0)).double()
    np.testing.assert_allclose(found, class_weights("balanced", repeated, 3).numpy())
    assert found[0] == 1.0
