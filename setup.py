"""Builds the compiled part of spin_fast. Everything else is in pyproject.toml.

Environment variables read at build time:
    SPIN_FAST_NATIVE=0    install the pure-Python package: no compiler needed, everything runs on the reference path
    CXX, CXXFLAGS, LDFLAGS, MAX_JOBS    as everywhere
"""

import os
import shlex
import shutil
import sys

from setuptools import Extension, setup

TORCH_TARGET = "2.10"  # the oldest torch that the binary runs under (LibTorch Stable ABI)


def flag(name: str, default: bool) -> bool:
    value = os.environ.get(name, str(int(default)))
    if value not in ("0", "1"):
        sys.exit(f"spin_fast: {name} must be 0 or 1, got {value!r}")
    return value == "1"


def require_compiler() -> None:
    """Leave in CXX a compiler that is there."""
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    found = next((compiler for compiler in wanted if shutil.which(shlex.split(compiler)[0])), None)
    if found is None:
        sys.exit(
            f"spin_fast: no C++ compiler found (looked for {', '.join(wanted)}). Install one with C++20 "
            "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; "
            "conda: conda install -c conda-forge cxx-compiler), "
            "or set SPIN_FAST_NATIVE=0 to install the slower pure-Python package."
        )
    os.environ["CXX"] = found


def native_extension() -> dict:
    import pybind11
    import torch
    from torch.utils import cpp_extension

    require_compiler()
    major, minor = TORCH_TARGET.split(".")
    target = f"0x{int(major):02x}{int(minor):02x}000000000000"
    flags = [
        "-O3",
        "-std=c++20",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wall",
        "-Wextra",
        "-g0",
    ]
    extension = Extension(
        "spin_fast._C",
        sources=[
            "csrc/library.cpp",
            "csrc/cpu/power.cpp",
            "csrc/cpu/readout.cpp",
            "csrc/cpu/branch.cpp",
            "csrc/cpu/distinct.cpp",
            "csrc/cpu/isa.cpp",
            "csrc/cpu/baseline.cpp",
            "csrc/cpu/avx2.cpp",
            "csrc/cpu/avx512.cpp",
        ],
        depends=[
            "csrc/kernels.h",
            "csrc/check.h",
            "csrc/cpu/distinct.h",
            "csrc/cpu/isa.h",
            "csrc/cpu/line_pass.h",
            "csrc/cpu/ops.h",
            "csrc/cpu/packed.h",
            "csrc/cpu/pass.h",
            "csrc/cpu/segments.h",
        ]
        + [
            f"csrc/cpu/{name}.inl"
            for name in ("hop", "lanes", "power", "power_dense", "readout", "branch", "line", "table")
        ],
        # pip's pybind11 before the copy that torch carries
        include_dirs=[pybind11.get_include(), *cpp_extension.include_paths()],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch", "torch_cpu", "c10"],
        define_macros=[
            ("TORCH_TARGET_VERSION", target),
            ("SPIN_FAST_TORCH_TARGET", f'"{TORCH_TARGET}"'),
            ("SPIN_FAST_TORCH_BUILD", f'"{torch.__version__}"'),
        ],
        extra_compile_args=flags,
        language="c++",
    )
    build = cpp_extension.BuildExtension.with_options(use_ninja=shutil.which("ninja") is not None)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": build}}


setup(**(native_extension() if flag("SPIN_FAST_NATIVE", True) else {}))
