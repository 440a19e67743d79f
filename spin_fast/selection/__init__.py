"""Settings of a model, their selection by validation alone, and the evaluation of what was selected."""

from . import published, spaces
from .evaluation import Evaluation, Fold, evaluate
from .recipe import Recipe
from .training_set import Settings, Trained, TrainingSet
from .trials import Search, Trial, search

__all__ = [
    "Evaluation",
    "Fold",
    "Recipe",
    "Search",
    "Settings",
    "Trained",
    "TrainingSet",
    "Trial",
    "evaluate",
    "published",
    "search",
    "spaces",
]
