"""Rivals without a network, as settings: columns of each graph for a random forest, and a kernel for a linear SVM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.csgraph import shortest_path
from sklearn.ensemble import RandomForestClassifier
from sklearn.svm import SVC
from torch import Tensor

from spin_fast import GraphBatch, training
from spin_fast.selection import Trained, TrainingSet
from spin_fast.sklearn import SubtreeCounts

LEAST = 1e-6  # of a probability
Values = list[list[np.ndarray]]
"""Of each descriptor, its values in each graph."""


@dataclass(kw_only=True)
class Forest:
    """A random forest on the sums of node features, without edges; on :func:`fingerprints` it is of these."""

    num_trees: int = 500
    min_samples_leaf: int = 1

    def describe(self, graphs: GraphBatch) -> Any:
        """What all settings share."""
        return torch.segment_reduce(graphs.x, "sum", lengths=graphs.num_nodes_per_graph).numpy()

    def columns(self, described: Any) -> np.ndarray:
        """What the forest reads ``[G, F]``."""
        return described

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        columns = self.columns(data.made(type(self).__name__, partial(self.describe, data.graphs)))
        y, train, validation = _classes(data), data.train.numpy(), data.validation.numpy()
        forest = RandomForestClassifier(self.num_trees, min_samples_leaf=self.min_samples_leaf, random_state=seed)
        forest.fit(columns[train], y[train])
        scores = self._scores(forest, data.num_outputs, columns[validation])
        return _trained(data, scores, partial(self.predict, forest, data.num_outputs))

    def predict(self, forest: RandomForestClassifier, num_outputs: int, graphs: GraphBatch) -> Tensor:
        """Class scores of graphs as they were read."""
        return self._scores(forest, num_outputs, self.columns(self.describe(graphs)))

    def _scores(self, forest: RandomForestClassifier, num_outputs: int, columns: np.ndarray) -> Tensor:
        logarithms = np.log(forest.predict_proba(columns).clip(LEAST))
        return _of_all_classes(logarithms, forest.classes_, num_outputs)


@dataclass(kw_only=True)
class LTP(Forest):
    """The local topological profile (Adamczyk & Czech 2023), https://github.com/j-adamczyk/LTP: a forest on histograms.

    They are of a node's degree, of the minimum, maximum, mean and standard deviation of its neighbours' degrees, and of
    an edge's betweenness, Jaccard index and local degree score; as there, each is over the range of its own graph.
    """

    num_bins: int = 50
    log_degree: bool = False

    def describe(self, graphs: GraphBatch) -> Values:
        return [*degree_profile(graphs), *zip(*map(edge_scores, graphs), strict=True)]

    def columns(self, described: Values) -> np.ndarray:
        logarithms = 4 if self.log_degree else 0
        histograms = [
            [np.histogram(np.log(of + 1e-3) if number < logarithms else of, self.num_bins)[0] for of in values]
            for number, values in enumerate(described)
        ]
        return np.concatenate([np.array(of) for of in histograms], axis=1)


def degree_profile(graphs: GraphBatch) -> Values:
    """Of each node its degree, and minimum, maximum, mean and standard deviation of its neighbours' degrees, or 0."""
    degree = graphs.degree.long()
    of_neighbour = degree[graphs.indices.long()].double()
    mean = torch.segment_reduce(of_neighbour, "mean", lengths=degree)
    squares = torch.segment_reduce((of_neighbour - mean.repeat_interleave(degree)) ** 2, "sum", lengths=degree)
    low, high = (torch.segment_reduce(of_neighbour, of, lengths=degree) for of in ("min", "max"))
    profile = (degree.double(), low, high, mean, (squares / (degree - 1).clamp(min=1)).sqrt())
    firsts = graphs.ptr[1:-1].numpy()
    return [np.split(of.where(degree > 0, 0).numpy(), firsts) for of in profile]


