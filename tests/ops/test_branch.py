"""The fused branch against loops, the reference, and autograd through the unfused model."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import cuda_kernels
import numpy as np
import pytest
import torch
from helpers import TOLERANCE, float_dtypes, index_dtypes, looped_readout, random_graphs, sparse, strided
from hypothesis import assume, given
from hypothesis import strategies as st

import spin_fast
from spin_fast import SPIN, PowerFeatures, datasets, ops, reference, training
from spin_fast._common.indexing import offsets
from spin_fast._common.rows import arrays_of, sparse_rows
from spin_fast.ops.parameters import ModelSizes


def drawn_layers(rng: np.random.Generator, branches: int, widths: list[int], dtype: torch.dtype, scale: float = 1.0):
    """Weights, biases, and w for the layers between these widths."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(scale * rng.standard_normal(shape) / np.sqrt(max(shape[-2], 1))).to(dtype)

    weights = [draw(branches, a, b) for a, b in pairwise(widths)]
    biases = [draw(branches, b) for b in widths[1:]]
    return weights, biases, draw(branches, widths[-1])


@st.composite
def fused_branches(draw: st.DrawFn) -> dict:
    """Arguments of branch_readout: rows unused, shared in a branch and between branches, empty and repeated graphs.

    A single branch may be of joint rows, each of which consists of any of the rows.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    dtype, branches = draw(float_dtypes), draw(st.integers(1, 3))
    num_parts = draw(st.sampled_from([0, 0, 1, 2, 5])) if branches == 1 else 0
    widths = [draw(st.sampled_from([0, 1, 2, 5, 20, 70]))]
    widths += draw(st.lists(st.sampled_from([1, 3, 16, 24, 32, 40, 64, 100]), min_size=1, max_size=4))
    graphs = draw(st.integers(0, 5))
    sizes = rng.integers(0, draw(st.sampled_from([1, 8, 150])), graphs * branches)
    per_branch = sizes.reshape(branches, graphs).sum(1)
    indexed = draw(st.booleans())
    owned = rng.integers(1, 1 + max(per_branch.max(initial=0), 1), branches) if indexed else per_branch
    kept = rng.random((1, widths[0])) < draw(st.sampled_from([0.5, 1.0]))
    rows = rng.standard_normal((owned.sum(), widths[0])) * kept
    starts = np.concatenate([[0], owned.cumsum()])
    ranges = [(0, starts[-1])] * branches if indexed and draw(st.booleans()) else list(pairwise(starts))
    index = [rng.integers(*ranges[b], per_branch[b]) for b in range(branches)]
    stored = rng.integers(1, 2 + 2 * len(rows)) if num_parts else 0
    parts = rng.integers(0, stored, (len(rows), num_parts)) if num_parts else None
    rows = rows if parts is None else rng.standard_normal((stored, widths[0])) * (rng.random((stored, widths[0])) < 0.5)
    weights, biases, w = drawn_layers(rng, branches, [max(num_parts, 1) * widths[0], *widths[1:]], dtype)
    ids = draw(st.none() | st.lists(st.integers(0, graphs - 1), max_size=6)) if graphs else None
    counted = draw(st.booleans())
    return {
        "rows": torch.from_numpy(rows).to(dtype),
        "weights": weights,
        "biases": biases,
        "w": w if draw(st.booleans()) else None,
        "ptr": torch.tensor([0, *sizes.cumsum().tolist()]),
        "index": torch.from_numpy(np.concatenate(index)).to(draw(index_dtypes)) if indexed else None,
        "count": torch.from_numpy(rng.integers(1, 5, sizes.sum())).to(torch.int32) if counted else None,
        "ids": None if ids is None else torch.tensor(ids, dtype=torch.int64),
        "parts": None if parts is None else torch.from_numpy(parts).to(draw(index_dtypes)),
        "negative_slope": draw(st.sampled_from([0.0, 0.01, 1.0])),
    }


def looped_branches(arguments: dict) -> torch.Tensor:
    """In float64, one MLP evaluation per row of each branch, then the readouts in loops."""
    rows, ptr, index, ids, parts = (arguments.get(name) for name in ("rows", "ptr", "index", "ids", "parts"))
    rows = rows if parts is None else rows[parts.long()].flatten(1)
    branches = arguments["weights"][0].shape[0]
    num_graphs = (len(ptr) - 1) // branches
    entries = torch.arange(int(ptr[-1])) if index is None else index.long()
    z = torch.zeros(int(ptr[-1]), arguments["weights"][-1].shape[2], dtype=torch.float64)
    for b in range(branches):
        own = slice(int(ptr[b * num_graphs]), int(ptr[(b + 1) * num_graphs]))
        x = rows[entries[own]].double()
        for weight, bias in zip(arguments["weights"], arguments["biases"], strict=True):
            x = x @ weight[b].double() + bias[b].double()
            x = torch.where(x > 0, x, arguments["negative_slope"] * x)
        z[own] = x
    readout, _ = looped_readout(z, ptr, branches, arguments["w"], None, arguments["count"])
    return readout if ids is None else readout[ids]


@given(arguments=fused_branches())
def test_is_the_mlp_and_the_readout(backend: str, poison: None, arguments: dict) -> None:
    assert_is_looped(arguments, 5)


def assert_is_looped(arguments: dict, factor: float) -> None:
    expected, result = looped_branches(arguments), spin_fast.branch_readout(**arguments)
    factor *= max(float(expected.abs().max()), 1.0) if expected.numel() else 1.0
    tolerance = {name: factor * value for name, value in TOLERANCE[result.dtype].items()}
    torch.testing.assert_close(result.double(), expected, **tolerance)


@given(arguments=fused_branches(), with_rows=st.booleans())
def test_gradients_are_those_of_the_reference(backend: str, poison: None, arguments: dict, with_rows: bool) -> None:
    compare_gradients(arguments, with_rows)


@given(arguments=fused_branches(), share=st.sampled_from([0.0, 0.1, 1.0]))
def test_sparse_rows_are_read_as_dense_ones(backend: str, poison: None, arguments: dict, share: float) -> None:
    """To the bit, but for rows of one feature, which have a way of their own where they are dense."""
    generator = torch.Generator().manual_seed(0)
    dense = arguments["rows"] * (torch.rand(arguments["rows"].shape, generator=generator) < share)
    if backend == "cuda":
        with pytest.raises(ValueError, match=r"^rows must be dense on a GPU$"):
            spin_fast.branch_readout(**arguments | {"rows": sparse(dense)})
        return
    results = []
    for rows in (dense, sparse(dense)):
        weights = [weight.clone().requires_grad_() for weight in arguments["weights"]]
        readout = spin_fast.branch_readout(**arguments | {"rows": rows, "weights": weights})
        results.append([readout, *torch.autograd.grad(readout.square().sum(), weights)])
    one_feature = dense.shape[1] == 1 and arguments["parts"] is None
    for one, other in zip(*results, strict=True):
        if one_feature:
            scale = max(float(one.detach().abs().max()), 1.0) if one.numel() else 1.0
            torch.testing.assert_close(one / scale, other / scale)
        else:
            assert torch.equal(one, other)


def test_sparse_rows_have_second_derivatives_but_no_own(native) -> None:
    rows = sparse(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, -3.0]]).double())
    ptr = torch.tensor([0, 2, 3])
    weight, bias = torch.randn(1, 3, 2).double().requires_grad_(), torch.randn(1, 2).double().requires_grad_()
    w = torch.randn(1, 2).double().requires_grad_()

    def readout(*layer: torch.Tensor) -> torch.Tensor:
        return spin_fast.branch_readout(rows, [layer[0]], [layer[1]], layer[2], ptr)

    assert torch.autograd.gradcheck(readout, (weight, bias, w))
    assert torch.autograd.gradgradcheck(readout, (weight, bias, w))
    arrays = arrays_of(rows)
    with pytest.raises(ValueError, match=r"^rows must be dense to have a gradient, got sparse_csr$"):
        spin_fast.branch_readout(sparse_rows(arrays[0].requires_grad_(), *arrays[1:]), [weight], [bias], w, ptr)


@pytest.mark.parametrize(
    ("crow", "col", "message"),
    [
        ([0, 1, 1], [3, 0], "crow_indices must end with the number of values, 2, got 1"),
        ([0, 2, 1], [0, 1], r"crow_indices must not decrease, got crow_indices\[1\] = 2, crow_indices\[2\] = 1"),
        ([1, 1, 2], [0, 1], "crow_indices must start with 0, got 1"),
        ([0, 1, 2], [0, 3], r"col_indices must be in \[0, 3\), got col_indices\[1\] = 3"),
        ([0, 1, 2], [-1, 0], r"col_indices must be in \[0, 3\), got col_indices\[0\] = -1"),
        (
            [0, 0, 2],
            [1, 1],
            r"col_indices must ascend in each row, got col_indices\[0\] = 1, col_indices\[1\] = 1 in row 1",
        ),
    ],
)
def test_wrong_sparse_rows_are_refused(backend: str, crow: list[int], col: list[int], message: str) -> None:
    if backend == "cuda":
        pytest.skip("rows must be dense on a GPU")
    indices = (torch.tensor(values, dtype=torch.int32) for values in (crow, col))
    rows, ptr = sparse_rows(torch.ones(2), *indices, 3), torch.tensor([0, 2])
    weights, biases = [torch.ones(1, 3, 2)], [torch.ones(1, 2)]
    with pytest.raises(ValueError, match=f"^{message}$"):
        spin_fast.branch_readout(rows, weights, biases, None, ptr)
    model = ModelSizes(1, [2], [2], False, 0.01, "hops")
    with pytest.raises(ValueError, match=f"^{message}$"):
        ops.training_step(rows, torch.ones(3 * 2 + 2 + 2 * 2 + 2), torch.tensor([0]), ptr, model=model)


def test_sparse_rows_have_narrow_indices(backend: str) -> None:
    rows = torch.eye(3).to_sparse_csr()
    with pytest.raises(TypeError, match=r"^rows\.crow_indices\(\) must be int32, got int64$"):
        spin_fast.branch_readout(rows, [torch.ones(1, 3, 2)], [torch.ones(1, 2)], None, torch.tensor([0, 3]))


def compare_gradients(arguments: dict, with_rows: bool) -> None:
    """In float64, of every parameter, and of the rows too if wanted."""
    arguments = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    arguments |= {name: [part.double() for part in arguments[name]] for name in ("weights", "biases")}
    results = []
    for function in (spin_fast.branch_readout, reference.branch_readout):
        copies = dict(arguments)
        copies |= {name: [part.clone().requires_grad_() for part in arguments[name]] for name in ("weights", "biases")}
        copies["rows"] = arguments["rows"].clone().requires_grad_(with_rows)
        inputs = [*copies["weights"], *copies["biases"], *([copies["rows"]] if with_rows else [])]
        if arguments["w"] is not None:
            copies["w"] = arguments["w"].clone().requires_grad_()
            inputs.append(copies["w"])
        out = function(**copies)
        generator = torch.Generator().manual_seed(0)
        cotangent = torch.randn(out.shape, dtype=out.dtype, generator=generator)
        results.append(torch.autograd.grad(out, inputs, cotangent, allow_unused=True))
    for one, other in zip(*results, strict=True):
        other = torch.zeros_like(one) if other is None else other
        scale = max(float(other.abs().max()), 1.0) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * scale)


@given(arguments=fused_branches())
def test_training_step_on_any_segments(native, poison: None, arguments: dict) -> None:
    """Loss and gradient in float64 where branches share rows and graphs are chosen twice."""
    assume(arguments["parts"] is None)
    branches, *widths = arguments["weights"][0].shape[0], *(weight.shape[2] for weight in arguments["weights"])
    num_graphs = (len(arguments["ptr"]) - 1) // branches
    layers = zip(arguments["weights"], arguments["biases"], strict=True)
    leaves = [arguments["w"], *(leaf for layer in layers for leaf in layer)]
    classifier = torch.linspace(-1, 1, (branches * widths[-1] + 1) * 4 + 5 * 2)
    flat = torch.cat([leaf.flatten().double() for leaf in [*leaves, classifier] if leaf is not None])
    data = {name: arguments[name] for name in ("ptr", "index", "count", "ids")}
    model = ModelSizes(branches, widths, [4, 2], arguments["w"] is not None, arguments["negative_slope"])
    rows, labels = arguments["rows"].double(), torch.arange(num_graphs) % 2
    *hops, ids = data.values()
    result = torch.ops.spin_fast.training_step(
        *arrays_of(rows), flat, labels, None, *hops, *[None] * 4, ids, *model[:-1], False, True
    )
    expected = reference.training_step(rows, flat, labels, **data, model=model)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10 * max(float(other.abs().max()), 1.0))


def test_branches_may_share_a_row(native) -> None:
    """In a process of its own, which a wrong row number would end."""
    code = """
