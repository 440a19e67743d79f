from __future__ import annotations

import itertools
from dataclasses import replace

import cuda_kernels
import numpy as np
import pytest
import torch
from helpers import TOLERANCE, dense_powers, graph_batches, random_graphs, strided
from hypothesis import given
from hypothesis import strategies as st

import spin_fast
from spin_fast import GraphBatch, reference

OPERATORS = ("adj", "sym", "sym+adj", "rw")
pytestmark = pytest.mark.usefixtures("poison")


def powers(
    graphs: GraphBatch, num_hops: int = 3, operator: str = "sym", *, block: bool = True, **options
) -> torch.Tensor:
    return spin_fast.power_features(
        graphs.indptr,
        graphs.indices,
        options.pop("x", graphs.x),
        num_hops,
        operator,
        ptr=graphs.ptr if block else None,
        edge_weight=graphs.edge_weight,
        **options,
    )


@given(graphs=graph_batches(weighted=True), num_hops=st.integers(0, 4), operator=st.sampled_from(OPERATORS))
def test_equals_dense_oracle(backend: str, graphs: GraphBatch, num_hops: int, operator: str) -> None:
    expected = dense_powers(graphs, num_hops, operator)
    for block, float64_sums in itertools.product((True, False), repeat=2):
        result = powers(graphs, num_hops, operator, block=block, float64_sums=float64_sums)
        assert result.dtype == graphs.x.dtype
        size = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        torch.testing.assert_close(result.double() / size, expected / size, **TOLERANCE[graphs.x.dtype])


@given(graphs=graph_batches(), operator=st.sampled_from(OPERATORS))
def test_writes_all_of_out_and_nothing_else(backend: str, graphs: GraphBatch, operator: str) -> None:
    shape = (4, *graphs.x.shape)
    frame = torch.full((shape[0] + 2, *shape[1:]), 7.0, dtype=graphs.x.dtype)
    out = frame[1:-1]
    out.fill_(float("nan"))
    result = powers(graphs, 3, operator, out=out)
    assert result is out
    assert torch.equal(out, powers(graphs, 3, operator))
    assert bool((frame[0] == 7).all())
    assert bool((frame[-1] == 7).all())


def test_isolated_nodes_get_zero(backend: str) -> None:
    graphs = random_graphs([3, 1, 0, 4], density=0.0)
    for operator in OPERATORS:
        result = powers(graphs, 2, operator)
        assert torch.equal(result[0], graphs.x)
        assert not result[1:].any()


def test_no_graphs_no_nodes_no_features(backend: str) -> None:
    assert powers(random_graphs([]), 3).shape == (4, 0, 3)
    assert powers(random_graphs([0, 0]), 3).shape == (4, 0, 3)
    assert powers(random_graphs([3, 2], num_features=0), 3).shape == (4, 5, 0)
    assert powers(random_graphs([3, 2]), 0).shape == (1, 5, 3)


