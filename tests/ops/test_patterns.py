"""Readouts and distinct rows of graphs by the patterns of their nodes: what nodes share is not computed again."""

from __future__ import annotations

import copy
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ISAS, random_graphs
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import GraphBatch, PowerFeatures, ops
from spin_fast._common.indexing import offsets
from spin_fast._common.rows import arrays_of
from spin_fast.features import power_features as features
from spin_fast.features.chunks import num_branches_of, powers_of

from .test_evaluated import Mlp, new_mlp

pytestmark = pytest.mark.usefixtures("poison")
OPERATORS = ("sym", "adj", "rw", "sym+adj", "sym,adj", "rw,sym+adj")


def molecules(
    sizes: list[int],
    pool: torch.Tensor,
    *,
    hubs: int = 0,
    index_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> GraphBatch:
    """Chains with branches and rings, of rows from a pool; some edges one way, neighbours in any order, hubs."""
    rng = np.random.default_rng(seed)
    ptr = np.cumsum([0, *sizes])
    of_node: list[list[int]] = [[] for _ in range(ptr[-1])]
    for begin, end in pairwise(ptr):
        for v in range(begin + 1, end):
            u = max(begin, v - int(rng.choice([1, 2, 6], p=[0.8, 0.1, 0.1])))
            of_node[v].append(u)
            if rng.random() < 0.95:
                of_node[u].append(v)
        for _ in range(hubs if end > begin else 0):
            of_node[rng.integers(begin, end)].extend(rng.integers(begin, end, rng.integers(1, 40)).tolist())
    for neighbours in of_node:
        rng.shuffle(neighbours)
    indptr = torch.tensor([0, *np.cumsum([len(of) for of in of_node], dtype=np.int64)])
    indices = torch.tensor([u for of in of_node for u in of], dtype=torch.int64)
    x = pool[torch.from_numpy(rng.integers(0, len(pool), ptr[-1]))]
    return GraphBatch(torch.from_numpy(ptr), indptr.to(index_dtype), indices.to(index_dtype), x)


def readouts(
    mlp: Mlp, graphs: GraphBatch, operator: str, num_hops: int, cuts: list[int], room: int, by_patterns: bool
) -> tuple[torch.Tensor, int]:
    """Of chunks of the graphs between the cuts; and how many of these were taken by patterns, not by their powers."""
    rows = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=room, operator=operator)
    ptrs = [graphs.ptr[begin : end + 1] for begin, end in pairwise([0, *cuts, len(graphs)])]
    chunks, taken = [], 0
    while some := [ptrs.pop(0) for _ in range(min(len(ptrs), ops.chunks_at_once()))]:
        if by_patterns:
            found, is_made = rows.readouts_of_graphs(graphs, some, by_powers=False)
            made = [*found.split([len(ptr) - 1 for ptr in some])]
        else:
            is_made, made = [False] * len(some), [torch.empty(0)] * len(some)
        for number, ptr in enumerate(some):
            taken += is_made[number]
            if not is_made[number]:
                powers = powers_of(graphs, num_hops, operator, False)[:, int(ptr[0]) : int(ptr[-1])].contiguous()
                made[number] = rows.readout(powers, ptr - ptr[0])
        chunks += made
    return torch.cat(chunks), taken


@st.composite
def cases(draw: st.DrawFn) -> tuple[GraphBatch, str, int, list[int], int, Mlp]:
    """Graphs of few kinds of nodes, or of many; rows just wide enough, or not; cuts; room for more than a chunk."""
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=17))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    width = draw(st.sampled_from([15, 16, 17, 37, 70]))
    pool = torch.randn(draw(st.sampled_from([1, 3, 400])), width, generator=generator, dtype=dtype)
    graphs = molecules(
        sizes,
        pool * (torch.rand(pool.shape, generator=generator) < 0.5),  # zeros of both signs
        hubs=draw(st.sampled_from([0, 0, 1, 3])),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 99)),
    )
    operator, num_hops = draw(st.sampled_from(OPERATORS)), draw(st.integers(1, 3))
    graphs = GraphBatch.concatenate([graphs] * draw(st.sampled_from([1, 5])))
    cuts = sorted(draw(st.lists(st.integers(0, len(graphs)), max_size=12)))
    largest = max(int(graphs.ptr[b] - graphs.ptr[a]) for a, b in pairwise([0, *cuts, len(graphs)]))
    room = max(largest, draw(st.sampled_from([1024, 1100, 3000])))
    branches = num_branches_of(num_hops, operator)
    return graphs, operator, num_hops, cuts, room, new_mlp(branches, [width, 20, 8], draw(st.booleans()), dtype)


