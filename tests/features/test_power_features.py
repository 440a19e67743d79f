from __future__ import annotations

import copy
import json
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch
from helpers import assert_same_features, change_array, graph_batches, random_graphs
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import spin_fast
from spin_fast import SPIN, NodeFeatures, PowerFeatures, datasets, shards, training
from spin_fast.features import power_features as features
from spin_fast.features.identical import identical_segments
from spin_fast.features.shards import ShardedFeatures
from spin_fast.features.storage import FORMAT


def powers(graphs: spin_fast.GraphBatch, num_hops: int, operator: str, float64_sums: bool = True) -> torch.Tensor:
    """Of several operators: branch 0 once, then the hops of each."""
    arrays, options = (
        (graphs.indptr, graphs.indices, graphs.x, num_hops),
        {"ptr": graphs.ptr, "float64_sums": float64_sums},
    )
    each = [spin_fast.power_features(*arrays, name, **options) for name in operator.split(",")]
    return torch.cat([each[0], *(made[1:] for made in each[1:])])


OPERATORS = st.sampled_from(["adj", "sym", "sym+adj", "rw", "sym,adj", "rw,sym+adj,adj"])


@given(graphs=graph_batches(), num_hops=st.integers(0, 3), operator=OPERATORS)
def test_rows_of_nodes_are_the_powers(backend: str, graphs: spin_fast.GraphBatch, num_hops: int, operator: str) -> None:
    for deduplicate in (True, False):
        expected = powers(graphs, num_hops, operator, float64_sums=deduplicate)
        made = PowerFeatures.from_graphs(graphs, num_hops, operator, deduplicate)
        assert torch.equal(made.dense_rows(), expected)
        assert torch.equal(made.expand().rows, expected.flatten(0, 1))
        assert made.row_ptr[-1] == len(made.rows)
    made = PowerFeatures.from_graphs(graphs, num_hops, operator)
    assert (made.num_hops, made.num_operators) == (num_hops, operator.count(",") + 1)
    for r in range(made.num_branches if made.index is not None else 0):
        rows = made.rows.to_dense()[made.row_ptr[r] : made.row_ptr[r + 1]]
        assert len({row.numpy().tobytes() for row in rows}) == len(rows)


@given(graphs=graph_batches(), data=st.data())
def test_selection_reads_as_its_graphs(graphs: spin_fast.GraphBatch, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(graphs) - 1), max_size=5)) if len(graphs) else []
    for deduplicate in (True, False):
        expected = powers(graphs[ids], 2, "sym", float64_sums=deduplicate)
        whole = PowerFeatures.from_graphs(graphs, 2, "sym", deduplicate)
        selected = whole[ids]
        assert selected.rows is whole.rows  # lazy: nothing is copied
        for made in (selected, selected.take(), selected.expand(), selected.take()[: len(ids)]):
            assert torch.equal(made.dense_rows(), expected)
            assert made.selected_ptr.tolist() == graphs[ids].ptr.tolist()
            rows, ptr, index, count = made.branch_rows()
            sums = spin_fast.sum_readout(torch.cat(rows), ptr, index=index, count=count, num_branches=3)
            torch.testing.assert_close(sums, spin_fast.sum_readout(expected, graphs[ids].ptr), rtol=1e-4, atol=1e-4)
            assert made.num_nodes == graphs[ids].num_nodes


def test_segments_count_each_node_once(backend: str) -> None:
    graphs = random_graphs([5, 0, 7, 1], density=0.5)
    graphs = replace(graphs, x=torch.ones(13, 2).double(), y=torch.tensor([3, 1, 2, 0]))
    made = PowerFeatures.from_graphs(graphs, 2)
    sizes = torch.zeros(12, dtype=torch.int64).index_add(
        0, torch.arange(12).repeat_interleave(made.ptr.diff()), made.count.long()
    )
    assert sizes.view(3, 4).tolist() == [[5, 0, 7, 1]] * 3
    assert made.row_ptr.diff()[0] == 1  # every node has the same features
    assert made.deduplication[0] == 13
    assert made[[2, 0]].y.tolist() == [2, 3]
    assert made[1:][[0, 2]].y.tolist() == [1, 0]
    assert repr(made).startswith("PowerFeatures(4 graphs, 3 branches of 'sym'")


def test_rows_that_hardly_repeat_are_not_deduplicated(backend: str) -> None:
    graphs = random_graphs([30, 0, 30], density=0.2)
    for copies, deduplicated in ((0, False), (2, False), (12, True)):
        x = graphs.x.clone()
        x[:copies] = x[0]
        made = PowerFeatures.from_graphs(replace(graphs, x=x), 0)
        assert (made.index is not None) == deduplicated
        assert torch.equal(made.dense_rows()[0], x)


