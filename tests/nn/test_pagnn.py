from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_graphs
from torch import Tensor, nn
from torch.nn import functional as F

import spin_fast
from spin_fast import PAGNN, SPIN, GraphBatch, PowerFeatures, datasets, training
from spin_fast.nn import AttentionReadout, BranchAttention, LinkPredictor


def made_graphs(seed: int = 0) -> GraphBatch:
    return replace(random_graphs([4, 0, 1, 6, 3], signs=True, seed=seed), y=torch.tensor([0, 1, 0, 1, 1]))


def made_features(deduplicate: bool = True, num_hops: int = 2) -> PowerFeatures:
    features = PowerFeatures.from_graphs(made_graphs(), num_hops, deduplicate=deduplicate)
    assert (features.index is not None) == deduplicate
    return features


def mlp(in_features: int = 3, hidden: int = 5, out_features: int = 5) -> nn.Sequential:
    layers = (nn.Linear(in_features, hidden), nn.LeakyReLU(), nn.Linear(hidden, out_features), nn.LeakyReLU())
    return nn.Sequential(*layers)


def made_model(readout: Any = "sum", combine: Any = "concat", **options: Any) -> PAGNN:
    torch.manual_seed(0)
    width = 15 if combine == "concat" else 5
    return PAGNN([mlp() for _ in range(3)], readout, combine, nn.Linear(width, 2), **options).double()


