"""Check that a file of features is of the graphs at hand, by sums over graphs, and its hops of a sample of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import datasets, sum_readout
from .._common.progress import progress_bar
from .._common.rows import take_dense
from ..features.power_features import PowerFeatures
from ..features.shards import ShardedFeatures
from ..graphs.batch import GraphBatch
from ..graphs.node_features import NodeFeatures, ids_sha256
from ._graphs import CHUNK_GRAPHS, Description
from ._options import DataOptions, operator_of
from ._train_options import FeatureOptions

SAMPLE = 256  # graphs whose hops are computed again for comparison; all would take the time that the file saves


def check_fitted(options: FeatureOptions, node_features: NodeFeatures | None, train: Tensor) -> None:
    """Check that the node features of a file were fitted to the graphs ``train``, and so to no test graph.

    Raises:
        ValueError: they learnt from others.
    """
    while node_features is not None:
        if node_features.learns and node_features.ids_sha256_ != ids_sha256(train):
            raise ValueError(
                f"--features {options.precomputed}: its node features were fitted to other graphs than these training "
                "graphs; give --seed, --fold and --splits as to spin-fast precompute"
            )
        node_features = node_features.previous_


def check_settings(options: FeatureOptions, features: ShardedFeatures, needs_node_rows: str | None) -> None:
    """Check that the features of a file were made with these options.

    ``needs_node_rows`` is the option for which they must know the row of each node, if there is one.

    Raises:
        ValueError: says what differs.
    """
    source, operator = f"--features {options.precomputed}", operator_of(options.operators)
    if options.hops not in (None, features.num_hops):
        raise ValueError(f"--hops {options.hops}: {source} has {features.num_hops}")
    if operator not in (None, features.operator):
        raise ValueError(f"--operator {operator}: {source} has {features.operator}")
    deduplicated = [shard for shard in features.shards if shard.index is not None]
    if needs_node_rows is not None and any(shard.row_of_node is None for shard in deduplicated):
        without = "--branches hops without dropout takes it"
        raise ValueError(f"{needs_node_rows}: {source} was made by spin-fast precompute --no-node-rows; {without}")
    if not options.deduplicate and deduplicated:
        raise ValueError(f"--no-deduplicate: {source} must be made by spin-fast precompute --no-deduplicate")


def check_graphs(
    file: str, features: ShardedFeatures, source: datasets.Source, data: DataOptions, description: Description
) -> None:
    """Check that the features of a file are of just these graphs, and describe these; a chunk is in memory at a time.

    Raises:
        ValueError: says what differs.
    """
    _, reader = data.open(source)
    streams, other = reader.whole is None, f"{file} is not of {source.title}"
    number = min(len(reader), SAMPLE)
    sample = torch.arange(number) * len(reader) // max(number, 1)  # at equal distances
    made, begin = features.node_features, 0
    width = features.num_features if made is None else made.num_inputs
    with progress_bar("graphs", len(reader), streams) as advance:
        for read in reader.chunks(CHUNK_GRAPHS if streams else len(reader)):
            description.add(read)
            of_graphs, of_file = (
                f"{number} graphs with {of_node} feature(s)"
                for number, of_node in ((len(reader), read.graphs.num_features), (len(features), width))
            )
            if of_graphs != of_file:
                raise ValueError(f"{other}: it has {of_file}, {source.title} {of_graphs}")
            if made is not None:
                read = read._replace(graphs=made.transform(read.graphs))
            ids = torch.arange(begin, begin := begin + len(read.graphs))
            for shard, of_shard, places in features.parts(ids):
                chosen = sample[torch.isin(sample, ids[places])] - ids[places[0]]
                graphs = read.graphs[int(places[0]) : int(places[-1]) + 1]
                if wrong := _difference(shard, int(of_shard[0]), graphs, chosen):
                    raise ValueError(f"{other}: its graphs have other {wrong}")
            advance("", len(read.graphs))


def _difference(shard: PowerFeatures, begin: int, graphs: GraphBatch, chosen: Tensor) -> str | None:
    """What is different in the graphs of a shard from ``begin`` on, if anything; hops of the ``chosen`` ones alone."""
    end = begin + len(graphs)
    labels = None if shard.labels is None else shard.labels[begin:end]
    if not torch.equal(shard.node_ptr[begin : end + 1].diff(), graphs.ptr.diff()) or not _equal(labels, graphs.y):
        return "sizes or labels; see --label"
    edges = "--undirected, --coalesce and --self-loops"
    if not _close(_sums(shard, 0, begin, end), sum_readout(_with_size(graphs.x), graphs.ptr), 1e-6):
        return f"node features; see --node-features, or, of degrees, {edges}"
    if len(chosen) and not _equal_hops(shard[begin + chosen].take(), graphs[chosen]):
        return f"edges; give {edges} as to precompute"
    return None


def _equal_hops(features: PowerFeatures, graphs: GraphBatch) -> bool:
    """Whether the first hop of each operator has the same sums."""
    if features.num_hops == 0:
        return True
    wanted = PowerFeatures.from_graphs(graphs, 1, features.operator, deduplicate=False)
    firsts = range(1, features.num_branches, features.num_hops)
    return all(_close(_sums(features, first), _sums(wanted, number), 1e-5) for number, first in enumerate(firsts, 1))


def _sums(features: PowerFeatures, branch: int, begin: int = 0, end: int | None = None) -> Tensor:
    """Sum the rows of a branch, and their sizes, over each of the graphs ``begin`` to ``end``: ``[G, 2 d]``."""
    num_graphs = len(features)
    ptr = features.ptr[branch * num_graphs + begin : branch * num_graphs + (num_graphs if end is None else end) + 1]
    entries = slice(int(ptr[0]), int(ptr[-1]))
    if features.index is None:
        return sum_readout(_with_size(features.rows[entries]), ptr - ptr[0])
    used, index = features.index[entries].unique(return_inverse=True)
    count = None if features.count is None else features.count[entries]
    return sum_readout(_with_size(take_dense(features.rows, used)), ptr - ptr[0], index=index, count=count)


def _with_size(rows: Tensor) -> Tensor:
    """Rows beside their absolute values, by whose sums rounding is judged: the rows' own may cancel."""
    return torch.cat([rows, rows.abs()], dim=1).double()


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Whether sums are equal but for rounding."""
    differ, (_, size) = (found - wanted).abs(), wanted.chunk(2, dim=1)
    return bool((differ <= tolerance * size.repeat(1, 2)).all())


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether labels are equal, where NaN equals NaN."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(2), other.nan_to_num(2))
