"""Train a model, stop early, go on after an interruption; predict, and explain what is predicted; models in files."""

from .checkpoints import load_checkpoint, save_checkpoint
from .explanation import Explanation, explain
from .fit import Diverged, Epoch, Fit, fit
from .losses import Metric, accuracy, ap, loss_of, rocauc
from .prediction import Predictor, not_finite, predict, predict_chunks, predict_proba
from .schedules import SCHEDULES
from .trainer import Trainer

__all__ = [
    "SCHEDULES",
    "Diverged",
    "Epoch",
    "Explanation",
    "Fit",
    "Metric",
    "Predictor",
    "Trainer",
    "accuracy",
    "ap",
    "explain",
    "fit",
    "load_checkpoint",
    "loss_of",
    "not_finite",
    "predict",
    "predict_chunks",
    "predict_proba",
    "rocauc",
    "save_checkpoint",
]
