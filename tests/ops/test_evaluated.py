"""EvaluatedRows: branch_readout of chunk after chunk, in which equal rows go through the MLPs once."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import ISAS, random_graphs, same_by_any_threads
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import ops
from spin_fast.ops import evaluated
from spin_fast.ops.parameters import flat_parameters

pytestmark = pytest.mark.usefixtures("poison")
Mlp = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]


def new_mlp(
    branches: int, widths: list[int], attention: bool, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Mlp:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    weights = [random(branches, a, b) for a, b in pairwise(widths)]
    return (
        weights,
        [random(branches, width) for width in widths[1:]],
        random(branches, widths[-1]) if attention else None,
    )


def readouts(mlp: Mlp, powers: torch.Tensor, ptr: torch.Tensor, cuts: list[int], num_nodes: int) -> torch.Tensor:
    """Of chunks of the graphs between the cuts."""
    rows = ops.EvaluatedRows(*mlp, negative_slope=0.1, num_nodes=num_nodes)
    chunks = []
    for begin, end in pairwise([0, *cuts, len(ptr) - 1]):
        offsets = ptr[begin : end + 1]
        chunk = powers[:, int(offsets[0]) : int(offsets[-1])].contiguous()
        assert rows.takes(chunk.shape[1])
        chunks.append(rows.readout(chunk, offsets - offsets[0]))
    return torch.cat(chunks)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int], Mlp]:
    """Rows that repeat, or not; zeros of both signs; empty graphs, no graphs, no features; cuts between graphs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    sizes = draw(st.lists(st.integers(0, 70), max_size=8))
    ptr = torch.tensor([0, *np.cumsum(sizes, dtype=np.int64)])
    cuts = sorted(draw(st.lists(st.integers(0, len(sizes)), max_size=30)))
    branches, width = draw(st.integers(1, 3)), draw(st.integers(0, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 0.3], dtype=dtype)
    pool = values[torch.from_numpy(rng.integers(0, len(values), (draw(st.sampled_from([1, 5, 500])), width)))]
    powers = pool[torch.from_numpy(rng.integers(0, len(pool), (branches, int(ptr[-1]))))]
    widths = [width, *draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))]
    return powers, ptr, cuts, new_mlp(branches, widths, draw(st.booleans()), dtype)


@given(case=cases(), spare=st.integers(0, 100))
def test_equals_branch_readout(native, case: tuple[torch.Tensor, torch.Tensor, list[int], Mlp], spare: int) -> None:
    """With room for the rows of all nodes, or hardly more than for those of the largest chunk."""
    powers, ptr, cuts, mlp = case
    expected = ops.branch_readout(powers, *mlp, ptr, negative_slope=0.1)
    largest = max(int(ptr[end] - ptr[begin]) for begin, end in pairwise([0, *cuts, len(ptr) - 1]))
    for num_nodes in (powers.shape[1], min(largest + spare, powers.shape[1])):
        made = readouts(mlp, powers, ptr, cuts, num_nodes)
        if powers.shape[2] == 1:  # which branch_readout computes in another way
            largest_value = float(expected.abs().max()) if expected.numel() else 0.0
            error = 64 * torch.finfo(expected.dtype).eps * (1 + largest_value)  # of sums in which values cancel
            torch.testing.assert_close(made, expected, rtol=0, atol=error)
        else:
            assert torch.equal(made, expected)


@pytest.mark.parametrize("backend", ISAS, indirect=True)
@pytest.mark.parametrize("distinct", [50, 100_000])
@pytest.mark.parametrize("graphs_of_chunk", [10, 30, 900])
def test_many_chunks_and_threads(backend: str, threads: None, distinct: int, graphs_of_chunk: int) -> None:
    """Long enough for branches to go without the table, to try again, and to forget; the same with two threads."""
    generator = torch.Generator().manual_seed(1)
    ptr = torch.arange(0, 90_001, 50)
    pool = torch.randn(distinct, 7, generator=generator)
    powers = pool[torch.randint(0, distinct, (3, int(ptr[-1])), generator=generator)]
    powers[0] = pool[:1]  # a branch of which all rows are equal
    mlp, cuts = new_mlp(3, [7, 32, 32], True), [*range(graphs_of_chunk, len(ptr) - 1, graphs_of_chunk)]
    expected = ops.branch_readout(powers, *mlp, ptr, negative_slope=0.1)
    for number, room in ((1, 90_000), (2, 60 * graphs_of_chunk)):
        torch.set_num_threads(number)
        assert torch.equal(readouts(mlp, powers, ptr, cuts, room), expected)


def test_room_that_is_full(native) -> None:
    """Rows are read by whole registers of them, for which there is memory; a thread of its own has no other."""
    powers = torch.randn(1, 4993, 5, generator=torch.Generator().manual_seed(0))  # one more than whole registers
    mlp, ptr, made = new_mlp(1, [5, 64], True), torch.tensor([0, 4000, 4993]), []
    thread = threading.Thread(target=lambda: made.append(readouts(mlp, powers, ptr, [], 4993)))
    thread.start()
    thread.join()
    assert torch.equal(made[0], ops.branch_readout(powers, *mlp, ptr, negative_slope=0.1))


