"""Operations and models under what torch, Python and the system do to them: autocast, transforms, copies, threads."""

from __future__ import annotations

import concurrent.futures
import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import equal, random_graphs, send_work, work
from torch.autograd import forward_ad
from torch.utils.data import DataLoader

import spin_fast
from spin_fast import SPIN, GraphBatch, PowerFeatures, training
from spin_fast.nn import BranchNorm

HALVES = (torch.bfloat16, torch.float16)
GRAPHS = random_graphs([3, 0, 4], density=0.6, num_features=3, weighted=True)
PTR = GRAPHS.ptr
W1, B1, W2, B2, W = (
    torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for shape in ((2, 3, 4), (2, 4), (2, 4, 3), (2, 3), (2, 3))
)
ROWS = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def powers(x: torch.Tensor) -> torch.Tensor:
    weight = GRAPHS.edge_weight.to(torch.float32 if x.dtype in HALVES else x.dtype)
    return spin_fast.power_features(GRAPHS.indptr, GRAPHS.indices, x, 2, "sym+adj", ptr=PTR, edge_weight=weight)


def branches(rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    w1, b1, w2, b2, w = parameters or (p.to(rows.dtype) for p in (W1, B1, W2, B2, W))
    return spin_fast.branch_readout(rows, [w1, w2], [b1, b2], w, PTR)


OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "power_features": (powers, ROWS[0]),
    "sum_readout": (lambda z: spin_fast.sum_readout(z, PTR), ROWS),
    "attention_readout": (lambda z: spin_fast.attention_readout(z, W.to(z.dtype), PTR), ROWS),
    "branch_readout": (branches, ROWS),
}
each_operation = pytest.mark.parametrize("name", OPERATIONS)


def made_features(sizes: tuple[int, ...] = (4, 0, 1, 6, 3), dtype: torch.dtype = torch.float32) -> PowerFeatures:
    graphs = random_graphs(list(sizes), dtype=dtype, signs=True)
    return PowerFeatures.from_graphs(replace(graphs, y=torch.arange(len(sizes)) % 2), 2)


# Autocast


@each_operation
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_changes_no_operation(backend: str, name: str, dtype: torch.dtype) -> None:
    function, x = OPERATIONS[name]
    stored = (torch.float32, torch.float64) if name == "branch_readout" else (torch.float32, torch.float64, dtype)
    for kind in stored:
        results = []
        for enabled in (False, True):
            leaf = x.to(kind, copy=True).requires_grad_()
            with torch.autocast("cpu", dtype, enabled=enabled):
                value = function(leaf)
            results.append((value.detach(), *torch.autograd.grad(value.float().square().sum(), leaf)))
        for one, other in zip(*results, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_brings_arguments_to_one_dtype(backend: str, dtype: torch.dtype) -> None:
    z, w = ROWS.to(dtype).requires_grad_(), W.float().requires_grad_()
    with pytest.raises(ValueError, match="w must match z in width, dtype and device"):
        spin_fast.attention_readout(z, w, PTR)
    with torch.autocast("cpu", dtype):
        readout = spin_fast.attention_readout(z, w, PTR)
        with pytest.raises(ValueError, match="w must match z in width, dtype and device"):
            spin_fast.attention_readout(z, W, PTR)  # float64 is not autocast's
    assert torch.equal(readout, spin_fast.attention_readout(z, w.to(dtype), PTR))
    readout.float().sum().backward()
    assert (z.grad.dtype, w.grad.dtype) == (dtype, torch.float32)

    rows = ROWS.to(dtype).requires_grad_()
    parameters = [p.float() for p in (W1, B1, W2, B2, W)]
    with pytest.raises(TypeError, match="rows must be float32 or float64"):
        branches(rows, *parameters)
    with torch.autocast("cpu", dtype):
        readout = branches(rows, parameters[0].to(dtype), *parameters[1:])
    assert readout.dtype == torch.float32
    assert torch.equal(readout, branches(rows.float(), parameters[0].to(dtype).float(), *parameters[1:]))
    readout.sum().backward()
    assert rows.grad.dtype == dtype


@pytest.mark.parametrize(
    "options", [{}, {"attention": False}, {"size_aware": True}, {"batch_norm": True}, {"dropout": 0.3}]
)
def test_models_under_autocast(options: dict) -> None:
    """The branches of the fused form stay in float32, the classifier and unfused branches take the half type."""
    features = made_features((9, 0, 4, 12, 6))
    torch.manual_seed(0)
    model = SPIN(3, 16, 2, 2, **options)
    twin = copy.deepcopy(model)
    ragged = lambda m: m.forward_tensors(*features.branch_rows())  # noqa: E731
    dense = lambda m: m.forward_tensors(features.dense_rows(), features.node_ptr)  # noqa: E731
    for training_ in (True, False):
        model.train(training_), twin.train(training_)
        for way in (lambda m: m(features), dense, *(() if options.get("dropout") else (ragged,))):
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16):
                scores = way(model)
            torch.manual_seed(1)
            expected = way(twin)
            assert scores.dtype == torch.bfloat16
            if not (training_ and options.get("dropout")):
                scale = float(expected.detach().abs().max())
                torch.testing.assert_close(scores.float(), expected, rtol=0.05, atol=0.05 * scale)
            for m, s in ((model, scores), (twin, expected)):
                m.zero_grad()
                s.float().square().sum().backward()
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert one.grad.dtype == torch.float32
                assert one.grad.isfinite().all()
                if not (options.get("batch_norm") or (training_ and options.get("dropout"))):
                    assert (one.grad - other.grad).norm() <= 0.1 * other.grad.norm() + 1e-4
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)