import torch, spin_fast
rows, index = torch.randn(200_000, 2), torch.cat([torch.arange(3000), torch.tensor([2999])])
weights, biases = [torch.randn(2, 2, 5)], [torch.randn(2, 5)]
arguments = (rows, weights, biases, None, torch.tensor([0, 3000, 3001]))
result = spin_fast.branch_readout(*arguments, index=index)
torch.testing.assert_close(result, spin_fast.reference.branch_readout(*arguments, index=index), rtol=1e-3, atol=1e-2)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def made_features(
    sizes: list[int], num_features: int = 3, dtype: torch.dtype = torch.float64, operator: str = "sym"
) -> PowerFeatures:
    graphs = random_graphs(sizes, num_features=num_features, dtype=dtype, signs=True)
    return PowerFeatures.from_graphs(replace(graphs, y=torch.arange(len(sizes)) % 2), 2, operator)


def small_arguments(attention: bool = True) -> tuple[tuple, dict]:
    features = made_features([3, 0, 4, 1])
    weights, biases, w = drawn_layers(np.random.default_rng(0), 3, [3, 4, 2], torch.float64)
    tensors = (features.rows, *weights, *biases, *([w] if attention else []))
    fixed = {"index": features.index, "count": features.count, "ids": torch.tensor([2, 0, 2, 1]), "ptr": features.ptr}
    return tensors, fixed


