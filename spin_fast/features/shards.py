"""Features too large for one file, or for memory: computed and kept in paths of bounded size, each of whole graphs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from .._common import check, files
from ..graphs.batch import GraphBatch
from .chunks import num_branches_of
from .power_features import PowerFeatures
from .storage import FORMAT, index_of, read_index, write_index

HEADER_BYTES = 2048  # of a file, beside its arrays
FILL = 0.9  # of the bytes asked for: what further graphs take is a guess


def compute(
    graphs: GraphBatch,
    num_hops: int,
    operator: str | Sequence[str] = "sym",
    deduplicate: bool = True,
    *,
    max_bytes: int,
    node_rows: bool = True,
) -> Iterator[PowerFeatures]:
    """The features of consecutive graphs, part by part, each of which takes at most ``max_bytes`` in a file.

    A part has its own distinct rows. It is larger only if it is a single graph. How many graphs fit is guessed from the
    part before; so that parts are not much smaller than they may be, some are computed twice.

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
            part = PowerFeatures.from_graphs(graphs[begin:end], num_hops, operator, deduplicate, node_rows=node_rows)
            bytes_per_node = part.nbytes / max(part.num_nodes, 1)
            if end in (tried, len(graphs)) or part.nbytes > room / 2:
                break
        while part.nbytes > room and len(part) > 1:
            part = part[: max(1, int(FILL * len(part) * room / part.nbytes))].take()
        begin = end = begin + len(part)
        yield part
        if len(graphs) == 0:
            return


def check_path(path: Path) -> None:
    """Before any work: whether :func:`save` can write there; its errors otherwise."""
    if path.suffix == ".json":
        raise ValueError(f"path must not end with .json, which is for an index of paths, got {path}")
    files.check_writable(path)


def _name_of(path: Path, number: int, count: int) -> Path:
    return path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")


def _listed(path: Path) -> set[Path]:
    """What the index of ``path`` lists; nothing where it is damaged, or not there."""
    try:
        return {file for file, _ in read_index(index_of(path))}
    except (OSError, ValueError):
        return set()


def _is_named_by_save(file: Path, path: Path) -> bool:
    return re.fullmatch(rf"{re.escape(path.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(path.suffix)}", file.name) is not None


def _place(written: list[tuple[Path, int]], paths: list[Path], index: Path, earlier: set[Path]) -> None:
    """Give paths their names and write their index; if that fails, all is as it was before."""
    placed: list[Path] = []
    aside: list[tuple[Path, Path]] = []
    try:
        listed = [] if earlier.isdisjoint(paths) else [index]  # goes before what it refers to changes
        for file in [*listed, *filter(Path.is_file, paths)]:
            temporary = files.temporary_name(file)
            file.replace(temporary)
            aside.append((temporary, file))
        for (temporary, _), file in zip(written, paths, strict=True):
            temporary.replace(file)
            placed.append(file)
        write_index(index, [(file, size) for file, (_, size) in zip(paths, written, strict=True)])
    except BaseException:
        with suppress(OSError):  # what went wrong before is what counts
            for file in placed:
                file.unlink()
            for temporary, file in reversed(aside):  # the index comes last
                temporary.replace(file)
        raise
    for temporary, _ in aside:
        temporary.unlink()


def save(parts: Iterable[PowerFeatures], path: str | Path) -> list[Path]:
    """Write each part to a file of its own, and an index of them, for ``PowerFeatures.load``.

    For ``path`` ``NAME.safetensors`` the paths are ``NAME-00001-of-00004.safetensors`` and so on, with the index
    ``NAME.safetensors.index.json``; a single part is just ``path``. A part is written when it comes, so that they need
    not be in memory together. The paths have temporary names until all are there; then they replace what is there by
    their names and by that of ``path``, and the paths that an earlier call has written for ``path`` are removed. What
    fails leaves all as it was.

    Returns:
        The paths, without the index.

    Raises:
        OSError: a file cannot be written; names it. ValueError: there is no part, or ``path`` is named as an index.
    """
    path = Path(path)
    check_path(path)
    written: list[tuple[Path, int]] = []
    try:
        for part in parts:
            written.append((files.temporary_name(path), len(part)))
            part.save(written[-1][0])
        if not written:
            raise ValueError("parts must hold at least one PowerFeatures, got none")
        earlier, index = _listed(path), index_of(path)
        if len(written) == 1:
            paths = [path]
            written[0][0].replace(path)  # which is read before an index
            index.unlink(missing_ok=True)
        else:
            paths = [_name_of(path, number, len(written)) for number in range(1, len(written) + 1)]
            _place(written, paths, index, earlier)
            path.unlink(missing_ok=True)
        for file in earlier.difference(paths):
            if _is_named_by_save(file, path) and files.has_format(file, FORMAT):
                file.unlink()
        return paths
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
