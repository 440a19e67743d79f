"""Memory as the operations allocate it: on huge pages from 2 MB on, where the system has them.

Every fresh small page costs a fault, often more than writing it, so what is compared must lie on the same kind.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21
MADV_HUGEPAGE = 14


@cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def fresh(shape: tuple[int, ...]) -> Tensor:
    """Uninitialised float32 memory, not yet backed by any page where it is large."""
    memory = torch.empty(shape)
    begin, bytes_ = memory.data_ptr(), memory.nbytes
    first, last = -(-begin // HUGE_PAGE) * HUGE_PAGE, (begin + bytes_) // HUGE_PAGE * HUGE_PAGE
    if last > first and _libc() is not None:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)  # only advice: may fail
    return memory


def touched(shape: tuple[int, ...]) -> Tensor:
    """Float32 memory that has its pages."""
    return fresh(shape).zero_()