@given(
    graphs=graph_batches(weighted=True),
    operator=OPERATORS,
    chunk_bytes=st.sampled_from([1, 200, 2000]),
    node_rows=st.booleans(),
)
def test_chunks_change_nothing(
    backend: str, graphs: spin_fast.GraphBatch, operator: str, chunk_bytes: int, node_rows: bool
) -> None:
    graphs = replace(graphs, x=graphs.x.sign())
    whole = PowerFeatures.from_graphs(graphs, 2, operator, node_rows=node_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(features, "WORTHWHILE", 0.0 if whole.index is not None else features.WORTHWHILE)
        assert_same_features(PowerFeatures.from_graphs(graphs, 2, operator, node_rows=node_rows), whole)


def test_powers_of_a_chunk_are_all_that_is_in_memory(monkeypatch: pytest.MonkeyPatch, data_root) -> None:
    graphs = datasets.load("NCI1", data_root)
    whole = PowerFeatures.from_graphs(graphs, 3)
    sizes, power_features = [], spin_fast.ops.power_features

    def recorded(*args, **options):
        powers = power_features(*args, **options)
        sizes.append(powers.nbytes)
        return powers

    monkeypatch.setattr(spin_fast.ops, "power_features", recorded)
    monkeypatch.setattr(spin_fast.ops.DistinctRows, "add_graphs", lambda *_: False)  # which need no powers
    monkeypatch.setattr(features, "CHUNK_BYTES", 1 << 20)
    assert_same_features(PowerFeatures.from_graphs(graphs, 3), whole)
    assert len(sizes) > 50
    assert max(sizes) <= 1 << 20


def test_sharing_is_decided_chunk_by_chunk(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk of which hardly a row repeats decides, whatever comes after it."""
    graphs = random_graphs([30] * 4, density=0.2)
    x = graphs.x.clone()
    x[60:] = x[0]
    monkeypatch.setattr(features, "CHUNK_BYTES", 30 * (graphs.x.element_size() * 3 + features.ROW_BYTES))
    assert PowerFeatures.from_graphs(replace(graphs, x=x), 0).index is not None
    monkeypatch.setattr(features, "SAMPLE_NODES", 30)
    assert PowerFeatures.from_graphs(replace(graphs, x=x), 0).index is None
    assert PowerFeatures.from_graphs(replace(graphs, x=x.flip(0)), 0).index is not None
    monkeypatch.undo()
    assert PowerFeatures.from_graphs(replace(graphs, x=x), 0).index is not None


@given(
    graphs=graph_batches(weighted=True),
    operator=OPERATORS,
    deduplicate=st.booleans(),
    node_rows=st.booleans(),
    data=st.data(),
)
def test_a_stream_gives_the_features_of_all_graphs(
    backend: str, graphs: spin_fast.GraphBatch, operator: str, deduplicate: bool, node_rows: bool, data: st.DataObject
) -> None:
    """Wherever it is cut, also where it is decided late that rows are not worth sharing; then zeros lose their sign."""
    x = graphs.x.sign() if data.draw(st.booleans()) else graphs.x
    x[: data.draw(st.integers(0, len(x)))] = -0.0
    graphs = replace(graphs, x=x, y=data.draw(st.sampled_from([None, torch.arange(2 * len(graphs)).view(-1, 2)])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(graphs)), max_size=6)))
    settings = (1, operator, deduplicate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "CHUNK_BYTES", data.draw(st.sampled_from([1, 200, 2000, 8 << 20])))
        patch.setattr(features, "SAMPLE_NODES", data.draw(st.integers(0, 40)))
        whole = PowerFeatures.from_graphs(graphs, *settings, node_rows=node_rows)
        chunks = (graphs[begin:end] for begin, end in pairwise([0, *cuts, len(graphs)]))
        made = PowerFeatures.from_chunks(chunks, *settings, node_rows=node_rows)
        assert_same_features(made, whole)
        if whole.index is not None:
            assert made.rows.to_dense().numpy().tobytes() == whole.rows.to_dense().numpy().tobytes()
        if len(graphs):
            assert_same_features(PowerFeatures.from_chunks(graphs, *settings, node_rows=node_rows), whole)


def test_edges_cut_a_stream_as_they_cut_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first chunk no row repeats, of the others all."""
    nodes = torch.arange(30)
    ring = torch.stack([nodes, nodes.roll(1)])
    one, other = (spin_fast.GraphBatch.from_edge_index(ring, x) for x in (torch.rand(30, 1), torch.ones(30, 1)))
    graphs = spin_fast.GraphBatch.concatenate([one, *[other] * 9])
    monkeypatch.setattr(features, "SAMPLE_NODES", 1)
    found = []
    for edges in (30, 300):
        monkeypatch.setattr("spin_fast.features.chunks.EDGE_BYTES", features.CHUNK_BYTES // edges)
        found.append(PowerFeatures.from_graphs(graphs, 2))
        assert_same_features(PowerFeatures.from_chunks([graphs[:4], graphs[4:]], 2), found[-1])
    assert [made.index is None for made in found] == [True, False]


def test_a_stream_may_have_indices_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = random_graphs([3, 4, 5] * 4)
    narrow = replace(graphs, indptr=graphs.indptr.int(), indices=graphs.indices.int())
    monkeypatch.setattr(features, "CHUNK_BYTES", 300)
    made = PowerFeatures.from_chunks([narrow[:5], graphs[5:]], 2)
    assert_same_features(made, PowerFeatures.from_graphs(graphs, 2))
    assert_same_features(made, PowerFeatures.from_graphs(narrow, 2))


@pytest.mark.parametrize("deduplicate", [True, False])
def test_chunks_are_not_kept(deduplicate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is gone when the next one is made, but for the few graphs that are put together with it."""
    graphs = random_graphs([4] * 60)
    made: list[weakref.ref] = []

    def chunks() -> Iterator[spin_fast.GraphBatch]:
        for begin in range(0, 60, 12):
            assert all(graphs() is None for graphs in made)
            chunk = graphs[list(range(begin, begin + 12))]
            made.append(weakref.ref(chunk.x))
            yield chunk
            del chunk

    monkeypatch.setattr(features, "CHUNK_BYTES", 1500)
    assert_same_features(
        PowerFeatures.from_chunks(chunks(), 2, deduplicate=deduplicate),
        PowerFeatures.from_graphs(graphs, 2, deduplicate=deduplicate),
    )
    assert len(made) == 5


def test_chunks_that_differ_are_named() -> None:
    graphs = random_graphs([3, 2])
    labelled = replace(graphs, y=torch.tensor([0, 1]))
    weighted = replace(graphs, edge_weight=torch.ones(graphs.num_edges).double())
    for chunks, message in (
        ([graphs, graphs, labelled], r"labels, got none in chunk 0 and int64 \[G\] in chunk 2"),
        (
            [labelled, replace(labelled, y=torch.ones(2, 3))],
            r"labels, got int64 \[G\] in chunk 0 and float32 \[G, 3\] in chunk 1",
        ),
        ([graphs, replace(graphs, x=graphs.x.float())], "dtype, got float64 in chunk 0 and float32 in chunk 1"),
        ([graphs, replace(graphs, x=graphs.x[:, :2])], "num_features, got 3 in chunk 0 and 2 in chunk 1"),
        ([graphs, weighted], "edge weights, got none in chunk 0 and some in chunk 1"),
    ):
        for deduplicate in (True, False):
            with pytest.raises(ValueError, match=f"^chunks must be alike in {message}$"):
                PowerFeatures.from_chunks(chunks, 1, deduplicate=deduplicate)
    with pytest.raises(ValueError, match="chunks must yield at least one GraphBatch, got none"):
        PowerFeatures.from_chunks([], 1)
    with pytest.raises(TypeError, match="chunks must yield GraphBatches, got str as chunk 1"):
        PowerFeatures.from_chunks([graphs, "graphs"], 1)
    with pytest.raises(TypeError, match="chunks must be an iterable of GraphBatches, got int"):
        PowerFeatures.from_chunks(3, 1)
    with pytest.raises(ValueError, match=r"edge_weight must give no negative row sum under sym, .* of chunk 1"):
        PowerFeatures.from_chunks([weighted, replace(weighted, edge_weight=-weighted.edge_weight)], 1)


def identical_by_multisets(features: PowerFeatures, joint: bool = False) -> list[int]:
    """The first graph with the same multiset of rows in every branch, or of joint rows, by bytes."""
    rows, bounds, seen, first = features.dense_rows() + 0.0, features.selected_ptr.tolist(), {}, []
    rows = torch.cat([*rows], dim=1)[None] if joint else rows
    for graph, (begin, end) in enumerate(pairwise(bounds)):
        key = tuple(tuple(sorted(row.numpy().tobytes() for row in branch[begin:end])) for branch in rows)
        first.append(seen.setdefault(key, graph))
    return first


@given(data=st.data(), deduplicate=st.booleans(), num_features=st.integers(0, 2))
def test_identical_graphs(backend: str, data: st.DataObject, deduplicate: bool, num_features: int) -> None:
    """Small graphs of few feature values, so that many are alike; empty ones; selections that repeat graphs."""
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=12))
    graphs = random_graphs(
        sizes, data.draw(st.sampled_from([0.0, 0.5])), num_features, seed=data.draw(st.integers(0, 9))
    )
    graphs = replace(graphs, x=graphs.x.sign().clamp(min=-0.0))
    made = PowerFeatures.from_graphs(graphs, 2, "adj", deduplicate)
    assert made.identical_graphs().tolist() == identical_by_multisets(made)
    if sizes:
        selected = made[data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=9))]
        for chosen in (selected, selected.take(), selected.expand()):
            assert chosen.identical_graphs().tolist() == identical_by_multisets(chosen)
            assert chosen.identical_graphs(joint=True).tolist() == identical_by_multisets(chosen, joint=True)
        several = ShardedFeatures([made[: len(sizes) // 2], selected, made.take()])
        together = PowerFeatures._dense(several[:].dense_rows(), several[:].selected_ptr, None, "adj", None)
        for joint in (False, True):
            expected = identical_by_multisets(together, joint=joint)
            assert several.identical_graphs(joint=joint).tolist() == expected


@pytest.mark.parametrize("deduplicate", [True, False])
def test_joint_rows_are_those_of_the_nodes(backend: str, deduplicate: bool) -> None:
    graphs = random_graphs([5, 0, 3, 8], density=0.5, signs=True)
    made = PowerFeatures.from_graphs(graphs, 2, "sym,adj", deduplicate)
    joint = made.joint
    assert made[[1, 3]].joint is joint  # found once for all selections of one storage
    assert made.take().joint is joint
    assert made.to("cpu", non_blocking=True).joint is not joint
    rows = made.rows.to_dense()[joint.parts.long()].flatten(1)
    index = torch.arange(len(rows)) if joint.index is None else joint.index
    of_nodes = torch.cat([*made.dense_rows()], dim=1)
    for graph, (begin, end) in enumerate(pairwise(made.node_ptr.tolist())):
        entries = slice(int(joint.ptr[graph]), int(joint.ptr[graph + 1]))
        times = 1 if joint.count is None else joint.count[entries]
        found = rows[index[entries]].repeat_interleave(torch.as_tensor(times), dim=0)
        assert sorted(found.tolist()) == sorted(of_nodes[begin:end].tolist())


@pytest.mark.parametrize("deduplicate", [True, False])
def test_joint_rows_that_a_prediction_has_found_train(deduplicate: bool) -> None:
    graphs = replace(random_graphs([4, 3], dtype=torch.float32), y=torch.tensor([0, 1]))
    features = PowerFeatures.from_graphs(graphs, 1, deduplicate=deduplicate)
    model = spin_fast.SPIN(3, 4, 2, 1, branches="joint")
    training.predict(model, features)
    model(features).sum().backward()


def test_joint_rows_need_those_of_the_nodes() -> None:
    made = PowerFeatures.from_graphs(random_graphs([5, 3, 8], signs=True), 1, node_rows=False)
    for call in (lambda: made.joint, lambda: made.identical_graphs(joint=True)):
        with pytest.raises(ValueError, match="features must know the rows of their nodes: make them with node_rows"):
            call()


def test_identical_graphs_are_compared_not_only_hashed() -> None:
    made = PowerFeatures.from_graphs(random_graphs([2, 3, 0, 2, 0, 3] * 20, density=0.5, signs=True), 1, "adj")
    expected = identical_by_multisets(made)
    assert 2 < len(set(expected)) < len(expected)
    for hash_bits in (0, 2, 64):
        first = identical_segments(made.ptr, made.index, made.count, 2, hash_bits)
        assert first.tolist() == expected


def test_identical_graphs_give_identical_readouts(data_root) -> None:
    """Bit for bit, because their rows are listed in one order."""
    made = PowerFeatures.from_graphs(datasets.load("NCI1", data_root), 3)
    first = made.identical_graphs()
    assert int((first != torch.arange(len(first))).sum()) == 71
    assert int((made.identical_graphs(joint=True) != torch.arange(len(first))).sum()) <= 71
    w = torch.randn(4, made.num_features)
    readout = spin_fast.attention_readout(made.rows, w, made.ptr, index=made.index, count=made.count)
    assert torch.equal(readout, readout[first])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": torch.tensor([99] * 8)}, "index must be in"),
        ({"ptr": torch.tensor([0, 3, 2, 5, 8])}, "ptr must not decrease"),
        ({"ptr": torch.tensor([0, 3, 8])}, "ptr must have 2 branches of 2 segments, got 2"),
        ({"row_ptr": torch.tensor([0, 1, 99])}, "row_ptr must go from 0"),
        ({"row_ptr": torch.tensor([0, 9, 0, 8])}, "row_ptr must go from 0"),
        ({"node_ptr": torch.tensor([0, 7, 5])}, "node_ptr must not decrease"),
        ({"labels": torch.zeros(3)}, r"labels must have a first axis of 2 graphs, got \[3\]"),
        ({"operator": "gcn"}, "operator must be one of"),
        (
            {"operator": "sym,adj"},
            "row_ptr must have 1 branch and as many for each operator of 'sym,adj', got 2 branches",
        ),
        ({"row_of_node": torch.full((2, 5), 99)}, "index must be in"),
        (
            {"node_ptr": torch.tensor([0, 2, 6]), "row_of_node": None},
            "count must add up to 2 branches of 6 nodes, got 10",
        ),
    ],
)
def test_storage_is_checked_where_it_is_built(change: dict, message: str) -> None:
    made = PowerFeatures.from_graphs(random_graphs([2, 3], density=0.5), 1)
    if "index" in change:
        change = {"index": torch.full_like(made.index, 99)}
    with pytest.raises(ValueError, match=message):
        replace(made, **change)


def test_without_an_index_segments_are_those_of_the_nodes() -> None:
    made = PowerFeatures.from_graphs(random_graphs([2, 3], density=0.5), 1, deduplicate=False)
    for change in ({"ptr": torch.tensor([0, 3, 5, 7, 10])}, {"count": torch.ones(10, dtype=torch.int32)}):
        with pytest.raises(ValueError, match="ptr must be the offsets of the nodes of each branch, and count None"):
            replace(made, **change)


def test_rows_of_nodes_need_not_be_kept() -> None:
    graphs = random_graphs([5, 3, 8], signs=True)
    lean, full = (PowerFeatures.from_graphs(graphs, 1, node_rows=kept) for kept in (False, True))
    assert lean.row_of_node is None
    assert torch.equal(lean.rows, full.rows)
    for one, other in zip(lean[[2, 0]].take().branch_rows(), full[[2, 0]].take().branch_rows(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(ValueError, match="features must know the rows of their nodes: make them with node_rows=True"):
        lean.expand()


def test_one_row_per_node_is_checked() -> None:
    made = PowerFeatures.from_graphs(random_graphs([2, 3]), 1, deduplicate=False)
    with pytest.raises(ValueError, match="rows must have one row per node and branch where index is None, got 10"):
        replace(made, node_ptr=torch.tensor([0, 2, 6]))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="graphs must be a GraphBatch, got int"):
        PowerFeatures.from_graphs(3, 2)
    with pytest.raises(ValueError, match="operator must be one of"):
        PowerFeatures.from_graphs(random_graphs([2]), 2, "nosuch")
    with pytest.raises(ValueError, match=r"operator must be one of .*, got ' adj'"):
        PowerFeatures.from_graphs(random_graphs([2]), 2, "sym, adj")
    for wrong in ("sym,sym", ["adj", "rw", "adj"], ()):
        with pytest.raises(ValueError, match="operator must name at least one, and each once, got"):
            PowerFeatures.from_graphs(random_graphs([2]), 2, wrong)
    with pytest.raises(TypeError, match="operator must be a str or a sequence of them, got NoneType"):
        PowerFeatures.from_graphs(random_graphs([2]), 2, None)
    for make in (PowerFeatures.from_graphs, lambda *args, **options: [*shards.compute(*args, max_bytes=9, **options)]):
        with pytest.raises(TypeError, match="deduplicate must be a bool, got str"):
            make(random_graphs([2]), 2, "sym", "adj")
        with pytest.raises(TypeError, match="node_rows must be a bool, got str"):
            make(random_graphs([2]), 2, node_rows="no")
        with pytest.raises(TypeError, match="num_hops must be an int, got str"):
            make(random_graphs([2]), "2")


def test_operators_side_by_side() -> None:
    graphs = random_graphs([5, 3, 8])
    both = PowerFeatures.from_graphs(graphs, 2, ("sym", "adj"))
    assert both.operator == "sym,adj"
    assert (both.num_branches, both.num_hops, both.num_operators) == (5, 2, 2)
    assert "5 branches of 'sym,adj'" in repr(both)
    assert torch.equal(both[[2, 0]].take().dense_rows(), both[[2, 0]].dense_rows())
    assert replace(both, operator=["sym", "adj"]).operator == "sym,adj"
    with pytest.raises(ValueError, match="edge_weight must give no negative row sum under sym, got"):
        PowerFeatures.from_graphs(replace(graphs, edge_weight=-torch.ones(graphs.num_edges).double()), 1, "adj,sym")


def test_identical_under_one_operator_but_not_the_other() -> None:
    """Two rings of unlike degree: ``sym`` sees no difference, ``adj`` does."""
    pair, ring = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[2, 3], [3, 2], [2, 3], [3, 2]]).t()
    graphs = spin_fast.GraphBatch.from_edge_index(
        torch.cat([pair, ring], dim=1), torch.ones(4, 1), torch.tensor([0, 0, 1, 1])
    )
    first = [PowerFeatures.from_graphs(graphs, 2, of).identical_graphs().tolist() for of in ("sym", "adj", "sym,adj")]
    assert first == [[0, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    "name", ["digits", "NCI1", "PROTEINS", "ENZYMES", "IMDB-BINARY", "REDDIT-BINARY", "ogbg-molhiv", "Peking_1"]
)
def test_deduplication_changes_no_result(name: str, request: pytest.FixtureRequest) -> None:
    """Scores and every gradient of a step, with and without, in float64 on features made in float32."""
    graphs = datasets.load(name) if name == "digits" else datasets.load(name, request.getfixturevalue("data_root"))
    ids = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0))[:48]
    for attention in (True, False):
        results = []
        distinct = PowerFeatures.from_graphs(graphs[ids], 3)
        for made in (distinct, distinct.expand()):
            torch.manual_seed(0)
            model = SPIN(graphs.num_features, 16, int(graphs.y.max()) + 1, 3, attention=attention).double()
            logits = model(replace(made, rows=made.rows.double()))
            torch.nn.functional.cross_entropy(logits, made.y).backward()
            results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(one.abs().max()))


def test_measured_deduplication_ratios(data_root) -> None:
    """Nodes per stored row with `sym`, R = 3, float32."""
    nci1 = PowerFeatures.from_graphs(datasets.load("NCI1", data_root), 3).deduplication
    assert nci1[0] > 3000
    assert nci1[1] > 150
    assert nci1[2] > 15
    assert nci1[3] > 4
    enzymes = PowerFeatures.from_graphs(datasets.load("ENZYMES", data_root), 3).deduplication
    assert max(enzymes) < 1.1


@st.composite
def labelled_features(draw: st.DrawFn) -> PowerFeatures:
    """With and without deduplication, rows of nodes and labels; every dtype; empty graphs and no features."""
    graphs = draw(graph_batches(weighted=True))
    num_graphs = len(graphs)
    y = draw(st.sampled_from([None, torch.arange(num_graphs), torch.full((num_graphs, 2), float("nan"))]))
    x = graphs.x if draw(st.booleans()) else graphs.x.sign()
    options = {"deduplicate": draw(st.booleans()), "node_rows": draw(st.booleans())}
    return PowerFeatures.from_graphs(replace(graphs, x=x, y=y), draw(st.integers(0, 2)), draw(OPERATORS), **options)


@given(made=labelled_features(), mmap=st.booleans(), data=st.data())
def test_files_keep_every_bit(made: PowerFeatures, mmap: bool, data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    made.save(path)
    loaded = PowerFeatures.load(path, mmap=mmap)
    assert repr(loaded) == repr(made)
    labels, made, loaded = made.labels, replace(made, labels=None), replace(loaded, labels=None)
    torch.testing.assert_close(PowerFeatures.load(str(path)).y, labels, rtol=0, atol=0, equal_nan=True)
    assert_same_features(loaded, made)
    if len(made):
        selected = made[data.draw(st.lists(st.integers(0, len(made) - 1), max_size=5))]
        selected.save(path)
        assert_same_features(PowerFeatures.load(path, mmap=mmap), selected.take())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of features with rows of nodes, so that there is every array."""
    graphs = replace(random_graphs([30, 0, 40] * 10, dtype=torch.float32, signs=True), y=torch.arange(30) % 2)
    PowerFeatures.from_graphs(graphs, 1).save(tmp_path / "saved.safetensors")
    return tmp_path / "saved.safetensors"


def mappings(path: Path) -> list[tuple[int, int, int]]:
    """Begin, end and resident bytes of the mappings of a file in this process."""
    found = re.findall(
        rf"^(\w+)-(\w+) [^\n]*{re.escape(str(path))}\n(?:[^\n]*\n)*?Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        flags=re.MULTILINE,
    )
    return [(int(begin, 16), int(end, 16), 1024 * int(resident)) for begin, end, resident in found]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_files_are_read_where_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    graphs = random_graphs([2000] * 20, density=0.0, num_features=64, dtype=torch.float32)
    x = graphs.x.sign()
    x[::2] = 1
    PowerFeatures.from_graphs(replace(graphs, x=x, y=torch.zeros(20, dtype=torch.int64)), 1).save(path)
    loaded = PowerFeatures.load(path)
    ((begin, end, resident),) = mappings(path)
    assert end - begin > 5_000_000
    assert resident < 500_000  # what is read ahead of a first use is mapped as well
    selected = loaded[[3, 4]]
    assert len(selected) == 2
    assert (loaded.num_nodes, selected.num_nodes, selected.num_hops) == (40_000, 4_000, 1)
    assert mappings(path)[0][2] < 500_000
    selected.branch_rows()
    for name in ("rows", "ptr", "index", "count", "row_of_node", "node_ptr", "labels"):
        assert begin <= getattr(loaded, name).data_ptr() < end
    assert 500_000 < mappings(path)[0][2] < end - begin - 2_000_000  # the rows of other graphs are not read
    assert PowerFeatures.load(path, mmap=False).rows.data_ptr() not in range(begin, end)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}, {"batch_norm": True}])
def test_training_from_a_mapped_file(saved: Path, options: dict) -> None:
    results = []
    for made in (PowerFeatures.load(saved), PowerFeatures.load(saved, mmap=False)):
        torch.manual_seed(0)
        model = SPIN(3, 8, 2, 1, **options)
        fit = training.fit(model, made, range(20), range(20, 30), epochs=2)
        results.append(([epoch.loss for epoch in fit.epochs], training.predict(model, made)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_mapped_files_are_copied_and_pickled_unread(saved: Path) -> None:
    whole = PowerFeatures.load(saved, mmap=False)
    for change in (
        copy.copy,
        copy.deepcopy,
        lambda made: pickle.loads(pickle.dumps(made)),
        lambda made: made.to("cpu"),
    ):
        assert_same_features(change(PowerFeatures.load(saved)), whole)
    with pytest.raises(AttributeError, match="'PowerFeatures' object has no attribute 'nosuch'"):
        _ = PowerFeatures.load(saved).nosuch
    assert PowerFeatures.load(saved).nbytes == whole.nbytes


def test_mapped_files_are_used_by_several_threads(saved: Path) -> None:
    expected = PowerFeatures.load(saved, mmap=False)
    for _ in range(20):
        shared = PowerFeatures.load(saved)
        gate = threading.Barrier(4)

        def use(number: int, shared: PowerFeatures = shared, gate: threading.Barrier = gate) -> PowerFeatures:
            gate.wait()
            return shared if number % 2 else shared[:].take()

        with ThreadPool(4) as pool:
            for found in pool.map(use, range(4)):
                assert_same_features(found, expected)
    # What a thread does that has not found an array, where another one has set it meanwhile.
    assert torch.equal(shared.__getattr__("index"), expected.index)


def test_features_may_be_saved_to_the_file_they_are_mapped_from(saved: Path) -> None:
    loaded = PowerFeatures.load(saved)
    expected = PowerFeatures.load(saved, mmap=False)[5:9].take()
    loaded[5:9].save(saved)
    assert_same_features(loaded[5:9].take(), expected)
    assert_same_features(PowerFeatures.load(saved), expected)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("index", lambda index: index.index_fill(0, torch.tensor([5]), 10**6), "index must be in"),
        ("index", lambda index: index.index_fill(0, torch.tensor([5]), -1), "index must be in"),
        ("index", lambda index: index.index_fill(0, torch.tensor([0]), int(index.max())), "index must be in"),
        ("count", lambda count: count.zero_(), "count must be positive"),
        ("count", lambda count: count.fill_(10**9), "count must add up to 2 branches of"),
        ("row_of_node", lambda rows: rows.flip(0), "index must be in"),
        ("row_of_node", lambda rows: rows.fill_(10**6), "index must be in"),
    ],
)
def test_damaged_entries_are_found_before_they_are_used(saved: Path, name: str, change, message: str) -> None:
    good = replace(PowerFeatures.load(saved, mmap=False), row_of_node=None)
    change_array(saved, name, change)
    with pytest.raises(ValueError, match=f"{saved} is damaged: {message}"):
        PowerFeatures.load(saved, mmap=False)
    loaded = PowerFeatures.load(saved)
    assert len(loaded) == 30
    model = SPIN(3, 8, 2, 1)
    uses = [
        lambda: model(loaded[[2, 3]]),
        lambda: training.fit(model, loaded, range(20), range(20, 30), epochs=1),
        lambda: loaded[:3].take(),
        lambda: loaded.to("cpu"),
        lambda: loaded.identical_graphs(),
        lambda: PowerFeatures.concatenate([good, loaded]),
        lambda: loaded.save(saved),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=f"{saved} is damaged: {message}"):
            use()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ptr", lambda ptr: ptr.flip(0), "ptr must start with 0"),
        ("ptr", lambda ptr: ptr.index_fill(0, torch.tensor([7]), 2**40), "ptr must not decrease"),
        ("ptr", lambda ptr: ptr[:-1], "ptr must have 2 branches of 30 segments, got 59"),
        ("node_ptr", lambda ptr: ptr.index_fill(0, torch.tensor([7]), 2**40), "node_ptr must not decrease"),
        ("row_ptr", lambda ptr: ptr + 1, "row_ptr must go from 0"),
        ("rows", lambda rows: rows.half(), "rows must be float32 or float64, got float16"),
        ("rows", lambda rows: rows[:-1], "row_ptr must go from 0 to the number of rows"),
        ("index", lambda index: index.short(), "index must be int32 or int64, got int16"),
        ("count", lambda count: count[:-1], "count must have shape"),
        ("row_of_node", lambda rows: rows[:, 1:].contiguous(), "row_of_node must have shape"),
        ("labels", lambda labels: labels[1:], "labels must have a first axis of 30 graphs"),
        ("node_ptr", lambda _: None, "its arrays must be node_ptr, ptr, row_ptr, rows, got "),
    ],
)
def test_damaged_offsets_and_wrong_types_are_found_at_once(saved: Path, name: str, change, message: str) -> None:
    change_array(saved, name, change)
    for mmap in (True, False):
        with pytest.raises(ValueError, match=f"{saved} is damaged: {message}"):
            PowerFeatures.load(saved, mmap=mmap)


