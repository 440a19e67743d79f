"""What is fast and wrong does not race."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_close(name: str, results: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare tensor by tensor with ours, within the rounding of float32 sums."""
    for result, ours in zip(results, expected, strict=True):
        scale = float(ours.detach().abs().max()) if ours.numel() else 0.0
        torch.testing.assert_close(result, ours, rtol=1e-4, atol=1e-5 * scale, msg=lambda text: f"{name}: {text}")
