"""The flat parameters: one order, of the modules, of the reference implementation and of the kernels."""

from __future__ import annotations

import math

import pytest
import torch

from spin_fast import SPIN, ops
from spin_fast.ops.parameters import flat_parameters, split_parameters

OPTIONS = [
    {},
    {"attention": False},
    {"num_layers": 1, "classifier_features": ()},
    {"num_operators": 2, "classifier_features": (7, 4, 5)},
    {"branches": "joint"},
    {"branches": "both", "num_operators": 2, "num_layers": 2},
    {"branches": "both", "attention": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_modules_have_the_order(options: dict) -> None:
    model = SPIN(3, 5, 2, 2, **options)
    shapes = ops.parameter_shapes(3, model.sizes)
    assert [*shapes.items()] == [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    groups, classifier = split_parameters(model.flatten_parameters(), 3, model.sizes)
    split = []
    for group in groups.values():
        own = [] if group.w is None else [group.w]
        own += [part for layer in zip(group.weights, group.biases, strict=True) for part in layer]
        assert torch.equal(flat_parameters(*group), torch.cat([part.flatten() for part in own]))
        split += own
    for one, other in zip([*split, *classifier], model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("options", OPTIONS)
def test_kernels_count_on_as_many(native, options: dict) -> None:
    """csrc/model.h says how many parameters an op must get; that their order is this, results of the ops show."""
    model = SPIN(3, 5, 2, 2, **options)
    size = sum(math.prod(shape) for shape in ops.parameter_shapes(3, model.sizes).values())
    rows, labels = torch.ones(model.num_branches, 3), torch.tensor([0])
    ptr = torch.arange(model.num_branches + 1)
    joint = ops.JointRows(torch.zeros(1, model.num_branches, dtype=torch.int64), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=rf"parameters must have shape \[{size}\], got \[1\]"):
        ops.training_step(rows, torch.ones(1), labels, ptr, model=model.sizes, joint=joint)
