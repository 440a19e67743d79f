"""The app ``spin-fast``, what its commands have in common, and how they print a result: for people, or as JSON."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, RenderableType
from rich.table import Table

from .. import __version__, build_info, native_available
from ._errors import one_line_errors, one_line_warnings
from ._ranks import launch

app = typer.Typer(
    help="SPIN graph classification: message passing once, before training.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(highlight=False)


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
    """The result of a command.

    Attributes:
        facts: for machines: numbers as they are, under keys that the help of the command names.
        shown: the same for people: what the console is to print.
        exit_code: of the command.
    """

    facts: dict[str, Any]
    shown: list[RenderableType]
    exit_code: int = 0


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass
class _Common:
    """Options of every command that returns a report."""

    threads: Annotated[
        int,
        typer.Option(min=1, help="CPU threads, at most one per CPU; small batches gain little from more than 1."),
    ] = 1
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON: all of stdout is one document.")
    ] = False
    debug: Debug = False


def command(example: str, *, takes_ranks: bool = False) -> Callable[[Callable[..., Report]], Callable[..., None]]:
    """Add a command that returns a report to the app; a parameter that is a dataclass adds its fields as options.

    One that ``takes_ranks`` may be run by several processes of torchrun.
    """

    def add(function: Callable[..., Report]) -> Callable[..., None]:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
        parameters["common"] = inspect.Parameter("common", inspect.Parameter.KEYWORD_ONLY, annotation=_Common)
        groups: dict[str, Any] = {
            name: parameter.annotation for name, parameter in parameters.items() if is_dataclass(parameter.annotation)
        }

        @functools.wraps(function)
        def run(**options: Any) -> None:
            for name, group in groups.items():
                options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
            common = options.pop("common")
            if launch().number > 1 and not takes_ranks:
                raise ValueError(f"{function.__name__} works in one process: run it without torchrun")
            torch.set_num_threads(min(common.threads, os.cpu_count() or 1))
            # With --json, what progress bars and other libraries print goes to stderr, too.
            output = contextlib.redirect_stdout(sys.stderr) if common.as_json else contextlib.nullcontext()
            with output, one_line_warnings():
                report = function(**options)
            if common.as_json:
                print(document_of(report))
            else:
                for part in report.shown:
                    console.print(part, soft_wrap=not isinstance(part, Table))
            sys.stdout.flush()  # here, where a closed pipe is no surprise
            if report.exit_code:
                raise typer.Exit(report.exit_code)

        expanded: list[inspect.Parameter] = []
        for name, parameter in parameters.items():
            group = groups.get(name)
            if group is None:
                expanded.append(parameter)
                continue
            kinds: dict[str, Any] = {}
            for base in reversed(group.__mro__):  # whose annotations are names of its own module
                kinds |= inspect.get_annotations(base, eval_str=True)
            options = inspect.signature(group).parameters.values()
            expanded += [option.replace(annotation=kinds[option.name]) for option in options]
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in expanded]
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return app.command(epilog=f"Example: {example}")(one_line_errors(run))

    return add


def document_of(report: Report) -> str:
    return json.dumps(_plain(report.facts), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """The value in the types of JSON, which has neither NaN nor infinity: both become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def kernels_on(device: torch.device) -> str:
    """Which kernels run on ``device``, and on what."""
    facts = build_info()
    on = f"{torch.get_num_threads()} CPU thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if native_available(device):
        return f"native ({facts['isa'] if device.type == 'cpu' else 'CUDA'}), {on}"
    return f"reference ({facts['reason' if device.type == 'cpu' else 'cuda_reason']}), {on}"


def by_branch(ratios: Iterable[float]) -> str:
    return "  ".join(f"{r}: {ratio:.3g}x" for r, ratio in enumerate(ratios))
