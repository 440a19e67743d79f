"""PyG's GIN and GCN graph classifiers, as fast as their own users know how to make them.

What an expert does, they do: the GCN's self-loops and normalisation are computed once per data set, edges are sorted by
target, batches may be collated once, before training; Adam is fused, activations overwrite, the loss is read once per
epoch. Message passing comes in two forms, and which of them is faster depends on the data set, so both race:
``edge_index`` (gather and scatter) and CSR (a sparse product, whose backward pass is another one instead of torch's
transposition). The DataLoader keeps ``num_workers=0``: worker processes would not show in the CPU time of this one.
:func:`compiled` is ``torch.compile`` of the first of them, for batches of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, global_add_pool
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from spin_fast import GraphBatch

Family = Literal["GIN", "GCN"]


class _SymmetricProduct(torch.autograd.Function):
    """``A @ x`` for a symmetric CSR matrix: torch's own backward would transpose ``A`` at every step."""

    @staticmethod
    def forward(ctx: Any, adjacency: Tensor, x: Tensor) -> Tensor:
        ctx.adjacency = adjacency
        return adjacency @ x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.adjacency @ gradients[0]


class GINLayer(GINConv):
    def message_and_aggregate(self, adj_t: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return _SymmetricProduct.apply(adj_t, x[0])


class GCNLayer(GCNConv):
    def message_and_aggregate(self, adj_t: Tensor, x: Tensor) -> Tensor:
        return _SymmetricProduct.apply(adj_t, x)


class Inputs(NamedTuple):
    """One batch as the models read it."""

    x: Tensor
    edges: tuple[Tensor, ...]  # edge_index [2, E] and, for the GCN, weights [E]; or one CSR matrix, which has both
    graph: Tensor
    num_graphs: int
    y: Tensor

    def to(self, device: str) -> Inputs:
        """The same batch on another device."""
        edges = tuple(part.to(device) for part in self.edges)
        return Inputs(self.x.to(device), edges, self.graph.to(device), self.num_graphs, self.y.to(device))


class Classifier(nn.Module):
    """Message passing layers, sum pooling, and the classifier that SPIN has too."""

    def __init__(self, layers: Iterable[nn.Module], hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        hidden = (nn.Linear(hidden_features, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU())
        self.classifier = nn.Sequential(*hidden, nn.Linear(32, out_features))

    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs.x
        for layer in self.layers:
            x = layer(x, *inputs.edges).relu_()
        return self.classifier(global_add_pool(x, inputs.graph, inputs.num_graphs))


def gin(in_features: int, hidden_features: int, out_features: int, depth: int) -> Classifier:
    """GIN: an MLP of two linear layers in each message passing layer."""

    def mlp(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(width, hidden_features), nn.ReLU(True), nn.Linear(hidden_features, hidden_features)
        )

    layers = [GINLayer(mlp(width)) for width in [in_features] + [hidden_features] * (depth - 1)]
    return Classifier(layers, hidden_features, out_features)


def gcn(in_features: int, hidden_features: int, out_features: int, depth: int) -> Classifier:
    """GCN: one linear layer in each message passing layer; :func:`data_list` has normalised its edges."""
    layers = [
        GCNLayer(width, hidden_features, normalize=False) for width in [in_features] + [hidden_features] * (depth - 1)
    ]
    return Classifier(layers, hidden_features, out_features)


MODELS: dict[Family, Callable[[int, int, int, int], Classifier]] = {"GIN": gin, "GCN": gcn}


def data_list(graphs: GraphBatch, family: Family) -> list[Data]:
    """PyG's graphs, edges sorted by target; for the GCN with self-loops and normalised weights."""
    matrix = adjacency(graphs, family)
    target = torch.arange(graphs.num_nodes).repeat_interleave(torch.from_numpy(matrix.indptr).diff())
    edge_index = torch.stack([torch.from_numpy(matrix.indices).long(), target])
    edge_weight = torch.from_numpy(matrix.data)
    assert graphs.y is not None
    first_node, first_edge = graphs.ptr.tolist(), matrix.indptr[graphs.ptr.numpy()].tolist()
    data = []
    for graph in range(len(graphs)):
        nodes = slice(first_node[graph], first_node[graph + 1])
        of_graph = slice(first_edge[graph], first_edge[graph + 1])
        weight = {} if family == "GIN" else {"edge_weight": edge_weight[of_graph]}
        edges = edge_index[:, of_graph] - first_node[graph]
        data.append(Data(x=graphs.x[nodes], edge_index=edges, y=graphs.y[graph : graph + 1], **weight))
    return data


def adjacency(graphs: GraphBatch, family: Family) -> scipy.sparse.csr_matrix:
    """``A`` for the GIN, ``D^-1/2 (A + I) D^-1/2`` for the GCN, over all nodes; row ``v`` gathers into node ``v``.

    Raises:
        ValueError: it is not symmetric, so its CSR form could not serve the backward pass too.
    """
    shape = (graphs.num_nodes, graphs.num_nodes)
    ones = np.ones(graphs.num_edges, np.float32)
    matrix = scipy.sparse.csr_matrix((ones, graphs.indices.numpy(), graphs.indptr.numpy()), shape)
    if abs(matrix - matrix.T).sum() > 0:
        raise ValueError("graphs must be undirected: the rivals' CSR form relies on it")
    if family == "GIN":
        return matrix
    target, source = (torch.from_numpy(side).long() for side in matrix.tocoo().coords)
    (source, target), weight = gcn_norm(torch.stack([source, target]), num_nodes=graphs.num_nodes)
    return scipy.sparse.csr_matrix((weight.numpy(), (target.numpy(), source.numpy())), shape)


def edge_inputs(batch: Batch) -> Inputs:
    """A collated batch in the form of ``edge_index``."""
    edges = (batch.edge_index,) if batch.edge_weight is None else (batch.edge_index, batch.edge_weight)
    return Inputs(batch.x, edges, batch.batch, batch.num_graphs, batch.y)


def csr_inputs(batch: Batch) -> Inputs:
    """A collated batch in CSR form; int32, the width of MKL's own indices."""
    source, target = batch.edge_index.int()
    weight = batch.x.new_ones(source.numel()) if batch.edge_weight is None else batch.edge_weight
    offsets = torch._convert_indices_from_coo_to_csr(target, batch.num_nodes, out_int32=True)
    adjacency = torch.sparse_csr_tensor(offsets, source, weight, (batch.num_nodes,) * 2, check_invariants=False)
    return Inputs(batch.x, (adjacency,), batch.batch, batch.num_graphs, batch.y)


FORMS: dict[str, Callable[[Batch], Inputs]] = {"edge_index": edge_inputs, "CSR": csr_inputs}


def loaded(loader: DataLoader, form: str) -> Iterator[Inputs]:
    """One epoch of batches that PyG's DataLoader collates as they are asked for."""
    return map(FORMS[form], loader)


def collated(data: list[Data], batch_size: int, form: str) -> list[Inputs]:
    """All batches, collated beforehand, of consecutive graphs."""
    return [FORMS[form](Batch.from_data_list(data[i : i + batch_size])) for i in range(0, len(data), batch_size)]


def compiled(model: Classifier, threads: int) -> nn.Module:
    """The same model by ``torch.compile``, once for ``edge_index`` batches of all sizes.

    Inductor is told the threads: with one, its scattered sums need no atomic additions. CSR batches are not for it:
    every product breaks the graph, after which the model runs in pieces, in the other form too.
    """
    torch.compiler.reset()  # what earlier races compiled counts towards a limit
    return cast(nn.Module, torch.compile(model, dynamic=True, options={"cpp.threads": threads}))


@torch.inference_mode()
def predict(model: Classifier, batches: Iterable[Inputs]) -> Tensor:
    """Logits ``[G, C]``, batch after batch."""
    model.eval()
    return torch.cat([model(inputs) for inputs in batches])
