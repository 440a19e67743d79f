"""The operations by others: scipy, torch's sparse and segment operations, PyG, torch_scatter, torch.compile.

What does not depend on the features (normalised matrices, segment numbers) is computed before the clock starts, except
in :func:`powers_from_raw`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
import torch.nn.functional as F
from scipy.sparse import _sparsetools
from torch import Tensor

from spin_fast import GraphBatch
from spin_fast._common.indexing import offsets

HAS_PYG = find_spec("torch_geometric") is not None
if HAS_PYG:
    from torch_geometric.data import Data
    from torch_geometric.transforms import SIGN
    from torch_geometric.utils import scatter, softmax
HAS_TORCH_SCATTER = find_spec("torch_scatter") is not None
if HAS_TORCH_SCATTER:
    from torch_scatter import gather_csr, segment_csr

Powers = Callable[..., Any]
Hop = Callable[[np.ndarray, np.ndarray], None]
"""Adds ``A @ source`` to ``target``; scipy's public product cannot write to given memory."""


def normalized(graphs: GraphBatch) -> scipy.sparse.csr_matrix:
    """``D^-1/2 A D^-1/2`` over all nodes, float32 with int32 indices, as scipy keeps it."""
    entries = (_weights(graphs), graphs.indices.numpy().astype(np.int32), graphs.indptr.numpy().astype(np.int32))
    return scipy.sparse.csr_matrix(entries, (graphs.num_nodes, graphs.num_nodes))


def _scale(graphs: GraphBatch) -> np.ndarray:
    """``D^-1/2`` as a vector; no edge reads the entry of a node of degree 0."""
    return 1 / np.sqrt(np.maximum(np.diff(graphs.indptr.numpy()), 1).astype(np.float32))


def _weights(graphs: GraphBatch) -> np.ndarray:
    """``D^-1/2 A D^-1/2`` per edge."""
    scale = _scale(graphs)
    weights = np.repeat(scale, np.diff(graphs.indptr.numpy()))
    weights *= scale.take(graphs.indices.numpy())
    return weights


def _scipy_hop(indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, num_nodes: int, width: int) -> Hop:
    if width == 1:
        return partial(_sparsetools.csr_matvec, num_nodes, num_nodes, indptr, indices, data)
    return partial(_sparsetools.csr_matvecs, num_nodes, num_nodes, width, indptr, indices, data)