@given(case=cases())
def test_readouts_are_those_of_all_rows(native, case: tuple) -> None:
    """To the bit, also where patterns are forgotten or left out from one chunk to the next."""
    graphs, operator, num_hops, cuts, room, mlp = case
    expected, _ = readouts(mlp, graphs, operator, num_hops, cuts, room, by_patterns=False)
    found, _ = readouts(mlp, graphs, operator, num_hops, cuts, room, by_patterns=True)
    assert torch.equal(found, expected)
    rows = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=room, operator=operator)
    ptrs = [graphs.ptr[begin : end + 1] for begin, end in pairwise([0, *cuts, len(graphs)])]
    assert torch.equal(rows.readouts_of_graphs(graphs, ptrs)[0], expected)


@pytest.mark.parametrize("backend", ISAS, indirect=True)
@pytest.mark.parametrize("operator", ["sym", "sym+adj,rw"])
def test_many_chunks_and_threads(backend: str, operator: str, threads: None) -> None:
    """Long enough for patterns to be forgotten again and again, and for tasks of several threads."""
    pool = torch.eye(20)[:2]
    graphs = molecules([25] * 600, pool, seed=1)
    graphs = GraphBatch.concatenate([graphs, molecules([30] * 20, pool, hubs=1, seed=2)])
    mlp = new_mlp(num_branches_of(2, operator), [20, 32, 32], True)
    expected = None
    for number, size, room in ((1, 620, 20_000), (1, 100, 3000), (2, 100, 3000), (2, 620, 20_000)):
        torch.set_num_threads(number)
        cuts = [*range(size, len(graphs), size)]
        found, taken = readouts(mlp, graphs, operator, 2, cuts, room, by_patterns=True)
        assert taken == len(cuts) + 1
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
    plain, _ = readouts(mlp, graphs, operator, 2, [], 20_000, by_patterns=False)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("width", [9, 90])
def test_threads_take_chunks_without_patterns(native, threads: None, width: int) -> None:
    """Also where half of the columns are left out, and of small sets, which come in smaller chunks then."""
    pool = torch.randn(500, width) * (torch.arange(width) % 3 == 0)
    graphs = molecules([40] * 400, pool, hubs=9)
    mlp = new_mlp(4, [width, 32, 32], True)
    expected = None
    for number in (1, 2):
        torch.set_num_threads(number)
        rows = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=graphs.num_nodes, operator="sym")
        without = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=graphs.num_nodes)  # whose chunks threads share
        assert (rows.bytes_of_node(graphs, 1 << 20) > without.bytes_of_node(graphs, 1 << 20)) == (number > 1)
        ptrs = [graphs.ptr[begin : begin + 41] for begin in range(0, 400, 40)]
        found = torch.cat([rows.readouts_of_graphs(graphs, some)[0] for some in (ptrs[:1], ptrs[1:])])
        expected = found if expected is None else expected
        assert torch.equal(found, expected)


def same_features(graphs: GraphBatch, operator: str, num_hops: int, chunk_bytes: int) -> int:
    """Check the features of graphs in chunks against those by their powers; returns how many were taken by patterns."""
    taken: list[bool] = []
    add_graphs = ops.DistinctRows.add_graphs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(ops.DistinctRows, "add_graphs", lambda *of: taken.append(add_graphs(*of)) or taken[-1])
        found = PowerFeatures.from_graphs(graphs, num_hops, operator)
        cut = len(graphs) // 3
        in_chunks = PowerFeatures.from_chunks([graphs[:cut], graphs[cut:]], num_hops, operator)
        patch.setattr(ops.DistinctRows, "add_graphs", lambda *_: False)
        expected = PowerFeatures.from_graphs(graphs, num_hops, operator)
    for made in (found, in_chunks):
        for name in ("row_ptr", "ptr", "index", "count", "row_of_node"):
            value, wanted = getattr(made, name), getattr(expected, name)
            assert (value is None and wanted is None) or torch.equal(value, wanted)
        for value, wanted in zip(arrays_of(made.rows), arrays_of(expected.rows), strict=True):
            assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted
    return sum(taken)


