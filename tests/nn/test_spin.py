from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import random_graphs

from spin_fast import PAGNN, SPIN, PowerFeatures


def made_features(
    deduplicate: bool = True, num_hops: int = 2, density: float = 0.4, operator: str = "sym"
) -> PowerFeatures:
    graphs = replace(random_graphs([4, 0, 1, 6, 3], density, signs=True), y=torch.tensor([0, 1, 0, 1, 1]))
    return PowerFeatures.from_graphs(graphs, num_hops, operator, deduplicate=deduplicate)


def plain_spin(model: SPIN, features: PowerFeatures) -> torch.Tensor:
    """The method as it is written: a loop over graphs and branches, one node per row."""
    rows, ptr = features.dense_rows(), features.selected_ptr
    parts = [] if model.hops is None else [(model.hops, r, rows[r]) for r in range(len(rows))]
    parts += [] if model.joint is None else [(model.joint, 0, torch.cat([*rows], dim=1))]
    graphs = []
    for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        branches = []
        for group, r, of_nodes in parts:
            z = of_nodes[begin:end]
            for layer in group.layers:
                z = z @ layer.weight[r] + layer.bias[r]
                z = torch.nn.functional.leaky_relu(z, model.config["negative_slope"])
            if group.attention is None:
                branches.append(z.sum(0))
            else:
                scale = len(z) if model.config["size_aware"] else 1
                branches.append(scale * torch.softmax(torch.relu(z @ group.attention[r]), 0) @ z)
        graphs.append(torch.cat(branches))
    return model.classifier(torch.stack(graphs))


