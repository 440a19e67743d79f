"""Joint rows: against a dictionary of tuples, and what an op refuses of them."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from helpers import index_dtypes
from hypothesis import given

from spin_fast import branch_readout, ops


@given(
    sizes=st.lists(st.integers(0, 6), max_size=5),
    num_branches=st.integers(1, 5),
    num_rows=st.integers(1, 4),
    dtype=index_dtypes,
    seed=st.integers(0, 99),
)
def test_are_the_distinct_tuples(
    backend: str, sizes: list[int], num_branches: int, num_rows: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(num_rows, (num_branches, sum(sizes)), generator=generator).to(dtype)
    found = ops.joint_rows(numbers, torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0))
    assert found.parts.dtype == dtype
    tuples = [tuple(row) for row in numbers.T.tolist()]
    parts = [tuple(row) for row in found.parts.tolist()]
    assert parts == [*dict.fromkeys(tuples)]  # by first appearance
    first = 0
    for graph, size in enumerate(sizes):
        entries = slice(int(found.ptr[graph]), int(found.ptr[graph + 1]))
        times = zip(found.index[entries].tolist(), found.count[entries].tolist(), strict=True)
        assert {parts[row]: count for row, count in times} == Counter(tuples[first : first + size])
        first += size


@pytest.mark.parametrize(
    ("row_of_node", "ptr", "error", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), TypeError, "row_of_node must be int32 or int64, got float32"),
        (torch.zeros(2, 3).long(), torch.tensor([0, 99]), ValueError, "ptr must end with the number of nodes, 3"),
    ],
)
def test_bad_nodes_are_named(
    backend: str, row_of_node: torch.Tensor, ptr: torch.Tensor, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        ops.joint_rows(row_of_node, ptr)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (torch.tensor([[0, 3], [1, 1]]), ValueError, r"parts must be in \[0, 3\), got 0 to 3"),
        (torch.tensor([[0, -1], [1, 1]]), ValueError, r"parts must be in \[0, 3\), got -1 to 1"),
        (torch.zeros(2, 0, dtype=torch.int64), ValueError, "parts must have at least 1 column, got 0"),
        (torch.zeros(2, 2), TypeError, "parts must be int32 or int64, got float32"),
        (torch.zeros(4, dtype=torch.int64), ValueError, r"parts must have shape \[J, k\], got \[4\]"),
        (torch.zeros(3, 2, dtype=torch.int64), ValueError, "ptr must end with the number of rows of z, 3, got 2"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"weights\[0\] must have shape \[1, 6, d_out\]"),
    ],
)
def test_bad_parts_are_named(backend: str, parts: torch.Tensor, error: type, message: str) -> None:
    layers = [torch.ones(1, 4, 2)], [torch.ones(1, 2)]
    with pytest.raises(error, match=message):
        branch_readout(torch.ones(3, 2), *layers, None, torch.tensor([0, 2]), parts=parts)