def edge_scores(graph: GraphBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Betweenness, Jaccard index and local degree score (Lindner et al. 2015) of each undirected edge of one graph."""
    size = graph.num_nodes
    ones = np.ones(graph.num_edges)
    matrix = scipy.sparse.csr_array((ones, graph.indices.numpy(), graph.indptr.numpy()), shape=(size, size))
    matrix = matrix.maximum(matrix.T)
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    matrix.data[:] = 1
    source, target = scipy.sparse.triu(matrix).coords
    degree = np.diff(matrix.indptr)
    common = (matrix @ matrix)[source, target] if len(source) else np.zeros(0)
    return (
        _betweenness(matrix, source, target),
        common / (degree[source] + degree[target] - common),
        _local_degree_score(degree, source, target),
    )


def _betweenness(matrix: scipy.sparse.csr_array, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Brandes (2001) from all nodes at once, level by level; columns are where the paths begin."""
    distance = np.nan_to_num(shortest_path(matrix, unweighted=True), posinf=-2)  # of no level, nor next to one
    levels = range(1, int(distance.max(initial=0)) + 1)
    paths, dependency = (distance == 0).astype(float), np.zeros(distance.shape)
    for level in levels:
        paths += (matrix @ (paths * (distance == level - 1))) * (distance == level)
    for level in reversed(levels):
        share = np.divide(1 + dependency, paths, out=np.zeros(paths.shape), where=distance == level)
        dependency += (matrix @ share) * paths * (distance == level - 1)
    score = np.zeros(len(source))
    for near, far in ((source, target), (target, source)):
        onward = distance[far] == distance[near] + 1
        score += np.divide(
            paths[near] * (1 + dependency[far]), paths[far], out=np.zeros(onward.shape), where=onward
        ).sum(1)
    return score / 2


def _local_degree_score(degree: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """``1 - log(rank) / log(d)``, of a node of degree ``d`` to one of a larger degree, by its rank among such."""
    low = np.where(degree[source] < degree[target], source, target)
    high = source + target - low
    order = np.lexsort((-degree[high], low))
    order = order[degree[low[order]] < degree[high[order]]]
    node = low[order]
    rank = np.arange(len(node)) - np.searchsorted(node, node) + 1
    score = np.zeros(len(source))
    score[order] = 1 - np.log(rank) / np.log(np.maximum(degree[node], 2))
    return score


@dataclass(kw_only=True)
class WeisfeilerLehman:
    """The subtree kernel (Shervashidze et al. 2011), normalised, with a linear SVM; by grakel if it is installed.

    Node features are its labels: all columns of ``x`` if they are whole numbers, else those of 0 and 1.
    """

    num_hops: int = 3
    C: float = 1.0
    library: Literal["grakel", "spin_fast"] = field(
        default_factory=lambda: "grakel" if find_spec("grakel") is not None else "spin_fast"
    )

    def train(self, data: TrainingSet, seed: int, epochs: int | None = None) -> Trained:
        kernel, known, held = data.made(f"{self.library}, {self.num_hops} hops", partial(self._kernel, data))
        svm = SVC(C=self.C, kernel="precomputed").fit(known, _classes(data)[data.train.numpy()])
        return _trained(data, _decision(svm, held, data.num_outputs), partial(_predict, kernel, svm, data.num_outputs))

    def _kernel(self, data: TrainingSet) -> tuple[Grakel | Counts, np.ndarray, np.ndarray]:
        """The kernel, between the training graphs, and of the validation graphs with these."""
        train = data.graphs[data.train]
        kernel = (Grakel if self.library == "grakel" else Counts)(train, self.num_hops)
        return kernel, kernel(train), kernel(data.graphs[data.validation])


class Grakel:
    """The normalised kernel of graphs with those of training, ``[G, G']``."""

    def __init__(self, train: GraphBatch, num_hops: int) -> None:
        from grakel.kernels import VertexHistogram, WeisfeilerLehman

        self.columns = _labels_in(train.x)
        self.kernel = WeisfeilerLehman(n_iter=num_hops, base_graph_kernel=VertexHistogram, normalize=True)
        self.kernel.fit(self._graphs(train))

    def __call__(self, graphs: GraphBatch) -> np.ndarray:
        return self.kernel.transform(self._graphs(graphs))

    def _graphs(self, graphs: GraphBatch) -> list[tuple[dict[int, list[int]], dict[int, bytes]]]:
        labels = [row.tobytes() for row in graphs.x[:, self.columns].numpy()]
        indptr, indices, ptr = graphs.indptr.tolist(), graphs.indices.tolist(), graphs.ptr.tolist()
        return [
            (
                {node: indices[indptr[node] : indptr[node + 1]] for node in range(first, end)},
                {node: labels[node] for node in range(first, end)},
            )
            for first, end in pairwise(ptr)
        ]


class Counts:
    """The same by :class:`spin_fast.sklearn.SubtreeCounts`."""

    def __init__(self, train: GraphBatch, num_hops: int) -> None:
        self.columns, self.counts = _labels_in(train.x), SubtreeCounts(num_hops)
        self.train = self.counts.fit_transform(self._graphs(train))

    def __call__(self, graphs: GraphBatch) -> np.ndarray:
        return (self.counts.transform(self._graphs(graphs)) @ self.train.T).toarray()

    def _graphs(self, graphs: GraphBatch) -> GraphBatch:
        return GraphBatch(graphs.ptr, graphs.indptr, graphs.indices, graphs.x[:, self.columns])


def fingerprints(smiles: Sequence[str], y: Tensor, radius: int = 2, size: int = 2048) -> GraphBatch:
    """A graph of one node for each molecule, with its Morgan fingerprint, of RDKit, as features."""
    from rdkit import Chem, RDLogger
    from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator

    RDLogger.DisableLog("rdApp.*")  # a line for each unusual atom
    generator, number, molecules = GetMorganGenerator(radius=radius, fpSize=size), len(smiles), []
    for text in smiles:
        molecule = Chem.MolFromSmiles(text)
        if molecule is None:  # of a valence that RDKit does not know
            molecule = Chem.MolFromSmiles(text, sanitize=False)
            molecule.UpdatePropertyCache(strict=False)
            Chem.GetSymmSSSR(molecule)
        molecules.append(molecule)
    x = torch.from_numpy(np.array([generator.GetFingerprintAsNumPy(of) for of in molecules])).float()
    nothing = torch.zeros(number + 1, dtype=torch.int32)
    return GraphBatch(torch.arange(number + 1), nothing, nothing[:0], x, y)


def _predict(kernel: Grakel | Counts, svm: SVC, num_outputs: int, graphs: GraphBatch) -> Tensor:
    return _decision(svm, kernel(graphs), num_outputs)


def _decision(svm: SVC, kernel: np.ndarray, num_outputs: int) -> Tensor:
    scores = svm.decision_function(kernel)
    scores = np.stack([-scores, scores], axis=1) if scores.ndim == 1 else scores
    return _of_all_classes(scores, svm.classes_, num_outputs)


def _of_all_classes(scores: np.ndarray, classes: np.ndarray, num_outputs: int) -> Tensor:
    """The scores ``[G, num_outputs]``; classes that no training graph has are the least likely."""
    every = np.full((len(scores), num_outputs), scores.min(initial=math.log(LEAST)))
    every[:, classes] = scores
    return torch.from_numpy(every)


def _trained(data: TrainingSet, scores: Tensor, model: Any) -> Trained:
    """From the scores of the validation graphs."""
    assert data.graphs.y is not None
    y = data.graphs.y[data.validation]
    return Trained(data.metric(scores, y), training.loss_of(scores, y).item(), 1, model)


def _classes(data: TrainingSet) -> np.ndarray:
    y = data.graphs.y
    if y is None or y.is_floating_point():
        raise ValueError("graphs must have one class each: tasks are for networks")
    return y.numpy()


def _labels_in(x: Tensor) -> Tensor:
    """Which columns of ``x`` are labels."""
    whole = (x == x.round()).all(0)
    return whole if bool(whole.all()) else ((x == 0) | (x == 1)).all(0)
