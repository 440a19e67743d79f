"""csr_of_edges: the native function, its reference implementation and an oracle by sorting."""

from __future__ import annotations

import pytest
import torch
from helpers import index_dtypes
from hypothesis import given
from hypothesis import strategies as st

from spin_fast import ops
from spin_fast.ops import native, reference

PAIRS = st.integers(1, 6).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes), st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)), max_size=40)
    )
)


@pytest.mark.parametrize("listed", ["as drawn", "by source", "by target"])
@given(drawn=PAIRS, dtype=index_dtypes)
def test_every_order_of_edges(
    native, listed: str, drawn: tuple[int, list[tuple[int, int]]], dtype: torch.dtype
) -> None:
    num_nodes, edges = drawn
    if listed != "as drawn":
        edges = sorted(edges) if listed == "by source" else sorted(edges, key=lambda edge: edge[::-1])
    edge_index = torch.tensor(edges, dtype=dtype).view(-1, 2).t()
    want = sorted(range(len(edges)), key=lambda e: edges[e][::-1])  # stable
    for call in (
        lambda: ops.csr_of_edges(edge_index, num_nodes, return_order=True),
        lambda: reference.csr_of_edges(edge_index, num_nodes),
    ):
        indptr, indices, order = call()
        assert indptr.dtype == indices.dtype == dtype
        assert indptr.tolist() == [sum(target < v for _, target in edges) for v in range(num_nodes + 1)]
        assert indices.tolist() == [edges[e][0] for e in want]
        assert (order is None) == (want == list(range(len(edges))))
        assert order is None or order.tolist() == want
    assert ops.csr_of_edges(edge_index, num_nodes)[2] is None


def test_the_results_share_no_memory_with_the_edges(native) -> None:
    edge_index = torch.tensor([[0, 1], [0, 1]])
    indices = ops.csr_of_edges(edge_index, 2)[1]
    edge_index[0] = 7
    assert indices.tolist() == [0, 1]


@pytest.mark.parametrize("edge", [(-1, 0), (0, -1), (3, 0), (0, 3)])
def test_ends_that_are_no_nodes_are_refused(edge: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index = torch.tensor([[1, edge[0]], [2, edge[1]]])
    low, high = edge_index.aminmax()
    message = rf"edge_index must be in \[0, 3\), got {low}\.\.{high}"
    with pytest.raises(ValueError, match=message):
        ops.csr_of_edges(edge_index, 3)
    monkeypatch.setattr(native, "library", None)
    with pytest.raises(ValueError, match=message):
        ops.csr_of_edges(edge_index, 3)
    with pytest.raises(ValueError, match=r"edge_index must be in \[0, 0\)"):
        ops.csr_of_edges(edge_index[:, :1], 0)