def own_readout(z: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> Tensor:
    """The sum of squares, from what a function of the user's own is given."""
    squares = (z if index is None else z[index.long()]).square()
    squares = squares if count is None else count[:, None] * squares
    return torch.stack([squares[begin:end].sum(0) for begin, end in pairwise(ptr.tolist())])


def aggregation(name: str) -> nn.Module:
    return getattr(pytest.importorskip("torch_geometric.nn.aggr"), name)()


READOUTS = {
    "sum": (lambda: "sum", lambda z, _: z.sum(0)),
    "mean": (lambda: "mean", lambda z, _: z.mean(0)),
    "max": (lambda: "max", lambda z, _: z.amax(0)),
    "attention": (lambda: AttentionReadout(5), lambda z, readout: torch.softmax(F.relu(z @ readout.weight), 0) @ z),
    "size-aware attention": (
        lambda: AttentionReadout(5, size_aware=True),
        lambda z, readout: len(z) * torch.softmax(F.relu(z @ readout.weight), 0) @ z,
    ),
    "one for each branch": (
        lambda: [AttentionReadout(5) for _ in range(3)],
        lambda z, readout: torch.softmax(F.relu(z @ readout.weight), 0) @ z,
    ),
    "a function": (lambda: own_readout, lambda z, _: z.square().sum(0)),
    "PyG's softmax": (lambda: aggregation("SoftmaxAggregation"), lambda z, _: (torch.softmax(z, 0) * z).sum(0)),
    "PyG's standard deviation": (
        lambda: aggregation("VarAggregation"),
        lambda z, _: z.var(0, correction=0),
    ),
}
COMBINATIONS = {
    "concat": (lambda: "concat", lambda parts, _: torch.cat(parts, 1)),
    "sum": (lambda: "sum", lambda parts, _: parts[0] + parts[1] + parts[2]),
    "mean": (lambda: "mean", lambda parts, _: (parts[0] + parts[1] + parts[2]) / 3),
    "max": (lambda: "max", lambda parts, _: torch.maximum(parts[0], torch.maximum(parts[1], parts[2]))),
    "attention": (
        lambda: BranchAttention(5),
        lambda parts, combine: sum(
            alpha * part
            for alpha, part in zip(
                torch.softmax(torch.cat([combine.score(part) for part in parts], 1), 1).split(1, 1), parts, strict=True
            )
        ),
    ),
    "a function": (lambda: lambda parts: parts[0] * parts[2], lambda parts, _: parts[0] * parts[2]),
}


def plain(model: PAGNN, features: PowerFeatures, readout: Any, combine: Any) -> Tensor:
    """The model as it is written: a loop over branches and graphs, one node per row."""
    rows, bounds = features.dense_rows(), features.selected_ptr.tolist()
    parts = []
    for r, branch in enumerate(model.branches):
        part = model.readout[r] if isinstance(model.readout, nn.ModuleList) else model.readout
        graphs = [
            readout(branch(rows[r, begin:end]), part) if begin < end else torch.zeros(5).double()
            for begin, end in pairwise(bounds)
        ]
        parts.append(torch.stack(graphs))
    return model.classifier(combine(parts, model.combine))


def gradients(model: nn.Module, scores: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    scores.square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_alike(model: PAGNN, features: PowerFeatures, readout: Any, combine: Any) -> None:
    for selected in (features, features[[3, 3, 1, 0]], features[[3, 3, 1, 0]].take(), features[[4]].expand()):
        scores, expected = model(selected), plain(model, selected, readout, combine)
        torch.testing.assert_close(scores, expected)
        torch.testing.assert_close(gradients(model, scores), gradients(model, expected))


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("name", READOUTS)
def test_every_readout_is_as_written(name: str, deduplicate: bool) -> None:
    make, oracle = READOUTS[name]
    assert_alike(made_model(make()), made_features(deduplicate), oracle, COMBINATIONS["concat"][1])


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_is_as_written(name: str) -> None:
    make, oracle = COMBINATIONS[name]
    model = made_model(combine=make())
    assert_alike(model, made_features(), READOUTS["sum"][1], oracle)


def test_jumping_knowledge_combines_branches_of_one_width() -> None:
    jumping = pytest.importorskip("torch_geometric.nn").JumpingKnowledge
    model = made_model("mean", jumping("lstm", channels=5, num_layers=1))
    dense, ragged = made_features(False), made_features(True)
    torch.testing.assert_close(model(ragged), model(dense))


def test_widths_of_branches_may_differ() -> None:
    branches = [mlp(out_features=width) for width in (2, 3, 4)]
    model = PAGNN(branches, [AttentionReadout(2), "max", "sum"], "concat", nn.Linear(9, 2)).double()
    torch.testing.assert_close(model(made_features(True)), model(made_features(False)))
    with pytest.raises(ValueError, match=r"combine must be 'concat'.*\[2, 3, 4\]"):
        PAGNN(branches, "sum", "mean").double()(made_features())


def as_pagnn(spin: SPIN) -> PAGNN:
    """The same model, of parts."""
    branches = []
    for r in range(spin.num_branches):
        layers: list[nn.Module] = []
        for layer in spin.hops.layers:
            linear = nn.Linear(*layer.weight.shape[1:])
            linear.weight.data, linear.bias.data = layer.weight[r].detach().t().clone(), layer.bias[r].detach().clone()
            layers += [linear, nn.LeakyReLU(spin.config["negative_slope"])]
        branches.append(nn.Sequential(*layers))
    readout: Any = "sum"
    if spin.hops.attention is not None:
        readout = [AttentionReadout(len(w), size_aware=spin.config["size_aware"]) for w in spin.hops.attention]
        for part, w in zip(readout, spin.hops.attention, strict=True):
            part.weight.data = w.detach().clone()
    return PAGNN(branches, readout, "concat", copy.deepcopy(spin.classifier)).to(spin.hops.attention)


@pytest.mark.parametrize("options", [{"attention": False}, {"attention": True}, {"size_aware": True}])
@pytest.mark.parametrize("deduplicate", [True, False])
def test_spin_is_one_of_the_family(backend: str, options: dict, deduplicate: bool) -> None:
    features = made_features(deduplicate)
    torch.manual_seed(0)
    spin = SPIN(3, 5, 2, 2, **options).double()
    model = as_pagnn(spin).double()
    torch.testing.assert_close(model(features), spin(features))
    grads, expected = gradients(model, model(features)), gradients(spin, spin(features))
    for name in expected:
        kind, _, rest = name.removeprefix("hops.").partition(".")
        for r in range(3):
            if kind == "attention":
                torch.testing.assert_close(grads[f"readout.{r}.weight"], expected[name][r])
            elif kind == "layers":
                depth, part = rest.split(".")
                grad = grads[f"branches.{r}.{2 * int(depth)}.{part}"]
                torch.testing.assert_close(grad.t() if part == "weight" else grad, expected[name][r])
        if kind == "classifier":
            torch.testing.assert_close(grads[name], expected[name])


def test_mean_and_max_see_no_sizes_and_the_sum_does() -> None:
    rings = GraphBatch.from_edge_index(
        torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 2, 0, 4, 5, 6, 3]]),
        torch.ones(7, 1),
        torch.tensor([0] * 3 + [1] * 4),
        undirected=True,
    )
    features = PowerFeatures.from_graphs(rings, 2)
    for readout, differ in (("mean", False), ("max", False), (AttentionReadout(5), False), ("sum", True)):
        scores = PAGNN([mlp(1) for _ in range(3)], readout)(features)  # Lemma 3: regular graphs of equal nodes
        assert torch.allclose(scores[0], scores[1]) != differ


