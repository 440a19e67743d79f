#!/usr/bin/env bash
# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: tests of operations, features, training and
# files, then random calls; or under ThreadSanitizer: a race made on purpose, which must be found, then the tests of
# operations by several threads. The first finding ends it.
#
#   scripts/sanitize.sh [--threads] [PYTEST ARGUMENT...]    (default: what is said above)
set -euo pipefail
cd "$(dirname "$0")/.."
kinds=address,undefined libraries=(libasan.so libubsan.so)
[[ ${1:-} == --threads ]] && { kinds=thread libraries=(libtsan.so); shift; }
place=$PWD/build/sanitized/$kinds
python=${PYTHON:-python}
export CXX=${CXX:-g++} SPIN_FAST_CUDA=0
export CXXFLAGS="-O1 -g1 -fno-omit-frame-pointer -fsanitize=$kinds -fno-sanitize-recover=all ${CXXFLAGS:-}"
CXXFLAGS+=" -fno-sanitize=nonnull-attribute"  # a copy of no bytes from null is none
export LDFLAGS="-fsanitize=$kinds ${LDFLAGS:-}"
mkdir -p "$place/lib"
$python setup.py --quiet egg_info --egg-base "$place/lib" build --build-base "$place/build" --build-lib "$place/lib"

# Python itself is not compiled with them, so they come first, and what it never frees is no finding.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
export PYTHONPATH=$place/lib:$PWD/tests
printf 'called_from_lib:libtorch_%s.so\n' cpu python > "$place/torch"  # whose threads it misreads, as numpy's
echo race:_dl_deallocate_tls >> "$place/torch"  # glibc's, of a thread whose stack another one reuses
export OPENBLAS_NUM_THREADS=1
TSAN_OPTIONS+=:report_mutex_bugs=0:suppressions=$place/torch
runtime=()
for library in "${libraries[@]}"; do runtime+=("$($CXX -print-file-name="$library")"); done
run() { LD_PRELOAD="${runtime[*]}" setarch -R "$python" -P "$@"; }  # -R: ThreadSanitizer knows few places for memory
run -c 'import spin_fast, sys; sys.exit("sanitized" not in spin_fast.__file__ or not spin_fast.native_available())'

if [[ $kinds == thread ]]; then
  echo "two threads write one output:"
  race='import threading, spin_fast, torch
g = spin_fast.datasets.load("digits")
out = torch.empty(4, *g.x.shape)
def write(): [spin_fast.power_features(g.indptr, g.indices, g.x, 3, ptr=g.ptr, out=out) for _ in range(50)]
threads = [threading.Thread(target=write) for _ in range(2)]
[t.start() for t in threads], [t.join() for t in threads]'
  told=$(run -c "$race" 2>&1) && told=""
  grep "data race" <<< "$told" || { echo "sanitize.sh: no race was found, so no other would be" >&2; exit 1; }
  (($#)) || set -- tests/ops/test_{branch,distinct,evaluated,patterns,power,readout,subtree,training_step}.py \
    -k "(threads or parts or sizes or training_step) and not cuda and not compile"
elif ((!$#)); then
  run -m pytest -n 0 --capture=sys -k "not cuda and not test_native and not compile" \
    tests/ops tests/features tests/training tests/common
  cd tests
  run -m fuzz --seconds 300
  exit
fi
run -m pytest -n 0 --capture=sys "$@"
