"""Selection by validation: all candidates, or successive halving, in worker processes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._common import check
from ..nn import Ensemble, GraphModel
from ..training import Diverged
from .training_set import Settings, Trained, TrainingSet, differing, facts_of

Told = list[tuple[str, type[Warning]]]
SHARE = 3  # of so many candidates one goes on
OUTCOMES = ("validation", "loss", "trained_epochs", "budget", "seconds")  # what a table tells of a trial


class Trial(NamedTuple):
    """A model that a search has trained.

    Attributes:
        settings: what it was trained with.
        budget: at most so many epochs; None for those of the settings.
        trained: None where training diverged.
        seconds: the CPU time that it took.
    """

    settings: Settings
    budget: int | None
    trained: Trained | None
    seconds: float

    @property
    def score(self) -> tuple[float, float]:
        """What ranks it: the metric on the validation graphs, of equal ones the lower loss."""
        if self.trained is None:
            return -math.inf, -math.inf
        metric = self.trained.validation
        return -math.inf if math.isnan(metric) else metric, -self.trained.loss


@dataclass
class Search:
    """The trials of :func:`search`, in their order; ``interrupted``: by Ctrl-C, before all were done."""

    trials: list[Trial]
    interrupted: bool = False

    @property
    def ranking(self) -> list[Trial]:
        """The trials of the last budget with which any have not diverged, the best first."""
        known = [trial for trial in self.trials if trial.trained is not None]
        return _ranked([trial for trial in known if trial.budget == known[-1].budget])

    def table(self) -> list[dict[str, Any]]:
        """The trials, those of :attr:`ranking` first: what came out, and the settings that are not the same in all."""
        ranking = self.ranking
        trials = ranking + [trial for trial in self.trials if not any(trial is of for of in ranking)]
        rows: list[dict[str, Any]] = []
        for trial, settings in zip(trials, differing([facts_of(trial.settings) for trial in trials]), strict=True):
            of = (None, None, None) if trial.trained is None else trial.trained[:3]
            rows.append(dict(zip(OUTCOMES, (*of, trial.budget, trial.seconds), strict=True)) | settings)
        return rows

    def model(self, ensemble: int = 0) -> GraphModel:
        """The best model, or an :class:`spin_fast.nn.Ensemble` of so many of the best; fewer if others diverged.

        Raises:
            TypeError: the settings are of another method, whose models are no
                :class:`spin_fast.nn.GraphModel`.
        """
        best = self.ranking[: max(check.integer("ensemble", ensemble, 0), 1)]
        models = [trial.trained.model for trial in best if trial.trained is not None]
        if not all(isinstance(model, GraphModel) for model in models):
            raise TypeError(f"the models must be of graphs, got {type(models[0]).__name__}")
        return Ensemble(models) if ensemble else models[0]  # type: ignore[arg-type, return-value]


def search(
    data: TrainingSet,
    candidates: Sequence[Settings],
    *,
    budgets: Sequence[int | None] = (None,),
    seed: int = 0,
    n_jobs: int = 1,
    on_trial: Callable[[Trial], object] | None = None,
) -> Search:
    """Train with each of the candidates, and rank them by the validation graphs alone.

    With several budgets it is successive halving (Jamieson & Talwalkar 2016): all are trained for the first number of
    epochs, the best third of them anew for the second, and so on. Results are the same bits for any ``n_jobs``. Ctrl-C
    ends it early, if there is a model to return by then.

    Args:
        data: the training graphs, and the validation graphs.
        candidates: at least one.
        budgets: numbers of epochs, rising; None for those of the candidates themselves.
        seed: of the weights and the order of the graphs.
        n_jobs: worker processes, of one CPU thread each, no more than models; with 1 all is done here.
        on_trial: called with each :class:`Trial`, in their order.

    Raises:
        TypeError, ValueError: an argument that is wrong; training diverged with all candidates.
    """
    if not candidates:
        raise ValueError("candidates must hold at least one, got none")
    if not budgets:
        raise ValueError("budgets must hold at least one, got none")
    check.integer("n_jobs", n_jobs, 1)
    found = Search([])
    left = list(candidates)
    with data.shared(n_jobs) as shared:
        for number, budget in enumerate(budgets):
            before = len(found.trials)
            try:
                for trial in run(shared, [(settings, seed, budget) for settings in left], n_jobs):
                    found.trials.append(trial)
                    if on_trial is not None:
                        on_trial(trial)
            except KeyboardInterrupt:
                if all(trial.trained is None for trial in found.trials):
                    raise
                found.interrupted = True
                break
            best = _ranked(found.trials[before:])
            if not best and before and found.ranking:
                break
            if not best:
                raise ValueError("training diverged with all candidates; try lower learning rates")
            if number + 1 < len(budgets):
                left = [trial.settings for trial in best[: math.ceil(len(left) / SHARE)]]
    return found


def check_ensemble(ensemble: int, candidates: int, num_budgets: int) -> None:
    """Check that so many settings are left after all rounds of a search.

    Raises:
        TypeError, ValueError: names the argument and what is wrong with it.
    """
    if check.integer("ensemble", ensemble, 0) > (left := rounds(candidates, num_budgets)[-1]):
        raise check.ArgumentValueError(
            "ensemble",
            f"be at most {left}, since the search trains no more of its {candidates} settings to the end",
            ensemble,
        )


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    known = (trial for trial in trials if trial.trained is not None)
    return sorted(known, key=lambda trial: trial.score, reverse=True)


def rounds(candidates: int, budgets: int) -> list[int]:
    """How many models a search trains of each budget, if none diverges."""
    numbers = [candidates]
    while len(numbers) < budgets:
        numbers.append(math.ceil(numbers[-1] / SHARE))
    return numbers


def run(data: TrainingSet, models: Sequence[tuple[Settings, int, int | None]], n_jobs: int) -> Iterator[Trial]:
    """Train models of some settings, seed and budget, and yield their trials in this order."""
    n_jobs = min(n_jobs, len(models))
    if n_jobs <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in worker processes: another number may round otherwise
        try:
            yield from (_train(data, *model) for model in models)
        finally:
            torch.set_num_threads(threads)
        return
    from joblib import Parallel, delayed

    tasks = (delayed(_train_alone)(data, *model) for model in models)
    done = Parallel(n_jobs, backend="loky", return_as="generator")(tasks)  # threads share torch's random state
    for (trial, told), (settings, _, _) in zip(done, models, strict=True):
        for message, category in told:
            warnings.warn(message, category, stacklevel=2)
        yield trial._replace(settings=settings)  # not the copy that has come back


def _train_alone(data: TrainingSet, settings: Settings, seed: int, budget: int | None) -> tuple[Trial, Told]:
    """Train in a process of its own, whose warnings are returned for the one that has a user."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        trial = _train(data, settings, seed, budget)
    return trial, [(str(of.message), of.category) for of in caught]


def _train(data: TrainingSet, settings: Settings, seed: int, budget: int | None) -> Trial:
    start = time.process_time()
    try:
        trained = settings.train(data, seed, budget)
    except Diverged:
        trained = None
    return Trial(settings, budget, trained, time.process_time() - start)
