"""pytest plugin of the suite: options, inputs, the ``race`` fixture, and the report.

``conftest.py`` loads it. pytest knows its options where the folder is named (``pytest benchmarks/``), or with ``-p
spin_fast.benchmarks.harness.plugin`` beside ``--pyargs spin_fast.benchmarks``; otherwise the defaults hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from spin_fast import GraphBatch, datasets

from . import floors as machine_floors
from . import gpu, report
from .race import SHORTEST_SAMPLE, Contender, Effort, Floors, Race, frozen_garbage, num_threads
from .report import Session

DATASETS = (
    "digits",
    "NCI1",
    "PROTEINS",
    "ENZYMES",
    "DD",
    "IMDB-BINARY",
    "REDDIT-BINARY",
    "COLLAB",
    "ogbg-molhiv",
)
MARKERS = (
    "prefer(*datasets): run on these where they are among the data sets, else on the first of the data sets",
    "large: minutes and gigabytes; left out by --quick and --no-large",
    "thorough: another value of what --quick tries with one",
    "lengthy: --quick gives it the first of the numbers of threads only",
)


NO_FLOORS: Floors = {}


class RunRace(Protocol):
    """Run one race, ours first; once per test.

    ``also`` names another of ours, to which ratios are taken too; rivals of ``once`` are timed once, without rounds; a
    sample lasts ``shortest`` seconds at least.
    """

    def __call__(
        self,
        case: str,
        on: str,
        contenders: Mapping[str, Contender],
        floors: Floors = ...,
        also: str | None = ...,
        once: Collection[str] = ...,
        shortest: float = ...,
    ) -> Race: ...


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
        help="of a race: fewer rounds, but at least 3, where they need more than this; a rival whose single call needs "
        "twice as much is timed once (default: 5; quick: 1)",
    )
    group.addoption("--device", choices=("cuda", "cpu"), help="of the races on the GPU; cpu only tries that they run")
    group.addoption("--seconds", type=float, help="start no test after so many")
    group.addoption("--no-plots", action="store_true", help="with --results: without plots")
    group.addoption("--no-large", action="store_true", help="without the graph of a million nodes")


RaceThreads = Callable[[str, str, Contender, Floors], None]


@dataclass(frozen=True)
class Settings:
    """The options, with their defaults filled in."""

    datasets: list[str]
    root: str | None
    threads: list[int]
    quick: bool
    large: bool
    effort: Effort
    results: Path | None
    plots: bool
    device: str
    until: float

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
            quick=quick,
            large=not (quick or option("no-large", False)),
            effort=Effort(option("budget", 1.0 if quick else 5.0), 3, option("rounds", 3 if quick else 15)),
            results=option("results"),
            plots=not option("no-plots", False),
            device=option("device", "cuda"),
            until=time.monotonic() + option("seconds", float("inf")),
        )


SETTINGS = pytest.StashKey[Settings]()
SESSION = pytest.StashKey[Session]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SETTINGS] = Settings.of(config)
    config.stash[SESSION] = Session()
    report.load()
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    for warning in ("Sparse CSR tensor support", "Sparse CSC tensor support", "Sparse invariant checks"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script")
    if not config.getoption("--benchmark-compare"):
        config.option.benchmark_quiet = True  # pytest-benchmark's own table knows no rivals


def pytest_report_header(config: pytest.Config) -> str:
    return f"races: {report.describe(report.machine())}; load {report.load():.1f}, should be near 0"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    settings = metafunc.config.stash[SETTINGS]
    if "race" in metafunc.fixturenames:
        once = settings.quick and metafunc.definition.get_closest_marker("lengthy")
        metafunc.parametrize("threads", settings.threads[:1] if once else settings.threads)
    if "dataset" in metafunc.fixturenames:
        chosen = settings.datasets
        if marker := metafunc.definition.get_closest_marker("prefer"):
            chosen = [name for name in chosen if name in marker.args] or chosen[:1]
        metafunc.parametrize("dataset", chosen)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One thread first: the idle threads of a wider race may still spin, and count as CPU time. Then by data set."""
    settings = config.stash[SETTINGS]

    def position(item: pytest.Item) -> tuple[int, int]:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        threads, dataset = parameters.get("threads"), parameters.get("dataset")
        return (
            settings.threads.index(threads) if threads in settings.threads else len(settings.threads),
            settings.datasets.index(dataset) if dataset in settings.datasets else len(settings.datasets),
        )

    skipped = {"large": not settings.large, "thorough": settings.quick}
    for item in items:
        for marker, applies in skipped.items():
            if applies and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: left out by the options"))
    items.sort(key=position)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[SETTINGS].until:
        item.config.stash[SESSION].note(f"no time was left for {item.name}")
        pytest.skip("no time is left: --seconds")


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether this is only to see that all runs."""
    return request.config.stash[SETTINGS].quick


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


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Session:
    """What is measured is written here. The memory of the machine comes first."""
    measured = request.config.stash[SESSION]
    if machine_floors.missing():
        measured.note(f"no floors: {machine_floors.missing()}")
    else:
        measured.bandwidths += map(machine_floors.bandwidth, request.config.stash[SETTINGS].threads)
    return measured


def _run_race(
    request: pytest.FixtureRequest, running: list[Race], session: Session, threads: int, device: str = "cpu"
) -> RunRace:
    effort, benchmark = request.config.stash[SETTINGS].effort, request.getfixturevalue("benchmark")

    def run(
        case: str,
        on: str,
        contenders: Mapping[str, Contender],
        floors: Floors = NO_FLOORS,
        also: str | None = None,
        once: Collection[str] = (),
        shortest: float = SHORTEST_SAMPLE,
    ) -> Race:
        suite = request.module.__name__.rpartition(".")[2].removeprefix("test_")
        race = Race(suite, case, on, threads, also, shortest, device)
        entered = race.enter(contenders, floors)
        with frozen_garbage():
            of_round = race.warm_up(entered, effort.patience, once)
            running.append(race)
            benchmark.group = case
            benchmark.pedantic(race.run_round, (entered,), rounds=effort.rounds(of_round))
        benchmark.extra_info.update(report.summary(race))
        session.races.append(race)
        return race

    return run


@pytest.fixture
def race(request: pytest.FixtureRequest, _our_time: list[Race], session: Session, threads: int) -> Iterator[RunRace]:
    """Run one race, ``race(case, input, contenders, floors)``. All of the test has ``threads``."""
    with num_threads(threads):
        yield _run_race(request, _our_time, session, threads)


@pytest.fixture
def most_threads(request: pytest.FixtureRequest) -> int:
    """The most of ``--threads``."""
    most = max(request.config.stash[SETTINGS].threads)
    if most == 1:
        pytest.skip("more threads than one are needed")
    return most


@pytest.fixture
def race_threads(
    request: pytest.FixtureRequest, _our_time: list[Race], session: Session, most_threads: int
) -> Iterator[RaceThreads]:
    """Race one call with the most threads against itself with one: ``race_threads(case, input, call, floors)``."""
    run = _run_race(request, _our_time, session, most_threads)

    def with_threads(number: int, call: Contender) -> None:
        torch.set_num_threads(number)
        call()

    def race_threads(case: str, on: str, call: Contender, floors: Floors) -> None:
        contenders = {
            f"{most_threads} threads": partial(with_threads, most_threads, call),
            "1 thread": partial(with_threads, 1, call),
        }
        run(f"{case}, scaling", on, contenders, floors)

    with num_threads(most_threads):
        yield race_threads


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the races of the GPU run."""
    chosen = request.config.stash[SETTINGS].device
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False (--device cpu --quick tries that all runs)")
    return chosen