def test_rows_are_shared_unless_nodes_may_come_to_differ() -> None:
    features, seen = made_features(), []
    for layer, per_node, training_rows, rows in (
        (nn.Identity(), None, 9, 9),
        (nn.Identity(), True, 14, 14),
        (nn.Dropout(0.5), None, 14, 9),
        (nn.Dropout(0.5), False, 9, 9),
        (nn.BatchNorm1d(5), None, 14, 9),
        (pytest.importorskip("torch_geometric.nn").MLP([5, 5, 5], norm=None, dropout=0.5), None, 14, 9),
    ):
        branch = nn.Sequential(nn.Linear(3, 5), layer)
        branch.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        model = PAGNN([branch, mlp(), mlp()], per_node=per_node).double()
        seen.clear()
        model(features)
        model.eval()(features)
        distinct = int(features.row_ptr[1])
        assert seen == [distinct if number == 9 else features.num_nodes for number in (training_rows, rows)]


def test_batch_norm_in_branches_is_over_nodes() -> None:
    model = PAGNN([nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)) for _ in range(3)]).double()
    twin = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(model(made_features(True)), twin(made_features(False)))
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("deduplicate", [True, False])
def test_nodes_as_graphs(deduplicate: bool) -> None:
    features = made_features(deduplicate)
    y = torch.arange(14) % 2
    nodes = features.nodes(y)
    assert nodes.rows is features.rows
    assert (len(nodes), nodes.num_nodes) == (14, 14)
    assert torch.equal(nodes.dense_rows(), features.dense_rows())
    torch.manual_seed(0)
    model = made_model(None)
    powers = features.dense_rows()
    z = [branch(rows) for branch, rows in zip(model.branches, powers, strict=True)]
    expected = model.classifier(torch.cat(z, 1))  # h_v = Theta(z_v^(0), ..., z_v^(R))
    torch.testing.assert_close(model(nodes), expected)
    some = torch.tensor([13, 2, 2, 0])
    torch.testing.assert_close(model(nodes[some]), expected[some])
    torch.testing.assert_close(model(nodes[some].take()), expected[some])
    torch.testing.assert_close(model.forward_tensors(powers[:, some], torch.arange(5)), expected[some])
    assert torch.equal(nodes[some].y, y[some])
    part = features[[3, 0]].nodes()
    torch.testing.assert_close(model(part), expected[[*range(5, 11), *range(4)]])
    assert model(nodes[[]]).shape == (0, 2)
    spin = SPIN(3, 5, 2, 2, attention=False).double()
    same = as_pagnn(spin).double()
    same.readout = PAGNN([mlp()], None).readout
    torch.testing.assert_close(spin(nodes[some]), same(nodes[some]))


def test_nodes_are_refused_where_they_are_not_known() -> None:
    features = made_features()
    with pytest.raises(ValueError, match=r"one node per graph where readout is None: take features\.nodes\(\)"):
        made_model(None)(features)
    with pytest.raises(ValueError, match="one node per graph"):
        made_model(None)(made_features(False)[[3, 1]])
    with pytest.raises(ValueError, match=r"y must be a tensor whose first axis has 14 entries \(nodes\), got \[5\]"):
        features.nodes(torch.zeros(5))
    unknown = PowerFeatures.from_graphs(made_graphs(), 2, node_rows=False)
    with pytest.raises(ValueError, match="make them with node_rows=True"):
        unknown.nodes()


@pytest.fixture(scope="module")
def digits() -> PowerFeatures:
    return PowerFeatures.from_graphs(datasets.load("digits")[:200], 1)


def digit_model(*, dropout: float = 0.0) -> PAGNN:
    torch.manual_seed(0)
    branches = [nn.Sequential(mlp(3, 16, 16), nn.Dropout(dropout)) for _ in range(2)]
    return PAGNN(branches, "sum", "concat", nn.Linear(32, 10))


