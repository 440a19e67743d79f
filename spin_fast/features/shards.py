"""Features too large for one file, or for memory: computed, stored and read in shards of bounded size."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._common import check, files
from .._common.indexing import GraphIds, graph_ids, offsets
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures
from ..ops import reference
from . import storage
from .chunks import Stream, num_branches_of
from .identical import graph_keys
from .power_features import PowerFeatures
from .storage import (
    FORMAT,
    INDEX_FORMAT,
    again_if_replaced,
    check_name,
    index_of,
    is_indexed,
    naming,
    read_index,
    write_index,
)

HEADER_BYTES = 2048  # bound of what a file holds beside its arrays
FILL = 0.9  # fraction of the bytes to aim at, since the size of further graphs is an estimate

is_shard = partial(files.has_format, format=FORMAT)


def compute(
    graphs: GraphBatch | Iterable[GraphBatch],
    num_hops: int,
    operator: str | Sequence[str] = "sym",
    deduplicate: bool = True,
    *,
    max_bytes: int,
    node_rows: bool = True,
) -> Iterator[PowerFeatures]:
    """Compute the features of consecutive graphs in shards that take at most ``max_bytes`` in a file each.

    A shard has its own distinct rows, and is larger only if it is a single graph. How many graphs fit is estimated from
    the shard before; a shard that turns out much smaller than it may be is computed again with more graphs.

    Args:
        graphs: the graphs, or chunks of them as for :meth:`spin_fast.PowerFeatures.from_chunks`; of these no more are
            in memory than a shard and a chunk.
        max_bytes: of a file, at least 1.
        num_hops, operator, deduplicate, node_rows: as in :meth:`spin_fast.PowerFeatures.from_graphs`.
    """
    check.integer("max_bytes", max_bytes, 1)
    check.integer("num_hops", num_hops, 0)
    check.flag("deduplicate", deduplicate)
    check.flag("node_rows", node_rows)
    room = max(max_bytes - HEADER_BYTES, 1)
    operator = check.operators(operator)
    stream = Stream([graphs] if isinstance(graphs, GraphBatch) else graphs, operator)
    of_entry = 12 if deduplicate else 0  # index, count, row_of_node
    num_branches = num_branches_of(num_hops, operator)
    bytes_per_node = float(num_branches * (stream.x.shape[1] * stream.x.element_size() + of_entry))
    chunks = iter(stream)
    held = next(chunks)
    begin, is_first = 0, True
    while True:
        end = begin
        while True:
            wanted = int(FILL * room / max(bytes_per_node, 1))
            if more := _at_least(wanted - (held.num_nodes - int(held.ptr[begin])), chunks):
                held, begin, end = GraphBatch.concatenate([held[begin:], *more]), 0, end - begin
                del more
            if begin == len(held) and not is_first:
                return
            reach = int(held.ptr[begin]) + wanted
            tried, end = end, max(int(torch.searchsorted(held.ptr, reach, right=True)) - 1, begin + 1)
            end = min(end, len(held))
            shard = PowerFeatures.from_graphs(held[begin:end], num_hops, operator, deduplicate, node_rows=node_rows)
            bytes_per_node = shard.nbytes / max(shard.num_nodes, 1)
            if end == tried or held.num_nodes <= reach or shard.nbytes > room / 2:
                break
        while shard.nbytes > room and len(shard) > 1:
            shard = shard[: max(1, int(FILL * len(shard) * room / shard.nbytes))].take()
        begin, is_first = begin + len(shard), False
        yield shard


def _at_least(num_nodes: int, chunks: Iterator[GraphBatch]) -> list[GraphBatch]:
    """The next chunks, with more than so many nodes; fewer if these are the last."""
    found: list[GraphBatch] = []
    while num_nodes >= 0 and (chunk := next(chunks, None)) is not None:
        found.append(chunk)
        num_nodes -= chunk.num_nodes
    return found


def check_path(path: Path) -> None:
    """Check, before any work, that :func:`save` can write there; raises its errors."""
    check_name(path)
    files.check_writable(path, is_shard)
    files.check_writable(index_of(path), partial(files.has_format, format=INDEX_FORMAT))


def save(shards: Iterable[PowerFeatures], path: str | Path) -> list[Path]:
    """Write each shard to a file, and an index of them, for ``PowerFeatures.load``.

    For ``path`` ``NAME.safetensors`` the files are ``NAME~1f2e3d4c-00001-of-00004.safetensors`` and so on, where
    ``1f2e3d4c`` is another at each call, with the index ``NAME.safetensors.index.json``; a single shard is just
    ``path``. Each shard is written as it comes, so that they need not be in memory together.

    No file of an earlier call is touched until all is written; then one renaming or removal puts the new features in
    their place, and the files that no index names any more are removed. So a failure leaves all as it was, and a
    process that is killed leaves either the old or the new features under ``path``; what else it leaves is removed by
    the next call. Of two calls at once the later one counts.

    Returns:
        The files, without the index.

    Raises:
        OSError: a file cannot be written; names it. ValueError: there is no shard, or ``path`` is named as an index.
    """
    path = Path(path)
    check_path(path)
    index = index_of(path)
    try:
        with files.temporary_folder(path) as folder:
            written: list[tuple[Path, int]] = []
            for shard in shards:
                written.append((folder / f"{len(written)}{path.suffix}", len(shard)))
                shard.save(written[-1][0])
            if not written:
                raise ValueError("shards must hold at least one PowerFeatures, got none")
            if len(written) == 1:
                paths = [path]
                written[0][0].replace(path)  # which is read before an index
                index.unlink(missing_ok=True)
            else:
                tag = folder.suffixes[-2][1:]
                paths = [files.shard_path(path, number, len(written), tag) for number in range(1, len(written) + 1)]
                for (temporary, _), file in zip(written, paths, strict=True):
                    temporary.replace(file)
                write_index(index, [(file, size) for file, (_, size) in zip(paths, written, strict=True)])
                path.unlink(missing_ok=True)
        return paths
    finally:
        _remove_unused(path)


def join(path: str | Path) -> list[Path]:
    """Make an index of shards that were made apart, so that ``PowerFeatures.load(path)`` finds them.

    For ``path`` ``NAME.safetensors`` they are the files ``NAME-00001-of-00016.safetensors`` to
    ``NAME-00016-of-00016.safetensors``, which ``features.save`` or ``spin-fast precompute --shard`` have written, the
    graphs of each after those of the one before. They stay as they are; a file ``path`` itself is removed, since it
    would be read before an index. It may be called again, and by several processes at once.

    Returns:
        The files, without the index.

    Raises:
        FileNotFoundError: a shard is missing; names it. ValueError: a file is damaged or differs from those before it;
            or there are shards of several numbers. OSError: the index cannot be written.
    """
    path = Path(path)
    check_path(path)
    numbers = sorted({of for *_, of in files.shards_beside(path)})
    if not numbers:
        raise FileNotFoundError(f"{path} has no shards beside it, such as {files.shard_path(path, 1, 16).name}")
    if len(numbers) > 1:
        told = " and ".join(f"one of {of}" for of in numbers)
        raise ValueError(f"{path} must have shards of one number beside it, got {told}; remove those of the others")
    (of,) = numbers
    paths = {number: files.shard_path(path, number, of) for number in range(1, of + 1)}
    if missing := [number for number, shard in paths.items() if not shard.exists()]:
        raise FileNotFoundError(
            f"{path} lacks {len(missing)} of {of} shards; make each with the options of the others, such as "
            f"{paths[missing[0]]} by spin-fast precompute DATASET --out {path} --shard {missing[0]}/{of}"
        )
    sizes, first = {}, None
    for shard in paths.values():
        part = PowerFeatures.load(shard)
        facts = _facts_of(shard, part)
        first = first or facts
        if facts != first:
            names = [name for name in {**first, **facts} if first.get(name) != facts.get(name)]
            told = "; ".join(f"{name} {first.get(name)}, here {facts.get(name)}" for name in names)
            raise ValueError(f"{shard} must be like the shards before it, but they differ: {told}")
        sizes[shard] = len(part)
    write_index(index_of(path), [*sizes.items()])
    path.unlink(missing_ok=True)
    _remove_unused(path)
    return [*sizes]


def forget(path: Path, shard: Path) -> None:
    """Remove the index of ``path`` if it names ``shard``, which is to be replaced: others may be replaced later."""
    index = index_of(path)
    with suppress(FileNotFoundError, ValueError):  # nothing is loaded by a damaged one
        if any(file == shard for file, _ in read_index(index)):
            index.unlink()


def load(path: str | Path) -> ShardedFeatures:
    """Map what :func:`save` has written, to be read shard by shard; see :class:`ShardedFeatures`.

    Args:
        path: as in :meth:`spin_fast.PowerFeatures.load`: a file of features, or those of an index.

    Raises:
        FileNotFoundError: no such file. ValueError: a file is damaged, or not like the first one; names it.
    """
    path = Path(path)
    return again_if_replaced(path, partial(_mapped, path))


def _mapped(path: Path) -> ShardedFeatures:
    if not is_indexed(path):
        return ShardedFeatures([PowerFeatures.load(path)], [path])
    index = index_of(path)
    named = read_index(index)
    shards = [PowerFeatures.load(file) for file, _ in named]
    with naming(index):
        for shard, (file, num_graphs) in zip(shards, named, strict=True):
            if len(shard) != num_graphs:
                raise ValueError(f"{file} must have {num_graphs} graphs, got {len(shard)}")
        return ShardedFeatures(shards, [file for file, _ in named])


class ShardedFeatures:
    """Features whose shards stay in their files, mapped: ``training.fit`` and ``predict`` read one after the other.

    The system keeps what has been read in memory while there is room, and reads it again otherwise; the next shard is
    read while one is worked on. Each has its own distinct rows.

    Args:
        shards: at least one, alike in features, hops, operators, dtype, device and labels.
        files: those that the shards are mapped from, to be read ahead; empty where they are in memory.

    Attributes:
        shards: the features of consecutive graphs.

    Raises:
        TypeError, ValueError: a shard is no ``PowerFeatures``, or does not fit the first one.
    """

    def __init__(self, shards: Iterable[PowerFeatures], files: Sequence[Path] = ()) -> None:
        self.shards, self._files = tuple(shards), tuple(files)
        if not self.shards:
            raise ValueError("shards must hold at least one PowerFeatures, got none")
        for shard in self.shards:
            if not isinstance(shard, PowerFeatures):
                raise TypeError(f"shards must hold PowerFeatures, got {type(shard).__name__}")
            if shard is not self.shards[0] and shard._kind != self.shards[0]._kind:
                raise ValueError(f"shards must be alike, got {self.shards[0]._kind} and {shard._kind}")

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __repr__(self) -> str:
        return f"ShardedFeatures({len(self.shards)} shards, {len(self)} graphs, {self.shards[0]._kind})"

    @property
    def num_features(self) -> int:
        """``d``."""
        return self.shards[0].num_features

    @property
    def num_hops(self) -> int:
        """``R``, of each operator."""
        return self.shards[0].num_hops

    @property
    def num_operators(self) -> int:
        """``k``."""
        return self.shards[0].num_operators

    @property
    def operator(self) -> str:
        """The graph operator, or several with commas between them."""
        return self.shards[0].operator

    @property
    def node_features(self) -> NodeFeatures | None:
        """What the graphs went through before."""
        return self.shards[0].node_features

    @property
    def device(self) -> torch.device:
        """Where the shards are."""
        return self.shards[0].rows.device

    @property
    def deduplication(self) -> list[float]:
        """Nodes per stored row of each branch, over all shards."""
        num_nodes = sum(int(shard.node_ptr[-1]) for shard in self.shards)
        stored = torch.stack([shard.row_ptr.diff() for shard in self.shards]).sum(0)
        return [num_nodes / size if size else 1.0 for size in stored.tolist()]

    @cached_property
    def _ptr(self) -> Tensor:
        return offsets(torch.tensor([len(shard) for shard in self.shards], device="cpu"))

    @cached_property
    def y(self) -> Tensor | None:
        """Labels of all graphs, in memory."""
        labels = [shard.y for shard in self.shards if shard.y is not None]
        return torch.cat(labels) if labels else None

    def __getitem__(self, ids: GraphIds) -> PowerFeatures:
        """The features of some graphs, in memory if they are of several shards."""
        (first, *_), several = self.shards, len(self.shards) > 1
        if not several:
            return first[ids]
        found = [*self.parts(graph_ids(ids, len(self)))]
        if not found:
            return first[:0]
        joined = PowerFeatures.concatenate([shard[of] for shard, of, _ in found])
        return joined[torch.cat([places for _, _, places in found]).argsort()].take()

    def storage_ids(self, ids: Tensor) -> Tensor:
        """Numbers of the graphs ``ids`` in all storages, where one that is selected twice has the same."""
        first = accumulate((shard.node_ptr.numel() - 1 for shard in self.shards), initial=0)
        of_shards = [shard.storage_ids(slice(None)).cpu() for shard in self.shards]
        return torch.cat([stored + begin for begin, stored in zip(first, of_shards, strict=False)])[ids]

    def to(self, device: str | torch.device) -> ShardedFeatures:
        """The same on a device; in memory, unless that is where the files are mapped."""
        device = torch.device(device)
        return self if device == self.device else ShardedFeatures(shard.to(device) for shard in self.shards)

    def identical_graphs(self, *, joint: bool = False) -> Tensor:
        """Find the graphs that no SPIN can tell apart, as :meth:`spin_fast.PowerFeatures.identical_graphs` does.

        Graphs of several shards are compared by a hash of 64 bits.
        """
        if len(self.shards) == 1:
            return self.shards[0].identical_graphs(joint=joint)
        check.flag("joint", joint)
        return reference.first_positions(torch.cat([graph_keys(shard, joint=joint) for shard in self.shards]))

    def parts(self, ids: Tensor) -> Iterator[tuple[PowerFeatures, Tensor, Tensor]]:
        """Yield the shards that have some of the graphs ``ids``, and the numbers of these there.

        Shards come in the order in which ``ids`` name them first, their graphs in that of ``ids``. Also yields the
        places of these graphs in ``ids``.
        """
        if len(self.shards) == 1:
            yield self.shards[0], ids, torch.arange(len(ids), device="cpu")
            return
        shard_of = torch.searchsorted(self._ptr, ids, right=True) - 1
        numbers = dict.fromkeys(shard_of.tolist())
        following = [*numbers][1:]
        for number in numbers:
            if following and self._files:
                _read_ahead(self._files[following.pop(0)])
            (places,) = (shard_of == number).nonzero(as_tuple=True)
            yield self.shards[number], ids[places] - self._ptr[number], places


def sharded(features: PowerFeatures | ShardedFeatures) -> ShardedFeatures:
    """The features as shards, of which those in memory are one."""
    if not isinstance(features, (PowerFeatures, ShardedFeatures)):
        raise TypeError(f"features must be PowerFeatures or ShardedFeatures, got {type(features).__name__}")
    return features if isinstance(features, ShardedFeatures) else ShardedFeatures([features])


def _read_ahead(file: Path) -> None:
    """Have a file read into memory, without waiting, where the system can be asked to."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), file.open("rb") as opened:  # a mapped file may be gone, or its relative path
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _facts_of(shard: Path, part: PowerFeatures) -> dict[str, Any]:
    """What shards that are joined have in common: their arrays, and what they were made of."""
    made_of = files.json_or_text(storage.made_of(shard))
    return (made_of if isinstance(made_of, dict) else {"made of": made_of}) | {"arrays": part._kind}


def _remove_unused(path: Path) -> None:
    """Remove the files of earlier calls for ``path``, or of ones that failed, which its index does not name."""
    index, suffix = index_of(path), re.escape(path.suffix)
    own_name = re.compile(rf"{re.escape(path.stem)}~([0-9a-f]{{8}})-\d{{5,}}-of-\d{{5,}}{suffix}")
    with suppress(OSError, ValueError):  # they are in no one's way, and the next call tries again
        found = [(file, match[1]) for file in path.parent.iterdir() if (match := own_name.fullmatch(file.name))]
        done = [file for file, tag in found if not files.temporary_name(path, tag).exists()]  # no writer is at work
        named = {file for file, _ in read_index(index)} if index.exists() else set()  # later: it may have named them
        for file in {*done} - named:
            if is_shard(file):
                file.unlink()
