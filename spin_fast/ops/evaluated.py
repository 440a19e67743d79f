"""``EvaluatedRows``: ``branch_readout`` of chunks of graphs, where weights stand still."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import native
from .parameters import flat_parameters

COLUMN_MULTIPLE = 16  # to which kernels pad
MOST_BYTES = 32 << 20  # of rows that are remembered, and what has become of them


class EvaluatedRows:
    """:func:`spin_fast.branch_readout` of dense powers that come chunk by chunk, to predict.

    A row goes through the MLP of its branch only where none of this chunk and of those before, as far back as memory
    for some 32 MB of them goes, was equal to it. The readouts are the same bits, but for rounding where
    ``branch_readout`` takes a long graph piece by piece, or rows of one feature. Where the rows of a branch hardly
    repeat, they are not compared.

    For :class:`spin_fast.SPIN`: arguments, those of ``branch_readout``, are not checked; there is no gradient.

    Args:
        num_nodes: of all chunks together: no more rows are remembered.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        w: Tensor | None,
        *,
        negative_slope: float,
        num_nodes: int,
    ) -> None:
        num_branches, in_features, _ = weights[0].shape
        widths = [weight.shape[2] for weight in weights]
        padded, slots = -(-widths[-1] // COLUMN_MULTIPLE) * COLUMN_MULTIPLE, 4 * 8  # of the table, at most
        values = in_features + padded + 2  # the row, what it has become, its logit and mass
        self._bytes_of_row = num_branches * (values * weights[0].element_size() + slots)
        self._room = min(num_nodes, MOST_BYTES // self._bytes_of_row)
        parameters = flat_parameters(weights, biases, w).detach().numpy()
        model = (in_features, num_branches, widths, w is not None, negative_slope)
        self._rows = native.library.EvaluatedRows(parameters, *model, self._room)  # type: ignore[union-attr]

    def bytes_of_node(self, num_bytes: int) -> int:
        """What a node must count in chunks of ``num_bytes`` for two of them to fit into the memory."""
        return 2 * num_bytes * self._bytes_of_row // MOST_BYTES

    def takes(self, powers: Tensor) -> bool:
        """Whether there is memory for the rows of a chunk."""
        return powers.shape[1] <= self._room

    def readout(self, powers: Tensor, ptr: Tensor) -> Tensor:
        """``[g, (R + 1) * h]`` of the next graphs: contiguous ``powers [R + 1, n, d]``, ``ptr [g + 1]`` into them."""
        return torch.from_numpy(self._rows.readout(powers.numpy(), ptr.numpy()))
