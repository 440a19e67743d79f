from __future__ import annotations

import pytest
import torch
from helpers import played_back

from spin_fast import PowerFeatures, datasets


@pytest.fixture(scope="module")
def digits() -> PowerFeatures:
    return PowerFeatures.from_graphs(datasets.load("digits")[:300], 2)


@pytest.fixture
def captures(native, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Train on the CPU as on a GPU; the numbers of graphs for which a step has been captured."""
    sizes = []

    def capture(step, device: torch.device):
        sizes.append(len(step.__closure__[0].cell_contents))
        return played_back(step, device)

    monkeypatch.setattr("spin_fast.training.trainer._is_captured", lambda device: True)
    monkeypatch.setattr("spin_fast.training.trainer._capture", capture)
    return sizes