@given(data=st.data())
def test_damaged_bytes_give_an_error_or_other_numbers(data: st.DataObject, tmp_path: Path) -> None:
    """And never a crash, which would end the tests."""
    path = tmp_path / "damaged.safetensors"
    graphs = random_graphs([3, 0, 4, 2], density=0.5, dtype=torch.float32, signs=True)
    PowerFeatures.from_graphs(replace(graphs, y=torch.tensor([0, 1, 1, 0])), 1).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        loaded = PowerFeatures.load(path)
        training.fit(SPIN(3, 4, 2, 1), loaded, range(4), range(4), epochs=1)
        loaded[[2, 1]].take().expand()
        loaded.identical_graphs()
    except ValueError:
        return


@pytest.mark.parametrize("size", [0, 7, 8, 100, 500, -5000, -1])
def test_files_cut_short_are_named(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{saved} is not a readable safetensors file"):
        PowerFeatures.load(saved)


def test_files_of_others_are_named(saved: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"features .*nosuch.safetensors does not exist"):
        PowerFeatures.load(saved.with_name("nosuch.safetensors"))
    training.save_checkpoint(saved, SPIN(3, 8, 2, 1))
    with pytest.raises(ValueError, match=f"{saved} is no file of spin_fast features: .*'spin_fast checkpoint 5'"):
        PowerFeatures.load(saved)
    saved.write_text("text")
    with pytest.raises(ValueError, match=f"{saved} is not a readable safetensors file"):
        PowerFeatures.load(saved)
    save_file({"whatever": torch.ones(3)}, saved, {"format": "spin_fast features 3"})
    with pytest.raises(ValueError, match=f"{saved} has format 'spin_fast features 3', .*; upgrade spin_fast"):
        PowerFeatures.load(saved)
    save_file({"whatever": torch.ones(3)}, saved, {"format": FORMAT})
    with pytest.raises(ValueError, match=f"{saved} is damaged: its arrays must be .*, got whatever"):
        PowerFeatures.load(saved)
    with pytest.raises(ValueError, match=r"path must not end with .json, which is for an index"):
        PowerFeatures.from_graphs(random_graphs([2]), 0).save(saved.with_suffix(".json"))


@given(graphs=graph_batches(), operator=OPERATORS, data=st.data(), node_rows=st.booleans())
def test_joined_features_are_those_of_all_graphs(
    graphs: spin_fast.GraphBatch, operator: str, data: st.DataObject, node_rows: bool
) -> None:
    """With the same bits where all parts are deduplicated, whatever the cuts and the chunks."""
    graphs = replace(graphs, x=graphs.x.sign(), y=torch.arange(len(graphs)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(graphs)), max_size=3)))
    pieces = [graphs[begin:end] for begin, end in pairwise([0, *cuts, len(graphs)])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "WORTHWHILE", 0.0)
        whole = PowerFeatures.from_graphs(graphs, 1, operator, node_rows=node_rows)
        patch.setattr(features, "CHUNK_BYTES", data.draw(st.sampled_from([1, 300, 8 << 20])))
        kept = [data.draw(st.booleans()) for _ in pieces]
        parts = [PowerFeatures.from_graphs(piece, 1, operator, node_rows=node_rows) for piece in pieces]
        assert_same_features(PowerFeatures.concatenate(parts), whole)
        mixed = [part if keep or not node_rows else part.expand() for part, keep in zip(parts, kept, strict=True)]
        counted = [part for part in mixed if part.num_nodes] or mixed
        if len(parts) > 1 and any(part.index is not None for part in counted):
            assert_same_features(PowerFeatures.concatenate(mixed), whole)
        if node_rows:
            dense = PowerFeatures.concatenate([part.expand() for part in parts])
            assert dense.index is None
            assert torch.equal(dense.dense_rows(), whole.dense_rows())
            assert torch.equal(dense.y, graphs.y)


