"""Graphs that no SPIN can tell apart."""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.indexing import ragged_arange
from ..ops import reference


def identical_segments(ptr: Tensor, index: Tensor, count: Tensor, num_branches: int, hash_bits: int = 64) -> Tensor:
    """For each graph the first one that has the same entries in every branch, ``[G]`` int64.

    Graphs are grouped by a hash of their entries and compared with the first of their group; those that differ from it
    are grouped once more, among themselves.
    """
    sizes, starts = ptr.diff().view(num_branches, -1), ptr[:-1].view(num_branches, -1)
    first = torch.arange(sizes.shape[1], device=ptr.device)
    graph_of_entry = first.repeat(num_branches).repeat_interleave(sizes.flatten())
    key = (index.long() ^ (count.long() << 32)) * -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number
    key = (key ^ (key >> 32)) * -0x61C8864680B583EB
    key = torch.zeros_like(first).index_add(0, graph_of_entry, key)
    key = key if hash_bits == 64 else key & ((1 << hash_bits) - 1)
    left = first.clone()
    while left.numel():
        candidate = left[reference.first_positions(key[left])]
        same = (sizes[:, left] == sizes[:, candidate]).all(0)
        pairs = (same & (left != candidate)).nonzero().squeeze(1)
        lengths = sizes[:, left[pairs]].flatten()
        one = ragged_arange(starts[:, left[pairs]].flatten(), lengths)
        other = ragged_arange(starts[:, candidate[pairs]].flatten(), lengths)
        differ = (index[one] != index[other]) | (count[one] != count[other])
        same[pairs.repeat(num_branches).repeat_interleave(lengths)[differ]] = False
        first[left[same]] = candidate[same]
        left = left[~same]
    return first