def test_statistics_of_half_types_are_taken_in_full() -> None:
    z = (3 + torch.randn(2, 500, 4, generator=torch.Generator().manual_seed(0))).bfloat16()
    norm, twin = BranchNorm(2, 4), BranchNorm(2, 4)
    assert torch.equal(norm(z), twin(z.float()).bfloat16())
    for one, other in zip(norm.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)
    ragged = BranchNorm(2, 4)(z.flatten(0, 1), [500, 500])
    torch.testing.assert_close(ragged.view_as(z), norm.train()(z), rtol=0.01, atol=0.01)


def test_statistics_may_be_of_all_batches_alike() -> None:
    norm, twin = BranchNorm(1, 4).double(), torch.nn.BatchNorm1d(4, momentum=None).double()
    norm.momentum = None
    norm(torch.ones(1, 1, 4).double())  # a single node has no variance
    for z in torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0)).double():
        torch.testing.assert_close(norm(z[None])[0], twin(z))
    torch.testing.assert_close(norm.running_mean, twin.running_mean)
    torch.testing.assert_close(norm.running_var, twin.running_var)


def test_training_under_autocast() -> None:
    features = made_features()
    for options in ({}, {"batch_norm": True}, {"dropout": 0.3}):
        trainer = training.Trainer(SPIN(3, 8, 2, 2, **options))
        with torch.autocast("cpu", torch.bfloat16):
            losses = [trainer.step(features) for _ in range(3)]
        assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses)


def test_autocast_does_not_round_what_is_around_steps() -> None:
    features = made_features((9, 0, 4, 12, 6))
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = SPIN(3, 16, 2, 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model.calibrate(features)
            loss = training.Trainer(model).epoch(features, slice(None), 2, torch.Generator().manual_seed(0))
        results.append((loss, model.flatten_parameters()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


# Transforms of torch.func, forward mode, batched gradients


@each_operation
def test_derivatives_by_transforms(backend: str, name: str) -> None:
    function, x = OPERATIONS[name]
    jacobian = torch.autograd.functional.jacobian(function, x)
    torch.testing.assert_close(torch.func.jacrev(function)(x), jacobian)
    torch.testing.assert_close(torch.func.jacfwd(function)(x), jacobian)
    torch.testing.assert_close(torch.autograd.functional.jacobian(function, x, vectorize=True), jacobian)

    def squares(x: torch.Tensor) -> torch.Tensor:
        return function(x).square().sum()

    torch.testing.assert_close(torch.func.grad(squares)(x), torch.autograd.functional.jacobian(squares, x))
    expected = torch.autograd.functional.hessian(squares, x)
    torch.testing.assert_close(torch.func.hessian(squares)(x), expected)
    tangent = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    with forward_ad.dual_level():
        derivative = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(derivative, (jacobian.flatten(-x.dim()) @ tangent.flatten()))


@each_operation
@pytest.mark.filterwarnings("error:There is a performance drop")
def test_vmap_is_a_loop(backend: str, name: str) -> None:
    function, x = OPERATIONS[name]
    batch = torch.stack([x, 2 * x, -x])
    torch.testing.assert_close(torch.vmap(function)(batch), torch.stack([function(one) for one in batch]))
    gradient = torch.func.grad(lambda x: function(x).square().sum())
    torch.testing.assert_close(torch.vmap(gradient)(batch), torch.stack([gradient(one) for one in batch]))


def test_vmap_over_other_arguments(backend: str) -> None:
    batch = torch.stack([W, -W])
    readout = torch.vmap(lambda w: spin_fast.attention_readout(ROWS, w, PTR))(batch)
    torch.testing.assert_close(readout, torch.stack([spin_fast.attention_readout(ROWS, w, PTR) for w in batch]))
    index = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]])
    readout = torch.vmap(lambda index: spin_fast.sum_readout(ROWS[0], PTR, index=index))(index)
    torch.testing.assert_close(readout[1], spin_fast.sum_readout(ROWS[0], PTR, index=index[1]))
    with pytest.raises(ValueError, match="ptr must not be batched by vmap: branch_readout"):
        torch.vmap(lambda ptr: spin_fast.branch_readout(ROWS, [W1], [B1], None, ptr))(torch.stack([PTR, PTR]))