@pytest.mark.parametrize("options", [{"attention": False}, {"attention": True}, {"size_aware": True}])
@pytest.mark.parametrize("branches", ["hops", "joint", "both"])
@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("operator", ["sym", "sym,rw,adj"])
def test_is_the_method_as_written(backend: str, options: dict, branches: str, deduplicate: bool, operator: str) -> None:
    features = made_features(deduplicate, operator=operator)
    options = options | {"num_operators": features.num_operators, "branches": branches}
    model = SPIN(3, 5, 2, 2, num_layers=2, **options).double()
    assert model.num_branches == features.num_branches
    for selected in (features, features[[3, 3, 1, 0]], features[[3, 3, 1, 0]].take(), features[[4]].expand()):
        torch.testing.assert_close(model(selected), plain_spin(model, selected))
    dense = model.forward_tensors(features.dense_rows(), features.node_ptr)
    torch.testing.assert_close(dense, model(features))


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("branches", ["hops", "joint", "both"])
def test_batch_norm_over_distinct_rows_is_over_nodes(attention: bool, branches: str) -> None:
    features = made_features()
    torch.manual_seed(0)
    ragged = SPIN(3, 5, 2, 2, branches=branches, attention=attention, batch_norm=True).double()
    dense = copy.deepcopy(ragged)
    for _ in range(3):
        a, b = ragged(features), dense.forward_tensors(features.dense_rows(), features.node_ptr)
        torch.testing.assert_close(a, b)
        a.square().sum().backward()
        b.square().sum().backward()
    for one, other in zip(ragged.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)
    for one, other in zip(ragged.buffers(), dense.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    ragged.eval(), dense.eval()
    torch.testing.assert_close(ragged(features), dense.forward_tensors(features.dense_rows(), features.node_ptr))
    ragged.train()
    assert ragged(features[[2]]).isfinite().all()  # one node: no variance, and no statistics of it


def test_dropout_has_a_mask_per_node_and_none_in_evaluation() -> None:
    features = made_features(density=0.0)  # every branch but the first has one distinct row, 0
    model = SPIN(3, 64, 2, 2, attention=False, dropout=0.5).double()
    model.eval()
    assert torch.equal(model(features), model(features))
    model.train()
    seen = {}
    model.classifier.register_forward_pre_hook(lambda _, inputs: seen.update(readout=inputs[0].detach()))
    model(features)
    per_node = seen["readout"][3, 64:128] / seen["readout"][2, 64:128]  # 6 equal nodes against 1
    assert len(torch.unique(per_node[per_node.isfinite()])) > 2


def test_gradcheck_through_the_model() -> None:
    features = made_features()
    model = SPIN(3, 4, 2, 2, num_layers=2, classifier_features=(3,)).double()
    rows, ptr, index, count = features.branch_rows()
    rows = tuple(x.clone().requires_grad_() for x in rows)
    assert torch.autograd.gradcheck(lambda *rows: model.forward_tensors(rows, ptr, index, count), rows)


def test_batches_of_nothing() -> None:
    features = made_features()
    model = SPIN(3, 4, 2, 2).double()
    assert model(features[[]]).shape == (0, 2)
    assert model(features[[1]]).shape == (1, 2)  # an empty graph


def test_calibration_refuses_what_is_not_finite() -> None:
    graphs = random_graphs([9, 5], 0.3, dtype=torch.float32)
    model = SPIN(3, 16, 2, 2)
    before = copy.deepcopy(model.state_dict())
    graphs.x[4, 1] = float("nan")
    with pytest.raises(ValueError, match="features must be finite to calibrate by, got NaN or infinity"):
        model.calibrate(PowerFeatures.from_graphs(graphs, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_are_flattened_once() -> None:
    for model in (SPIN(3, 8, 2, 2), SPIN(0, 8, 2, 2)):  # an empty parameter has no address
        assert model.flatten_parameters() is model.flatten_parameters()


@pytest.mark.parametrize("options", [{"attention": False}, {"attention": True}, {"size_aware": True}])
def test_calibration_standardises_every_layer(options: dict) -> None:
    graphs = random_graphs([9, 5, 0, 20, 13] * 8, 0.3)
    features = PowerFeatures.from_graphs(replace(graphs, x=7 * graphs.x.abs() + 3), 2)
    model = SPIN(3, 16, 2, 2, **options).double()
    flat, before = model.flatten_parameters(), copy.deepcopy(model.classifier)
    model.calibrate(features)
    assert model.flatten_parameters() is flat
    z = features.dense_rows()
    for layer in model.hops.layers:
        z = layer(z)
        torch.testing.assert_close(z.mean(1), torch.zeros(3, 16).double(), atol=1e-9, rtol=0)
        torch.testing.assert_close(z.std(1, correction=0), torch.ones(3, 16).double())
        z = torch.nn.functional.leaky_relu(z, 0.01)
    seen = {}
    model.classifier.register_forward_pre_hook(lambda _, inputs: seen.update(readout=inputs[0]))
    scores, readout = model(features), seen["readout"]
    standard = (readout - readout.mean(0)) / readout.std(0, correction=0)
    torch.testing.assert_close(scores, before(standard))


def tensors_of(features: PowerFeatures, form: str) -> tuple:
    return (features.dense_rows(), features.node_ptr) if form == "dense" else features.branch_rows()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "training", "options"),
    [
        ("dense", True, {"num_layers": 2}),
        ("dense", True, {"num_layers": 1, "dropout": 0.2, "batch_norm": True}),
        ("ragged", True, {"num_layers": 1, "attention": False, "batch_norm": True}),
        ("ragged", False, {"num_layers": 2, "size_aware": True}),
    ],
)
def test_compiles_whole_and_once(native, form: str, training: bool, options: dict) -> None:
    """For any number of nodes and graphs; but torch makes single graphs a case of their own, and sizes that are equal
    in the first batch."""
    model = SPIN(3, 4, 2, 2, **options).double().train(training)
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward_tensors, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, sizes in enumerate([[9, 0, 1, 12, 7], [5, 9], [30, 4, 1], [3]]):
        features = PowerFeatures.from_graphs(random_graphs(sizes, signs=True, seed=number), 2)
        with torch.compiler.set_stance("fail_on_recompile" if 0 < number < 3 else "default"):
            torch.manual_seed(number)
            result = compiled(*tensors_of(features, form))
        torch.manual_seed(number)
        expected = twin.forward_tensors(*tensors_of(features, form))
        gradients = [
            torch.autograd.grad(scores.square().sum(), list(one.parameters()))
            for scores, one in ((result, model), (expected, twin))
        ]
        for one, other in zip((result, *gradients[0]), (expected, *gradients[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_state_dict_pickle_and_config() -> None:
    model = SPIN(3, 4, 2, 2, attention=False, batch_norm=True, classifier_features=(8,))
    twin = SPIN(**model.config)
    twin.load_state_dict(model.state_dict())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0, 2, 2), "hidden_features must be at least 1, got 0"),
        ((3, 4, 2, -1), "num_hops must be at least 0, got -1"),
        ((3, 4, 0, 2), "out_features must be at least 1"),
    ],
)
def test_bad_sizes_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPIN(*arguments)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1"):
        SPIN(3, 4, 2, 2, dropout=1)
    with pytest.raises(ValueError, match="size_aware must come with attention"):
        SPIN(3, 4, 2, 2, attention=False, size_aware=True)
    with pytest.raises(ValueError, match="classifier_features must be at least 1, got -1"):
        SPIN(3, 4, 2, 2, classifier_features=(-1,))
    with pytest.raises(TypeError, match=r"features must be torch.float32 as the model is, got torch.float64"):
        SPIN(3, 4, 2, 2)(made_features())
    with pytest.raises(ValueError, match=r"rows must be dense .* to train with dropout"):
        SPIN(3, 4, 2, 2, dropout=0.5).double().forward_tensors(*made_features().branch_rows())
    with pytest.raises(TypeError, match="features must be PowerFeatures, got Tensor"):
        SPIN(3, 4, 2, 2)(torch.ones(3))
    with pytest.raises(ValueError, match="features must have 3 hops and 3 features as the model has, got 2 and 3"):
        SPIN(3, 4, 2, 3)(made_features())
    with pytest.raises(ValueError, match=r"features must be of 2 operator\(s\) as the model is, got 'sym'"):
        SPIN(3, 4, 2, 2, num_operators=2)(made_features())
    with pytest.raises(ValueError, match="num_operators must be at least 1, got 0"):
        SPIN(3, 4, 2, 2, num_operators=0)
    for options, message in (
        ({"attention": "sum"}, "attention must be a bool, got str"),
        ({"size_aware": 1}, "size_aware must be a bool, got int"),
        ({"batch_norm": None}, "batch_norm must be a bool, got NoneType"),
        ({"classifier_features": 32}, "classifier_features must be a sequence of ints, got int"),
        ({"dropout": "a"}, "dropout must be a number, got str"),
    ):
        with pytest.raises(TypeError, match=message):
            SPIN(3, 4, 2, 2, **options)
    assert SPIN(3, 4, 2, 2, batch_norm=np.True_).config["batch_norm"] is True
    with pytest.raises(TypeError, match=r"model must be torch.float32 or .*, got torch.bfloat16; .* torch.autocast"):
        SPIN(3, 4, 2, 2).bfloat16()(made_features())


