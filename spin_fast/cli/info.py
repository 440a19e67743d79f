"""``spin-fast info``: what is installed, and what is in a dataset."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .. import __version__, build_info, datasets
from ..features.chunks import num_branches_of
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ._app import Report, app, by_branch, console, reports
from ._device import kernels_on
from ._errors import one_line_errors
from ._graphs import columns_of, hint_on_edges, hint_on_features, merged_edges, read_dataset
from ._options import (
    DATASET,
    DEFAULT_HOPS,
    HOPS,
    Debug,
    Download,
    Fold,
    Json,
    Label,
    MergeRepeated,
    OwnFeatures,
    Root,
    SelfLoops,
    Splits,
    Undirected,
    data_option,
    edge_options_of,
    operator_of,
    operator_option,
)

MOST_CLASSES = 10  # that the table names


@app.command(epilog="Example: spin-fast info NCI1 --root data --hops 5")
@one_line_errors
@reports
def info(
    dataset: Annotated[str | None, DATASET] = None,
    root: Root = None,
    download: Download = False,
    operators: Annotated[list[str] | None, operator_option("sym", "Hops")] = None,
    hops: Annotated[int, typer.Option(min=0, help=HOPS, rich_help_panel="Hops")] = DEFAULT_HOPS,
    own_features: OwnFeatures = None,
    label: Label = None,
    undirected: Undirected = False,
    coalesce: MergeRepeated = None,
    self_loops: SelfLoops = None,
    splits: Splits = None,
    fold: Fold = None,
    seed: Annotated[int, data_option(min=0, help="Of the split, where it is drawn.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> Report:
    """Show what is in DATASET; without one what is installed, which kernels run, and which datasets are found.

    Graphs are duplicates if they look alike to every model of these hops and this operator, which then gives them the
    same answer. Where their labels differ it is wrong for some of them, whichever it is, which bounds the accuracy over
    all graphs. Test graphs with a duplicate in training are like those that the model has learnt; published folds are
    counted where they are found.

    Edges are counted once however often an edge is repeated, in an undirected graph one for both directions, and
    self-loops with them; the density leaves self-loops out.

    Keys of --json: dataset, graphs, nodes, edges, density, empty_graphs, isolated_nodes, self_loops, repeated_edges,
    directed, weighted, features, classes, tasks, operator, hops, bytes, deduplication, duplicates, splits,
    splits_missing.
    """
    torch.set_num_threads(threads)
    if dataset is None:
        return _installation(root)
    source = datasets.find(dataset, root)
    if download:
        source = source.downloaded()
    name, edge_options = source.title, edge_options_of(undirected, coalesce, self_loops)
    read = read_dataset(source, features=own_features, label=label, edge_options=edge_options)
    operator = operator_of(operators) or "sym"
    graphs = read.graphs
    with console.status(f"counting in {name}"):
        facts: dict[str, Any] = {"dataset": name} | _structure(graphs)
        columns = read.features if isinstance(read.features, list) else None
        facts["features"] = _features(graphs, read.widths) | {"columns": columns, "unused": list(read.unused)}
        facts |= _labels(graphs, read.classes, read.tasks)
    with console.status(f"computing {hops} hops of {name}"):
        features = PowerFeatures.from_graphs(graphs, hops, operator, node_rows=False)
        powers = num_branches_of(hops, operator) * graphs.x.nbytes
        facts |= {"operator": operator, "hops": hops}
        facts["bytes"] = {"graphs": _bytes_of(graphs), "powers": powers, "features": features.nbytes}
        facts["deduplication"] = features.deduplication
        first = features.identical_graphs()
        facts["duplicates"] = _duplicates(first, graphs.y)
    facts["splits"], facts["splits_missing"] = _splits(source, graphs.y, first, seed, splits, fold)
    hints = {
        "edges": hint_on_edges(source, graphs),
        "node features": hint_on_features(read, own_features),
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


def _structure(graphs: GraphBatch) -> dict[str, Any]:
    """Counts of nodes and edges."""
    ptr, num_nodes = graphs.ptr.numpy(), graphs.num_nodes
    weight = np.ones(graphs.num_edges, np.int32) if graphs.edge_weight is None else graphs.edge_weight.numpy()
    edges = merged_edges(graphs, weight)
    reverse = edges.T.tocsr()
    directed = any(
        not np.array_equal(getattr(edges, part), getattr(reverse, part)) for part in ("indptr", "indices", "data")
    )
    rows = np.repeat(np.arange(num_nodes, dtype=edges.indices.dtype), np.diff(edges.indptr))
    proper = rows != edges.indices
    gathering = np.bincount(rows[proper], minlength=num_nodes)
    isolated = gathering == 0
    if directed:
        isolated &= np.bincount(edges.indices[proper], minlength=num_nodes) == 0
    nodes = np.diff(ptr)
    before = np.concatenate([[0], np.cumsum(gathering)])
    proper_edges = before[ptr[1:]] - before[ptr[:-1]]
    loops = np.diff(edges.indptr[ptr]) - proper_edges
    pairs = nodes * (nodes - 1)
    density = np.divide(proper_edges, pairs, out=np.zeros(len(nodes)), where=pairs > 0)
    return {
        "graphs": len(graphs),
        "nodes": _spread(nodes),
        "edges": _spread((proper_edges if directed else proper_edges // 2) + loops),
        "density": _spread(density),
        "empty_graphs": int((nodes == 0).sum()),
        "isolated_nodes": int(isolated.sum()),
        "self_loops": int(loops.sum()),
        "repeated_edges": graphs.num_edges - edges.nnz,
        "directed": directed,
        "weighted": graphs.edge_weight is not None,
    }


def _spread(values: np.ndarray) -> dict[str, Any]:
    """How a number is spread over the graphs; the total is of what can be counted."""
    if len(values) == 0:
        return dict.fromkeys(("mean", "median", "min", "max"))
    spread = {
        name: function(values).item()
        for name, function in (("mean", np.mean), ("median", np.median), ("min", np.min), ("max", np.max))
    }
    return spread if values.dtype.kind == "f" else {"total": int(values.sum())} | spread


def _features(graphs: GraphBatch, widths: list[int]) -> dict[str, Any]:
    """Width and kind of the node features; of measured numbers and of each code by themselves."""
    x = graphs.x
    kinds = [{"width": part.shape[1], "kind": _kind(part, graphs.degree)} for part in x.split(widths, dim=1)]
    return {"width": x.shape[1], "dtype": str(x.dtype).removeprefix("torch."), "parts": kinds}


def _kind(x: Tensor, degree: Tensor) -> str:
    if bool((x == x[:1]).all()):
        return "constant"
    if x.shape[1] == 1 and torch.equal(x[:, 0], degree.to(x.dtype)):
        return "degree"
    if bool(((x == 0) | (x == 1)).all()):
        return "one-hot" if bool((x.sum(1) == 1).all()) else "0 or 1"
    return "whole numbers" if bool((x == x.round()).all()) else "real numbers"


def _labels(graphs: GraphBatch, names: Sequence[str] | None, task_names: Sequence[str] | None) -> dict[str, Any]:
    """Sizes of the classes, or what of several tasks is known, with their names where they have any."""
    y = graphs.y
    if y is None:
        return {"classes": None, "tasks": None}
    if y.is_floating_point():
        tasks = y.view(len(y), -1)
        known = tasks == tasks
        share = known.double().mean().item() if known.numel() else None
        return {"classes": None, "tasks": {"number": tasks.shape[1], "labelled": share, "names": task_names}}
    sizes = torch.bincount(y, minlength=0 if names is None else len(names)).tolist()
    names = list(map(str, range(len(sizes)))) if names is None else names
    return {
        "classes": [{"name": name, "graphs": size} for name, size in zip(names, sizes, strict=True)],
        "tasks": None,
    }


def _bytes_of(graphs: GraphBatch) -> int:
    return sum(value.nbytes for value in vars(graphs).values() if isinstance(value, Tensor))


def _duplicates(first: Tensor, y: Tensor | None) -> dict[str, Any]:
    """How many graphs are like another one, and what labels such graphs have.

    Args:
        first: ``[G]`` the first of the graphs that are like each one.
        y: labels ``[G]``, or ``[G, T]`` with NaN for missing ones, or None.
    """
    times = torch.bincount(first, minlength=len(first))
    found: dict[str, Any] = {
        "graphs": int(times[times > 1].sum()),
        "distinct": int((times > 0).sum()),
        "contradicting": None,
        "best_accuracy": None,
    }
    if y is None or len(y) == 0:
        return found
    if y.is_floating_point():
        tasks = y.view(len(y), -1)
        of = first[:, None].expand_as(tasks)
        low, high = (
            torch.full_like(tasks, missing).scatter_reduce(0, of, tasks.nan_to_num(missing), reduce)
            for reduce, missing in (("amin", torch.inf), ("amax", -torch.inf))
        )
        contradictory = (low < high).any(1)
    else:
        num_classes = int(y.max()) + 1
        kinds, number = torch.unique(first * num_classes + y, return_counts=True)
        of = kinds // num_classes
        most = torch.zeros_like(first).scatter_reduce(0, of, number, "amax")
        found["best_accuracy"] = int(most.sum()) / len(y)
        contradictory = torch.bincount(of, minlength=len(first)) > 1
    found["contradicting"] = int(times[contradictory].sum())
    return found


def _splits(
    source: datasets.Source,
    y: Tensor | None,
    first: Tensor,
    seed: int,
    splits: Path | None,
    fold: int | None,
) -> tuple[list[dict[str, Any]], str | None]:
    """The split that training uses without --fold, and the published folds where they are found; why there is none."""
    if y is None:
        return [], "there are no labels"
    found: list[dict[str, Any]] = []
    missing = None
    if splits is None and fold is None:
        try:
            split = source.split(y, seed=seed)
            name = "official" if source.has_official_split else f"drawn, seed {seed}"
            found.append(_overlap(name, split, first))
        except datasets.DatasetError as error:
            missing = str(error)
    try:
        folds = list(enumerate(source.published_splits(len(y), splits=splits)))
    except datasets.NoPublishedSplits:
        if splits is not None or fold is not None:
            raise
        folds = []
    if fold is not None:
        if fold >= len(folds):
            raise ValueError(f"--fold {fold}: there are {len(folds)} folds, from 0")
        folds = [folds[fold]]
    return found + [_overlap(f"fold {number}", split, first) for number, split in folds], missing


def _overlap(name: str, split: datasets.Split, first: Tensor) -> dict[str, Any]:
    seen = {
        f"{part}_seen": int(torch.isin(first[ids], first[split.train]).sum())
        for part, ids in (("validation", split.validation), ("test", split.test))
    }
    return {"name": name} | {part: len(ids) for part, ids in split._asdict().items()} | seen


def _shown(facts: dict[str, Any], hints: dict[str, str | None], columns: str | None) -> list[RenderableType]:
    names = ("mean", "median", "min", "max")
    per_graph = Table(title=escape(f"{facts['dataset']}: {facts['graphs']:,} graphs"), title_justify="left")
    per_graph.add_column("per graph")
    for name in (*names, "in all"):
        per_graph.add_column(name, justify="right")
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
    size = {name: _show_bytes(number) for name, number in facts["bytes"].items()}
    how = "each distinct row once" if max(facts["deduplication"]) > 1 else "as hardly any row repeats"
    return {
        "bytes of the graphs": size["graphs"],
        "of their powers": f"{size['powers']}, {facts['hops']} hops of {facts['operator']} in one array",
        "of PowerFeatures": f"{size['features']}, {how}",
        "nodes per row by branch": by_branch(facts["deduplication"]),
    }


def _show_bytes(number: int) -> str:
    """``1234567`` is 1.23 MB."""
    power = min(len(str(number)) - 1, 14) // 3
    if power == 0:
        return f"{number} bytes"
    return f"{number / 1000**power:.4g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


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
    table = Table(title="duplicates of training graphs", title_justify="left")
    table.add_column("split")
    for name in ("train", "validation", "duplicates", "test", "duplicates"):
        table.add_column(name, justify="right")
    for split in facts["splits"]:
        cells = [f"{split['train']:,}"]
        for part in ("validation", "test"):
            seen, size = split[f"{part}_seen"], split[part]
            cells += [f"{size:,}", f"{seen:,} ({_percent(seen / size if size else None, 1)})"]
        table.add_row(split["name"], *cells)
    return [table, *note]


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"
