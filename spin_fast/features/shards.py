"""Features too large for one file, or for memory: computed and stored in shards of bounded size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from .._common import check, files
from ..graphs.batch import GraphBatch
from .chunks import num_branches_of
from .power_features import PowerFeatures
from .storage import FORMAT, INDEX_FORMAT, check_name, index_of, read_index, write_index

HEADER_BYTES = 2048  # bound of what a file holds beside its arrays
FILL = 0.9  # fraction of the bytes to aim at, since the size of further graphs is an estimate

is_shard = partial(files.has_format, format=FORMAT)


def compute(
    graphs: GraphBatch,
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
        max_bytes: of a file, at least 1.
        graphs, num_hops, operator, deduplicate, node_rows: as in :meth:`spin_fast.PowerFeatures.from_graphs`.
    """
    check.integer("max_bytes", max_bytes, 1)
    room = max(max_bytes - HEADER_BYTES, 1)
    operator = check.operators(operator)
    of_entry = 12 if deduplicate else 0  # index, count, row_of_node
    num_branches = num_branches_of(num_hops, operator)
    bytes_per_node = float(num_branches * (graphs.num_features * graphs.x.element_size() + of_entry))
    begin = end = 0
    while begin < len(graphs) or end == 0:
        while True:
            reach = int(graphs.ptr[begin]) + int(FILL * room / max(bytes_per_node, 1))
            tried, end = end, max(int(torch.searchsorted(graphs.ptr, reach, right=True)) - 1, begin + 1)
            end = min(end, len(graphs))
            shard = PowerFeatures.from_graphs(graphs[begin:end], num_hops, operator, deduplicate, node_rows=node_rows)
            bytes_per_node = shard.nbytes / max(shard.num_nodes, 1)
            if end in (tried, len(graphs)) or shard.nbytes > room / 2:
                break
        while shard.nbytes > room and len(shard) > 1:
            shard = shard[: max(1, int(FILL * len(shard) * room / shard.nbytes))].take()
        begin = end = begin + len(shard)
        yield shard
        if len(graphs) == 0:
            return


def check_path(path: Path) -> None:
    """Check, before any work, that :func:`save` can write there; raises its errors."""
    check_name(path)
    files.check_writable(path, is_shard)
    files.check_writable(index_of(path), partial(files.has_format, format=INDEX_FORMAT))


def _place(written: list[tuple[Path, int]], paths: list[Path], index: Path, earlier: set[Path]) -> None:
    """Rename the files and write their index; a failure restores everything."""
    placed: list[Path] = []
    aside: list[tuple[Path, Path]] = []
    try:
        listed = [] if earlier.isdisjoint(paths) else [index]  # is moved aside before the files that it refers to
        for file in [*listed, *filter(Path.is_file, paths)]:
            temporary = files.temporary_name(file)
            file.replace(temporary)
            aside.append((temporary, file))
        for (temporary, _), file in zip(written, paths, strict=True):
            temporary.replace(file)
            placed.append(file)
        write_index(index, [(file, size) for file, (_, size) in zip(paths, written, strict=True)])
    except BaseException:
        with suppress(OSError):  # the error that is raised already counts
            for file in placed:
                file.unlink()
            for temporary, file in reversed(aside):  # the index comes last
                temporary.replace(file)
        raise
    for temporary, _ in aside:
        temporary.unlink()


def save(shards: Iterable[PowerFeatures], path: str | Path) -> list[Path]:
    """Write each shard to a file, and an index of them, for ``PowerFeatures.load``.

    For ``path`` ``NAME.safetensors`` the files are ``NAME-00001-of-00004.safetensors`` and so on, with the index
    ``NAME.safetensors.index.json``; a single shard is just ``path``. Each shard is written as it comes, so that they
    need not be in memory together. Files have temporary names until all are written; then they replace files of their
    names and ``path``, and other files that an earlier call has written for ``path`` are removed. A failure leaves all
    as it was.

    Returns:
        The files, without the index.

    Raises:
        OSError: a file cannot be written; names it. ValueError: there is no shard, or ``path`` is named as an index.
    """
    path = Path(path)
    check_path(path)
    written: list[tuple[Path, int]] = []
    try:
        for shard in shards:
            written.append((files.temporary_name(path), len(shard)))
            shard.save(written[-1][0])
        if not written:
            raise ValueError("shards must hold at least one PowerFeatures, got none")
        index = index_of(path)
        try:
            earlier = {file for file, _ in read_index(index)}
        except (OSError, ValueError):  # missing, or damaged
            earlier = set()
        if len(written) == 1:
            paths = [path]
            written[0][0].replace(path)  # which is read before an index
            index.unlink(missing_ok=True)
        else:
            names = [f"{path.stem}-{number:05}-of-{len(written):05}" for number in range(1, len(written) + 1)]
            paths = [path.with_name(name + path.suffix) for name in names]
            for file in paths:
                files.check_writable(file, is_shard)
            _place(written, paths, index, earlier)
            path.unlink(missing_ok=True)
        own_name = re.compile(rf"{re.escape(path.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(path.suffix)}")
        for file in earlier.difference(paths):
            if own_name.fullmatch(file.name) and is_shard(file):
                file.unlink()
        return paths
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
