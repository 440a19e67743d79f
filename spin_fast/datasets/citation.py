"""Citation networks: one graph, whose nodes are classified and whose links are predicted."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..graphs.batch import GraphBatch
from .common import DatasetError, Numbers, reading
from .splits import Split

NUM_WORDS = 1433
_PARTS = ("split_train.csv", "split_valid.csv", "split_test.csv")


class NodeDataset(NamedTuple):
    """Graphs whose nodes have labels.

    Attributes:
        graphs: one graph, or several; nodes are numbered over all of them.
        y: ``[N]`` int64, the class of each node.
        split: numbers of nodes, in the place of the numbers of graphs.
    """

    graphs: GraphBatch
    y: Tensor
    split: Split

    def __repr__(self) -> str:
        return f"NodeDataset(graphs={self.graphs!r}, y={list(self.y.shape)}, split={self.split!r})"


def load(path: Path, *, normalize: bool, dtype: torch.dtype) -> NodeDataset:
    """Read the zip or the folder; see :func:`spin_fast.datasets.cora`."""
    y = _numbers(path, "labels.csv", 1)[:, 0]
    if y.min() < 0:
        raise DatasetError(f"{path}:labels.csv must hold classes from 0, got {int(y.min())}; get the set again")
    files = {
        name: _numbers(path, name, columns) for name, columns in (("edges.csv", 2), *((part, 1) for part in _PARTS))
    }
    for name, nodes in files.items():
        if nodes.min() < 0 or nodes.max() >= len(y):
            raise DatasetError(f"{path}:{name} must name nodes 0..{len(y) - 1}, as labels.csv has; get the set again")
    x = _words(path, len(y), dtype)
    if normalize:
        x /= x.sum(1, keepdim=True).clamp(min=1)
    graphs = GraphBatch.from_edge_index(files["edges.csv"].t(), x, undirected=True)
    return NodeDataset(graphs, y, Split(*(files[part][:, 0] for part in _PARTS)))


def _read(path: Path, name: str) -> io.BytesIO:
    with reading(f"{path}:{name}"):
        if path.is_dir():
            return io.BytesIO((path / name).read_bytes())
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.namelist() if PurePosixPath(member).name == name]
            if not members:
                raise DatasetError(f"{path} holds no {name}; get the set again")
            return io.BytesIO(archive.read(members[0]))


def _numbers(path: Path, name: str, columns: int) -> Tensor:
    """A file of integers between commas, ``[lines, columns]`` int64."""
    table = Numbers(_read(path, name), f"{path}:{name}", np.int32, columns=columns).read()
    return torch.from_numpy(table.astype(np.int64))


def _words(path: Path, num_nodes: int, dtype: torch.dtype) -> Tensor:
    """Which words each paper has, ``[N, 1433]`` of 0 and 1."""
    lines = _read(path, "features.txt").readlines()
    if len(lines) != num_nodes:
        raise DatasetError(f"{path}:features.txt must have {num_nodes} lines, as labels.csv, got {len(lines)}")
    x = torch.zeros(num_nodes, NUM_WORDS, dtype=dtype)
    for node, line in enumerate(lines):
        with reading(f"{path}:features.txt, line {node + 1},"):
            words = [int(word) for word in line.split()]
            if words and not 0 <= min(words) <= max(words) < NUM_WORDS:
                raise ValueError(f"words must be in 0..{NUM_WORDS - 1}")
            x[node, words] = 1
    return x
