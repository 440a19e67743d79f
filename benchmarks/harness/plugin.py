"""pytest plugin of the suite: options, inputs, the ``race`` fixture, and the report.

``conftest.py`` loads it. pytest knows its options where the folder is named (``pytest benchmarks/``), or with ``-p
spin_fast.benchmarks.harness.plugin`` beside ``--pyargs spin_fast.benchmarks``; otherwise the defaults hold.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    "full: left out but for --full",
    "scaling: run with the most threads only, and not where that is one",
)


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
    group.addoption("--threads", type=numbers, metavar="NUMBERS", help="comma-separated (default: 1; full: 1,2)")
    group.addoption("--quick", action="store_true", help="few rounds, small inputs, digits alone: to see that all runs")
    group.addoption(
        "--full",
        action="store_true",
        help="all races, which take hours: batches of several sizes, two threads, a graph of a million nodes, the "
        "epochs of ever denser graphs",
    )
    group.addoption("--results", type=Path, metavar="DIR", help="write results.json, results.md and plots there")
    group.addoption("--rounds", type=int, metavar="N", help="at most so many (default: 15; quick: 3)")
    group.addoption(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="of a race: fewer rounds, but at least 3, where they need more than this; a rival whose single call needs "
        "twice as much is timed once (default: 5; quick: 0.2)",
    )
    group.addoption("--device", choices=("cuda", "cpu"), help="of the races on the GPU; cpu only tries that they run")
    group.addoption("--seconds", type=float, help="start no test after so many")
    group.addoption("--no-plots", action="store_true", help="with --results: without plots")


@dataclass(frozen=True)
class Settings:
    """The options, with their defaults filled in."""

    datasets: list[str]
    root: str | None
    threads: list[int]
    most_threads: int
    quick: bool
    full: bool
    effort: Effort
    results: Path | None
    plots: bool
    device: str
    until: float

    @property
    def lacks_gpu(self) -> bool:
        return self.device == "cuda" and not torch.cuda.is_available()

    @classmethod
    def of(cls, config: pytest.Config) -> Settings:
        def option(name: str, default: Any = None) -> Any:
            # Not even registered where pytest met the conftest too late for its options.
            value = config.getoption(f"--{name}", None)
            return default if value is None else value

        quick, full, root = option("quick", False), option("full", False), option("root")
        threads = option("threads", [number for number in (1, 2) if number <= report.available_cores()])
        known = datasets.names(root)
        preferred = DATASETS[:1] if quick else DATASETS
        chosen = option("datasets", [name for name in preferred if name in known])
        if unknown := sorted(set(chosen) - set(known)):
            raise pytest.UsageError(f"--datasets: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(
            datasets=chosen,
            root=root,
            threads=threads if full or option("threads") else threads[:1],
            most_threads=max(threads),
            quick=quick,
            full=full,
            effort=Effort(option("budget", 0.2 if quick else 5.0), 3, option("rounds", 3 if quick else 15)),
            results=option("results"),
            plots=not option("no-plots", False),
            device=option("device", "cuda"),
            until=time.monotonic() + option("seconds", float("inf")),
        )


SETTINGS = pytest.StashKey[Settings]()
SESSION = pytest.StashKey[Session]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SETTINGS] = settings = Settings.of(config)
    config.stash[SESSION] = session = Session()
    if settings.results is not None:
        try:
            report.check_folder(settings.results)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    report.load()
    if find_spec("torch_geometric") is None:
        session.note(
            "torch-geometric is not installed: training and prediction against its GIN and GCN are left out, and so "
            "are its readouts and its SIGN; pip install torch-geometric"
        )
    if settings.lacks_gpu:
        session.note("no GPU: its races are left out (--device cpu --quick tries that they run)")
    if not settings.full:
        session.note("--full adds two threads, batches, a graph of a million nodes, and epochs of ever denser graphs")
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    for warning in ("Sparse CSR tensor support", "Sparse CSC tensor support", "Sparse invariant checks"):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script")
    if not config.getoption("--benchmark-compare"):
        config.option.benchmark_quiet = True  # pytest-benchmark's own table knows no rivals


def pytest_report_header(config: pytest.Config) -> list[str]:
    machine = f"races: {report.describe(report.machine())}; load {report.load():.1f}, should be near 0"
    return [machine, *config.stash[SESSION].notes]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    settings = metafunc.config.stash[SETTINGS]
    if "race" in metafunc.fixturenames:
        threads = settings.threads
        if metafunc.definition.get_closest_marker("scaling"):
            threads = [settings.most_threads] if settings.most_threads > 1 else []
        metafunc.parametrize("threads", threads)
    if "dataset" in metafunc.fixturenames:
        chosen = settings.datasets
        if marker := metafunc.definition.get_closest_marker("prefer"):
            chosen = [name for name in chosen if name in marker.args] or chosen[:1]
        metafunc.parametrize("dataset", chosen)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One thread first: the idle threads of a wider race may still spin, and count as CPU time. Then by data set.

    Left out are the long races without --full, and those of the GPU where there is none.
    """
    settings = config.stash[SETTINGS]

    def position(item: pytest.Item) -> tuple[int, int]:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        threads, dataset = parameters.get("threads"), parameters.get("dataset")
        return (
            settings.threads.index(threads) if threads in settings.threads else len(settings.threads),
            settings.datasets.index(dataset) if dataset in settings.datasets else len(settings.datasets),
        )

    def left_out(item: pytest.Item) -> bool:
        needs_gpu = settings.lacks_gpu and "device" in getattr(item, "fixturenames", ())
        return needs_gpu or (not settings.full and item.get_closest_marker("full") is not None)

    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = sorted((item for item in items if not left_out(item)), key=position)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash[SETTINGS].until:
        item.config.stash[SESSION].note(f"no time was left for {item.name}")
        pytest.skip("no time is left: --seconds")


