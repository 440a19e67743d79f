"""The fused training step against autograd through the unfused model, and its reference implementation."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import random_graphs

from spin_fast import SPIN, PowerFeatures, ops, reference, training


def labelled_features(sizes: list[int], num_features: int, operator: str = "sym") -> PowerFeatures:
    graphs = random_graphs(sizes, num_features=num_features, signs=True)
    return PowerFeatures.from_graphs(replace(graphs, y=torch.arange(len(sizes)) % 2), 2, operator)


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
    data, options = arguments_of(model, selected)
    found, gradient = ops.training_step(*data, **options, ids=selected.storage_ids(slice(None)))
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))


def arguments_of(model: SPIN, features: PowerFeatures) -> tuple[tuple, dict]:
    """What both operations take of a model and of features; the parameters are a copy."""
    data = (features.rows, model.flatten_parameters().detach().clone(), features.labels, features.ptr)
    joint = None if model.joint is None else features.joint
    return data, {"model": model.sizes, "index": features.index, "count": features.count, "joint": joint}


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("class_weight", [None, [0.25, 3.0], [0.0, 1.0], [0.0, 0.0]])
def test_training_step_is_its_reference(backend: str, class_weight: list[float] | None, branches: str) -> None:
    if backend == "reference":
        pytest.skip("there is no op then")
    features = labelled_features([30, 1, 0, 7], 5)
    data, options = arguments_of(SPIN(5, 8, 2, 2, branches=branches).double(), features)
    weight = None if class_weight is None else torch.tensor(class_weight, dtype=torch.float64)
    options |= {"ids": torch.tensor([3, 1, 0, 0]), "class_weight": weight}
    for one, other in zip(ops.training_step(*data, **options), reference.training_step(*data, **options), strict=True):
        torch.testing.assert_close(one, other)


def new_adam(parameters: torch.Tensor) -> ops.Adam:
    settings = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
    return ops.Adam(*(torch.zeros_like(parameters) for _ in range(3)), torch.zeros(()), **settings)


STEPS = [([3, 1, 0, 0, 2, 3, 1], 3), ([2, 2], 2**62), ([1, 3], 1), ([], 1), ([], 4)]


@pytest.mark.parametrize(("ids", "batch_size"), STEPS)
@pytest.mark.parametrize("branches", BRANCHES)
def test_training_steps_are_their_reference(
    backend: str, poison: None, branches: str, ids: list[int], batch_size: int
) -> None:
    if backend == "reference":
        pytest.skip("there is no op then")
    torch.manual_seed(0)
    data, options = arguments_of(SPIN(5, 8, 2, 2, branches=branches).double(), labelled_features([30, 1, 0, 7], 5))
    options |= {"ids": torch.tensor(ids, dtype=torch.int64), "batch_size": batch_size}
    options["class_weight"] = torch.tensor([0.25, 3.0], dtype=torch.float64)
    results = []
    for way in (ops, reference):
        parameters = data[1].clone()
        adam = new_adam(parameters)
        losses = way.training_steps(data[0], parameters, *data[2:], **options, adam=adam)
        assert adam.num_steps == len(losses) == max(1, -(-len(ids) // batch_size))
        results.append([losses, parameters, *adam[:3]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("num_features", [1, 5])
def test_training_steps_are_steps_and_updates_of_torch(native, num_features: int, branches: str) -> None:
    """Bit for bit; parameters that threads share an update of, too, and a batch of more than one chunk."""
    for width in (8, 60, 150):
        torch.manual_seed(0)
        model = SPIN(num_features, width, 2, 2, branches=branches)
        features = labelled_features([30, 1, 0, 7, 1300], num_features)
        features = replace(features, rows=features.rows.float())
        (rows, parameters, *data), options = arguments_of(model, features)
        ids, expected = torch.tensor([3, 1, 0, 0, 2, 3, 4, 4, 1, 1, 0]), torch.nn.Parameter(parameters.clone())
        optimizer = torch.optim.Adam([expected], lr=0.01, weight_decay=0.1, fused=True)
        losses = []
        for batch in ids.split(3):
            loss, expected.grad = ops.training_step(rows, expected.detach(), *data, **options, ids=batch)
            losses.append(loss)
            optimizer.step()
        adam = new_adam(parameters)
        found = ops.training_steps(rows, parameters, *data, **options, ids=ids, batch_size=3, adam=adam)
        state = optimizer.state[expected]
        assert torch.equal(found, torch.stack(losses))
        for one, other in zip(
            (parameters, *adam[:4]),
            (expected.detach(), expected.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]),
            strict=True,
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("num_features", [1, 5])
def test_training_steps_are_the_same_bits_by_any_thread(native, threads: None, num_features: int) -> None:
    """After a quarter of a second some are made by one thread alone, to see whether that is faster."""
    features = labelled_features([30, 1, 0, 200], num_features)
    torch.manual_seed(0)
    data, options = arguments_of(SPIN(num_features, 32, 2, 2).double(), features)
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        parameters = data[1].clone()
        adam, ids = new_adam(parameters), torch.tensor([0, 3, 2, 1]).repeat(3000)
        losses = ops.training_steps(data[0], parameters, *data[2:], **options, ids=ids, batch_size=2, adam=adam)
        results.append([losses, parameters, *adam[:4]])
    for one, two, three in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([0, 1, 4])}, r"ids must be in \[0, 4\), got ids\[2\] = 4"),
        ({"labels": torch.tensor([0, 1, 0, 2])}, r"labels must be in \[0, 2\), got labels\[3\] = 2"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_nothing_is_updated_where_a_later_batch_is_wrong(native, change: dict, message: str) -> None:
    data, options = arguments_of(SPIN(5, 8, 2, 2).double(), labelled_features([30, 1, 0, 7], 5))
    arguments = dict(zip(("rows", "parameters", "labels", "ptr"), data, strict=True))
    adam, before = new_adam(data[1]), data[1].clone()
    arguments |= {"ids": torch.tensor([0, 1, 3]), "batch_size": 1, "adam": adam} | change
    with pytest.raises(ValueError, match=message):
        ops.training_steps(**arguments, **options)
    assert torch.equal(data[1], before)
    assert adam.num_steps == adam.gradient.count_nonzero() == 0


def test_training_step_without_joint_rows(backend: str) -> None:
    if backend == "reference":
        pytest.skip("there is no op then")
    features = labelled_features([30, 1, 0, 7], 5)
    data, options = arguments_of(SPIN(5, 8, 2, 2, branches="both").double(), features)
    options["joint"] = ops.JointRows(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(5, dtype=torch.int64))
    for one, other in zip(ops.training_step(*data, **options), reference.training_step(*data, **options), strict=True):
        torch.testing.assert_close(one, other)


def test_segments_are_checked(backend: str) -> None:
    if backend == "cuda":
        pytest.skip("contents on a GPU are not read")
    features = labelled_features([3, 1], 5)
    (*data, ptr), options = arguments_of(SPIN(5, 8, 2, 2).double(), features)
    for change, message in (
        ({"index": features.index - 1}, r"index must be in \[0, "),
        ({"count": features.count * 0}, "count must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.training_step(*data, ptr, **options | change)
    with pytest.raises(ValueError, match="ptr must start with 0"):
        ops.training_step(*data, ptr + 1, **options)


def test_class_weight_is_checked(native) -> None:
    data, options = arguments_of(SPIN(5, 8, 2, 2).double(), labelled_features([3, 1], 5))
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


class Simulated:
    """Steps whose times are told: by all threads, and by one."""

    def __init__(self, library: Any) -> None:
        self.pace = library.Pace()
        self.pace.begin(1000, 32, 2)

    def share_alone(self, seconds: float, shared: float, alone: float) -> float:
        """Make steps for so long; returns the share of the time in which they were made by one thread."""
        spent = {False: 0.0, True: 0.0}
        while sum(spent.values()) < seconds:
            way = self.pace.is_alone()
            for _ in range(self.pace.steps()):
                step = alone if way else shared
                step *= 20 if random.random() < 0.05 else random.uniform(0.98, 1.02)  # the system does other things
                self.pace.add(step)
                spent[way] += step
        return spent[True] / seconds


@pytest.mark.parametrize(("slow", "fast"), [(60e-6, 50e-6), (500e-6, 100e-6), (2e-3, 1.9e-3)])
def test_steps_are_made_in_the_faster_way(native, slow: float, fast: float) -> None:
    """Trying the other way costs about a hundredth of the time, and pauses of the system as much."""
    random.seed(0)
    steps, lost = Simulated(native), 1 - fast / slow  # of the time of steps in the slower way
    assert steps.share_alone(20, shared=fast, alone=slow) * lost < 0.025
    steps.share_alone(2, shared=slow, alone=fast)  # cores have been moved apart: after at most this it has found out
    assert (1 - steps.share_alone(20, shared=slow, alone=fast)) * lost < 0.025
    steps.share_alone(2, shared=fast, alone=slow)
    assert steps.share_alone(20, shared=fast, alone=slow) * lost < 0.025


def test_steps_of_which_one_thread_makes_no_other(native) -> None:
    random.seed(0)
    steps = Simulated(native)
    assert steps.share_alone(5, shared=5e-3, alone=1e-3) == 0  # of long ones, handing over takes no part that counts
    steps.pace.begin(1000, 128, 2)
    assert steps.share_alone(5, shared=60e-6, alone=50e-6) > 0.8
    assert steps.pace.is_alone()
    steps.pace.begin(1000, 128, 2)
    assert steps.pace.is_alone()
    steps.pace.begin(1000, 32, 2)  # what was found of others does not count
    assert not steps.pace.is_alone()
