"""Folds: what selection may see, what the runs are, going on, files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spin_fast import GraphBatch, datasets, training
from spin_fast.datasets import Split
from spin_fast.selection import Evaluation, Recipe, Trained, TrainingSet, evaluate

QUICK: dict[str, Any] = {"num_hops": 1, "hidden_features": 8, "num_layers": 2, "epochs": 3, "batch_size": 64}
RECIPES = [Recipe(**QUICK, learning_rate=rate) for rate in (1e-2, 1e-3, 1e-4)]


@pytest.fixture(scope="module")
def graphs() -> GraphBatch:
    return datasets.load("digits")[:300]


@pytest.fixture(scope="module")
def folds(graphs: GraphBatch) -> list[Split]:
    assert graphs.y is not None
    return datasets.stratified_folds(graphs.y, 3)


def without_times(evaluation: Evaluation) -> list[dict[str, Any]]:
    folds = [vars(fold) | {"seconds": 0, "cpu_seconds": 0} for fold in evaluation.folds]
    return [fold | {"trials": [of[:3] for of in fold["trials"]]} for fold in folds]


def test_it_is_what_its_parts_are(graphs: GraphBatch, folds: list[Split]) -> None:
    found = evaluate(graphs, folds[:1], RECIPES, num_runs=2)
    (fold,) = found.folds
    assert len(fold.trials) == 3
    assert [of[:2] for of in fold.trials] == [[number, None] for number in range(3)]
    assert fold.validation == max(validation for _, _, validation, _ in fold.trials)
    assert [of["learning_rate"] for of in found.candidates] == [1e-2, 1e-3, 1e-4]
    chosen = RECIPES[fold.settings]
    split = folds[0]
    for run, (test, epochs) in enumerate(zip(fold.test, fold.epochs, strict=True)):
        features = chosen.features(graphs, split.train)
        torch.manual_seed(1 + run)
        model = chosen.new_model(features, split.train, 10)
        fit = training.fit(model, features, split.train, split.validation, seed=1 + run, **chosen.fit_arguments)
        scores = training.predict(model, features, split.test)
        assert training.accuracy(scores, graphs.y[split.test]) == pytest.approx(test, abs=1e-9)
        assert len(fit.epochs) == epochs


def test_test_graphs_cannot_be_reached(graphs: GraphBatch, folds: list[Split]) -> None:
    assert graphs.y is not None
    of_test = torch.zeros(len(graphs), dtype=torch.bool)
    of_test[folds[0].test] = True
    x, y = graphs.x.clone(), graphs.y.clone()
    x[of_test.repeat_interleave(graphs.num_nodes_per_graph)] = 0
    y[of_test] = (y[of_test] + 1) % 10
    other = evaluate(replace(graphs, x=x, y=y), folds[:1], RECIPES, num_runs=1)
    plain = evaluate(graphs, folds[:1], RECIPES, num_runs=1)
    assert other.folds[0].test != plain.folds[0].test
    same = [[of | {"test": 0} for of in without_times(evaluation)] for evaluation in (plain, other)]
    assert same[0] == same[1]


def test_what_is_trained_on_has_no_test_graph(graphs: GraphBatch, folds: list[Split]) -> None:
    data = TrainingSet.of(graphs, folds[0].train, folds[0].validation, training.accuracy)
    assert len(data.graphs) == len(folds[0].train) + len(folds[0].validation) == len(graphs) - len(folds[0].test)
    assert torch.equal(data.graphs.y[data.validation], graphs.y[folds[0].validation])
    with pytest.raises(ValueError, match=r"y must be int64 classes \[G\], or float tasks \[G, T\] .*float32 of shape"):
        TrainingSet.of(replace(graphs, y=graphs.y.float()), folds[0].train, folds[0].validation, training.accuracy)
    with pytest.raises(ValueError, match="graphs must have labels"):
        TrainingSet.of(replace(graphs, y=None), folds[0].train, folds[0].validation, training.accuracy)


@pytest.mark.slow
def test_processes_change_nothing(graphs: GraphBatch, folds: list[Split]) -> None:
    options: dict[str, Any] = {"num_runs": 2, "ensemble": 1, "budgets": (1, None)}
    one, two = (evaluate(graphs, folds[:1], RECIPES, **options, n_jobs=jobs) for jobs in (1, 2))
    assert without_times(one) == without_times(two)


def test_it_goes_on_from_a_file(graphs: GraphBatch, folds: list[Split], tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"

    class Cut(Exception):
        pass

    def cut(evaluation: Evaluation) -> None:
        evaluation.save(path)
        if len(evaluation.folds) == 2:
            raise Cut

    options: dict[str, Any] = {"num_runs": 1, "about": {"dataset": "digits"}}
    with pytest.raises(Cut):
        evaluate(graphs, folds, RECIPES[:2], **options, on_fold=cut)
    before = Evaluation.load(path)
    assert [fold.number for fold in before.folds] == [0, 1]
    whole = evaluate(graphs, folds, RECIPES[:2], **options)
    assert without_times(evaluate(graphs, folds, RECIPES[:2], **options, resume_from=before)) == without_times(whole)
    with pytest.raises(ValueError, match="evaluation to go on from must be the same, but it has runs: 1, not 2"):
        evaluate(graphs, folds, RECIPES[:2], num_runs=2, about={"dataset": "digits"}, resume_from=before)
    with pytest.raises(ValueError, match="it has other candidates to select from"):
        evaluate(graphs, folds, RECIPES[1:], **options, resume_from=before)
    with pytest.raises(ValueError, match="it has metric: 'accuracy', not 'rocauc'"):
        evaluate(graphs, folds, RECIPES[:2], **options, metric=training.rocauc, resume_from=before)
    relabelled = replace(graphs, y=graphs.y.roll(1))
    with pytest.raises(ValueError, match=r"it has labels_sha256: '[0-9a-f]{16}', not '[0-9a-f]{16}'$"):
        evaluate(relabelled, folds, RECIPES[:2], **options, resume_from=before)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"folds": [{"number": 0}]}))
    with pytest.raises(ValueError, match=r"evaluation.json is a damaged evaluation: .*missing"):
        Evaluation.load(path)


def test_the_mean_is_over_folds_or_over_the_runs_of_one(graphs: GraphBatch, folds: list[Split]) -> None:
    several, one = (evaluate(graphs, of, RECIPES[:1], num_runs=3) for of in (folds, folds[:1]))
    means = torch.tensor([fold.test for fold in several.folds]).double().mean(1)
    assert several.mean_and_std() == pytest.approx((means.mean().item(), means.std(correction=0).item()))
    runs = torch.tensor(one.folds[0].test).double()
    assert one.mean_and_std() == pytest.approx((runs.mean().item(), runs.std().item()))
    assert several.mean_and_std(ensemble=True) == pytest.approx((float("nan"),) * 2, nan_ok=True)


def test_a_fold_without_a_score(graphs: GraphBatch, folds: list[Split], tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    found = evaluate(graphs, folds[:2], RECIPES[:1], metric=lambda scores, y: float("nan"), num_runs=2, ensemble=1)
    found.save(path)
    for evaluation in (found, Evaluation.load(path)):
        for ensemble in (False, True):
            assert all(map(math.isnan, (*evaluation.scores(ensemble), *evaluation.mean_and_std(ensemble))))
        assert math.isnan(evaluation.folds[0].validation)


@dataclass
class Known:
    """Settings whose models know the answer, less some noise of their own."""

    noise: float
    diverges: bool = False
    finite: bool = True

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        if self.diverges and seed > 0:
            raise training.Diverged("training diverged")

        def model(graphs: GraphBatch) -> torch.Tensor:
            assert graphs.y is not None
            noise = torch.randn(len(graphs), 10, generator=torch.Generator().manual_seed(seed + int(1e6 * self.noise)))
            scores = torch.nn.functional.one_hot(graphs.y, 10) + self.noise * noise
            return scores if self.finite else scores.masked_fill(torch.arange(len(graphs))[:, None] == 0, torch.nan)

        return Trained(1 - self.noise, self.noise, 7, model)


def test_test_graphs_are_not_selected_by(graphs: GraphBatch, folds: list[Split]) -> None:
    for part in ("train", "validation"):
        wrong = folds[1]._replace(test=torch.cat([folds[1].test, getattr(folds[1], part)[:1]]))
        with pytest.raises(ValueError, match=r"splits must not test .* of fold 1"):
            evaluate(graphs, [folds[0], wrong], [Recipe(epochs=1)])
    with pytest.raises(ValueError, match="candidates must have at least one recipe, got none"):
        evaluate(graphs, folds, [])
    with pytest.raises(ValueError, match="n_jobs must be at least 1, got 0"):
        evaluate(graphs, folds, [Recipe(epochs=1)], n_jobs=0)
    last = folds[1]._replace(train=torch.tensor([0, len(graphs) - 1]), test=torch.tensor([-1]))
    with pytest.raises(ValueError, match=rf"splits must not test .* graph {len(graphs) - 1} of fold 0"):
        evaluate(graphs, [last], [Recipe(epochs=1)])


def test_an_ensemble_is_the_mean_of_the_best(graphs: GraphBatch, folds: list[Split]) -> None:
    candidates = [Known(noise) for noise in (3.0, 0.71, 0.7, 0.72)]
    (fold,) = evaluate(graphs, folds[:1], candidates, num_runs=2, ensemble=3).folds
    assert fold.members == [2, 1, 3]
    assert fold.settings == 2
    assert fold.epochs == [7, 7]
    assert all(ensemble > test for ensemble, test in zip(fold.ensemble, fold.test, strict=True))
    with pytest.raises(
        ValueError,
        match="ensemble must be at most 2, since the search trains no more of its 4 settings to the end, got 3",
    ):
        evaluate(graphs, folds[:1], candidates, ensemble=3, budgets=(1, None))


def test_what_diverges_counts_as_zeros(graphs: GraphBatch, folds: list[Split]) -> None:
    with pytest.warns(UserWarning, match="diverged in a final run of fold 0"):
        (fold,) = evaluate(graphs, folds[:1], [Known(0.0, diverges=True)], num_runs=1).folds
    assert fold.test == [training.accuracy(torch.zeros(len(folds[0].test), 10), graphs.y[folds[0].test])]
    assert fold.unscored == [len(folds[0].test)]
    with pytest.warns(UserWarning, match="1 test graph.s. of fold 0"):
        (fold,) = evaluate(graphs, folds[:1], [Known(0.1, finite=False), Known(0.2)], num_runs=2, ensemble=2).folds
    assert fold.unscored == [1, 1]
    with pytest.warns(UserWarning, match="diverged in a final run of fold 0"):
        (fold,) = evaluate(graphs, folds[:1], [Known(0.2), Known(0.3, diverges=True)], num_runs=1, ensemble=2).folds
    assert fold.unscored == [len(folds[0].test)]


def test_files_that_do_not_tell_what_has_no_score(graphs: GraphBatch, folds: list[Split], tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    found = evaluate(graphs, folds[:1], [Known(0.1)], num_runs=2)
    found.save(path)
    assert Evaluation.load(path) == found
    assert found.folds[0].unscored == [0, 0]
    content = json.loads(path.read_text())
    assert content["format"] == "spin_fast evaluation 2"
    del content["folds"][0]["unscored"]
    path.write_text(json.dumps(content | {"format": "spin_fast evaluation 1"}))
    assert Evaluation.load(path).folds[0].unscored == []
    assert Evaluation.load(path).scores() == found.scores()
