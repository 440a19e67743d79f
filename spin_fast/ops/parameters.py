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


class ModelSizes(NamedTuple):
    """What a fused op is told about a model beside its parameters, in the order of its schema.

    Attributes:
        num_branches: ``R + 1``.
        widths: of the layers of each branch, 1 to 8; the last is ``h``.
        classifier_widths: of the layers of the classifier, 1 to 8; the last is the number of classes. Empty where the
            op ends with the readout.
        attention: whether the readout is the attention's; otherwise the sum.
        negative_slope: of every LeakyReLU.
    """

    num_branches: int
    widths: Sequence[int]
    classifier_widths: Sequence[int]
    attention: bool
    negative_slope: float


def parameter_shapes(in_features: int, model: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a ``SPIN`` without BatchNorm, in the order of the flat parameters."""
    branches, widths = model.num_branches, model.widths
    shapes: dict[str, tuple[int, ...]] = {"attention": (branches, widths[-1])} if model.attention else {}
    for depth, (width_in, width_out) in enumerate(pairwise([in_features, *widths])):
        shapes[f"layers.{depth}.weight"] = (branches, width_in, width_out)
        shapes[f"layers.{depth}.bias"] = (branches, width_out)
    for depth, (width_in, width_out) in enumerate(pairwise([branches * widths[-1], *model.classifier_widths])):
        shapes[f"classifier.{2 * depth}.weight"] = (width_out, width_in)
        shapes[f"classifier.{2 * depth}.bias"] = (width_out,)
    return shapes


def split_parameters(
    flat: Tensor, in_features: int, model: ModelSizes
) -> tuple[Tensor | None, list[Tensor], list[Tensor], list[Tensor]]:
    """Views of the flat parameters: ``w``, the weights and the biases of the branches, those of the classifier."""
    shapes = parameter_shapes(in_features, model).values()
    parts = flat.split([math.prod(shape) for shape in shapes])
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    w = views.pop(0) if model.attention else None
    branches, classifier = views[: 2 * len(model.widths)], views[2 * len(model.widths) :]
    return w, branches[::2], branches[1::2], classifier


def flat_parameters(weights: Sequence[Tensor], biases: Sequence[Tensor], w: Tensor | None) -> Tensor:
    """The flat parameters of the branches, which :func:`split_parameters` takes apart."""
    layers = [part.flatten() for layer in zip(weights, biases, strict=True) for part in layer]
    return torch.cat(layers if w is None else [w.flatten(), *layers])
