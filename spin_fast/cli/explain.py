"""``spin-fast explain``: what the nodes of a graph add to a class score."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import datasets, training
from .._common import files
from ..graphs.batch import GraphBatch
from ..graphs.convert import library
from ..graphs.drawing import draw
from ._app import Report, command, console
from ._options import DATASET, Download, Root, device_of, out_option
from ._outputs import check_output, is_explanation, is_picture
from ._trained import Checkpoint, ComputeDevice, OperatorsAsTrained, Part, Trained, UndirectedAsTrained, UnknownWords

if TYPE_CHECKING:
    import pandas

MOST_NODES = 10  # that the table names


@command("spin-fast explain runs/NCI1/model.safetensors NCI1 --root data --graph 7 --out graph-7.png")
def explain(
    context: typer.Context,
    checkpoint: Checkpoint,
    dataset: Annotated[str, DATASET],
    graph: Annotated[
        str, typer.Option(help="Which graph: its name, if it is from a folder of your own, or its number, from 0.")
    ],
    root: Root = None,
    download: Download = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--class",
            "--task",
            help="Whose score to explain: the name of a class of the training set, or of a task, or its number where "
            "training knew no names.",
            show_default="the predicted class",
        ),
    ] = None,
    out: Annotated[Path, out_option(help="Where to draw: .png or .svg; the table has this name with .csv.")] = Path(
        "explanation.png"
    ),
    undirected: UndirectedAsTrained = None,
    unknown_words: UnknownWords = False,
    operators: OperatorsAsTrained = None,
    device: ComputeDevice = "auto",
) -> Report:
    """Show what every node of a graph of DATASET adds to the score of a class: a picture, and a table of all nodes.

    The score, that before the softmax or sigmoid, is a constant and the sum over nodes and branches of what each adds,
    exactly. What a node adds in a branch of hop r is due to its neighbourhood within r hops, and not to the node alone.
    Where a model has attention, the picture and the table have its weights as well, which sum to 1 in each branch.

    Of several models together (train --search --ensemble 5) the probability, the mean of theirs, is divided, again
    exactly. In the place of attention the picture then has what nodes add to the probability that each of them gives.

    A row of the table has the number of the node, from 0, in the order of the files; its name, if it is from tables or
    GraphML; what it adds in all; what it adds in each branch; and its attention weight in each. Molecules of OGB are
    drawn as such where RDKit is installed (pip install rdkit), with element and number of each atom.

    Keys of --json: model, dataset, operator, graph, name, target, probability, quantity, score, constant, sum,
    branches, nodes, top, out, table. The quantity is what is divided, "score" or "probability", and score is its value.
    """
    place = device_of(device)
    if out.suffix not in (".png", ".svg"):
        raise ValueError(f"--out must end with .png or .svg, got {out}")
    library("networkx", f"--out {out}, a picture of a graph,")
    source = datasets.find(dataset, root)
    table = out.with_suffix(".csv")
    check_output(out, is_picture, source, checkpoint)
    check_output(table, is_explanation, source, checkpoint)
    context.with_resource(files.locked(table, is_file=True))  # which x.png and x.svg share
    trained = Trained.load(checkpoint, place, operators)
    if download:
        source = source.downloaded()
    chosen, number, name, nodes = _chosen(trained.open(source, undirected, unknown_words).chunks(), graph, dataset)
    if chosen.num_nodes == 0:
        raise ValueError(f"--graph {graph}: it has no nodes")
    wanted = _target(trained, target)
    explained = training.explain(trained.model, chosen.to(place), trained.operator, target=wanted)
    columns = _columns(explained, nodes)
    score, constant, probability = (
        float(value[0]) for value in (explained.scores, explained.constants, explained.probabilities)
    )
    kind, named = "task" if trained.model.multilabel else "class", trained.names[int(explained.targets[0])]
    known = f"graph {number}" if name is None else f"graph {number}, {name}"
    title = f"{source.title}, {known}: {kind} {named}, probability {probability:.3g}"
    added, size = score - constant, f"{chosen.num_nodes:,} node{'s' * (chosen.num_nodes > 1)}"
    quantity, sign = explained.quantity, "+-"[added < 0]
    equation = f"{quantity} {score:.4g} = constant {constant:.4g} {sign} {abs(added):.4g}, added by {size}"
    with console.status(f"drawing {size}"), files.replacing(table) as rows, files.replacing(out) as picture:
        from ..plots import explained_graph

        columns.to_csv(rows, index_label="node")
        explained_graph(picture, draw(chosen, source.smiles(number), nodes), explained, title=f"{title}\n{equation}")
    first = columns.columns.get_loc("total") + 1
    totals, branches = columns["total"], columns.columns[first : first + len(explained.branches)]
    sums = columns[branches].sum().to_dict()
    order = totals.abs().sort_values(ascending=False, kind="stable").index[:MOST_NODES]
    facts = {
        "model": checkpoint,
        "dataset": source.title,
        "operator": trained.operator,
        "graph": number,
        "name": name,
        "target": named,
        "probability": probability,
        "quantity": quantity,
        "score": score,
        "constant": constant,
        "sum": added,
        "branches": sums,
        "nodes": chosen.num_nodes,
        "top": [
            {"node": node, "name": None if nodes is None else nodes[node], "total": totals[node]}
            for node in order.tolist()
        ],
        "out": out,
        "table": table,
    }
    parts = {f"neighbourhoods {text}": sums[name] for text, name in zip(explained.branches, branches, strict=True)}
    if members := explained.members:
        parts = {f"by member {n}": float(of.totals.sum()) / len(members) for n, of in enumerate(members, 1)}
    sections = [
        {quantity: score, "constant": constant, f"added by {size}": added},
        parts,
        {
            f"neighbourhoods of node {node}" + ("" if nodes is None else f", {nodes[node]}"): totals[node]
            for node in order
        },
    ]
    if others := len(totals) - len(order):
        sections[-1][f"of {others:,} others"] = totals.drop(order).sum()
    shown = Table(show_header=False, title=escape(title))
    for section in sections:
        for text, value in section.items():
            shown.add_row(escape(text), f"{value:.4g}")
        shown.add_section()
    return Report(facts, [shown, Text(f"{out}, {table}")])


class _Chosen(NamedTuple):
    """A graph, its number, and its name and those of its nodes if it has them."""

    graph: GraphBatch
    number: int
    name: str | None
    nodes: list[str] | None


def _chosen(parts: Iterator[Part], wanted: str, dataset: str) -> _Chosen:
    """The graph of a name or of a number; a name goes before a number."""
    found, begin, example = None, 0, ""
    for part in parts:
        graphs, names, _ = part
        if names is not None and wanted in names:
            return _at(part, names.index(wanted), begin)
        if wanted.isdecimal() and 0 <= (position := int(wanted) - begin) < len(graphs):
            found = _at(part, position, begin)
        example = example or ("" if names is None else f", or a name such as {names[0]}")
        begin += len(graphs)
    if found is None:
        raise ValueError(f"--graph must be one of 0 to {begin - 1}, the graphs of {dataset}{example}, got {wanted}")
    return found


def _at(part: Part, position: int, begin: int) -> _Chosen:
    graphs, names, nodes = part
    own = slice(*graphs.ptr[position : position + 2].tolist())
    name = None if names is None else names[position]
    return _Chosen(graphs[[position]], begin + position, name, None if nodes is None else nodes[own])


def _target(trained: Trained, wanted: str | None) -> int | None:
    names = trained.names
    if wanted is None:
        if trained.model.multilabel and len(names) > 1:
            raise ValueError(f"--task must be given, one of {', '.join(names)}")
        return None
    if wanted not in names:
        option = "--task" if trained.model.multilabel else "--class"
        raise ValueError(f"{option} must be one of {', '.join(names)}, got {wanted}")
    return names.index(wanted)


def _columns(explained: training.Explanation, nodes: list[str] | None) -> pandas.DataFrame:
    import pandas

    names = [re.sub(r"\W+", "_", text) for text in explained.branches]
    columns = {"total": explained.totals, **dict(zip(names, explained.contributions, strict=True))}
    if explained.attention is not None:
        named = zip(names, explained.attention, strict=True)
        columns |= {f"attention_{name}": weights for name, weights in named if not weights.isnan().any()}
    table = pandas.DataFrame({name: values.cpu().numpy() for name, values in columns.items()})
    if nodes is not None:
        table.insert(0, "name", nodes)
    return table
