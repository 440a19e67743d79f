"""Errors and warnings of the command line: one line, which names options instead of arguments."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from .._common.check import Argument, NamingError
from ._ranks import launch


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn an exception into one readable line and exit code 1; ``--debug`` lets it through."""

    @functools.wraps(command)
    def wrapped(debug: bool, **options: Any) -> None:
        try:
            command(debug=debug, **options)
        except KeyboardInterrupt:
            launch().tell("spin-fast: interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of our output is done, as head is
            settle_output()
            raise typer.Exit(1) from None
        except Exception as error:
            if debug or isinstance(error, typer.Exit):
                raise
            settle_output()
            launch().tell(f"spin-fast: error: {message_of(error)}")
            raise typer.Exit(1) from None

    paragraphs = (command.__doc__ or "").split("\n\n")
    wrapped.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # --help breaks lines itself
    return wrapped


def settle_output() -> None:
    """Write what is left for stdout; where that fails, drop it, since Python would tell of it once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings in one line each, without the place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"spin-fast: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        # joblib replaces a worker whose memory has grown, and loses no job by it: nothing that a user must know.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor", UserWarning)
        yield


@contextmanager
def ended_by_sigterm() -> Iterator[list[int]]:
    """Let SIGTERM, which clusters send before SIGKILL, end work as Ctrl-C does; yields the signals received."""
    signals: list[int] = []

    def interrupt(number: int, _: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)


def message_of(error: Exception) -> str:
    """The message in one line, with options in the place of arguments."""
    text = error.told(as_option) if isinstance(error, NamingError) else str(error)
    return " ".join(text.split()) or type(error).__name__


_FLAGS = {
    "undirected": "undirected",
    "self_loops": "self-loops",
    "download": "download",
    "model.batch_norm": "batch-norm",
    "model.calibrated": "calibrate",
}
_SAME_NAMES = (
    *("label", "coalesce", "root", "splits", "fold", "epochs", "patience", "schedule", "seed", "metric", "ensemble"),
    *("batch_size", "learning_rate", "weight_decay", "class_weight"),
)
_OPTIONS = {
    "features": "--node-features",
    "one_hot": "--one-hot",
    "url": "SPIN_FAST_TU_URL or SPIN_FAST_OGB_URL",
    "features.num_hops": "--hops",
    "features.operator": "--operator",
    "model.branches": "--branches",
    "model.hidden_features": "--hidden",
    "model.num_layers": "--layers",
    "model.dropout": "--dropout",
}
_OPTIONS |= {name: f"--{name.replace('_', '-')}" for name in _SAME_NAMES}


def as_option(argument: Argument) -> str:
    """An argument as the command line has it, or as Python has it where there is no such option."""
    name, value = argument
    if name == "resume":
        return "training without --resume"  # the only value that a message gives it
    if name == "model.attention":
        return f"--readout {'attention' if value else 'sum'}"
    if name in _FLAGS:
        return f"--{'' if value else 'no-'}{_FLAGS[name]}"
    if name not in _OPTIONS:
        return str(argument)
    return _OPTIONS[name] if value is ... else f"{_OPTIONS[name]} {_typed(name, value)}"


def _typed(name: str, value: Any) -> str:
    """A value as a shell leaves it: names as ``--label`` and ``--node-features`` take them, others as text."""
    if name not in ("features", "label"):
        return "none" if value is None else str(value)
    text = "" if value is None else value
    if not isinstance(text, str):
        plain = all(isinstance(name, str) and re.fullmatch(r"[^,\[\]{}\s]+( [^,\[\]{}\s]+)*", name) for name in text)
        text = ",".join(text) + "," * (len(text) == 1) if plain else json.dumps(text, ensure_ascii=False)
    if re.fullmatch(r"[\w.+/-]+", text):
        return text
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'
