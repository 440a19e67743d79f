"""Builds the compiled part of spin_fast. Everything else is in pyproject.toml.

Environment variables read at build time:
    SPIN_FAST_NATIVE=0    install the pure-Python package: no compiler needed, everything runs on the reference path
    SPIN_FAST_CUDA=0|1    without, or not without, the CUDA kernels (default: with them where there is nvcc)
    CUDA_HOME             the CUDA toolkit to build with (default: that of the nvcc on the PATH, then /usr/local/cuda)
    TORCH_CUDA_ARCH_LIST  the GPUs to compile for, as for torch's own extensions (default: 8.0;9.0;10.0+PTX, of these
                          what the toolkit knows)
    CXX, CXXFLAGS, LDFLAGS, MAX_JOBS    as everywhere
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup

TORCH_TARGET = "2.10"  # the oldest torch that the binary runs under (LibTorch Stable ABI)
ARCHITECTURES = ("8.0", "9.0", "10.0")


def flag(name: str, default: bool) -> bool:
    value = os.environ.get(name, str(int(default)))
    if value not in ("0", "1"):
        sys.exit(f"spin_fast: {name} must be 0 or 1, got {value!r}")
    return value == "1"


def files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def target_macros() -> list[tuple[str, str]]:
    major, minor = TORCH_TARGET.split(".")
    return [("TORCH_TARGET_VERSION", f"0x{int(major):02x}{int(minor):02x}000000000000")]


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [str(Path(home, "bin"))] if home else [None, "/usr/local/cuda/bin"]  # None: the PATH
    found = next((nvcc for place in places if (nvcc := shutil.which("nvcc", path=place))), None)
    wanted = os.environ.get("SPIN_FAST_CUDA") is not None and flag("SPIN_FAST_CUDA", True)
    if wanted and found is None:
        sys.exit(
            f"spin_fast: SPIN_FAST_CUDA=1, but no nvcc found (looked in {', '.join(p or 'the PATH' for p in places)}). "
            "Install the CUDA toolkit, or leave SPIN_FAST_CUDA out to install without CUDA kernels."
        )
    return found if flag("SPIN_FAST_CUDA", True) else None


def default_architectures(nvcc: str) -> str:
    """Those that this nvcc knows: an older toolkit should not make the installation fail."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout.split()
    numbers = [number for number in ARCHITECTURES if "compute_" + number.replace(".", "") in known]
    return ";".join(numbers or ARCHITECTURES) + "+PTX"


