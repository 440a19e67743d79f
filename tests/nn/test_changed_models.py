"""What is not exactly the model that the constructor made is computed by its modules, never by fused code."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from helpers import random_graphs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

from spin_fast import SPIN, PowerFeatures, ops, training
from spin_fast.nn import BranchLinear, BranchNorm, export


def made_features() -> PowerFeatures:
    graphs = random_graphs([4, 0, 1, 6, 3, 5, 2], signs=True)
    return PowerFeatures.from_graphs(replace(graphs, y=torch.tensor([0, 1, 0, 1, 1, 0, 1])), 2)


def made_model(**options) -> SPIN:
    torch.manual_seed(0)
    return SPIN(3, 5, 2, 2, num_layers=2, classifier_features=(4,), **options).double()


def plain_forward(model: SPIN, features: PowerFeatures) -> Tensor:
    """The method as it is written, module by module, with one row per node."""
    rows, ptr = features.dense_rows(), features.selected_ptr
    for depth, layer in enumerate(model.hops.layers):
        rows = layer(rows)
        if model.hops.norms:
            rows = model.hops.norms[depth](rows)
        rows = F.leaky_relu(rows, model.config["negative_slope"])
    segments = [rows[:, begin:end] for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)]
    if model.hops.attention is None:
        readouts = [z.sum(1) for z in segments]
    else:
        alpha = [torch.softmax(torch.relu(torch.einsum("rnh,rh->rn", z, model.hops.attention)), 1) for z in segments]
        readouts = [torch.einsum("rn,rnh->rh", a, z) for a, z in zip(alpha, segments, strict=True)]
    return model.classifier(torch.stack([readout.flatten() for readout in readouts]))


class Plain(nn.Module):
    """A model around ``plain_forward``, so that hooks and a ``forward`` of the model's own count."""

    def __init__(self, model: SPIN) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: PowerFeatures) -> Tensor:
        own = vars(self.model).get("forward")
        for hook in self.model._forward_pre_hooks.values():
            hook(self.model, (features,))
        scores = plain_forward(self.model, features) if own is None else own(features)
        for hook in self.model._forward_hooks.values():
            scores = hook(self.model, (features,), scores)
        return scores


