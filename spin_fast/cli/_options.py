"""Options that several commands have, and their values."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from .. import datasets, native_available
from .._common import check
from ..datasets.options import LABEL
from ..graphs.batch import EdgeOptions, Reduce
from ..graphs.node_features import Degree, NodeFeatures
from ._graphs import open_dataset, read_dataset

HOPS = "How far message passing goes; each hop of each operator is a branch of the model."  # for --hops
DEFAULT_HOPS = 3


def _complete_dataset(context: typer.Context, incomplete: str) -> list[str]:
    """Names that the shell offers; where there is none it completes paths."""
    try:
        return datasets.names(context.params.get("root"))
    except Exception:  # completion has no place for a message
        return []


DATASET = typer.Argument(
    metavar="DATASET",
    help="A built-in dataset, one found in the folder of datasets, or the path of a folder of your own graphs.",
    autocompletion=_complete_dataset,
)
data_option = partial(typer.Option, rich_help_panel="Data")
output_option = partial(typer.Option, rich_help_panel="Output")


def _place(text: str | Path) -> Path:
    if not str(text):
        raise typer.BadParameter("must name a place; the folder at hand is .")
    return Path(text)


out_option = partial(typer.Option, "--out", parser=_place, metavar="PATH")
Root = Annotated[
    Path | None, data_option(help="Folder of the datasets.", envvar="SPIN_FAST_DATA", show_default="data, or the cache")
]
Download = Annotated[bool, data_option("--download", help="Get a dataset that is not there from its official site.")]
Splits = Annotated[
    Path | None,
    data_option(
        help='File of published folds, or of a split of your own, {"train": [...], "validation": [...], "test": [...]} '
        "with the numbers of graphs, from 0; or its folder.",
        show_default="splits/ beside the datasets",
    ),
]
Device = Literal["auto", "cpu", "cuda"]
Fold = Annotated[int | None, data_option(min=0, help="Which of the published folds; the first is 0.")]


def device_of(wanted: Device) -> torch.device:
    """The device to train on; an error if a GPU is asked for, and torch has none."""
    there = torch.cuda.is_available()
    if wanted == "auto":
        return torch.device("cuda" if there and native_available("cuda") else "cpu")
    if wanted == "cuda" and not there:
        version = torch.version.cuda
        reason = f"torch {torch.__version__} has no CUDA" if version is None else "torch finds no GPU (see nvidia-smi)"
        raise ValueError(f"--device cuda: {reason}; --device cpu trains without")
    return torch.device(wanted)


def _operators(text: str) -> str:
    try:
        return check.operators(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def operator_option(default: str, panel: str | None = None) -> Any:
    """The option ``--operator``, a list of names, each maybe several with commas, for :func:`operator_of`."""
    return typer.Option(
        "--operator",
        parser=_operators,
        metavar="|".join(check.OPERATORS),
        help="What a hop computes of the neighbours: their sum (adj), a sum weighted by degrees (sym), both added "
        "(sym+adj), or their mean (rw). Several, with commas or one by one, are used side by side.",
        show_default=default,
        rich_help_panel=panel,
    )


def operator_of(chosen: list[str] | None) -> str | None:
    """The value of ``--operator``; None if it is not given."""
    return check.operators(",".join(chosen)) if chosen else None


def _columns(text: str) -> Any:
    """JSON, or one name, or several with commas; a comma at the end makes one name a list, those in [ ] separate none.

    No text at all is None.
    """
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"must be JSON where it starts with {text[0]}: {error}") from None
    names = re.split(r",(?![^\[]*\])", text)
    return [name.strip() for name in names if name.strip()] if len(names) > 1 else text or None


@dataclass
class NodeFeatureOptions:
    """What becomes of node features before any hop."""

    degree: Annotated[
        Degree | None,
        data_option(help="Features made of the degree, beside the others, or in the place of the plain degree."),
    ] = None
    one_hot: Annotated[
        bool, data_option("--one-hot", help="Encode features that are categories, such as OGB's of atoms.")
    ] = False
    standardize: Annotated[
        bool | None,
        data_option(
            help="Shift and scale features to mean 0 and deviation 1 on the training graphs.",
            show_default="where there are other than whole numbers; of precompute with --degree or --one-hot alone",
        ),
    ] = None

    @property
    def given(self) -> str | None:
        """One of the options that ask for something."""
        if self.degree is not None:
            return f"--degree {self.degree}"
        return "--one-hot" if self.one_hot else "--standardize" if self.standardize else None

    def node_features(self) -> NodeFeatures:
        """What does it, not fitted yet."""
        chosen = "auto" if self.standardize is None else self.standardize
        return NodeFeatures(self.degree, one_hot=self.one_hot, standardize=chosen)  # type: ignore[arg-type]


@dataclass
class DataOptions:
    """Which graphs are read, and what of them.

    ``label`` is None or a tuple of what ``--label`` names, which may be None itself.
    """

    root: Root = None
    download: Download = False
    node_features: Annotated[
        Any,
        data_option(
            parser=_columns,
            metavar="NAMES",
            help="Of a TU or .nel dataset: label, attribute, attribute+label or degree; of your own tables or GraphML: "
            "columns, with commas, of numbers or words, or JSON as in Folder.features; or degree.",
            show_default="the paper's choice, or all columns",
        ),
    ] = None
    label: Annotated[
        Any,
        data_option(
            parser=lambda text: (_columns(text),),
            metavar="NAMES",
            help="Of your own tables or GraphML: the column of graphs, or graph attribute, with the classes; several, "
            'with commas, are tasks of 0 and 1, where a label may be missing, and "NAME," is one such task; "" reads '
            "none.",
            show_default=LABEL,
        ),
    ] = None
    undirected: Annotated[
        bool, data_option("--undirected", help="Your own graphs: each edge is listed once, for both directions.")
    ] = False
    coalesce: Annotated[
        Reduce | None,
        data_option(
            help="Your own graphs: merge repeated edges, with this of their weights, which are 1 where there are none.",
            show_default="each counts",
        ),
    ] = None
    self_loops: Annotated[
        bool | None,
        data_option(
            help="Your own graphs: give each node an edge to itself, or leave such edges out.",
            show_default="as listed",
        ),
    ] = None

    @property
    def edge_options(self) -> EdgeOptions:
        """The options for edges that are given."""
        given = {"undirected": self.undirected or None, "coalesce": self.coalesce, "self_loops": self.self_loops}
        return EdgeOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]

    @property
    def read_options(self) -> dict[str, Any]:
        """The options for reading that are given."""
        label = {} if self.label is None else {"label": self.label[0]}
        return {"features": self.node_features, **label, **self.edge_options}

    def read(self, source: datasets.Source) -> tuple[datasets.Source, datasets.Folder]:
        """Read the graphs, downloaded before if asked for; also returns the source that they are from."""
        source = source.downloaded() if self.download else source
        return source, read_dataset(source, **self.read_options)

    def open(self, source: datasets.Source) -> tuple[datasets.Source, datasets.Reader]:
        """The same, to be read some graphs at a time where that is possible."""
        source = source.downloaded() if self.download else source
        return source, open_dataset(source, **self.read_options)
