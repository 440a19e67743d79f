"""Processes of their own, for what is measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """Variables with which a process imports the package and the benchmarks that this one has imported."""
    package = __package__ or ""
    folder = Path(__file__).parents[package.count(".") + 1]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(folder)])} | more