@pytest.mark.parametrize("attention", [True, False])
def test_first_and_second_derivatives(native, attention: bool) -> None:
    tensors, fixed = small_arguments(attention)

    def call(rows, w1, w2, b1, b2, w=None):
        return spin_fast.branch_readout(rows, [w1, w2], [b1, b2], w, **fixed)

    inputs = [value.clone().requires_grad_() for value in tensors]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("form", ["dense", "indexed"])
def test_no_argument_need_be_contiguous(backend: str, form: str) -> None:
    features = made_features([3, 0, 4, 1])
    weights, biases, w = drawn_layers(np.random.default_rng(0), 3, [3, 4, 2], torch.float64)
    rows, ptr = features.rows, features.ptr
    others = {"index": features.index, "count": features.count, "ids": torch.tensor([2, 0, 2, 1])}
    if form == "dense":
        rows, ptr, others = features.dense_rows(), features.node_ptr, {"ids": others["ids"]}
    results = []
    for way in (lambda value: value, strided):
        leaves = [way(value).detach().requires_grad_() for value in (rows, *weights, *biases, w)]
        x, w1, w2, b1, b2, attention = leaves
        fixed = {name: way(value) for name, value in others.items()}
        out = spin_fast.branch_readout(x, [w1, w2], [b1, b2], attention, way(ptr), **fixed)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_third_derivative_is_refused(native) -> None:
    tensors, fixed = small_arguments(attention=False)
    rows, w1, w2, b1, b2 = (value.clone().requires_grad_() for value in tensors)
    out = spin_fast.branch_readout(rows, [w1, w2], [b1, b2], None, **fixed).square().sum()
    (first,) = torch.autograd.grad(out, w1, create_graph=True)
    with pytest.raises(NotImplementedError, match="branch_readout has no third derivative"):
        torch.autograd.grad(first.square().sum(), w1, create_graph=True)


def test_opcheck(native) -> None:
    features = made_features([3, 0, 4, 1])
    parameters = torch.randn(3 * (2 + (3 + 1) * 4 + (4 + 1) * 2), dtype=torch.float64)
    model = (3, [4, 2], True, 0.01)
    ids = torch.tensor([2, 0, 2])
    data = (features.ptr, features.index, features.count)
    rows = (features.rows.requires_grad_(), None, None, 3)
    inputs = (*rows, parameters.requires_grad_(), None, *data, ids, *model, *[False] * 3)
    torch.library.opcheck(torch.ops.spin_fast.branch_readout.default, inputs)
    of = features.joint
    of_joint = torch.randn(2 + (9 + 1) * 4 + (4 + 1) * 2, dtype=torch.float64, requires_grad=True)
    joint_data = (of.parts, of.ptr, of.index, of.count, ids)
    joint_inputs = (*rows, of_joint, *joint_data, 1, *model[1:], *[False] * 3)
    torch.library.opcheck(torch.ops.spin_fast.branch_readout.default, joint_inputs)
    grad = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    once = ("test_schema", "test_autograd_registration", "test_faketensor")  # sizes of its gradient depend on the ids
    for with_rows in (True, False):
        backward = torch.ops.spin_fast.branch_readout_backward.default
        torch.library.opcheck(backward, (grad, *inputs, with_rows), test_utils=once)
    flat = torch.cat([parameters.detach(), torch.randn(7 * 2, dtype=torch.float64)])
    step = (
        features.rows.detach(),
        None,
        None,
        3,
        flat,
        features.labels,
        torch.rand(2, dtype=torch.float64),
        *data,
        *[None] * 4,
        ids,
        3,
        [4, 2],
        [2],
        True,
        0.01,
        False,
        False,
    )
    torch.library.opcheck(torch.ops.spin_fast.training_step.default, step)
    moments = (torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros(()))
    steps = (*step, 2, *moments, 0.01, 0.9, 0.999, 0.0, 1e-8)
    torch.library.opcheck(torch.ops.spin_fast.training_steps.default, steps)
    both = torch.cat([parameters.detach(), of_joint.detach(), torch.randn(9 * 2, dtype=torch.float64)])
    step = (*step[:4], both, *step[5:10], *joint_data, *step[15:])
    torch.library.opcheck(torch.ops.spin_fast.training_step.default, step)
    *arrays, width = arrays_of(sparse(features.rows.detach()))
    of_sparse = (*(array.clone() for array in arrays), width)
    torch.library.opcheck(torch.ops.spin_fast.branch_readout.default, (*of_sparse, *inputs[4:]))
    torch.library.opcheck(backward, (grad, *of_sparse, *inputs[4:], False), test_utils=once)
    torch.library.opcheck(torch.ops.spin_fast.training_step.default, (*of_sparse, *step[4:]))


