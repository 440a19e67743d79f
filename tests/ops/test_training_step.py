"""The fused training step against autograd through the unfused model, and its reference implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import random_graphs

from spin_fast import SPIN, PowerFeatures, ops, reference, training


def labelled_features(sizes: list[int], num_features: int, operator: str = "sym") -> PowerFeatures:
    graphs = random_graphs(sizes, num_features=num_features)
    graphs = replace(graphs, x=graphs.x.sign(), y=torch.arange(len(sizes)) % 2)
    return PowerFeatures.from_graphs(graphs, 2, operator)


BRANCHES = ("hops", "joint", "both")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": False},
        {"negative_slope": 0.0},
        {"classifier_features": ()},
        {"branches": "joint"},
        {"branches": "both"},
        {"branches": "both", "attention": False},
    ],
)
@pytest.mark.parametrize("num_features", [1, 20])
def test_training_step_is_autograds(backend: str, poison: None, options: dict, num_features: int) -> None:
    """Loss and gradient of a step, over several chunks of graphs, against the unfused model."""
    features = labelled_features([30, 1, 0, 400, 7] * 10, num_features)
    torch.manual_seed(0)
    model = SPIN(num_features, 24, 2, 2, **options).double()
    assert_step_is_autograds(model, features[torch.randperm(50)[:35]])


@pytest.mark.parametrize("num_features", [1, 5])
@pytest.mark.parametrize("branches", BRANCHES)
def test_training_step_with_operators_side_by_side(
    backend: str, poison: None, num_features: int, branches: str
) -> None:
    features = labelled_features([30, 1, 0, 60, 7] * 4, num_features, operator="sym,rw,adj")
    torch.manual_seed(0)
    model = SPIN(num_features, 8, 2, 2, num_operators=3, branches=branches).double()
    assert_step_is_autograds(model, features[torch.randperm(20)[:15]])


def assert_step_is_autograds(model: SPIN, selected: PowerFeatures) -> None:
    joint = None if model.joint is None else selected.take().joint
    loss = training.loss_of(model.forward_tensors(*selected.branch_rows(), joint=joint), selected.y)
    expected = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])
    trainer = training.Trainer(model, learning_rate=0.0)
    torch.testing.assert_close(trainer.step(selected), loss.detach())
    gradient = trainer.optimizer.param_groups[0]["params"][0].grad
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("class_weight", [None, [0.25, 3.0], [0.0, 1.0], [0.0, 0.0]])
def test_training_step_is_its_reference(backend: str, class_weight: list[float] | None, branches: str) -> None:
    if backend == "reference":
        pytest.skip("there is no op then")
    features = labelled_features([30, 1, 0, 7], 5)
    model = SPIN(5, 8, 2, 2, branches=branches).double()
    flat = model.flatten_parameters()
    data = (features.rows, flat, features.labels, features.ptr)
    options = {
        "model": model.sizes,
        "index": features.index,
        "count": features.count,
        "joint": None if model.joint is None else features.joint,
        "ids": torch.tensor([3, 1, 0, 0]),
        "class_weight": None if class_weight is None else torch.tensor(class_weight, dtype=torch.float64),
    }
    for one, other in zip(ops.training_step(*data, **options), reference.training_step(*data, **options), strict=True):
        torch.testing.assert_close(one, other)


def test_training_step_without_joint_rows(backend: str) -> None:
    if backend == "reference":
        pytest.skip("there is no op then")
    features = labelled_features([30, 1, 0, 7], 5)
    model = SPIN(5, 8, 2, 2, branches="both").double()
    none = ops.JointRows(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(5, dtype=torch.int64))
    data = (features.rows, model.flatten_parameters(), features.labels, features.ptr)
    options = {"model": model.sizes, "index": features.index, "count": features.count, "joint": none}
    for one, other in zip(ops.training_step(*data, **options), reference.training_step(*data, **options), strict=True):
        torch.testing.assert_close(one, other)


def test_segments_are_checked(backend: str) -> None:
    if backend == "cuda":
        pytest.skip("contents on a GPU are not read")
    features, model = labelled_features([3, 1], 5), SPIN(5, 8, 2, 2).double()
    data = (features.rows, model.flatten_parameters(), features.labels)
    options = {"model": model.sizes, "index": features.index, "count": features.count}
    for change, message in (
        ({"index": features.index - 1}, r"index must be in \[0, "),
        ({"count": features.count * 0}, "count must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.training_step(*data, features.ptr, **options | change)
    with pytest.raises(ValueError, match="ptr must start with 0"):
        ops.training_step(*data, features.ptr + 1, **options)


def test_class_weight_is_checked(native) -> None:
    features, model = labelled_features([3, 1], 5), SPIN(5, 8, 2, 2).double()
    data = (features.rows, model.flatten_parameters(), features.labels, features.ptr)
    options = {"model": model.sizes, "index": features.index, "count": features.count}
    long = torch.ones(3, dtype=torch.float64)
    for weight, wrong in ((long, r"have shape \[2\], got \[3\]"), (torch.ones(2), "be float64, got float32")):
        with pytest.raises(ValueError, match=f"class_weight must {wrong}"):
            ops.training_step(*data, **options, class_weight=weight)


def test_joint_rows_are_checked(backend: str) -> None:
    if backend == "cuda":
        pytest.skip("contents on a GPU are not read")
    features, model = labelled_features([3, 1], 5), SPIN(5, 8, 2, 2, branches="both").double()
    data = (features.rows, model.flatten_parameters(), features.labels, features.ptr)
    options = {"model": model.sizes, "index": features.index, "count": features.count}
    for change, message in (
        ({"index": features.joint.index + 99}, r"joint_index must be in \[0, "),
        ({"count": features.joint.count * 0}, "joint_count must be positive"),
        ({"ptr": features.joint.ptr + 1}, "joint_ptr must start with 0"),
        ({"parts": features.joint.parts - 1}, r"parts must be in \[0, "),
    ):
        with pytest.raises(ValueError, match=message):
            ops.training_step(*data, **options, joint=replace(features.joint, **change))
    with pytest.raises(ValueError, match="joint must be given to a model of 'both' branches, got None"):
        ops.training_step(*data, **options)
    with pytest.raises(ValueError, match="ptr must be given to a model of 'both' branches, got None"):
        ops.training_step(*data[:3], None, **options, joint=features.joint)
    with pytest.raises(TypeError, match=r"rows must be a torch\.Tensor, got list"):
        ops.training_step(features.rows.tolist(), *data[1:], **options, joint=features.joint)
    sizes = model.sizes._replace(branches="joint", num_branches=4)
    with pytest.raises(ValueError, match=r"parts must have shape \[J, 4\], got \[\d+, 3\]"):
        ops.training_step(*data, **options | {"model": sizes}, joint=features.joint)
    with pytest.raises(ValueError, match="model must have branches of hops, joint, both, got 'all'"):
        ops.training_step(*data, **options | {"model": model.sizes._replace(branches="all")})