@pytest.mark.parametrize("options", [{}, {"attention": False}, {"size_aware": True}, {"batch_norm": True}])
def test_ensembles(options: dict) -> None:
    """torch.func's recipe: many models of one shape as one, by vmap over their stacked parameters."""
    features = made_features(dtype=torch.float64)
    models = [SPIN(3, 8, 2, 2, **options).double().eval() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)

    def scores(parameters: dict, buffers: dict) -> torch.Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), (features,))

    together = torch.vmap(scores)(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([model(features) for model in models]))

    def loss(parameters: dict, buffers: dict) -> torch.Tensor:
        return training.loss_of(scores(parameters, buffers), features.y)

    gradients = torch.vmap(torch.func.grad(loss))(parameters, buffers)
    training.loss_of(models[1](features), features.y).backward()
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(gradients[name][1], parameter.grad)


def test_compiled_transforms(native) -> None:
    function, x = OPERATIONS["attention_readout"]
    gradient = torch.func.grad(lambda z: function(z).square().sum())
    torch.testing.assert_close(torch.compile(gradient, backend="eager", fullgraph=True)(x), gradient(x))


# Copies, pickles, files


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def memories(module: torch.nn.Module) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in module.state_dict().values() if value.numel()}


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_file])
@pytest.mark.parametrize("trained", [False, True])
def test_copies_of_models(copied: Callable[[Any], Any], trained: bool) -> None:
    """Also where a trainer has made the parameters views of one tensor: it goes on, and so does the copy."""
    features = made_features()
    model = SPIN(3, 8, 2, 2, batch_norm=True)
    trainer = training.Trainer(model) if trained else None
    if trainer:
        trainer.step(features)
    before = model.eval()(features)
    twin = copied(model)
    assert not twin.training
    assert not memories(model) & memories(twin)
    assert sum(value.untyped_storage().nbytes() for value in twin.parameters()) == sum(
        value.nbytes for value in twin.parameters()
    )
    assert torch.equal(twin(features), before)
    training.Trainer(twin, learning_rate=0.1).step(features)
    assert not torch.equal(twin.eval()(features), before)
    assert torch.equal(model.eval()(features), before)
    if trainer:
        flat = trainer.optimizer.param_groups[0]["params"][0]
        trainer.step(features)
        assert torch.equal(flat, model.flatten_parameters())
        assert not torch.equal(model.eval()(features), before)


def test_pickles_do_not_grow_with_the_flat_tensor() -> None:
    model = SPIN(3, 64, 2, 2)
    size = len(pickle.dumps(model))
    model.flatten_parameters()
    assert len(pickle.dumps(model)) < 1.05 * size


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_file])
def test_optimisers_are_copied_with_their_model(copied: Callable[[Any], Any]) -> None:
    features = made_features()
    model = SPIN(3, 8, 2, 2)
    model.flatten_parameters()
    model, adam = copied((model, torch.optim.Adam(model.parameters())))
    before = model(features).detach()
    training.loss_of(model(features), features.y).backward()
    adam.step()
    assert not torch.equal(model(features), before)


def test_copies_of_trainers_go_on_alike() -> None:
    features = made_features()
    trainer = training.Trainer(SPIN(3, 8, 2, 2))
    trainer.step(features)
    twins = [trainer, copy.deepcopy(trainer), through_pickle(trainer)]
    for _ in range(2):
        losses = [twin.step(features) for twin in twins]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("trained", [False, True])
def test_weights_in_files(tmp_path: Path, trained: bool) -> None:
    features = made_features()
    model = SPIN(3, 8, 2, 2, batch_norm=True)
    if trained:
        training.fit(model, features, train=[0, 2, 3], validation=[4], epochs=1)
    else:
        model.flatten_parameters()
    scores = model.eval()(features)
    new = [SPIN(**model.config).eval() for _ in range(4)]
    torch.save(model.state_dict(), tmp_path / "state.pt")
    new[0].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    new[1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    new[2].load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    model.unflatten_parameters()  # after fit nothing is left to do
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.torch.load_model(new[3], str(tmp_path / "model.safetensors"))
    for one in new:
        assert torch.equal(one(features), scores)


def test_fit_leaves_parameters_in_memory_of_their_own() -> None:
    model = SPIN(3, 8, 2, 2)
    training.fit(model, made_features(), train=[0, 2, 3], validation=[4], epochs=1)
    assert len({value.untyped_storage().data_ptr() for value in model.parameters()}) == len(list(model.parameters()))


def saved_features(tmp_path: Path) -> PowerFeatures:
    made_features().save(tmp_path / "features.safetensors")
    return PowerFeatures.load(tmp_path / "features.safetensors")


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle, through_file])
def test_copies_of_features_and_graphs(copied: Callable[[Any], Any], mapped: bool, tmp_path: Path) -> None:
    graphs = random_graphs([3, 0, 2], weighted=True)
    assert equal(copied(graphs), graphs)
    features = saved_features(tmp_path) if mapped else made_features()
    for one in (features, features[[3, 0, 3]], features[[3, 0]].take()):
        twin = copied(one)
        assert twin.operator == one.operator
        assert torch.equal(twin.dense_rows(), one.dense_rows())
        assert torch.equal(twin.selected_ptr, one.selected_ptr)
        assert torch.equal(twin.y, one.y)
        for mine, theirs in zip(twin[[0]].branch_rows()[1:], one[[0]].branch_rows()[1:], strict=True):
            assert torch.equal(mine, theirs)


