"""``spin-fast bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._app import Debug, app
from ._errors import one_line_errors
from ._options import Root, data_option


@app.command(
    epilog="Example: spin-fast bench --quick",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@one_line_errors
def bench(
    context: typer.Context,
    root: Root = None,
    names: Annotated[
        str | None, data_option("--datasets", help="Which of them, with commas between.", show_default="those found")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few rounds on digits, to see that all runs.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The long races too; with all data sets they take hours.")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="Write JSON, a table and plots there.")] = None,
    debug: Debug = False,
) -> None:
    """Time the operations, training and prediction against their rivals: a few minutes on digits, a table as each ends.

    Further options go to pytest. Accuracy at equal settings: python -m spin_fast.benchmarks.studies.accuracy. Needs the
    extra: pip install 'spin_fast\\[bench]'.
    """
    try:
        import pytest
        import pytest_benchmark  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}; the benchmarks need: pip install 'spin_fast[bench]'") from None
    arguments = ["--pyargs", "spin_fast.benchmarks", "-p", "spin_fast.benchmarks.harness.plugin"]
    arguments += ["-o", "addopts="]  # of the folder in which this is run: a race has the machine for itself
    for option, value in (("--root", root), ("--datasets", names), ("--results", results)):
        arguments += [] if value is None else [f"{option}={value}"]
    arguments += [option for option, given in (("--quick", quick), ("--full", full)) if given]
    raise typer.Exit(int(pytest.main([*arguments, *context.args])))