def architecture_flags(nvcc: str) -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST: numbers such as 9.0 or 9.0a, +PTX for GPUs to come."""
    flags = []
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or default_architectures(nvcc)
    for entry in re.split(r"[;\s]+", wanted):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if match is None:
            sys.exit(f"spin_fast: TORCH_CUDA_ARCH_LIST must list numbers such as 8.0;9.0+PTX, got {entry!r}")
        number = "".join(match.groups("")[:3])
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


class CudaLibrary:
    """The second library, ``_C_cuda``: torch loads it where torch has CUDA, and nothing else needs a GPU.

    torch's own CUDAExtension refuses to run under a torch without CUDA, whose headers are all that is needed: the
    library is linked against a stub of libtorch_cuda with the names that it uses.
    """

    NAME = "spin_fast._C_cuda"
    SYMBOLS = ("aoti_torch_create_cuda_guard", "aoti_torch_delete_cuda_guard", "aoti_torch_get_current_cuda_stream")

    def __init__(self, nvcc: str) -> None:
        self.nvcc, self.architectures = nvcc, architecture_flags(nvcc)
        headers = files("csrc/*.h", "csrc/cuda/*.h")
        self.extension = Extension(self.NAME, sources=files("csrc/cuda/*.cu"), depends=[*headers, "setup.py"])

    def build(self, target: Path, folder: Path) -> None:
        """Compile what has changed, and link."""
        import torch
        from torch.utils import cpp_extension

        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [
            "-std=c++20",
            "-O3",
            "--expt-relaxed-constexpr",
            "--threads=2",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
            *[f"-D{name}={value}" for name, value in target_macros()],
            *self.architectures,
        ]
        includes = [f"-isystem={path}" for path in cpp_extension.include_paths()]
        newest = max(Path(path).stat().st_mtime for path in self.extension.depends)
        # Other GPUs, other objects.
        how = hashlib.sha256(repr((torch.__version__, self.nvcc, flags)).encode()).hexdigest()[:16]

        def compile_one(source: str) -> str:
            out = folder / f"{Path(source).stem}.{how}.o"
            if not out.exists() or out.stat().st_mtime < max(newest, Path(source).stat().st_mtime):
                part = out.with_suffix(".part.o")
                self.run(self.nvcc, *flags, *includes, "-c", source, "-o", part)
                part.replace(out)
            return str(out)

        jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(compile_one, self.extension.sources))
        with tempfile.TemporaryDirectory() as stubs:
            paths = [*self.torch_with_cuda(Path(stubs)), *cpp_extension.library_paths()]
            self.run(
                *(self.nvcc, "-shared", "-cudart=static", *self.architectures[:1], *objects, "-o", target),
                *[f"-L{path}" for path in paths],
                *("-ltorch_cuda", "-ltorch_cpu", "-lc10", "-Xlinker=--no-undefined,--no-as-needed"),
            )

    @classmethod
    def torch_with_cuda(cls, folder: Path) -> list[str]:
        """Where to find a libtorch_cuda, if not with torch: a stub."""
        from torch.utils import cpp_extension

        if any(Path(path, "libtorch_cuda.so").exists() for path in cpp_extension.library_paths()):
            return []
        source = folder / "stub.c"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in cls.SYMBOLS))
        library = folder / "libtorch_cuda.so"
        compiler = shlex.split(os.environ["CXX"])
        cls.run(*compiler, "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", source, "-o", library)
        return [str(folder)]

    @staticmethod
    def run(*command: object) -> None:
        print(" ".join(map(str, command)), flush=True)
        if subprocess.run(list(map(str, command)), check=False).returncode != 0:
            sys.exit(f"spin_fast: {command[0]} failed; SPIN_FAST_CUDA=0 installs without the CUDA kernels")


def require_compiler() -> None:
    """Leave in CXX a compiler that is there."""
    if sys.platform == "win32":
        sys.exit(
            "spin_fast: MSVC cannot compile the kernels. Install in WSL, the Linux of Windows, "
            "or set SPIN_FAST_NATIVE=0 to install the slower pure-Python package."
        )
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


def lasting(link: Path, folder: str) -> Path:
    """Link to a folder of headers: ninja compiles all anew where a path is new, as is torch's in each pip install."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return link


def native_extensions() -> dict:
    import pybind11
    import torch
    from torch.utils import cpp_extension

    require_compiler()
    flags = [
        "-O3",
        "-std=c++20",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wall",
        "-Wextra",
        "-g0",
        *shlex.split(os.environ.get("CXXFLAGS", "")),  # which torch leaves out where it compiles by ninja
    ]
    extension = Extension(
        "spin_fast._C",
        sources=files("csrc/*.cpp", "csrc/cpu/*.cpp"),
        depends=files("csrc/*.h", "csrc/cpu/*.h", "csrc/cpu/*.inl"),
        # pip's pybind11 before the copy that torch carries
        include_dirs=[pybind11.get_include(), *cpp_extension.include_paths()],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch", "torch_cpu", "c10"],
        define_macros=[
            *target_macros(),
            ("SPIN_FAST_TORCH_TARGET", f'"{TORCH_TARGET}"'),
            ("SPIN_FAST_TORCH_BUILD", f'"{torch.__version__}"'),
        ],
        extra_compile_args=flags,
        language="c++",
    )
    nvcc = find_nvcc()
    cuda = CudaLibrary(nvcc) if nvcc else None

    class Build(cpp_extension.BuildExtension.with_options(use_ninja=shutil.which("ninja") is not None)):
        def build_extensions(self) -> None:
            versions = f"torch-{torch.__version__}-pybind11-{pybind11.__version__}"
            links = Path(self.build_temp, "include", versions).resolve()
            extension.extra_compile_args += [
                f"-isystem{lasting(links / str(number), folder)}"
                for number, folder in enumerate(extension.include_dirs)
            ]
            extension.include_dirs = []
            wanted, self.extensions = self.extensions, [extension]
            super().build_extensions()
            self.extensions = wanted
            target = Path(self.get_ext_fullpath(CudaLibrary.NAME)).resolve()
            if cuda:
                cuda.build(target, Path(self.build_temp, "csrc", "cuda"))
            else:  # what an earlier build left there would be installed too
                target.unlink(missing_ok=True)

    return {"ext_modules": [extension, *([cuda.extension] if cuda else [])], "cmdclass": {"build_ext": Build}}


if __name__ == "__main__":
    setup(**(native_extensions() if flag("SPIN_FAST_NATIVE", True) else {}))
