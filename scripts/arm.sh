#!/usr/bin/env bash
# The kernels on 64-bit ARM, without such a machine: compiled by Debian's cross compiler, tested under qemu with
# Debian's Python 3.11 and the oldest torch that they run under. Correctness only: an emulator says nothing about speed.
#
#   scripts/arm.sh [PYTEST ARGUMENT...]    (default: tests/ops but for those of other devices, minutes to an hour)
#
# Needs Debian 12, its packages g++-aarch64-linux-gnu and qemu-user, `dpkg --add-architecture arm64` and `apt-get
# update`, and a python (or $PYTHON) 3.11 with what compiling spin_fast takes. What it downloads stays in build/arm.
# Exit: 0 passed, 1 failed, 2 a tool is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
arm=$PWD/build/arm
python=${PYTHON:-python}

for tool in aarch64-linux-gnu-g++ qemu-aarch64 apt-get; do
  command -v $tool > /dev/null || { echo "arm.sh: no $tool" >&2; exit 2; }
done
apt-cache show python3.11-minimal:arm64 > /dev/null 2>&1 || { echo "arm.sh: no packages of arm64" >&2; exit 2; }
$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "arm.sh: no Python 3.11" >&2; exit 2; }

if [[ ! -d $arm/root ]]; then
  mkdir -p "$arm/packages"
  libraries=(libc6 libgcc-s1 libstdc++6 libexpat1 zlib1g libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1)
  python_packages=(python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
  (cd "$arm/packages" && apt-get download -q $(printf '%s:arm64 ' "${libraries[@]}" "${python_packages[@]}"))
  for package in "$arm"/packages/*.deb; do dpkg -x "$package" "$arm/root.part"; done
  mv "$arm/root.part" "$arm/root"
fi

if [[ ! -d $arm/site ]]; then
  # Without what these ask for: pip would ask in the name of this machine, whose torch wants CUDA.
  platforms=$(printf -- '--platform manylinux_2_%s_aarch64 ' 17 27 28)
  pip="$python -m pip install --quiet --no-deps --only-binary :all: --python-version 3.11 $platforms"
  $pip --platform manylinux2014_aarch64 --target "$arm/site.part" torch==2.10.0 numpy scipy typing_extensions sympy \
    mpmath networkx jinja2 markupsafe fsspec filelock safetensors pytest pytest-xdist execnet iniconfig packaging \
    pluggy pygments hypothesis sortedcontainers attrs
  mv "$arm/site.part" "$arm/site"
fi

export SPIN_FAST_CUDA=0 CXX=aarch64-linux-gnu-g++ LDSHARED="aarch64-linux-gnu-g++ -shared"
export LDFLAGS="-L$arm/site/torch/lib" SETUPTOOLS_EXT_SUFFIX=.cpython-311-aarch64-linux-gnu.so
mkdir -p "$arm/lib"
$python setup.py --quiet egg_info --egg-base "$arm/lib" build --build-base "$arm/build" --build-lib "$arm/lib"

(($#)) || set -- tests/ops -k 'not cuda and not test_native'
export PYTHONPATH=$arm/lib:$arm/site PYTHONHOME=$arm/root/usr
# By a script of which Python takes the name for its own, since tests start processes by it.
printf '#!/bin/sh\nexec qemu-aarch64 -L "%s" -0 "$0" "%s" "$@"\n' "$arm/root" "$arm/root/usr/bin/python3.11" > "$arm/python"
chmod +x "$arm/python"
run() { "$arm/python" -P "$@"; }
run -c 'import spin_fast; info = spin_fast.build_info(); print(info); assert info["isa"] == "neon"'
run -m pytest -p no:cacheprovider -n 0 "$@"