@pytest.mark.parametrize(
    ("x", "weight", "dtype"),
    [
        ([1.0, 200.0, 201.0, 1e4, 3.0], 1.0, torch.float32),
        ([1.0, 0.9e10, 1e10, 1e10, 1.0], 5.9e-9, torch.float32),
        ([0.0, 1e18, 1e19, 1e19, 5e18], 1e-19, torch.float32),
        ([1.0, 0.9e30, 1e30, 1e30, 1.0], 590e-30, torch.float64),
        ([1.0, 0.9e154, 1e154, 1e154, 1.0], 590e-154, torch.float64),
    ],
    ids=["exp(beta)", "exp(beta) x^2", "x^2 of a gradient", "exp(beta) x^2 in float64", "x^2 in float64"],
)
def test_large_numbers_do_not_overflow(backend: str, x: list[float], weight: float, dtype: torch.dtype) -> None:
    ptr = torch.tensor([0, 3, 5])

    def results(function: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        """The readout, and the gradients of the weight and of w."""
        rows, bias = torch.tensor(x, dtype=dtype)[:, None], torch.zeros(1, 1, dtype=dtype)
        layer = torch.full((1, 1, 1), weight, dtype=dtype, requires_grad=True)
        w = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        readout = function(rows, [layer], [bias], w, ptr)
        return [readout.detach(), *torch.autograd.grad(readout, (layer, w), torch.full_like(readout, 100))]

    z = weight * max(x)
    terms = (z, 100 * max(x), 100 * z**2)  # that cancel each other
    expected = results(reference.branch_readout, torch.float64)
    for one, other, term in zip(results(spin_fast.branch_readout, dtype), expected, terms, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6 * term)


@pytest.mark.parametrize("num_nodes", [2, 300])  # sums in float32, or in float64
def test_large_features_do_not_overflow(backend: str, num_nodes: int) -> None:
    """exp(beta) is finite, and its product with z is not."""
    rows = torch.tensor([[1e9, 1.0], [0.5e9, 1.0]]).repeat(num_nodes // 2, 1)
    weights, w = [torch.eye(2)[None].requires_grad_()], torch.tensor([[68e-9, 0.0]])
    ptr = torch.tensor([0, num_nodes])
    readout = spin_fast.branch_readout(rows, weights, [torch.zeros(1, 2)], w, ptr)
    expected = spin_fast.attention_readout(rows @ weights[0][0], w[0], ptr)
    torch.testing.assert_close(readout, expected)
    gradients = (torch.autograd.grad(of.sum(), weights)[0] for of in (readout, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4 * 1e9)


def test_more_branches_than_a_chunk_has_rows(backend: str) -> None:
    """Each piece of a long graph has a row of each branch."""
    rows, weights = torch.randn(400, 3, 2), [torch.randn(400, 2, 4096)]
    readout = spin_fast.branch_readout(rows, weights, [torch.zeros(400, 4096)], None, torch.tensor([0, 3]))
    z = torch.nn.functional.leaky_relu(rows @ weights[0], 0.01)
    torch.testing.assert_close(readout, z.sum(1).reshape(1, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_nodes", [3, 100_000])
def test_nan_in_a_graph_of_any_size(backend: str, num_nodes: int) -> None:
    rows = torch.randn(num_nodes, 2).index_fill(0, torch.tensor([1]), float("nan"))
    weights, biases, w = drawn_layers(np.random.default_rng(0), 1, [2, 64], torch.float32)
    for attention in (w, None):
        assert spin_fast.branch_readout(rows, weights, biases, attention, torch.tensor([0, num_nodes])).isnan().all()


def test_nan_stays_in_its_graph(backend: str) -> None:
    rows = torch.randn(6, 3)
    rows[1] = float("nan")
    weights, biases, w = drawn_layers(np.random.default_rng(0), 1, [3, 20], torch.float32)
    for attention in (w, None):
        readout = spin_fast.branch_readout(rows, weights, biases, attention, torch.tensor([0, 3, 6]))
        assert readout[0].isnan().all()
        assert readout[1].isfinite().all()


@pytest.mark.parametrize("attention", [True, False])
def test_a_graph_larger_than_a_chunk(native, poison: None, attention: bool) -> None:
    """It is taken piece by piece, with one softmax, between others that are not."""
    rng = np.random.default_rng(0)
    weights, biases, w = drawn_layers(rng, 2, [3, 256, 5], torch.float64, scale=2.0)
    ptr = torch.tensor([0, 3, 9003, 9010, 9010, 9015, 9015, 9020])  # of seven graphs, in two branches that differ
    ptr = torch.cat([ptr, ptr[-1] + torch.tensor([2, 20_002, 20_002, 20_010, 20_010, 20_020, 20_030])])
    rows = torch.from_numpy(rng.standard_normal((400, 3)))
    index = torch.cat([torch.from_numpy(rng.integers(0, 200, 9020)), torch.from_numpy(rng.integers(200, 400, 20_030))])
    count = torch.from_numpy(rng.integers(1, 4, len(index))).int()
    fixed = {"index": index, "count": count, "ids": torch.tensor([6, 1, 0, 1, 4])}
    results = []
    for function in (spin_fast.branch_readout, reference.branch_readout):
        inputs = [value.clone().requires_grad_() for value in (rows, *weights, *biases, *([w] if attention else []))]
        x, w1, w2, b1, b2, *rest = inputs
        out = function(x, [w1, w2], [b1, b2], rest[0] if rest else None, ptr, **fixed)
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, cotangent)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10 * float(other.abs().max()))


@st.composite
def one_feature(draw: st.DrawFn) -> dict:
    """Arguments of branch_readout with one feature and so many entries that intervals are searched for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    dtype, branches = draw(st.sampled_from([torch.float32, torch.float64])), draw(st.integers(1, 3))
    widths = [1, *draw(st.lists(st.sampled_from([1, 3, 16, 24, 40]), min_size=1, max_size=4))]
    graphs = draw(st.sampled_from([1, 5, 21, 300]))
    sizes = rng.integers(0, 3, graphs * branches)
    busy = rng.integers(0, graphs * branches, 3)  # may be the same
    np.add.at(sizes, busy, (4 * sum(widths) * branches) // len(busy) + 1)
    values = draw(st.sampled_from(["normal", "positive", "few", "one", "zero", "wide"]))
    rows = {
        "normal": lambda n: rng.standard_normal(n),
        "positive": lambda n: rng.exponential(size=n) * (rng.random(n) < 0.7),
        "few": lambda n: rng.integers(-2, 3, n).astype(float),
        "one": lambda n: np.full(n, 1.7),
        "zero": np.zeros,
        "wide": lambda n: 10.0 ** rng.uniform(-6, 2, n),
    }[values](int(sizes.sum()))
    order = rng.permutation(len(rows)) if draw(st.booleans()) else None
    weights, biases, w = drawn_layers(rng, branches, widths, dtype)
    if draw(st.booleans()):  # then all kinks of the first layer are at 0
        biases[0].zero_()
    return {
        "rows": torch.from_numpy(rows[:, None]).to(dtype),
        "weights": weights,
        "biases": biases,
        "w": w if draw(st.booleans()) else None,
        "ptr": torch.tensor([0, *sizes.cumsum().tolist()]),
        "index": None if order is None else torch.from_numpy(order).to(draw(index_dtypes)),
        "count": torch.from_numpy(rng.integers(1, 5, sizes.sum())).to(torch.int32) if draw(st.booleans()) else None,
        "ids": torch.from_numpy(rng.permutation(graphs)) if draw(st.booleans()) else None,
        "negative_slope": draw(st.sampled_from([0.0, 0.01, 1.0])),
    }


@given(arguments=one_feature())
def test_one_feature(backend: str, poison: None, arguments: dict) -> None:
    assert_is_looped(arguments, 10)
    if arguments["rows"].dtype == torch.float64:
        compare_gradients(arguments, with_rows=False)


def rounding_bound(arguments: dict) -> torch.Tensor:
    """What rounding may change of the readouts of graphs, in units in the last place: all terms without their signs."""
    absolute = {name: arguments[name].double().abs() for name in ("rows", "w") if arguments[name] is not None}
    absolute |= {name: [leaf.double().abs() for leaf in arguments[name]] for name in ("weights", "biases")}
    absolute |= {"negative_slope": 1.0}
    if arguments["w"] is None:
        return looped_branches(arguments | absolute)
    entries = torch.arange(len(absolute["rows"]) + 1)
    each = looped_branches(arguments | absolute | {"ptr": entries, "w": None, "count": None})  # one branch
    logits = each @ absolute["w"][0]
    bounds = [slice(*bound) for bound in pairwise(arguments["ptr"].tolist())]
    return torch.stack([each[b].max(0).values * (1 + 2 * logits[b].max()) for b in bounds])


@st.composite
def graphs_with_outliers(draw: st.DrawFn) -> tuple[dict, int]:
    """Arguments of branch_readout with one feature, one branch, a graph and its company; the size of the graph."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    dtype, size = draw(float_dtypes), draw(st.sampled_from([1, 100, 2000]))
    widths = [1, *draw(st.lists(st.sampled_from([1, 3, 16, 40]), min_size=1, max_size=3))]
    own = rng.standard_normal(size) * 10.0 ** draw(st.integers(-3, 3))
    if draw(st.booleans()):
        own = np.abs(own)
    exponents = st.tuples(st.sampled_from([-1.0, 1.0]), st.integers(-30, 30))
    company = [sign * 10.0**exponent for sign, exponent in draw(st.lists(exponents, min_size=1, max_size=5))]
    company += [company[-1]] * (4 * sum(widths) + 1)  # so many that intervals are searched for
    weights, biases, w = drawn_layers(rng, 1, widths, dtype, draw(st.sampled_from([0.3, 1.0, 3.0])))
    return {
        "rows": torch.from_numpy(np.concatenate([own, company])[:, None]).to(dtype),
        "weights": weights,
        "biases": biases,
        "w": w if draw(st.booleans()) else None,
        "ptr": torch.tensor([0, size, size + len(company)]),
        "index": None,
        "count": None,
        "ids": None,
        "negative_slope": draw(st.sampled_from([0.0, 0.01])),
    }, size


@given(drawn=graphs_with_outliers())
def test_company_adds_no_more_than_rounding(backend: str, poison: None, drawn: tuple[dict, int]) -> None:
    arguments, size = drawn
    alone = arguments | {"rows": arguments["rows"][:size], "ptr": arguments["ptr"][:2]}
    exact, bound = looped_branches(alone), rounding_bound(alone)
    precision = 256 * torch.finfo(arguments["rows"].dtype).eps  # that of the oracle, too, where it is float64
    for result in (spin_fast.branch_readout(**alone)[0], spin_fast.branch_readout(**arguments)[0]):
        assert ((result.double() - exact[0]).abs() <= precision * bound[0]).all()


@given(drawn=graphs_with_outliers())
def test_company_changes_no_gradient(backend: str, poison: None, drawn: tuple[dict, int]) -> None:
    """Of the readout of one graph, in float64."""
    arguments, size = drawn
    alone = arguments | {"rows": arguments["rows"][:size], "ptr": arguments["ptr"][:2]}
    precision = 32 * torch.finfo(torch.float64).eps * max(float(rounding_bound(alone).max()), 1.0)
    leaves = [*arguments["weights"], *arguments["biases"], *([] if arguments["w"] is None else [arguments["w"]])]
    depth, rows, gradients = len(arguments["weights"]), arguments["rows"].double(), []
    for ptr in (arguments["ptr"][:2], arguments["ptr"]):
        inputs = [leaf.double().requires_grad_() for leaf in leaves]
        w = inputs[-1] if len(inputs) > 2 * depth else None
        slope = arguments["negative_slope"]
        layers = (inputs[:depth], inputs[depth : 2 * depth])
        out = spin_fast.branch_readout(rows[: ptr[-1]], *layers, w, ptr, negative_slope=slope)
        gradients.append(torch.autograd.grad(out[0].sum(), inputs))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=precision * max(float(one.abs().max()), 1.0))


def test_an_outlier_stays_in_its_graph(backend: str) -> None:
    rows = torch.cat([-torch.linspace(0.1, 1, 100), torch.tensor([-1e6])])[:, None]
    identity = ([torch.ones(1, 1, 1)], [torch.zeros(1, 1)])
    readout = spin_fast.branch_readout(rows, *identity, None, torch.tensor([0, 100, 101]))
    torch.testing.assert_close(readout[0], torch.tensor([-0.55]))


def gradients_of_one_feature(function: Callable, arguments: dict, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the layers and w."""
    count, ptr = arguments["count"], arguments["ptr"]
    layers = [part.to(dtype, copy=True).requires_grad_() for name in ("weights", "biases") for part in arguments[name]]
    w = arguments["w"].to(dtype, copy=True).requires_grad_()
    half = len(layers) // 2
    out = function(arguments["rows"].to(dtype), layers[:half], layers[half:], w, ptr, count=count)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return torch.autograd.grad(out, (*layers, w), cotangent)


@pytest.mark.parametrize("offset", [0, 1000])
def test_gradients_of_one_feature_far_from_zero(native, offset: float) -> None:
    """The attention's gradient needs the variance of features, a small difference of large squares."""
    torch.manual_seed(0)
    spread = 1.0 if offset == 0 else 0.01
    first = torch.randn(1, 1, 8).double() / spread
    arguments = {
        "rows": offset + spread * torch.randn(4000, 1).double(),
        "weights": [first, 0.4 * torch.randn(1, 8, 8).double() + 0.1],
        "biases": [-offset * first[:, 0], torch.zeros(1, 8).double()],
        "w": torch.rand(1, 8).double(),
        "ptr": torch.arange(0, 4001, 40),
        "count": None,
    }
    of_kernel = gradients_of_one_feature(spin_fast.branch_readout, arguments, torch.float64)
    of_reference = gradients_of_one_feature(reference.branch_readout, arguments, torch.float64)
    for one, other in zip(of_kernel, of_reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8 * float(other.abs().max()))


@pytest.mark.parametrize("scale", [1.0, 50.0])  # of the logits, which then overflow without subtracting the largest
def test_gradients_of_one_feature_in_float32(native, scale: float) -> None:
    rng = np.random.default_rng(1)
    weights, biases, w = drawn_layers(rng, 1, [1, 16, 16], torch.float64)
    sizes = torch.from_numpy(rng.integers(0, 40, 200))
    entries = int(sizes.sum())
    arguments = {"rows": torch.randn(entries, 1, generator=torch.Generator().manual_seed(0)).double()}
    arguments |= {"weights": weights, "biases": biases, "w": scale * w.abs()}
    arguments |= {"ptr": torch.tensor([0, *sizes.cumsum(0).tolist()])}
    arguments |= {"count": torch.from_numpy(rng.integers(1, 5, entries)).int()}
    of_kernel = gradients_of_one_feature(spin_fast.branch_readout, arguments, torch.float32)
    of_reference = gradients_of_one_feature(reference.branch_readout, arguments, torch.float64)
    for one, other in zip(of_kernel, of_reference, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5 * scale * float(other.abs().max()))


def test_logits_rounded_below_zero_count_as_zero(native) -> None:
    """The only node of a graph lies just below the kink, that of the others as far as logits of 1e9 reach."""
    steep = torch.tensor(3e9)
    kink = torch.tensor(1.7)
    at = torch.nextafter(kink, torch.tensor(0.0))
    rows = torch.cat([torch.linspace(0.1, 3, 400), at[None], kink[None]])[:, None]
    w = torch.stack([steep, -steep * kink])[None]  # of z = (x, 1)
    layer = ([torch.tensor([[[1.0, 0.0]]])], [torch.tensor([[0.0, 1.0]])])
    ptr = torch.tensor([0, 400, 401, 402])
    readout = spin_fast.branch_readout(rows, *layer, w, ptr)
    torch.testing.assert_close(readout[1:], torch.stack([rows[400:, 0], torch.ones(2)], 1))


def test_one_feature_in_large_graphs(native, poison: None) -> None:
    """More intervals than one vector of them starts with, logits that overflow."""
    rng = np.random.default_rng(0)
    sizes = torch.tensor([0, 9000, 5, 20_000, 0, 4000, 3])
    rows = torch.from_numpy(rng.exponential(size=(int(sizes.sum()), 1)))
    weights, biases, w = drawn_layers(rng, 1, [1, 200, 200, 40], torch.float64, scale=2.0)
    ptr = torch.tensor([0, *sizes.cumsum(0).tolist()])
    arguments = {"rows": rows, "weights": weights, "biases": biases, "w": 50 * w, "ptr": ptr}
    arguments |= {"index": None, "count": None, "ids": None, "negative_slope": 0.01}
    torch.testing.assert_close(spin_fast.branch_readout(**arguments), looped_branches(arguments))
    compare_gradients(arguments, with_rows=False)
    arguments |= {name: [part.float() for part in arguments[name]] for name in ("weights", "biases")}
    arguments |= {name: arguments[name].float() for name in ("rows", "w")}
    expected = looped_branches(arguments)
    result = spin_fast.branch_readout(**arguments).double()
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("value", "scale"), [(float("nan"), 1), (float("inf"), 1), (1e38, 100), (1e18, 1e22)])
def test_one_feature_that_is_not_finite_stays_in_its_graph(native, value: float, scale: float) -> None:
    """The feature itself, its square, or what the layer makes of it."""
    rows = torch.randn(600, 1)
    rows[150] = value
    weights, biases, w = drawn_layers(np.random.default_rng(0), 1, [1, 20], torch.float32)
    for attention in (w, None):
        readout = spin_fast.branch_readout(rows, [scale * weights[0]], biases, attention, torch.tensor([0, 300, 600]))
        assert not readout[0].isfinite().all()
        assert readout[1].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_feature_with_parameters_that_are_not_finite(native, value: float) -> None:
    """It shows, as it does with more features: training then stops, and says so."""
    weights, biases, w = drawn_layers(np.random.default_rng(0), 1, [1, 20, 20], torch.float32)
    for wrong in (w, weights[1], biases[0]):
        kept = wrong.flatten()[3].item()
        wrong.view(-1)[3] = value
        readout = spin_fast.branch_readout(torch.randn(600, 1), weights, biases, w, torch.tensor([0, 300, 600]))
        assert not readout.isfinite().all()
        wrong.view(-1)[3] = kept
    assert spin_fast.branch_readout(torch.randn(600, 1), weights, biases, w, torch.tensor([0, 600])).isfinite().all()


def test_one_feature_with_more_intervals_than_pay(native) -> None:
    """A tent map applied again and again doubles its kinks with every layer."""
    weights = [torch.tensor([[[2.0, 4.0]]]), *[torch.tensor([[[2.0, 4.0], [-2.0, -4.0]]])] * 7]
    biases = [torch.tensor([[0.0, -2.0]])] * 8
    rows = torch.rand(3001, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    arguments = {
        "rows": rows,
        "weights": [weight.double() for weight in weights],
        "biases": [bias.double() for bias in biases],
        "w": None,
        "ptr": torch.tensor([0, 1000, 3001]),
        "index": None,
        "count": None,
        "ids": None,
        "negative_slope": 0.0,
    }
    torch.testing.assert_close(spin_fast.branch_readout(**arguments), looped_branches(arguments))
    compare_gradients(arguments, with_rows=False)


@pytest.mark.parametrize("num_features", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("branches", ["hops", "both"])
def test_same_bits_for_any_number_of_threads(
    native, threads, dtype: torch.dtype, num_features: int, branches: str
) -> None:
    features = made_features([40, 7, 0, 900, 1, 30] * 8, num_features, dtype)
    model = SPIN(num_features, 32, 2, 2, branches=branches).to(dtype)
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        model.zero_grad()
        logits = model(features)
        logits.square().sum().backward()
        trainer = training.Trainer(model, learning_rate=0.0)
        loss = trainer.step(features)
        results.append([logits.detach(), loss, trainer.optimizer.param_groups[0]["params"][0].grad.clone()])
        results[-1] += [parameter.grad.clone() for parameter in model.parameters()]
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)


def test_gradients_of_repeated_rows_for_any_number_of_threads(native, threads) -> None:
    """Branches refer to the same rows, and graphs are chosen twice."""
    weights, biases, w = drawn_layers(np.random.default_rng(0), 2, [20, 32, 32], torch.float64)
    rows = torch.randn(3000, 20, dtype=torch.float64).requires_grad_()
    ptr, ids = torch.arange(0, 6001, 300), torch.arange(20) % 7
    arguments = (rows, weights, biases, w, ptr)
    options = {"index": torch.arange(6000) % 3000, "ids": ids}
    (expected,) = torch.autograd.grad(reference.branch_readout(*arguments, **options).sum(), rows)
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append(torch.autograd.grad(spin_fast.branch_readout(*arguments, **options).sum(), rows)[0])
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)
        assert torch.equal(result, results[0])


def test_folded_batch_norm_is_evaluation(backend: str) -> None:
    features = made_features([5, 3, 8, 1])
    model = SPIN(3, 20, 2, 2, batch_norm=True).double()
    for _ in range(3):
        model(features)
    model.eval()
    torch.testing.assert_close(model(features), model.forward_tensors(*features.branch_rows()))


@pytest.mark.parametrize(
    "name",
    [
        "digits",
        "NCI1",
        "PROTEINS",
        "ENZYMES",
        "IMDB-BINARY",
        "IMDB-MULTI",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("DD", "COLLAB", "REDDIT-BINARY", "ogbg-molhiv")),
    ],
)
def test_sharing_rows_changes_no_step(native, name: str, request: pytest.FixtureRequest) -> None:
    """Loss and gradient with and without deduplication, in float64 on features made in float32."""
    graphs = datasets.load(name) if name == "digits" else datasets.load(name, request.getfixturevalue("data_root"))
    ids = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0))[:64]
    distinct = PowerFeatures.from_graphs(graphs[ids], 3)
    for attention, branches in itertools.product((True, False), ("hops", "both")):
        results = []
        for made in (distinct, distinct.expand()):
            torch.manual_seed(0)
            shape = (graphs.num_features, 16, int(graphs.y.max()) + 1, 3)
            model = SPIN(*shape, attention=attention, branches=branches).double()
            trainer = training.Trainer(model, learning_rate=0.0)
            loss = trainer.step(replace(made, rows=made.rows.double()))
            results.append((loss, trainer.optimizer.param_groups[0]["params"][0].grad))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9 * float(one.abs().max()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": [1]}, TypeError, "rows must be a torch.Tensor, got list"),
        ({"weights": []}, ValueError, "weights and biases must have 1 to 8 layers, as many as each other, got 0 and 1"),
        ({"weights": [torch.ones(2, 4, 5)]}, ValueError, r"weights\[0\] must have shape \[branches, 3, d_out\]"),
        ({"biases": [torch.ones(2, 4)]}, ValueError, r"biases\[0\] must have shape \[2, 5\], got \[2, 4\]"),
        ({"w": torch.ones(2, 4)}, ValueError, r"w must have shape \[2, 5\], got \[2, 4\]"),
        ({"ptr": torch.tensor([0, 2, 4, 6])}, ValueError, r"ptr must have a multiple of 2 segments"),
        ({"ptr": torch.tensor([0, 3, 5])}, ValueError, r"ptr must end with the number of rows of z, 6, got 5"),
        ({"index": torch.tensor([0, 9])}, ValueError, r"ptr must end with the number of index, 2, got 6"),
        ({"ids": torch.tensor([1])}, ValueError, r"ids must be in \[0, 1\), got 1 to 1"),
        ({"weights": None}, TypeError, "weights must be a sequence of tensors, got NoneType"),
        ({"negative_slope": -0.1}, ValueError, "negative_slope must be at least 0, got -0.1"),
        ({"negative_slope": float("nan")}, ValueError, "negative_slope must be at least 0, got nan"),
        ({"negative_slope": float("inf")}, ValueError, "negative_slope must be finite, got inf"),
        ({"negative_slope": "0.1"}, TypeError, "negative_slope must be a number, got str"),
        ({"check_invariants": "yes"}, TypeError, "check_invariants must be a bool, got str"),
        ({"rows": torch.ones(6, 3).half()}, TypeError, "rows must be float32 or float64, got float16"),
    ],
)
def test_bad_input_is_named(backend: str, change: dict, error: type, message: str) -> None:
    arguments = {
        "rows": torch.ones(6, 3),
        "weights": [torch.ones(2, 3, 5)],
        "biases": [torch.ones(2, 5)],
        "w": torch.ones(2, 5),
        "ptr": torch.tensor([0, 3, 6]),
    }
    with pytest.raises(error, match=message):
        spin_fast.branch_readout(**arguments | change)


