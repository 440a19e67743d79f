"""PyG's data set on disk, for graphs that do not fit in memory: made by its own bulk insertion, read batch by batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, OnDiskDataset


class Graphs(OnDiskDataset):
    """Graphs in a table of SQLite, with a schema: tensors as they are, which is faster than pickled objects."""

    def __init__(self, root: str, num_features: int) -> None:
        self._num_features = num_features
        schema: dict[str, Any] = {
            "x": {"dtype": torch.float32, "size": (-1, num_features)},
            "edge_index": {"dtype": torch.int64, "size": (2, -1)},
            "y": {"dtype": torch.int64, "size": (-1,)},
        }
        super().__init__(root, schema=schema, log=False)

    def serialize(self, data: Data) -> dict[str, Tensor]:
        return {"x": data.x, "edge_index": data.edge_index, "y": data.y}

    def deserialize(self, row: dict[str, Tensor]) -> Data:
        return Data(**row)

    @property
    def raw_file_names(self) -> list[str]:
        return []

    def __getitems__(self, numbers: list[int]) -> list[Data]:
        """A batch at once, which the DataLoader asks for."""
        return self.multi_get(numbers)
