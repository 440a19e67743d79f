"""Train and evaluate a model: early stopping, going on after an interruption, prediction, models in files."""

from .checkpoints import load_checkpoint, save_checkpoint
from .ensemble import Ensemble
from .fit import Diverged, Epoch, Fit, fit
from .losses import Metric, accuracy, loss_of, rocauc
from .prediction import not_finite, predict, predict_chunks, predict_proba
from .schedules import SCHEDULES
from .trainer import Trainer

__all__ = [
    "SCHEDULES",
    "Diverged",
    "Ensemble",
    "Epoch",
    "Fit",
    "Metric",
    "Trainer",
    "accuracy",
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
