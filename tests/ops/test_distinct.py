"""distinct_rows: the native operation, its reference implementation and an oracle by dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import cuda_kernels
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import spin_fast
from spin_fast import datasets, ops, reference
from spin_fast.ops import distinct

pytestmark = pytest.mark.usefixtures("poison")
NAMES = ("rows", "row_ptr", "ptr", "index", "count", "row_of_node")
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), 1.0 + 2**-7]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
Distinct = tuple[torch.Tensor, ...]


@pytest.fixture(params=["cpu", "cuda"])
def kernel(native, request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels that the operation has: it is the same for every instruction set."""
    if request.param == "cpu":
        yield "cpu"
        return
    with cuda_kernels.standing_in():
        yield "cuda"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(WORDS[x.dtype.itemsize])


def native_distinct(powers: torch.Tensor, ptr: torch.Tensor, wide: bool = False, hash_bits: int = 64) -> Distinct:
    return torch.ops.spin_fast.distinct_rows(powers, ptr, wide, hash_bits, True)


def assert_same(one: Distinct, other: Distinct) -> None:
    for name, a, b in zip(NAMES, one, other, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(bits(a) if a.is_floating_point() else a, bits(b) if b.is_floating_point() else b), name


def by_dictionary(powers: torch.Tensor, ptr: torch.Tensor) -> list[list]:
    """The words of the distinct rows, and all that refers to them, as lists."""
    words = bits(powers)
    sign = torch.iinfo(words.dtype).min
    rows, row_ptr, ends, index, count, row_of_node = [], [0], [0], [], [], []
    for branch in words.masked_fill(words == sign, 0).tolist():
        seen: dict[tuple, int] = {}
        numbers = [seen.setdefault(tuple(row), row_ptr[-1] + len(seen)) for row in branch]
        rows += seen
        row_ptr.append(row_ptr[-1] + len(seen))
        row_of_node.append(numbers)
        for begin, end in pairwise(ptr.tolist()):
            there = sorted(set(numbers[begin:end]))
            index += there
            count += [numbers[begin:end].count(row) for row in there]
            ends.append(len(index))
    return [list(map(list, rows)), row_ptr, ends, index, count, row_of_node]


@st.composite
def powers_and_ptr(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of few values, so that they repeat; empty graphs, no graphs, no features."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ptr = torch.tensor([0, *np.cumsum(draw(st.lists(st.integers(0, 40), max_size=6)), dtype=np.int64)])
    shape = (draw(st.integers(1, 3)), int(ptr[-1]), draw(st.integers(0, 20)))
    values = torch.tensor(VALUES[: draw(st.integers(1, len(VALUES)))]).to(draw(st.sampled_from(DTYPES)))
    pool = values[torch.from_numpy(rng.integers(0, len(values), (draw(st.integers(1, 12)), shape[2])))]
    return pool[torch.from_numpy(rng.integers(0, len(pool), shape[:2]))], ptr


@given(case=powers_and_ptr(), wide=st.booleans(), hash_bits=st.sampled_from([0, 1, 3, 64]))
def test_equals_oracle(kernel: str, case: tuple[torch.Tensor, torch.Tensor], wide: bool, hash_bits: int) -> None:
    """With fewer bits of the hash rows collide, and only the comparison of bits tells them apart."""
    dtype = torch.int64 if wide else torch.int32
    made = native_distinct(*case, wide, hash_bits)
    assert [bits(made[0]).tolist(), *(value.tolist() for value in made[1:])] == by_dictionary(*case)
    assert_same(made, reference.distinct_rows(*case, index_dtype=dtype, hash_bits=hash_bits))
    assert_same(made, ops.distinct_rows(*case, index_dtype=dtype))


@pytest.mark.parametrize(
    ("branches", "width", "sizes"),
    [(1, 3, []), (2, 0, []), (2, 3, [0, 0]), (1, 0, [0, 4, 0]), (3, 0, [1, 3]), (3, 2, [0, 0, 5]), (1, 1, [1])],
)
@pytest.mark.parametrize("hash_bits", [0, 64])
def test_empty(kernel: str, branches: int, width: int, sizes: list[int], hash_bits: int) -> None:
    """No graphs, no nodes, no features; graphs without nodes; one of each."""
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    case = (torch.arange(branches * sum(sizes) * width).view(branches, sum(sizes), width) % 3 / 2, ptr)
    made = native_distinct(*case, hash_bits=hash_bits)
    assert [bits(made[0]).tolist(), *(value.tolist() for value in made[1:])] == by_dictionary(*case)
    assert_same(made, reference.distinct_rows(*case))


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, 1), (torch.float32, 40), (torch.float64, 3), (torch.bfloat16, 5), (torch.float16, 2)],
)
def test_any_order_of_cuda_threads(native, dtype: torch.dtype, width: int) -> None:
    """Graphs of more nodes than a block has threads; rows that repeat far apart, and in other graphs and branches."""
    generator = torch.Generator().manual_seed(width)
    ptr = torch.tensor([0, 1, 0, 31, 300, 0, 64, 5]).cumsum(0)
    pool = torch.randint(-1, 2, (25, width), generator=generator).to(dtype)
    pool[:2], pool[1, -1] = 1, 2  # told apart by the last column alone
    powers = pool[torch.randint(0, len(pool), (2, int(ptr[-1])), generator=generator)]
    expected = reference.distinct_rows(powers, ptr)
    with cuda_kernels.standing_in() as kernels:
        for order, hash_bits, wide in ((0, 64, True), (1, 3, False), (2, 1, True), (3, 3, True), (4, 64, False)):
            kernels.set_order(order)
            try:
                rows, row_ptr, ends, index, count, row_of_node = native_distinct(powers, ptr, wide, hash_bits)
            finally:
                kernels.set_order(0)
            assert index.dtype == row_of_node.dtype == (torch.int64 if wide else torch.int32)
            assert_same((rows, row_ptr, ends, index.int(), count, row_of_node.int()), expected)


