"""``spin-fast info``: what is installed, what is in a dataset, and what in a file of ``spin-fast train``."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from .. import __version__, build_info, datasets, training
from .._common import check, files
from ..features import shards
from ..features.storage import INDEX_FORMAT, index_of
from ..training.checkpoints import CHECKPOINT_FORMAT
from ._app import Report, by_branch, command, console, kernels_on
from ._errors import message_of
from ._graphs import columns_of, hint_on_edges, hint_on_features
from ._options import DATASET, DEFAULT_HOPS, HOPS, DataOptions, Fold, Splits, data_option, operator_of, operator_option

MOST_CLASSES = 10  # that the table names
MOST_CHARACTERS = 200  # of a setting of a model


@command("spin-fast info NCI1 --root data --hops 5")
def info(
    data: DataOptions,
    dataset: Annotated[str | None, DATASET] = None,
    operators: Annotated[list[str] | None, operator_option("sym", "Hops")] = None,
    hops: Annotated[int, typer.Option(min=0, help=HOPS, rich_help_panel="Hops")] = DEFAULT_HOPS,
    splits: Splits = None,
    fold: Fold = None,
    seed: Annotated[int, data_option(min=0, help="Of the split, where it is drawn.")] = 0,
) -> Report:
    """Show what is in DATASET; without one what is installed, which kernels run, and which datasets are found.

    In the place of DATASET may be a model that spin-fast train has written, or features that spin-fast precompute has,
    a file or the index of several: this shows their kind and their settings.

    Graphs are duplicates if all models of these hops and this operator give them the same scores. Where the labels of
    duplicates differ, some predictions are wrong whatever the model, which bounds the accuracy over all graphs. Test
    graphs with a duplicate in training are not new to the model; published folds are counted where they are found.

    Edges are counted once however often they are repeated, and in an undirected graph both directions are one edge.
    Self-loops count; the density leaves them out.

    Keys of --json: dataset, graphs, nodes, edges, density, empty_graphs, isolated_nodes, self_loops, repeated_edges,
    directed, weighted, features, classes, tasks, operator, hops, bytes, deduplication, joint_deduplication, duplicates,
    splits, splits_missing. Of a model: model, kind, parameters, config, metadata. Of features: features, graphs, nodes,
    labels, columns, dtype, node_features, operator, hops, deduplication, bytes, files.
    """
    if dataset is None:
        return _installation(data.root)
    if files.has_format(Path(dataset), CHECKPOINT_FORMAT):
        return _model(Path(dataset))
    if shards.is_shard(path := Path(dataset)) or files.has_format(index_of(path), INDEX_FORMAT):
        return _features(path)
    source, read = data.read(datasets.find(dataset, data.root))
    found, missing = _splits(source, read.graphs.y, seed, splits, fold)
    with console.status(f"computing {hops} hops of {source.title}"):
        facts = datasets.summarize(read, hops, operator_of(operators) or "sym", found)
    facts = {"dataset": source.title} | facts | {"splits_missing": missing}
    hints = {
        "edges": hint_on_edges(source, read.graphs),
        "node features": hint_on_features(read, data.node_features),
    }
    return Report(facts, _shown(facts, hints, columns_of(read)))


def _installation(root: Path | None) -> Report:
    facts = {"spin_fast": __version__, "python": platform.python_version()} | build_info()
    facts["kernels"] = kernels_on(torch.device("cpu"))
    facts["kernels on the GPU"] = (
        kernels_on(torch.device("cuda")) if torch.cuda.is_available() else "torch finds no GPU"
    )
    facts["datasets"] = datasets.names(root)
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    return Report({key.replace(" ", "_"): value for key, value in facts.items()}, [table])


def _model(path: Path) -> Report:
    model, metadata = training.load_checkpoint(path)
    kind, parameters = type(model).__name__, sum(parameter.numel() for parameter in model.parameters())
    head = {"model": str(path), "kind": kind, "parameters": parameters}
    members = [{"kind": type(of).__name__} | of.config for of in getattr(model, "members", ())]
    table = Table(show_header=False)
    for section in (head, model.config, *members, metadata):
        for name, value in section.items():
            text = value if isinstance(value, str) else json.dumps(value)
            table.add_row(name, escape(shorten(text, MOST_CHARACTERS, placeholder=" ...")))
        table.add_section()
    config = model.config | ({"members": members} if members else {})
    return Report(head | {"config": config, "metadata": metadata}, [table])


def _features(path: Path) -> Report:
    features = shards.load(path)
    first, y, prepared = features.shards[0], features.y, features.node_features
    facts: dict[str, Any] = {
        "features": str(path),
        "graphs": len(features),
        "nodes": sum(int(shard.node_ptr[-1]) for shard in features.shards),
        "labels": None if y is None else [*y.shape],
        "columns": features.num_features,
        "dtype": check.shown(first.rows.dtype),
        "node_features": None if prepared is None else prepared.to_dict(),
        "operator": features.operator,
        "hops": features.num_hops,
        "deduplication": features.deduplication,
        "bytes": sum(shard.nbytes for shard in features.shards),
        "files": len(features.shards),
    }
    table = Table(show_header=False)
    for name, value in (facts | {"deduplication": by_branch(features.deduplication)}).items():
        text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else json.dumps(value)
        table.add_row(name, escape(shorten(text, MOST_CHARACTERS, placeholder=" ...")))
    return Report(facts, [table])


def _splits(
    source: datasets.Source, y: Tensor | None, seed: int, splits: Path | None, fold: int | None
) -> tuple[dict[str, datasets.Split], str | None]:
    """Return the split that training uses without --fold and the published folds, or those asked for; why none is."""
    if y is None:
        return {}, "there are no labels"
    if fold is not None:
        return {f"fold {fold}": source.split(y, splits=splits, fold=fold)}, None
    found: dict[str, datasets.Split] = {}
    missing = None
    if splits is None:
        try:
            name = "official" if source.has_official_split else f"drawn, seed {seed}"
            found[name] = source.split(y, seed=seed)
        except datasets.DatasetError as error:
            missing = message_of(error)
    try:
        folds = source.published_splits(len(y), splits=splits)
    except datasets.NoPublishedSplits:
        if splits is not None:
            raise
        folds = []
    return found | {f"fold {number}": split for number, split in enumerate(folds)}, missing


def _shown(facts: dict[str, Any], hints: dict[str, str | None], columns: str | None) -> list[RenderableType]:
    names = ("mean", "median", "min", "max")
    numbers = (Column(name, justify="right") for name in (*names, "in all"))
    title = escape(f"{facts['dataset']}: {facts['graphs']:,} graphs")
    per_graph = Table("per graph", *numbers, title=title, title_justify="left")
    for name in ("nodes", "edges", "density"):
        spread = facts[name]
        cells = [_number(spread[key], key, name) for key in names]
        per_graph.add_row(name, *cells, f"{spread['total']:,}" if "total" in spread else "")
    table = Table(show_header=False)
    for section in (_content(facts, hints, columns), _memory(facts), _indistinct(facts)):
        for name, value in section.items():
            table.add_row(name, escape(value))
        table.add_section()
    return [per_graph, table, *_splits_shown(facts)]


def _number(value: float | None, key: str, of: str) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if of == "density" else f"{value:,.2f}" if key == "mean" else f"{value:,.10g}"


def _content(facts: dict[str, Any], hints: dict[str, str | None], columns: str | None) -> dict[str, str]:
    features = facts["features"]
    kinds = ", ".join(f"{part['width']:,} {part['kind']}" for part in features["parts"]) or "none"
    edges = "directed" if facts["directed"] else "undirected"
    rows = {
        "edges": edges + (", weighted" if facts["weighted"] else "") + _in_addition(hints["edges"]),
        "graphs without nodes": f"{facts['empty_graphs']:,}",
        "isolated nodes": f"{facts['isolated_nodes']:,}",
        "self-loops": f"{facts['self_loops']:,}",
        "repeated edges": f"{facts['repeated_edges']:,}",
        "node features": f"{kinds} ({features['dtype']}){_in_addition(hints['node features'], 'not used: ')}",
    }
    if columns is not None:
        rows["of the columns"] = columns
    if facts["tasks"] is not None:
        tasks = facts["tasks"]
        names = tasks["names"] or []
        more = f" and {len(names) - MOST_CLASSES} more" if len(names) > MOST_CLASSES else ""
        named = f" ({', '.join(names[:MOST_CLASSES])}{more})" if names else ""
        rows["labels"] = f"{tasks['number']} task(s){named}, {_percent(tasks['labelled'])} labelled"
    elif facts["classes"] is None:
        rows["labels"] = "none"
    else:
        classes = [f"{item['name']}:{item['graphs']:,}" for item in facts["classes"]]
        more = f"  and {len(classes) - MOST_CLASSES} more" if len(classes) > MOST_CLASSES else ""
        rows["graphs by class"] = f"{'  '.join(classes[:MOST_CLASSES])}{more}"
    return rows


def _in_addition(hint: str | None, head: str = "") -> str:
    return "" if hint is None else f"; {head}{hint}"


def _memory(facts: dict[str, Any]) -> dict[str, str]:
    size = {name: decimal(number, precision=2) for name, number in facts["bytes"].items()}
    how = "each distinct row once" if max(facts["deduplication"]) > 1 else "as hardly any row repeats"
    return {
        "bytes of the graphs": size["graphs"],
        "of their powers": f"{size['powers']}, {facts['hops']} hops of {facts['operator']} in one array",
        "of PowerFeatures": f"{size['features']}, {how}",
        "nodes per row by branch": f"{by_branch(facts['deduplication'])}  joint: {facts['joint_deduplication']:.3g}x",
    }


def _indistinct(facts: dict[str, Any]) -> dict[str, str]:
    found, number, hops = facts["duplicates"], facts["graphs"], facts["hops"]
    rows = {"duplicates": f"{found['graphs']:,} graphs look just like another one to any model of {hops} hops"}
    if found["contradicting"]:
        rows["contradictions"] = (
            f"{found['contradicting']:,} of these look like one with another label; as graphs that look alike get the "
            "same answer, no model can be right about all of them"
        )
        if (best := found["best_accuracy"]) is not None:
            rows["accuracy at best"] = f"{100 * best:.6g} %, {round(best * number):,} of all {number:,} graphs"
    return rows


def _splits_shown(facts: dict[str, Any]) -> list[RenderableType]:
    note = [] if facts["splits_missing"] is None else [Text(f"no split: {facts['splits_missing']}")]
    if not facts["splits"]:
        return [*note]
    names = ("train", "validation", "duplicates", "test", "duplicates")
    numbers = (Column(name, justify="right") for name in names)
    table = Table("split", *numbers, title="duplicates of training graphs", title_justify="left")
    for split in facts["splits"]:
        cells = [f"{split['train']:,}"]
        for part in ("validation", "test"):
            seen, size = split[f"{part}_seen"], split[part]
            cells += [f"{size:,}", f"{seen:,} ({_percent(seen / size if size else None, 1)})"]
        table.add_row(split["name"], *cells)
    return [table, *note]


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"
