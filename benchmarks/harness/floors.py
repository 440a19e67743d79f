"""Lower bounds of an operation's time on this machine: to read and write its data once, to fetch rows by index, to
multiply and add as fast as a large matrix product does, or to search for distinct rows that are known.

``floors.c`` has the loops. It is compiled at first use with the system's C compiler for the CPU at hand; without one
there are no floors but those of arithmetic, and :func:`missing` says why. A floor is raced like a rival, interleaved
with the others; one of memory on the same buffers, or on fresh memory of the same allocator and kind of pages.

A floor has a *kind* and *ways* to reach it: ``memory`` is the traffic with ordinary stores or with streaming stores,
which pass the caches by; the faster way counts. Of several kinds the slower counts: an operation has to do all of them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spin_fast import GraphBatch, PowerFeatures
from spin_fast._common.indexing import offsets

from . import pages
from .race import Contender, Floors, clock

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-shared", "-fPIC")
SHARED = 64 << 20  # bytes; of less, handing them to several threads is most of the time, and no floor
CHUNK = 1 << 12  # edges of whole graphs that a hop is repeated on; they and their rows stay in the cache
AHEAD = 128  # edges
PRODUCT_ROWS, PRODUCT_SIDE = 2048, 512
HANDOVERS = 10_000
LARGE = 96 << 20  # bytes of an array that the bandwidth is measured on: far beyond any cache


class _Missing(Exception):
    """There is no compiled library, for the reason given."""


@cache
def _library(index: str = "int32_t", width: int = 1) -> Any:
    """Compile ``floors.c`` for a type of indices and a width of rows, and load it."""
    wanted = [os.environ["CC"]] if os.environ.get("CC") else COMPILERS
    compiler = next((shlex.split(name) for name in wanted if shutil.which(shlex.split(name)[0])), None)
    if compiler is None:
        raise _Missing(f"no C compiler found (looked for {', '.join(wanted)})")
    source = Path(__file__).with_name("floors.c")
    with tempfile.TemporaryDirectory() as folder:  # once loaded, the file is not needed
        binary = Path(folder) / "floors.so"
        arguments = [*FLAGS, f"-DINDEX={index}", f"-DWIDTH={width}", str(source), "-o", str(binary)]
        for cpu in (["-march=native"], []):  # not every compiler knows the CPU that it runs on
            result = subprocess.run([*compiler, *cpu, *arguments], capture_output=True, text=True, check=False)
            if result.returncode == 0:
                break
        else:
            raise _Missing(f"{shlex.join(compiler)} failed: {(result.stderr.strip() or 'no message').splitlines()[-1]}")
        try:
            library = ctypes.CDLL(str(binary))
        except OSError as error:
            raise _Missing(f"what {shlex.join(compiler)} made does not load: {error}") from None
    address, size, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.sweep.argtypes = [size, address, address, address, size, flag]
    library.triad.argtypes = [flag, address, address, address, size]
    library.copy.argtypes = [address, address, size]
    library.gather.argtypes = [address, address, size, flag, address, flag]
    library.hand_over.argtypes = [address, flag, size]
    library.number_rows.argtypes = [address, size, *[address] * 3, ctypes.c_int64, *[address] * 3]
    library.sweep.restype, library.gather.restype = ctypes.c_uint64, ctypes.c_float
    library.number_rows.restype = ctypes.c_int64
    return library


@cache
def missing() -> str:
    """Why there are no floors; empty where there are."""
    try:
        _library()
    except _Missing as reason:
        return str(reason)
    return ""


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _run(slices: Sequence[Contender]) -> None:
    """Run a slice per thread, the first in this one; ctypes lets the others run meanwhile."""
    others = [_pool(len(slices) - 1).submit(other) for other in slices[1:]]
    slices[0]()
    for other in others:
        other.result()


class Traffic(NamedTuple):
    """What goes through memory at one go: every tensor of ``reads`` once, and ``writes`` once, if anything.

    ``writes`` is a tensor to be overwritten, or the shape of a fresh one.
    """

    reads: tuple[Tensor, ...]
    writes: Tensor | tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        written = self.writes.nbytes if isinstance(self.writes, Tensor) else 4 * prod(self.writes or (0,))
        return sum(tensor.nbytes for tensor in self.reads) + written


def memory(*traffic: Traffic, threads: int) -> Floors:
    """The floor of reading and writing, one after the other; for several threads, only of a large one."""
    if missing() or (threads > 1 and sum(one.nbytes for one in traffic) < SHARED):
        return {}
    stores = {"ordinary stores": False, "streaming stores": True}
    return {
        "memory": {
            name: partial(_sweep_all, traffic, streaming, threads)
            for name, streaming in stores.items()
            if not streaming or _library().has_streaming()
        }
    }


def _sweep_all(traffic: tuple[Traffic, ...], streaming: bool, threads: int) -> None:
    for reads, writes in traffic:
        target = writes if isinstance(writes, Tensor) else pages.fresh(writes) if writes else None
        _sweep(reads, target, streaming, threads)


def _sweep(reads: tuple[Tensor, ...], target: Tensor | None, streaming: bool, threads: int) -> None:
    """Addresses are taken anew in each call, which costs a few microseconds less than the least race takes."""
    count, slices = len(reads), []
    for thread in range(threads):
        parts = [_part(tensor, thread, threads) for tensor in reads]
        addresses = (ctypes.c_void_p * count)(*(address for address, _ in parts))
        sizes = (ctypes.c_size_t * count)(*(size for _, size in parts))
        written = (None, 0) if target is None else _part(target, thread, threads)
        slices.append(partial(_library().sweep, count, addresses, sizes, *written, streaming))
    _run(slices)


def _part(tensor: Tensor, part: int, parts: int) -> tuple[int, int]:
    """Address and bytes of one of several parts, which begin on a page."""
    begin, end = (tensor.nbytes * cut // parts // 4096 * 4096 for cut in (part, part + 1))
    return tensor.data_ptr() + begin, (tensor.nbytes if part + 1 == parts else end) - begin


def gather(graphs: GraphBatch, hops: int, threads: int) -> Floors:
    """The floor of fetching the rows of ``x`` that the edges name, in every hop, with nothing done to them.

    The edges are one flat list, without nodes. Hops are repeated on a few whole graphs at a time, or on a large one.
    For several threads, only of a large batch.
    """
    if missing() or (threads > 1 and 4 * graphs.num_edges * graphs.num_features * hops < SHARED):
        return {}
    library = _library({torch.int32: "int32_t", torch.int64: "int64_t"}[graphs.indices.dtype], graphs.num_features)
    of_graph = graphs.indptr[graphs.ptr].long()
    chunks = of_graph[torch.searchsorted(of_graph, torch.arange(0, graphs.num_edges, CHUNK))]
    of_thread = torch.arange(threads + 1) * graphs.num_edges // threads
    bounds = torch.cat([chunks, of_thread]).unique()
    cuts = torch.searchsorted(bounds, of_thread).tolist()

    def run(ahead: int) -> None:
        edges, x = graphs.indices.data_ptr(), graphs.x.data_ptr()
        _run(
            [
                partial(library.gather, edges, bounds[first:].data_ptr(), last - first, hops, x, ahead)
                for first, last in pairwise(cuts)
            ]
        )

    return {"gather": {"rows as they come": partial(run, 0), "rows asked for ahead": partial(run, AHEAD)}}


def told_search(
    graphs: GraphBatch,
    features: PowerFeatures,
    powers: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    *,
    by_slots: bool = False,
) -> Callable[[], tuple[Tensor, ...]] | None:
    """The search for the distinct rows of ``powers``, chunk by chunk, by one who knows them.

    A search that compares whole rows does as much, but that it may keep them sparse. With ``by_slots`` it finds them in
    a table of twice as many slots as rows or more, made in the call, each row at once in a slot of its own.

    ``features`` are the answers. Each call returns rows, ``ptr``, ``index``, ``count`` and ``row_of_node`` of these.
    """
    if missing() or features.row_of_node is None or features.index is None or features.count is None:
        return None
    library = _library(width=graphs.num_features)
    num_rows = features.row_ptr.diff().tolist()
    numbers = (features.row_of_node - features.row_ptr[:-1, None]).int()
    nodes = torch.arange(graphs.num_nodes)
    of_graph = torch.arange(len(graphs)).repeat_interleave(graphs.ptr.diff())
    like = torch.empty(numbers.shape, dtype=torch.int64)
    for first, number, rows in zip(like, numbers, num_rows, strict=True):
        entries, entry = (of_graph * rows + number).unique(return_inverse=True)
        first.copy_(torch.empty_like(entries).scatter_reduce_(0, entry, nodes, "amin", include_self=False)[entry])
    cuts = offsets(torch.tensor([part.shape[1] for part, _ in powers()])).tolist()
    told = [((like[:, a:b] - a).int().contiguous(), numbers[:, a:b].contiguous()) for a, b in pairwise(cuts)]
    lists = features.ptr, features.index, features.count
    sizes = [1 << (2 * rows - 1).bit_length() if by_slots else 0 for rows in num_rows]
    places = [
        torch.randperm(size)[number.long()].int() if size else number
        for size, number in zip(sizes, numbers, strict=True)
    ]

    def run() -> tuple[Tensor, ...]:
        known = [graphs.x.new_empty(rows, graphs.num_features) for rows in num_rows]
        tables = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        row_of_node, kept = torch.empty_like(numbers), [0] * len(num_rows)
        for (part, _), answers, begin in zip(powers(), told, cuts, strict=False):
            for r, arrays in enumerate(zip(part, *answers, strict=True)):
                rows, before, number = (array.data_ptr() for array in arrays)
                to = known[r].data_ptr(), kept[r], row_of_node[r, begin:].data_ptr()
                table = (tables[r].data_ptr(), places[r][begin:].data_ptr()) if by_slots else (None, None)
                kept[r] = library.number_rows(rows, part.shape[1], before, number, *to, *table)
        assert kept == num_rows
        return *known, *(array.clone() for array in lists), row_of_node

    return run


def arithmetic(operations: float) -> Floors:
    """The floor of so many floating-point operations at the rate of torch's large products of float32 matrices."""
    left, right = torch.randn(PRODUCT_ROWS, PRODUCT_SIDE), torch.randn(PRODUCT_SIDE, PRODUCT_SIDE)
    whole, rest = divmod(ceil(operations / (2 * PRODUCT_SIDE**2)), PRODUCT_ROWS)

    def run() -> None:
        for rows in [*[PRODUCT_ROWS] * whole, rest]:
            torch.mm(left[:rows], right)

    return {"arithmetic": {"large products": run}}