@given(case=powers_and_ptr(), data=st.data(), node_rows=st.booleans())
def test_parts_are_as_one(
    backend: str, case: tuple[torch.Tensor, torch.Tensor], data: st.DataObject, node_rows: bool
) -> None:
    """Cut between graphs, also where there are none; with room for all or too little."""
    powers, ptr = case
    powers = powers.double() if powers.dtype.itemsize == 2 else powers
    at_once = data.draw(st.booleans())  # each chunk as a whole, as on a GPU
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ptr) - 1), max_size=4)))
    most = {"num_nodes": powers.shape[1], "num_graphs": len(ptr) - 1}
    room = data.draw(st.sampled_from([most, {}, {"num_nodes": 3, "num_graphs": 9}]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct, "KNOWN_ROWS", data.draw(st.sampled_from([1, 3, 1 << 16])))
        patch.setattr(distinct, "WIDE", data.draw(st.sampled_from([0, 20, 2**31])))
        patch.setattr(ops.DistinctRows, "_is_sparse", data.draw(st.sampled_from([None, True, False])))
        if at_once:
            patch.setattr(distinct, "has_kernel_of_chunks", lambda _: False)
        found = ops.DistinctRows(len(powers), powers[0], **room, node_rows=node_rows)
        for begin, end in pairwise([0, *cuts, len(ptr) - 1]):
            part = powers[:, ptr[begin] : ptr[end]].clone()
            found.add(part, ptr[begin : end + 1] - ptr[begin])
            part.fill_(7)
        expected = ops.distinct_rows(powers, ptr)
        assert (found.num_rows, found.num_graphs) == (len(expected[0]), len(ptr) - 1)
        rows, *made, row_of_node = found.take()
    made.insert(0, rows.to_dense())
    assert_same((*made, expected[-1] if row_of_node is None else row_of_node), expected)
    assert (row_of_node is None) != node_rows


@pytest.mark.parametrize(("num_branches", "width"), [(2, 1), (2, 37), (5, 3)])
def test_many_parts(native, num_branches: int, width: int, threads: None) -> None:
    """The table of all rows is made anew as it fills; the result does not depend on threads.

    Two threads share each of two branches, but take five one by one. Lists of up to 128 nodes are sorted, longer ones
    counted.
    """
    generator = torch.Generator().manual_seed(width)
    sizes = torch.tensor([30] * 9 + [300]).repeat(300)
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    pool = torch.randn(40_000, width, generator=generator)
    powers = pool[torch.randint(0, len(pool), (num_branches, int(ptr[-1])), generator=generator)]
    torch.set_num_threads(1)
    expected = ops.distinct_rows(powers, ptr)
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        assert_same(ops.distinct_rows(powers, ptr), expected)
        found = ops.DistinctRows(num_branches, powers[0], num_graphs=len(sizes) if number == 1 else 0)
        for graph in range(0, 3000, 250):
            end = graph + 250
            found.add(powers[:, ptr[graph] : ptr[end]].contiguous(), ptr[graph : end + 1] - ptr[graph])
        assert_same(found.take(), expected)


@pytest.mark.parametrize("node_rows", [True, False])
def test_wrong_parts_are_refused(native, node_rows: bool) -> None:
    powers, ptr = torch.ones(2, 5, 3), torch.tensor([0, 2, 5])
    found = ops.DistinctRows(2, powers[0], num_nodes=5, num_graphs=2, node_rows=node_rows)
    with pytest.raises(ValueError, match="ptr must end with the number of nodes, 4, got 5"):
        found.add(powers[:, :4].contiguous(), ptr)
    for wrong in (powers[:1], powers[:, :, :2], powers.double(), torch.ones(2, 3, 5).transpose(1, 2)):
        with pytest.raises(ValueError, match=r"powers must be \[branches, N, d\]"):
            found.add(wrong, ptr)
    found.add(powers, ptr)
    assert len(found.take()[0]) == 2
    assert len(found.take()[0]) == 0
    for sparse in (True, False):
        taken = native.DistinctRows(2, 5, 3, 2, 4, False, node_rows, sparse, [])
        for _ in range(2):
            taken.take()
            taken.add(powers[:, :0].numpy(), ptr[:1].numpy())
    full = native.DistinctRows(2, 0, 3, 0, 4, False, node_rows, None, [])
    with pytest.raises(ValueError, match="powers must have at most the 0 nodes that are left, got 5"):
        full.add(powers.numpy(), ptr.numpy())


def test_compares_bits(backend: str) -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
    x = torch.stack([torch.cat([torch.tensor([0.0, -0.0, 1.0, -1.0]), nan, nan[:1]]), torch.ones(9)], 1)
    rows, _, _, _, count, row_of_node = ops.distinct_rows(x[None], torch.tensor([0, 9]))
    assert row_of_node.tolist() == [[0, 0, 1, 2, 3, 4, 5, 6, 3]]
    assert count.tolist() == [2, 1, 1, 2, 1, 1, 1]
    assert torch.equal(bits(rows[3:, 0]), bits(nan))
    assert not torch.signbit(rows[0, 0])
    tiny = torch.tensor([1.0, 1.0 + 2**-52, 1.0], dtype=torch.float64).view(1, 3, 1)
    assert ops.distinct_rows(tiny, torch.tensor([0, 3]))[5].tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 16, 89, 2047, 2048])
