"""Power features in files: one safetensors file with the arrays, or several with an index, each of whole graphs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .._common import files
from .._common.rows import checked_sparse_rows, is_sparse
from ..graphs.node_features import NodeFeatures

T = TypeVar("T")

FORMAT, INDEX_FORMAT = "spin_fast features 2", "spin_fast features-index 1"
ENTRIES = ("index", "count", "row_of_node")  # they grow with the nodes
_REQUIRED = {"rows", "row_ptr", "ptr", "node_ptr"}
_SPARSE = ("crow_indices", "col_indices")
_OPTIONAL = {*ENTRIES, *_SPARSE, "labels"}


@dataclass
class Mapped:
    """Arrays of a mapped file, and whether they have been checked."""

    path: Path
    arrays: dict[str, Tensor]
    checked: bool = False


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in what is wrong with its arrays."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def check_name(path: Path) -> None:
    if path.suffix == ".json":
        raise ValueError(f"path must not end with .json, which is for an index of files, got {path}")


def write(
    path: Path, arrays: dict[str, Any], operator: str, node_features: NodeFeatures | None, made_of: str | None
) -> None:
    """Write the tensors among ``arrays``, and what they were made of, in any text."""
    check_name(path)
    tensors = {name: value for name, value in arrays.items() if isinstance(value, Tensor)}
    width = None
    if is_sparse(tensors["rows"]):
        rows, width = tensors["rows"], str(tensors["rows"].shape[1])
        indices = {"crow_indices": rows.crow_indices(), "col_indices": rows.col_indices()}
        tensors |= {"rows": rows.values(), **indices}
    prepared = None if node_features is None else json.dumps(node_features.to_dict())
    metadata = {"operator": operator, "node_features": prepared, "made_of": made_of, "num_features": width}
    told = {name: value for name, value in metadata.items() if value is not None}
    files.write_tensors(path, FORMAT, tensors, told)


def read(path: Path, *, mmap: bool) -> dict[str, Any]:
    """Read what :func:`write` has written: arrays, None for those that are not there, operator and node features."""
    tensors, metadata = files.read_tensors(path, FORMAT, mmap=mmap)
    if not _REQUIRED <= tensors.keys() <= _REQUIRED | _OPTIONAL:
        wanted, found = (", ".join(sorted(names)) for names in (_REQUIRED, tensors))
        raise ValueError(f"{path} is damaged: its arrays must be {wanted}, got {found}")
    with naming(path):
        told = metadata.get("node_features")
        node_features = None if told is None else NodeFeatures.from_dict(json.loads(told))
        crow_indices, col_indices = (tensors.pop(name, None) for name in _SPARSE)
        if (width := metadata.get("num_features")) is not None:
            tensors["rows"] = checked_sparse_rows(tensors["rows"], crow_indices, col_indices, int(width))
    read = {"operator": metadata.get("operator"), "node_features": node_features}
    return dict.fromkeys(_OPTIONAL.difference(_SPARSE)) | tensors | read


def made_of(path: Path) -> str | None:
    """What a file tells about what it was made of."""
    return files.read_metadata(path, FORMAT).get("made_of")


def index_of(path: Path) -> Path:
    """The index of the files that together are the features ``path``."""
    return path if path.suffix == ".json" else path.with_name(path.name + ".index.json")


def is_indexed(path: Path) -> bool:
    """Whether ``path`` is an index, or stands for the files of one."""
    return path.suffix == ".json" or (not path.exists() and index_of(path).exists())


def again_if_replaced(path: Path, read: Callable[[], T]) -> T:
    """What ``read`` returns; it is called again where a file was missing since a writer has just replaced all."""

    def there() -> list[object]:
        return [files.identity(file) for file in (path, index_of(path))] if path.name else []

    while True:
        before = there()
        try:
            return read()
        except FileNotFoundError:
            if there() == before:
                raise


def write_index(index: Path, shards: Sequence[tuple[Path, int]]) -> None:
    """Write the files that belong together and their numbers of graphs."""
    content = [{"file": file.name, "num_graphs": num_graphs} for file, num_graphs in shards]
    files.write_json(index, INDEX_FORMAT, {"shards": content})


def read_index(index: Path) -> list[tuple[Path, int]]:
    """Read what :func:`write_index` has written."""
    content = files.read_json(index, INDEX_FORMAT)
    try:
        shards = {index.with_name(shard["file"]): shard["num_graphs"] for shard in content["shards"]}
        if len(shards) < len(content["shards"]):
            raise ValueError("a file is named twice")
        return [*shards.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{index} is damaged: shards must be a list of files and their num_graphs: {error}") from error
