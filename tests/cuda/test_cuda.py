"""On a GPU: streams, devices, CUDA graphs, no synchronisation. Results are tested with the other ``backend`` fixtures.

The tests of synchronisation also run without a GPU, on the meta device: its tensors have no contents to read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cuda_kernels import needs_gpu
from helpers import random_graphs
from torch import Tensor

import spin_fast
from spin_fast import SPIN, GraphBatch, PowerFeatures, datasets, ops, training
from spin_fast.features import power_features
from spin_fast.nn import SubtreeLinear
from spin_fast.ops import BRANCHES, distinct
from spin_fast.training import trainer as trainers

HAS_GPU = torch.cuda.is_available()
needs_two_gpus = pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
Call = Callable[[], Tensor | tuple[Tensor, ...]]


def some_graphs() -> GraphBatch:
    """Graphs of all sizes, of few feature values, so that rows repeat; with labels."""
    graphs = random_graphs([7, 0, 30, 1, 12, 3] * 10, density=0.3, dtype=torch.float32, signs=True)
    return replace(graphs, y=torch.arange(60) % 3)


def some_features() -> PowerFeatures:
    features = PowerFeatures.from_graphs(some_graphs(), 2)
    assert features.index is not None
    return features


def calls(device: str) -> dict[str, tuple[Call, Tensor]]:
    """For every op that can be captured: a call, with gradients, and a tensor that it reads."""
    graphs, features = some_graphs().to(device), some_features().to(device)
    torch.manual_seed(0)
    models = {name: SPIN(3, 16, 3, 2, branches=name).to(device) for name in BRANCHES}
    x = graphs.x.clone().requires_grad_()
    z = torch.randn(len(features.rows), 16).to(device).requires_grad_()
    w, ids = torch.randn(3, 16).to(device).requires_grad_(), torch.arange(59, 0, -2).to(device)
    out = torch.empty(3, *graphs.x.shape, device=device)
    csr = (graphs.indptr, graphs.indices)
    entries = {"index": features.index, "count": features.count, "check_invariants": False}
    rows = features.rows
    joint = ops.JointRows(*(value.to(device) for value in vars(some_features().joint).values()))
    class_weight = torch.tensor([0.5, 2.0, 1.0]).to(device)

    def with_gradients(result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return result.detach(), *torch.autograd.grad(result.sin().sum(), inputs)

    def powers_into() -> Tensor:
        return ops.power_features(*csr, graphs.x, 2, ptr=graphs.ptr, out=out, check_invariants=False)

    def powers_of_part() -> Tensor:
        part = out.view(-1)[: 3 * (30 + 1) * 3].view(3, 30 + 1, 3)
        return ops.power_features(*csr, graphs.x, 2, ptr=graphs.ptr[2:5], out=part, check_invariants=False)

    def powers() -> tuple[Tensor, ...]:
        return with_gradients(ops.power_features(*csr, x, 2, "rw", ptr=graphs.ptr, check_invariants=False), x)

    def sums() -> tuple[Tensor, ...]:
        return with_gradients(ops.sum_readout(z, features.ptr, num_branches=3, **entries), z)

    def attention() -> tuple[Tensor, ...]:
        return with_gradients(ops.attention_readout(z, w, features.ptr, **entries), z, w)

    def branches() -> tuple[Tensor, ...]:
        parameters = [parameter.detach().requires_grad_() for parameter in models["hops"].hops.layers.parameters()]
        weights, biases = parameters[::2], parameters[1::2]
        readout = ops.branch_readout(rows, weights, biases, w, features.ptr, ids=ids, negative_slope=0.01, **entries)
        return with_gradients(readout, w, *weights, *biases)

    def joint_branch() -> tuple[Tensor, ...]:
        inputs = [value.detach().requires_grad_() for value in (rows, *models["joint"].joint.parameters())]
        parameters = (inputs[2::2], inputs[3::2], inputs[1])
        readout = ops.branch_readout(inputs[0], *parameters, **vars(joint), ids=ids, check_invariants=False)
        return with_gradients(readout, *inputs)

    def step_of(name: str) -> tuple[Call, Tensor]:
        flat, sizes = models[name].flatten_parameters(), models[name].sizes
        data, options = (features.labels, features.ptr), {"joint": joint, "ids": ids, "class_weight": class_weight}
        return lambda: ops.training_step(rows, flat, *data, model=sizes, **options, **entries), flat

    return {
        "power_features": (powers, x),
        "power_features_out": (powers_into, graphs.x),
        "power_features_out of a part": (powers_of_part, graphs.x),
        "sum_readout": (sums, z),
        "attention_readout": (attention, z),
        "branch_readout": (branches, w),
        "branch_readout of joint rows": (joint_branch, rows),
        **{f"training_step of {name}": step_of(name) for name in BRANCHES},
    }


CALLS = list(calls("cpu")) if spin_fast.native_available() else []


def leaves(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [value.clone() for value in ((result,) if isinstance(result, Tensor) else result)]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def meta_kernels(native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ops take meta tensors for those of a device with kernels."""
    monkeypatch.setattr("spin_fast.ops.native.has_kernel", lambda device: True)
    monkeypatch.setattr("spin_fast.ops.native.available", lambda device: True)


