"""csr_of_edges: edges in any order as the CSR arrays that the operations take."""

from __future__ import annotations

import torch
from torch import Tensor

from . import native, reference
from .invariants import contents_are_readable


def check_ends(edge_index: Tensor, num_nodes: int) -> None:
    """Check that both ends of each edge are nodes; on a GPU this waits for it.

    Raises:
        ValueError: they are not.
    """
    if edge_index.numel():
        low, high = map(int, edge_index.aminmax())
        if low < 0 or high >= num_nodes:
            raise ValueError(f"edge_index must be in [0, {num_nodes}), got {low}..{high}")


def csr_of_edges(
    edge_index: Tensor, num_nodes: int, *, return_order: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """CSR arrays of COO edges: row ``v`` has the sources of the edges that end in ``v``, ascending.

    Equal edges remain in the order in which they are listed.

    Args:
        edge_index: ``[2, E]`` int32 or int64, sources and targets.
        num_nodes: ``N``.
        return_order: return the order, too.

    Returns:
        ``indptr [N + 1]`` and ``indices [E]`` in the dtype of ``edge_index``, which share no memory with it, and
        the edge ``[E]`` that each entry was; None instead if the edges come in this order, or if it is not wanted.

    Raises:
        ValueError: an end of an edge is not in ``[0, N)``.
    """
    if native.library is None or not contents_are_readable(edge_index):
        check_ends(edge_index, num_nodes)
        indptr, indices, order = reference.csr_of_edges(edge_index, num_nodes)
        return indptr, indices, order if return_order else None
    indptr, indices, order = native.library.csr_of_edges(edge_index.contiguous().numpy(), num_nodes, return_order)
    return torch.from_numpy(indptr), torch.from_numpy(indices), None if order is None else torch.from_numpy(order)
