"""Node/edge lists (``.nel``), the form in which the brain sets OHSU and Peking_1 are handed round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .._common.indexing import offsets
from .common import DatasetError, Folder, NodeData, assemble, class_labels, reading

_FIELDS = {"n": 3, "e": 4, "x": 2}


def locate(name: str, root: Path) -> Path | None:
    """The file ``root/name.nel``, or None."""
    path = root / f"{name}.nel"
    return path if path.is_file() else None


def names(root: Path) -> list[str]:
    return sorted(path.stem for path in root.glob("*.nel"))


def read(
    path: Path,
    *,
    features: object = None,
    dtype: torch.dtype = torch.float32,
    classes: Sequence[str] | None = None,
) -> Folder:
    """Read a ``.nel`` file; its graphs are called by their numbers, from 0.

    A graph is its nodes ``n id label``, its edges ``e id id weight`` (each undirected edge once), a name ``g ...`` and
    its class ``x class``, which ends it. Ids are the graph's own. Weights are ignored, as the authors do.
    """
    sizes: list[int] = []
    class_of: list[int] = []
    labels: list[str] = []
    edges: list[tuple[int, int]] = []
    node_of: dict[str, int] = {}
    number = 0
    with reading(str(path)), path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            kind, *fields = line.split() or [""]
            if kind in ("", "g"):
                continue
            where = f"{path}, line {number}"
            if kind not in _FIELDS or len(fields) != _FIELDS[kind] - 1:
                raise DatasetError(
                    f"{where} must read 'n id label', 'e id id weight', 'g name' or 'x class', "
                    f"got {line.strip()[:40]!r}; correct it or get the file again"
                )
            with reading(where):
                if kind == "n":
                    if node_of.setdefault(fields[0], len(labels)) != len(labels):
                        raise DatasetError(f"{where} repeats node {fields[0]}; is an 'x class' line missing before?")
                    labels.append(fields[1])
                elif kind == "e":
                    unknown = [node for node in fields[:2] if node not in node_of]
                    if unknown:
                        raise DatasetError(f"{where} names node {unknown[0]}, which its graph has not; correct it")
                    edges.append((node_of[fields[0]], node_of[fields[1]]))
                    float(fields[2])  # a weight must be a number all the same
                else:
                    class_of.append(int(fields[0]))
                    sizes.append(len(node_of))
                    node_of = {}
    if not labels:
        raise DatasetError(f"{path} holds no nodes; get the file again")
    if not class_of or node_of:
        raise DatasetError(f"{path} ends at line {number} without the 'x class' line of a graph; get the file again")
    data = NodeData.chosen(features, path.stem, path, ["label"])
    tables = []
    if data.parts:
        tables = [_label_numbers(labels)]
        data = data.settled(tables[0].min(axis=0), tables[0].max(axis=0), str(path))
    y, names = class_labels(np.array(class_of), classes, str(path))
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    x = data.columns(tables, dtype)
    graphs = assemble(ends, offsets(torch.tensor(sizes)), x, y, undirected=True, dtype=dtype)
    return Folder(graphs, list(map(str, range(len(graphs)))), names, data.features, 0, unused=data.unused)


def _label_numbers(labels: list[str]) -> np.ndarray:
    """Node labels as integers ``[N, 1]``: the number after the last underscore, or else ranks in sorted order."""
    try:
        numbers = np.array([int(label.rpartition("_")[2]) for label in labels])
    except ValueError:
        numbers = np.unique(labels, return_inverse=True)[1]
    return numbers.reshape(-1, 1)