def test_fit_and_predict_as_spin_does(digits: PowerFeatures) -> None:
    model = digit_model(dropout=0.1)
    fit = training.fit(model, digits, range(150), range(150, 200), epochs=20, learning_rate=2e-2)
    assert fit.epochs[-1].loss < 0.8 * fit.epochs[0].loss
    scores = training.predict(model, digits, batch_size=64)
    torch.testing.assert_close(scores, model(digits))
    assert training.predict(model, digits[[]]).shape == (0, 10)
    graphs = datasets.load("digits")[:200]
    torch.testing.assert_close(training.predict_proba(model, graphs), scores.softmax(1), rtol=1e-4, atol=1e-5)
    assert training.predict_proba(model, graphs[[]]).shape == (0, 10)


def test_steps_are_those_of_adam(digits: PowerFeatures) -> None:
    model, twin = digit_model(), digit_model()
    for branch in (model.branches[1], twin.branches[1]):
        branch.requires_grad_(False)
    trainer = training.Trainer(model, learning_rate=1e-2, weight_decay=1e-2)
    optimizer = torch.optim.Adam(twin.parameters(), lr=1e-2, weight_decay=1e-2)
    for ids in ([0, 5, 7], [9, 1]):
        loss = F.cross_entropy(twin(digits[ids]), digits[ids].y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(digits[ids]), loss.detach())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    model.branches.requires_grad_(True)
    with pytest.raises(ValueError, match="model must have the parameters to train that it had"):
        trainer.step(digits)


def test_operators_side_by_side() -> None:
    graphs, model = made_graphs(), made_model()
    features = PowerFeatures.from_graphs(graphs, 1, "sym,adj")  # 1 + 2 * 1 branches
    expected = model.eval()(features).detach().softmax(1)
    with pytest.raises(ValueError, match="operator must be given"):
        training.predict_proba(model, graphs)
    torch.testing.assert_close(training.predict_proba(model, graphs, ("sym", "adj")), expected)
    with pytest.raises(ValueError, match=r"operator must name operators that share 2 hops, got 'sym,adj,rw'"):
        training.predict_proba(model, graphs, "sym,adj,rw")


def test_labels_beyond_the_outputs_are_named(digits: PowerFeatures) -> None:
    model = PAGNN([mlp(), mlp()], "sum", "concat", nn.Linear(10, 4))
    with pytest.raises(ValueError, match=r"y must be classes in \[0, 4\), the model's outputs"):
        training.fit(model, digits, range(9), range(9, 12))
    assert model.training  # as it was


def test_models_are_kept_as_torch_keeps_them(digits: PowerFeatures, tmp_path: Path) -> None:
    model = digit_model()
    training.Trainer(model).step(digits[:9])
    expected = model.eval()(digits[:4])
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = digit_model()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.eval()(digits[:4]), expected)
    with pytest.raises(TypeError, match=r"model must be a SPIN.*got PAGNN.*torch\.save"):
        training.save_checkpoint(tmp_path / "model.safetensors", model)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_compiles_whole_on_dense_rows(native: Any) -> None:
    features = made_features(False)
    model = made_model([AttentionReadout(5), "mean", "max"]).eval()
    compiled = torch.compile(model.forward_tensors, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(features.dense_rows(), features.node_ptr), model(features))


@pytest.mark.parametrize("head", [None, nn.Linear(15, 1)])
def test_links_are_scored_by_their_ends(head: nn.Module | None) -> None:
    nodes = made_features().nodes()
    encoder = PAGNN([mlp() for _ in range(3)], None).double()
    seen = []
    encoder.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    model = LinkPredictor(encoder, head).double()
    pairs = torch.tensor([[0, 13, 0, 5], [13, 0, 0, 2]])
    scores = model(nodes, pairs)
    assert seen == [4]
    h = encoder(nodes)
    expected = [h[i] * h[j] for i, j in pairs.t()]
    expected = torch.stack([(product.sum() if head is None else head(product)[0]) for product in expected])
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(model.decode(h, pairs), expected)
    assert scores[0] == scores[1]
    assert model(nodes, pairs[:, :0]).shape == (0,)


