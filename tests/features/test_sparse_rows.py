"""Features whose rows are sparse: the same as dense ones for every reader, in less memory."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_same_features, change_array, random_graphs

from spin_fast import PAGNN, SPIN, GraphBatch, PowerFeatures, ops, shards, training
from spin_fast._common.rows import checked_sparse_rows
from spin_fast.features.identical import graph_keys
from spin_fast.sklearn import SPINClassifier

COLUMNS = 80


def one_hot_graphs(columns: int = COLUMNS, dtype: torch.dtype = torch.float32) -> GraphBatch:
    """Graphs without nodes first and last, and one of a single node."""
    graphs = random_graphs([0, 9, 1, *[12, 30, 5] * 6, 0], density=0.1, dtype=dtype)
    labels = torch.randint(0, columns, (graphs.num_nodes,), generator=torch.Generator().manual_seed(1))
    x = torch.zeros(graphs.num_nodes, columns, dtype=dtype)
    x[torch.arange(len(x)), labels % 7 * (columns // 7)] = 1
    return replace(graphs, x=x, y=torch.arange(len(graphs)) % 2)


@pytest.fixture
def both(native, monkeypatch: pytest.MonkeyPatch) -> tuple[PowerFeatures, PowerFeatures]:
    """The same features with sparse rows and with dense ones."""
    graphs = one_hot_graphs()
    sparse = PowerFeatures.from_graphs(graphs, 2)
    with monkeypatch.context() as patch:
        patch.setattr(ops.DistinctRows, "_is_sparse", False)
        dense = PowerFeatures.from_graphs(graphs, 2)
    assert (sparse.rows.layout, dense.rows.layout) == (torch.sparse_csr, torch.strided)
    return sparse, dense


def assert_same_but_layout(sparse: PowerFeatures, dense: PowerFeatures) -> None:
    assert sparse.rows.layout is torch.sparse_csr
    assert torch.equal(sparse.rows.to_dense().view(torch.int32), dense.rows.view(torch.int32))
    assert_same_features(replace(sparse, rows=dense.rows), dense)


def test_rows_are_the_same(both: tuple[PowerFeatures, PowerFeatures]) -> None:
    assert_same_but_layout(*both)
    assert both[0].nbytes < both[1].nbytes - 0.7 * both[1].rows.nbytes
    assert (both[0].rows.values() != 0).all()


@pytest.mark.parametrize(
    ("columns", "dtype", "is_sparse"),
    [(63, torch.float32, False), (64, torch.float32, True), (31, torch.float64, False), (32, torch.float64, True)],
)
def test_rows_of_few_bytes_stay_dense(native, columns: int, dtype: torch.dtype, is_sparse: bool) -> None:
    features = PowerFeatures.from_graphs(one_hot_graphs(columns, dtype), 1)
    assert (features.rows.layout is torch.sparse_csr) == is_sparse


def test_the_first_graph_with_nodes_decides(native) -> None:
    graphs = one_hot_graphs()
    first = slice(int(graphs.ptr[1]), int(graphs.ptr[2]))
    graphs.x[first, : COLUMNS // 4] = 1
    assert PowerFeatures.from_graphs(graphs, 1).rows.layout is torch.strided
    assert PowerFeatures.from_graphs(graphs[2:], 1).rows.layout is torch.sparse_csr


def test_rows_become_dense_where_that_takes_less(native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows of later graphs are full: the layout that the first graph had is not kept, whatever room there was."""
    graphs = one_hot_graphs()
    graphs.x[graphs.ptr[2] :] = torch.randn(graphs.num_nodes - int(graphs.ptr[2]), COLUMNS)
    features = PowerFeatures.from_graphs(graphs, 2)
    assert features.rows.layout is torch.strided
    assert_same_features(PowerFeatures.from_chunks((graphs[i : i + 3] for i in range(0, len(graphs), 3)), 2), features)
    monkeypatch.setattr(ops.DistinctRows, "_is_sparse", False)
    assert_same_features(PowerFeatures.from_graphs(graphs, 2), features)


def test_negative_zeros_are_left_out(native) -> None:
    graphs = one_hot_graphs()
    expected = PowerFeatures.from_graphs(graphs, 0)
    graphs.x[graphs.x == 0] = -0.0
    assert_same_features(PowerFeatures.from_graphs(graphs, 0), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[20], [1] * 20, [2, 0, 11, 7]])