@pytest.mark.parametrize("num_features", [1, 2, 7, 37])
@pytest.mark.parametrize("repeated", [True, False])
def test_graphs_of_all_sizes(backend: str, num_features: int, repeated: bool) -> None:
    """Near-dense, too large for the cache, small enough to share a block; with and without repeated edges."""
    complete = [torch.arange(n).expand(n, n)[~torch.eye(n, dtype=torch.bool)].view(n, -1) for n in (70, 3)]
    rows = [row for graph, at in zip(complete, (0, 70), strict=True) for row in graph + at]
    rows[69] = torch.cat([rows[69], rows[69][:5]]) if repeated else rows[69]
    mixed = random_graphs([400, 2, 0, 1200], 0.02, num_features, dtype=torch.float32)
    indptr = torch.cat([torch.tensor([len(row) for row in rows]), mixed.indptr.diff()])
    graphs = GraphBatch(
        ptr=torch.cat([torch.tensor([0, 70]), 73 + mixed.ptr]),
        indptr=torch.cat([torch.zeros(1, dtype=torch.int64), indptr.cumsum(0)]),
        indices=torch.cat([*rows, 73 + mixed.indices]),
        x=torch.cat([torch.rand(73, num_features), mixed.x]),
    )
    for operator in OPERATORS:
        expected = dense_powers(graphs, 2, operator)
        size = expected.abs().max()
        for float64_sums in (True, False):
            result = powers(graphs, 2, operator, float64_sums=float64_sums)
            torch.testing.assert_close(result.double() / size, expected / size, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("repeated", [True, False])
def test_one_feature_and_any_number_of_nodes(backend: str, index_dtype: torch.dtype, repeated: bool) -> None:
    """Graphs below, at and above what one word of bits holds, sparse and complete; the last ends with the indices."""
    rng = np.random.default_rng(0)
    indptr, indices, ptr = [0], [], [0]
    for num_nodes in [*range(1, 70), 31, 32, 33]:
        for _ in range(num_nodes):
            row = np.flatnonzero(rng.random(num_nodes) < [0.05, 0.5, 1.0][num_nodes % 3])
            row = np.concatenate([row, row[:1]]) if repeated and num_nodes % 2 else row
            indices.extend(ptr[-1] + rng.permutation(row))
            indptr.append(len(indices))
        ptr.append(ptr[-1] + num_nodes)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-13)):
        graphs = GraphBatch(
            ptr=torch.tensor(ptr),
            indptr=torch.tensor(indptr, dtype=index_dtype),
            indices=torch.tensor(np.array(indices)).to(index_dtype),
            x=torch.from_numpy(rng.standard_normal((ptr[-1], 1))).to(dtype),
        )
        for operator in OPERATORS:
            expected = dense_powers(graphs, 3, operator)
            for float64_sums in (True, False):
                result = powers(graphs, 3, operator, float64_sums=float64_sums).double()
                for hop in range(4):
                    scale = float(expected[hop].abs().max())
                    torch.testing.assert_close(result[hop], expected[hop], rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("block", [True, False])
def test_half_precision_is_rounded_once(backend: str, dtype: torch.dtype, operator: str, block: bool) -> None:
    for num_features in (1, 3, 16, 37):
        graphs = random_graphs([5, 0, 30, 1], 0.3, num_features, dtype=torch.float32)
        stored = replace(graphs, x=(graphs.x / 8).to(dtype).float())
        exact = powers(stored, 3, operator, block=block)
        result = powers(stored, 3, operator, block=block, x=stored.x.to(dtype))
        assert result.dtype == dtype
        torch.testing.assert_close(result, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
        x = stored.x.to(dtype).requires_grad_()
        powers(stored, 3, operator, block=block, x=x).float().sum().backward()
        wide = stored.x.clone().requires_grad_()
        powers(stored, 3, operator, block=block, x=wide).sum().backward()
        torch.testing.assert_close(x.grad.float(), wide.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("num_features", [1, 3, 37])
@pytest.mark.parametrize("block", [True, False])
def test_huge_degree_and_repeated_edges(backend: str, num_features: int, block: bool) -> None:
    n = 100_000 // num_features  # a star whose hub lists every leaf twice
    leaves = torch.arange(1, n)
    indices = torch.cat([leaves, leaves, torch.zeros(n - 1, dtype=torch.int64)])
    indptr = torch.cat([torch.tensor([0]), 2 * (n - 1) + torch.arange(n)])
    x = torch.full((n, num_features), 0.1)
    result = spin_fast.power_features(indptr, indices, x, 1, "adj", ptr=torch.tensor([0, n]) if block else None)
    torch.testing.assert_close(result[1, 0], torch.full((num_features,), 2 * (n - 1) * 0.1), rtol=1e-6, atol=0)
    assert torch.equal(result[1, 1:], x[1:])


@pytest.mark.parametrize("num_features", [1, 7, 16, 33])
def test_outputs_larger_than_the_caches(backend: str, num_features: int) -> None:
    """They are written around the caches: the same bits as in small batches."""
    if backend in ("reference", "cuda"):
        pytest.skip("only the kernels of the CPU write around the caches")
    num_graphs, size = 3_000_000 // num_features // 50, 50
    v = torch.arange(num_graphs * size)
    first = v // size * size
    ring = torch.stack([first + (v - first + step) % size for step in (1, 3, size - 1)], 1)
    x = torch.randn(len(v), num_features, generator=torch.Generator().manual_seed(0))

    def run(graphs: int) -> torch.Tensor:
        nodes = graphs * size
        return spin_fast.power_features(
            3 * torch.arange(nodes + 1), ring[:nodes].flatten(), x[:nodes], 2, ptr=size * torch.arange(graphs + 1)
        )

    whole, few = run(num_graphs), run(7)
    assert whole.nbytes > 2**25 > few.nbytes
    assert torch.equal(whole[:, : 7 * size], few)
    torch.testing.assert_close(
        whole[2].sum(0), x.sum(0), rtol=1e-3, atol=0.5
    )  # the graphs are regular: sym keeps the sum of a feature


@pytest.mark.parametrize("operator", OPERATORS)
def test_same_bits_for_any_number_of_threads(backend: str, threads: None, operator: str) -> None:
    graphs = random_graphs(
        [50] * (80 if backend != "cuda" else 8) + [400], density=0.1, num_features=37, dtype=torch.float32
    )
    grad = torch.randn(4, *graphs.x.shape)
    for block, float64_sums in itertools.product((True, False), repeat=2):
        results = []
        for number in (1, 2):
            torch.set_num_threads(number)
            x = graphs.x.clone().requires_grad_()
            result = powers(graphs, 3, operator, block=block, float64_sums=float64_sums, x=x)
            result.backward(grad)
            results.append((result.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_equal_neighbourhoods_give_equal_bits(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    degree, copies = 12, 500
    values = torch.randn(degree, 5, generator=generator)
    x = torch.cat([values, torch.zeros(copies, 5)])
    orders = [torch.randperm(degree, generator=generator) for _ in range(copies)]
    indptr = torch.cat([torch.zeros(degree, dtype=torch.int64), torch.arange(copies + 1) * degree])
    for operator in OPERATORS:
        for ptr in (torch.tensor([0, degree + copies]), None):
            result = spin_fast.power_features(
                indptr, torch.cat(orders), x, 1, operator, ptr=ptr, float64_sums=ptr is not None
            )[1, degree:]
            assert bool((result == result[0]).all())


@pytest.mark.parametrize("float64_sums", [True, False])
def test_no_argument_need_be_contiguous(backend: str, float64_sums: bool) -> None:
    graphs = random_graphs([4, 6], num_features=6, weighted=True)
    arrays = (graphs.indptr, graphs.indices, graphs.x.requires_grad_(), 3, "sym")
    results = []
    for way in (lambda value: value, strided):
        x = way(graphs.x)
        options = {"ptr": way(graphs.ptr), "edge_weight": way(graphs.edge_weight), "float64_sums": float64_sums}
        result = spin_fast.power_features(*map(way, arrays[:2]), x, *arrays[3:], **options)
        grad = way(torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result))
        results.append((result.detach(), *torch.autograd.grad(result, x, grad)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_nan_and_inf_stay_in_their_graph(backend: str) -> None:
    graphs = random_graphs([4, 5, 3], density=0.9)
    x = graphs.x.clone()
    x[5, 1], x[6, 2] = float("nan"), float("inf")
    result, clean = powers(graphs, x=x), powers(graphs)
    assert torch.equal(result[:, :4], clean[:, :4])
    assert torch.equal(result[:, 9:], clean[:, 9:])
    assert not bool(result[1:, 4:9, 1:].isfinite().all())


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients(backend: str, operator: str, block: bool, weighted: bool) -> None:
    graphs = random_graphs([3, 0, 1, 4], num_features=2, weighted=weighted)
    x = graphs.x.clone().requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return powers(graphs, 3, operator, block=block, x=x)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_gradient_of_zero_hops_and_large_batches(native) -> None:
    graphs = random_graphs([40] * 60, density=0.1, num_features=19)
    for num_hops in (0, 1, 2, 5):
        grads = []
        for path in (powers, lambda g, r, op, x: reference.power_features(g.indptr, g.indices, x, r, op)):
            x = graphs.x.clone().requires_grad_()
            path(graphs, num_hops, "sym+adj", x=x).square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operator", OPERATORS)
def test_float32_is_as_accurate_as_torch(backend: str, operator: str) -> None:
    """At most twice the error of float32 products with the dense operator."""
    graphs = random_graphs([60] * 20, density=0.5, num_features=16, dtype=torch.float32)
    exact = dense_powers(graphs, 3, operator)
    identity = replace(graphs, x=torch.eye(graphs.num_nodes))
    dense = dense_powers(identity, 1, operator)[1].float()
    theirs = [graphs.x]
    for _ in range(3):
        theirs.append(dense @ theirs[-1])
    error = (powers(graphs, 3, operator).double() - exact).abs().max()
    assert error <= 2 * (torch.stack(theirs).double() - exact).abs().max()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_accurate_as_torch(backend: str, dtype: torch.dtype, operator: str) -> None:
    """At most twice the error of products in the half type with the dense operator, which torch rounds at every hop."""
    graphs = random_graphs([40] * 10, density=0.2, num_features=8, dtype=torch.float32)
    graphs = replace(graphs, x=(graphs.x / 8).to(dtype).float())
    exact = dense_powers(graphs, 3, operator)
    dense = dense_powers(replace(graphs, x=torch.eye(graphs.num_nodes)), 1, operator)[1].to(dtype)
    theirs = [graphs.x.to(dtype)]
    for _ in range(3):
        theirs.append(dense @ theirs[-1])
    ours = powers(graphs, 3, operator, x=graphs.x.to(dtype))
    for one, other, hop in zip(ours.double(), torch.stack(theirs).double(), exact, strict=True):
        assert (one - hop).abs().max() <= 2 * (other - hop).abs().max()


def test_opcheck(native) -> None:
    ops = torch.ops.spin_fast
    graphs = random_graphs([3, 0, 4], weighted=True)
    adjacency = (graphs.indptr, graphs.indices)
    x = graphs.x.clone().requires_grad_()
    for ptr in (graphs.ptr, None):
        for weight in (graphs.edge_weight, None):
            torch.library.opcheck(ops.power_features, (*adjacency, x, 2, "sym", ptr, weight, False, True))
            grad = torch.randn(3, 7, 3, requires_grad=True)
            weight = None if weight is None else weight.float()
            torch.library.opcheck(ops.power_features_backward, (*adjacency, grad, "rw", ptr, weight, True))
    out = torch.empty(3, 7, 3, dtype=torch.float64)
    torch.library.opcheck(ops.power_features_out, (*adjacency, graphs.x, 2, "sym", graphs.ptr, None, True, False, out))


def test_compiles_without_graph_break(native) -> None:
    graphs = random_graphs([3, 4])

    def function(x: torch.Tensor) -> torch.Tensor:
        return powers(graphs, 2, x=x).relu().sum()

    x, y = graphs.x.clone().requires_grad_(), graphs.x.clone().requires_grad_()
    torch.compile(function, backend="aot_eager", fullgraph=True)(x).backward()
    function(y).backward()
    torch.testing.assert_close(x.grad, y.grad)


GOOD = random_graphs([2, 3], dtype=torch.float32)
BAD = [
    ({"x": [1.0]}, TypeError, r"x must be a torch.Tensor, got list"),
    ({"x": GOOD.x.long()}, TypeError, r"x must be float32, float64, bfloat16 or float16, got int64"),
    ({"x": GOOD.x[0]}, ValueError, r"x must have shape \[N, d\], got \[3\]"),
    ({"x": GOOD.x.to_sparse()}, TypeError, r"x must be a dense"),
    ({"indptr": GOOD.indptr[:-1]}, ValueError, r"indptr must have shape \[6\], got \[5\]"),
    ({"indptr": GOOD.indptr.float()}, TypeError, r"indptr must be int32 or int64"),
    ({"indptr": GOOD.indptr + 1}, ValueError, r"indptr must start with 0, got 1"),
    ({"indptr": GOOD.indptr.flip(0)}, ValueError, r"indptr must start with 0"),
    ({"indices": GOOD.indices[:-1]}, ValueError, r"indptr must end with the number of indices"),
    ({"indices": GOOD.indices.int()}, TypeError, r"indices must be int64, got int32"),
    ({"indices": GOOD.indices + 5}, ValueError, r"indices must be in \[0, 5\), got indices\[0\]"),
    ({"indices": GOOD.indices - 9}, ValueError, r"indices must be in \[0, 5\)"),
    ({"indices": (GOOD.indices + 2) % 5}, ValueError, r"indices must stay inside the graph of their row"),
    ({"ptr": GOOD.ptr.int()}, TypeError, r"ptr must be int64"),
    ({"ptr": GOOD.ptr[:0]}, ValueError, r"ptr must have at least one entry"),
    ({"ptr": torch.tensor([0, 3, 2, 5])}, ValueError, r"ptr must not decrease, got ptr\[1\] = 3, ptr\[2\] = 2"),
    ({"ptr": torch.tensor([0, 2])}, ValueError, r"ptr must end with the number of nodes, 5, got 2"),
    ({"num_hops": -1}, ValueError, r"num_hops must be at least 0, got -1"),
    ({"num_hops": 1.5}, TypeError, r"num_hops must be an int, got float"),
    ({"num_hops": True}, TypeError, r"num_hops must be an int, got bool"),
    ({"num_hops": 2**63}, ValueError, r"num_hops must be below 2\*\*63, got 9223372036854775808"),
    ({"check_invariants": "yes"}, TypeError, r"check_invariants must be a bool, got str"),
    ({"float64_sums": None}, TypeError, r"float64_sums must be a bool, got NoneType"),
    ({"operator": "gcn"}, ValueError, r"operator must be one of adj, sym, sym\+adj, rw, got 'gcn'"),
    ({"edge_weight": torch.ones(3)}, ValueError, r"edge_weight must have shape"),
    ({"edge_weight": torch.ones(GOOD.num_edges).double()}, TypeError, r"edge_weight must be float32"),
    ({"edge_weight": torch.ones(GOOD.num_edges, requires_grad=True)}, ValueError, r"edge_weight must not require"),
    ({"edge_weight": -torch.ones(GOOD.num_edges)}, ValueError, r"edge_weight must give no negative row sum under sym"),
    ({"out": torch.zeros(2, 5, 3)}, ValueError, r"out must have shape \[3, 5, 3\]"),
    ({"out": torch.zeros(3, 5, 3).double()}, TypeError, r"out must be float32"),
    ({"out": "x", "check_invariants": False}, TypeError, r"out must be a torch.Tensor, got str"),
    ({"out": torch.zeros(3, 5, 6)[..., ::2]}, ValueError, r"out must be contiguous"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_before_anything_is_written(backend: str, change: dict, error: type, message: str) -> None:
    out = torch.full((3, 5, 3), 7.0)
    arguments = {
        "indptr": GOOD.indptr,
        "indices": GOOD.indices,
        "x": GOOD.x,
        "num_hops": 2,
        "operator": "sym",
        "ptr": GOOD.ptr,
        "out": out,
    }
    with pytest.raises(error, match=message):
        spin_fast.power_features(**arguments | change)
    assert bool((out == 7).all())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("size", "num_features"), [(9, 1), (90, 1), (9, 3), (90, 40), (700, 1), (700, 3)]
)  # as words, bits, in chunks, and hop by hop
def test_an_index_of_another_graph_is_never_followed(
    backend: str, size: int, num_features: int, index_dtype: torch.dtype
) -> None:
    graphs = random_graphs([size] * 3, num_features=num_features, density=0.7, dtype=torch.float32)
    for graph, edge in itertools.product(range(3), (0, -1)):
        edges = graphs.indptr[graphs.ptr[graph : graph + 2]].tolist()
        for value in (graphs.num_nodes, -1, -(2**31), 2**31 - 1, int(graphs.ptr[(graph + 1) % 3])):
            indices = graphs.indices.to(index_dtype)
            indices[edges[0] if edge == 0 else edges[1] - 1] = value
            with pytest.raises(ValueError, match=r"^indices must (be|stay) in"):
                spin_fast.power_features(graphs.indptr.to(index_dtype), indices, graphs.x, 2, ptr=graphs.ptr)


def test_out_with_gradients_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="out must not be given where x or out requires a gradient"):
        powers(GOOD, 2, x=GOOD.x.clone().requires_grad_(), out=torch.empty(3, 5, 3))


def test_out_that_shares_memory_or_is_not_aligned_is_refused(backend: str) -> None:
    if backend == "reference":
        pytest.skip("the reference implementation writes out when it has read all")
    memory = torch.zeros(100)
    out, integers = memory[:45].view(3, 5, 3), memory.view(torch.int32)
    graph = (GOOD.indptr.int(), GOOD.indices.int())
    there = {
        "x": (*graph, out[0], None),
        "indptr": (integers[44:50].copy_(graph[0]), graph[1], GOOD.x, None),
        "indices": (graph[0], integers[44 : 44 + GOOD.num_edges].copy_(graph[1]), GOOD.x, None),
        "edge_weight": (*graph, GOOD.x, memory[: GOOD.num_edges]),
    }
    for name, (indptr, indices, x, weight) in there.items():
        before = memory.clone()
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            spin_fast.power_features(indptr, indices, x, 2, "adj", edge_weight=weight, out=out, check_invariants=False)
        assert torch.equal(memory, before)
    apart = torch.zeros(60)
    spin_fast.power_features(*graph, apart[45:].view(5, 3), 2, out=apart[:45].view(3, 5, 3))
    skewed = torch.frombuffer(bytearray(4 * 45 + 1), dtype=torch.float32, offset=1).view(3, 5, 3)
    with pytest.raises(ValueError, match="out must begin at a multiple of the size of its values"):
        powers(GOOD, 2, out=skewed)


@pytest.mark.parametrize("operator", ["sym", "sym+adj", "rw", "adj"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_run_of_the_offsets_is_those_graphs(backend: str, operator: str, weighted: bool) -> None:
    graphs = random_graphs([4, 9, 0, 30, 700, 1, 5], density=0.5, weighted=weighted)
    weight = graphs.edge_weight
    whole = spin_fast.power_features(
        graphs.indptr, graphs.indices, graphs.x, 2, operator, ptr=graphs.ptr, edge_weight=weight
    )
    for begin, end in ((0, 2), (1, 5), (2, 3), (4, 7), (7, 7)):
        ptr = graphs.ptr[begin : end + 1]
        first, last = int(ptr[0]), int(ptr[-1])
        out = torch.empty(3, last - first, 3, dtype=graphs.x.dtype)
        arrays = (graphs.indptr, graphs.indices, graphs.x, 2, operator)
        made = spin_fast.power_features(*arrays, ptr=ptr, edge_weight=weight, out=out, check_invariants=False)
        torch.testing.assert_close(made, whole[:, first:last])
    with pytest.raises(ValueError, match="out must have shape"):
        spin_fast.power_features(*arrays, ptr=graphs.ptr[1:5], out=out.new_empty(3, 5, 3), check_invariants=False)


def sparse_graphs(
    sizes: list[int],
    num_features: int,
    *,
    dtype: torch.dtype = torch.float64,
    index_dtype: torch.dtype = torch.int64,
    weighted: bool = False,
    degrees: tuple[int, int] = (0, 6),
) -> GraphBatch:
    """Directed graphs with rows of so many edges; one row has 100, and one 5,000, in the larger ones."""
    rng = np.random.default_rng(0)
    ptr = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    degree = rng.integers(degrees[0], degrees[1] + 1, ptr[-1])
    for size, heavy in ((40, 100), (3000, 5000)):
        degree[ptr[:-1][np.diff(ptr) >= size] + heavy // 100 - 1] = heavy
    first, nodes = (np.repeat(np.repeat(array, np.diff(ptr)), degree) for array in (ptr[:-1], np.diff(ptr)))
    indices = torch.from_numpy(first + rng.integers(0, nodes))
    return GraphBatch(
        ptr=torch.from_numpy(ptr),
        indptr=torch.from_numpy(np.concatenate([[0], degree.cumsum()])).to(index_dtype),
        indices=indices.to(index_dtype),
        x=torch.from_numpy(rng.standard_normal((int(ptr[-1]), num_features))).to(dtype),
        edge_weight=torch.from_numpy(rng.uniform(0.1, 2.0, len(indices))).to(dtype) if weighted else None,
    )


def assert_close_to_reference(result: torch.Tensor, graphs: GraphBatch, operator: str, tolerance: float) -> None:
    weight = None if graphs.edge_weight is None else graphs.edge_weight.double()
    expected = reference.power_features(
        graphs.indptr, graphs.indices, graphs.x.double(), len(result) - 1, operator, edge_weight=weight
    )
    for power, exact in zip(result.double(), expected, strict=True):
        torch.testing.assert_close(power, exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))


# Many small graphs, so that larger ones are out of the ordinary: some with more and more shared memory on CUDA, some in
# several passes over their columns, some hop by hop.
SIZES = [3, 0, 6, 1] * 150 + [60, 500, 2000, 2700, 4000, 2, 60]


@pytest.mark.parametrize(("num_features", "index_dtype"), [(1, torch.int32), (3, torch.int64), (9, torch.int32)])
@pytest.mark.parametrize("weighted", [False, True])
def test_graphs_out_of_the_ordinary(backend: str, num_features: int, index_dtype: torch.dtype, weighted: bool) -> None:
    graphs = sparse_graphs(SIZES, num_features, dtype=torch.float32, index_dtype=index_dtype, weighted=weighted)
    for operator, float64_sums in zip(OPERATORS, (False, True, False, False), strict=True):
        result = powers(graphs, 2, operator, float64_sums=float64_sums)
        assert_close_to_reference(result, graphs, operator, 2e-6)
        begin, end = len(SIZES) - 6, len(SIZES)  # the large graphs by themselves
        ptr = graphs.ptr[begin : end + 1]
        part = slice(int(ptr[0]), int(ptr[-1]))
        out = torch.empty(3, part.stop - part.start, num_features)
        arrays = (graphs.indptr, graphs.indices, graphs.x, 2, operator)
        options = {"edge_weight": graphs.edge_weight, "float64_sums": float64_sums, "check_invariants": False}
        made = spin_fast.power_features(*arrays, ptr=ptr, out=out, **options)
        if backend == "cuda":  # sums of a graph do not depend on what else is in the batch
            assert torch.equal(made, result[:, part])
        else:
            torch.testing.assert_close(made, result[:, part], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("most", [1, 2, 3, 4])
@pytest.mark.parametrize("num_features", [1, 3, 9, 37, 100])
def test_most_rows_have_few_neighbours(backend: str, most: int, num_features: int) -> None:
    """Where they have, the CPU sums up as many for each row, zeros for those that are missing."""
    sizes = [3, 0, 6, 1] * 20 + [60, 7, 300]
    for operator in OPERATORS:
        dtype = torch.float32 if operator in ("adj", "sym") else torch.float64
        options = {"dtype": dtype, "weighted": operator == "sym", "index_dtype": torch.int32}
        graphs = sparse_graphs(sizes, num_features, degrees=(max(1, most - 1), most), **options)
        result = powers(graphs, 3, operator)
        assert_close_to_reference(result, graphs, operator, 2e-6 if dtype == torch.float32 else 1e-13)
        for g in (0, 2, 4, 6, len(sizes) - 1):  # nor do bits depend on what else is in the batch
            part = slice(*graphs.ptr[g : g + 2].tolist())
            arrays = (graphs.indptr, graphs.indices, graphs.x, 3, operator)
            run = {"ptr": graphs.ptr[g : g + 2], "edge_weight": graphs.edge_weight, "check_invariants": False}
            out = torch.empty_like(result[:, part])
            assert torch.equal(spin_fast.power_features(*arrays, out=out, **run), result[:, part])
        if operator == "adj":
            half = graphs.x.bfloat16()
            exact = powers(graphs, 3, operator, x=half.float())
            torch.testing.assert_close(powers(graphs, 3, operator, x=half).float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_graphs_out_of_the_ordinary_in_other_types(backend: str, dtype: torch.dtype) -> None:
    for num_features in (1, 7):
        graphs = sparse_graphs(SIZES, num_features)
        x = graphs.x.to(dtype)
        for float64_sums in (False, True):
            result = powers(graphs, 2, "sym", x=x, float64_sums=float64_sums)
            assert torch.equal(result[0], x)
            if dtype == torch.float64:
                assert_close_to_reference(result, graphs, "sym", 1e-13)
            else:
                exact = powers(graphs, 2, "sym", x=x.float(), float64_sums=float64_sums)
                torch.testing.assert_close(result, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("num_features", [1, 17, 150])
@pytest.mark.parametrize("operator", OPERATORS)
def test_dense_graphs(backend: str, num_features: int, operator: str) -> None:
    """All rows are long; one graph has more edges than shared memory holds."""
    graphs = random_graphs([60, 0, 350 if num_features < 100 else 120], 1.0, num_features, dtype=torch.float32)
    for float64_sums in (False, True):
        assert_close_to_reference(powers(graphs, 2, operator, float64_sums=float64_sums), graphs, operator, 1e-6)


@pytest.mark.parametrize("float64_sums", [False, True])
def test_same_bits_whatever_other_graphs_there_are(native, float64_sums: bool) -> None:
    """So what a graph gets does not depend on how a batch is cut into chunks, and that on the number of threads."""
    graphs = random_graphs([220] * 9, 1.0, 128, dtype=torch.float32)
    together = powers(graphs, float64_sums=float64_sums)
    alone = torch.cat([powers(graphs[[i]], float64_sums=float64_sums) for i in range(len(graphs))], 1)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_features", [4, 12])
def test_same_bits_wherever_tensors_begin(backend: str, num_features: int, dtype: torch.dtype) -> None:
    """Rows of whole vectors are read and written as such only where they are aligned."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)

    graphs = sparse_graphs([40, 900, 3300], num_features, dtype=torch.float32, weighted=True)
    weight = graphs.edge_weight.to(torch.float64) if dtype == torch.float64 else graphs.edge_weight
    x, adjacency = graphs.x.to(dtype), (graphs.indptr, graphs.indices)
    expected = reference.power_features(*adjacency, x.double(), 2, "sym+adj", edge_weight=weight.double())
    for ptr in (graphs.ptr, None):
        options = {"ptr": ptr, "edge_weight": weight}
        out = torch.empty(3, *x.shape, dtype=dtype)
        spin_fast.power_features(*adjacency, x, 2, "sym+adj", out=out, **options)
        error = (out.double() - expected).abs().amax() / expected.abs().amax()
        assert error <= max(1e-6, torch.finfo(dtype).eps)
        for begin, end in ((x, moved(out)), (moved(x), torch.empty_like(out)), (moved(x), moved(out))):
            spin_fast.power_features(*adjacency, begin, 2, "sym+adj", out=end, **options)
            assert torch.equal(end, out)
    if dtype == torch.bfloat16:
        return
    backward = torch.ops.spin_fast.power_features_backward.default
    results = [backward(*adjacency, grad, "sym", graphs.ptr, weight, False) for grad in (out, moved(out))]
    assert torch.equal(*results)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_through_a_hub(backend: str, operator: str, weighted: bool) -> None:
    """Rows of the adjacency and of its transpose that are longer than a piece."""
    graphs = sparse_graphs([10, 3500], 2, weighted=weighted)
    hub = torch.arange(0, graphs.num_edges, 2)
    indices = graphs.indices.clone()
    indices[hub[hub >= int(graphs.indptr[10])]] = 11
    graphs = replace(graphs, indices=indices)
    grads = []
    for path in (
        powers,
        lambda g, r, op, x: reference.power_features(g.indptr, g.indices, x, r, op, edge_weight=g.edge_weight),
    ):
        x = graphs.x.clone().requires_grad_()
        path(graphs, 3, operator, x=x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11 * float(grads[1].abs().max()))


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("num_features", [1, 8, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_in_any_order_of_threads(backend: str, num_features: int, dtype: torch.dtype) -> None:
    graphs = sparse_graphs([3] * 40 + [60, 900, 3300, 60], num_features, dtype=torch.float32, weighted=True)
    results = []
    try:
        for order in (0, 1, 2):
            cuda_kernels.kernels().set_order(order)
            for block, float64_sums in ((True, False), (True, True), (False, False)):
                x = graphs.x.to(dtype).requires_grad_()
                result = powers(graphs, 2, "sym+adj", x=x, block=block, float64_sums=float64_sums)
                result.float().square().sum().backward()
                results.append((result.detach(), x.grad))
    finally:
        cuda_kernels.kernels().set_order(0)
    for i, (result, grad) in enumerate(results):
        assert torch.equal(result, results[i % 3][0])
        assert torch.equal(grad, results[i % 3][1])


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("operator", ["sym", "sym+adj"])
def test_negative_sums_give_nan_where_nothing_can_be_raised(backend: str, operator: str) -> None:
    graphs = random_graphs([4, 5], density=1.0, num_features=2, weighted=True)
    weight = graphs.edge_weight.clone()
    weight[int(graphs.indptr[5]) : int(graphs.indptr[6])] *= -1
    op = torch.ops.spin_fast.power_features.default
    for ptr in (graphs.ptr, None):
        result = op(graphs.indptr, graphs.indices, graphs.x, 1, operator, ptr, weight, False, False)
        clean = op(graphs.indptr, graphs.indices, graphs.x, 1, operator, ptr, graphs.edge_weight, False, False)
        assert bool(result[1, 5].isnan().all())
        torch.testing.assert_close(result[:, :4], clean[:, :4])