class Bandwidth(NamedTuple):
    """What the memory gives to so many threads, in GB/s of bytes read and written; the best of several passes.

    ``floor`` is the loop of the memory floors on the traffic of the triad: were it much below, it would be no floor.
    """

    threads: int
    triad: float
    copy: float
    read: float
    floor: float


def bandwidth(threads: int) -> Bandwidth:
    """Measure on arrays far beyond the caches."""
    arrays = a, b, c = tuple(pages.touched((LARGE // 4,)) for _ in range(3))
    ways = [False, True] if _library().has_streaming() else [False]
    library = _library()

    def sliced(call: Callable[..., object], *tensors: Tensor) -> Contender:
        parts = [[_part(tensor, thread, threads) for tensor in tensors] for thread in range(threads)]
        return partial(_run, [partial(call, *(at for at, _ in part), part[0][1]) for part in parts])

    passes: dict[str, list[Contender]] = {
        "triad": [sliced(partial(library.triad, int(streaming)), *arrays) for streaming in ways],
        "copy": [sliced(library.copy, a, b)],
        "read": [partial(_sweep, (a, b), None, False, threads)],
        "floor": [partial(_sweep, (b, c), a, streaming, threads) for streaming in ways],
    }
    moved = {"triad": 3 * LARGE, "copy": 2 * LARGE, "read": 2 * LARGE, "floor": 3 * LARGE}
    now = clock(threads)
    best = dict.fromkeys(passes, float("inf"))
    for _ in range(10):
        for name, forms in passes.items():
            for form in forms:
                start = now()
                form()
                best[name] = min(best[name], now() - start)
    return Bandwidth(threads, **{name: moved[name] / seconds / 1e9 for name, seconds in best.items()})


def hand_over() -> float:
    """Seconds until a cache line that a thread has handed to another one is back; the best of several passes.

    Where the system moves threads between cores, this tells whether they share a cache: hardly more than 100 ns then.
    """
    turn, now, best = torch.zeros(32, dtype=torch.int32), clock(2), float("inf")
    for _ in range(10):
        start = now()
        _run([partial(_library().hand_over, turn.data_ptr(), mine, HANDOVERS) for mine in (0, 1)])
        best = min(best, now() - start)
    return best / HANDOVERS
