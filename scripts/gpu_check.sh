#!/usr/bin/env bash
# All that needs a GPU, in one command of less than nine minutes, from a bare checkout and without a network: builds
# for the GPU at hand, runs the tests of the CUDA kernels, compute-sanitizer, and the benchmarks.
#
#   scripts/gpu_check.sh [--quick] [--results DIR] [STEP...]
#
#   --quick        small inputs and few rounds: to see that all runs
#   --results DIR  of results.json, results.md and checks.md (default: benchmarks/results/gpu; --quick: build/gpu_check)
#   STEP           build, tests, memcheck, racecheck, synccheck, initcheck, benchmarks (default: all but initcheck,
#                  which may report what other libraries do)
#
# A step that fails does not stop the later ones. Each ends in time for what the later ones need at least. Needs python3
# (or $PYTHON) with a CUDA torch, nvcc, and what the tests and benchmarks import; data sets in $SPIN_FAST_DATA, or else
# graphs of the same statistics. Exit: 0 nothing failed, 1 something did, 2 there is no GPU or the arguments are wrong.
set -uo pipefail

seconds=${GPU_CHECK_SECONDS:-525}
steps=(build tests memcheck racecheck synccheck initcheck benchmarks)
# Seconds that the steps before leave to a step, however long they take.
declare -A least=([build]=60 [tests]=80 [memcheck]=30 [racecheck]=90 [synccheck]=20 [initcheck]=10 [benchmarks]=150)
declare -A wanted=() outcome=() took=()
python=${PYTHON:-python3}
quick=() results='' refused=''