@pytest.fixture(scope="session")
def settings(request: pytest.FixtureRequest) -> Settings:
    """The options."""
    return request.config.stash[SETTINGS]


@pytest.fixture(scope="session")
def quick(settings: Settings) -> bool:
    """Whether this is only to see that all runs."""
    return settings.quick


@lru_cache(maxsize=1)
def _load(name: str, root: str | None) -> GraphBatch:
    return datasets.load(name, root)


@pytest.fixture
def graphs(dataset: str, settings: Settings) -> GraphBatch:
    """The whole data set."""
    return _load(dataset, settings.root)


@pytest.fixture
def _our_time(request: pytest.FixtureRequest) -> list[Race]:
    """Has pytest-benchmark read our contender's time, whatever its rivals take: its numbers are ours, per call."""
    running: list[Race] = []

    def our_time() -> float:
        return sum(sum(race.seconds[race.ours]) for race in running)

    request.node.add_marker(pytest.mark.benchmark(timer=our_time))
    return running


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest, settings: Settings) -> Session:
    """What is measured is written here. The memory of the machine comes first."""
    measured = request.config.stash[SESSION]
    if machine_floors.missing():
        measured.note(f"no floors of memory: {machine_floors.missing()}")
    else:
        measured.bandwidths += map(machine_floors.bandwidth, settings.threads)
    return measured


@dataclass
class RaceRunner:
    """Runs the race of a test: ``race(case, input, contenders, floors)``."""

    request: pytest.FixtureRequest
    running: list[Race]
    session: Session
    threads: int
    device: str = "cpu"

    def __call__(
        self,
        case: str,
        on: str,
        contenders: Mapping[str, Contender],
        floors: Floors | None = None,
        *,
        ours: int = 1,
        once: Collection[str] = (),
        shortest: float = SHORTEST_SAMPLE,
    ) -> Race:
        """Ratios are taken to the first contender, and to :attr:`Race.second` if at least two are ``ours``, the first.

        Rivals of ``once`` are timed once, without rounds; a sample lasts ``shortest`` seconds at least.
        """
        effort, benchmark = self.request.config.stash[SETTINGS].effort, self.request.getfixturevalue("benchmark")
        suite = self.request.module.__name__.rpartition(".")[2].removeprefix("test_")
        race = Race(suite, case, on, self.threads, shortest, self.device)
        entered = race.enter(contenders, floors or {}, ours)
        with frozen_garbage():
            seconds_of_round = race.warm_up(entered, effort.patience, once)
            self.running.append(race)
            benchmark.group = case
            benchmark.pedantic(race.run_round, (entered,), rounds=effort.rounds(seconds_of_round))
        benchmark.extra_info.update(report.summary(race))
        self.session.races.append(race)
        return race


@pytest.fixture
def race(request: pytest.FixtureRequest, _our_time: list[Race], session: Session, threads: int) -> Iterator[RaceRunner]:
    """Run one race. All of the test has ``threads``."""
    with num_threads(threads):
        yield RaceRunner(request, _our_time, session, threads)


@pytest.fixture(scope="session")
def device(settings: Settings) -> str:
    """Where the races of the GPU run."""
    return settings.device


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
) -> Iterator[RaceRunner]:
    """As ``race``, of work on the GPU, which the host only has to hand out."""
    with num_threads(1):
        yield RaceRunner(request, _our_time, gpu_session, 1, device)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["races"] = report.machine()


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """No dot for a race that is over: it shows its table."""
    quiet = report.passed and report.when == "call" and config.get_verbosity() <= 0
    return ("passed", "", "") if quiet else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Show the race of a test as it ends, whatever reads the output."""
    races, items = item.config.stash[SESSION].races, item.session.items
    known = len(races)
    result = yield
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    for race in races[known:]:
        table = report.race_table(race)
        reporter.ensure_newline()
        reporter.write(f"[{items.index(item) + 1}/{len(items)}] {report.text(table, _width(reporter))}")
        reporter.flush()
    return result


def _width(reporter: pytest.TerminalReporter) -> int:
    """Of the terminal; where there is none, what the table of a race needs."""
    return reporter._tw.fullwidth if reporter.isatty else 100


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session, settings = config.stash[SESSION], config.stash[SETTINGS]
    tables = [*session.tables(races=False), *([session.summary] if session.races else [])]
    if not tables:
        return
    terminalreporter.section("races")
    for table in tables:
        terminalreporter.write(report.text(table, _width(terminalreporter)))
    for line in (report.MEANING, *session.notes):
        terminalreporter.write_line(textwrap.fill(line, _width(terminalreporter)))
    if settings.results is not None:
        report.write(session, report.machine(), settings.results, settings.plots)
        terminalreporter.write_line(f"written: {settings.results}")