@given(case=cases(), chunk_bytes=st.sampled_from([1 << 14, 1 << 16, 1 << 23]))
def test_features_are_those_of_all_rows(native, case: tuple, chunk_bytes: int) -> None:
    """Of some thousand nodes: the graphs again and again."""
    graphs, operator, num_hops, *_ = case
    times = -(-1200 // max(graphs.num_nodes, 1)) if graphs.num_nodes else 1
    same_features(GraphBatch.concatenate([graphs] * min(times, 400)), operator, num_hops, chunk_bytes)


@pytest.mark.parametrize("backend", ISAS, indirect=True)
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (40, torch.float64), (90, torch.float32)])
def test_features_of_many_chunks_and_threads(
    backend: str, width: int, dtype: torch.dtype, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows that become sparse, of which the first chunk tells; by one thread and by two, which share hops."""
    graphs = molecules([20, 70, 25, 0, 1] * 100, torch.eye(width, dtype=dtype)[:3], seed=4)
    for number, chunk_bytes in ((1, 1 << 20), (2, 1 << 20), (2, 8 << 20)):
        torch.set_num_threads(number)
        assert same_features(graphs, "sym,adj", 3, chunk_bytes) >= 2


@pytest.mark.parametrize(("number", "size"), [(1, 30), (2, 200), (3, 200)])
def test_features_of_chunks_without_patterns_in_between(native, threads: None, number: int, size: int) -> None:
    """Patterns are given up, left out for some chunks, and begun anew; by several threads, which all stop."""
    torch.set_num_threads(number)
    alike, unlike = molecules([40] * size, torch.eye(16)[:2]), molecules([40] * size, torch.randn(500, 16), hubs=9)
    graphs = GraphBatch.concatenate([alike, alike, unlike, alike, *[unlike] * 15, alike, alike])
    assert same_features(graphs, "sym", 2, 40 * size * 3 * (64 + features.ROW_BYTES)) == 6


def test_features_where_patterns_do_not_fit(native) -> None:
    """Patterns of wide rows are forgotten again and again; rows keep their numbers."""
    graphs = molecules([30] * 90, torch.eye(2000)[:40])
    assert same_features(graphs, "sym", 2, 300 * 3 * (8000 + features.ROW_BYTES)) > 6


@pytest.mark.parametrize(("size", "edges", "width"), [(10_000, 0, 16), (160, 94, 700)])
def test_features_of_graphs_that_may_be_large(native, size: int, edges: int, width: int) -> None:
    """Their powers are summed up in another way, and it must not depend on the number of threads in which."""
    generator = torch.Generator().manual_seed(0)
    small, large = molecules([30] * 40, torch.randn(3, width, generator=generator)), molecules([size], torch.ones(1, 1))
    more = torch.randint(0, size, (2, edges * size), generator=generator)
    both = torch.stack([torch.arange(size).repeat_interleave(large.indptr.diff()), large.indices])
    x = torch.randn(3, width, generator=generator)[torch.arange(size) % 3]
    large = GraphBatch.from_edge_index(torch.cat([both, more], 1), x=x)
    same_features(GraphBatch.concatenate([small, large]), "sym", 4, 1 << 23)


def taken_by_patterns(graphs: GraphBatch) -> bool:
    mlp = new_mlp(3, [graphs.num_features, 8], False)
    return readouts(mlp, graphs, "sym", 2, [], 100_000, by_patterns=True)[1] == 1


def test_left_out_where_they_do_not_pay(native) -> None:
    pool = torch.eye(16)[:3]
    sizes = [30] * 100
    assert taken_by_patterns(molecules(sizes, pool))
    assert not taken_by_patterns(molecules(sizes, pool[:, :15]))  # narrow rows
    assert not taken_by_patterns(molecules(sizes, pool, hubs=8))  # many neighbours
    assert not taken_by_patterns(molecules(sizes, torch.randn(3000, 16)))  # rows that hardly repeat
    assert not taken_by_patterns(molecules([9000], pool))  # a graph that others may take apart


def test_graphs_with_weights_or_strides_are_left_out(native) -> None:
    graphs = molecules([30] * 10, torch.eye(16)[:3])
    rows = ops.EvaluatedRows(*new_mlp(3, [16, 8], True), negative_slope=0.1, num_nodes=300, operator="sym")
    assert rows.may_take(graphs)
    weights = GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, graphs.x, edge_weight=torch.ones(graphs.num_edges))
    assert not rows.may_take(weights)
    strided = copy.copy(graphs)
    object.__setattr__(strided, "x", graphs.x.repeat(1, 2)[:, ::2])
    assert not strided.x.is_contiguous()
    assert not rows.may_take(strided)


@pytest.mark.parametrize("backend", ISAS, indirect=True)
@pytest.mark.parametrize("operator", ["sym", "sym+adj,rw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "kinds"), [(30, 500), (100, 500), (100, 5000)])
def test_columns_that_are_zero_in_a_chunk(
    backend: str, operator: str, dtype: torch.dtype, width: int, kinds: int, threads: None
) -> None:
    """Hops are made without them where rows are not compared: chunks of no column, of one, few, others, most, all.

    Rows of ``x`` are compared, and few of them looked at, but where there are many kinds. The last chunk is a graph
    that goes hop by hop.
    """
    parts = []
    for columns in ((0, 100), (3, 4), (0, 20), (10, 40), (0, 0), (0, 80), (50, 52), (20, 70), (0, 10)):
        sizes = [40] * 30 if columns != (0, 10) else [270_000 // width]
        part = molecules(sizes, torch.randn(kinds, width, dtype=dtype), hubs=9)
        part.x[:, : columns[0] * width // 100] = part.x[:, -(-columns[1] * width // 100) :] = 0
        parts.append(part)
    graphs = GraphBatch.concatenate(parts)
    mlp = new_mlp(num_branches_of(2, operator), [width, 16, 8], True, dtype)
    expected = ops.branch_readout(powers_of(graphs, 2, operator, False), *mlp, graphs.ptr, negative_slope=0.1)
    ptrs = [graphs.ptr[begin : begin + 31] for begin in range(0, len(graphs), 30)]
    for number in (1, 2):
        torch.set_num_threads(number)
        rows = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=graphs.num_nodes, operator=operator)
        for ptr, one in zip(ptrs, expected.split(30), strict=True):
            assert torch.equal(rows.readouts_of_graphs(graphs, [ptr])[0], one)


@pytest.mark.parametrize("backend", ISAS, indirect=True)
@pytest.mark.parametrize("operator", ["sym", "sym,adj"])
@pytest.mark.parametrize("size", [3, 60])
def test_readouts_of_one_feature(backend: str, size: int, operator: str) -> None:
    """Hops of dense graphs of one feature lie one after the other, without ``x``, in memory that ends where they do."""
    graphs = random_graphs([size] * 40, 0.5, 1, dtype=torch.float32)
    mlp = new_mlp(num_branches_of(3, operator), [1, 8], True)
    expected = ops.branch_readout(powers_of(graphs, 3, operator, False), *mlp, graphs.ptr, negative_slope=0.1)
    rows = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=graphs.num_nodes, operator=operator)
    torch.testing.assert_close(rows.readouts_of_graphs(graphs, [graphs.ptr])[0], expected, rtol=1e-4, atol=1e-4)


def test_chunks_without_patterns_in_between(native, threads: None) -> None:
    """Rows of chunks that were not taken by patterns push out what patterns refer to."""
    torch.set_num_threads(1)
    alike, unlike = molecules([40] * 6, torch.eye(16)[:2]), molecules([40] * 30, torch.randn(500, 16), hubs=9)
    graphs = GraphBatch.concatenate([alike, alike, unlike, alike, *[unlike] * 15, alike, alike])
    mlp, cuts = new_mlp(4, [16, 8], True), [6, 12, 42, *range(48, len(graphs) - 6, 30), len(graphs) - 6]
    expected, _ = readouts(mlp, graphs, "sym", 3, cuts, 2400, by_patterns=False)
    found, count = readouts(mlp, graphs, "sym", 3, cuts, 2400, by_patterns=True)
    assert count == 4
    assert torch.equal(found, expected)


def test_rows_that_came_without_the_table_are_not_in_it(native) -> None:
    """Rows of new patterns that hardly repeat are kept, but not to be found: a row equal to their memory is another.

    Here that is 0, as is the row of nodes without neighbours: in a thread whose memory is new.
    """
    native.poison_scratch(False)
    generator = torch.Generator().manual_seed(0)
    pool = torch.rand(16, 16, generator=generator) + 1

    def ring(num_nodes: int, reach: int) -> GraphBatch:
        """Of nodes with neighbours up to so far on both sides."""
        ends = [torch.arange(num_nodes).roll(k) for k in range(-reach, reach + 1) if k]
        edges = torch.stack([torch.arange(num_nodes).repeat(len(ends)), torch.cat(ends)])
        return GraphBatch.from_edge_index(edges, x=pool[torch.randint(0, 16, (num_nodes,), generator=generator)])

    alone = GraphBatch.from_edge_index(torch.empty(2, 0, dtype=torch.int64), x=pool)
    graphs = GraphBatch.concatenate([*[ring(40, 1) for _ in range(100)], *[ring(500, 3)] * 140, alone])
    mlp, made = new_mlp(3, [16, 8], False), []
    ptrs = [graphs.ptr[begin : end + 1] for begin, end in ((0, 100), (100, 170), (170, 240), (240, 241))]

    def predict() -> None:
        rows = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=100_000, operator="sym")
        made.extend(rows.readouts_of_graphs(graphs, [ptr])[0] for ptr in ptrs)

    thread = threading.Thread(target=predict)
    thread.start()
    thread.join()
    expected = ops.branch_readout(powers_of(graphs, 2, "sym", False), *mlp, graphs.ptr, negative_slope=0.1)
    assert torch.equal(torch.cat(made), expected)


def test_arguments_of_the_library_are_checked(native) -> None:
    graphs = molecules([5, 3], torch.eye(16)[:2])
    good = [value.numpy() for value in (graphs.indptr, graphs.indices, graphs.x, graphs.ptr)]
    flat = np.zeros(3 * 17 * 8, np.float32)
    with pytest.raises(ValueError, match="operators must share 2 hops, got 3"):
        native.EvaluatedRows(flat, 16, 3, [8], False, 0.1, 8, ["sym", "adj", "rw"])
    with pytest.raises(ValueError, match="operator must be one of"):
        native.EvaluatedRows(flat, 16, 3, [8], False, 0.1, 8, ["nosuch"])
    rows = native.EvaluatedRows(flat, 16, 3, [8], False, 0.1, 1024, ["sym"])

    def readouts_of(rows: Any, *arrays: Any) -> tuple[np.ndarray, list[bool]]:
        return native.readouts_of_graphs([rows], *arrays[:3], [arrays[3]], False)

    found, is_made = readouts_of(rows, *good)
    assert (found.shape, found.dtype, is_made) == ((2, 24), np.float32, [True])
    wide = offsets(torch.tensor([9])).numpy()
    for place, value, message in (
        (0, good[0][:-1], "indptr must have 9 entries, got 8"),
        (2, good[2][:, :15], "x must be .N, d., contiguous"),
        (2, good[2].astype(np.float64), "x must be .N, d., contiguous, and of the dtype of all chunks"),
        (3, good[3][:0], "ptr must have at least one entry"),
        (3, wide, "ptr must be ascending from 0 to 8 nodes at most, got 9 at 1"),
        (3, good[3][::-1].copy(), "ptr must be ascending from 0 to 8 nodes at most, got 5 at 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            readouts_of(rows, *good[:place], value, *good[place + 1 :])
    few = native.EvaluatedRows(flat, 16, 3, [8], False, 0.1, 8, ["sym"])
    assert readouts_of(few, *good)[1] == [False]
    with pytest.raises(ValueError, match="rows must be alike"):
        native.readouts_of_graphs([rows, few], *good[:3], [good[3]] * 2, True)
    wider = native.EvaluatedRows(np.zeros(3 * 17 * 9, np.float32), 16, 3, [9], False, 0.1, 1024, ["sym"])
    with pytest.raises(ValueError, match="rows must be alike"):
        native.readouts_of_graphs([rows, wider], *good[:3], [good[3]] * 2, True)
    with pytest.raises(ValueError, match="rows must be different objects"):
        native.readouts_of_graphs([], *good[:3], [good[3]], True)
    with pytest.raises(ValueError, match="rows must be different objects"):
        native.readouts_of_graphs([rows, rows], *good[:3], [good[3]] * 2, True)
    few = native.EvaluatedRows(flat, 16, 3, [8], False, 0.1, 4, ["sym"])
    assert native.readouts_of_graphs([few], *good[:3], [good[3]], True)[1] == [False]  # no room
    rows = native.EvaluatedRows(flat, 16, 3, [8], False, 0.1, 8, [])
    others = native.EvaluatedRows(flat, 16, 3, [8], False, 0.1, 8, [])
    for some in ([rows], [rows, others]):  # in threads, too
        with pytest.raises(ValueError, match="rows must have operators, to take graphs"):
            native.readouts_of_graphs(some, *good[:3], [good[3]] * 2, True)
    with pytest.raises(TypeError):
        readouts_of(rows, good[0].astype(np.int32), *good[1:])
