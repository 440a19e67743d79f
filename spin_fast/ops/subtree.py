"""``subtree_keys``: the public function, and the fake kernel of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from .._common import check
from . import native, reference
from .invariants import check_csr


def subtree_keys(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    num_hops: int,
    *,
    edge_type: Tensor | None = None,
    seed: int = 0,
    check_invariants: bool = True,
) -> Tensor:
    """Number the colours of colour refinement (1-WL): a key of 64 bits for what a node sees within each hop.

    The key of a node before any hop is a hash of its row of ``x``; that after a hop is a hash of its key before and of
    the multiset of those of the columns stored in its row, its neighbours. So nodes have equal keys after ``r`` hops if
    ``r`` rounds of colour refinement give them equal colours, and otherwise different ones but for chance (of ``n``
    colours with a probability of some ``n ** 2 / 2 ** 65``). Everything is computed in integers: keys are the same on
    every machine and device, for any order of the neighbours, and for graphs that are seen later. Not differentiable.

    In a directed graph a node sees the nodes that it gathers from, as in :func:`power_features`.

    Args:
        indptr: ``[N + 1]`` int32 or int64.
        indices: ``[E]``, dtype of ``indptr``.
        x: ``[N, d]`` float32 or float64; values of both that are equal give equal keys. -0 is 0; a NaN
            may equal another one.
        num_hops: ``R``, the number of rounds, at least 0.
        edge_type: ``[E]`` int64: neighbours over edges of different types are different. None for one type; that is
            not the same as equal types.
        seed: of the hash, at least 0; other seeds give other keys.
        check_invariants: check the contents of ``indptr`` and ``indices``; False where the caller vouches for them.

    Returns:
        ``[R + 1, N]`` int64, any of all 2^64 values: the keys after 0 to ``R`` hops.

    Raises:
        TypeError, ValueError: name the argument and what is wrong with it.
    """
    check.tensor("x", x, ("N", "d"), check.FLOATS)
    num_hops, seed = check.integer("num_hops", num_hops, 0), check.integer("seed", seed, 0)
    check_invariants = check.flag("check_invariants", check_invariants)
    check_csr(indptr, indices, None, x.shape[0], check_invariants=check_invariants, device=x.device)
    if edge_type is not None:
        check.tensor("edge_type", edge_type, (indices.numel(),), (torch.int64,), x.device)
    if not native.has_kernel(x):
        return reference.subtree_keys(indptr, indices, x.detach(), num_hops, edge_type=edge_type, seed=seed)
    arrays = (indptr.contiguous(), indices.contiguous(), x.detach().contiguous(), native.contiguous(edge_type))
    return torch.ops.spin_fast.subtree_keys.default(*arrays, num_hops, seed, False)


def _fake(indptr, indices, x, edge_type, num_hops, seed, check_invariants):  # type: ignore[no-untyped-def]
    return x.new_empty(num_hops + 1, x.shape[0], dtype=torch.int64)


native.register("subtree_keys", _fake)