@pytest.fixture(scope="session")
def gpu_session(request: pytest.FixtureRequest, device: str, quick: bool) -> Session:
    """As ``session``, with the memory of the GPU."""
    measured = request.config.stash[SESSION]
    if device == "cpu":
        measured.note("the races of the GPU were only tried, on the CPU: their figures and goals mean nothing")
    measured.copies = gpu.measure_copies([1 << 16] if quick else [1 << 24, 1 << 28, 1 << 30, 1 << 32], device)
    return measured


@pytest.fixture
def gpu_race(
    request: pytest.FixtureRequest, _our_time: list[Race], gpu_session: Session, device: str
) -> Iterator[RunRace]:
    """As ``race``, of work on the GPU, which the host only has to hand out."""
    with num_threads(1):
        yield _run_race(request, _our_time, gpu_session, 1, device)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["races"] = report.machine()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session, folder = config.stash[SESSION], config.stash[SETTINGS].results
    if not session.tables:
        return
    terminalreporter.section("races")
    for line in (report.MEANING, *session.notes):
        terminalreporter.write_line(line)
    terminalreporter.write_line(report.terminal(session, terminalreporter._tw.fullwidth))
    if folder is not None:
        report.write(session, report.machine(), folder, config.stash[SETTINGS].plots)
        terminalreporter.write_line(f"written: {folder}")
