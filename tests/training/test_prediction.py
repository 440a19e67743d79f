"""Scores and probabilities, of features and straight from graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import random_graphs
from helpers.training import knowing, new_model

from spin_fast import SPIN, GraphBatch, PowerFeatures, ops, training
from spin_fast.nn.base import GraphClassifier


def test_predict_order_and_batches(monkeypatch: pytest.MonkeyPatch, digits: PowerFeatures) -> None:
    model = new_model()
    ids = torch.tensor([5, 299, 5, 0])
    logits = training.predict(model, digits, ids)
    torch.testing.assert_close(logits, training.predict(model, digits, ids, batch_size=1))
    torch.testing.assert_close(logits, training.predict(model, digits)[ids])
    assert model.graphs_at_once == (8 << 20) // (8 * model.classifier[0].in_features)
    model.hops.register_forward_hook(lambda *_: None)
    assert model.graphs_at_once == 1024
    monkeypatch.setattr(SPIN, "graphs_at_once", 7)
    torch.testing.assert_close(logits, training.predict(model, digits)[ids])
    assert training.predict(model, digits[[]]).shape == (0, 10)
    assert not logits.requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_norm": True, "attention": False},
        {"size_aware": True},
        {"branches": "both"},
        {"branches": "joint", "size_aware": True},
        {"branches": "joint", "batch_norm": True, "attention": False},
    ],
)
def test_probabilities_straight_from_graphs(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    graphs = random_graphs([4, 0, 1, 60, 3, 0, 9], dtype=torch.float32)
    model = SPIN(3, 16, 4, 2, **options)
    features = PowerFeatures.from_graphs(graphs, 2, "rw")
    expected = training.predict(model, features).softmax(1)
    checked: list[str] = []
    forward = SPIN.forward_tensors
    monkeypatch.setattr(SPIN, "forward_tensors", lambda *args, **named: checked.append("") or forward(*args, **named))
    at_once = training.predict_proba(model, graphs, "rw")
    torch.testing.assert_close(at_once, expected)
    for size in (4 << 20, 400, 1):
        monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", size)
        assert torch.equal(training.predict_proba(model, graphs, "rw"), at_once)
        assert not checked
        with monkeypatch.context() as patch:
            patch.setattr(SPIN, "_scorer", GraphClassifier._scorer)  # which checks every chunk
            torch.testing.assert_close(training.predict_proba(model, graphs, "rw"), expected)
            assert checked
        checked.clear()
    assert [len(scores) for scores in training.predict_chunks(model, graphs, "rw")] == [len(graphs)]
    many = random_graphs([4] * 20, dtype=torch.float32)  # a chunk each
    found = [len(scores) for scores in training.predict_chunks(model, many, "rw")]
    assert found == [len(some) for some in torch.arange(20).split(ops.chunks_at_once())]
    assert training.predict_proba(model, graphs[:0], "rw").shape == (0, 4)
    with pytest.raises(TypeError, match="graphs must be a GraphBatch, got PowerFeatures"):
        training.predict_proba(model, features)
    with pytest.raises(ValueError, match="graphs must have 3 features as the model, got 5"):
        training.predict_proba(model, random_graphs([3], num_features=5))
    with pytest.raises(ValueError, match="operator must be one of"):
        training.predict_proba(model, graphs, "nosuch")


@pytest.mark.parametrize(
    "options", [{"batch_norm": True, "attention": False}, {"branches": "both"}, {"size_aware": True}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_repeat(monkeypatch: pytest.MonkeyPatch, threads: None, options: dict, dtype: torch.dtype) -> None:
    """Equal rows are evaluated once; nothing changes by that."""
    readouts, of_graphs = ops.EvaluatedRows.readout, ops.EvaluatedRows.readouts_of_graphs
    read: list[int] = []

    def recorded(rows: ops.EvaluatedRows, graphs: GraphBatch, ptrs: list[torch.Tensor]) -> tuple:
        read.extend(map(len, ptrs))
        return of_graphs(rows, graphs, ptrs)

    monkeypatch.setattr(ops.EvaluatedRows, "readouts_of_graphs", recorded)
    monkeypatch.setattr(ops.EvaluatedRows, "readout", lambda *args: read.append(len(args[2])) or readouts(*args))
    graphs = random_graphs([4, 0, 1, 60, 3, 0, 9] * 30, dtype=dtype)
    graphs = replace(graphs, x=graphs.x.sign())
    model = SPIN(3, 32, 4, 2, **options).to(dtype)
    for number, size in ((1, 4 << 20), (1, 3000), (2, 20_000)):
        torch.set_num_threads(number)
        monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", size)
        with monkeypatch.context() as patch:
            patch.setattr(SPIN, "_scorer", GraphClassifier._scorer)
            expected = training.predict_proba(model, graphs, "rw")
            assert not read
        torch.testing.assert_close(training.predict_proba(model, graphs, "rw"), expected)
        assert sum(read) - len(read) == len(graphs)
        read.clear()


def test_a_changed_model_has_all_rows_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is computed of a row may not be what the operation would."""
    monkeypatch.setattr(ops.EvaluatedRows, "readout", lambda *_: pytest.fail("rows must not be shared"))
    graphs = random_graphs([4, 0, 9], dtype=torch.float32)

    class Halved(SPIN):
        def forward_tensors(self, *args, **options):
            return super().forward_tensors(*args, **options) / 2

    replaced = SPIN(3, 8, 4, 2)
    replaced.forward_tensors = replaced.forward_tensors  # as torch.compile would
    for model in (Halved(3, 8, 4, 2), replaced):
        training.predict_proba(model, graphs, "rw")
    half = SPIN(3, 8, 4, 2).bfloat16()
    with torch.autocast("cpu"):
        assert training.predict_proba(half, graphs, "rw").shape == (3, 4)
    for model, dtype in ((SPIN(3, 8, 4, 2).double(), "float64"), (half, "bfloat16")):
        with pytest.raises(TypeError, match=f"graphs must be torch.{dtype} as the model is, got torch.float32"):
            training.predict_proba(model, graphs, "rw")


