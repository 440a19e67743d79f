"""The flat parameters: all parameters of a model in one vector, in the order in which ``SPIN`` registers them.

The fused ops take them so; ``csrc/model.h`` counts on the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

MOST_LAYERS = 8
BRANCHES = ("hops", "joint", "both")


class ModelSizes(NamedTuple):
    """What a fused op is told about a model beside its parameters, in the order of its schema.

    Attributes:
        num_branches: ``R + 1``, of the features.
        widths: of the layers of each branch, 1 to 8; the last is ``h``.
        classifier_widths: of the layers of the classifier, 1 to 8; the last is the number of classes. Empty where the
            op ends with the readout.
        attention: whether the readout is the attention's; otherwise the sum.
        negative_slope: of every LeakyReLU.
        branches: ``"hops"`` for a branch of each hop, ``"joint"`` for one of joint rows, ``"both"`` for both.
    """

    num_branches: int
    widths: Sequence[int]
    classifier_widths: Sequence[int]
    attention: bool
    negative_slope: float
    branches: str = "hops"

    def groups(self, in_features: int) -> dict[str, tuple[int, int]]:
        """The number of branches of each group, and of the features that go into one."""
        groups = {"hops": (self.num_branches, in_features), "joint": (1, self.num_branches * in_features)}
        return {name: group for name, group in groups.items() if self.branches in (name, "both")}


def parameter_shapes(in_features: int, model: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a ``SPIN`` without BatchNorm, in the order of the flat parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    groups = model.groups(in_features)
    for name, (branches, width) in groups.items():
        if model.attention:
            shapes[f"{name}.attention"] = (branches, model.widths[-1])
        for depth, (width_in, width_out) in enumerate(pairwise([width, *model.widths])):
            shapes[f"{name}.layers.{depth}.weight"] = (branches, width_in, width_out)
            shapes[f"{name}.layers.{depth}.bias"] = (branches, width_out)
    columns = sum(branches for branches, _ in groups.values()) * model.widths[-1]
    for depth, (width_in, width_out) in enumerate(pairwise([columns, *model.classifier_widths])):
        shapes[f"classifier.{2 * depth}.weight"] = (width_out, width_in)
        shapes[f"classifier.{2 * depth}.bias"] = (width_out,)
    return shapes


class BranchParameters(NamedTuple):
    """Views of the flat parameters of a group of branches; ``w`` is None for the sum readout."""

    weights: list[Tensor]
    biases: list[Tensor]
    w: Tensor | None


def split_parameters(
    flat: Tensor, in_features: int, model: ModelSizes
) -> tuple[dict[str, BranchParameters], list[Tensor]]:
    """Views of the flat parameters: those of each group of branches, and those of the classifier."""
    shapes = parameter_shapes(in_features, model).values()
    parts = flat.split([math.prod(shape) for shape in shapes])
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    groups = {}
    for name in model.groups(in_features):
        w = views.pop(0) if model.attention else None
        layers, views = views[: 2 * len(model.widths)], views[2 * len(model.widths) :]
        groups[name] = BranchParameters(layers[::2], layers[1::2], w)
    return groups, views


def flat_parameters(weights: Sequence[Tensor], biases: Sequence[Tensor], w: Tensor | None) -> Tensor:
    """The flat parameters of a group of branches, which :func:`split_parameters` takes apart."""
    layers = [part.flatten() for layer in zip(weights, biases, strict=True) for part in layer]
    return torch.cat(layers if w is None else [w.flatten(), *layers])