@pytest.mark.parametrize("name", CALLS)
def test_ops_read_nothing_on_the_host(name: str, meta_kernels: None) -> None:
    for here, there in zip(leaves(calls("cpu")[name][0]()), leaves(calls("meta")[name][0]()), strict=True):
        assert (here.shape, here.dtype) == (there.shape, there.dtype)


@pytest.mark.parametrize("deduplicate", [True, False])
def test_selections_read_nothing_on_the_host(deduplicate: bool, meta_kernels: None) -> None:
    features = PowerFeatures.from_graphs(some_graphs(), 2, deduplicate=deduplicate)
    moved = features.to("meta")
    assert moved.row_ptr.is_cpu
    for ids in (3, slice(2, 40, 3), [4, 1, 1], torch.tensor([-1, 5]), torch.arange(60) % 2 == 0):
        here, there = features[ids], moved[ids]
        assert there.ids.device.type == "meta"
        for name in ("ids", "y", "selected_ptr"):
            assert getattr(here, name).shape == getattr(there, name).shape
        assert there[[0]][0].num_graphs == 1
    assert moved[moved.node_ptr[:7]].num_graphs == 7
    with pytest.raises(IndexError, match="graph id 60 is out of range for 60 graphs"):
        moved[[1, 60]]


@pytest.mark.parametrize("options", [{}, {"attention": False}, {"size_aware": True}])
@pytest.mark.parametrize("tasks", [False, True])
def test_steps_read_nothing_on_the_host(options: dict, tasks: bool, meta_kernels: None) -> None:
    features = some_features().to("meta")
    if tasks:
        features = replace(features, labels=torch.empty(60, 3, device="meta"))
    trainer = training.Trainer(SPIN(3, 16, 3, 2, **options).to("meta"))
    steps = trainer._prepared(features[:50])
    assert steps(features.storage_ids(range(9)), 4).device.type == "meta"
    assert training.predict(trainer.model, features, range(20)).shape == (20, 3)
    assert training.predict(trainer.model, features, []).device.type == "meta"


def test_containers_move() -> None:
    graphs, features = some_graphs(), some_features()
    for container in (graphs, features):
        moved = container.to("meta")
        for name, value in vars(container).items():
            other = getattr(moved, name)
            if isinstance(value, Tensor):
                assert (value.shape, value.dtype) == (other.shape, other.dtype)
                assert other.device.type == ("cpu" if name == "row_ptr" else "meta")
                assert getattr(container.cpu(), name) is value
            else:
                assert value == other
    with pytest.raises(ValueError, match="y must be on cpu, got meta"):
        replace(graphs, y=graphs.y.to("meta"))
    with pytest.raises(ValueError, match="labels must be on meta, got cpu"):
        replace(features.to("meta"), labels=features.labels)
    with pytest.raises(ValueError, match="features must be on cpu as the model is, got meta; move one of them"):
        SPIN(3, 16, 3, 2)(features.to("meta"))
    with pytest.raises(ValueError, match="graphs must be on cpu as the model is, got meta; move one of them"):
        training.predict_proba(SPIN(3, 16, 3, 2), graphs.to("meta"), "sym")


