"""Graphs that no SPIN can tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from .._common.indexing import ragged_arange
from .._common.rows import ROWS_AT_ONCE, take_dense
from ..ops import reference

if TYPE_CHECKING:
    from .power_features import PowerFeatures


def identical_segments(ptr: Tensor, index: Tensor, count: Tensor, num_branches: int, hash_bits: int = 64) -> Tensor:
    """For each graph the first one that has the same entries in every branch, ``[G]`` int64.

    Graphs are grouped by a hash of their entries and compared with the first of their group; those that differ from it
    are grouped once more, among themselves.
    """
    sizes, starts = ptr.diff().view(num_branches, -1), ptr[:-1].view(num_branches, -1)
    first = torch.arange(sizes.shape[1], device=ptr.device)
    graph_of_entry = first.repeat(num_branches).repeat_interleave(sizes.flatten())
    key = reference.mixed(index.long() ^ (count.long() << 32))
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


def graph_keys(features: PowerFeatures, *, joint: bool) -> Tensor:
    """A hash of what each selected graph has, ``[G]`` int64: the rows of every branch, or its joint rows.

    Equal for two graphs that have the same equally often, wherever these are stored; by chance for one other pair in
    2^64.
    """
    segments: PowerFeatures | ops.JointRows = features
    numbers = torch.arange(len(features.rows), device=features.rows.device)
    keys = torch.cat([_keys_of(take_dense(features.rows, some)) for some in numbers.split(ROWS_AT_ONCE)])
    if joint:
        segments, of_parts = features.joint, keys
        keys = torch.zeros_like(segments.parts[:, 0], dtype=torch.int64)
        for part in segments.parts.unbind(1):
            keys = reference.mixed(keys + of_parts.index_select(0, part))
    keys = keys if segments.index is None else keys.index_select(0, segments.index)
    keys = keys if segments.count is None else keys * segments.count
    sizes = segments.ptr.diff()
    of_entry = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    sums = torch.zeros_like(sizes).index_add(0, of_entry, keys).view(1 if joint else features.num_branches, -1)
    key = torch.zeros_like(sums[0])
    for of_branch in sums:
        key = reference.mixed(key + of_branch)
    return key if features.ids is None else key[features.ids]


def _keys_of(rows: Tensor) -> Tensor:
    keys = torch.ones(len(rows), dtype=torch.int64, device=rows.device)  # not 0, for rows of zeros count, too
    for column in (rows + 0.0).view(reference.BITS[rows.element_size()]).unbind(1):  # -0 as +0
        keys = reference.mixed(keys + column)
    return keys
