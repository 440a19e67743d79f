"""``spin-fast precompute``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .. import datasets
from .._common.progress import progress_bar
from ..datasets.reader import Shard, range_of_shard
from ..features import shards, storage
from ..features.power_features import PowerFeatures
from ..features.storage import index_of
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures
from ._app import Report, by_branch, command
from ._fitting import Fitting, fit_report, is_node_features
from ._graphs import CHUNK_GRAPHS, Description, listed_twice, title_of
from ._options import DATASET, DEFAULT_HOPS, HOPS, DataOptions, operator_of, operator_option, out_option, output_option
from ._outputs import check_output
from ._shards import Resume, ShardOption, ShardsOption, as_text, chosen, kept, paths_of

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
    fitting: Fitting,
    out: Annotated[
        Path | None,
        out_option(help="Where to write.", show_default="DATASET.safetensors, or .json", rich_help_panel="Output"),
    ] = None,
    operators: Annotated[list[str] | None, operator_option("sym", "Hops")] = None,
    hops: Annotated[int, typer.Option(min=0, help=HOPS, rich_help_panel="Hops")] = DEFAULT_HOPS,
    shard_size: Annotated[
        int | None,
        output_option(parser=_bytes, metavar="SIZE", help="Write files of at most so much, such as 2GB, and an index."),
    ] = None,
    shard: ShardOption = None,
    num_shards: ShardsOption = None,
    join: Annotated[bool, output_option("--join", help="Only write the index of the files of all shards.")] = False,
    resume: Resume = False,
    node_rows: Annotated[
        bool, output_option(help="Keep the row of each node, which all of train but --branches hops needs.")
    ] = True,
    deduplicate: Annotated[bool, typer.Option(help="Store equal rows once.", rich_help_panel="Hops")] = True,
) -> Report:
    """Compute the hops of DATASET once and write them to a file, for train --features and PowerFeatures.load.

    They are hops of the features as DATASET has them, or of what --degree, --one-hot and --standardize make of these.
    That depends on the training graphs: those of train with the same --seed, --splits and --fold. The files of an
    earlier call with the same --out are replaced. Only some graphs are in memory at a time, unless they are of .nel,
    built in, or of tables that are not in the order of the graphs.

    Several jobs may share the graphs: each makes the file of one --shard, and when all are there, --join makes their
    index. --shards makes all files and the index. With --resume files that are there are kept. Node features are fitted
    before the first --shard, by a job with --fit-only, whose file the others take by --fitted.

    Keys of --json: dataset, graphs, operator, hops, deduplication, bytes, files, kept, index. With --fit-only: dataset,
    features, standardized, file.
    """
    source = datasets.find(dataset, data.root)
    title = source.title
    out = Path(f"{title}.json" if fitting.only else f"{title}.safetensors") if out is None else out
    fitting.check(shard)
    made = chosen(shard, num_shards)
    if fitting.only and (join or made != [None] or shard_size is not None or out.suffix != ".json"):
        raise ValueError("--fit-only writes one --out FILE.json: leave --join, --shards and --shard-size out")
    if shard_size is not None and made != [None]:
        raise ValueError("--shard-size is for all graphs, --shard for some: give one of both")
    if join and (shard_size is not None or made != [None]):
        raise ValueError("--join is for files that are there: leave --shard, --shards and --shard-size out")
    if resume and made == [None]:
        raise ValueError("--resume needs --shard or --shards, whose files may be there")
    if fitting.only:
        check_output(out, is_node_features, source, fitting.splits)
        source, reader = data.open(source)
        fitted = fitting.fit(source, reader, _chunks(source, data, reader, progress=reader.whole is None))
        fitted.save(out)
        return fit_report(title, fitted, out)
    paths = paths_of(out, made)
    for path in [*paths.values()] + ([] if num_shards is None else [out]):
        check_output(path, shards.is_shard, source, fitting.fitted, fitting.splits)
        shards.check_path(path)
    if join:
        return _report(title, shards.join(out), [], index_of(out))
    node_features = fitting.load()
    source, reader = data.open(source)
    if fitting.given is not None:
        node_features = fitting.fit(source, reader, _chunks(source, data, reader, progress=reader.whole is None))

    def chunks(shard: Shard | None, progress: bool) -> Iterator[GraphBatch]:
        told = fitting.given is not None
        return _chunks(source, data, reader, shard, progress=progress, is_told=told, node_features=node_features)

    settings = (hops, operator_of(operators) or "sym", deduplicate)
    if shard_size is not None:
        header = "" if node_features is None else json.dumps(json.dumps(node_features.to_dict()))
        room = max(shard_size - len(header), 1)
        that_fit = _of_size(chunks(None, False), shard_size, len(header), settings, node_rows)
        of_size = shards.compute(that_fit, *settings, max_bytes=room, node_rows=node_rows)
        written = shards.save(_counted(of_size, len(reader)), out)
        return _report(title, written, [], None if len(written) == 1 else index_of(out))

    def computed(shard: Shard | None) -> PowerFeatures:
        of_shard = chunks(shard, reader.whole is None)
        if reader.whole is None:
            return PowerFeatures.from_chunks(of_shard, *settings, node_rows=node_rows)
        (graphs,) = of_shard
        return PowerFeatures.from_graphs(graphs, *settings, node_rows=node_rows, progress=True)

    facts = dict(zip(("hops", "operator", "deduplicate"), settings, strict=True))
    facts |= {"dataset": title, "num_graphs": len(reader), "node_rows": node_rows, "read": data.read_options}
    facts |= {"node_features": None if node_features is None else node_features.fingerprint}
    made_of = json.dumps(facts)
    there = kept(paths, json.loads(made_of), storage.made_of) if resume else {}
    for one, path in paths.items():
        if one is None:
            shards.save([computed(one)], path)
        elif one not in there:
            made_anew = computed(one)
            shards.forget(out, path)
            made_anew.save(path, made_of=made_of)
    if num_shards is not None:
        return _report(title, shards.join(out), [*there.values()], index_of(out))
    return _report(title, [*paths.values()], [*there.values()], None, shard)


def _chunks(
    source: datasets.Source,
    data: DataOptions,
    reader: datasets.Reader,
    shard: Shard | None = None,
    *,
    progress: bool,
    is_told: bool = False,
    node_features: NodeFeatures | None = None,
) -> Iterator[GraphBatch]:
    """Yield the graphs of a shard, those that are in memory at once, with ``node_features`` in the place of theirs.

    Describe them when all have been read, unless that is told already.
    """
    begin, end = (0, len(reader)) if shard is None else range_of_shard(shard, len(reader))
    description = Description(source, data.node_features, shard)
    size = CHUNK_GRAPHS if reader.whole is None else max(end - begin, 1)
    with progress_bar("graphs", end - begin, progress) as advance:
        for read in reader.chunks(size, shard):
            description.add(read)
            if reader.whole is not None and not is_told:
                description.tell()
            graphs, number = read.graphs, len(read.names)
            del read
            if node_features is not None:
                graphs = node_features.transform(graphs)
            yield graphs
            del graphs  # which need not be in memory when the next are read
            advance("", number)
    if reader.whole is None and not is_told:
        if data.undirected and description.twice and shard is None:  # some graphs may be symmetric by chance
            raise listed_twice(source)
        description.tell()


def _of_size(
    chunks: Iterable[GraphBatch], max_bytes: int, told_bytes: int, settings: tuple[int, str, bool], node_rows: bool
) -> Iterator[GraphBatch]:
    """The chunks, if each graph fits in a file, which holds whole graphs."""
    most = -1
    for graphs in chunks:
        sizes = graphs.num_nodes_per_graph
        if len(graphs) and int(sizes.max()) > most:
            most = int(sizes.max())
            alone = PowerFeatures.from_graphs(graphs[int(sizes.argmax())], *settings, node_rows=node_rows)
            if max_bytes < (needed := alone.nbytes + shards.HEADER_BYTES + told_bytes):
                expected = f"--shard-size must be at least {needed:,} bytes, which a graph of {most:,} nodes takes"
                raise ValueError(f"{expected}, got {max_bytes:,}")
        yield graphs
        del graphs


def _counted(parts: Iterable[PowerFeatures], num_graphs: int) -> Iterator[PowerFeatures]:
    with progress_bar("graphs", num_graphs, True) as advance:
        for number, part in enumerate(parts, 1):
            yield part
            advance(f"{number} file(s)", len(part))


def _report(
    dataset: str, files: list[Path], there: list[Path], index: Path | None, shard: Shard | None = None
) -> Report:
    """What the files hold; ``there`` are those that have been kept."""
    made = shards.ShardedFeatures(map(PowerFeatures.load, files))
    facts: dict[str, Any] = {
        "dataset": dataset,
        "graphs": len(made),
        "operator": made.operator,
        "hops": made.num_hops,
        "deduplication": made.deduplication,
        "bytes": sum(file.stat().st_size for file in files),
        "files": files,
        "kept": there,
        "index": index,
    }
    table = Table(show_header=False, title=f"{made.num_hops} hops of {escape(title_of(dataset, shard))}")
    table.add_row("nodes per stored row", f"{by_branch(facts['deduplication'])}  (by branch)")
    table.add_row("bytes", f"{facts['bytes']:,}")
    table.add_row("file" if len(files) == 1 else "files", escape(as_text(files)))
    if there:
        table.add_row("kept", f"{len(there)} file(s) that were there")
    if index is not None:
        table.add_row("index", escape(str(index)))
    return Report(facts, [table])
