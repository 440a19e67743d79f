"""Where a picture has the nodes of a graph, and which lines: by networkx, or of a molecule by RDKit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .batch import GraphBatch
from .convert import library

SMALL = 80  # nodes, up to which a layout of all distances at once takes no time
LONGEST = 4  # characters that a node has room for


class Drawing(NamedTuple):
    """A graph in the plane.

    Attributes:
        positions: ``[N, 2]``, a unit of length being about that of an edge.
        pairs: nodes with an edge between them, each pair once, without self-loops; from the source to the target where
            the edge has no reverse.
        directed: of each pair, whether that is so.
        bonds: of each pair the number of lines, which is 1 but for a molecule.
        labels: of each node its name, if all are short, or else its number; of a molecule with the symbol before it.
    """

    positions: np.ndarray
    pairs: list[tuple[int, int]]
    directed: list[bool]
    bonds: list[int]
    labels: list[str]


def draw(graph: GraphBatch, smiles: str | None = None, names: list[str] | None = None) -> Drawing:
    """Lay out a batch of one graph, the same every time; ``names`` are those of its nodes.

    With the SMILES of a molecule, and RDKit installed, it is drawn as that, unless RDKit finds other atoms or bonds.

    Raises:
        ImportError: networkx is not installed.
    """
    edges = {*zip(*graph.edge_index.tolist(), strict=True)}
    pairs = sorted((u, v) for u, v in edges if u < v or (u > v and (v, u) not in edges))
    directed = [(v, u) not in edges for u, v in pairs]
    molecule = _molecule(smiles, graph.num_nodes, pairs) if smiles else None
    if molecule is not None:
        positions, bonds, labels = molecule
    else:
        positions, bonds = _layout(graph.num_nodes, pairs), [1] * len(pairs)
        is_short = names is not None and max(map(len, names), default=0) <= LONGEST
        labels = names if names is not None and is_short else [str(node) for node in range(graph.num_nodes)]
    return Drawing(positions, pairs, directed, bonds, labels)


def _molecule(
    smiles: str, num_nodes: int, pairs: list[tuple[int, int]]
) -> tuple[np.ndarray, list[int], list[str]] | None:
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        return None
    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(smiles)
    if molecule is None:
        return None
    Chem.Kekulize(molecule, clearAromaticFlags=True)
    ends = {(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()): bond for bond in molecule.GetBonds()}
    bond_of = {(min(pair), max(pair)): bond for pair, bond in ends.items()}
    if molecule.GetNumAtoms() != num_nodes or sorted(bond_of) != pairs:
        return None
    from rdkit.Chem import rdDepictor

    rdDepictor.Compute2DCoords(molecule)
    positions = molecule.GetConformer().GetPositions()[:, :2] / 1.5  # RDKit's length of a bond
    bonds = [max(1, int(bond_of[pair].GetBondTypeAsDouble())) for pair in pairs]
    return positions, bonds, [f"{atom.GetSymbol()}{atom.GetIdx()}" for atom in molecule.GetAtoms()]


def _layout(num_nodes: int, pairs: list[tuple[int, int]]) -> np.ndarray:
    """Each connected component by itself, the components in rows, the largest first."""
    networkx = library("networkx", "the picture of a graph")
    graph = networkx.empty_graph(num_nodes)
    graph.add_edges_from(pairs)
    components = sorted(map(sorted, networkx.connected_components(graph)), key=len, reverse=True)
    parts = [_component(networkx, networkx.subgraph(graph, nodes), nodes) for nodes in components]
    sizes = [np.ptp(part, axis=0) + 1 for part in parts]  # with what is kept clear around them
    widest = max([1.5 * np.sqrt(sum(size.prod() for size in sizes)), *(size[0] for size in sizes)])
    positions = np.empty((num_nodes, 2))
    x = y = height = 0.0
    for nodes, part, size in zip(components, parts, sizes, strict=True):
        if x + size[0] > widest + 1e-9:
            x, y, height = 0.0, y - height, 0.0
        positions[nodes] = part - [part[:, 0].min() - x, part[:, 1].max() - y]
        x, height = x + size[0], max(height, size[1])
    return positions


def _component(networkx: Any, graph: Any, nodes: list[int]) -> np.ndarray:
    """Positions ``[n, 2]`` of a connected graph, longer than high."""
    if len(nodes) == 1:
        return np.zeros((1, 2))
    if len(nodes) <= SMALL:
        by_node = networkx.kamada_kawai_layout(graph.__class__(graph.edges))
    else:
        start = dict(zip(nodes, _by_distances(networkx.to_scipy_sparse_array(graph, nodes)), strict=True))
        times = min(max(20_000 // len(nodes), 5), 50)
        by_node = networkx.spring_layout(graph, pos=start, iterations=times, method="force", seed=0)
    positions = np.stack([by_node[node] for node in nodes])
    positions = positions - positions.mean(0)
    positions = positions @ np.linalg.svd(positions, full_matrices=False)[2].T
    rows = {node: row for row, node in enumerate(nodes)}
    ends = positions[[[rows[u], rows[v]] for u, v in graph.edges]]
    edge = np.median(np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1))
    return positions * max(1 / max(edge, 1e-9), np.sqrt(len(nodes)) / np.ptp(positions, axis=0).max())


def _by_distances(adjacency: Any) -> np.ndarray:
    """Scale the distances to some of the nodes to two dimensions, which large graphs are unfolded by."""
    from scipy.sparse.csgraph import shortest_path

    random = np.random.default_rng(0)
    some = random.choice(adjacency.shape[0], min(64, adjacency.shape[0]), replace=False)
    squares = shortest_path(adjacency, unweighted=True, indices=some).T ** 2
    centred = squares - squares.mean(0) - squares.mean(1, keepdims=True) + squares.mean()
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    positions = left[:, :2] * values[:2]
    positions = positions / np.abs(positions).max()
    return positions + random.normal(0, 0.01, positions.shape)  # what is as far from all of them must not coincide
