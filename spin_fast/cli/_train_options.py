"""Options of ``spin-fast train`` alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import training
from ._options import DEFAULT_HOPS, HOPS, NodeFeatureOptions, data_option, operator_option

model_option, training_option = (partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Training"))


@dataclass
class FeatureOptions(NodeFeatureOptions):
    """Where power features come from."""

    precomputed: Annotated[
        Path | None,
        data_option("--features", help="What spin-fast precompute has written, instead of computing it anew."),
    ] = None
    deduplicate: Annotated[bool, data_option(help="Compute what is equal once, to the same result.")] = True
    operators: Annotated[list[str] | None, operator_option("sym, or that of --features", "Model")] = None
    hops: Annotated[
        int | None,
        model_option(min=0, help=HOPS, show_default=f"{DEFAULT_HOPS}, or as --features"),
    ] = None


@dataclass
class ModelOptions:
    """The model."""

    branches: Annotated[
        Literal["hops", "joint", "both"],
        model_option(help="What an MLP reads: one hop of a node (hops), or all of them side by side (joint)."),
    ] = "joint"
    readout: Annotated[Literal["attention", "sum"], model_option(help="How a graph's nodes are summed.")] = "sum"
    hidden: Annotated[int, model_option(min=1, help="Width of a branch.")] = 32
    layers: Annotated[int, model_option(min=1, help="Linear layers of a branch.")] = 3
    batch_norm: Annotated[bool, model_option(help="BatchNorm in the branches; its steps are slower.")] = False
    calibrate: Annotated[bool, model_option(help="Scale the new weights by the training graphs.")] = True
    dropout: Annotated[float, model_option(min=0, max=0.99, help="Dropout in the branches.")] = 0.0

    @property
    def needs_node_rows(self) -> str | None:
        """The option for which features must know the row of each node, if there is one."""
        if self.branches != "hops":
            return f"--branches {self.branches}"
        return f"--dropout {self.dropout:g}" if self.dropout > 0 else None


@dataclass
class FitOptions:
    """Arguments of :func:`spin_fast.training.fit`."""

    epochs: Annotated[int, training_option(min=1, help="At most so many.")] = 100
    batch_size: Annotated[int, training_option(min=1, help="Graphs per step.")] = 32
    learning_rate: Annotated[float, training_option(min=0, help="Of Adam, at the start.")] = 5e-3
    schedule: Annotated[
        Literal[tuple(training.SCHEDULES)],  # type: ignore[valid-type]
        training_option(
            help="Of the learning rate: a cosine to 0 over --epochs, after a rise in their first tenth or not; halved "
            "every 50 epochs (step), or when the validation loss has not fallen for 10 (plateau)."
        ),
    ] = "cosine"
    weight_decay: Annotated[float, training_option(min=0, help="L2 penalty of Adam.")] = 0.0
    class_weight: Annotated[
        Literal["none", "balanced"], training_option(help="balanced: a rare class counts as much as a frequent one.")
    ] = "none"
    patience: Annotated[int, training_option(min=1, help="Stop after so many epochs without a better validation.")] = 60
    seed: Annotated[int, training_option(min=0, help="Of the split, the weights and the order of the graphs.")] = 0

    def arguments(self) -> dict[str, Any]:
        return vars(self) | {"class_weight": None if self.class_weight == "none" else self.class_weight}
