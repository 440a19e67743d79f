"""The app ``spin-fast``, and how its commands print what they have to say: for people, or as JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from torch import Tensor

from .. import __version__

app = typer.Typer(
    help="SPIN graph classification: message passing once, before training.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()


def _version(show: bool) -> None:
    if show:
        print(f"spin-fast {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@dataclass
class Report:
    """What a command has to say.

    Attributes:
        facts: for machines: numbers as they are, under keys that the help of the command names.
        shown: the same for people: what the console is to print.
        exit_code: of the command.
    """

    facts: dict[str, Any]
    shown: list[RenderableType]
    exit_code: int = 0


def reports(command: Callable[..., Report]) -> Callable[..., None]:
    """Print what a command returns: for people, or with ``--json`` as one document, and all else on stderr."""

    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool = False, **options: Any) -> None:
        if as_json:
            with contextlib.redirect_stdout(sys.stderr):  # progress bars and what other libraries print, too
                report = command(*args, **options)
            print(document_of(report))
        else:
            report = command(*args, **options)
            for part in report.shown:
                console.print(part, highlight=False, soft_wrap=not isinstance(part, Table))
        sys.stdout.flush()  # here, where a closed pipe is no surprise
        if report.exit_code:
            raise typer.Exit(report.exit_code)

    return wrapped


def document_of(report: Report) -> str:
    """Its facts as JSON."""
    return json.dumps(_plain(report.facts), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """As JSON has it, where there is neither NaN nor infinity."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def by_branch(ratios: Iterable[float]) -> str:
    return "  ".join(f"{r}: {ratio:.3g}x" for r, ratio in enumerate(ratios))
