"""What becomes of node features before ``spin-fast precompute`` computes hops, fitted to training graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.markup import escape

from .. import datasets
from .._common import files
from ..datasets.reader import Shard
from ..graphs.batch import GraphBatch
from ..graphs.node_features import FORMAT, NodeFeatures
from ._app import Report, console
from ._graphs import CHUNK_GRAPHS
from ._metric import labels_of
from ._options import Fold, NodeFeatureOptions, Splits, data_option, output_option

is_node_features = partial(files.has_format, format=FORMAT)


@dataclass
class Fitting(NodeFeatureOptions):
    """What becomes of node features, and which graphs decide it."""

    fitted: Annotated[
        Path | None, data_option(help="A file of --fit-only, in the place of --degree, --one-hot and --standardize.")
    ] = None
    seed: Annotated[int | None, data_option(min=0, help="Of the split, as of train.", show_default="0")] = None
    splits: Splits = None
    fold: Fold = None
    only: Annotated[
        bool,
        output_option("--fit-only", help="Compute no hops: fit node features, and write them to a file for --fitted."),
    ] = False

    def check(self, shard: Shard | None) -> None:
        """Check that the options go together."""
        split = {"--seed": self.seed, "--splits": self.splits, "--fold": self.fold}
        of_split = next((option for option, value in split.items() if value is not None), None)
        wanted = "--degree, --one-hot or --standardize"
        if self.fitted is not None and (given := self.given or of_split) is not None:
            raise ValueError(f"{given}: --fitted {self.fitted} says what to do with node features: leave it out")
        if self.fitted is not None and self.only:
            raise ValueError("--fit-only writes a file for --fitted: give one of both")
        if self.given is None and (given := "--fit-only" if self.only else of_split) is not None:
            raise ValueError(f"{given} is for node features that are fitted to training graphs: add {wanted}")
        if self.given is not None and shard is not None:
            raise ValueError(
                f"{self.given}: all shards need what is fitted once: give it to precompute --fit-only --out FILE.json "
                "instead of --shard, and then --fitted FILE.json to each shard"
            )

    def load(self) -> NodeFeatures | None:
        """Node features of the file, if one is given."""
        return None if self.fitted is None else NodeFeatures.load(self.fitted)

    def fit(self, source: datasets.Source, reader: datasets.Reader, chunks: Iterable[GraphBatch]) -> NodeFeatures:
        """Fit to those graphs, in ``chunks`` of all, that ``train`` with the same options trains on."""
        size = CHUNK_GRAPHS if reader.whole is None else max(len(reader), 1)
        labels = [*map(attrgetter("graphs.y"), reader.chunks(size))]
        y, _ = labels_of(source, None if any(of is None for of in labels) else torch.cat(labels), None)
        split = source.split(y, seed=self.seed or 0, splits=self.splits, fold=self.fold)
        made = self.node_features().fit(chunks, split.train)
        told = f"node features: {made.num_columns}, {len(made.columns_)} standardised on {len(split.train):,} graphs"
        console.print(told)
        return made


def fit_report(dataset: str, made: NodeFeatures, out: Path) -> Report:
    facts: dict[str, Any] = {
        "dataset": dataset,
        "features": made.num_columns,
        "standardized": len(made.columns_),
        "file": out,
    }
    return Report(facts, [escape(f"written: {out}")])
