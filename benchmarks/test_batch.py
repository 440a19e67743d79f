"""A ``GraphBatch`` of a whole data set, from edges or PyG's objects, against what sorts and joins them for others."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor

from spin_fast import GraphBatch

from .harness.plugin import RaceRunner

pytest.importorskip("torch_geometric", reason="PyG sorts and joins graphs, too: install torch_geometric")

from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.utils import sort_edge_index


@pytest.mark.full
@pytest.mark.parametrize("order", ["by source", "by target", "in no order"])
def test_from_edge_index(race: RaceRunner, dataset: str, graphs: GraphBatch, order: str) -> None:
    """Edges of int64, by source as PyG lists them or otherwise; ours are checked, and those of each graph are its own.

    Others give the same adjacency: scipy and torch a matrix, PyG sorted edges.
    """
    edge_index = graphs.edge_index.long()
    if order != "by target":
        key = edge_index[0] if order == "by source" else torch.rand(graphs.num_edges)
        edge_index = edge_index[:, key.argsort(stable=True)]
    batch = torch.arange(len(graphs)).repeat_interleave(graphs.num_nodes_per_graph)
    source, target = edge_index.contiguous()
    ones, num_nodes = np.ones(graphs.num_edges, np.float32), graphs.num_nodes
    size = (num_nodes, num_nodes)

    def by_torch() -> Tensor:
        adjacency = torch.sparse_coo_tensor(torch.stack([target, source]), torch.from_numpy(ones), size)
        return adjacency.coalesce().to_sparse_csr()

    contenders = {
        "from_edge_index": partial(GraphBatch.from_edge_index, edge_index, graphs.x, batch),
        "scipy, coo_array.tocsr": lambda: scipy.sparse.coo_array(
            (ones, (target.numpy(), source.numpy())), size
        ).tocsr(),
        "torch, coalesce and to_sparse_csr": by_torch,
        "PyG, sort_edge_index": partial(sort_edge_index, edge_index, num_nodes=num_nodes, sort_by_row=False),
    }
    made, by_scipy = contenders["from_edge_index"](), contenders["scipy, coo_array.tocsr"]()
    assert torch.equal(made.indices, graphs.indices.long())
    assert np.array_equal(by_scipy.indptr, made.indptr.numpy())
    assert np.array_equal(by_scipy.indices, made.indices.numpy())
    race(f"from_edge_index, edges {order}", dataset, contenders)


class InMemory(InMemoryDataset):
    """As PyG's and OGB's data sets are once they have been read."""

    def __init__(self, items: list[Data]) -> None:
        super().__init__()
        self.data, self.slices = self.collate(items)


@pytest.mark.full
def test_from_pyg(race: RaceRunner, dataset: str, graphs: GraphBatch) -> None:
    """One batch of all graphs of a data set, which PyG makes of a list of them."""
    items = graphs.to_pyg()
    contenders = {
        "from_pyg, InMemoryDataset": partial(GraphBatch.from_pyg, InMemory(items)),
        "from_pyg, list of Data": partial(GraphBatch.from_pyg, items),
        "PyG, Batch.from_data_list": partial(Batch.from_data_list, items),
    }
    for make in list(contenders.values())[:2]:
        assert torch.equal(make().indices, graphs.indices.long())
    race("from_pyg", dataset, contenders, ours=2)
