"""Let clang check all C++ sources too, for Linux on both kinds of CPU and for macOS; a warning is an error.

Clang and the headers of the systems are those of ``ziglang`` (pip install ziglang). ``zig c++`` knows the headers and
has no ``-fsyntax-only``, so it preprocesses and its clang checks the result.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ziglang

TARGETS = {  # of zig, and of clang
    "x86_64-linux-gnu.2.28": "x86_64-linux-gnu",
    "aarch64-linux-gnu.2.28": "aarch64-linux-gnu",
    "aarch64-macos.14.0": "arm64-apple-macos14.0",
}


def main() -> int:
    os.chdir(Path(__file__).parents[1])
    extension = runpy.run_path("setup.py")["native_extensions"]()["ext_modules"][0]
    macros = [f"-D{name}={value}" for name, value in (*extension.define_macros, ("TORCH_EXTENSION_NAME", "_C"))]
    includes = [f"-isystem{path}" for path in (*extension.include_dirs, sysconfig.get_path("include"))]
    zig = Path(ziglang.__file__).parent / "zig"

    def passes(target: str, source: str) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder, "out.ii"))
            flags = extension.extra_compile_args
            expand = [zig, "c++", "-target", target, *flags, *macros, *includes, "-E", source, "-o", out]
            check = [zig, "clang", f"--target={TARGETS[target]}", *flags, "-Werror", "-fsyntax-only", out]
            results = (subprocess.run(command, stderr=subprocess.PIPE, text=True) for command in (expand, check))
            errors = next((result.stderr for result in results if result.returncode != 0), None)
        if errors is not None:
            print(f"{source} for {target}:\n{errors}", flush=True)
        return errors is None

    work = [(target, source) for target in TARGETS for source in extension.sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(passes, *zip(*work, strict=True)))
    print(f"clang: {sum(done)} of {len(done)} checks passed")
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
