"""The compiled libraries: loading them, whether there is a kernel, what belongs to an op.

Where loading fails, a warning says why, once, and how to mend it.

``_C`` has the schemas of the ops and the CPU kernels, ``_C_cuda`` the CUDA kernels; under a torch without CUDA that is
not loaded. Loading starts nothing on a GPU, so a process that has imported this may still fork. In the child the CPU
kernels run on one thread, with the same results: those of the parent are not there. torch's own operations would wait
for them for ever, so its number of threads is set to 1 there.

Environment:
    SPIN_FAST_BACKEND=reference    load neither; every operation runs on :mod:`spin_fast.reference`
    SPIN_FAST_ISA=baseline|avx2|avx512    the instruction set of the CPU kernels (default: the best this CPU has; on
                                          64-bit ARM the only one is neon)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch  # before _C: it links to libtorch, which this brings into the process
from torch import Tensor

from .._common import torch_compat

T = TypeVar("T")
Grads = tuple[Tensor | None, ...]  # of the inputs of an op
BACKENDS = ("native", "reference")
PACKAGE = Path(__file__).parents[1]


def _warn(what: str, mend: str) -> None:
    choice = "set SPIN_FAST_BACKEND=reference to choose this path without a warning"
    warnings.warn(f"spin_fast: {what}. {mend}; or {choice}.", RuntimeWarning, stacklevel=3)


def _load() -> tuple[ModuleType | None, str]:
    """Return the compiled module, or None and the reason."""
    backend = os.environ.get("SPIN_FAST_BACKEND") or "native"  # what is set to nothing counts as unset
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
            if (PACKAGE.parent / "setup.py").is_file():
                reason = f"{PACKAGE} is the source folder, which has no compiled library"
                mend = "Run from another folder to import what is installed, or install with -e"
        else:
            reason = f"the compiled library does not load: {error}"
            mend = f"Reinstall spin_fast against this torch ({torch.__version__}; 2.10 or newer is needed)"
        _warn(f"{reason}. The slower pure-PyTorch path takes over", mend)
        return None, reason
    if isa := os.environ.get("SPIN_FAST_ISA"):
        try:
            library.set_isa(isa)
        except ValueError as error:
            raise ValueError(f"SPIN_FAST_ISA: {error}") from None
    return library, ""


def _go_without_threads() -> None:
    torch.set_num_threads(1)
    if library is not None:
        library.go_without_threads()


def _load_cuda() -> tuple[str, str]:
    """Load the CUDA kernels; return why they are not there and how to mend that, or empty strings."""
    if library is None:
        return f"they need the compiled library: {missing_reason}", ""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) has no CUDA", ""
    spec = importlib.util.find_spec("spin_fast._C_cuda")
    if spec is None or spec.origin is None:
        return (
            "this installation has no CUDA kernels (spin_fast/_C_cuda)",
            "Reinstall with the CUDA toolkit: nvcc on the PATH or in CUDA_HOME, and without SPIN_FAST_CUDA=0",
        )
    try:
        torch.ops.load_library(spec.origin)  # no Python module: loading it registers the kernels
    except OSError as error:
        reason = f"the library of the CUDA kernels does not load: {error.__cause__ or error}"
        return reason, f"Reinstall spin_fast against this torch ({torch.__version__}; 2.10 or newer is needed)"
    return "", ""


library, missing_reason = _load()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_go_without_threads)
cuda_missing_reason, _cuda_mend = _load_cuda()


def available(device: str | torch.device = "cpu") -> bool:
    """Whether the compiled kernels for tensors on ``device``, the CPU or a GPU ("cuda"), are loaded."""
    kind = torch.device(device).type
    return library is not None and (kind == "cpu" or (kind == "cuda" and not cuda_missing_reason))


def wants_cuda() -> bool:
    """Whether the CUDA kernels are loaded; where they could be, and are not, warn of that the first time.

    Not at import: most torch installations are made for CUDA, on whatever machine they are.
    """
    global _cuda_mend
    if _cuda_mend and not torch.compiler.is_compiling():
        mend, _cuda_mend = _cuda_mend, ""
        _warn(f"{cuda_missing_reason}. The slower pure-PyTorch path takes over on the GPU", mend)
    return library is not None and not cuda_missing_reason


def has_kernel(value: Tensor) -> bool:
    """Whether to call an op for tensors where ``value`` is, rather than its reference implementation.

    Not under the transforms of ``torch.func`` and in forward-mode differentiation: some of them refuse a kernel, others
    take it for a constant.
    """
    if torch_compat.is_transformed():
        return False
    return library is not None if value.is_cpu else value.is_cuda and wants_cuda()


def is_autocast(value: Any) -> bool:
    """Whether autocast is on for the device of a tensor; there is none for meta tensors."""
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return torch.is_autocast_enabled("cpu" if value.is_cpu else value.device.type)  # a name is made anew each time


# What an op raises on bad arguments. The checks in Python then say by name what is wrong; if they find nothing, such as
# a lack of memory, the op is called again and its error stands.
REFUSALS = (ValueError, RuntimeError, TypeError, AttributeError, IndexError)


def op_checks(value: Any, *flags: Any) -> bool:
    """Whether to call an op of ``value`` at once, which checks its arguments itself; on a GPU it cannot check contents.

    It would take anything for the ``flags``.
    """
    for flag in flags:
        if type(flag) is not bool:
            return False
    return isinstance(value, Tensor) and value.is_cpu and not torch.compiler.is_compiling() and has_kernel(value)


@torch_compat.constant_while_compiling
def may_use_tf32() -> bool:
    """Whether torch's settings let products of float32 matrices on a GPU round their factors to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def contiguous(value: Tensor | None) -> Tensor | None:
    """What a kernel takes; None is an argument that was left out."""
    return None if value is None else value.contiguous()


def on_this_thread(f: Callable[[], T]) -> T:
    """What ``f`` returns; where the kernels are there, torch's operations in it start no threads on the CPU."""
    if library is None:
        return f()
    made: list[T] = []
    library.on_this_thread(lambda: made.append(f()))
    return made[0]


def register(
    name: str,
    fake: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> None:
    """Give an op of ``csrc/library.cpp`` its fake kernel and, with what ``setup`` saves for it, its gradient."""
    if library is None:
        return
    torch.library.register_fake(f"spin_fast::{name}", fake)
    if gradient is not None:
        torch.library.register_autograd(f"spin_fast::{name}", gradient, setup_context=setup)


def build_info() -> dict[str, Any]:
    """What was built and what runs: versions, compiler, instruction sets, CUDA kernels, or why there are none."""
    info: dict[str, Any] = {"torch": torch.__version__, "native": available(), "cuda": available("cuda")}
    if cuda_missing_reason:
        info["cuda_reason"] = cuda_missing_reason
    if library is None:
        return info | {"reason": missing_reason}
    return info | library.build_info() | {"isa": library.isa(), "isa_available": library.isa_available()}