def test_labels_outside_the_classes_are_named(backend: str) -> None:
    features = made_features([2, 3])
    with pytest.raises(ValueError, match=r"y must be classes in \[0, 2\), the model's outputs, got 0 to 2"):
        training.Trainer(SPIN(3, 4, 2, 2).double()).step(replace(features, labels=torch.tensor([0, 2])))


def test_steps_are_those_of_torchs_adam(native) -> None:
    features = made_features([5, 3, 8, 1])
    torch.manual_seed(0)
    model = SPIN(3, 4, 2, 2).double()
    other = copy.deepcopy(model)
    trainer = training.Trainer(model, learning_rate=1e-2, weight_decay=1e-3)
    adam = torch.optim.Adam(other.parameters(), lr=1e-2, weight_decay=1e-3)
    for rate in (1e-2, 1e-2, 3e-3, 3e-3):
        for optimizer in (trainer.optimizer, adam):
            optimizer.param_groups[0]["lr"] = rate
        loss = training.loss_of(other.forward_tensors(*features.branch_rows()), features.y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        torch.testing.assert_close(trainer.step(features), loss.detach())
    for one, of_adam in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, of_adam, rtol=1e-6, atol=1e-9)


def test_a_trainer_follows_its_model(native) -> None:
    """Parameters that were given other memory in the meantime are trained, not what they were."""
    features = made_features([5, 3, 8, 1])
    model = SPIN(3, 4, 2, 2).double()
    trainer = training.Trainer(model)
    trainer.step(features)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    before = model.hops.layers[0].weight.detach().clone()
    trainer.step(features)
    assert not torch.equal(model.hops.layers[0].weight, before)


