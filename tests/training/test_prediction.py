"""Scores and probabilities, of features and straight from graphs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from helpers import random_graphs, same_by_any_threads
from helpers.training import knowing, new_model
from torch.nn.utils import prune

from spin_fast import SPIN, GraphBatch, NodeFeatures, PowerFeatures, ops, training
from spin_fast.nn import Ensemble, SubtreeLinear
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
    graphs = random_graphs([4, 0, 1, 60, 3, 0, 9] * 30, dtype=dtype, signs=True)
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


@pytest.mark.parametrize("num_features", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_norm": True, "attention": False}, {"branches": "joint"}, {"branches": "both"}, {"size_aware": True}],
)
def test_a_predictor_is_predict_proba(
    monkeypatch: pytest.MonkeyPatch, backend: str, num_features: int, options: dict
) -> None:
    """Bit for bit, whatever it was called with before; it looks at the model once.

    Products of torch, which the reference takes, are rounded by where their operands lie in memory.
    """
    exact = {"rtol": 1e-5, "atol": 1e-6} if backend == "reference" else {"rtol": 0, "atol": 0}
    graphs = random_graphs([4, 0, 1, 60, 3, 0, 9], num_features=num_features, dtype=torch.float32)
    weighted = replace(graphs, edge_weight=torch.rand(graphs.num_edges))
    many = random_graphs([900, 200], num_features=num_features, dtype=torch.float32)
    model = SPIN(num_features, 16, 4, 2, **options)
    model.operator = "rw"
    calls = [*graphs, graphs, weighted[3:5], graphs[1:2], graphs[:0], many, graphs[3:]]
    expected = [training.predict_proba(model, some) for some in calls]
    predict = training.Predictor(model)
    with torch.no_grad():
        model.classifier[0].bias.fill_(torch.nan)
    predict(graphs)
    with monkeypatch.context() as patch:
        if backend not in ("reference", "cuda"):
            patch.setattr(SPIN, "is_as_constructed", lambda self: pytest.fail("the model has been looked at"))
        for some, of in zip(calls, expected, strict=True):
            if some is not many and some.num_nodes:
                found = predict(some)
                torch.testing.assert_close(found, of, **exact)
                assert not found.is_inference()
    for some, of in zip(calls, expected, strict=True):
        torch.testing.assert_close(predict(some), of, **exact)


def test_a_predictor_of_any_model() -> None:
    graphs = replace(random_graphs([4, 1, 60, 3, 0, 9], dtype=torch.float32), y=torch.arange(6) % 4)
    spins = [SPIN(3, 8, 4, 2).double(), SPIN(3, 8, 4, 1, attention=False).double()]
    for number, member in enumerate(spins):
        member.operator = ("sym", "adj")[number]
    graphs = replace(graphs, x=graphs.x.double())
    spins[0].node_features = NodeFeatures(standardize=True).fit(graphs)
    linear = SubtreeLinear(3, 4, 8, num_hops=1)
    with torch.no_grad():
        linear.weight.normal_()
    for model in (*spins, linear, Ensemble([linear, *spins])):
        expected = training.predict_proba(model, graphs)
        predict = training.Predictor(model)
        assert torch.equal(predict(graphs), expected)
        torch.testing.assert_close(torch.cat([predict(one) for one in graphs]), expected)


def test_a_predictor_under_autocast() -> None:
    graphs, model = random_graphs([4, 0, 9], dtype=torch.float32), SPIN(3, 8, 4, 2)
    for of in (model, copy.deepcopy(model).bfloat16()):
        predict = training.Predictor(of, "rw")
        with torch.autocast("cpu"):
            assert torch.equal(predict(graphs), training.predict_proba(of, graphs, "rw"))
    predict = training.Predictor(model, "rw")
    for _ in range(2):
        assert torch.equal(predict(graphs), training.predict_proba(model, graphs, "rw"))
        with torch.autocast("cpu"):
            assert torch.equal(predict(graphs), training.predict_proba(model, graphs, "rw"))


def test_threads_share_a_predictor() -> None:
    graphs = random_graphs([30] * 200, dtype=torch.float32)
    model = SPIN(3, 16, 4, 2)
    predict = training.Predictor(model, "sym")
    expected = torch.cat([training.predict_proba(model, one, "sym") for one in graphs])
    with ThreadPoolExecutor(4) as pool:
        assert torch.equal(torch.cat([*pool.map(predict, graphs)]), expected)


def test_a_predictor_of_changed_models() -> None:
    """Overridden methods and pruned weights count, at the first call, too."""
    graphs = random_graphs([4, 1, 60], dtype=torch.float32)

    class Tenfold(SPIN):
        def score_chunks(self, *arguments):
            for scores in super().score_chunks(*arguments):
                yield 10 * scores

    class TenfoldEnsemble(Ensemble):
        def score_chunks(self, *arguments):
            for scores in super().score_chunks(*arguments):
                yield 10 * scores

    class Doubled(SPIN):
        def prepared(self, graphs, operator=None):
            return super().prepared(replace(graphs, x=2 * graphs.x), operator)

    pruned, normed = SPIN(3, 8, 4, 2), SPIN(3, 8, 4, 2)
    prune.l1_unstructured(pruned.classifier[0], "weight", 0.5)
    torch.nn.utils.weight_norm(normed.classifier[0])
    for model in (Tenfold(3, 8, 4, 2), Doubled(3, 8, 4, 2), pruned, normed):
        predict = training.Predictor(model, "sym")
        torch.testing.assert_close(predict(graphs), training.predict_proba(model, graphs, "sym"))
    normed.operator = "sym"
    ensemble = TenfoldEnsemble([normed])
    torch.testing.assert_close(training.Predictor(ensemble)(graphs), training.predict_proba(ensemble, graphs))
    with pytest.raises(ValueError, match=r"members\[0\]: operator must be given"):
        training.Predictor(Ensemble([SPIN(3, 8, 4, 2)]))


def test_a_predictor_leaves_the_model_as_it_was() -> None:
    """What a module keeps of a forward pass may still be needed by the backward pass."""
    model, graphs = knowing("sym"), random_graphs([4, 3], dtype=torch.float32)
    layer = model.classifier[0]
    layer.penalty = layer.weight.square().sum()
    predict = training.Predictor(model)
    torch.autograd.grad(layer.penalty, layer.weight)
    assert torch.equal(predict(graphs), training.predict_proba(model, graphs))


def test_a_predictor_in_other_processes() -> None:
    graphs = random_graphs([30, 4], dtype=torch.float32)
    predict = training.Predictor(SPIN(3, 16, 4, 2), "sym")
    expected = predict(graphs)
    assert repr(predict) == "Predictor(SPIN, operator='sym')"
    for same in (pickle.loads(pickle.dumps(predict)), copy.deepcopy(predict), copy.copy(predict)):
        assert torch.equal(same(graphs), expected)


def test_what_a_predictor_refuses() -> None:
    model, graphs = SPIN(3, 8, 4, 2), random_graphs([4, 1], dtype=torch.float32)
    with pytest.raises(ValueError, match="operator must be given"):
        training.Predictor(model)
    with pytest.raises(TypeError, match="model must be a GraphModel, such as a SPIN, got Linear"):
        training.Predictor(torch.nn.Linear(3, 4))
    with pytest.raises(TypeError, match="model must be a GraphModel, such as a SPIN, got OrderedDict"):
        training.predict_proba(model.state_dict(), graphs, "sym")
    predict = training.Predictor(model, "sym")
    with pytest.raises(TypeError, match="graphs must be a GraphBatch, got list"):
        predict([graphs])
    with pytest.raises(ValueError, match="graphs must have 3 features as the model, got 5"):
        predict(random_graphs([3], num_features=5, dtype=torch.float32))
    with pytest.raises(TypeError, match=r"graphs must be torch.float32 as the model is, got torch.float64"):
        predict(random_graphs([3]))
    graphs.x[0] = torch.inf
    with pytest.warns(UserWarning, match=r"1 of 2 graph\(s\) have scores that are not finite") as told:
        assert predict(graphs).isnan().any(1).tolist() == [True, False]
    assert told[0].filename == __file__


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
    found = same_by_any_threads(lambda: model.probabilities(scores))
    for few in (1, 2, 15, 16, 37):  # nor on the number of graphs
        alone = torch.cat([model.probabilities(part) for part in scores[: 4 * few].split(few)])
        assert torch.equal(alone, found[: 4 * few])