def _torch_csr(indptr: Tensor, indices: Tensor, data: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (indptr.numel() - 1,) * 2
    return torch.sparse_csr_tensor(indptr.to(dtype), indices.to(dtype), data, shape, check_invariants=False)


def _scipy_hops(hop: Hop, x: Tensor, num_hops: int, out: Tensor | None = None) -> Tensor:
    if out is None:
        hops = np.zeros((num_hops + 1, *x.shape), np.float32)
    else:
        hops = out.numpy()
        hops[1:] = 0
    hops[0] = x.numpy()
    for source, target in pairwise(hops.reshape(num_hops + 1, -1)):
        hop(source, target)
    return torch.from_numpy(hops)


def _torch_hops(csr: Tensor, x: Tensor, num_hops: int, out: Tensor | None = None) -> Tensor:
    out = x.new_empty(num_hops + 1, *x.shape) if out is None else out
    out[0] = x
    for source, target in pairwise(out):
        torch.mm(csr, source, out=target)
    return out


def powers(graphs: GraphBatch, num_hops: int) -> dict[str, Powers]:
    """A sparse product per hop, from the matrix normalised beforehand; written to ``out``, or to fresh memory."""
    matrix = normalized(graphs)
    hop = _scipy_hop(matrix.indptr, matrix.indices, matrix.data, *graphs.x.shape)
    indptr, indices, weights = map(torch.from_numpy, (matrix.indptr, matrix.indices, matrix.data))
    int32, int64 = (_torch_csr(indptr, indices, weights, dtype) for dtype in (torch.int32, torch.int64))
    return {
        "scipy": partial(_scipy_hops, hop, graphs.x, num_hops),
        "torch CSR int32": partial(_torch_hops, int32, graphs.x, num_hops),
        "torch CSR int64": partial(_torch_hops, int64, graphs.x, num_hops),
    }


def cusparse(graphs: GraphBatch, num_hops: int) -> dict[str, Powers]:
    """The same on the device of the graphs, by torch's CSR product, which is cuSPARSE's on a GPU."""
    degree = graphs.degree
    scale = degree.clamp(min=1).to(graphs.x.dtype).rsqrt()
    weights = scale.repeat_interleave(degree) * scale[graphs.indices]
    csr = _torch_csr(graphs.indptr, graphs.indices, weights, torch.int32)
    return {"torch CSR": partial(_torch_hops, csr, graphs.x, num_hops)}


def sign(graphs: GraphBatch, num_hops: int) -> dict[str, Powers]:
    """PyG's transform of one batch, which normalises in every call; a list of hops, as it leaves them."""
    if not HAS_PYG:
        return {}
    row = torch.arange(graphs.num_nodes).repeat_interleave(graphs.degree)
    data, transform = Data(x=graphs.x, edge_index=torch.stack([graphs.indices.long(), row])), SIGN(num_hops)

    def by_sign() -> list[Tensor]:
        hops = transform(data)
        return [hops.x, *(hops[f"x{hop}"] for hop in range(1, num_hops + 1))]

    return {"PyG SIGN": by_sign}


def powers_from_raw(graphs: GraphBatch, num_hops: int) -> dict[str, Powers]:
    """The same from ``indptr`` and ``indices``, normalised in every call; int32, if that is what they are.

    In two forms: the weights of all edges are computed first, or ``A`` has ones and the rows are scaled before and
    after each hop, which is less work where nodes have many edges and few features.
    """
    shape, (num_nodes, width) = (num_hops + 1, *graphs.x.shape), graphs.x.shape
    indptr, indices = graphs.indptr.numpy(), graphs.indices.numpy()

    def scipy_weights() -> Tensor:
        return _scipy_hops(_scipy_hop(indptr, indices, _weights(graphs), num_nodes, width), graphs.x, num_hops)

    def scipy_rows() -> Tensor:
        hop = _scipy_hop(indptr, indices, np.ones(graphs.num_edges, np.float32), num_nodes, width)
        hops, scale = np.zeros(shape, np.float32), _scale(graphs)[:, None]
        hops[0] = graphs.x.numpy()
        scaled = np.empty_like(hops[0])
        for source, target in pairwise(hops):
            np.multiply(source, scale, out=scaled)
            hop(scaled.reshape(-1), target.reshape(-1))
            target *= scale
        return torch.from_numpy(hops)

    def torch_weights() -> Tensor:
        csr = _torch_csr(graphs.indptr, graphs.indices, torch.from_numpy(_weights(graphs)), graphs.indices.dtype)
        return _torch_hops(csr, graphs.x, num_hops)

    def torch_rows() -> Tensor:
        csr = _torch_csr(graphs.indptr, graphs.indices, torch.ones(graphs.num_edges), graphs.indices.dtype)
        out, scale, scaled = torch.empty(shape), torch.from_numpy(_scale(graphs))[:, None], torch.empty_like(graphs.x)
        out[0] = graphs.x
        for source, target in pairwise(out):
            torch.mul(source, scale, out=scaled)
            torch.mm(csr, scaled, out=target)
            target.mul_(scale)
        return out

    return {
        "scipy, weights": scipy_weights,
        "scipy, scaled rows": scipy_rows,
        "torch CSR, weights": torch_weights,
        "torch CSR, scaled rows": torch_rows,
        **sign(graphs, num_hops),
    }


class Segments(NamedTuple):
    """Where the rows of each graph in each branch lie in ``[(R+1)*N, h]``, branch-major."""

    offsets: Tensor
    of_row: Tensor
    rows: Tensor

    @classmethod
    def of(cls, ptr: Tensor, num_branches: int) -> Segments:
        sizes = ptr.diff().repeat(num_branches)
        segment = torch.arange(sizes.numel(), device=ptr.device).repeat_interleave(sizes)
        return cls(offsets(sizes), segment, torch.arange(segment.numel(), device=ptr.device))

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

    def torch_scatter(z: Tensor, w: Tensor) -> Tensor:
        beta = scores(z, w)
        mass = (beta - gather_csr(segment_csr(beta.detach(), below, reduce="max"), below)).exp()
        alpha = mass / gather_csr(segment_csr(mass, below, reduce="sum"), below)
        return segment_csr(alpha[:, None] * z.flatten(0, 1), below, reduce="sum")

    pyg = {
        "PyG softmax, scatter": pyg_scatter,
        "PyG softmax, index_add": pyg_index_add,
        "PyG softmax, embedding_bag": pyg_embedding_bag,
    }
    return {
        **(pyg if HAS_PYG else {}),
        **({"torch_scatter CSR": torch_scatter} if HAS_TORCH_SCATTER else {}),
        "segment_reduce": segment_reduce,
    }


@cache
def cannot_compile(device: str = "cpu") -> str:
    """Why torch.compile does not work here; empty where it does."""
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception as error:  # whatever is missing: a compiler, its headers, a version of Python that it knows
        return str(error).strip().splitlines()[0]
    return ""


def compiled_attention(segments: Segments) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """``torch.compile`` of the plain form that it makes the fastest: ``index_add``, divided by the masses at the end.

    It is compiled for the very shapes, the fastest case: batches that differ in size would be compiled one by one, or
    for any size. Compiled anew, since what earlier races compiled counts towards a limit; and for one thread, since
    with several its sums are made of atomic additions, which take eight times as long.
    """
    of_row, number = segments.of_row, segments.number

    def plain(z: Tensor, w: Tensor) -> Tensor:
        beta = torch.bmm(z, w.unsqueeze(2)).flatten().relu()
        top = beta.new_zeros(number).scatter_reduce(0, of_row, beta.detach(), "amax")
        mass = (beta - top[of_row]).exp()
        total = mass.new_zeros(number).index_add(0, of_row, mass)
        sums = z.new_zeros(number, z.shape[2]).index_add(0, of_row, mass[:, None] * z.flatten(0, 1))
        return sums / total.clamp_min(torch.finfo(z.dtype).tiny)[:, None]

    torch.compiler.reset()
    return {"torch.compile": torch.compile(plain, dynamic=False, options={"cpp.threads": 1})}