# What the CUDA kernels meet: graphs of many tiles and of one, blocks that take several parts of graphs, models too wide
# for shared memory. Sizes of graphs, features, width, branches, layers, and of how many rows a joint row consists.
SHAPES = {
    "small": ([3, 0, 5], 4, 6, 3, 2, None),
    "tiles": ([200, 0, 70, 33, 1], 5, 7, 2, 3, None),
    "more parts and columns than lanes": ([2200, 40], 2, 34, 1, 1, None),
    "no features": ([40, 90], 0, 3, 2, 2, None),
    "one of each": ([64, 32], 1, 1, 1, 1, None),
    "gradient not in shared memory": ([50, 40], 20, 48, 2, 2, None),
    "weights not in shared memory": ([9, 8], 300, 150, 1, 3, None),
    "nothing in shared memory": ([5, 2], 3, 1900, 1, 2, None),
    "no graphs": ([], 3, 4, 2, 2, None),
    "joint tiles": ([200, 0, 70, 33, 1], 5, 7, 1, 3, 4),
    "joint of one": ([64, 32], 3, 5, 1, 1, 1),
    "joint, one feature": ([40, 90], 1, 34, 1, 2, 5),
    "joint, no features": ([40, 90], 0, 3, 1, 2, 2),
    "joint, weights not in shared memory": ([9, 8], 100, 150, 1, 3, 3),
    "joint, no graphs": ([], 3, 4, 1, 2, 2),
}


