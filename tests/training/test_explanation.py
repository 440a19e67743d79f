"""What nodes add to a class score: sums, the constant, and each part of them by an oracle."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import dense_powers, random_graphs
from torch.nn import functional as F

from spin_fast import PAGNN, SPIN, GraphBatch, NodeFeatures, PowerFeatures, training
from spin_fast.graphs.drawing import draw
from spin_fast.nn import Ensemble, SubtreeLinear
from spin_fast.nn.branches import Branches
from spin_fast.plots import explained_graph

SIZES = [4, 1, 9, 3, 0, 1, 12]
KINDS = [
    {"attention": attention, "branches": branches, "size_aware": size_aware, "batch_norm": batch_norm}
    for attention, size_aware in ((False, False), (True, False), (True, True))
    for branches in ("hops", "joint", "both")
    for batch_norm in (False, True)
]


def model_of(out_features: int = 4, num_operators: int = 1, **options: Any) -> SPIN:
    """In float64, with the statistics of a BatchNorm that are not those of new ones."""
    torch.manual_seed(0)
    model = SPIN(3, 8, out_features, 2, num_operators=num_operators, **options).double()
    model.operator = ["sym", "adj", "rw"][:num_operators]
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


def sums(explanation: training.Explanation) -> torch.Tensor:
    return torch.stack([part.sum() for part in explanation.totals.split(explanation.ptr.diff().tolist())])


def looped_rows(model: SPIN, group: Branches, powers: torch.Tensor) -> torch.Tensor:
    """The rows ``[B, N, h]`` after all layers, branch by branch."""
    rows = []
    for branch, z in enumerate(powers):
        for depth, layer in enumerate(group.layers):
            z = z @ layer.weight[branch] + layer.bias[branch]
            if group.norms:
                norm = group.norms[depth]
                parts = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
                mean, var, weight, bias = (part.view(len(powers), -1)[branch] for part in parts)
                z = (z - mean) / (var + norm.eps).sqrt() * weight + bias
            z = F.leaky_relu(z, model.config["negative_slope"])
        rows.append(z)
    return torch.stack(rows)


@pytest.mark.parametrize("num_operators", [1, 2])
@pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(map(str, options.values())))
def test_every_contribution(options: dict[str, Any], num_operators: int) -> None:
    """Against loops over graphs, branches and nodes, with the Jacobian of torch.func."""
    model, graphs = model_of(num_operators=num_operators, **options), random_graphs(SIZES, weighted=True)
    explained = training.explain(model, graphs, target=2)
    powers = [dense_powers(graphs, 2, name) for name in model.operator.split(",")]
    powers = torch.cat([powers[0], *(power[1:] for power in powers[1:])])
    groups = [] if model.hops is None else [(model.hops, powers)]
    groups += [] if model.joint is None else [(model.joint, torch.cat([*powers], dim=1)[None])]
    model.eval()
    for graph, (begin, end) in enumerate(itertools.pairwise(graphs.ptr.tolist())):
        rows, weights = [], []
        for group, inputs in groups:
            z = looped_rows(model, group, inputs[:, begin:end])
            alpha = torch.ones(z.shape[:2]).double()
            if group.attention is not None:
                alpha = torch.einsum("bnh,bh->bn", z, group.attention).relu().softmax(1)
                weights.append(alpha)
            times = end - begin if options["size_aware"] else 1
            rows.append(z * alpha[:, :, None] * times)
        rows = torch.cat(rows)
        readout = rows.sum(1).flatten()
        score = model.classifier(readout)[2]
        jacobian = torch.func.jacrev(model.classifier)(readout)[2].view(len(rows), -1)
        contributions = torch.einsum("bnh,bh->bn", rows, jacobian)
        torch.testing.assert_close(explained.contributions[:, begin:end], contributions)
        torch.testing.assert_close(explained.scores[graph], score)
        torch.testing.assert_close(explained.constants[graph], score - jacobian.flatten() @ readout)
        if options["attention"]:
            torch.testing.assert_close(explained.attention[:, begin:end], torch.cat(weights))
    torch.testing.assert_close(sums(explained), explained.scores - explained.constants, rtol=1e-12, atol=1e-12)
    scores = training.predict(model, PowerFeatures.from_graphs(graphs, 2, model.operator))
    torch.testing.assert_close(explained.scores, scores[:, 2])
    torch.testing.assert_close(explained.probabilities, scores.softmax(1)[:, 2])
    assert (explained.attention is None) != options["attention"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_biases_the_constant_is_zero(dtype: torch.dtype) -> None:
    """The classifier is then J s alone."""
    model = model_of(attention=False).to(dtype)
    for layer in model.classifier[::2]:
        torch.nn.init.zeros_(layer.bias)
    explained = training.explain(model, random_graphs(SIZES, dtype=dtype))
    torch.testing.assert_close(explained.constants, torch.zeros(len(SIZES)).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sums(explained), explained.scores)


def test_targets() -> None:
    graphs = random_graphs(SIZES)
    model = model_of(5)
    scores = training.predict(model, PowerFeatures.from_graphs(graphs, 2))
    explained = training.explain(model, graphs)
    assert torch.equal(explained.targets, scores.argmax(1))
    torch.testing.assert_close(explained.scores, scores.amax(1))
    torch.testing.assert_close(explained.probabilities, scores.softmax(1).amax(1))
    model.multilabel = True
    with pytest.raises(ValueError, match="target must be given: the model has 5 tasks"):
        training.explain(model, graphs)
    explained = training.explain(model, graphs, target=4)
    assert explained.targets.tolist() == [4] * len(SIZES)
    torch.testing.assert_close(explained.probabilities, scores[:, 4].sigmoid())
    one = model_of(1)
    explained = training.explain(one, graphs)
    assert explained.targets.tolist() == [0] * len(SIZES)
    torch.testing.assert_close(explained.probabilities, training.predict_proba(one, graphs)[:, 0])


def test_graphs_without_edges() -> None:
    """Only the branch of hop 0, the joint one and the biases have anything to add."""
    graphs = GraphBatch.from_edge_index(torch.empty(2, 0).long(), torch.randn(5, 3).double(), torch.tensor([0] * 5))
    for options in ({"attention": False}, {}, {"branches": "both"}):
        explained = training.explain(model_of(**options), graphs)
        torch.testing.assert_close(sums(explained), explained.scores - explained.constants)
        for branch in (1, 2):  # the rows of all nodes are zeros there
            assert len(explained.contributions[branch].unique()) == 1
    assert training.explain(model_of(), graphs[:0]).contributions.shape == (3, 0)


def test_branches_say_that_rows_are_neighbourhoods() -> None:
    graphs = random_graphs([3])
    hops = ["within 0 hops", "within 1 hop", "within 2 hops"]
    assert training.explain(model_of(), graphs).branches == hops
    assert training.explain(model_of(branches="joint"), graphs).branches == ["within 2 hops, joint"]
    explained = training.explain(model_of(num_operators=2, branches="both"), graphs)
    by = [f"{text} by {name}" for name in ("sym", "adj") for text in hops[1:]]
    assert explained.branches == [hops[0], *by, "within 2 hops, joint"]
    assert len(explained.contributions) == len(explained.branches)


def test_node_features_of_training() -> None:
    graphs = random_graphs(SIZES)
    model = model_of()
    features = NodeFeatures().fit(graphs, range(4))
    want = training.explain(model, replace(features.transform(graphs), node_features=None))
    model.node_features = features
    for given in (graphs, features.transform(graphs)):
        assert torch.equal(training.explain(model, given).contributions, want.contributions)


def test_the_model_is_as_it_was() -> None:
    model, graphs = model_of(dropout=0.5), random_graphs(SIZES)
    with torch.inference_mode():
        first = training.explain(model, graphs)
    assert torch.equal(first.contributions, training.explain(model, graphs).contributions)
    assert not first.contributions.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors() -> None:
    model, graphs = model_of(), random_graphs(SIZES)
    with pytest.raises(TypeError, match="a SubtreeLinear or an Ensemble, which add up nodes, got PAGNN"):
        training.explain(PAGNN([torch.nn.Linear(3, 4)] * 3, torch.nn.Linear(12, 2)), graphs)
    for target, message in ((4, "less than 4, the number of class scores, got 4"), (-1, "at least 0"), ("a", "int")):
        with pytest.raises((TypeError, ValueError), match=f"target must be .*{message}"):
            training.explain(model, graphs, target=target)
    with pytest.raises(ValueError, match="operator"):
        training.explain(model, graphs, "adj")
    broken = model_of()
    broken.classifier[-1].bias.data[1] = torch.nan
    with pytest.raises(ValueError, match="scores must be finite, those of graph 0 are not"):
        training.explain(broken, graphs)
    model.register_forward_hook(lambda *_: torch.ones(len(SIZES), 4).double())
    with pytest.raises(ValueError, match="model must compute what its branches and classifier do in turn"):
        training.explain(model, graphs)


@pytest.mark.parametrize("norm", ["l1", "l2", None])
def test_a_linear_model_of_subtree_counts(norm: str | None) -> None:
    graphs = random_graphs([5, 0, 3, 1], density=0.5, dtype=torch.float32, signs=True)
    model = SubtreeLinear(3, 2, 32, num_hops=2, num_columns=64, norm=norm)
    state = {name: torch.randn(value.shape).double() for name, value in model.state_dict().items()}
    model.load_state_dict(state | {"columns": torch.arange(0, 64, 2)})
    explained = training.explain(model, graphs, target=1)
    assert torch.equal(explained.constants, model.bias.detach()[[1] * 4])
    sums = torch.stack([part.sum() for part in explained.totals.split(graphs.num_nodes_per_graph.tolist())])
    torch.testing.assert_close(explained.constants + sums, model(graphs)[:, 1].detach())
    assert explained.branches == ["within 0 hops", "within 1 hop", "within 2 hops"]
    alone = training.explain(model, graphs[[0]])  # the first graph, whose predicted class it is
    assert alone.contributions.shape == (3, 5)
    assert int(alone.targets) == int(model(graphs[[0]]).argmax())


def ensemble_of(out_features: int, multilabel: bool | None = None) -> tuple[Ensemble, GraphBatch]:
    """Members of unlike operators, hops, branches and node features; in float64."""
    graphs = random_graphs(SIZES, density=0.5, signs=True)
    torch.manual_seed(1)
    linear = SubtreeLinear(3, out_features, 64, num_hops=1, num_columns=64)
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    wide = SPIN(4, 8, out_features, 1, branches="both").double()
    wide.node_features, wide.operator = NodeFeatures("log", keep_x=True).fit(graphs), "rw"
    model = Ensemble([model_of(out_features, num_operators=2, attention=False), wide, linear])
    model.multilabel = multilabel
    return model, graphs


@pytest.mark.parametrize("target", [None, 0, 2])
def test_the_probability_of_an_ensemble(target: int | None) -> None:
    """Against a loop over members and pairs of classes."""
    model, graphs = ensemble_of(3)
    explained, expected = training.explain(model, graphs, target=target), training.predict_proba(model, graphs)
    targets = expected.argmax(1) if target is None else torch.full((len(graphs),), target)
    assert torch.equal(explained.targets, targets)
    assert explained.quantity == "probability"
    torch.testing.assert_close(explained.probabilities, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(explained.constants + sums(explained), explained.scores, rtol=1e-12, atol=1e-12)
    contributions, constants = [], torch.zeros(len(graphs)).double()
    for member in model.members:
        classes = [training.explain(member, graphs, target=number) for number in range(3)]
        after = torch.stack([of.scores for of in classes], 1)
        before = torch.stack([of.constants for of in classes], 1)
        added = torch.zeros_like(classes[0].contributions)
        for graph, (begin, end) in enumerate(itertools.pairwise(graphs.ptr.tolist())):
            of, (p, q) = targets[graph], (scores[graph].softmax(0) for scores in (after, before))
            constants[graph] += q[of] / len(model.members)
            for other in {0, 1, 2} - {int(of)}:
                nodes = (classes[of].contributions - classes[other].contributions)[:, begin:end]
                step = (after - before)[graph, of] - (after - before)[graph, other]
                gained = p[of] * q[other] - p[other] * q[of]
                added[:, begin:end] += nodes * gained / step if end > begin else 0
        contributions.append(added / len(model.members))
    torch.testing.assert_close(explained.contributions, torch.cat(contributions), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(explained.constants, constants)


@pytest.mark.parametrize(("out_features", "multilabel"), [(1, None), (4, True)])
def test_the_tasks_of_an_ensemble(out_features: int, multilabel: bool | None) -> None:
    model, graphs = ensemble_of(out_features, multilabel)
    graphs = graphs[[0, 1, 2, 3, 5, 6]]
    explained = training.explain(model, graphs, target=out_features - 1)
    expected = training.predict_proba(model, graphs)[:, -1]
    torch.testing.assert_close(explained.constants + sums(explained), expected)
    for member, of in zip(model.members, explained.members, strict=True):
        one = training.explain(member, graphs, target=out_features - 1)
        after, before = one.scores.sigmoid(), one.constants.sigmoid()
        slopes = ((after - before) / (one.scores - one.constants)).repeat_interleave(graphs.num_nodes_per_graph)
        torch.testing.assert_close(of.contributions, one.contributions * slopes)
        torch.testing.assert_close((of.constants, of.scores), (before, after))
    with pytest.raises(ValueError, match="target must be given: the model has 4 tasks"):
        training.explain(ensemble_of(4, True)[0], graphs)


def test_the_branches_of_an_ensemble() -> None:
    model, graphs = ensemble_of(2)
    explained = training.explain(model, graphs)
    assert [len(of.branches) for of in explained.members] == [5, 3, 2]
    assert explained.branches[4:8] == [
        "member 1, within 2 hops by adj",
        *(f"member 2, within {text}" for text in ("0 hops", "1 hop", "1 hop, joint")),
    ]
    assert explained.attention.isnan().all(1).tolist() == [True] * 5 + [False] * 3 + [True] * 2
    assert torch.equal(explained.attention[5:8], explained.members[1].attention)
    assert training.explain(Ensemble([model.members[2]]), graphs).attention is None
    assert explained.contributions.shape == (10, graphs.num_nodes)
    torch.testing.assert_close(explained.totals, torch.stack([of.totals for of in explained.members]).mean(0))
    assert training.explain(model, graphs[:0]).contributions.shape == (10, 0)


@pytest.mark.parametrize("out_features", [1, 3])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_ensembles_that_know_nothing_and_that_are_certain(out_features: int, size: float) -> None:
    """Neither is 0 divided by 0, nor does an exponential overflow."""
    graphs = random_graphs([4, 1, 7], dtype=torch.float32, signs=True)
    linear = SubtreeLinear(3, out_features, 64, num_hops=1, num_columns=64, norm=None)
    torch.nn.init.normal_(linear.weight, std=size) if size else None
    for target in range(out_features):
        explained = training.explain(Ensemble([linear, copy.deepcopy(linear)]), graphs, target=target)
        assert explained.contributions.isfinite().all()
        torch.testing.assert_close(explained.constants, torch.full((3,), 1 / max(out_features, 2)).double())
        torch.testing.assert_close(explained.constants + sums(explained), explained.probabilities)
        assert bool(explained.contributions.any()) == (size > 0)


def test_ensembles_that_cannot_be_explained() -> None:
    model, graphs = ensemble_of(2)
    with pytest.raises(ValueError, match="operator must be left out, as Ensemble has none, got 'sym'"):
        training.explain(model, graphs, "sym")
    with pytest.raises(ValueError, match="target must be less than 2"):
        training.explain(model, graphs, target=2)
    other = PAGNN([torch.nn.Linear(3, 4)] * 3, torch.nn.Linear(12, 2)).double()
    other.operator = "sym"
    with pytest.raises(TypeError, match="members that are a SPIN or a SubtreeLinear, got PAGNN"):
        training.explain(Ensemble([other]), graphs)
    model.members[1].register_forward_hook(lambda *_: torch.ones(len(SIZES), 2).double())
    with pytest.raises(ValueError, match="model must compute what its branches and classifier do in turn"):
        training.explain(model, graphs)


def test_a_picture_is_of_one_graph(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    graphs = random_graphs([4, 3], dtype=torch.float32)
    model = SPIN(3, 4, 2, 1)
    model.operator = "sym"
    for drawn, explained in ((graphs, graphs), (graphs[[0]], graphs[[1]])):
        with pytest.raises(ValueError, match=r"explained must be of the graph of \d nodes that is drawn"):
            explained_graph(tmp_path / "x.png", draw(drawn), training.explain(model, explained), title="")
    assert not (tmp_path / "x.png").exists()
