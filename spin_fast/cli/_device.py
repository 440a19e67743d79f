"""The device, and its kernels."""

from __future__ import annotations

from typing import Literal

import torch

from .. import build_info, native_available

Device = Literal["auto", "cpu", "cuda"]


def device_of(wanted: Device) -> torch.device:
    """The device to train on.

    Raises:
        ValueError: a GPU is asked for, and torch has none.
    """
    there = torch.cuda.is_available()
    if wanted == "auto":
        return torch.device("cuda" if there and native_available("cuda") else "cpu")
    if wanted == "cuda" and not there:
        version = torch.version.cuda
        reason = f"torch {torch.__version__} has no CUDA" if version is None else "torch finds no GPU (see nvidia-smi)"
        raise ValueError(f"--device cuda: {reason}; --device cpu trains without")
    return torch.device(wanted)


def kernels_on(device: torch.device) -> str:
    """Which kernels run on ``device``, and on what."""
    facts = build_info()
    on = f"{torch.get_num_threads()} CPU thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if native_available(device):
        return f"native ({facts['isa'] if device.type == 'cpu' else 'CUDA'}), {on}"
    return f"reference ({facts['reason' if device.type == 'cpu' else 'cuda_reason']}), {on}"
