"""Errors as people at a terminal want them: one line, in words of the command line."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from .. import datasets
from ..training.resume import START_ANEW, OtherRunError


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn an exception into one readable line and exit code 1; ``--debug`` lets it through."""

    @functools.wraps(command)
    def wrapped(*args: Any, debug: bool = False, **options: Any) -> None:
        try:
            command(*args, debug=debug, **options)
        except KeyboardInterrupt:
            print("spin-fast: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # who read our output has seen enough, as head does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            if debug or isinstance(error, typer.Exit):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, datasets.DatasetError):
                reason = _as_options(reason)
            print(f"spin-fast: error: {reason}", file=sys.stderr)
            raise typer.Exit(1) from None

    paragraphs = (command.__doc__ or "").split("\n\n")
    wrapped.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # --help breaks lines itself
    return wrapped


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings in one line each, without the place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"spin-fast: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _as_options(reason: str) -> str:
    """What to do, in the words of the command line."""
    words = {"download=True": "--download", "by features": "by --node-features"}
    words |= {f"by {argument}": f"by --{argument}" for argument in ("root", "splits")}
    words["by url"] = "by SPIN_FAST_TU_URL or SPIN_FAST_OGB_URL"
    for argument, option in words.items():
        reason = reason.replace(argument, option)
    arguments = re.compile(r"\b(features|label|undirected|coalesce|self_loops)=")
    done, start = [], 0
    for found in arguments.finditer(reason):
        if found.start() >= start and (literal := _literal(reason[found.end() :])) is not None:
            value, length = literal
            done += [reason[start : found.start()], as_option(found[1], value)]
            start = found.end() + length
    return "".join(done) + reason[start:]


@contextmanager
def names_in_options() -> Iterator[None]:
    """Say what ``--node-features`` or ``--label`` must be in the words of the command line."""
    try:
        yield
    except (TypeError, ValueError) as error:
        argument, must, rest = str(error).partition(" must ")
        if not must or argument not in ("features", "label"):
            raise
        for python, words in _WORDS.items():
            rest = rest.replace(python, words)
        rest, got, value = rest.partition(", got ")
        literal = _literal(value)
        told = value if literal is None else json.dumps(literal[0], ensure_ascii=False)
        option = "--node-features" if argument == "features" else "--label"
        raise ValueError(f"{option} must {rest}{got}{told}") from error


_WORDS = {
    "a name (str), a list of names, or None": "a name, or several",
    "a list of names (str) or of {'column': name, ...}": 'names or of the form {"column": NAME, ...}',
    " (str)": "",
}  # of Python, and of the command line


def _literal(text: str) -> tuple[Any, int] | None:
    """The Python value that a text begins with, and its length."""
    for end in re.finditer(r"['\"\]}]|\b", text):
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(text[: end.end()]), end.end()
    return None


def as_option(argument: str, value: Any) -> str:
    """An argument of ``datasets.read`` as the command line has it."""
    if argument in ("undirected", "self_loops"):
        return f"--{'' if value else 'no-'}{argument.replace('_', '-')}"
    return f"--{'node-' if argument == 'features' else ''}{argument} {_typed_names(value)}"


def _typed_names(value: Any) -> str:
    """One name, several, or JSON, as ``--label`` and ``--node-features`` take them and a shell leaves them."""
    text = "" if value is None else value
    if not isinstance(text, str):
        plain = all(isinstance(name, str) and re.fullmatch(r"[^,\[\]{}\s]+( [^,\[\]{}\s]+)*", name) for name in text)
        text = ",".join(text) + "," * (len(text) == 1) if plain else json.dumps(text, ensure_ascii=False)
    if re.fullmatch(r"[\w.+/-]+", text):
        return text
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'


_OPTIONS = {
    "seed": "--seed",
    "batch_size": "--batch-size",
    "learning_rate": "--learning-rate",
    "schedule": "--schedule",
    "weight_decay": "--weight-decay",
    "class_weight": "--class-weight",
    "features: hops": "--hops",
    "features: operator": "--operator",
    "model.hidden_features": "--hidden",
    "model.num_layers": "--layers",
    "model.attention": "--readout",
    "model.batch_norm": "--batch-norm",
    "model.calibrated": "--calibrate",
    "model.dropout": "--dropout",
}  # of what a run that goes on must have as before


@contextmanager
def errors_in_options(out: Path, dataset: str, fold: int | None) -> Iterator[None]:
    """Say what keeps a run from going on in the words of the command line."""
    try:
        yield
    except ValueError as error:
        if START_ANEW not in (reason := str(error)):
            raise
        if isinstance(error, OtherRunError):
            reason = _in_options(error, f"the run in {out}", dataset, fold)
            reason += f"; the same command goes on, {START_ANEW}"
        subject, must, rest = reason.partition(" must ")
        if subject in ("epochs", "patience", "epochs and schedule"):
            reason = re.sub(r"(epochs|patience|schedule)", r"--\1", subject) + must + rest
        raise ValueError(reason.replace(START_ANEW, "without --resume training starts anew")) from error


def _in_options(error: OtherRunError, run: str, dataset: str, fold: int | None) -> str:
    if error.name in ("train", "validation"):
        return f"{'without --fold' if fold is None else f'--fold {fold}'}: {run} has another split (see --splits, too)"
    if error.name == "metric":
        return f"{dataset}: {run} has another metric (see --metric and --label)"
    if error.name in ("features: graphs", "features: sizes", "features: labels"):
        return f"{dataset}: {run} is of other graphs or labels (see --label, too)"
    if error.name in ("features: features", "features: rows"):
        options = "--node-features, --degree, --standardize, --features, --undirected, --coalesce, --self-loops"
        return f"{dataset}: {run} is of other node features or edges (see {options})"
    here, there = (_typed(_OPTIONS.get(error.name, error.name), value) for value in (error.here, error.there))
    return f"{here}: {run} has {there}"


def _typed(option: str, value: Any) -> str:
    """An option as it is given."""
    if option in ("--batch-norm", "--calibrate"):
        return option if value else f"--no-{option.removeprefix('--')}"
    if option == "--readout":
        value = "attention" if value else "sum"
    return f"{option} {'none' if value is None else value}"
