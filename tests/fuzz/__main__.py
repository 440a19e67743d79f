"""Makes random calls for some time, in a process that may crash or hang, and tells which ones failed.

    PYTHONPATH=tests python -m fuzz --seconds 120 --seed 1
    PYTHONPATH=tests python -m fuzz --case containers 9

A case is known by its name and number: the second command makes one again.
"""

from __future__ import annotations

import argparse
import os
import resource
import selectors
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from itertools import count

MOST_SECONDS = 60.0  # of one case
MOST_MEMORY = 16 << 30


def work(first: int, names: list[str]) -> None:
    """Run cases from a number on, telling each before it begins and those that fail."""
    import pytest
    import torch

    from . import cases

    if "ASAN_OPTIONS" not in os.environ:  # whose own maps of memory are larger
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number in count(first):
        name = names[number % len(names)]
        print("case", name, number, flush=True)
        try:
            cases.run(name, number)
        except (Exception, pytest.fail.Exception) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            told = str(error).replace("\n", " ")[:300]
            place = f"{os.path.basename(where.filename)}:{where.lineno}"
            print("failed", name, number, f"{type(error).__name__} at {place}: {told}", flush=True)


def fuzz(seconds: float, calls: int, first: int, names: list[str]) -> tuple[Counter[str], list[str]]:
    """Numbers of cases by name, and what failed."""
    made: Counter[str] = Counter()
    failures: list[str] = []
    end, number, begun = time.monotonic() + seconds, first, first
    while time.monotonic() < end and number < first + calls:
        command = [sys.executable, "-m", "fuzz", "--worker", str(number), "--only", *names]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker,
            selectors.DefaultSelector() as ready,
        ):
            assert worker.stdout is not None
            ready.register(worker.stdout, selectors.EVENT_READ)
            name, begun = "", number
            while time.monotonic() < end and begun < first + calls:
                if not ready.select(MOST_SECONDS):
                    failures.append(f"{name} {begun}: it hangs")
                    break
                line = worker.stdout.readline()
                if not line:
                    failures.append(f"{name} {begun}: the process ended with {worker.wait()}")
                    break
                kind, name, told, *rest = line.rstrip().split(" ", 3)
                begun = int(told)
                if kind == "failed":
                    failures.append(f"{name} {begun}: {rest[0]}")
                    print(failures[-1], flush=True)
                else:
                    made[name] += 1
            worker.kill()
        number = begun + 1
    return made, failures


def main() -> int:
    from . import cases

    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Make random calls of everything public.")
    parser.add_argument("--seconds", type=float, default=120, help="for so long (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=sys.maxsize, help="at most so many (default: no such bound)")
    parser.add_argument("--seed", type=int, default=0, help="of the first number: others are other cases")
    parser.add_argument("--only", nargs="+", default=list(cases.CASES), choices=list(cases.CASES), metavar="NAME")
    parser.add_argument("--case", nargs=2, metavar=("NAME", "NUMBER"), help="make one case again")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        cases.run(options.case[0], int(options.case[1]))
        return 0
    if options.worker is not None:
        work(options.worker, options.only)
    made, failures = fuzz(options.seconds, options.calls, options.seed * 10**9, options.only)
    print(f"seed {options.seed}: {made.total():,} cases, {', '.join(f'{n:,} {name}' for name, n in made.items())}")
    print("\n".join(["failed:", *failures]) if failures else "none failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
