"""``spin-fast precompute``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from .. import datasets
from .._common.progress import progress_bar
from ..features import shards
from ..features.chunks import num_branches_of
from ..features.power_features import PowerFeatures
from ..features.storage import index_of
from ._app import Report, by_branch, command
from ._graphs import tell
from ._options import DATASET, DEFAULT_HOPS, HOPS, DataOptions, operator_of, operator_option, out_option, output_option
from ._outputs import check_output

UNITS = {"": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}
UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def _bytes(text: str) -> int:
    """``2GB`` is 2 * 1000**3, ``2GiB`` 2 * 1024**3."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip(), re.IGNORECASE)
    number = 0 if match is None else float(match[1]) * UNITS.get(match[2].upper(), 0)
    if not 1 <= number < 2**63:
        raise typer.BadParameter(f"must be a size such as 500MB, 2GB or 1.5GiB, got {text!r:.50}")
    return int(number)


@command("spin-fast precompute NCI1 --root data --out NCI1.safetensors")
def precompute(
    dataset: Annotated[str, DATASET],
    data: DataOptions,
    out: Annotated[
        Path | None,
        out_option(help="Where to write.", show_default="DATASET.safetensors", rich_help_panel="Output"),
    ] = None,
    operators: Annotated[list[str] | None, operator_option("sym", "Hops")] = None,
    hops: Annotated[int, typer.Option(min=0, help=HOPS, rich_help_panel="Hops")] = DEFAULT_HOPS,
    shard_size: Annotated[
        int | None,
        output_option(parser=_bytes, metavar="SIZE", help="Write files of at most so much, such as 2GB, and an index."),
    ] = None,
    node_rows: Annotated[
        bool, output_option(help="Keep the row of each node, which all of train but --branches hops needs.")
    ] = True,
    deduplicate: Annotated[bool, typer.Option(help="Store equal rows once.", rich_help_panel="Hops")] = True,
) -> Report:
    """Compute the hops of DATASET once and write them to a file, for train --features and PowerFeatures.load.

    They are hops of the features as DATASET has them: what train --degree, --one-hot and --standardize make of those
    depends on the training graphs, which are not chosen yet. The files of an earlier call with the same --out are
    replaced.

    Keys of --json: dataset, graphs, operator, hops, deduplication, bytes, files, index.
    """
    source = datasets.find(dataset, data.root)
    name = source.title
    out = Path(f"{name}.safetensors") if out is None else out
    check_output(out, shards.is_shard, source)
    shards.check_path(out)
    source, read = data.read(source)
    tell(source, read, data.node_features)
    graphs = read.graphs
    operator = operator_of(operators) or "sym"
    settings = (graphs, hops, operator, deduplicate)
    if shard_size is None:
        parts: Iterable[PowerFeatures] = (PowerFeatures.from_graphs(*settings, node_rows=node_rows, progress=True),)
    else:
        if len(graphs):  # a file holds whole graphs
            largest = graphs[int(graphs.ptr.diff().argmax())]
            alone = PowerFeatures.from_graphs(largest, *settings[1:], node_rows=node_rows)
            if shard_size < (needed := alone.nbytes + shards.HEADER_BYTES):
                expected = f"--shard-size must be at least {needed:,} bytes, which the largest graph takes"
                raise ValueError(f"{expected}, got {shard_size:,}")
        parts = shards.compute(*settings, max_bytes=shard_size, node_rows=node_rows)
    stored = torch.zeros(num_branches_of(hops, operator), dtype=torch.int64)

    def counted() -> Iterator[PowerFeatures]:
        with progress_bar("graphs", len(graphs), shard_size is not None) as advance:
            for number, part in enumerate(parts, 1):
                stored.add_(part.row_ptr.diff())
                yield part
                advance(f"{number} file(s)", len(part))

    files = shards.save(counted(), out)
    index = None if len(files) == 1 else index_of(out)
    facts: dict[str, Any] = {
        "dataset": name,
        "graphs": len(graphs),
        "operator": operator,
        "hops": hops,
        "deduplication": [graphs.num_nodes / max(int(number), 1) for number in stored],
        "bytes": sum(file.stat().st_size for file in files),
        "files": files,
        "index": index,
    }
    table = Table(show_header=False, title=f"{hops} hops of {escape(name)}")
    table.add_row("nodes per stored row", f"{by_branch(facts['deduplication'])}  (by branch)")
    table.add_row("bytes", f"{facts['bytes']:,}")
    if index is None:
        table.add_row("file", escape(str(out)))
    else:
        table.add_row("files", escape(f"{files[0]} to {files[-1].name}"))
        table.add_row("index", escape(str(index)))
    return Report(facts, [table])