def test_wrong_pairs_are_named() -> None:
    model = LinkPredictor(PAGNN([mlp() for _ in range(3)], None).double())
    nodes = made_features().nodes()
    with pytest.raises(ValueError, match=r"pairs must be nodes in \[0, 14\), got 3 to 14"):
        model(nodes, torch.tensor([[3], [14]]))
    with pytest.raises(ValueError, match=r"pairs must have shape \[2, P\]"):
        model(nodes, torch.tensor([[3, 4, 5]]))
    with pytest.raises(TypeError, match="pairs must be int64"):
        model(nodes, torch.tensor([[3.0], [4.0]]))
    with pytest.raises(TypeError, match=r"encoder must be a torch\.nn\.Module, got NoneType"):
        LinkPredictor(None)
    with pytest.raises(TypeError, match=r"head must be a torch\.nn\.Module, got str"):
        LinkPredictor(mlp(), "mlp")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([],), ValueError, "branches must hold at least one module"),
        ((mlp(),), TypeError, "branches must be a list of modules, one per hop, got Sequential"),
        (([mlp(), torch.relu],), TypeError, r"branches must hold torch.nn.Modules, got builtin"),
        (
            ([mlp()], "median"),
            ValueError,
            "readout must be one of sum, mean, max, .*, got 'median'",
        ),
        (([mlp()], 3), TypeError, "readout must be a str, a module or a function, got int"),
        (([mlp()], ["sum", "max"]), ValueError, "readout must be one, or one for each of 1 branches, got 2"),
        (([mlp()], "sum", "cat"), ValueError, "combine must be one of concat, sum, mean, max, .* got 'cat'"),
        (([mlp()], "sum", None), TypeError, "combine must be a str, a module or a function, got NoneType"),
        (([mlp()], "sum", "sum", torch.relu), TypeError, "classifier must be a torch.nn.Module or None, got builtin"),
    ],
)
def test_wrong_parts_are_named(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PAGNN(*arguments)


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True)


def test_wrong_results_and_features_are_named() -> None:
    features = made_features()
    with pytest.raises(ValueError, match="features must have 2 branches as the model has, got 3"):
        PAGNN([mlp(), mlp()]).double()(features)
    with pytest.raises(TypeError, match=r"features must be torch\.float32 as the model is"):
        PAGNN([mlp() for _ in range(3)])(features)
    with pytest.raises(TypeError, match="features must be PowerFeatures, got Tensor"):
        made_model()(features.rows)
    with pytest.raises(ValueError, match=r"rows must have shape \[3, N, d\], got \[2, 14, 3\]"):
        made_model().forward_tensors(features.dense_rows()[:2], features.node_ptr)
    with pytest.raises(ValueError, match=r"branches must return one row for each of \d+, got \[1, 3\]"):
        PAGNN([Total()] * 3)(features)
    with pytest.raises(ValueError, match=r"readout must return \[5, k\], one row per graph, got \[\d+, 5\]"):
        made_model(lambda z, ptr, index, count: z)(features)
    with pytest.raises(TypeError, match="per_node must be a bool"):
        PAGNN([mlp()], per_node=1)
    with pytest.raises(ValueError, match="model must have parameters to train"):
        training.Trainer(PAGNN([nn.Identity()]))


def test_cora(data_root: Path) -> None:
    if not (data_root / "Cora.zip").is_file():
        pytest.skip(f"no Cora.zip in {data_root}")
    cora = datasets.cora(data_root, normalize=True)
    graph = GraphBatch.from_edge_index(cora.graphs.edge_index, cora.graphs.x, self_loops=True)
    nodes = PowerFeatures.from_graphs(graph, 4, deduplicate=False).nodes(cora.y)
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(1433, 32), nn.ReLU(), nn.Dropout(0.5)) for _ in range(5)]
    model = PAGNN(branches, None, "sum", nn.Linear(32, 7))
    options = {"epochs": 40, "batch_size": 140, "learning_rate": 2e-2, "weight_decay": 1e-3}
    training.fit(model, nodes, cora.split.train, cora.split.validation, **options)
    scores = training.predict(model, nodes, cora.split.test)
    assert training.accuracy(scores, cora.y[cora.split.test]) > 0.77  # without hops some 0.57


def test_says_what_it_is_made_of() -> None:
    shown = repr(PAGNN([mlp()] * 2, ["max", AttentionReadout(5)], own_readout))
    assert "(0): max" in shown
    assert "(1): AttentionReadout(in_features=5, size_aware=False)" in shown
    assert "(combine): own_readout" in shown


def test_public_names() -> None:
    assert spin_fast.PAGNN is PAGNN
    assert issubclass(SPIN, spin_fast.nn.GraphClassifier)