def cuda_case(
    sizes: list[int],
    num_features: int,
    width: int,
    branches: int,
    layers: int,
    num_parts: int | None,
    form: str,
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], dict]:
    """The tensors that take gradients, rows first, w last, and the other arguments."""
    generator = torch.Generator().manual_seed(len(sizes) + width)
    ptr = offsets(torch.tensor(sizes * branches, dtype=torch.int64))
    entries = int(ptr[-1])
    num_rows = entries if form == "rows" else entries // 3 + 1
    widths = [num_features * (num_parts or 1), *[width] * layers]
    stored = num_rows // 2 + 1 if num_parts else num_rows
    shapes = [(stored, num_features)]
    shapes += [(branches, below, above) for below, above in pairwise(widths)]
    shapes += [(branches, above) for above in widths[1:]]
    leaves = [torch.randn(shape, generator=generator, dtype=dtype) for shape in [*shapes, (branches, width)]]
    for leaf in leaves[1 : layers + 1]:
        leaf /= max(leaf.shape[1], 1) ** 0.5
    index = None if form == "rows" else torch.randint(num_rows, (entries,), generator=generator)
    count = None if form == "rows" else torch.randint(1, 5, (entries,), generator=generator, dtype=torch.int32)
    ids = torch.randint(len(sizes), (4,), generator=generator) if form == "ids" and sizes else None
    parts = torch.randint(stored, (num_rows, num_parts), generator=generator) if num_parts else None
    if parts is not None and form == "ids":
        parts = parts.int()
    fixed = {"ptr": ptr, "index": index, "count": count, "ids": ids, "parts": parts}
    return [leaf.requires_grad_() for leaf in leaves], fixed