def test_one_hot_rows_among_others(backend: str, width: int, dtype: torch.dtype) -> None:
    """A row with a single 1 is known by its column: not one with another value, with several, with none or with -0."""
    generator = torch.Generator().manual_seed(width)
    columns = torch.randint(0, width, (12,), generator=generator)
    one_hot = torch.nn.functional.one_hot(columns, width).to(dtype)
    odd = torch.stack([one_hot[0] * 2, one_hot[:6].sum(0), one_hot[0] * 0, -one_hot[1], one_hot[2] * -0.0, one_hot[3]])
    odd[-1, 0] += 1
    nodes = 2500 if width < 100 else 700  # of several calls, where that takes no time
    for share in (0, 0.02, 0.5):
        is_odd = torch.rand(2, nodes, generator=generator) < share
        numbers = torch.where(is_odd, torch.randint(12, 18, (2, nodes), generator=generator), torch.arange(nodes) % 12)
        powers = torch.cat([one_hot, odd])[numbers]
        ptr = torch.tensor([0, 1, 300, 300, nodes])
        assert_same(ops.distinct_rows(powers, ptr), reference.distinct_rows(powers, ptr))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_lists_of_every_length(backend: str, index_dtype: torch.dtype) -> None:
    """Rows of a small graph are sorted in registers, which some lengths fill."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.arange(140).repeat(2)[torch.randperm(280, generator=generator)]
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    for most in (1, 20, 10_000):
        powers = torch.randint(0, most, (2, int(ptr[-1]), 1), generator=generator).float()
        made = ops.distinct_rows(powers, ptr, index_dtype=index_dtype)
        assert [bits(made[0]).tolist(), *(value.tolist() for value in made[1:])] == by_dictionary(powers, ptr)


@pytest.mark.parametrize("repeats", [1, 3, 40_000])
@pytest.mark.parametrize("width", [1, 2, 37])
def test_graphs_of_all_sizes(native, repeats: int, width: int, threads: None) -> None:
    """Blocks, parts and threads: a graph's rows may repeat far apart, and in other graphs."""
    generator = torch.Generator().manual_seed(repeats)
    sizes = torch.tensor([1, 0, 9000, 3, 64, 65, 0, 4096, 4097, *[30] * 900, 0])
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    num_nodes = int(ptr[-1])
    pool = torch.randn(2, num_nodes // repeats + 1, width, generator=generator)
    powers = torch.stack([rows[torch.randint(0, len(rows), (num_nodes,), generator=generator)] for rows in pool])
    expected = reference.distinct_rows(powers, ptr)
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        assert_same(native_distinct(powers, ptr), expected)
    assert_same(native_distinct(powers, ptr, hash_bits=20), expected)


def test_one_graph_of_a_million_nodes(native, threads: None) -> None:
    powers = torch.randint(0, 700, (2, 1_000_000, 2), generator=torch.Generator().manual_seed(0)).float()
    for number in (1, 2):
        torch.set_num_threads(number)
        rows, row_ptr, ptr, index, count, row_of_node = ops.distinct_rows(powers, torch.tensor([0, 1_000_000]))
        assert torch.equal(rows[row_of_node], powers)
        assert row_ptr.diff().tolist() == [len(torch.unique(x[:, 0] * 700 + x[:, 1])) for x in powers]
        assert torch.equal(index, torch.arange(len(rows)))
        assert torch.equal(count.long(), torch.bincount(row_of_node.flatten()))
        assert ptr.tolist() == row_ptr.tolist()


@pytest.mark.parametrize(
    "name",
    [
        "digits",
        "PROTEINS",
        "IMDB-BINARY",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("NCI1", "ENZYMES", "DD", "IMDB-MULTI")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("REDDIT-BINARY", "COLLAB", "ogbg-molhiv")),
    ],
)
def test_rows_of_nodes_are_the_powers_on_real_data(name: str, native, request: pytest.FixtureRequest) -> None:
    graphs = datasets.load(name, None if name == "digits" else request.getfixturevalue("data_root"))
    powers = spin_fast.power_features(
        graphs.indptr, graphs.indices, graphs.x, 3, "sym", ptr=graphs.ptr, float64_sums=True, check_invariants=False
    )
    made = native_distinct(powers, graphs.ptr)
    rows, _, ptr, _, count, row_of_node = made
    assert torch.equal(bits(rows[row_of_node]), bits(powers + 0.0))
    nodes = torch.cat([count.new_zeros(1), count.cumsum(0)])[ptr].diff()
    assert torch.equal(nodes.view(4, -1), graphs.num_nodes_per_graph.expand(4, -1))
    if graphs.num_nodes < 200_000:
        assert_same(made, reference.distinct_rows(powers, graphs.ptr))