def test_chunks_and_threads_change_nothing(native, monkeypatch, sizes: list[int], threads: int) -> None:
    graphs = one_hot_graphs()[:20]
    expected = PowerFeatures.from_graphs(graphs, 2)
    monkeypatch.setattr("spin_fast.features.power_features.CHUNK_BYTES", 20_000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_features(PowerFeatures.from_graphs(graphs, 2), expected)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        chunks = (graphs[end - size : end] for end, size in zip(ends, sizes, strict=True))
        assert_same_features(PowerFeatures.from_chunks(chunks, 2), expected)
    finally:
        torch.set_num_threads(before)


def test_selections_and_copies(both: tuple[PowerFeatures, PowerFeatures], tmp_path: Path) -> None:
    sparse, dense = both
    ids = [4, 0, 7, 4, 2]
    for change in (
        lambda of: of[ids].take(),
        lambda of: of.to("cpu"),
        lambda of: copy.deepcopy(of),
        lambda of: pickle.loads(pickle.dumps(of)),
        lambda of: of.nodes(),
    ):
        assert_same_but_layout(change(sparse), change(dense))
    for of in (sparse, dense):
        assert_same_features(PowerFeatures.concatenate([of[:9], of[9:]]), sparse)  # they are found anew
        of.save(tmp_path / f"{of.rows.layout}.safetensors")
        for mmap in (True, False):
            assert_same_features(PowerFeatures.load(tmp_path / f"{of.rows.layout}.safetensors", mmap=mmap), of)
    for read in (
        lambda of: of.dense_rows(),
        lambda of: of[ids].dense_rows(),
        lambda of: of[ids].expand().rows,
        lambda of: torch.cat(of.branch_rows()[0]),
        lambda of: torch.cat(of[ids].branch_rows()[0]),
        lambda of: of.identical_graphs(),
        lambda of: graph_keys(of, joint=False),
        lambda of: graph_keys(of, joint=True),
    ):
        assert torch.equal(read(sparse), read(dense))


def test_rows_that_are_shared_are_copied_once(both: tuple[PowerFeatures, PowerFeatures]) -> None:
    whole, part = copy.deepcopy([both[0], both[0][:3]])
    assert whole.rows is part.rows is not both[0].rows


def test_shards_may_differ_in_layout(both: tuple[PowerFeatures, PowerFeatures], tmp_path: Path) -> None:
    sparse, dense = both
    shards.save([sparse[:8], dense[8:]], tmp_path / "set.safetensors")
    loaded = shards.load(tmp_path / "set.safetensors")
    assert [shard.rows.layout for shard in loaded.shards] == [torch.sparse_csr, torch.strided]
    assert torch.equal(loaded.identical_graphs(), dense.identical_graphs())
    assert_same_features(PowerFeatures.load(tmp_path / "set.safetensors"), sparse)


@pytest.mark.parametrize("branches", ["hops", "joint", "both"])
@pytest.mark.parametrize("options", [{}, {"attention": False}, {"dropout": 0.2}, {"batch_norm": True}])
def test_models_train_and_predict_the_same(
    both: tuple[PowerFeatures, PowerFeatures], branches: str, options: dict
) -> None:
    results = []
    for features in both:
        torch.manual_seed(0)
        model = SPIN(COLUMNS, 8, 2, 2, branches=branches, **options)
        history = training.fit(model, features, range(14), range(14, 20), epochs=3, batch_size=5)
        losses = [epoch.loss for epoch in history.epochs]
        results.append((losses, training.predict(model, features)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_other_models_and_the_estimator(both: tuple[PowerFeatures, PowerFeatures]) -> None:
    results = []
    for features in both:
        torch.manual_seed(0)
        model = PAGNN([torch.nn.Linear(COLUMNS, 2) for _ in range(3)])
        scores = training.predict(model, features)
        estimator = SPINClassifier(num_hops=2, epochs=2, random_state=0).fit(features, features.y)
        results.append((scores, estimator.predict_proba(features)))
    assert torch.equal(results[0][0], results[1][0])
    assert (results[0][1] == results[1][1]).all()


def test_sparse_rows_that_are_given_are_checked(both: tuple[PowerFeatures, PowerFeatures]) -> None:
    features = both[0]
    arrays = features.rows.crow_indices(), features.rows.col_indices(), features.rows.values()
    spread = [torch.stack([array, array], 1)[:, 0] for array in arrays]
    assert not any(array.is_contiguous() for array in spread)
    rows = torch.sparse_csr_tensor(*spread, features.rows.shape, check_invariants=False)
    model = SPIN(COLUMNS, 8, 2, 2)
    assert torch.equal(training.predict(model, replace(features, rows=rows)), training.predict(model, features))
    with pytest.raises(ValueError, match="rows must be dense where index is None"):
        replace(features, index=None, count=None)
    arrays[1].fill_(COLUMNS)
    with pytest.raises(ValueError, match="col_indices must be in"):
        replace(features)
    with pytest.raises(ValueError, match="num_features must be"):
        checked_sparse_rows(arrays[2], arrays[0], arrays[1], 2**31)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("col_indices", lambda col: col.fill_(COLUMNS), "col_indices must be in"),
        ("col_indices", lambda col: col.fill_(-1), "col_indices must be in"),
        ("col_indices", lambda col: col.fill_(3), "col_indices must ascend in each row"),
        ("crow_indices", lambda crow: crow.index_fill(0, torch.tensor([5]), 10**9), "crow_indices must not decrease"),
        ("col_indices", lambda col: col.long(), "col_indices must be int32, got int64"),
        ("col_indices", lambda _: None, "col_indices must be a torch.Tensor, got NoneType"),
        ("col_indices", lambda col: col[1:], "col_indices must have shape"),
        ("crow_indices", lambda crow: crow[:0], "crow_indices must have at least one entry"),
        ("crow_indices", lambda crow: crow[1:], "row_ptr must go from 0 to the number of rows"),
        ("rows", lambda rows: rows[None], "rows must have shape"),
    ],
)
def test_damaged_or_wrong_arrays_are_found_at_once(
    both: tuple[PowerFeatures, PowerFeatures], tmp_path: Path, name: str, change, message: str
) -> None:
    path = tmp_path / "saved.safetensors"
    both[0].save(path)
    change_array(path, name, change)
    for mmap in (True, False):
        with pytest.raises(ValueError, match=f"{path} is damaged: {message}"):
            PowerFeatures.load(path, mmap=mmap)


def test_a_gpu_gets_dense_rows(both: tuple[PowerFeatures, PowerFeatures]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    moved = both[0].to("cuda")
    assert torch.equal(moved.rows.cpu(), both[1].rows)
    assert_same_features(moved.cpu(), both[1])
