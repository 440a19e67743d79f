"""What else computes the operations: scipy, torch's sparse and segment operations, PyG's softmax and scatter.

Everything that does not depend on the features (normalised matrices, segment numbers) is made before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
import torch.nn.functional as F
from scipy.sparse import _sparsetools
from torch import Tensor

from spin_fast import GraphBatch
from spin_fast.graphs import offsets

HAS_PYG = find_spec("torch_geometric") is not None
if HAS_PYG:
    from torch_geometric.utils import scatter, softmax

Powers = Callable[..., Tensor]


def normalized(graphs: GraphBatch) -> scipy.sparse.csr_matrix:
    """``D^-1/2 A D^-1/2`` over all nodes, float32 with int32 indices, as scipy keeps it."""
    degree = graphs.degree.double()
    scale = torch.where(degree == 0, 0.0, degree.rsqrt())
    row = torch.arange(graphs.num_nodes).repeat_interleave(graphs.degree.long())
    values = (scale[row] * scale[graphs.indices.long()]).float()
    entries = (values.numpy(), graphs.indices.numpy().astype(np.int32), graphs.indptr.numpy().astype(np.int32))
    return scipy.sparse.csr_matrix(entries, (graphs.num_nodes, graphs.num_nodes))


def _torch_csr(matrix: scipy.sparse.csr_matrix, dtype: torch.dtype) -> Tensor:
    indptr, indices = (torch.from_numpy(array).to(dtype) for array in (matrix.indptr, matrix.indices))
    return torch.sparse_csr_tensor(indptr, indices, torch.from_numpy(matrix.data), matrix.shape, check_invariants=False)


def powers(graphs: GraphBatch, num_hops: int) -> dict[str, Powers]:
    """A sparse product per hop, from the matrix normalised beforehand; written to ``out``, or to fresh memory.

    scipy's public product cannot write to given memory, so the routine behind it is called, with zeros to add to.
    """
    matrix, shape = normalized(graphs), (num_hops + 1, *graphs.x.shape)
    num_nodes, width = graphs.x.shape

    def by_scipy(out: Tensor | None = None) -> Tensor:
        if out is None:
            hops = np.zeros(shape, np.float32)
        else:
            hops = out.numpy()
            hops[1:] = 0
        hops[0] = graphs.x.numpy()
        entries = (matrix.indptr, matrix.indices, matrix.data)
        for source, target in pairwise(hops.reshape(num_hops + 1, -1)):
            if width == 1:
                _sparsetools.csr_matvec(num_nodes, num_nodes, *entries, source, target)
            else:
                _sparsetools.csr_matvecs(num_nodes, num_nodes, width, *entries, source, target)
        return torch.from_numpy(hops)

    def by_torch(csr: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.empty(shape) if out is None else out
        out[0] = graphs.x
        for source, target in pairwise(out):
            torch.mm(csr, source, out=target)
        return out

    return {
        "scipy": by_scipy,
        "torch CSR int32": partial(by_torch, _torch_csr(matrix, torch.int32)),
        "torch CSR int64": partial(by_torch, _torch_csr(matrix, torch.int64)),
    }


class Segments(NamedTuple):
    """Where the rows of each graph in each branch lie in ``[(R+1)*N, h]``, branch-major."""

    offsets: Tensor
    of_row: Tensor
    rows: Tensor

    @classmethod
    def of(cls, ptr: Tensor, num_branches: int) -> Segments:
        sizes = ptr.diff().repeat(num_branches)
        segment = torch.arange(sizes.numel()).repeat_interleave(sizes)
        return cls(offsets(sizes), segment, torch.arange(segment.numel()))

    @property
    def number(self) -> int:
        return self.offsets.numel() - 1


def sum_readouts(segments: Segments) -> dict[str, Callable[[Tensor], Tensor]]:
    """From ``z [R+1, N, h]`` to sums per segment ``[(R+1)*G, h]``."""
    below, of_row, number = segments.offsets, segments.of_row, segments.number

    def pyg_scatter(z: Tensor) -> Tensor:
        return scatter(z.flatten(0, 1), of_row, 0, number, "sum")

    def index_add(z: Tensor) -> Tensor:
        return z.new_zeros(number, z.shape[2]).index_add(0, of_row, z.flatten(0, 1))

    def segment_reduce(z: Tensor) -> Tensor:
        return torch.segment_reduce(z.flatten(0, 1), "sum", offsets=below, axis=0, unsafe=True)

    def embedding_bag(z: Tensor) -> Tensor:
        return F.embedding_bag(segments.rows, z.flatten(0, 1), below, mode="sum", include_last_offset=True)

    pyg = {"PyG scatter": pyg_scatter} if HAS_PYG else {}
    return {**pyg, "index_add": index_add, "segment_reduce": segment_reduce, "embedding_bag": embedding_bag}


def attention_readouts(segments: Segments) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """From ``z [R+1, N, h]`` and ``w [R+1, h]`` to attention-weighted sums per segment ``[(R+1)*G, h]``."""
    below, of_row, number = segments.offsets, segments.of_row, segments.number

    def scores(z: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(z, w.unsqueeze(2)).flatten().relu()

    def pyg_scatter(z: Tensor, w: Tensor) -> Tensor:
        alpha = softmax(scores(z, w), of_row, num_nodes=number)
        return scatter(alpha[:, None] * z.flatten(0, 1), of_row, 0, number, "sum")

    def pyg_index_add(z: Tensor, w: Tensor) -> Tensor:
        alpha = softmax(scores(z, w), of_row, num_nodes=number)
        return z.new_zeros(number, z.shape[2]).index_add(0, of_row, alpha[:, None] * z.flatten(0, 1))

    def pyg_embedding_bag(z: Tensor, w: Tensor) -> Tensor:
        alpha = softmax(scores(z, w), ptr=below)
        bags = partial(F.embedding_bag, mode="sum", per_sample_weights=alpha, include_last_offset=True)
        return bags(segments.rows, z.flatten(0, 1), below)

    def segment_reduce(z: Tensor, w: Tensor) -> Tensor:
        reduce = partial(torch.segment_reduce, offsets=below, axis=0, unsafe=True)
        beta = scores(z, w)
        mass = (beta - reduce(beta.detach(), "max")[of_row]).exp()
        alpha = mass / reduce(mass, "sum")[of_row]
        return reduce(alpha[:, None] * z.flatten(0, 1), "sum")

    pyg = {
        "PyG softmax, scatter": pyg_scatter,
        "PyG softmax, index_add": pyg_index_add,
        "PyG softmax, embedding_bag": pyg_embedding_bag,
    }
    return {**(pyg if HAS_PYG else {}), "segment_reduce": segment_reduce}
