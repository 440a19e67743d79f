"""``EvaluatedRows``: ``branch_readout`` of chunks of graphs, where weights stand still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import native
from .parameters import flat_parameters

COLUMN_MULTIPLE = 16  # to which kernels pad
MOST_BYTES = 32 << 20  # of rows that are remembered, and what has become of them
CHUNKS_PER_THREAD = 8  # at once: of fewer, threads would wait for each other, and calls cost more
LEAST_CHUNKS_PER_THREAD = 4  # of all graphs
LEAST_NODES = 1024  # of chunks that are made smaller for that


def chunks_at_once() -> int:
    """How many chunks of graphs to score together; a thread of :class:`EvaluatedRows` takes one after the other."""
    return CHUNKS_PER_THREAD * torch.get_num_threads()


class EvaluatedRows:
    """:func:`spin_fast.branch_readout` of the powers of graphs that come chunk by chunk, to predict.

    A row goes through the MLP of its branch only where none of this chunk and of those before, as far back as memory
    for some 32 MB of them goes, was equal to it. The readouts are the same bits, but for rounding where
    ``branch_readout`` takes a long graph piece by piece, or rows of one feature. Where the rows of a branch hardly
    repeat, they are not compared; where no hop's do, the hops of graphs are made without the columns of ``x`` that are
    0 in the whole chunk, if these are half of them or more.

    From graphs, a node's row is not even computed where a node before had the same pattern: as many neighbours and, in
    the order in which they are stored, of the same patterns one hop before, where these are four at most
    (``csrc/cpu/patterns.h``). That takes about as much memory again. Every thread has rows of its own, and takes one of
    several chunks of graphs after the other; a single chunk is shared by all threads.

    For :class:`spin_fast.SPIN`: arguments, those of ``branch_readout``, are not checked; there is no gradient.

    Args:
        num_nodes: of all chunks together; no more rows are remembered, and no chunk of more nodes is taken.
        operator: of the hops, as in :class:`spin_fast.PowerFeatures`; for :meth:`readouts_of_graphs`, empty without.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        w: Tensor | None,
        *,
        negative_slope: float,
        num_nodes: int,
        operator: str = "",
    ) -> None:
        num_branches, in_features, _ = weights[0].shape
        widths = [weight.shape[2] for weight in weights]
        padded = -(-widths[-1] // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        values = in_features + padded + 2  # the row, what it has become, its logit and mass
        table = 4 * 8 + 2 * 4  # slots, at most; its hash, and the row of a pattern
        self._bytes_of_row = num_branches * (values * weights[0].element_size() + table)
        self._takes_graphs = operator != ""
        self._room = min(num_nodes, MOST_BYTES // self._bytes_of_row)
        parameters = flat_parameters(weights, biases, w).detach().numpy()
        model = (in_features, num_branches, widths, w is not None, negative_slope)
        operators = operator.split(",") if operator else []
        self._make = partial(native.library.EvaluatedRows, parameters, *model, self._room, operators)  # type: ignore[union-attr]
        self._rows = [self._make()]  # and of each thread, where it is needed

    def bytes_of_node(self, graphs: Any, num_bytes: int) -> int:
        """What a node must count in chunks of ``num_bytes``: two fit into the memory, and each thread gets some."""
        to_fit = 2 * num_bytes * self._bytes_of_row // MOST_BYTES
        threads = torch.get_num_threads()
        if threads == 1 or not self.may_take(graphs):
            return to_fit
        return max(to_fit, num_bytes // max(graphs.num_nodes // (LEAST_CHUNKS_PER_THREAD * threads), LEAST_NODES))

    def may_take(self, graphs: Any) -> bool:
        """Whether :meth:`readouts_of_graphs` is for these: without edge weights, of contiguous arrays."""
        arrays = (graphs.indptr, graphs.indices, graphs.x)
        return self._takes_graphs and graphs.edge_weight is None and all(array.is_contiguous() for array in arrays)

    def takes(self, num_nodes: int) -> bool:
        """Whether there is memory for the rows of a chunk of so many nodes."""
        return num_nodes <= self._room

    def readout(self, powers: Tensor, ptr: Tensor) -> Tensor:
        """``[g, (R + 1) * h]`` of the next graphs: contiguous ``powers [R + 1, n, d]``, ``ptr [g + 1]`` into them."""
        return torch.from_numpy(self._rows[0].readout(powers.numpy(), ptr.numpy()))

    def readouts_of_graphs(
        self, graphs: Any, node_ptrs: Sequence[Tensor], *, by_powers: bool = True
    ) -> tuple[Tensor, list[bool]]:
        """The same of graphs that it :meth:`may take <may_take>`, and which chunks have them.

        Not one for whose rows there is no memory, nor, without ``by_powers``, one in which patterns do not pay.

        Args:
            graphs: a batch.
            node_ptrs: of each chunk of its graphs ``[g + 1]``, their nodes.
            by_powers: of graphs whose patterns do not pay, too.
        """
        while len(self._rows) < min(len(node_ptrs), torch.get_num_threads()):
            self._rows.append(self._make())
        readouts_of_graphs: Any = native.library.readouts_of_graphs  # type: ignore[union-attr]
        pointers = [ptr.numpy() for ptr in node_ptrs]
        arrays = (array.numpy() for array in (graphs.indptr, graphs.indices, graphs.x.detach()))
        readouts, is_made = readouts_of_graphs(self._rows, *arrays, pointers, by_powers)
        return torch.from_numpy(readouts), is_made


def classifier_of(
    weights: Sequence[Tensor], biases: Sequence[Tensor], negative_slope: float
) -> Callable[[Tensor], Tensor]:
    """What computes class scores ``[g, C]`` of contiguous readouts ``[g, k]`` as long as no weight changes.

    By layers ``[out, in]`` with a LeakyReLU between them. A graph's scores are the same bits whatever others come with
    it. For :class:`spin_fast.SPIN`: arguments are not checked; there is no gradient.
    """
    parameters = flat_parameters(weights, biases, None).detach().numpy()
    widths = [len(bias) for bias in biases]
    class_scores: Any = native.library.class_scores  # type: ignore[union-attr]
    return lambda readouts: torch.from_numpy(class_scores(readouts.numpy(), parameters, widths, negative_slope))
