"""The CUDA kernels in place of the CPU's: on a GPU, or emulated on the CPU if there is none.

Within ``standing_in()``, ``spin_fast::op`` of CPU tensors runs the CUDA kernel of the op, so that every test of an
operation tests its CUDA kernel too.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import ROOT

import spin_fast
from spin_fast.ops import native

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and spin_fast.native_available("cuda")),
    reason=f"needs a GPU and the CUDA kernels ({spin_fast.build_info().get('cuda_reason', 'torch finds no GPU')})",
)
FOLDER = ROOT / "build" / "emulator"
OPS = (
    "power_features",
    "power_features_out",
    "power_features_backward",
    "sum_readout",
    "sum_readout_backward",
    "attention_readout",
    "attention_readout_backward",
    "branch_readout",
    "branch_readout_backward",
    "training_step",
    "distinct_rows",
    "subtree_keys",
)


class Emulated:
    """The CUDA sources, compiled for the CPU, as ops of the namespace ``spin_fast_emulated``."""

    def __init__(self) -> None:
        from torch.utils import cpp_extension

        kernels, emulator = ROOT / "csrc" / "cuda", ROOT / "tests" / "emulator"
        sources = [emulator / "emulator.cpp", emulator / "faults.cpp"]
        for kernel in sorted(kernels.glob("*.cu")):  # the host compiler does not know the suffix .cu
            source = FOLDER / f"{kernel.stem}.cpp"
            text = f'#include "{kernel}"\n'
            if not source.is_file() or source.read_text() != text:
                source.write_text(text)
            sources.append(source)
        names = ("-Dspin_fast=spin_fast_emulated", "-DSPIN_FAST_DEVICE=CPU")
        device = "-Dspin_fast_device_type=aoti_torch_device_type_cpu"
        self.namespace = "spin_fast_emulated"
        self._schemas = torch.library.Library(self.namespace, "DEF")
        for op in OPS:
            schema = str(getattr(torch.ops.spin_fast, op).default._schema)
            self._schemas.define(schema.removeprefix("spin_fast::"))
        path = cpp_extension.load(
            self.namespace,
            [str(source) for source in sources],
            extra_cflags=[
                "-O1",
                "-g0",
                "-fvisibility=hidden",
                "-fsanitize=alignment",
                "-fsanitize-undefined-trap-on-error",
                "-DTORCH_TARGET_VERSION=0x020a000000000000",
                *names,
                device,
            ],
            extra_include_paths=[str(emulator)],
            build_directory=str(FOLDER),
            is_python_module=False,
        )
        self._library = ctypes.CDLL(path or str(FOLDER / f"{self.namespace}.so"))
        self._library.emulator_allocate.restype = ctypes.c_void_p
        self._library.emulator_allocate.argtypes = [ctypes.c_size_t]
        self._library.emulator_set_elsewhere.argtypes = [ctypes.c_void_p]
        self._guarded = False

    def set_order(self, order: int) -> None:
        """Set the order of threads and blocks: 0 as numbered, 1 reversed, else shuffled by this seed."""
        self._library.emulator_set_order(order)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Make accesses outside the tensors of a kernel errors. The memory of such calls is never freed."""
        self._library.emulator_set_guarded(True)
        self._guarded = True
        try:
            yield
        finally:
            self._library.emulator_set_guarded(False)
            self._guarded = False

    @contextmanager
    def elsewhere(self, tensor: torch.Tensor) -> Iterator[None]:
        """Put a tensor on another device than all others."""
        self._library.emulator_set_elsewhere(tensor.data_ptr())
        try:
            yield
        finally:
            self._library.emulator_set_elsewhere(None)

    def run_fault(self, which: int, shared_bytes: int) -> tuple[list[int], str]:
        """Run a kernel of emulator/faults.cpp; return its output and the emulator's message."""
        out, message = (ctypes.c_int * 64)(), ctypes.create_string_buffer(256)
        self._library.emulator_run_fault(which, shared_bytes, out, message)
        return list(out), message.value.decode()

    def has(self, op: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"{self.namespace}::{op}", "CPU")

    def call(self, op: str, *arguments: Any) -> Any:
        kernel = getattr(getattr(torch.ops, self.namespace), op).default
        if not self._guarded:
            return kernel(*arguments)
        moved = [self._guarded_copy(value) if torch.is_tensor(value) else value for value in arguments]
        result = kernel(*moved)
        if op == "power_features_out":
            arguments[-1].copy_(moved[-1])
        return result

    def _guarded_copy(self, value: torch.Tensor) -> torch.Tensor:
        if value.numel() == 0:
            return value
        address = self._library.emulator_allocate(value.nbytes)
        memory = (ctypes.c_char * value.nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=value.dtype).view(value.shape).copy_(value)


class Gpu:
    """The CUDA library, with tensors moved to the GPU and back."""

    def set_order(self, order: int) -> None:
        pass

    def has(self, op: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"spin_fast::{op}", "CUDA")

    def call(self, op: str, *arguments: Any) -> Any:
        moved = [value.cuda() if isinstance(value, torch.Tensor) else value for value in arguments]
        result = getattr(torch.ops.spin_fast, op).default(*moved)
        if op == "power_features_out":
            arguments[-1].copy_(moved[-1])
        return torch.utils._pytree.tree_map(lambda value: value.cpu() if torch.is_tensor(value) else value, result)


@functools.cache
def kernels() -> Emulated | Gpu:
    if torch.cuda.is_available():
        return Gpu()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "users").open("w") as users:  # one process compiles, and the others wait for as long as it lives
        fcntl.flock(users, fcntl.LOCK_EX)
        (FOLDER / "lock").unlink(missing_ok=True)  # torch's own, which a process that is killed leaves behind
        return Emulated()


@contextmanager
def standing_in() -> Iterator[Emulated | Gpu]:
    """Run the CUDA kernels in place of the CPU's; contents are then checked in Python, since CUDA kernels do not."""
    found, op_checks = kernels(), native.op_checks
    library = torch.library.Library("spin_fast", "IMPL")

    def calls(op: str) -> Callable[..., Any]:
        return lambda *arguments: found.call(op, *arguments)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for op in OPS:
            if found.has(op):
                library.impl(op, calls(op), "CPU", allow_override=True)
    native.op_checks = lambda value, *flags: False
    try:
        yield found
    finally:
        library._destroy()
        native.op_checks = op_checks