usage() {
  sed -n '5,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --quick) quick=(--quick) ;;
    --results)
      (($# > 1)) || usage
      results=$(realpath -m -- "$2")
      shift
      ;;
    *)
      [[ -n ${least[$1]:-} ]] || usage
      wanted[$1]=1
      ;;
  esac
  shift
done
if ((${#wanted[@]} == 0)); then
  for step in "${steps[@]}"; do wanted[$step]=1; done
  unset 'wanted[initcheck]'
fi

[[ $python != */* ]] || python=$(realpath --no-symlinks -- "$python")
cd "$(dirname "$0")/.." || exit 2
scratch=$PWD/build/gpu_check
[[ -n $results ]] || results=$([[ ${#quick[@]} -gt 0 ]] && echo "$scratch" || echo "$PWD/benchmarks/results/gpu")
export PYTHONPATH=$PWD:$scratch/stage${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

if ! found=$("$python" -c '
import torch
if not torch.cuda.is_available():
    raise SystemExit(f"no GPU: torch {torch.__version__} finds none")
print("%d.%d" % torch.cuda.get_device_capability(), torch.cuda.get_device_name(), sep="\n")' 2>&1); then
  echo "gpu_check: ${found##*$'\n'}" >&2
  exit 2
fi
gpu=${found##*$'\n'} found=${found%$'\n'*}
mkdir -p "$scratch" "$results"

# Seconds until the steps after this one need the rest.
seconds_for() {
  local left=$((seconds - SECONDS)) later=''
  for step in "${steps[@]}"; do
    [[ -n $later && -n ${wanted[$step]:-} ]] && ((left -= least[$step]))
    [[ $step == "$1" ]] && later=1
  done
  echo $((left > 5 ? left : 5))
}

# run STEP COMMAND...: with the time it has; SIGINT lets pytest say what it has found so far.
run() {
  timeout --signal=INT --kill-after=10 "$(seconds_for "$1")" "${@:2}"
}

said() { # by the code of a command
  case $1 in
    0) echo ok ;;
    124 | 137) echo 'failed: out of time' ;;
    *) echo "failed: exit code $1" ;;
  esac
}

# In a folder without pyproject.toml, which is for newer setuptools than some have; its links lead back here. The
# version is read from metadata, which otherwise an installation makes.
build() {
  mkdir -p "$scratch/stage/spin_fast.egg-info" && ln -sfn "$PWD"/{setup.py,csrc,spin_fast} "$scratch/stage"
  printf 'Metadata-Version: 2.1\nName: spin_fast\nVersion: %s\n' \
    "$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" > "$scratch/stage/spin_fast.egg-info/PKG-INFO"
  (
    cd "$scratch/stage" || exit
    TORCH_CUDA_ARCH_LIST=${found##*$'\n'} SPIN_FAST_CUDA=1 run build "$python" setup.py build_ext --inplace
  )
  outcome[build]=$(said $?)
}

# After an illegal access nothing works in a process any more: some failures tell as much as all.
tests() {
  local workers=()
  "$python" -c 'import xdist' 2> /dev/null && workers=(-n 8)
  run tests "$python" -m pytest -q -k cuda -p no:cacheprovider -o addopts=--import-mode=importlib -m 'not long' "${workers[@]}" \
    -o faulthandler_timeout=60 --tb=short --maxfail=40 --durations=10 tests
  outcome[tests]=$(said $?)
}

sanitizer() {
  local nvcc folder
  nvcc=$(command -v nvcc)
  for folder in "${CUDA_HOME:-}/bin" "${nvcc%/*}" /usr/local/cuda/bin; do
    [[ -x $folder/compute-sanitizer ]] && echo "$folder/compute-sanitizer" && return
  done
  command -v compute-sanitizer
}

refusals='^=+ .*(not supported|no attachable process|internal sanitizer error|unable to (initialize|find|load|inject))'

# Of our kernels alone; every tensor is an allocation of its own, so that leaving it shows.
sanitize() {
  local tool=$1 log=$scratch/$1.log checker code line
  if [[ -n $refused ]]; then
    outcome[$tool]="skipped: $refused"
    return
  fi
  if ! checker=$(sanitizer); then
    refused='no compute-sanitizer found' outcome[$tool]="skipped: no compute-sanitizer found"
    return
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "$tool" "$checker" --tool "$tool" --error-exitcode 9 --print-limit 20 \
    --kernel-name kns=spin_fast "$python" scripts/gpu_small.py 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  outcome[$tool]=$(said "$code")
  if ((code == 0)) && ! grep -q '^gpu_small: done' "$log"; then
    outcome[$tool]='failed: it did not get to the end'
  elif ((code)) && line=$(grep -m 1 -iE "$refusals" "$log"); then
    refused=${line##*= }
    outcome[$tool]="skipped: compute-sanitizer refuses: $refused"
  elif ((code == 9)); then
    outcome[$tool]="failed: $(grep -E 'SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')"
  fi
}

benchmarks() {
  local left
  left=$(seconds_for benchmarks)
  rm -f "$results/results.json"
  run benchmarks "$python" -m pytest -q -p no:cacheprovider benchmarks/test_gpu.py --device cuda "${quick[@]}" \
    -o faulthandler_timeout=120 --budget 1 --rounds 9 --seconds $((left - 20)) --results "$results" --no-plots
  outcome[benchmarks]=$(said $?)
  [[ ${outcome[benchmarks]} != ok || -s $results/results.json ]] || outcome[benchmarks]='failed: no results'
}

reason=''
for step in "${steps[@]}"; do
  [[ -n ${wanted[$step]:-} ]] || continue
  echo "== $step (at most $(seconds_for "$step") s)"
  begin=$SECONDS
  if [[ $step != build && -z $reason ]]; then # without the kernels everything would run, and mean nothing
    reason=$("$python" -c '
import spin_fast
info = spin_fast.build_info()
print("ok" if spin_fast.native_available("cuda") else info.get("cuda_reason") or info.get("reason"))' 2>&1 | tail -n 1)
  fi
  if [[ $step != build && $reason != ok ]]; then
    outcome[$step]="failed: $reason"
  elif [[ $step == *check ]]; then
    sanitize "$step"
  else
    "$step"
  fi
  took[$step]=$((SECONDS - begin))
done

{
  echo "$gpu${quick:+, quick}"
  echo
  echo '| step | seconds | outcome |'
  echo '|---|---:|---|'
  for step in "${steps[@]}"; do
    [[ -n ${wanted[$step]:-} ]] && echo "| $step | ${took[$step]} | ${outcome[$step]} |"
  done
} > "$results/checks.md"
echo "== all: $SECONDS s"
cat "$results/checks.md"
[[ ${outcome[*]} != *failed* ]]