@pytest.mark.parametrize("node_rows", [True, False])
@pytest.mark.parametrize("operator", ["sym", "sym,adj"])
def test_chunks_that_are_searched_as_a_whole(monkeypatch: pytest.MonkeyPatch, node_rows: bool, operator: str) -> None:
    """How features of graphs on a GPU are computed, on the CPU."""
    graphs = some_graphs()

    def check_same(made: PowerFeatures, expected: PowerFeatures) -> None:
        for name, value in vars(expected).items():
            other = getattr(made, name)
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other

    for x in (graphs.x, torch.randn(graphs.x.shape)):
        given = replace(graphs, x=x)
        expected = PowerFeatures.from_graphs(given, 2, operator, node_rows=node_rows)
        for num_bytes in (8 << 20, 3000):
            with monkeypatch.context() as patch:
                patch.setattr(distinct, "has_kernel_of_chunks", lambda _: False)
                patch.setattr(power_features, "CHUNK_BYTES", num_bytes)
                made = PowerFeatures.from_graphs(given, 2, operator, node_rows=node_rows)
                check_same(made, expected)
                chunks = [given[begin : begin + 7] for begin in range(0, len(given), 7)]
                check_same(PowerFeatures.from_chunks(chunks, 2, operator, node_rows=node_rows), expected)
                halves = [PowerFeatures.from_graphs(half, 2, operator) for half in (given[:20], given[20:])]
                if node_rows:
                    check_same(PowerFeatures.concatenate(halves), expected)


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_ops_agree_with_the_cpu_and_do_not_wait(name: str) -> None:
    call, _ = calls("cuda")[name]
    first = leaves(call())
    with no_waiting():
        results = [leaves(call()) for _ in range(3)]
    for result in results:
        for one, other in zip(first, result, strict=True):
            assert torch.equal(one, other)  # the same bits every time
    for here, there in zip(leaves(calls("cpu")[name][0]()), first, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=2e-4, atol=2e-4)


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_ops_run_on_the_current_stream(name: str) -> None:
    call, read = calls("cuda")[name]
    expected = leaves(call())
    value, stream = read.detach().clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        read.detach().fill_(math.nan)
        torch.cuda._sleep(50_000_000)  # whatever does not wait for this stream reads NaN
        read.detach().copy_(value)
        result = leaves(call())
    stream.synchronize()
    for one, other in zip(expected, result, strict=True):
        assert torch.equal(one, other)


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_ops_can_be_captured(name: str) -> None:
    call, read = calls("cuda")[name]
    side = torch.cuda.Stream()  # autograd takes part
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for scale in (0.5, -3.0):
        read.detach().mul_(scale)
        graph.replay()
        kept = leaves(result)
        for one, other in zip(kept, leaves(call()), strict=True):
            assert torch.equal(one, other)


@needs_gpu
@needs_two_gpus
@pytest.mark.parametrize("name", CALLS)
def test_ops_run_on_the_device_of_their_tensors(name: str) -> None:
    assert torch.cuda.current_device() == 0
    results = [leaves(calls(device)[name][0]()) for device in ("cuda:0", "cuda:1")]
    assert torch.cuda.current_device() == 0
    for one, other in zip(*results, strict=True):
        assert other.device == torch.device("cuda:1")
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-5, atol=1e-5)


@needs_gpu
def test_selections_do_not_wait() -> None:
    features, model = some_features().cuda(), SPIN(3, 16, 3, 2).cuda()
    on_device = torch.arange(9, device="cuda")
    for _ in range(2):
        features[[3, 4, 4]]  # the first page-locked memory
        with no_waiting():
            for ids in (3, slice(2, 40, 3), [4, 1, 1], torch.arange(60) % 2 == 0, on_device):
                selected = features[ids]
                training.loss_of(model(selected), selected.y).backward()


