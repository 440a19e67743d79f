"""The reference implementation of every operation in plain PyTorch: any device, differentiable to any order.

It is the oracle of the tests, a yardstick of the timings, and what runs where there is no kernel. Arguments are not
validated here: :mod:`spin_fast.ops` does that. Sums over nodes run in float64 and are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.indexing import offsets, ragged_arange
from .._common.rows import dense
from .parameters import ModelSizes, split_parameters

if TYPE_CHECKING:
    from .joint import JointRows
    from .training_step import Adam

Function = TypeVar("Function", bound=Callable[..., Any])


def _in_its_own_dtype(function: Function) -> Function:
    """Switch autocast off, which changes nothing in a kernel either."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if device == "meta" or not torch.is_autocast_enabled(device):  # there is no autocast of meta
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return cast(Function, call)


def segment_of_entry(offsets: Tensor, num_entries: int) -> Tensor:
    """For each entry of consecutive segments the number of its own: offsets ``[0, 2, 2, 5] -> [0, 0, 2, 2, 2]``."""
    segments = torch.arange(offsets.numel() - 1, device=offsets.device)
    return segments.repeat_interleave(offsets.diff(), output_size=num_entries)


def _sum_by(segment: Tensor, values: Tensor, num_segments: int) -> Tensor:
    """Sum the entries of each segment in float64."""
    return values.new_zeros(num_segments, *values.shape[1:], dtype=torch.float64).index_add(0, segment, values.double())


def operator_scales(indptr: Tensor, operator: str, edge_weight: Tensor | None) -> tuple[Tensor, Tensor, float]:
    """The three parts of a graph operator, ``Ā[v, u] = A[v, u] * (left[v] * right[u] + plain)``.

    Returns:
        ``left [N]`` and ``right [N]`` in float64, and ``plain``, 0 or 1.

    Raises:
        ValueError: a row of ``A`` has a negative sum under ``sym`` or ``sym+adj``.
    """
    num_nodes = indptr.numel() - 1
    if edge_weight is None:
        degree = indptr.diff().to(torch.float64)
    else:
        degree = torch.zeros(num_nodes, dtype=torch.float64, device=indptr.device)
        degree = degree.index_add(0, segment_of_entry(indptr, edge_weight.numel()), edge_weight.to(torch.float64))
    zero = torch.zeros_like(degree)
    if operator == "adj":
        return zero, zero, 1.0
    if operator == "rw":
        return torch.where(degree == 0, zero, 1 / degree), torch.ones_like(degree), 0.0
    if bool((degree < 0).any()):
        node = int((degree < 0).nonzero()[0])
        raise ValueError(
            f"edge_weight must give no negative row sum under {operator}, got {float(degree[node])} at node {node}"
        )
    scale = torch.where(degree == 0, zero, degree.rsqrt())
    return scale, scale, 1.0 if operator == "sym+adj" else 0.0


