"""Graph networks on PyG's layers, as settings that :func:`spin_fast.selection.evaluate` selects among.

Architectures are those of the fair comparison (Errica et al. 2020, https://github.com/diningphil/gnn-comparison), which
has no GCN. Node features are prepared, epochs selected and training stopped as for SPIN. Batches are taken out of flat
arrays, which is two to four times as fast as PyG's DataLoader; GIN, GCN and GraphSAGE have CSR matrices.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.utils import to_dense_adj, to_dense_batch

from spin_fast import GraphBatch, NodeFeatures, training
from spin_fast.selection import Trained, TrainingSet
from spin_fast.training.resume import Epoch, TrainingState
from spin_fast.training.schedules import advance, scheduler_of

from . import gnn

POOLS = {"sum": pyg.global_add_pool, "mean": pyg.global_mean_pool, "max": pyg.global_max_pool}
Pool = Literal["sum", "mean", "max"]
Edges = Callable[[GraphBatch], tuple[Tensor, ...]]


class Scorer(nn.Module):
    """From graphs to class scores; ``penalty`` of the last batch is added to its loss."""

    penalty: Tensor | float = 0.0


@dataclass(kw_only=True)
class Network(ABC):
    """What all networks have: the settings of :class:`spin_fast.selection.Recipe` that are not SPIN's own."""

    degree: Literal["raw", "log", "one-hot", "profile"] | None = None
    one_hot: bool = False
    standardize: bool | Literal["auto"] = "auto"
    hidden_features: int = 64
    epochs: int = 200
    batch_size: int = 32
    learning_rate: float = 1e-3
    schedule: str = "constant"
    weight_decay: float = 0.0
    clip_norm: float | None = None
    patience: int = 50

    @abstractmethod
    def new_module(self, graphs: GraphBatch, out_features: int) -> Scorer:
        """A network with random weights, for ``graphs`` to train on."""

    def prepared(self, graphs: GraphBatch) -> GraphBatch:
        """The graphs with the edges that the network reads."""
        return graphs

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        key = str((type(self).__name__, self.degree, self.one_hot, self.standardize))
        graphs, node_features = data.made(key, partial(self._features, data))
        train, validation = graphs[data.train], graphs[data.validation]
        epochs = self.epochs if epochs is None else epochs
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            module = self.new_module(train, data.num_outputs)
            optimizer = torch.optim.Adam(
                module.parameters(), self.learning_rate, weight_decay=self.weight_decay, fused=True
            )
            scheduler = scheduler_of(self.schedule, optimizer, epochs)
            order, state = torch.Generator().manual_seed(seed), TrainingState()
            while not state.is_over(epochs, self.patience):
                start, rate = time.perf_counter(), optimizer.param_groups[0]["lr"]
                loss = self._epoch(module, optimizer, train, order)
                seconds = time.perf_counter() - start
                scores, y = self.scores(module, validation), _labels(validation)
                finite = len(training.not_finite(scores)) == 0
                measured = (training.loss_of(scores, y).item(), data.metric(scores, y)) if finite else (math.nan,) * 2
                number = len(state.epochs) + 1
                state = state.after(Epoch(number, loss, *measured, rate, seconds), module.state_dict(), {})
                advance(scheduler, *measured)
        if not state.has_best:
            raise training.Diverged("training diverged: no epoch had finite scores of the validation graphs")
        module.load_state_dict(state.best)
        best = state.epochs[state.best_epoch]
        model = partial(self.predict, module, node_features)
        return Trained(best.validation, best.validation_loss, len(state.epochs), model)

    def predict(self, module: Scorer, node_features: NodeFeatures, graphs: GraphBatch) -> Tensor:
        """Class scores of graphs as they were read."""
        return self.scores(module, self.prepared(node_features.transform(graphs)))

    @torch.no_grad()
    def scores(self, module: Scorer, graphs: GraphBatch) -> Tensor:
        """Class scores of prepared graphs."""
        module.eval()
        firsts = range(0, len(graphs), self.batch_size)
        return torch.cat([module(graphs[first : first + self.batch_size]) for first in firsts])

    def _features(self, data: TrainingSet) -> tuple[GraphBatch, NodeFeatures]:
        node_features = NodeFeatures(self.degree, one_hot=self.one_hot, standardize=self.standardize)
        node_features.fit(data.graphs, data.train)
        return self.prepared(node_features.transform(data.graphs)), node_features

    def _epoch(
        self, module: Scorer, optimizer: torch.optim.Optimizer, train: GraphBatch, order: torch.Generator
    ) -> float:
        """Train on batches of equal size, so that none has too few graphs for BatchNorm; returns the mean loss."""
        module.train()
        total = torch.zeros(())
        for ids in torch.randperm(len(train), generator=order).tensor_split(math.ceil(len(train) / self.batch_size)):
            batch = train[ids]
            loss = training.loss_of(module(batch), _labels(batch)) + module.penalty
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), self.clip_norm)
            optimizer.step()
            total += loss.detach() * len(ids)
        return total.item() / len(train)


