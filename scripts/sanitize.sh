#!/usr/bin/env bash
# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: tests of operations, features, training and
# files, then random calls. The first finding ends it.
#
#   scripts/sanitize.sh [PYTEST ARGUMENT...]    (default: what is said above)
#
# ThreadSanitizer has not been tried.
set -euo pipefail
cd "$(dirname "$0")/.."
place=$PWD/build/sanitized
python=${PYTHON:-python}
export CXX=${CXX:-g++} SPIN_FAST_CUDA=0
export CXXFLAGS="-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all ${CXXFLAGS:-}"
CXXFLAGS+=" -fno-sanitize=nonnull-attribute"  # a copy of no bytes from null is none
export LDFLAGS="-fsanitize=address,undefined ${LDFLAGS:-}"
mkdir -p "$place/lib"
$python setup.py --quiet egg_info --egg-base "$place/lib" build --build-base "$place/build" --build-lib "$place/lib"

# Python itself is not compiled with them, so they come first, and what it never frees is no finding.
runtime=("$($CXX -print-file-name=libasan.so)" "$($CXX -print-file-name=libubsan.so)")
export LD_PRELOAD="${runtime[*]}" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$place/lib:$PWD/tests
$python -P -c 'import spin_fast, sys; sys.exit("sanitized" not in spin_fast.__file__ or not spin_fast.native_available())'
if (($#)); then
  exec $python -P -m pytest -n 0 "$@"
fi
$python -P -m pytest -n 0 -k "not cuda and not test_native and not compile" tests/ops tests/features tests/training tests/common
cd tests
exec $python -P -m fuzz --seconds 300