class LowRank(nn.Module):
    """LoRA: a frozen layer and a product of two narrow matrices beside it."""

    def __init__(self, layer: BranchLinear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        branches, inner, outer = layer.weight.shape
        self.down = nn.Parameter(torch.randn(branches, inner, 2, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(branches, 2, outer, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows) + rows @ self.down @ self.up


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Louder(BranchLinear):
    def forward(self, rows: Tensor) -> Tensor:
        return 3 * super().forward(rows)


def wrap_in_sequential(model: SPIN) -> None:
    model.hops.layers[1] = nn.Sequential(model.hops.layers[1])


def wrap_in_low_rank(model: SPIN) -> None:
    model.hops.layers[1] = LowRank(model.hops.layers[1])


def subclass_layer(model: SPIN) -> None:
    model.hops.layers[0].__class__ = Louder


def drop_layer(model: SPIN) -> None:
    model.hops.layers = model.hops.layers[:1]


def tie_parameters(model: SPIN) -> None:
    model.hops.layers[0].bias = model.hops.layers[1].bias


def tie_modules(model: SPIN) -> None:
    model.hops.layers[1] = BranchLinear(3, 5, 5).double()
    model.hops.layers.append(model.hops.layers[1])


def swap_order(model: SPIN) -> None:
    parametrize.register_parametrization(model.hops.layers[1], "weight", Doubled())
    parametrize.remove_parametrizations(model.hops.layers[1], "weight")
    assert [*dict(model.hops.layers[1].named_parameters())] == ["bias", "weight"]


def own_forward(model: SPIN) -> None:
    model.forward = lambda features: 2 * plain_forward(model, features)


def own_forward_of_layer(model: SPIN) -> None:
    made = model.hops.layers[0].forward
    model.hops.layers[0].forward = lambda rows: 2 * made(rows)


def replace_classifier(model: SPIN) -> None:
    model.classifier = nn.Linear(15, 2).double()


def steeper_classifier(model: SPIN) -> None:
    model.classifier[1].negative_slope = 0.5


def replaced_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = 3 * parameter.grad


# What changes a model, and whether its forward pass may be fused all the same.
CHANGES: dict[str, tuple[Callable[[SPIN], object], bool]] = {
    "pruned": (lambda model: prune.l1_unstructured(model.hops.layers[0], "weight", 0.4), False),
    "pruned classifier": (lambda model: prune.l1_unstructured(model.classifier[0], "weight", 0.4), True),
    "parametrized": (
        lambda model: parametrize.register_parametrization(model.hops.layers[0], "weight", Doubled()),
        False,
    ),
    "parametrized attention": (
        lambda model: parametrize.register_parametrization(model.hops, "attention", Doubled()),
        False,
    ),
    "weight_norm by hooks": (lambda model: weight_norm(model.hops.layers[1], "weight"), False),
    "weight_norm by parametrization": (
        lambda model: parametrizations.weight_norm(model.hops.layers[1], "weight"),
        False,
    ),
    "order of parameters": (swap_order, True),
    "tied parameters": (tie_parameters, True),
    "tied modules": (tie_modules, False),
    "added to the model": (lambda model: model.register_parameter("more", nn.Parameter(torch.ones(2).double())), True),
    "added to a layer": (
        lambda model: model.hops.layers[0].register_parameter("more", nn.Parameter(torch.ones(2).double())),
        True,
    ),
    "frozen": (lambda model: model.hops.layers[0].requires_grad_(False), True),
    "frozen parameter": (lambda model: model.hops.attention.requires_grad_(False), True),
    "gradient hook": (lambda model: model.hops.layers[0].weight.register_hook(lambda grad: 3 * grad), True),
    "hook on accumulated gradients": (
        lambda model: model.hops.attention.register_post_accumulate_grad_hook(replaced_gradient),
        True,
    ),
    "forward hook": (lambda model: model.hops.layers[0].register_forward_hook(lambda *call: 2 * call[-1]), False),
    "forward pre-hook": (
        lambda model: model.hops.layers[1].register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
        False,
    ),
    "backward hook": (
        lambda model: model.hops.layers[1].register_full_backward_hook(lambda _, inner, outer: (2 * inner[0],)),
        False,
    ),
    "hook of the classifier": (lambda model: model.classifier.register_forward_hook(lambda *call: 2 * call[-1]), True),
    "hook of a part of the classifier": (
        lambda model: model.classifier[1].register_forward_hook(lambda *call: 2 * call[-1]),
        True,
    ),
    "hook of the model": (lambda model: model.register_forward_hook(lambda *call: 2 * call[-1]), True),
    "own forward": (own_forward, True),
    "own forward of a layer": (own_forward_of_layer, False),
    "Sequential": (wrap_in_sequential, False),
    "LoRA": (wrap_in_low_rank, False),
    "subclass": (subclass_layer, False),
    "fewer layers": (drop_layer, False),
    "another classifier": (replace_classifier, True),
    "another slope in the classifier": (steeper_classifier, True),
    "another slope in the branches": (lambda model: model.config.update(negative_slope=0.3), True),
}


@pytest.fixture(params=CHANGES)
def changed(request: pytest.FixtureRequest) -> Iterator[tuple[SPIN, SPIN, bool]]:
    """Two equal models with the same change, and whether the forward pass may be fused."""
    change, fused = CHANGES[request.param]
    models = []
    for _ in range(2):
        model = made_model()
        torch.manual_seed(1)
        change(model)
        models.append(model)
    return (*models, fused)


def test_forward_is_that_of_the_modules(changed: tuple[SPIN, SPIN, bool]) -> None:
    model, twin, fused = changed
    assert model.is_as_constructed() == fused
    assert not model.is_as_constructed(to_train=True)
    features = made_features()
    for training_mode in (True, False):
        model.train(training_mode), twin.train(training_mode)
        for selected in (features, features[[3, 3, 1, 0]]):
            scores, expected = model(selected), Plain(twin)(selected)
            torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12)
            model.zero_grad(), twin.zero_grad()
            scores.square().sum().backward(), expected.square().sum().backward()
            assert len([*model.parameters()]) == len([*twin.parameters()])
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None:
                    torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


def test_steps_are_those_of_autograd(changed: tuple[SPIN, SPIN, bool]) -> None:
    model, twin, _ = changed
    features = made_features()
    trainer = training.Trainer(model, learning_rate=1e-2)
    trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    plain = Plain(twin)
    for _ in range(4):
        loss = trainer.step(features)
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(features), features.y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_hooks_added_between_epochs_are_run(native) -> None:
    features, model = made_features(), made_model()
    trainer, calls = training.Trainer(model), []
    trainer.epoch(features, range(7), 3)
    handles = [
        model.hops.layers[0].register_forward_hook(lambda *_: calls.append("module")),
        model.hops.attention.register_hook(lambda _: calls.append("gradient")),
        trainer.optimizer.register_step_post_hook(lambda *_: calls.append("optimizer")),
        nn.modules.module.register_module_forward_hook(
            lambda module, *_: calls.append("all") if module is model.classifier else None
        ),
    ]
    for handle, name in zip(handles, ("module", "gradient", "optimizer", "all"), strict=True):
        calls.clear()
        trainer.epoch(features, range(7), 3)
        assert calls.count(name) == 3
        handle.remove()
    calls.clear()
    trainer.epoch(features, range(7), 3)
    assert calls == []


def test_other_parameters_than_at_the_start_are_refused() -> None:
    """The moments of Adam belong to the parameters in their order."""
    features, model = made_features(), made_model()
    trainer = training.Trainer(model)
    trainer.epoch(features, range(7), 3)
    prune.l1_unstructured(model.hops.layers[0], "weight", 0.4)
    with pytest.raises(ValueError, match="model must have the parameters to train that it had when"):
        trainer.epoch(features, range(7), 3)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_what_changes_no_computation_stays_fused(native, batch_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_model(batch_norm=batch_norm)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = made_model(batch_norm=batch_norm)
    loaded.load_state_dict(model.state_dict())
    assigned = made_model(batch_norm=batch_norm)
    assigned.load_state_dict(model.state_dict(), assign=True)
    flat = copy.deepcopy(model)
    flat.flatten_parameters()
    models = [model, model.float().double(), copy.deepcopy(model), torch.load(file, weights_only=False), loaded]
    models += [assigned, flat, copy.deepcopy(flat).to("cpu"), copy.deepcopy(model).requires_grad_(False)]
    frozen, calls, original = models[-1], [], ops.branch_readout
    monkeypatch.setattr(ops, "branch_readout", lambda *a, **k: calls.append(1) or original(*a, **k))
    features = made_features()
    expected = plain_forward(model.eval(), features)
    for number, each in enumerate(models, 1):
        assert each.is_as_constructed()
        assert each.is_as_constructed(to_train=True) == (each is not frozen and not batch_norm)
        torch.testing.assert_close(each.eval()(features), expected)
        assert len(calls) == number


def test_statistics_of_a_norm_are_its_own_choice() -> None:
    """A norm in training mode in a model in evaluation takes those of the batch, and the other way round."""
    features = made_features()
    for model_mode, norm_mode in ((False, True), (True, False)):
        model, twin = made_model(batch_norm=True), made_model(batch_norm=True)
        for each in (model, twin):
            each.train(model_mode)
            for norm in each.hops.norms:
                assert isinstance(norm, BranchNorm)
                norm.train(norm_mode)
        torch.testing.assert_close(model(features), plain_forward(twin, features))
        for one, other in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_changed_norms_are_called(batch_norm: bool) -> None:
    features, model, twin = made_features(), made_model(batch_norm=True), made_model(batch_norm=True)
    for each in (model, twin):
        each.train(batch_norm)
        each.hops.norms[0].register_forward_hook(lambda *call: 2 * call[-1])
    torch.testing.assert_close(model(features), plain_forward(twin, features))


def test_calibration_leaves_changed_models_alone() -> None:
    for change, _ in CHANGES.values():
        model, twin = made_model(), made_model()
        for each in (model, twin):
            torch.manual_seed(1)
            change(each)
        model.calibrate(made_features())
        assert not model.calibrated
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other)


def test_programs_are_those_of_the_modules(native, changed: tuple[SPIN, SPIN, bool]) -> None:
    model, twin, _ = changed
    features = made_features()
    rows, sizes = features.dense_rows(), features.node_ptr.diff()
    if vars(model).get("forward") or model._forward_hooks:
        with pytest.raises(ValueError, match="model must have the forward of SPIN and no hooks of its own"):
            export(model, from_rows=True)
        return
    program = export(model, from_rows=True).module()
    torch.testing.assert_close(program(rows, sizes), plain_forward(twin.eval(), features))


def test_a_subclass_with_another_forward_is_not_exported() -> None:
    class Squared(SPIN):
        def forward(self, features: PowerFeatures) -> Tensor:
            return super().forward(features).square()

    with pytest.raises(ValueError, match="model must have the forward of SPIN"):
        export(Squared(3, 5, 2, 2), "sym")
