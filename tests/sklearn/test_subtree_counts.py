"""SubtreeCounts against counts in dictionaries, and in the pipelines of scikit-learn."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import random_graphs
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import normalize
from sklearn.svm import LinearSVC

from spin_fast import GraphBatch, datasets, subtree_keys
from spin_fast.sklearn import SubtreeCounts


@pytest.fixture
def graphs() -> GraphBatch:
    return random_graphs([5, 0, 3, 9, 1], signs=True)


def test_rows_are_the_counts_of_patterns(graphs: GraphBatch) -> None:
    counts = SubtreeCounts(2, n_features=2**30, norm=None).fit_transform(graphs)
    assert counts.shape == (5, 2**30)
    keys = subtree_keys(graphs.indptr, graphs.indices, graphs.x, 2)
    for graph, (begin, end) in enumerate(zip(graphs.ptr[:-1].tolist(), graphs.ptr[1:].tolist(), strict=True)):
        wanted = Counter((keys[:, begin:end] % 2**30).flatten().tolist())
        row = counts[[graph]]
        assert dict(zip(row.indices.tolist(), row.data.tolist(), strict=True)) == wanted
    for norm in ("l1", "l2"):
        assert np.allclose(SubtreeCounts(2, norm=norm).fit_transform(graphs).toarray().sum(1)[1], 0)  # no nodes
        scaled = SubtreeCounts(2, n_features=2**30, norm=norm).fit_transform(graphs)
        assert abs(scaled - normalize(counts, norm)).max() <= np.finfo(float).eps  # numpy's order of sums


def test_graphs_seen_later_get_the_same_columns(graphs: GraphBatch) -> None:
    transformer = SubtreeCounts().fit(graphs[:2])
    together = transformer.transform(graphs).toarray()
    alone = [transformer.transform(graphs[number]).toarray() for number in range(len(graphs))]
    assert np.array_equal(together, np.concatenate(alone))
    assert transformer.transform(graphs).indices.dtype == np.int32  # which liblinear asks for


def test_types_of_edges_are_told_apart() -> None:
    edges, x = torch.tensor([[0, 1, 3, 4], [1, 2, 4, 5]]), torch.ones(6, 1)
    weight = torch.tensor([1.0, 1.0, 1.0, 2.0])
    batch = torch.tensor([0] * 3 + [1] * 3)
    paths = GraphBatch.from_edge_index(edges, x, batch, edge_weight=weight, undirected=True)
    plain, typed = (SubtreeCounts(edge_types=types).fit_transform(paths).toarray() for types in (False, True))
    assert np.array_equal(plain[0], plain[1])
    assert not np.array_equal(typed[0], typed[1])
    for wrong, message in ((None, "must have edge weights"), (weight + 0.5, "must have whole numbers")):
        graphs = GraphBatch.from_edge_index(edges, x, batch, edge_weight=wrong)
        with pytest.raises(ValueError, match=f"X {message}"):
            SubtreeCounts(edge_types=True).fit_transform(graphs)


def test_bad_arguments_are_named(graphs: GraphBatch) -> None:
    for options, error, message in (
        ({"num_hops": -1}, ValueError, "num_hops must be at least 0, got -1"),
        ({"n_features": 0}, ValueError, "n_features must be at least 1, got 0"),
        ({"n_features": 2**31 + 1}, ValueError, r"n_features must be at most 2\*\*31, got 2147483649"),
        ({"norm": "max"}, ValueError, "norm must be one of l1, l2 or None, got 'max'"),
        ({"edge_types": 1}, TypeError, "edge_types must be a bool, got int"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
    ):
        with pytest.raises(error, match=message):
            SubtreeCounts(**options).fit(graphs)


def test_a_linear_model_on_real_graphs(data_root) -> None:
    graphs = datasets.load("NCI1", data_root)[::4]
    scores = cross_val_score(make_pipeline(SubtreeCounts(), LinearSVC()), graphs, graphs.y.numpy(), cv=3)
    assert scores.mean() > 0.66
