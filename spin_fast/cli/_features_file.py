"""Check that a file of features is of the graphs at hand, by sums over graphs, and its hops of a sample of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import sum_readout
from ..features.power_features import PowerFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures, ids_sha256
from ._options import operator_of
from ._train_options import FeatureOptions

SAMPLE = 256  # graphs whose hops are computed again for comparison; all would take the time that the file saves


def check_fitted(options: FeatureOptions, node_features: NodeFeatures | None, train: Tensor) -> None:
    """Check that the node features of a file were fitted to the graphs ``train``, and so to no test graph.

    Raises:
        ValueError: they learnt from others.
    """
    if node_features is not None and node_features.learns and node_features.ids_sha256_ != ids_sha256(train):
        raise ValueError(
            f"--features {options.precomputed}: its node features were fitted to other graphs than these training "
            "graphs; give --seed, --fold and --splits as to spin-fast precompute"
        )


def check_features(
    options: FeatureOptions, features: PowerFeatures, dataset: str, graphs: GraphBatch, needs_node_rows: str | None
) -> None:
    """Check that the features of a file are of just these graphs and options.

    ``needs_node_rows`` is the option for which they must know the row of each node, if there is one.

    Raises:
        ValueError: says what differs.
    """
    source, operator = f"--features {options.precomputed}", operator_of(options.operators)
    made = features.node_features
    width = features.num_features if made is None else made.num_features_
    of_graphs = f"{graphs.num_graphs} graphs with {graphs.num_features} feature(s)"
    of_file = f"{features.num_graphs} graphs with {width} feature(s)"
    other = f"{source} is not of {dataset}: its graphs have other"
    if of_graphs != of_file:
        raise ValueError(f"{source} is not of {dataset}: it has {of_file}, {dataset} {of_graphs}")
    graphs = graphs if made is None else made.transform(graphs)
    if not torch.equal(features.node_ptr, graphs.ptr) or not _equal(features.labels, graphs.y):
        raise ValueError(f"{other} sizes or labels; see --label")
    edges = "--undirected, --coalesce and --self-loops"
    if not _close(_sums(features, 0), sum_readout(graphs.x.double(), graphs.ptr), 1e-6):
        raise ValueError(f"{other} node features; see --node-features, or, of degrees, {edges}")
    if not _equal_hops(features, graphs):
        raise ValueError(f"{other} edges; give {edges} as to precompute")
    if options.hops not in (None, features.num_hops):
        raise ValueError(f"--hops {options.hops}: {source} has {features.num_hops}")
    if operator not in (None, features.operator):
        raise ValueError(f"--operator {operator}: {source} has {features.operator}")
    if needs_node_rows is not None and features.index is not None and features.row_of_node is None:
        without = "--branches hops without dropout takes it"
        raise ValueError(f"{needs_node_rows}: {source} was made by spin-fast precompute --no-node-rows; {without}")
    if not options.deduplicate and features.index is not None:
        raise ValueError(f"--no-deduplicate: {source} must be made by spin-fast precompute --no-deduplicate")


def _equal_hops(features: PowerFeatures, graphs: GraphBatch) -> bool:
    """Whether the first hop of each operator has the same sums, in a sample of graphs at equal distances."""
    if features.num_hops == 0:
        return True
    number = min(len(graphs), SAMPLE)
    some = torch.arange(number) * len(graphs) // max(number, 1)
    features, graphs = features[some].take(), graphs[some]
    wanted = PowerFeatures.from_graphs(graphs, 1, features.operator, deduplicate=False)
    firsts = range(1, features.num_branches, features.num_hops)
    return all(_close(_sums(features, first), _sums(wanted, number), 1e-5) for number, first in enumerate(firsts, 1))


def _sums(features: PowerFeatures, branch: int) -> Tensor:
    """Sum the rows of a branch over each graph: ``[G, d]``."""
    ptr = features.ptr[branch * len(features) : (branch + 1) * len(features) + 1]
    first, last = features.row_ptr[branch : branch + 2].tolist()
    entries = slice(int(ptr[0]), int(ptr[-1]))
    index = None if features.index is None else features.index[entries] - first
    count = None if features.count is None else features.count[entries]
    return sum_readout(features.rows[first:last].double(), ptr - ptr[0], index=index, count=count)


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool(((found - wanted).abs() <= tolerance * wanted.abs().amax(0)).all())


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether labels are equal, where NaN equals NaN."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(2), other.nan_to_num(2))
