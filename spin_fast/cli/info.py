"""``spin-fast info``."""

from __future__ import annotations

import platform
from typing import Annotated

import torch
import typer
from rich.table import Table

from .. import __version__, build_info, datasets
from ..features import PowerFeatures
from ._common import (
    DEFAULT_HOPS,
    Debug,
    Root,
    app,
    console,
    describe,
    kernels_on,
    one_line_errors,
    ratios_of,
)


@app.command(epilog="Example: spin-fast info NCI1 --root data")
@one_line_errors
def info(
    dataset: Annotated[str | None, typer.Argument(help="Also describe this dataset.")] = None,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Show what is installed, which kernels run, and which datasets are found."""
    facts = {"spin_fast": __version__, "python": platform.python_version()} | build_info()
    facts["kernels"] = kernels_on(torch.device("cpu"))
    facts["kernels on the GPU"] = (
        kernels_on(torch.device("cuda")) if torch.cuda.is_available() else "torch finds no GPU"
    )
    facts["datasets"] = ", ".join(datasets.names(root))
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    console.print(table)
    if dataset is not None:
        graphs = datasets.load(dataset, root)
        console.print(describe(dataset, graphs), highlight=False)
        features = PowerFeatures.from_graphs(graphs, DEFAULT_HOPS)
        times = torch.bincount(features.identical_graphs())
        console.print(
            f"nodes per stored row by branch, {features.operator} over {DEFAULT_HOPS} hops: {ratios_of(features)}\n"
            f"graphs that no SPIN can tell from another one: {int(times[times > 1].sum()):,}",
            highlight=False,
        )