@pytest.mark.parametrize(
    "make",
    [
        lambda: SPIN(3, 4, 2, 2),
        lambda: SPIN(3, 4, 2, 2, batch_norm=True),
        lambda: PAGNN([torch.nn.Linear(3, 4) for _ in range(3)]),
    ],
)
def test_wrong_tensors_are_named(make: Callable[[], torch.nn.Module]) -> None:
    """In evaluation and in training, which is not the fused form with BatchNorm."""
    features, model = made_features(), make().double()
    dense, ptr = features.dense_rows(), features.node_ptr
    rows, segments, index, count = features.branch_rows()
    batch = torch.arange(len(ptr) - 1).repeat_interleave(ptr.diff())
    far = torch.cat([ptr[:-1], ptr[-1:] + 100])
    for arguments, message in (
        ((dense, batch), "ptr must end with"),
        ((dense, far), f"ptr must end with .*{dense.shape[1]}.*, got {int(far[-1])}"),
        ((dense, torch.tensor([0, 50_000_000])), "ptr must end with .*, got 50000000"),
        ((dense, ptr.int()), "ptr must be int64, got int32"),
        ((dense[0], ptr), r"rows must have shape \[3, N, (3|d)\], got \[14, 3\]"),
        ((dense[:2], ptr), r"rows must have shape \[3, N, (3|d)\], got \[2, 14, 3\]"),
        ((dense, ptr, index), "index must come with the ragged form"),
        ((dense, ptr, None, count), "count must come with the ragged form"),
        ((rows[:2], segments, index, count), "rows must have 3 branches, got 2"),
        ((rows, segments[:-1], index, count), r"ptr must have a multiple of 3 segments"),
        ((rows, segments, index + 1000, count), "index must be in"),
        ((rows, segments, index.roll(1), count), r"index must be in \[0, .*the rows of branch 0, got index\[0\]"),
        ((rows, segments, index, count[1:]), "count must have shape"),
        (((rows[0], rows[1], rows[2][0]), segments, index, count), r"rows\[2\] must have shape"),
        ((3, ptr), "rows must be a tensor, or a sequence of one per branch, got int"),
    ):
        for training in (False, True):
            with pytest.raises((TypeError, ValueError), match=message):
                model.train(training).forward_tensors(*arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"index": torch.tensor([10**8] * 14)}, ValueError, r"joint.index must be in \[0, "),
        ({"ptr": torch.tensor([0, 4, 9, 9, 9, 9])}, ValueError, "joint.ptr must end with the number of index"),
        ({"ptr": torch.tensor([0, 4])}, ValueError, r"joint.ptr must have shape \[6\], got \[2\]"),
        ({"count": torch.zeros(14, dtype=torch.int32)}, ValueError, r"joint.count must (be positive|have shape)"),
        ({"parts": torch.zeros(9, 2, dtype=torch.int64)}, ValueError, r"joint.parts must have shape \[J, 3\]"),
        ({"parts": torch.full((9, 3), -1)}, ValueError, r"joint.parts must be in \[0, "),
        (None, TypeError, "joint must be JointRows, with the ragged form .*, got NoneType"),
    ],
)
@pytest.mark.parametrize("branches", ["joint", "both"])
def test_joint_rows_are_checked(branches: str, change: dict | None, error: type, message: str) -> None:
    features = made_features()
    model = SPIN(3, 5, 2, 2, branches=branches).double()
    joint = None if change is None else replace(features.joint, **change)
    with pytest.raises(error, match=message):
        model.forward_tensors(*features.branch_rows(), joint=joint)


def test_joint_rows_are_not_ignored() -> None:
    features = made_features()
    dense = (features.dense_rows(), features.node_ptr)
    for branches, rows in (("joint", dense), ("hops", features.branch_rows())):
        with pytest.raises(ValueError, match="joint must be left out with dense rows, and with a model without a"):
            SPIN(3, 5, 2, 2, branches=branches).double().forward_tensors(*rows, joint=features.joint)