def readout_and_gradients(op: Callable, leaves: list[torch.Tensor], layers: int, others: dict) -> list[torch.Tensor]:
    rows, w = leaves[0], leaves[-1]
    out = op(rows, leaves[1 : layers + 1], leaves[layers + 1 : -1], w, **others)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * cotangent).sum(), leaves)]


@pytest.mark.parametrize("form", ["rows", "index", "ids"])
@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=pytest.mark.slow if "nothing" in name else ()) for name in SHAPES]
)
def test_cuda_kernels_take_every_shape(native, poison: None, shape: str, form: str) -> None:
    layers = SHAPES[shape][4]
    leaves, others = cuda_case(*SHAPES[shape], form, torch.float64)
    expected = readout_and_gradients(reference.branch_readout, leaves, layers, others)
    with cuda_kernels.standing_in() as kernels:
        results = []
        for order in (0, 1, 2) if "tiles" in shape else (1,):
            kernels.set_order(order)
            results.append(readout_and_gradients(spin_fast.branch_readout, leaves, layers, others))
        kernels.set_order(0)
    for result in results:
        for one, other, first in zip(result, expected, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
            assert torch.equal(one, first)


@pytest.mark.parametrize(("num_features", "num_parts"), [(5, None), (37, None), (7, 3)])
def test_tensor_cores_multiply_what_they_should(
    native, monkeypatch: pytest.MonkeyPatch, num_features: int, num_parts: int | None
) -> None:
    """Small integers are exact in TF32, and so is all that a sum readout of them computes."""
    branches = 1 if num_parts else 2
    leaves, others = cuda_case([70, 0, 33, 7], num_features, 24, branches, 2, num_parts, "index", torch.float32)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_((leaf * (leaf.abs() > 1.2)).sign() if leaf.dim() < 3 else (leaf * 2).round().clamp(-1, 1))

    def run(op: Callable) -> list[torch.Tensor]:
        out = op(leaves[0], leaves[1:3], leaves[3:5], None, **others, negative_slope=0.0)
        cotangent = (torch.arange(out.numel()) % 3 - 1).float().view_as(out)
        return [out.detach(), *torch.autograd.grad((out * cotangent).sum(), leaves[:-1])]

    exact = run(reference.branch_readout)
    monkeypatch.setattr("spin_fast.ops.native.may_use_tf32", lambda: True)
    with cuda_kernels.standing_in() as kernels:
        kernels.set_order(1)
        rounded = run(spin_fast.branch_readout)
        kernels.set_order(0)
        assert exact[0].abs().max() > 10
        for one, other in zip(rounded, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        with torch.no_grad():
            leaves[0].mul_(1 + 2**-14)  # is lost in TF32
        assert torch.equal(run(spin_fast.branch_readout)[0], exact[0])
