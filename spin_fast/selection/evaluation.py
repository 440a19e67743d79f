"""Evaluation by folds: settings are selected by validation, and the test graphs of a fold are seen once, at its end."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._common import check, files
from .._common.indexing import graph_ids
from ..datasets import Split
from ..graphs.batch import GraphBatch
from ..nn.ensemble import mean_scores
from ..training import Metric, accuracy, not_finite
from ..training.fit import name_of
from .training_set import Settings, TrainingSet, facts_of
from .trials import Trial, check_ensemble, run, search

EVALUATION_FORMAT = "spin_fast evaluation 2"


@dataclass
class Fold:
    """What was selected in a fold, and how it did.

    Attributes:
        number: from 0.
        settings: the number of the candidate with the best validation.
        validation: the metric on the validation graphs, by which they were selected.
        test: the metric on the test graphs, of each run.
        epochs: of each run.
        ensemble: of each run, that of the mean probabilities of the best settings; empty without an ensemble.
        members: the candidates of the ensemble.
        trials: all that was tried: candidate, budget of epochs, validation metric (None if it diverged), CPU seconds.
        seconds: how long selection and final runs took together.
        cpu_seconds: how long one CPU thread would have taken, which does not depend on what else a machine does.
        unscored: of each run, the test graphs without a finite score by one of its models, all if training diverged;
            they count as scores of 0. Empty in files of format 1, which do not tell.
    """

    number: int
    settings: int
    validation: float
    test: list[float]
    epochs: list[int]
    ensemble: list[float]
    members: list[int]
    trials: list[list[Any]]
    seconds: float
    cpu_seconds: float
    unscored: list[int] = field(default_factory=list)


@dataclass
class Evaluation:
    """Folds that have been evaluated.

    Attributes:
        about: what is evaluated, and how; an evaluation goes on only from one with equal values and candidates.
        candidates: the settings that were selected from, by their names.
        folds: those that are done.
    """

    about: dict[str, Any]
    candidates: list[dict[str, Any]]
    folds: list[Fold] = field(default_factory=list)

    def scores(self, ensemble: bool = False) -> list[float]:
        """The metric of each fold, the mean of its runs; of a single split that of each run."""
        runs = [fold.ensemble if ensemble else fold.test for fold in self.folds]
        return runs[0] if self.about["folds"] == 1 and runs else [statistics.fmean(of) for of in runs if of]

    def mean_and_std(self, ensemble: bool = False) -> tuple[float, float]:
        """Mean and standard deviation of :meth:`scores`: over folds of the population, over runs of the sample.

        These are the deviations that Errica et al. (2020) and OGB report.
        """
        scores = self.scores(ensemble)
        if not scores or any(map(math.isnan, scores)):
            return math.nan, math.nan
        deviation = statistics.pstdev if self.about["folds"] > 1 or len(scores) == 1 else statistics.stdev
        return statistics.fmean(scores), deviation(scores)

    def save(self, path: str | Path) -> None:
        """Write a JSON file; what was there is replaced as a whole."""
        files.write_json(Path(path), EVALUATION_FORMAT, _without_nan(asdict(self)), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Read the file of :meth:`save`.

        Raises:
            FileNotFoundError: no such file. ValueError: it is another file, damaged, or of another format.
        """
        content = files.read_json(Path(path), EVALUATION_FORMAT, oldest=1)
        try:
            return cls(content["about"], content["candidates"], [_fold(of) for of in content["folds"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is a damaged evaluation: {error}") from error


def evaluate(
    graphs: GraphBatch,
    splits: Sequence[Split],
    candidates: Sequence[Settings],
    *,
    metric: Metric = accuracy,
    num_runs: int = 3,
    ensemble: int = 0,
    budgets: Sequence[int | None] = (None,),
    seed: int = 0,
    n_jobs: int = 1,
    about: dict[str, Any] | None = None,
    resume_from: Evaluation | None = None,
    on_fold: Callable[[Evaluation], object] | None = None,
    on_trial: Callable[[int, Trial], object] | None = None,
) -> Evaluation:
    """Evaluate by the protocol of a fair comparison (Errica et al. 2020).

    In each fold the validation graphs select among the candidates, by :func:`search`; the selected settings are trained
    anew ``num_runs`` times with different seeds, early stopping by the validation graphs, and each of these models sees
    the test graphs once. Neither selection nor training is given any of these.

    Args:
        graphs: with labels.
        splits: the folds.
        candidates: the settings to select from; one alone needs no selection.
        metric: from class scores and labels to a number that should rise.
        num_runs: final models in each fold.
        ensemble: also average the probabilities of so many of the best settings, each trained once per run; 0 for none.
        budgets: as of :func:`search`.
        seed: of all weights and orders: 0 selects with seed 0, and the runs have the seeds 1, 2, ...
        n_jobs: worker processes of one CPU thread each.
        about: what else a reader should know, kept in ``Evaluation.about``.
        resume_from: an evaluation that was cut short; folds that it has are not done again.
        on_fold: called with the evaluation whenever a fold is done.
        on_trial: called with the fold's number and each :class:`Trial`, those of the final runs, too.

    Raises:
        TypeError, ValueError: an argument that is wrong; ``resume_from`` with other settings, which it names.

    Warns:
        UserWarning: a final model has diverged, or test graphs have scores that are not finite; they count as 0, and
            ``Fold.unscored`` tells how many.
    """
    check.integer("num_runs", num_runs, 1)
    check.integer("n_jobs", n_jobs, 1)
    if not candidates:
        raise ValueError("candidates must have at least one recipe, got none")
    check_ensemble(ensemble, len(candidates), len(budgets))
    splits = [Split(*(graph_ids(part, len(graphs)) for part in split)) for split in splits]
    for number, split in enumerate(splits):
        if len(seen := split.test[torch.isin(split.test, torch.cat(split[:2]))]):
            raise ValueError(f"splits must not test what is selected by, but graph {int(seen[0])} of fold {number} is")
    done = Evaluation(
        {"metric": name_of(metric)}
        | (about or {})
        | {
            "graphs": len(graphs),
            "folds": len(splits),
            "splits_sha256": _digest([[part.tolist() for part in split] for split in splits]),
            "labels_sha256": None if graphs.y is None else _digest(graphs.y.tolist()),
            "budgets": list(budgets),
            "runs": num_runs,
            "ensemble": ensemble,
            "seed": seed,
        },
        [facts_of(of) for of in candidates],
    )
    if resume_from is not None:
        _check_same(done, resume_from)
        done.folds = list(resume_from.folds)
    numbers = {id(settings): number for number, settings in enumerate(candidates)}
    for number, split in enumerate(splits):
        if any(fold.number == number for fold in done.folds):
            continue
        data = TrainingSet.of(graphs, split.train, split.validation, metric)
        tell = None if on_trial is None else partial(on_trial, number)
        start = time.perf_counter()
        trials: list[Trial] = []
        chosen = list(candidates)
        with data.shared(n_jobs) as shared:
            if len(candidates) > 1:
                found = search(shared, candidates, budgets=budgets, seed=seed, n_jobs=n_jobs, on_trial=tell)
                if found.interrupted:  # a fold is done as a whole, or not
                    raise KeyboardInterrupt
                trials, chosen = found.trials, [trial.settings for trial in found.ranking[: max(ensemble, 1)]]
            models = [(settings, seed + 1 + of, None) for of in range(num_runs) for settings in chosen]
            finals = []
            for trial in run(shared, models, n_jobs):
                finals.append(trial)
                if tell is not None:
                    tell(trial)
        test = graphs[split.test]
        target = test.y
        assert target is not None
        tasks = target.is_floating_point()
        scores, unscored = zip(*(_scores(trial, test, data.num_outputs, number) for trial in finals), strict=True)
        per_run = [slice(first, first + len(chosen)) for first in range(0, len(models), len(chosen))]
        best = (found.ranking[0] if trials else finals[0]).trained
        done.folds.append(
            Fold(
                number=number,
                settings=numbers[id(chosen[0])],
                validation=math.nan if best is None else best.validation,
                test=[metric(scores[of.start], target) for of in per_run],
                epochs=[0 if (of := trial.trained) is None else of.epochs for trial in finals[:: len(chosen)]],
                ensemble=[metric(mean_scores(scores[of], tasks), target) for of in per_run if ensemble],
                members=[numbers[id(settings)] for settings in chosen if ensemble],
                trials=[
                    [
                        numbers[id(trial.settings)],
                        trial.budget,
                        None if trial.trained is None else trial.trained.validation,
                        round(trial.seconds, 3),
                    ]
                    for trial in trials
                ],
                seconds=time.perf_counter() - start,
                cpu_seconds=sum(trial.seconds for trial in [*trials, *finals]),
                unscored=[len(torch.cat(unscored[of]).unique()) for of in per_run],
            )
        )
        if on_fold is not None:
            on_fold(done)
    return done


def _scores(trial: Trial, test: GraphBatch, num_outputs: int, fold: int) -> tuple[Tensor, Tensor]:
    """The class scores of the test graphs, and those that have none: they are 0, which says nothing."""
    if trial.trained is None:
        warnings.warn(f"training diverged in a final run of fold {fold}, which counts as scores of 0", stacklevel=3)
        device = test.x.device
        return torch.zeros(len(test), num_outputs, device=device), torch.arange(len(test), device=device)
    scores = trial.trained.scores(test)
    if len(wrong := not_finite(scores)):
        warnings.warn(f"{len(wrong)} test graph(s) of fold {fold} have scores that are not finite: 0", stacklevel=3)
        scores[wrong] = 0
    return scores, wrong


def _check_same(wanted: Evaluation, found: Evaluation) -> None:
    differ = {name: of for name, of in found.about.items() if wanted.about.get(name) != of}
    kept = {"metric", *found.about}  # files may lack the metric
    differ |= {name: None for name in wanted.about if name not in kept}
    told = ", ".join(f"{name}: {of!r}, not {wanted.about.get(name)!r}" for name, of in differ.items())
    if told or wanted.candidates != found.candidates:
        raise ValueError(
            f"the evaluation to go on from must be the same, but it has {told or 'other candidates to select from'}"
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _fold(content: dict[str, Any]) -> Fold:
    """A fold of a file, where NaN is null."""
    fold = Fold(**content)
    fold.validation = math.nan if fold.validation is None else fold.validation
    fold.test, fold.ensemble = ([math.nan if of is None else of for of in runs] for runs in (fold.test, fold.ensemble))
    return fold


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(of) for name, of in value.items()}
    if isinstance(value, list):
        return [_without_nan(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