class Layered(Scorer):
    """Layers one after the other; the rows of each are pooled, and ``head`` reads what all give, side by side.

    A layer reads rows, and what ``edges`` makes of the graphs.
    """

    def __init__(self, layers: Iterable[nn.Module], edges: Edges, pool: Pool, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.edges, self.pool, self.head = nn.ModuleList(layers), edges, POOLS[pool], head

    def forward(self, graphs: GraphBatch) -> Tensor:
        x, edges, graph = graphs.x, self.edges(graphs), _graph_of(graphs)
        pooled = []
        for layer in self.layers:
            x = layer(x, *edges)
            pooled.append(self.pool(x, graph, len(graphs)))
        return self.head(torch.cat(pooled, dim=1))


def _no_edges(graphs: GraphBatch) -> tuple[Tensor, ...]:
    return ()


def _edge_index(graphs: GraphBatch) -> tuple[Tensor, ...]:
    return (graphs.edge_index.long(),)


def _matrix(graphs: GraphBatch) -> tuple[Tensor, ...]:
    """The adjacency with the weights that :meth:`CSRNetwork.prepared` gave it."""
    assert graphs.edge_weight is not None
    size, csr = (graphs.num_nodes,) * 2, (graphs.indptr, graphs.indices, graphs.edge_weight)
    return (torch.sparse_csr_tensor(*csr, size, check_invariants=False),)


def _entries(graphs: GraphBatch) -> tuple[Tensor, ...]:
    """Of each edge its entry in the normalised adjacency, too."""
    edge_index = graphs.edge_index.long()
    return edge_index, graphs.degree.to(graphs.x.dtype)[edge_index].prod(0).rsqrt()[:, None]


class ECCLayer(pyg.NNConv):
    """NNConv, made faster: each node sums ``weight of edge * x``, by unit of the edges' MLP, and multiplies once.

    The matrices of all edges are linear in these units, so that none needs to be made.
    """

    def forward(self, x: Tensor, edge_index: Tensor, feature: Tensor) -> Tensor:
        units, matrices = F.pad(self.nn[:-1](feature), (0, 1), value=1.0), self.nn[-1]
        messages = units[:, :, None] * x[edge_index[0]][:, None]
        sums = x.new_zeros(len(x), units.shape[1] * x.shape[1]).index_add_(0, edge_index[1], messages.flatten(1))
        weight = torch.cat([matrices.weight.t(), matrices.bias[None]]).view(-1, self.out_channels)
        return sums @ weight + self.lin(x) + self.bias


class CSRNetwork(Network):
    """A network that reads the adjacency of undirected graphs as a CSR matrix."""

    family: ClassVar[gnn.Family]

    def prepared(self, graphs: GraphBatch) -> GraphBatch:
        matrix = gnn.adjacency(graphs, self.family)
        indptr, indices, weight = map(torch.from_numpy, (matrix.indptr, matrix.indices, matrix.data))
        return GraphBatch(graphs.ptr, indptr, indices, graphs.x, graphs.y, weight)


@dataclass(kw_only=True)
class DeepSets(Network):
    """No edges: an MLP of the sum of what a layer makes of each node (Zaheer et al. 2017); Errica et al.'s baseline."""

    def new_module(self, graphs: GraphBatch, out_features: int) -> Scorer:
        layer = nn.Sequential(nn.Linear(graphs.num_features, self.hidden_features), nn.ReLU())
        return Layered([layer], _no_edges, "sum", _mlp(self.hidden_features, self.hidden_features, out_features))


@dataclass(kw_only=True)
class GCN(CSRNetwork):
    """GCN (Kipf & Welling 2017) with BatchNorm; all layers are read out, as in the GIN."""

    family: ClassVar[gnn.Family] = "GCN"
    num_layers: int = 4
    readout: Pool = "sum"
    dropout: float = 0.0

    def layers(self, in_features: int, width: int) -> list[nn.Module]:
        def layer(of: int) -> nn.Module:
            convolution = (gnn.GCNLayer(of, width, normalize=False), "x, edges -> x")
            return pyg.Sequential("x, edges", [convolution, nn.BatchNorm1d(width), nn.ReLU(True)])

        return [layer(of) for of in [in_features] + [width] * (self.num_layers - 1)]

    def new_module(self, graphs: GraphBatch, out_features: int) -> Scorer:
        layers = self.layers(graphs.num_features, self.hidden_features)
        head = nn.Sequential(nn.Dropout(self.dropout), nn.Linear(self.hidden_features * len(layers), out_features))
        return Layered(layers, _matrix, self.readout, head)


@dataclass(kw_only=True)
class GIN(GCN):
    """GIN (Xu et al. 2019): an MLP with BatchNorm after each sum over neighbours, and one before; all are read out."""

    family: ClassVar[gnn.Family] = "GIN"
    train_eps: bool = False

    def layers(self, in_features: int, width: int) -> list[nn.Module]:
        def mlp(of: int) -> nn.Sequential:
            first = (nn.Linear(of, width), nn.BatchNorm1d(width), nn.ReLU(True))
            return nn.Sequential(*first, nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(True))

        before = pyg.Sequential("x, edges", [(mlp(in_features), "x -> x")])
        return [before, *(gnn.GINLayer(mlp(width), train_eps=self.train_eps) for _ in range(self.num_layers))]


@dataclass(kw_only=True)
class GraphSAGE(CSRNetwork):
    """GraphSAGE (Hamilton et al. 2017), the maximum of all its layers, and an MLP."""

    family: ClassVar[gnn.Family] = "GIN"
    num_layers: int = 3
    aggregation: Pool = "mean"

    def new_module(self, graphs: GraphBatch, out_features: int) -> Scorer:
        def layer(of: int) -> nn.Module:
            convolution = (pyg.SAGEConv(of, width, self.aggregation), "x, edges -> x")
            return pyg.Sequential("x, edges", [convolution, nn.ReLU(True)])

        width = self.hidden_features
        layers = [layer(of) for of in [graphs.num_features] + [width] * (self.num_layers - 1)]
        return Layered(layers, _matrix, "max", _mlp(width * len(layers), width, out_features))


@dataclass(kw_only=True)
class ECC(Network):
    """Edge-conditioned convolution (Simonovsky & Komodakis 2017), without its pyramid of coarser graphs.

    The feature of an edge is its entry in the normalised adjacency.
    """

    num_layers: int = 3
    dropout: float = 0.05

    def new_module(self, graphs: GraphBatch, out_features: int) -> Scorer:
        def layer(of: int) -> nn.Module:
            weights = nn.Sequential(nn.Linear(1, 16), nn.ReLU(True), nn.Linear(16, of * width))
            convolution = (ECCLayer(of, width, weights), "x, edges, feature -> x")
            after = (nn.ReLU(True), nn.BatchNorm1d(width), nn.Dropout(self.dropout))
            return pyg.Sequential("x, edges, feature", [convolution, *after])

        width = self.hidden_features
        layers = [layer(of) for of in [graphs.num_features] + [width] * (self.num_layers - 1)]
        return Layered(layers, _entries, "mean", _mlp(width * len(layers), width, out_features))


@dataclass(kw_only=True)
class DGCNN(Network):
    """DGCNN (Zhang et al. 2018): convolutions over sorted nodes, as many as a share ``quantile`` of the graphs has."""

    hidden_features: int = 32
    num_layers: int = 3
    quantile: float = 0.6

    def new_module(self, graphs: GraphBatch, out_features: int) -> Scorer:
        sizes = graphs.num_nodes_per_graph.float()
        length = max(10, math.ceil(sizes.quantile(self.quantile).item()))  # what the convolutions need
        widths = [graphs.num_features, *[self.hidden_features] * self.num_layers, 1]
        return SortedNodes(widths, length, out_features)


class SortedNodes(Scorer):
    """The network of :class:`DGCNN`."""

    def __init__(self, widths: list[int], length: int, out_features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.mean = pyg.SimpleConv("mean", combine_root="self_loop")
        self.sort = pyg.SortAggregation(length)
        rows = sum(widths[1:])
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, 16, rows, rows), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 5), nn.ReLU(), nn.Flatten()
        )
        self.head = _mlp(32 * (length // 2 - 4), 128, out_features, dropout=0.5)

    def forward(self, graphs: GraphBatch) -> Tensor:
        x, (edge_index,), rows = graphs.x, _edge_index(graphs), []
        for layer in self.layers:
            x = self.mean(layer(x), edge_index).tanh()
            rows.append(x)
        in_order = self.sort(torch.cat(rows, dim=1), _graph_of(graphs), dim_size=len(graphs))
        return self.head(self.convolutions(in_order[:, None]))


@dataclass(kw_only=True)
class DiffPool(Network):
    """DiffPool (Ying et al. 2018): twice, nodes are pooled to a quarter of those of the largest graph, or of 150.

    PyG's own example has 150 for larger graphs; without it, pooled graphs of some sets are larger than most graphs.
    """

    batch_size: int = 8
    clip_norm: float | None = 2.0

    def new_module(self, graphs: GraphBatch, out_features: int) -> Scorer:
        clusters = math.ceil(min(int(graphs.num_nodes_per_graph.max()), 150) / 4)
        return Clusters(graphs.num_features, self.hidden_features, (clusters, math.ceil(clusters / 4)), out_features)


class Clusters(Scorer):
    """The network of :class:`DiffPool`."""

    def __init__(self, in_features: int, width: int, clusters: tuple[int, ...], out_features: int) -> None:
        super().__init__()
        given = [in_features, *[4 * width] * len(clusters)]
        self.embeddings = nn.ModuleList(DenseSAGE(of, width, 2 * width) for of in given)
        self.assignments = nn.ModuleList(
            DenseSAGE(of, width, number) for of, number in zip(given, clusters, strict=False)
        )
        self.linear = nn.ModuleList(nn.Linear(2 * width + number, number) for number in clusters)
        self.head = _mlp(4 * width * len(given), 50, out_features)

    def forward(self, graphs: GraphBatch) -> Tensor:
        graph = _graph_of(graphs)
        x, mask = to_dense_batch(graphs.x, graph, batch_size=len(graphs))
        adjacency = to_dense_adj(*_edge_index(graphs), graph, max_num_nodes=x.shape[1], batch_size=len(graphs))
        self.penalty, read = 0.0, []
        for embedding, assignment, linear in zip(self.embeddings, self.assignments, self.linear, strict=False):
            clusters = linear(assignment(x, adjacency, mask))
            x = embedding(x, adjacency, mask)
            x, adjacency, link, entropy = pyg.dense_diff_pool(x, adjacency, clusters, mask)
            self.penalty, mask = self.penalty + link + entropy, None
            read.append(x.amax(1))
        read.append(self.embeddings[-1](x, adjacency, None).amax(1))
        return self.head(torch.cat(read, dim=1))


class DenseSAGE(nn.Module):
    """Three layers of GraphSAGE on dense adjacencies, their rows side by side."""

    def __init__(self, in_features: int, width: int, out_features: int) -> None:
        super().__init__()
        widths = (in_features, width, width, out_features)
        self.layers = nn.ModuleList(pyg.DenseSAGEConv(*pair) for pair in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2))

    def forward(self, x: Tensor, adjacency: Tensor, mask: Tensor | None) -> Tensor:
        rows = []
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = layer(x, adjacency, mask).relu()
            x = norm(x.flatten(0, 1)).view_as(x)
            rows.append(x)
        return torch.cat([*rows, self.layers[-1](x, adjacency, mask)], dim=2)


def _mlp(in_features: int, width: int, out_features: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(in_features, width), nn.ReLU(True), nn.Dropout(dropout), nn.Linear(width, out_features)
    )


def _graph_of(graphs: GraphBatch) -> Tensor:
    """``[N]``, the graph of each node."""
    return torch.repeat_interleave(graphs.num_nodes_per_graph, output_size=graphs.num_nodes)


def _labels(graphs: GraphBatch) -> Tensor:
    assert graphs.y is not None
    return graphs.y