def test_graph_that_is_taken_piece_by_piece(native) -> None:
    powers, ptr = torch.randn(4, 5000, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 5000])
    mlp = new_mlp(4, [3, 256], True)
    expected = ops.branch_readout(powers, *mlp, ptr, negative_slope=0.1)
    torch.testing.assert_close(readouts(mlp, powers, ptr, [], 5000), expected, rtol=1e-4, atol=1e-4)


def test_rows_with_nan_and_infinity(native) -> None:
    powers = torch.tensor([[[1.0, float("nan")], [2.0, float("inf")], [1.0, float("nan")], [0.0, 1.0]]])
    mlp, ptr = new_mlp(1, [2, 5], False), torch.tensor([0, 1, 2, 3, 4])
    expected = ops.branch_readout(powers, *mlp, ptr, negative_slope=0.1)
    torch.testing.assert_close(readouts(mlp, powers, ptr, [2], 4), expected, rtol=0, atol=0, equal_nan=True)


def test_memory_is_bounded(native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluated, "MOST_BYTES", 100 * 2 * ((3 + 16 + 2) * 4 + 40))
    rows = ops.EvaluatedRows(*new_mlp(2, [3, 8], True), negative_slope=0.1, num_nodes=1000)
    assert rows.takes(100)
    assert not rows.takes(101)
    assert 5000 // rows.bytes_of_node(random_graphs([3]), 5000) == 50


def test_arguments_of_the_library_are_checked(native) -> None:
    weights, biases, w = new_mlp(2, [3, 4], True)
    flat = flat_parameters(weights, biases, w).numpy()
    good = [flat, 3, 2, [4], True, 0.1, 10, []]
    rows, powers, ptr = native.EvaluatedRows(*good), np.zeros((2, 5, 3), np.float32), np.array([0, 2, 5])
    assert rows.readout(powers, ptr).shape == (2, 8)
    for place, value, message in (
        (0, flat[:-1], "parameters must be 40, got 39"),
        (1, -1, "features must be at least 0, got -1"),
        (2, 0, "num_branches must be at least 1, got 0"),
        (3, [], "widths must have 1 to 8 layers, got 0"),
        (5, float("nan"), "negative_slope must be finite and at least 0, got nan"),
        (6, -1, "room must be at least 0 and below 2.31, got -1"),
        (6, 2**31, "room must be at least 0 and below 2.31, got 2147483648"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            native.EvaluatedRows(*good[:place], value, *good[place + 1 :])
    with pytest.raises(TypeError):
        native.EvaluatedRows(flat.astype(np.float16), *good[1:])
    contiguous = "powers must be .branches, N, d., contiguous, and of the dtype of all chunks"
    for bad, message in (
        ((powers[:1], ptr), contiguous),
        ((powers.astype(np.float64), ptr), contiguous),
        ((powers[..., ::-1], ptr), contiguous),
        ((np.zeros((2, 11, 3), np.float32), np.array([0, 11])), "powers must have at most 10 nodes, got 11"),
        ((powers, ptr[:0]), "ptr must have at least one entry"),
        ((powers, np.array([0, 4])), "ptr must end with the number of nodes, 5, got 4"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            rows.readout(*bad)


@given(data=st.data())
def test_scores_are_those_of_the_modules(native, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    num_graphs, widths = data.draw(st.integers(0, 150)), data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=5))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = [torch.nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)]
        readouts = torch.randn(num_graphs, widths[0], dtype=dtype)
    expected = readouts
    for layer in linear[:-1]:
        expected = torch.nn.functional.leaky_relu(layer(expected), 0.1)
    classify = ops.classifier_of([layer.weight for layer in linear], [layer.bias for layer in linear], 0.1)
    scores = classify(readouts)
    torch.testing.assert_close(scores, linear[-1](expected))
    cut = data.draw(st.integers(0, num_graphs))
    assert torch.equal(torch.cat([classify(readouts[:cut]), classify(readouts[cut:])]), scores)


def test_scores_do_not_depend_on_the_number_of_threads(native, threads: None) -> None:
    layers = [torch.nn.Linear(128, 64), torch.nn.Linear(64, 3)]
    classify = ops.classifier_of([layer.weight for layer in layers], [layer.bias for layer in layers], 0.1)
    readouts = torch.randn(1001, 128)
    same_by_any_threads(lambda: classify(readouts))


def test_arguments_of_class_scores_are_checked(native) -> None:
    readouts, parameters = np.zeros((5, 3), np.float32), np.zeros(4 * 2 + 3, np.float32)
    assert native.class_scores(readouts, parameters, [2, 1], 0.1).shape == (5, 1)
    for bad, message in (
        ((readouts[0], parameters, [2, 1], 0.1), "readouts must be .G, k., got 1 dimensions"),
        ((readouts, parameters[1:], [2, 1], 0.1), "parameters must be 11, got 10"),
        ((readouts, parameters, [], 0.1), "classifier_widths must have 1 to 8 layers, got 0"),
        ((readouts, parameters, [2, 0], 0.1), "classifier_widths must be at least 1, got 0"),
        ((readouts, parameters, [2, 1], -0.1), "negative_slope must be finite and at least 0, got -0.1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            native.class_scores(*bad)
    with pytest.raises(TypeError):
        native.class_scores(readouts.astype(np.float64), parameters, [2, 1], 0.1)