# Processes and threads


def large_graphs() -> GraphBatch:
    return random_graphs([60] * 60, 0.1, 8, dtype=torch.float32)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes(method: str, threads: None) -> None:
    """OpenMP's threads do not survive a fork: a child that waits for them waits for ever, so the kernels do not."""
    torch.set_num_threads(2)
    graphs, model = large_graphs(), SPIN(8, 16, 2, 2)
    expected = work(graphs, model)
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=send_work, args=(graphs, model, sender), daemon=True)
    worker.start()
    try:
        assert receiver.poll(90), f"the {method}ed worker hangs"
        result = [torch.from_numpy(value) for value in receiver.recv()]
    finally:
        worker.kill()
        worker.join()
    for one, other in zip(result[:4], expected[:4], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(result[4:], expected[4:], strict=True):  # products of torch are among them
        torch.testing.assert_close(one, other)


class Batches:
    """Makes batches of features in a worker, and scores of them."""

    def __init__(self, features: PowerFeatures, model: SPIN) -> None:
        self.features, self.model = features, model

    def __call__(self, ids: list[int]) -> tuple[PowerFeatures, torch.Tensor]:
        with torch.no_grad():
            return self.features[ids].take(), self.model(self.features[ids])


@pytest.mark.parametrize("mapped", [False, True])
def test_workers_of_a_loader(mapped: bool, threads: None, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    features, model = saved_features(tmp_path) if mapped else made_features(), SPIN(3, 8, 2, 2)
    expected = model(features)
    loader = DataLoader(
        range(len(features)),
        batch_size=2,
        collate_fn=Batches(features, model),
        num_workers=2,
        multiprocessing_context="fork",
        timeout=60,
    )
    batches = list(loader)
    assert torch.equal(torch.cat([y for batch, _ in batches for y in [batch.y]]), features.y)
    for scores in (torch.cat([scores for _, scores in batches]), torch.cat([model(batch) for batch, _ in batches])):
        torch.testing.assert_close(scores, expected)


def test_threads_of_one_process(native, threads: None) -> None:
    """The same model, features and graphs in all of them, forwards and backwards: the bits of one after the other."""
    torch.set_num_threads(2)
    graphs, model = large_graphs(), SPIN(8, 16, 2, 2)
    features = PowerFeatures.from_graphs(graphs, 2)
    parameters = list(model.parameters())

    def run(number: int) -> list[torch.Tensor]:
        scores = model(features[number:])
        gradients = torch.autograd.grad(scores.square().sum(), parameters)
        return [scores.detach(), *gradients, *work(graphs[number : number + 20], model)]

    expected = [run(number) for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result, other in zip(pool.map(run, range(6)), expected, strict=True):
            for one, two in zip(result, other, strict=True):
                assert torch.equal(one, two)


IMPORT = """
import concurrent.futures, threading
gate = threading.Barrier(4)
def use(_):
    gate.wait()
    import torch, spin_fast
    return spin_fast.sum_readout(torch.ones(4, 2), torch.tensor([0, 1, 4])).tolist(), spin_fast.native_available()
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(set(map(str, pool.map(use, range(4)))))
"""


def test_shapes_alone(backend: str) -> None:
    """Of tensors on ``meta``, as tools that plan models have them."""
    z, w = torch.empty(5, 4, device="meta"), torch.empty(4, device="meta")
    ptr = torch.tensor([0, 3, 5], device="meta")
    assert spin_fast.attention_readout(z, w, ptr).shape == (2, 4)
    assert spin_fast.sum_readout(z, ptr).shape == (2, 4)


def test_import_from_several_threads() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", IMPORT],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    expected = {f"([[1.0, 1.0], [3.0, 3.0]], {spin_fast.native_available()})"}
    assert result.stdout.strip() == str(expected), result.stderr
