"""pytest plugin of the suite: options, inputs, the ``race`` fixture, and the report.

``conftest.py`` loads it. pytest knows its options where the folder is named (``pytest benchmarks/``), or with ``-p
spin_fast.benchmarks.plugin`` beside ``--pyargs spin_fast.benchmarks``; otherwise the defaults hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from spin_fast import GraphBatch, datasets

from . import report
from .race import Contender, Effort, Race, frozen_garbage, num_threads

DATASETS = ("digits", "NCI1", "PROTEINS", "REDDIT-BINARY", "COLLAB")

RunRace = Callable[[str, str, Mapping[str, Contender]], None]


def names(text: str) -> list[str]:
    """Parse ``a,b``."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Parse ``1,2``."""
    return [int(number) for number in text.split(",")]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("spin_fast races")
    found = f"those of {','.join(DATASETS)} that are found"
    group.addoption("--datasets", type=names, metavar="NAMES", help=f"comma-separated (default: {found})")
    group.addoption("--root", metavar="DIR", help="folder of the data sets (default: $SPIN_FAST_DATA, else data)")
    group.addoption("--threads", type=numbers, metavar="NUMBERS", help="comma-separated (default: 1,2)")
    group.addoption("--quick", action="store_true", help="few rounds, by default of digits only: to see that all runs")
    group.addoption("--results", type=Path, metavar="DIR", help="write results.json, results.md and plots there")
    group.addoption("--rounds", type=int, metavar="N", help="at most so many (default: 15; quick: 3)")
    group.addoption(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="fewer rounds, but at least 3, where the slowest contender needs more than this (default: 20; quick: 1)",
    )


@dataclass(frozen=True)
class Settings:
    """The options, with their defaults filled in."""

    datasets: list[str]
    root: str | None
    threads: list[int]
    effort: Effort
    results: Path | None

    @classmethod
    def of(cls, config: pytest.Config) -> Settings:
        def option(name: str, default: Any = None) -> Any:
            # Not even registered where pytest met the conftest too late for its options.
            value = config.getoption(f"--{name}", None)
            return default if value is None else value

        quick, root = option("quick", False), option("root")
        known = datasets.names(root)
        preferred = DATASETS[:1] if quick else DATASETS
        chosen = option("datasets", [name for name in preferred if name in known])
        if unknown := sorted(set(chosen) - set(known)):
            raise pytest.UsageError(f"--datasets: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(
            datasets=chosen,
            root=root,
            threads=option("threads", [number for number in (1, 2) if number <= report.available_cores()]),
            effort=Effort(option("budget", 1.0 if quick else 20.0), 3, option("rounds", 3 if quick else 15)),
            results=option("results"),
        )


SETTINGS = pytest.StashKey[Settings]()
RACES = pytest.StashKey[list[Race]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SETTINGS] = Settings.of(config)
    config.stash[RACES] = []
    report.load()
    for warning in ("Sparse CSR tensor support", "Sparse invariant checks", "`torch.jit.script` is deprecated"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")
    if not config.getoption("--benchmark-compare"):
        config.option.benchmark_quiet = True  # pytest-benchmark's own table knows no rivals


def pytest_report_header(config: pytest.Config) -> str:
    return f"races: {report.describe(report.machine())}; load {report.load():.1f}, should be near 0"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    settings = metafunc.config.stash[SETTINGS]
    if "race" in metafunc.fixturenames:
        metafunc.parametrize("threads", settings.threads)
        metafunc.parametrize("dataset", settings.datasets)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One thread first: the idle threads of a wider race may still spin, and count as CPU time. Then by data set."""
    settings = config.stash[SETTINGS]

    def position(item: pytest.Item) -> tuple[int, int]:
        if "race" not in getattr(item, "fixturenames", ()):
            return -1, -1
        parameters = item.callspec.params
        return settings.threads.index(parameters["threads"]), settings.datasets.index(parameters["dataset"])

    items.sort(key=position)


@lru_cache(maxsize=1)
def _load(name: str, root: str | None) -> GraphBatch:
    return datasets.load(name, root)


@pytest.fixture
def graphs(dataset: str, request: pytest.FixtureRequest) -> GraphBatch:
    """The whole data set."""
    return _load(dataset, request.config.stash[SETTINGS].root)


@pytest.fixture
def _our_time(request: pytest.FixtureRequest) -> list[Race]:
    """Has pytest-benchmark read our contender's time, whatever its rivals take: its numbers are ours, per call."""
    running: list[Race] = []

    def our_time() -> float:
        return sum(sum(race.seconds[race.ours]) for race in running)

    request.node.add_marker(pytest.mark.benchmark(timer=our_time))
    return running


@pytest.fixture
def race(request: pytest.FixtureRequest, _our_time: list[Race], benchmark: Any, threads: int) -> Iterator[RunRace]:
    """Run one race, ``race(case, input, contenders)``, ours first; once per test. All of the test has ``threads``."""
    effort = request.config.stash[SETTINGS].effort

    def run(case: str, on: str, contenders: Mapping[str, Contender]) -> None:
        suite = request.module.__name__.rpartition(".")[2].removeprefix("test_")
        race = Race(suite, case, on, threads)
        with frozen_garbage():
            slowest = race.warm_up(contenders)
            _our_time.append(race)
            benchmark.group = case
            benchmark.pedantic(race.run_round, (contenders,), rounds=effort.rounds(slowest))
        benchmark.extra_info.update(report.summary(race))
        request.config.stash[RACES].append(race)

    with num_threads(threads):
        yield run


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["races"] = report.machine()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    races, folder = config.stash[RACES], config.stash[SETTINGS].results
    if not races:
        return
    terminalreporter.section("races")
    terminalreporter.write_line(report.MEANING)
    terminalreporter.write_line(report.terminal(races, terminalreporter._tw.fullwidth))
    if folder is not None:
        report.write(races, report.machine(), folder)
        terminalreporter.write_line(f"written: {folder}")
