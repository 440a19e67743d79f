"""Search: the ranking, successive halving, spaces, what settings share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from sklearn.model_selection import cross_val_predict

from spin_fast import NodeFeatures, datasets, training
from spin_fast.datasets import Split
from spin_fast.selection import Recipe, SubtreeRecipe, Trained, TrainingSet, evaluate, published, search, spaces
from spin_fast.sklearn import SPINClassifier


@pytest.fixture(scope="module")
def data() -> TrainingSet:
    return TrainingSet.of(datasets.load("digits")[:200], torch.arange(150), torch.arange(150, 200), training.accuracy)


@dataclass
class Learner:
    """Settings that are as good as ``at_best`` after 9 epochs, in proportion before; a negative one diverges."""

    at_best: float
    loss: float = 0.0

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        if self.at_best < 0:
            raise training.Diverged("training diverged")
        epochs = 9 if epochs is None else epochs
        return Trained(self.at_best * epochs / 9, self.loss, epochs, lambda graphs: torch.zeros(len(graphs), 10))


def test_the_best_is_found_by_halving(data: TrainingSet) -> None:
    candidates = [Learner(number / 10) for number in (3, -1, 9, 1, 5, 7, 2)]
    seen = []
    found = search(data, candidates, budgets=(1, 3, None), on_trial=seen.append)
    assert found.trials == seen
    budgets = [trial.budget for trial in found.trials]
    assert [budgets.count(of) for of in (1, 3, None)] == [7, 3, 1]
    assert [trial.settings for trial in found.ranking] == [Learner(0.9)]
    assert [trial.settings.at_best for trial in found.trials if trial.budget == 3] == [0.9, 0.7, 0.5]


def test_models_of_transformed_graphs_take_them_as_they_were() -> None:
    graphs = datasets.load("digits")[:120]
    made = NodeFeatures("one-hot").fit(graphs, range(80)).transform(graphs)
    data = TrainingSet.of(made, torch.arange(80), torch.arange(80, 120), training.accuracy)
    found = search(data, [SubtreeRecipe(num_hops=1), Recipe(num_hops=1, epochs=2)])
    for model in (found.model(), found.ranking[1].trained.model, found.model(2)):
        torch.testing.assert_close(training.predict_proba(model, graphs), training.predict_proba(model, made))
    untransformed = SubtreeRecipe(num_hops=1).fit(replace(data, graphs=graphs, _made={}))
    with pytest.raises(ValueError, match="graphs must be prepared as the training graphs, by no NodeFeatures, got"):
        training.predict_proba(untransformed, NodeFeatures(standardize=True).fit(graphs).transform(graphs))


def test_the_loss_decides_between_equals(data: TrainingSet) -> None:
    candidates = [Learner(0.5, 2.0), Learner(0.5, 1.0), Learner(0.4, 0.0), Learner(float("nan"))]
    ranking = [trial.settings for trial in search(data, candidates).ranking]
    assert ranking[:3] == [candidates[1], candidates[0], candidates[2]]
    nan = [Learner(float("nan"), loss) for loss in (2.0, 1.0)]
    assert search(data, nan).ranking[0].settings is nan[1]


KILLED = """
import os, signal, torch
from spin_fast import datasets, training
from spin_fast.selection import TrainingSet
data = TrainingSet.of(datasets.load("digits")[:9], torch.arange(5), torch.arange(5, 9), training.accuracy)
with data.shared(2) as shared:
    shared.made("ones", lambda: torch.ones(3))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_search_leaves_is_removed(
    data: TrainingSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (own := tmp_path / "spin_fast-notes").mkdir()
    with data.shared(2) as at_work:
        subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
        assert len([*tmp_path.glob("*/*.pt")]) == 1
        with data.shared(2):
            assert [*tmp_path.glob("*/*.pt")] == []
            assert at_work.folder is not None
            assert at_work.folder.is_dir()
            assert at_work.folder.stat().st_mode & 0o777 == 0o700
    assert [*tmp_path.iterdir()] == [own]


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_warnings_come_from_here(data: TrainingSet, n_jobs: int) -> None:
    recipe = Recipe(num_hops=0, hidden_features=4, num_layers=1, epochs=1, batch_size=150)
    task = (torch.arange(200) < 75).float()[:, None]  # 1 of no validation graph
    graphs = replace(data.graphs, y=task)
    data = replace(data, metric=training.rocauc, graphs=graphs, num_outputs=1, _made={})
    with pytest.warns(UserWarning, match="metric rocauc is NaN on the validation graphs"):
        search(data, [recipe], n_jobs=n_jobs)


def test_an_interruption_keeps_what_is_trained(data: TrainingSet) -> None:
    learners, left = [Learner(at_best) for at_best in (-1.0, 0.3, 0.5)], 0

    def on_trial(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    for left, best in ((2, [0.3]), (3, [0.5, 0.3]), (4, [0.5])):
        number = left
        found = search(data, learners, budgets=(1, None), on_trial=on_trial)
        assert found.interrupted
        assert len(found.trials) == number
        assert [trial.settings.at_best for trial in found.ranking] == best
    left = 1
    with pytest.raises(KeyboardInterrupt):  # no model yet
        search(data, learners, on_trial=on_trial)
    left, split = 2, Split(data.train[10:], data.validation, data.train[:10])
    with pytest.raises(KeyboardInterrupt):
        evaluate(data.graphs, [split], learners, on_trial=on_trial)


def test_a_round_in_which_all_diverge_leaves_those_before(data: TrainingSet) -> None:
    class Late(Learner):
        def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
            return super().train(data, seed, epochs) if epochs == 1 else Learner(-1).train(data, seed)

    found = search(data, [Late(0.3), Late(0.5), Late(0.1)], budgets=(1, None))
    assert [trial.settings.at_best for trial in found.ranking] == [0.5, 0.3, 0.1]
    assert not found.interrupted


def test_validation_graphs_that_are_trained_on_are_told(data: TrainingSet) -> None:
    with pytest.warns(UserWarning, match=r"validation has 40 graph\(s\) of train"):
        TrainingSet.of(data.graphs, torch.arange(80), torch.arange(40, 100), training.accuracy)


def test_searches_in_threads_are_the_same(data: TrainingSet) -> None:
    small = {"num_hops": 0, "hidden_features": 4, "num_layers": 1, "epochs": 3}
    recipes = [Recipe(learning_rate=rate, **small) for rate in (1e-2, 1e-3)]
    before = torch.get_rng_state()
    alone = [trial.score for trial in search(data, recipes).trials]
    searches = joblib.Parallel(4, backend="threading")(joblib.delayed(search)(data, recipes) for _ in range(8))
    assert all([trial.score for trial in found.trials] == alone for found in searches)
    with joblib.parallel_config("threading", n_jobs=2):
        assert [trial.score for trial in search(data, recipes, n_jobs=2).trials] == alone
        classifier = SPINClassifier(search=recipes, random_state=0)
        of_threads = cross_val_predict(classifier, data.graphs, cv=2, method="predict_proba")
    assert np.array_equal(of_threads, cross_val_predict(classifier, data.graphs, cv=2, method="predict_proba"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_budget_is_no_more_than_the_epochs(data: TrainingSet) -> None:
    small = {"num_hops": 0, "hidden_features": 4, "num_layers": 1, "batch_size": 150}
    found = search(data, [Recipe(epochs=2, **small), Recipe(epochs=5, **small)], budgets=(3, None))
    assert [trial.trained.epochs for trial in found.trials[:2]] == [2, 3]
    rows = {(of["epochs"], of["budget"]): of["trained_epochs"] for of in found.table()}
    assert (rows[2, 3], rows[5, 3]) == (2, 3)


def test_bad_arguments(data: TrainingSet) -> None:
    with pytest.raises(ValueError, match="budgets must hold at least one, got none"):
        search(data, [Learner(0.5)], budgets=())
    with pytest.raises(ValueError, match="candidates must hold at least one"):
        search(data, [])
    with pytest.raises(ValueError, match="n_jobs must be at least 1"):
        search(data, [Learner(0.5)], n_jobs=0)
    with pytest.raises(ValueError, match="training diverged with all candidates"):
        search(data, [Learner(-1)])


@pytest.mark.parametrize("in_files", [False, True])
def test_settings_share_features(data: TrainingSet, tmp_path: Path, in_files: bool) -> None:
    data = replace(data, folder=tmp_path if in_files else None, _made={})
    recipe = Recipe(num_hops=1, hidden_features=4, num_layers=1, epochs=1, batch_size=150)
    trained = recipe.train(data, 0)
    features = next(iter(data._made.values()))
    replace(recipe, learning_rate=1e-4, branches="both").train(data, 0)
    assert len(data._made) == 1
    again = replace(data, _made={})
    assert recipe.train(again, 0)[:3] == trained[:3]
    assert next(iter(again._made.values())) is not features
    assert len(list(tmp_path.iterdir())) == in_files
    for hops in (0, 2, 3):
        replace(recipe, num_hops=hops).train(data, 0)
    assert len(data._made) == 2


def test_a_recipe_has_the_parameters_of_the_estimator() -> None:
    defaults = {field.name: field.default for field in fields(SPINClassifier)}
    for field in fields(Recipe):
        assert field.default == defaults[field.name], field.name
    with pytest.raises(ValueError, match="readout must be one of attention, sum, got 'mean'"):
        Recipe(readout="mean")
    with pytest.raises(TypeError, match="epochs must be an int, got str"):
        Recipe(epochs="9")


def test_spaces(tmp_path: Path) -> None:
    grid = spaces.draw(spaces.paper("NCI1", "attention"))
    assert len(grid) == 8
    assert {recipe.readout for recipe in grid} == {"attention"}
    assert {recipe.num_hops for recipe in grid} == {1, 2}
    drawn, again, other = (spaces.draw(spaces.family(), 20, seed=seed) for seed in (0, 0, 1))
    assert drawn == again != other
    assert len({str(recipe) for recipe in drawn}) == 20
    assert set(published.results("NCI1")) >= {"GIN", "SPIN-att"}
    assert published.results("digits") == {}
    assert published.results("NCI1", "ROC-AUC") == {} != published.results("ogbg-molhiv", "ROC-AUC")
    with pytest.raises(ValueError, match=r"paper has settings for DD, .*, not for digits"):
        spaces.paper("digits", "sum")
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"num_hops": [1, 2], "operator": ["adj", "sym,adj"]}))
    assert len(spaces.draw(spaces.read(path))) == 4
    for content, message in (
        ('{"hops": [1]}', "has 'hops', which is no parameter of a recipe: batch_norm"),
        ('{"num_hops": 1}', "must have a list of values per parameter"),
        ("[1]", "must have a list of values per parameter"),
        ("{", "is not a JSON file"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            spaces.read(path)
    with pytest.raises(FileNotFoundError, match=r"none.json cannot be read"):
        spaces.read(tmp_path / "none.json")


def test_models_are_trained_by_one_thread(data: TrainingSet, threads: None) -> None:
    """Here as in worker processes, so that the number of those changes no bit."""
    seen = []

    class Watching(Learner):
        def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
            seen.append(torch.get_num_threads())
            return super().train(data, seed, epochs)

    torch.set_num_threads(2)
    search(data, [Watching(0.1), Watching(0.2)])
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
    search(data, [Learner(0.1)], n_jobs=100_000)