def test_opcheck(kernel: str) -> None:
    op, ptr = torch.ops.spin_fast.distinct_rows, torch.tensor([0, 2, 2, 5])
    for dtype in DTYPES:
        torch.library.opcheck(op, (torch.randint(0, 2, (2, 5, 3)).to(dtype), ptr, dtype.itemsize == 2, 64, True))
    torch.library.opcheck(op, (torch.empty(1, 0, 3), torch.tensor([0]), False, 64, False))


def test_only_the_sizes_of_the_branches_come_to_the_cpu(native) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        powers, ptr = torch.empty(2, 5, 3, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
        made = torch.ops.spin_fast.distinct_rows(powers, ptr, False, 64, False)
    assert [value.device.type for value in made] == ["cuda", "cpu", "cuda", "cuda", "cuda", "cuda"]


def test_takes_what_is_not_contiguous_and_needs_a_gradient(backend: str) -> None:
    powers = torch.randint(0, 2, (6, 5, 4)).float().transpose(0, 1)[:, ::2].requires_grad_()
    ptr = torch.tensor([0, 9, 2, 9, 3, 9])[::2]
    made = ops.distinct_rows(powers, ptr)
    assert_same(made, ops.distinct_rows(powers.detach().contiguous(), ptr.contiguous()))
    assert not made[0].requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"powers": [[1.0]]}, TypeError, "powers must be a torch.Tensor, got list"),
        ({"powers": torch.ones(2, 5, 3).int()}, TypeError, "powers must be float32, .*got int32"),
        ({"powers": torch.ones(5, 3)}, ValueError, r"powers must have shape \[branches, N, d\], got \[5, 3\]"),
        ({"powers": torch.ones(0, 5, 3)}, ValueError, "powers must have at least 1 branch, got 0"),
        ({"ptr": torch.tensor([0, 5]).int()}, TypeError, "ptr must be int64, got int32"),
        ({"ptr": torch.tensor([], dtype=torch.int64)}, ValueError, "ptr must have at least one entry"),
        ({"ptr": torch.tensor([1, 5])}, ValueError, "ptr must start with 0, got 1"),
        ({"ptr": torch.tensor([0, 4, 3, 5])}, ValueError, r"ptr must not decrease, got ptr\[1\] = 4, ptr\[2\] = 3"),
        ({"ptr": torch.tensor([0, 6])}, ValueError, "ptr must end with the number of nodes, 5, got 6"),
        ({"check_invariants": 0.5}, TypeError, "check_invariants must be a bool, got float"),
        ({"index_dtype": torch.int16}, TypeError, "index_dtype must be torch.int32 or torch.int64, got torch.int16"),
    ],
)
def test_wrong_arguments_are_named(backend: str, change: dict, error: type[Exception], message: str) -> None:
    arguments = {"powers": torch.ones(2, 5, 3), "ptr": torch.tensor([0, 2, 5])} | change
    with pytest.raises(error, match=message):
        ops.distinct_rows(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"powers": torch.ones(5, 3)},
        {"powers": torch.ones(5, 2, 3).transpose(0, 1)},
        {"powers": torch.ones(2, 5, 3).int()},
        {"powers": torch.ones(0, 5, 3)},
        {"ptr": torch.tensor([0, 2, 5]).int()},
        {"ptr": torch.tensor([], dtype=torch.int64)},
        {"hash_bits": 65},
        {"hash_bits": -1},
    ],
)
def test_a_raw_call_checks_metadata(kernel: str, change: dict) -> None:
    arguments = {"powers": torch.ones(2, 5, 3), "ptr": torch.tensor([0, 2, 5])} | change
    with pytest.raises(ValueError, match=f"{next(iter(change))} must "):
        native_distinct(**arguments)


def test_a_raw_call_checks_contents(native) -> None:
    for ptr in ([0, 6], [0, -3, 5]):
        with pytest.raises(ValueError, match="ptr must "):
            native_distinct(torch.ones(2, 5, 3), torch.tensor(ptr))
