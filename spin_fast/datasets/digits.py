"""Handwritten digits as graphs of inked pixels: the set that needs no download."""

from __future__ import annotations

import numpy as np
import torch

from .._common.indexing import offsets
from ..graphs.batch import GraphBatch
from .common import assemble

_HALF_OF_THE_NEIGHBOURS = ((0, 1), (1, 0), (1, 1), (1, -1))


def load(*, dtype: torch.dtype = torch.float32) -> GraphBatch:
    """The 1,797 scans of 8 x 8 pixels that come with scikit-learn, about 33 nodes and 89 undirected edges each.

    A node is an inked pixel (ink > 0), its features are ``(ink / 16, row / 7, column / 7)``; an edge joins two inked
    pixels that touch, corners included.

    Args:
        dtype: float32 or float64, of the features.

    Returns:
        The graphs, ``x`` ``[N, 3]``, ``y`` int64 ``[1797]``: the digit 0..9.
    """
    from sklearn.datasets import load_digits

    scans = load_digits()
    ink = scans.images
    inked = ink > 0
    _, row, column = np.nonzero(inked)
    node = np.cumsum(inked).reshape(inked.shape) - 1
    ends: list[np.ndarray] = []
    for down, right in _HALF_OF_THE_NEIGHBOURS:
        here = np.s_[:, : 8 - down, max(0, -right) : 8 - max(0, right)]
        there = np.s_[:, down:, max(0, right) : 8 + min(0, right)]
        both = inked[here] & inked[there]
        ends.append(np.stack([node[here][both], node[there][both]]))
    ptr = offsets(torch.from_numpy(inked.sum(axis=(1, 2))))
    x = torch.from_numpy(np.stack([ink[inked] / 16, row / 7, column / 7], axis=1)).to(dtype)
    y = torch.from_numpy(scans.target.astype(np.int64))
    return assemble(np.concatenate(ends, axis=1), ptr, x, y, undirected=True)