def test_only_features_that_are_alike_are_joined(saved: Path) -> None:
    made = PowerFeatures.load(saved)
    with pytest.raises(ValueError, match="parts must hold at least one PowerFeatures, got none"):
        PowerFeatures.concatenate([])
    with pytest.raises(TypeError, match="parts must hold PowerFeatures, got int"):
        PowerFeatures.concatenate([made, 3])
    for other in (
        replace(made, operator="adj"),
        PowerFeatures.from_graphs(random_graphs([3], dtype=torch.float32), 1, "sym,adj"),
        replace(made, labels=None),
        replace(made, rows=made.rows.double()),
        PowerFeatures.from_graphs(random_graphs([3], dtype=torch.float32), 1),
    ):
        with pytest.raises(ValueError, match="parts must be alike, got 1 hops of 'sym' on 3 features in "):
            PowerFeatures.concatenate([made, other])


def test_what_prepared_the_graphs_is_kept(saved: Path) -> None:
    graphs = replace(random_graphs([3, 0, 5, 8] * 4, dtype=torch.float32), y=torch.arange(16))
    made, other = NodeFeatures("log").fit(graphs), NodeFeatures("log").fit(graphs, [1, 3])
    prepared, of_other = (PowerFeatures.from_graphs(of.transform(graphs), 1) for of in (made, other))
    plain = replace(prepared, node_features=None)
    assert PowerFeatures.from_graphs(graphs, 1).node_features is None
    chunks = [made.transform(graphs[:5]), made.transform(graphs[5:])]
    parts = [prepared[:7], prepared[7:]]
    changed = [prepared.expand(), prepared[3:].take(), prepared.nodes(), prepared.cpu(), copy.deepcopy(prepared)]
    changed += [PowerFeatures.from_chunks(chunks, 1), PowerFeatures.from_chunks(chunks, 1, deduplicate=False)]
    for same in [*changed, PowerFeatures.concatenate(parts), PowerFeatures.concatenate([of.expand() for of in parts])]:
        assert same.node_features is not None
        assert same.node_features.fingerprint == made.fingerprint
    prepared.save(saved)
    loaded = PowerFeatures.load(saved)
    assert_same_features(loaded, prepared)
    assert shards.load(saved).node_features is not None
    known = rf"1 hops of 'sym' on 4 features in .* prepared by NodeFeatures {made.fingerprint} and "
    for unlike in (plain, of_other):
        for join in (PowerFeatures.concatenate, shards.ShardedFeatures):
            with pytest.raises(ValueError, match=known):
                join([loaded, unlike])
    plain.save(saved)
    assert PowerFeatures.load(saved).node_features is None
    with pytest.raises(TypeError, match="node_features must be fitted NodeFeatures or None, got dict"):
        replace(plain, node_features=made.to_dict())
    unlike = replace(chunks[1], node_features=None)
    told = "what has transformed them, got NodeFeatures .* in chunk 0 and no NodeFeatures in chunk 1"
    with pytest.raises(ValueError, match=f"chunks must be alike in {told}"):
        PowerFeatures.from_chunks([chunks[0], unlike], 1)
    tensors = load_file(saved)
    for told in ("{}", "no JSON", "[1]"):
        save_file(tensors, saved, {"format": FORMAT, "operator": "sym", "node_features": told})
        with pytest.raises(ValueError, match=r"saved\.safetensors is damaged: "):
            PowerFeatures.load(saved)


def test_the_selection_of_a_file_keeps_narrow_indices(saved: Path) -> None:
    assert PowerFeatures.load(saved)[3:9].take().index.dtype == torch.int32


def test_the_file_says_what_it_is(saved: Path) -> None:
    content = saved.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == {"format": "spin_fast features 2", "operator": "sym"}
    assert header["rows"]["shape"][1] == 3


def test_features_of_nodes_are_kept_in_a_file(tmp_path: Path) -> None:
    graphs = random_graphs([4, 9, 1])
    of_nodes = PowerFeatures.from_graphs(graphs, 2).nodes()
    of_nodes.save(tmp_path / "nodes.safetensors")
    loaded = PowerFeatures.load(tmp_path / "nodes.safetensors")
    assert torch.equal(loaded.dense_rows(), of_nodes.dense_rows())
    assert len(loaded) == 14
