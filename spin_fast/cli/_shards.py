"""One job of many: the option ``--shard``, the files of the shards, and which of them are there already."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .._common import files
from ..datasets.reader import Shard, range_of_shard
from ._options import output_option


def _shard(text: str) -> Shard:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    number, of = (0, 0) if match is None else (int(match[1]), int(match[2]))
    if not 1 <= number <= of:
        raise typer.BadParameter(f"must be such as 3/16, the third of 16 shards, got {text!r:.50}")
    return number, of


ShardOption = Annotated[
    Any,
    output_option(
        "--shard",
        parser=_shard,
        metavar="I/N",
        help="Only the I-th of N equal ranges of the graphs, counted from 1, into a file NAME-0000I-of-0000N.",
        show_default="all graphs",
    ),
]
ShardsOption = Annotated[
    int | None,
    output_option("--shards", min=1, help="All of so many shards, one after the other.", show_default="one file"),
]
Resume = Annotated[
    bool, output_option("--resume", help="Keep files that are there; they must be of the same graphs and settings.")
]


def chosen(shard: Shard | None, num_shards: int | None) -> list[Shard | None]:
    """The shards that are made, or None for all graphs in one file."""
    if shard is not None and num_shards is not None:
        raise ValueError("--shard is one of the shards that --shards makes: give one of both")
    return [shard] if num_shards is None else [(number, num_shards) for number in range(1, num_shards + 1)]


def paths_of(out: Path, shards: Iterable[Shard | None]) -> dict[Shard | None, Path]:
    """The file of each shard; ``out`` itself for all graphs."""
    paths = {shard: out if shard is None else files.shard_path(out, *shard) for shard in shards}
    for of in {shard[1] for shard in paths if shard is not None}:
        for path, _, other in files.shards_beside(out):
            if other != of:
                raise ValueError(
                    f"{path} is one of {other} shards, and there are to be {of}; remove such files, or choose "
                    "another --out"
                )
    return paths


def kept(
    paths: dict[Shard | None, Path], facts: dict[str, Any], found: Callable[[Path], str | None]
) -> dict[Shard | None, Path]:
    """Which files are there already: they appear under their names when they are complete.

    Args:
        facts: what this run makes files of, in JSON values.
        found: reads the same of a file, in JSON.

    Raises:
        ValueError: a file was made of something else; says of what.
    """
    there = {shard: path for shard, path in paths.items() if path.is_file() and path.stat().st_size}
    for path in there.values():
        files.remove_leftovers(path)
        known = files.json_or_text(found(path))
        known = known if isinstance(known, dict) else {}
        for name, value in facts.items():
            if known.get(name) != value:
                raise ValueError(
                    f"--resume: {path} has {name} {known.get(name)}, and this run {value}; choose another --out, or "
                    "leave --resume out to replace it"
                )
    return there


def num_graphs_of(shards: Iterable[Shard | None], num_graphs: int) -> int:
    """How many of ``num_graphs`` graphs some shards have."""
    ranges = [(0, num_graphs) if shard is None else range_of_shard(shard, num_graphs) for shard in shards]
    return sum(end - begin for begin, end in ranges)


def as_text(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"
