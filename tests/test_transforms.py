from __future__ import annotations

import importlib
import sys

import pytest
import torch
from helpers import TOLERANCE, dense_powers, graph_batches
from hypothesis import given
from hypothesis import strategies as st

pyg = pytest.importorskip("torch_geometric.data")

from torch_geometric import transforms  # noqa: E402

from spin_fast import GraphBatch  # noqa: E402
from spin_fast.transforms import SIGN  # noqa: E402


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@given(graphs=graph_batches(weighted=True), num_hops=st.integers(0, 3))
def test_sign_is_that_of_pyg(graphs: GraphBatch, num_hops: int) -> None:
    """Directed graphs, weights, self-loops, repeated edges, isolated nodes, empty graphs."""
    if not len(graphs):
        return
    data = pyg.Batch.from_data_list(graphs.to_pyg())
    ours = SIGN(num_hops)(data)
    if data.edge_weight is None and data.x.dtype == torch.float64:
        data.edge_weight = torch.ones(data.num_edges).double()  # without weights PyG's takes float32 only
    theirs = transforms.SIGN(num_hops)(data)
    names = {f"x{hop}" for hop in range(1, num_hops + 1)}
    assert set(ours.keys()) - set(theirs.keys()) == set()
    assert names == set(ours.keys()) - set(data.keys())
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], **TOLERANCE[graphs.x.dtype])


@given(graphs=graph_batches(weighted=True), operator=st.sampled_from(["adj", "sym", "sym+adj", "rw"]))
def test_operators(graphs: GraphBatch, operator: str) -> None:
    if not len(graphs):
        return
    made = SIGN(2, operator)(pyg.Batch.from_data_list(graphs.to_pyg()))
    for wanted, found in zip(dense_powers(graphs, 2, operator), (made.x, made.x1, made.x2), strict=True):
        torch.testing.assert_close(found.double(), wanted, **TOLERANCE[graphs.x.dtype])


def arrow(**attributes) -> pyg.Data:
    return pyg.Data(**{"x": torch.tensor([[1.0], [2.0]]), "edge_index": torch.tensor([[0], [1]]), **attributes})


def test_in_a_pipeline() -> None:
    data = arrow()
    made = transforms.Compose([transforms.ToUndirected(), SIGN(K=1)])(data)
    assert made.x1.tolist() == [[2.0], [1.0]]
    assert "x1" not in data
    assert repr(SIGN(2)) == "SIGN(K=2, operator='sym')"
    loader = importlib.import_module("torch_geometric.loader").DataLoader([made, made], batch_size=2)
    assert next(iter(loader)).x1.tolist() == [[2.0], [1.0]] * 2


def test_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        data = arrow(x=torch.tensor([[1.0], [2.0]], dtype=dtype), edge_weight=torch.tensor([3.0]))
        x1 = SIGN(1, "adj")(data).x1
        assert x1.dtype == dtype
        assert x1.tolist() == [[0.0], [3.0]]


def test_bad_input_is_named() -> None:
    for bad, error, message in (
        (pyg.HeteroData(), TypeError, "data must be a torch_geometric.data.Data or Batch, got HeteroData"),
        (pyg.Data(edge_index=arrow().edge_index, num_nodes=2), ValueError, "data must have x, got none"),
        (pyg.Data(x=arrow().x), ValueError, "data must have edge_index, got none"),
        (arrow(x=torch.tensor([[1], [2]])), TypeError, "x must be float32, .* got int64"),
        (arrow(edge_weight=torch.ones(2)), ValueError, r"edge_weight must have shape \[1\], got \[2\]"),
    ):
        with pytest.raises(error, match=message):
            SIGN(1)(bad)
    with pytest.raises(ValueError, match="K must be at least 0, got -1"):
        SIGN(-1)
    with pytest.raises(ValueError, match="operator must be one of"):
        SIGN(1, "gcn")


def test_missing_pyg_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    monkeypatch.delitem(sys.modules, "spin_fast.transforms")
    with pytest.raises(ImportError, match=r"^spin_fast.transforms needs PyG, .*: pip install torch-geometric$"):
        importlib.import_module("spin_fast.transforms")