def power_features(
    indptr: Tensor,
    indices: Tensor,
    x: Tensor,
    num_hops: int,
    operator: str = "sym",
    *,
    ptr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """Reference implementation of :func:`spin_fast.power_features`; sums always run in float64, whatever ``ptr`` is."""
    left, right, plain = operator_scales(indptr, operator, edge_weight)
    row, column = segment_of_entry(indptr, indices.numel()), indices.long()
    factor = left[row] * right[column] + plain
    if edge_weight is not None:
        factor = factor * edge_weight
    powers = [x.float() if x.dtype.itemsize == 2 else x]
    for _ in range(num_hops):
        powers.append(_sum_by(row, factor[:, None] * powers[-1][column], x.shape[0]).to(powers[0].dtype))
    return torch.stack(powers).to(x.dtype)


def _entries(z: Tensor, ptr: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows per entry ``[nnz, h]`` and segment per entry ``[nnz]`` of both forms of ``z``."""
    if z.dim() == 3:
        num_branches, num_graphs = z.shape[0], ptr.numel() - 1
        graph = segment_of_entry(ptr, z.shape[1])
        segment = (torch.arange(num_branches, device=z.device)[:, None] * num_graphs + graph).flatten()
        return z.flatten(0, 1), segment
    rows = z if index is None else z[index.long()]
    return rows, segment_of_entry(ptr, rows.shape[0])


def _num_segments(z: Tensor, ptr: Tensor) -> int:
    return (ptr.numel() - 1) * (z.shape[0] if z.dim() == 3 else 1)


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """What a readout of rows of this dtype computes in: half types are storage only."""
    return storage if storage == torch.float64 else torch.float32


def _side_by_side(segments: Tensor, num_branches: int) -> Tensor:
    """``[(R+1)*G, h]`` in branch-major order ``-> [G, (R+1)*h]``."""
    num_graphs, width = segments.shape[0] // num_branches, segments.shape[1]
    branches = segments.view(num_branches, num_graphs, width)
    return branches.transpose(0, 1).reshape(num_graphs, num_branches * width)


def sum_readout(
    z: Tensor,
    ptr: Tensor,
    *,
    index: Tensor | None = None,
    count: Tensor | None = None,
    num_branches: int | None = None,
) -> Tensor:
    """Reference implementation of :func:`spin_fast.sum_readout`."""
    rows, segment = _entries(z.to(compute_dtype(z.dtype)), ptr, index)
    if count is not None:
        rows = rows * count[:, None]
    sums = _sum_by(segment, rows, _num_segments(z, ptr)).to(z.dtype)
    return _side_by_side(sums, z.shape[0] if z.dim() == 3 else num_branches or 1)


def attention_readout(
    z: Tensor,
    w: Tensor,
    ptr: Tensor,
    *,
    index: Tensor | None = None,
    count: Tensor | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reference implementation of :func:`spin_fast.attention_readout`."""
    readout, weights = _attention(z, w, ptr, index, count)
    if not return_weights:
        return readout
    return readout, weights.view(z.shape[:2]) if z.dim() == 3 else weights


@_in_its_own_dtype
def _attention(z: Tensor, w: Tensor, ptr: Tensor, index: Tensor | None, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """Readout ``[G, (R+1)*h]`` and weights per entry ``[nnz]``."""
    num_branches, storage = w.shape[0] if w.dim() == 2 else 1, z.dtype
    z, w = (value.to(compute_dtype(storage)) for value in (z, w))
    rows, segment = _entries(z, ptr, index)
    num_segments = _num_segments(z, ptr)
    if z.dim() == 3:
        logits = torch.bmm(z, w.view(z.shape[0], -1, 1)).flatten()
    elif num_branches == 1:
        logits = rows @ w.flatten()
    else:
        logits = (rows * w[segment // max(num_segments // num_branches, 1)]).sum(1)
    beta = torch.relu(logits)
    top = beta.new_zeros(num_segments).scatter_reduce(0, segment, beta.detach(), "amax")
    mass = torch.exp(beta - top[segment])
    if count is not None:
        mass = mass * count
    weights = (mass / _sum_by(segment, mass, num_segments)[segment]).to(z.dtype)
    sums = _sum_by(segment, weights[:, None] * rows, num_segments).to(storage)
    return _side_by_side(sums, num_branches), weights


def select_segments(ptr: Tensor, ids: Tensor | None, num_branches: int) -> tuple[Tensor, Tensor]:
    """The entries of the segments of the graphs ``ids`` in every branch, and the offsets of those segments in them."""
    num_graphs = (ptr.numel() - 1) // num_branches
    ids = torch.arange(num_graphs, device=ptr.device) if ids is None else ids
    segments = (torch.arange(num_branches, device=ptr.device)[:, None] * num_graphs + ids).flatten()
    sizes = ptr[segments + 1] - ptr[segments]
    return ragged_arange(ptr[segments], sizes), offsets(sizes)


@_in_its_own_dtype
def branch_readout(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    w: Tensor | None,
    ptr: Tensor,
    *,
    index: Tensor | None = None,
    count: Tensor | None = None,
    ids: Tensor | None = None,
    parts: Tensor | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    """Reference implementation of :func:`spin_fast.branch_readout`; one evaluation of the MLP per entry."""
    num_branches, rows = weights[0].shape[0], dense(rows)
    if parts is not None:
        rows = rows[parts.long()].flatten(1)
    if rows.dim() == 3:
        shifts = torch.arange(num_branches, device=ptr.device)[:, None] * rows.shape[1]
        ptr = torch.cat([(shifts + ptr[:-1]).flatten(), ptr.new_tensor([rows.shape[0] * rows.shape[1]])])
        rows = rows.flatten(0, 1)
    entries, bounds = select_segments(ptr, ids, num_branches)
    row = entries if index is None else index[entries].long()
    of_branch = bounds[:: max((bounds.numel() - 1) // num_branches, 1)][: num_branches + 1].diff().tolist()
    z = list(rows[row].split(of_branch or [0] * num_branches))
    for weight, bias in zip(weights, biases, strict=True):
        z = [F.leaky_relu(torch.addmm(b, x, a), negative_slope) for x, a, b in zip(z, weight, bias, strict=True)]
    count = None if count is None else count[entries]
    if w is None:
        return sum_readout(torch.cat(z), bounds, count=count, num_branches=num_branches)
    return _attention(torch.cat(z), w, bounds, None, count)[0]


@_in_its_own_dtype
def training_step(
    rows: Tensor,
    parameters: Tensor,
    labels: Tensor,
    ptr: Tensor | None,
    *,
    model: ModelSizes,
    index: Tensor | None = None,
    count: Tensor | None = None,
    joint: JointRows | None = None,
    ids: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference implementation of :func:`spin_fast.ops.training_step`."""
    slope = model.negative_slope
    with torch.enable_grad():
        flat = parameters.detach().requires_grad_()
        groups, classifier = split_parameters(flat, rows.shape[1], model)
        readouts = []
        for name, group in groups.items():
            hops: dict[str, Any] = {"ptr": ptr, "index": index, "count": count}
            entries = hops if name == "hops" else vars(joint)
            readouts.append(branch_readout(rows, *group, **entries, ids=ids, negative_slope=slope))
        scores = torch.cat(readouts, dim=1)
        for depth, (weight, bias) in enumerate(zip(classifier[::2], classifier[1::2], strict=True)):
            scores = F.linear(scores if depth == 0 else F.leaky_relu(scores, slope), weight, bias)
        labels = labels if ids is None else labels[ids]
        loss = F.cross_entropy(scores, labels, class_weight, reduction="sum")
        total = loss.new_tensor(len(labels)) if class_weight is None else class_weight[labels].sum()
        loss = loss / total.clamp(min=torch.finfo(loss.dtype).tiny)
        (gradient,) = torch.autograd.grad(loss, flat)
    return loss.detach(), gradient


@_in_its_own_dtype
def training_steps(
    rows: Tensor,
    parameters: Tensor,
    labels: Tensor,
    ptr: Tensor | None,
    *,
    ids: Tensor,
    batch_size: int,
    adam: Adam,
    **options: Any,
) -> Tensor:
    """Reference implementation of :func:`spin_fast.ops.training_steps`; Adam as in Kingma and Ba (2015)."""
    losses = []
    for batch in ids.split(batch_size):
        loss, gradient = training_step(rows, parameters, labels, ptr, ids=batch, **options)
        losses.append(loss)
        adam.gradient.copy_(gradient)
        gradient = gradient + adam.weight_decay * parameters
        adam.num_steps.add_(1)
        adam.exp_avg.lerp_(gradient, 1 - adam.beta1)
        adam.exp_avg_sq.lerp_(gradient.square(), 1 - adam.beta2)
        mean, square = (1 - beta ** adam.num_steps.item() for beta in (adam.beta1, adam.beta2))
        root = (adam.exp_avg_sq / square).sqrt() + adam.eps
        parameters.sub_(adam.learning_rate / mean * adam.exp_avg / root)
    return torch.stack(losses)


def first_positions(values: Tensor) -> Tensor:
    """For each entry of ``values [n]`` the position of the first that is equal: ``[5, 7, 5] -> [0, 1, 0]``."""
    _, group = torch.unique(values, return_inverse=True)
    positions = torch.arange(values.numel(), device=values.device)
    return positions.new_full(positions.shape, positions.numel()).scatter_reduce(0, group, positions, "amin")[group]


Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""``rows, row_ptr, ptr, index, count, row_of_node``."""


def distinct_rows(powers: Tensor, ptr: Tensor, *, index_dtype: torch.dtype = torch.int32, hash_bits: int = 64) -> Found:
    """Reference implementation of :func:`spin_fast.ops.distinct_rows`.

    Rows are grouped by a hash and every group is verified; should two rows collide, the rows are sorted instead.
    """
    num_graphs, num_nodes = ptr.numel() - 1, powers.shape[1]
    graph = segment_of_entry(ptr, num_nodes)
    positions = torch.arange(num_nodes, device=powers.device)
    bits = powers.view(BITS[powers.dtype.itemsize])
    powers = bits.where(bits != torch.iinfo(bits.dtype).min, 0).view(powers.dtype)  # no -0, every other bit as it was
    rows, row_of_node, sizes, index, count, row_ptr = [], [], [], [], [], [0]
    for power in powers:
        bits = power.view(BITS[power.dtype.itemsize])
        first = first_positions(_hash(bits, hash_bits))
        if not torch.equal(bits[first], bits):
            first = first_positions(torch.unique(bits, dim=0, return_inverse=True)[1])
        is_first = first == positions
        row, num_rows = (is_first.cumsum(0) - 1)[first], int(is_first.sum())
        entry, times = torch.unique(graph * max(num_rows, 1) + row, return_counts=True)
        rows.append(power[is_first])
        row_of_node.append(row + row_ptr[-1])
        sizes.append(torch.bincount(entry // max(num_rows, 1), minlength=num_graphs))
        index.append(entry % max(num_rows, 1) + row_ptr[-1])
        count.append(times)
        row_ptr.append(row_ptr[-1] + num_rows)
    return (
        torch.cat(rows),
        torch.tensor(row_ptr),
        torch.cat([ptr.new_zeros(1), torch.cat(sizes).cumsum(0)]),
        torch.cat(index).to(index_dtype),
        torch.cat(count).to(torch.int32),
        torch.stack(row_of_node).to(index_dtype),
    )


class DistinctRows:
    """Reference implementation of :class:`spin_fast.ops.DistinctRows`; always with ``row_of_node``.

    The rows so far stand before those of a chunk, as one more graph, and so keep their numbers.

    Args:
        num_branches: ``R + 1``.
        x: ``[*, d]``, of the dtype, width and device of the powers.
        find: :func:`distinct_rows`, or the operation that does the same.
    """

    def __init__(self, num_branches: int, x: Tensor, find: Callable[[Tensor, Tensor], Found]) -> None:
        self._find = find
        self._rows = [x[:0]] * num_branches
        self._lists: Lists = [[] for _ in self._rows]

    def add(self, powers: Tensor, ptr: Tensor) -> None:
        known = max(map(len, self._rows))
        if known:  # the last row again where other branches have more
            numbers = torch.arange(known, device=powers.device)
            rows = [rows[numbers.clamp(max=len(rows) - 1)] for rows in self._rows]
            powers, ptr = torch.cat([torch.stack(rows), powers], 1), torch.cat([ptr[:1], ptr + known])
        found = self._find(powers, ptr)
        add_lists(self._lists, found, int(known > 0), known)
        self._rows = [*found[0].split(found[1].diff().tolist())]

    def num_rows(self) -> int:
        return sum(map(len, self._rows))

    def take(self, index_dtype: torch.dtype) -> Found:
        if not self._lists[0]:
            x = self._rows[0]
            self.add(x.new_empty(len(self._rows), *x.shape), torch.zeros(1, dtype=torch.int64, device=x.device))
        row_ptr = torch.tensor([0, *map(len, self._rows)]).cumsum(0)
        return torch.cat(self._rows), row_ptr, *joined_lists(self._lists, row_ptr, index_dtype)


Lists = list[list[tuple[Tensor, Tensor, Tensor, Tensor]]]
"""Of each branch, for chunk after chunk: the entries of each graph, index and count, and row_of_node."""


def add_lists(lists: Lists, found: Found, num_graphs: int, num_nodes: int) -> None:
    """Append what ``distinct_rows`` has found, but for the first graphs and nodes, which stand for earlier chunks."""
    _, row_ptr, ptr, index, count, row_of_node = found
    num_segments = (ptr.numel() - 1) // len(lists)
    for r, shift in enumerate(row_ptr[:-1].tolist()):
        ends = ptr[r * num_segments + num_graphs : (r + 1) * num_segments + 1]
        entries = slice(int(ends[0]), int(ends[-1]))
        of_node = row_of_node[r, num_nodes:] - shift
        lists[r].append((ends.diff(), index[entries] - shift, count[entries], of_node))


def joined_lists(lists: Lists, row_ptr: Tensor, index_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ptr, index, count, row_of_node`` of ``lists``, in which the rows of each branch have numbers from 0 on.

    ``lists`` are emptied, so that no array is longer in memory twice than it takes to copy it.
    """
    shifts = [shift for shift, chunks in zip(row_ptr.tolist(), lists, strict=False) for _ in chunks]
    sizes, index, count, row_of_node = map(list, zip(*(chunk for chunks in lists for chunk in chunks), strict=True))
    for chunks in lists:
        chunks.clear()

    def joined(parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts)
        parts.clear()
        return whole

    def shifted(parts: list[Tensor]) -> Tensor:
        for number, shift in enumerate(shifts):
            parts[number] = parts[number].to(index_dtype) + shift
        return joined(parts)

    return offsets(joined(sizes)), shifted(index), joined(count), shifted(row_of_node).view(len(lists), -1)


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a value


def _hash(bits: Tensor, hash_bits: int) -> Tensor:
    key = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    for column in bits.unbind(1):
        key = (key ^ column) * -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number
        key = key ^ (key >> 32)
    return key if hash_bits == 64 else key & ((1 << hash_bits) - 1)


def mixed(key: Tensor) -> Tensor:
    """As ``mixed`` of csrc/subtree.h; int64 wraps around, and the bits that ``>>`` brings in are cut off."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        key = (key ^ ((key >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return key


def _signed(value: int) -> int:
    """An unsigned number of 64 bits as the int64 of the same bits."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_OF_NEIGHBOURS, _OF_EDGES, _OF_NODES = (mixed(torch.tensor(k) * _GOLDEN) for k in (2, 3, 4))


def subtree_keys(
    indptr: Tensor, indices: Tensor, x: Tensor, num_hops: int, *, edge_type: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Reference implementation of :func:`spin_fast.ops.subtree_keys`."""
    columns = torch.arange(1, x.shape[1] + 1, device=x.device)
    bits = x.double().contiguous().view(torch.int64)
    terms = mixed(bits ^ mixed(columns * _GOLDEN + seed)).where(bits * 2 != 0, 0)  # neither 0 nor -0
    keys = [mixed(terms.sum(1) + seed + (x.shape[1] + 1) * columns.new_tensor(_GOLDEN))]
    row, column = segment_of_entry(indptr, indices.numel()), indices.long()
    for _ in range(num_hops):
        terms = mixed(keys[-1] + _OF_NEIGHBOURS)[column]
        terms = terms if edge_type is None else mixed(terms ^ mixed(edge_type + _OF_EDGES))
        keys.append(mixed(mixed(keys[-1] + _OF_NODES) + torch.zeros_like(keys[-1]).index_add(0, row, terms)))
    return torch.stack(keys)


def csr_of_edges(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`spin_fast.ops.csr_of_edges`; ends must be in range."""
    source, target = edge_index
    row_major, order = target.long() * max(num_nodes, 1) + source, None
    if bool((row_major[1:] < row_major[:-1]).any()):
        order = row_major.argsort(stable=True)
    indptr = offsets(torch.bincount(target, minlength=num_nodes)).to(edge_index.dtype)
    return indptr, source.clone() if order is None else source[order], order


def check_csr(indptr: Tensor, indices: Tensor, ptr: Tensor | None, num_nodes: int) -> str:
    """What is wrong with the contents of a CSR adjacency, or an empty string."""
    problem = check_offsets("indptr", indptr, indices.numel(), "indices")
    if problem or ptr is None:
        return problem or _check_range("indices", indices, 0, num_nodes)
    problem = check_offsets("ptr", ptr, num_nodes, "nodes") or _check_range("indices", indices, 0, num_nodes)
    if problem:
        return problem
    graph = segment_of_entry(ptr, num_nodes)
    row = segment_of_entry(indptr, indices.numel())
    crossing = graph[row] != graph[indices.long()]
    if not bool(crossing.any()):
        return ""
    edge = int(crossing.nonzero()[0])
    return (
        f"indices must stay inside the graph of their row, got indices[{edge}] = {int(indices[edge])} "
        f"(graph {int(graph[indices[edge].long()])}) in row {int(row[edge])} (graph {int(graph[row[edge]])})"
    )


def check_segments(
    ptr: Tensor, index: Tensor | None, count: Tensor | None, num_rows: int, row_ptr: Tensor | None = None
) -> str:
    """What is wrong with the contents of a readout's segments, or an empty string."""
    name, num_entries = ("rows of z", num_rows) if index is None else ("index", index.numel())
    problem = check_offsets("ptr", ptr, num_entries, name)
    if not problem and row_ptr is not None:
        problem = _check_branches(ptr, index, row_ptr)
    elif not problem and index is not None:
        problem = _check_range("index", index, 0, num_rows)
    if not problem and count is not None and bool((count < 1).any()):
        entry = int((count < 1).nonzero()[0])
        problem = f"count must be positive, got count[{entry}] = {int(count[entry])}"
    return problem


def check_sparse_rows(crow_indices: Tensor, col_indices: Tensor, num_features: int) -> str:
    """What is wrong with the indices of sparse rows, or an empty string."""
    problem = check_offsets("crow_indices", crow_indices, len(col_indices), "values")
    problem = problem or _check_range("col_indices", col_indices, 0, num_features)
    if problem:
        return problem
    row = segment_of_entry(crow_indices.long(), len(col_indices))
    bad = (col_indices.diff() <= 0) & (row.diff() == 0)
    if not bool(bad.any()):
        return ""
    entry = int(bad.nonzero()[0])
    first, second = (f"col_indices[{at}] = {int(col_indices[at])}" for at in (entry, entry + 1))
    return f"col_indices must ascend in each row, got {first}, {second} in row {int(row[entry])}"


def _check_branches(ptr: Tensor, index: Tensor | None, row_ptr: Tensor) -> str:
    """Which entry refers to a row of another branch, or an empty string."""
    num_graphs = (len(ptr) - 1) // (len(row_ptr) - 1)
    starts = ptr[:: max(num_graphs, 1)]
    for branch, (low, high) in enumerate(pairwise(row_ptr.tolist())):
        begin, end = (int(starts[branch + i]) if num_graphs else 0 for i in (0, 1))
        if index is None and (begin, end) != (low, high):
            return f"ptr must give branch {branch} its rows, {low} to {high}, got {begin} to {end}"
        if index is not None and (
            problem := _check_range("index", index[begin:end], low, high, begin, f", the rows of branch {branch}")
        ):
            return problem
    return ""


def check_offsets(name: str, offsets: Tensor, end: int, of: str) -> str:
    """What is wrong with the contents of an offset vector, or an empty string."""
    if int(offsets[0]) != 0:
        return f"{name} must start with 0, got {int(offsets[0])}"
    falling = offsets[1:] < offsets[:-1]
    if bool(falling.any()):
        i = int(falling.nonzero()[0])
        return f"{name} must not decrease, got {name}[{i}] = {int(offsets[i])}, {name}[{i + 1}] = {int(offsets[i + 1])}"
    if int(offsets[-1]) != end:
        return f"{name} must end with the number of {of}, {end}, got {int(offsets[-1])}"
    return ""


def _check_range(name: str, values: Tensor, low: int, high: int, first: int = 0, meaning: str = "") -> str:
    outside = (values < low) | (values >= high)
    if not bool(outside.any()):
        return ""
    i = int(outside.nonzero()[0])
    return f"{name} must be in [{low}, {high}){meaning}, got {name}[{first + i}] = {int(values[i])}"
