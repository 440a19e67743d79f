"""Whether a file of features is of the graphs at hand; sums by graph tell, of hops those of some graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import sum_readout
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch

SAMPLE = 256  # graphs whose edges are compared: to make hops anew for all is what the file saves


def check_features(
    source: str,
    features: PowerFeatures,
    dataset: str,
    graphs: GraphBatch,
    hops: int | None,
    operator: str | None,
    deduplicate: bool,
    dropout: float,
) -> None:
    """Check that features are of just these graphs and settings.

    Raises:
        ValueError: says what differs.
    """
    of_graphs, of_file = (f"{of.num_graphs} graphs with {of.num_features} feature(s)" for of in (graphs, features))
    if of_graphs != of_file:
        raise ValueError(f"{source} is not of {dataset}: it has {of_file}, {dataset} {of_graphs}")
    if not torch.equal(features.node_ptr, graphs.ptr) or not _equal(features.labels, graphs.y):
        raise ValueError(f"{source} is not of {dataset}: its graphs have other sizes or labels; see --label")
    if not _equal_sums(features, graphs):
        options = "--node-features, or, of degrees, --undirected, --coalesce and --self-loops"
        raise ValueError(f"{source} is not of {dataset}: its graphs have other node features; see {options}")
    if not _equal_hops(features, graphs):
        options = "--undirected, --coalesce and --self-loops"
        raise ValueError(f"{source} is not of {dataset}: its graphs have other edges; give {options} as to precompute")
    if hops is not None and hops != features.num_hops:
        raise ValueError(f"--hops {hops}: {source} has {features.num_hops}")
    if operator is not None and operator != features.operator:
        raise ValueError(f"--operator {operator}: {source} has {features.operator}")
    if dropout > 0 and features.index is not None and features.row_of_node is None:
        raise ValueError(f"--dropout {dropout:g}: {source} must be made by spin-fast precompute --node-rows")
    if not deduplicate and features.index is not None:
        raise ValueError(f"--no-deduplicate: {source} must be made by spin-fast precompute --no-deduplicate")


def _equal_sums(features: PowerFeatures, graphs: GraphBatch) -> bool:
    """Whether what no hop has changed yet adds up to the same in each graph."""
    return _close(_sums(features, 0), sum_readout(graphs.x.double(), graphs.ptr), 1e-6)


def _equal_hops(features: PowerFeatures, graphs: GraphBatch) -> bool:
    """Whether the first hop of each operator adds up to the same, in graphs evenly chosen from all."""
    if features.num_hops == 0:
        return True
    number = min(len(graphs), SAMPLE)
    some = torch.arange(number) * len(graphs) // max(number, 1)
    features, graphs = features[some].take(), graphs[some]
    wanted = PowerFeatures.from_graphs(graphs, 1, features.operator, deduplicate=False)
    firsts = range(1, features.num_branches, features.num_hops)
    return all(_close(_sums(features, first), _sums(wanted, number), 1e-5) for number, first in enumerate(firsts, 1))


def _sums(features: PowerFeatures, branch: int) -> Tensor:
    """``[G, d]``: rows of a branch, added up by graph."""
    ptr = features.ptr[branch * len(features) : (branch + 1) * len(features) + 1]
    first, last = features.row_ptr[branch : branch + 2].tolist()
    entries = slice(int(ptr[0]), int(ptr[-1]))
    index = None if features.index is None else features.index[entries] - first
    count = None if features.count is None else features.count[entries]
    return sum_readout(features.rows[first:last].double(), ptr - ptr[0], index=index, count=count)


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool(((found - wanted).abs() <= tolerance * wanted.abs().amax(0)).all())


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether labels are equal, with a NaN like any other."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(2), other.nan_to_num(2))
