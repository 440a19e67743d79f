"""Keys of subtree patterns against colour refinement: the same partition of the nodes, on every machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import networkx
import pytest
import torch
from helpers import random_graphs, same_by_any_threads
from hypothesis import given

import spin_fast
from spin_fast import GraphBatch, datasets, reference, subtree_keys

KEYS = [
    [-6499431655460710079, 7960286522194355700, -1068479517132388707],
    [6160453737553869946, 2032320652237942506, -5903409684431756631],
]  # of plain Python: a path of three nodes


def keys_of(graphs: GraphBatch, num_hops: int, **options) -> torch.Tensor:
    return subtree_keys(graphs.indptr, graphs.indices, graphs.x, num_hops, **options)


def refined(graphs: GraphBatch, num_hops: int, types: list[int] | None = None) -> list[list[int]]:
    """Colours after each round: numbers of (own colour, sorted colours of the neighbours)."""
    begins, neighbours = graphs.indptr.tolist(), graphs.indices.tolist()
    kinds = [tuple(row) for row in (graphs.x + 0.0).tolist()]
    rounds = []
    for _ in range(num_hops + 1):
        names: dict[tuple, int] = {}
        rounds.append([names.setdefault(kind, len(names)) for kind in kinds])
        colour = rounds[-1]
        kinds = [
            (
                colour[v],
                *sorted((0 if types is None else types[e], colour[neighbours[e]]) for e in range(begin, end)),
            )
            for v, (begin, end) in enumerate(pairwise(begins))
        ]
    return rounds


def assert_same_partition(keys: torch.Tensor, colours: list[list[int]]) -> None:
    for of_hop, wanted in zip(keys.tolist(), colours, strict=True):
        pairs = {*zip(of_hop, wanted, strict=True)}
        assert len(pairs) == len({*of_hop}) == len({*wanted})


@given(
    sizes=st.lists(st.integers(0, 6), max_size=5),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    num_features=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    wide=st.booleans(),
    typed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_is_colour_refinement(
    backend: str,
    poison: None,
    sizes: list[int],
    density: float,
    num_features: int,
    dtype: torch.dtype,
    wide: bool,
    typed: bool,
    seed: int,
) -> None:
    """Of directed graphs, too; the same numbers from the reference."""
    graphs = random_graphs(sizes, density, num_features, dtype=dtype, seed=seed)
    index = torch.int64 if wide else torch.int32
    x, indptr, indices = graphs.x.sign().clamp(min=-0.0), graphs.indptr.to(index), graphs.indices.to(index)
    graphs = GraphBatch(graphs.ptr, indptr, indices, x)
    types = torch.randint(2, (graphs.num_edges,), generator=torch.Generator().manual_seed(seed)) if typed else None
    keys = keys_of(graphs, 3, edge_type=types, seed=seed)
    assert_same_partition(keys, refined(graphs, 3, None if types is None else types.tolist()))
    arrays = (indptr, indices, x, 3)
    assert torch.equal(keys, reference.subtree_keys(*arrays, edge_type=types, seed=seed))


def test_is_colour_refinement_on_the_atlas(backend: str) -> None:
    graphs = GraphBatch.from_networkx([graph for graph in networkx.graph_atlas_g() if len(graph)])
    for x in (graphs.x, torch.ones_like(graphs.x)):
        made = replace(graphs, x=x)
        assert_same_partition(keys_of(made, 6), refined(made, 6))


@pytest.mark.parametrize("name", ["NCI1", "PROTEINS", "IMDB-BINARY", pytest.param("COLLAB", marks=pytest.mark.long)])
def test_is_colour_refinement_on_real_sets(native, data_root, name: str) -> None:
    graphs = datasets.load(name, data_root)
    assert_same_partition(keys_of(graphs, 3), refined(graphs, 3))


def test_keys_are_the_same_on_every_machine(backend: str) -> None:
    """A change of these numbers changes the columns of models that were fitted before."""
    path = GraphBatch.from_edge_index(
        torch.tensor([[0, 1], [1, 2]]), torch.tensor([[1.5], [0.0], [2.0]]), undirected=True
    )
    assert keys_of(path, 1).tolist() == KEYS
    assert keys_of(replace(path, x=path.x.double()), 1).tolist() == KEYS
    assert keys_of(path, 1, seed=1)[0, 0] != KEYS[0][0]


def test_order_of_neighbours_and_numbers_of_nodes_do_not_matter(backend: str) -> None:
    graphs = random_graphs([9], density=0.6, signs=True)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    source, target = order.argsort()[graphs.edge_index.long()]
    shuffled = torch.randperm(len(source), generator=torch.Generator().manual_seed(1))
    renumbered = GraphBatch.from_edge_index(torch.stack([source, target])[:, shuffled], graphs.x[order])
    assert torch.equal(keys_of(renumbered, 3), keys_of(graphs, 3)[:, order])
    reversed_rows = torch.cat([row.flip(0) for row in graphs.indices.split(graphs.degree.tolist())])
    assert torch.equal(subtree_keys(graphs.indptr, reversed_rows, graphs.x, 3), keys_of(graphs, 3))


def test_zeros_are_one_and_columns_are_told_apart(backend: str) -> None:
    ptr = torch.tensor([0, 1])
    one = [GraphBatch(ptr, ptr - ptr, ptr[:0], torch.tensor([row])) for row in ([1.0, 0.0], [1.0, -0.0], [0.0, 1.0])]
    first, same, other = (int(keys_of(graphs, 0)) for graphs in one)
    assert first == same != other
    wider = GraphBatch(ptr, ptr - ptr, ptr[:0], torch.tensor([[1.0, 0.0, 0.0]]))
    assert int(keys_of(wider, 0)) != first


def test_same_bits_for_any_number_of_threads(native, threads) -> None:
    graphs = random_graphs([400, 0, 3000], density=0.01, num_features=40)
    same_by_any_threads(lambda: keys_of(graphs, 2))


def test_opcheck(native) -> None:
    graphs = random_graphs([3, 0, 4])
    types = torch.zeros(graphs.num_edges, dtype=torch.int64)
    for edge_type in (None, types):
        inputs = (graphs.indptr, graphs.indices, graphs.x, edge_type, 2, 5, True)
        torch.library.opcheck(torch.ops.spin_fast.subtree_keys.default, inputs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(3)}, ValueError, r"x must have shape \[N, d\], got \[3\]"),
        ({"x": torch.ones(3, 1).half()}, TypeError, "x must be float32 or float64, got float16"),
        ({"num_hops": -1}, ValueError, "num_hops must be at least 0, got -1"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**63}, ValueError, "seed must be below 2"),
        ({"indices": torch.tensor([0, 3])}, ValueError, r"indices must be in \[0, 3\), got indices\[1\] = 3"),
        ({"edge_type": torch.zeros(3, dtype=torch.int64)}, ValueError, r"edge_type must have shape \[2\], got \[3\]"),
        ({"edge_type": torch.zeros(2)}, TypeError, "edge_type must be int64, got float32"),
        ({"check_invariants": 1}, TypeError, "check_invariants must be a bool, got int"),
    ],
)
def test_bad_input_is_named(backend: str, change: dict, error: type, message: str) -> None:
    arrays = {"indptr": torch.tensor([0, 1, 1, 2]), "indices": torch.tensor([0, 1]), "x": torch.ones(3, 1)}
    with pytest.raises(error, match=message):
        spin_fast.subtree_keys(**(arrays | {"num_hops": 1} | change))
