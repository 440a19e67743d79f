from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import graph_batches, random_graphs
from hypothesis import given
from hypothesis import strategies as st

import spin_fast
from spin_fast import SPIN, PowerFeatures, datasets, features
from spin_fast.features import identical_segments


def powers(graphs: spin_fast.GraphBatch, num_hops: int, operator: str, canonical: bool = True) -> torch.Tensor:
    return spin_fast.power_features(
        graphs.indptr, graphs.indices, graphs.x, num_hops, operator, ptr=graphs.ptr, canonical=canonical
    )


@given(graphs=graph_batches(), num_hops=st.integers(0, 3), operator=st.sampled_from(["adj", "sym", "sym+adj", "rw"]))
def test_rows_of_nodes_are_the_powers(backend: str, graphs: spin_fast.GraphBatch, num_hops: int, operator: str) -> None:
    for deduplicate in (True, False):
        expected = powers(graphs, num_hops, operator, canonical=deduplicate)
        made = PowerFeatures.from_graphs(graphs, num_hops, operator, deduplicate)
        assert torch.equal(made.dense_rows(), expected)
        assert torch.equal(made.expand().rows, expected.flatten(0, 1))
        assert made.row_ptr[-1] == len(made.rows)
    made = PowerFeatures.from_graphs(graphs, num_hops, operator)
    for r in range(num_hops + 1 if made.index is not None else 0):
        rows = made.rows[made.row_ptr[r] : made.row_ptr[r + 1]]
        assert len({row.numpy().tobytes() for row in rows}) == len(rows)


@given(graphs=graph_batches(), data=st.data())
def test_selection_reads_as_its_graphs(graphs: spin_fast.GraphBatch, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(graphs) - 1), max_size=5)) if len(graphs) else []
    for deduplicate in (True, False):
        expected = powers(graphs[ids], 2, "sym", canonical=deduplicate)
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


def assert_same_features(one: PowerFeatures, other: PowerFeatures) -> None:
    for name, value in vars(one).items():
        twin = getattr(other, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == twin.dtype, name
            assert torch.equal(value, twin), name
        else:
            assert value == twin, name


@given(graphs=graph_batches(weighted=True), chunk_bytes=st.sampled_from([1, 200, 2000]), node_rows=st.booleans())
def test_chunks_change_nothing(backend: str, graphs: spin_fast.GraphBatch, chunk_bytes: int, node_rows: bool) -> None:
    graphs = replace(graphs, x=graphs.x.sign())
    whole = PowerFeatures.from_graphs(graphs, 2, "rw", node_rows=node_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(features, "WORTHWHILE", 0.0 if whole.index is not None else features.WORTHWHILE)
        assert_same_features(PowerFeatures.from_graphs(graphs, 2, "rw", node_rows=node_rows), whole)


def test_powers_of_a_chunk_are_all_that_is_in_memory(monkeypatch: pytest.MonkeyPatch, data_root) -> None:
    graphs = datasets.load("NCI1", data_root)
    whole = PowerFeatures.from_graphs(graphs, 3)
    sizes, power_features = [], spin_fast.ops.power_features

    def recorded(*args, **options):
        powers = power_features(*args, **options)
        sizes.append(powers.nbytes)
        return powers

    monkeypatch.setattr(spin_fast.ops, "power_features", recorded)
    monkeypatch.setattr(features, "CHUNK_BYTES", 1 << 20)
    assert_same_features(PowerFeatures.from_graphs(graphs, 3), whole)
    assert len(sizes) > 50
    assert max(sizes) <= 1 << 20


def test_sharing_is_decided_chunk_by_chunk(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk of which hardly a row repeats decides, whatever comes after it."""
    graphs = random_graphs([30] * 4, density=0.2)
    x = graphs.x.clone()
    x[60:] = x[0]
    monkeypatch.setattr(features, "CHUNK_BYTES", 30 * (graphs.x.element_size() * 3 + features.NODE_BYTES))
    assert PowerFeatures.from_graphs(replace(graphs, x=x), 0).index is not None
    monkeypatch.setattr(features, "SAMPLE_NODES", 30)
    assert PowerFeatures.from_graphs(replace(graphs, x=x), 0).index is None
    assert PowerFeatures.from_graphs(replace(graphs, x=x.flip(0)), 0).index is not None
    monkeypatch.undo()
    assert PowerFeatures.from_graphs(replace(graphs, x=x), 0).index is not None


def identical_by_multisets(features: PowerFeatures) -> list[int]:
    """The first graph with the same multiset of rows in every branch, by bytes."""
    rows, bounds, seen, first = features.dense_rows() + 0.0, features.selected_ptr.tolist(), {}, []
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


def test_identical_graphs_are_compared_not_only_hashed() -> None:
    graphs = random_graphs([2, 3, 0, 2, 0, 3] * 20, density=0.5)
    made = PowerFeatures.from_graphs(replace(graphs, x=graphs.x.sign()), 1, "adj")
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
        ({"row_of_node": torch.full((2, 5), 99)}, "index must be in"),
    ],
)
def test_storage_is_checked_where_it_is_built(change: dict, message: str) -> None:
    made = PowerFeatures.from_graphs(random_graphs([2, 3], density=0.5), 1)
    if "index" in change:
        change = {"index": torch.full_like(made.index, 99)}
    with pytest.raises(ValueError, match=message):
        replace(made, **change)


def test_rows_of_nodes_need_not_be_kept() -> None:
    graphs = random_graphs([5, 3, 8])
    graphs = replace(graphs, x=graphs.x.sign())
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