@pytest.mark.parametrize(
    "options", [{}, {"attention": False, "batch_norm": True}, {"dropout": 0.1}, {"branches": "joint"}]
)
def test_operators_side_by_side(tmp_path, monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    graphs = replace(random_graphs([4, 1, 60, 3, 0, 9] * 5, dtype=torch.float32), y=torch.arange(30) % 4)
    features = PowerFeatures.from_graphs(graphs, 2, ("sym", "adj"))
    model = SPIN(3, 16, 4, 2, num_operators=2, **options)
    model.calibrate(features)
    before = training.loss_of(training.predict(model, features), graphs.y)
    training.fit(model, features, slice(20), slice(20, None), epochs=3, batch_size=8)
    assert training.loss_of(training.predict(model, features), graphs.y) < before
    training.save_checkpoint(tmp_path / "x", model)
    model, _ = training.load_checkpoint(tmp_path / "x")
    monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", 5000)
    expected = training.predict(model, features).softmax(1)
    torch.testing.assert_close(training.predict_proba(model, graphs), expected)
    torch.testing.assert_close(training.predict_proba(model, graphs, ["sym", "adj"]), expected)
    model.operator = None
    with pytest.raises(ValueError, match=r"operator must name 2 operator\(s\) as the model has, got 'sym'"):
        training.predict_proba(model, graphs, "sym")


def test_probabilities_of_many_graphs_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of powers do not grow with the number of graphs, and no chunk is far from full."""
    graphs = random_graphs([4, 9, 20, 1], dtype=torch.float32)
    model = knowing("sym")
    expected = training.predict_proba(model, graphs)
    sizes, of_graphs = [], ops.EvaluatedRows.readouts_of_graphs

    def recorded(rows: ops.EvaluatedRows, graphs: GraphBatch, ptrs: list[torch.Tensor]) -> tuple:
        sizes.extend(int(ptr[-1] - ptr[0]) * model.num_branches * graphs.num_features * 4 for ptr in ptrs)
        return of_graphs(rows, graphs, ptrs)

    monkeypatch.setattr(ops.EvaluatedRows, "readouts_of_graphs", recorded)
    monkeypatch.setattr("spin_fast.training.prediction.CHUNK_BYTES", 8000)
    result = training.predict_proba(model, graphs[list(range(4)) * 300])
    torch.testing.assert_close(result, expected.repeat(300, 1))
    assert max(sizes) <= 8000
    assert all(size > 4000 for size in sizes[:-1])


def doubling(model: SPIN) -> None:
    model.classifier.register_forward_hook(lambda module, inputs, scores: 2 * scores)


def steeper(model: SPIN) -> None:
    model.classifier[1].negative_slope = 0.5


def without_bias(model: SPIN) -> None:
    model.classifier[0].bias = None


def replaced(model: SPIN) -> None:
    model.classifier = torch.nn.Sequential(torch.nn.Linear(24, 4), torch.nn.Tanh())


@pytest.mark.parametrize("change", [doubling, steeper, without_bias, replaced])
def test_a_changed_classifier_classifies(native, change: Callable[[SPIN], None]) -> None:
    graphs = random_graphs([4, 0, 9], dtype=torch.float32)
    features = PowerFeatures.from_graphs(graphs, 2)
    model = SPIN(3, 8, 4, 2)
    plain = training.predict(model, features)
    change(model)
    scores = training.predict(model, features)
    assert not torch.allclose(scores, plain)
    torch.testing.assert_close(scores, model(features).detach())
    torch.testing.assert_close(training.predict_proba(model, graphs, "sym"), scores.softmax(1))


def test_a_deep_classifier(native) -> None:
    graphs = random_graphs([4, 0, 9], dtype=torch.float32)
    model = SPIN(3, 8, 4, 2, classifier_features=[5] * 8)
    expected = model(PowerFeatures.from_graphs(graphs, 2)).detach().softmax(1)
    torch.testing.assert_close(training.predict_proba(model, graphs, "sym"), expected)


def test_scores_are_the_same_bits_for_any_batch_and_number_of_threads(native, threads: None) -> None:
    graphs = random_graphs([4, 0, 9, 1, 7] * 120, dtype=torch.float32)
    features = PowerFeatures.from_graphs(graphs, 2)
    model = SPIN(3, 32, 4, 2)
    expected = training.predict(model, features)
    for number, size in ((1, 1), (2, 100), (2, 1024), (3, 7)):
        torch.set_num_threads(number)
        assert torch.equal(training.predict(model, features, batch_size=size), expected)


@pytest.mark.parametrize(("classes", "multilabel"), [(2, False), (7, False), (17, False), (5, True)])
def test_probabilities_do_not_depend_on_the_number_of_threads(
    native, threads: None, classes: int, multilabel: bool
) -> None:
    """Where each thread's share ends, torch rounds otherwise."""
    model = SPIN(3, 4, classes, 1)
    model.multilabel = multilabel
    scores = torch.randn(30_011, classes, generator=torch.Generator().manual_seed(0))
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(model.probabilities(scores))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
