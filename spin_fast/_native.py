"""Finds and loads the compiled library ``_C``; where that fails, says why, once, and how to mend it.

Environment:
    SPIN_FAST_BACKEND=reference    do not load it; every operation runs on :mod:`spin_fast.reference`
    SPIN_FAST_ISA=baseline|avx2|avx512    the instruction set of the CPU kernels (default: the best this CPU has)
"""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # before _C: it links to libtorch, which this brings into the process

BACKENDS = ("native", "reference")


def _load() -> tuple[ModuleType | None, str]:
    """Return the compiled module, or None and the reason."""
    backend = os.environ.get("SPIN_FAST_BACKEND", "native")
    if backend not in BACKENDS:
        raise ValueError(f"SPIN_FAST_BACKEND must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return None, "SPIN_FAST_BACKEND=reference"
    try:
        library = importlib.import_module("spin_fast._C")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "spin_fast._C":
            reason = "this installation has no compiled library (spin_fast/_C)"
            mend = "Reinstall with a C++ compiler (g++ or clang++) on the PATH and without SPIN_FAST_NATIVE=0"
            if (Path(__file__).parents[1] / "setup.py").is_file():
                reason = f"{Path(__file__).parent} is the source folder, which has no compiled library"
                mend = "Run from another folder to import what is installed, or install with -e"
        else:
            reason = f"the compiled library does not load: {error}"
            mend = f"Reinstall spin_fast against this torch ({torch.__version__}; 2.10 or newer is needed)"
        warnings.warn(
            f"spin_fast: {reason}. The slower pure-PyTorch path takes over. {mend}; "
            "or set SPIN_FAST_BACKEND=reference to choose this path without a warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, reason
    isa = os.environ.get("SPIN_FAST_ISA")
    if isa is not None:
        try:
            library.set_isa(isa)
        except ValueError as error:
            raise ValueError(f"SPIN_FAST_ISA: {error}") from None
    return library, ""


library, missing_reason = _load()


def available() -> bool:
    """Whether the compiled CPU library is loaded."""
    return library is not None


def build_info() -> dict[str, Any]:
    """What was built and what runs: versions, compiler, instruction sets, or why there is no compiled library."""
    info: dict[str, Any] = {"torch": torch.__version__, "native": available()}
    if library is None:
        return info | {"reason": missing_reason}
    return info | library.build_info() | {"isa": library.isa(), "isa_available": library.isa_available()}
