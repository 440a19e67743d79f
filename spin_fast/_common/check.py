"""Validation of arguments: one function per kind of argument, one style of message.

Every message reads ``<name> must ..., got ...``. Only metadata (type, shape, dtype, device) is read here, at each call;
contents (offsets, index ranges) are read by ``ops.check_csr`` and ``ops.check_segments``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
STORED = (*FLOATS, torch.bfloat16, torch.float16)  # what the operations read and write; they compute in FLOATS
INTEGERS = (torch.int32, torch.int64)
OPERATORS = ("adj", "sym", "sym+adj", "rw")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def tensor(
    name: str,
    value: Any,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Check type, dtype, shape and device; a string in ``shape`` stands for any size and is used in the message."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got {value.layout}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}, got {str(value.dtype).removeprefix('torch.')}")
    sizes = value.shape
    fits = len(sizes) == len(shape)
    for size, want in zip(sizes, shape, strict=False):  # a loop: half the time of all() at every call
        fits = fits and (isinstance(want, str) or size == want)
    if not fits:
        raise ValueError(f"{name} must have shape [{', '.join(map(str, shape))}], got {list(sizes)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")


def integer(name: str, value: Any, minimum: int) -> Any:
    """Check for a plain integer of at least ``minimum`` (a bool is not one)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    value = int(value) if isinstance(value, np.integer) else value
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if isinstance(value, int) and value >= 2**63:  # what the kernels take
        raise ValueError(f"{name} must be below 2**63, got {value}")
    return value


def number(name: str, value: Any, minimum: float) -> Any:
    """Check for a plain finite number of at least ``minimum`` (neither a bool nor NaN is one)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    value = float(value) if isinstance(value, np.number) else value
    if not value >= minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if value == math.inf:
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def flag(name: str, value: Any) -> bool:
    """Check for a bool, numpy's too."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def operator(value: Any) -> str:
    """Check for the name of a graph operator."""
    if value not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {value!r}")
    return value


def operators(value: str | Sequence[str]) -> str:
    """Check for one graph operator or several, in a sequence or with commas between them; returns the latter."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence):
        raise TypeError(f"operator must be a str or a sequence of them, got {type(value).__name__}")
    if not names or len({*map(operator, names)}) < len(names):
        raise ValueError(f"operator must name at least one, and each once, got {value!r}")
    return ",".join(names)


def offsets_shape(name: str, value: Any, device: torch.device | None = None) -> None:
    """Check for the metadata of an offset vector: int64, one axis, at least one entry."""
    tensor(name, value, ("entries + 1",), (torch.int64,), device)
    if value.numel() == 0:
        raise ValueError(f"{name} must have at least one entry (the leading 0), got none")