@needs_gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_features_made_on_the_gpu(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    graphs = some_graphs()
    if weighted:
        graphs = replace(graphs, edge_weight=torch.rand(graphs.num_edges) + 0.5)
    for deduplicate in (True, False):
        here = PowerFeatures.from_graphs(graphs, 2, deduplicate=deduplicate)
        there = PowerFeatures.from_graphs(graphs.cuda(), 2, deduplicate=deduplicate)
        assert (here.index is None) == (there.index is None)
        assert len(there.rows) == pytest.approx(len(here.rows), rel=0.05)  # sums of another order may differ in a bit
        ids = torch.tensor([7, 1, 20, 7])
        for one, other in ((here, there), (here[ids], there[ids])):
            for made in (other, other.take(), other.expand(), other.cpu()):
                torch.testing.assert_close(made.dense_rows().cpu(), one.dense_rows(), rtol=1e-5, atol=1e-5)
                assert torch.equal(made.y.cpu(), one.y)
                assert torch.equal(made.selected_ptr.cpu(), one.selected_ptr)
        assert len(there.identical_graphs()) == 60
    whole = PowerFeatures.from_graphs(graphs.cuda(), 2)
    monkeypatch.setattr(power_features, "GPU_CHUNK_BYTES", 20_000)
    assert torch.equal(PowerFeatures.from_graphs(graphs.cuda(), 2).rows, whole.rows)
    pinned = here.pin_memory()
    assert pinned.rows.is_pinned()
    with no_waiting():
        pinned.to("cuda", non_blocking=True)


@needs_gpu
def test_wrong_weights_are_named_on_the_gpu() -> None:
    graphs = some_graphs()
    graphs = replace(graphs, edge_weight=torch.full((graphs.num_edges,), -1.0)).cuda()
    with pytest.raises(ValueError, match="edge_weight must give no negative row sum under sym"):
        PowerFeatures.from_graphs(graphs, 2)


@needs_gpu
@pytest.mark.parametrize("branches", BRANCHES)
def test_probabilities_straight_from_graphs(monkeypatch: pytest.MonkeyPatch, branches: str) -> None:
    graphs, model = some_graphs(), SPIN(3, 16, 3, 2, branches=branches)
    model.operator = "sym"
    expected = training.predict_proba(model, graphs)
    for size in (256 << 20, 2000):
        monkeypatch.setattr("spin_fast.training.prediction.GPU_CHUNK_BYTES", size)
        result = training.predict_proba(model.cuda(), graphs.cuda())
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_subtree_counts_on_the_gpu() -> None:
    graphs, model = some_graphs(), SubtreeLinear(3, 3, 64, num_columns=64)
    torch.nn.init.normal_(model.weight)
    expected = training.predict_proba(model, graphs)
    torch.testing.assert_close(training.predict_proba(model.cuda(), graphs.cuda()).cpu(), expected)


@pytest.fixture(scope="module")
def digits() -> PowerFeatures:
    return PowerFeatures.from_graphs(datasets.load("digits", dtype=torch.float64)[:300], 2)


@needs_gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": False},
        {"size_aware": True},
        {"batch_norm": True, "attention": False},
        {"branches": "joint"},
        {"branches": "both"},
    ],
)
def test_training_agrees_with_the_cpu(digits: PowerFeatures, options: dict) -> None:
    """In float64, so that after some epochs rounding has not yet grown: the order of the graphs, the loss, Adam."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = SPIN(3, 16, 10, 2, **options).double().to(device)
        fit = training.fit(model, digits.to(device), range(200), range(200, 300), epochs=3, schedule="constant")
        probabilities = training.predict(model, digits.to(device)).softmax(1)
        results.append((torch.tensor([epoch.loss for epoch in fit.epochs]), probabilities.cpu()))
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)  # the learning rate is float32 there


@needs_gpu
@pytest.mark.parametrize("branches", BRANCHES)
def test_steps_are_played_back_and_do_not_wait(
    digits: PowerFeatures, monkeypatch: pytest.MonkeyPatch, branches: str
) -> None:
    features, captured, capture = digits.cuda(), [], trainers._capture
    monkeypatch.setattr(
        "spin_fast.training.trainer._capture", lambda step, device: captured.append(1) or capture(step, device)
    )
    models = [SPIN(3, 16, 10, 2, branches=branches).double().cuda()]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        monkeypatch.setattr("spin_fast.training.trainer._is_captured", lambda device, first=model is models[0]: first)
        trainer = training.Trainer(model, learning_rate=2**-8)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
        steps, ids = trainer._prepared(features), features.storage_ids(range(200))
        for _ in range(3):
            losses = steps(ids, 64)
            scheduler.step()
        with no_waiting():
            more = steps(ids, 64)
        assert torch.stack([losses, more]).isfinite().all()
    assert len(captured) == 2  # batches of 64 and of 8
    one, other = (model.flatten_parameters() for model in models)
    assert torch.equal(one, other)


@needs_gpu
def test_a_model_may_be_moved_between_epochs(digits: PowerFeatures) -> None:
    models = []
    for devices in (("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu"), ("cuda", "cpu", "cuda")):
        torch.manual_seed(0)
        model = SPIN(3, 16, 10, 2).double().to(devices[0])
        trainer = training.Trainer(model, learning_rate=2**-8)
        for device in devices:
            model.to(device)
            trainer.epoch(digits.to(device), range(200), 64, torch.Generator().manual_seed(0))
        models.append(model.cpu().flatten_parameters())
    for other in models[1:]:
        torch.testing.assert_close(other, models[0], rtol=1e-6, atol=1e-6)


@needs_gpu
@needs_two_gpus
def test_training_on_another_gpu(digits: PowerFeatures) -> None:
    losses = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        trainer, features = training.Trainer(SPIN(3, 16, 10, 2).double().to(device)), digits.to(device)
        losses.append([trainer.epoch(features, range(200), 64, torch.Generator().manual_seed(0)) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert torch.cuda.current_device() == 0
