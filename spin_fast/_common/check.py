"""Validation of arguments: one function per kind of argument, one style of message.

Every message reads ``<argument> must <expected>, got <value>``, and the error carries all three. Only metadata (type,
shape, dtype, device) is read here, at each call; contents (offsets, index ranges) are read by ``ops.check_csr`` and
``ops.check_segments``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
STORED = (*FLOATS, torch.bfloat16, torch.float16)  # what the operations read and write; they compute in FLOATS
INTEGERS = (torch.int32, torch.int64)
OPERATORS = ("adj", "sym", "sym+adj", "rw")


class Argument(NamedTuple):
    """An argument named in a message, maybe with a value to give it: ``root``, ``features='degree'``."""

    name: str
    value: Any = ...  # none

    def __str__(self) -> str:
        return self.name if self.value is ... else f"{self.name}={self.value!r}"


class NamingError(Exception):
    """An error whose message names arguments, so that the command line can name its options instead.

    Its ``args`` are the parts of the message: text, and each :class:`Argument`.
    """

    def told(self, form: Callable[[Argument], str]) -> str:
        """Return the message with the arguments in another form."""
        return "".join(form(part) if isinstance(part, Argument) else part for part in self.args)

    def __str__(self) -> str:
        return self.told(str)


class ArgumentError(NamingError):
    """An argument is wrong.

    Attributes:
        argument: its name.
        expected: what it must be or do.
        value: what it is: the value, or its type, dtype, shape or device.
    """

    def __init__(self, argument: str, expected: str, value: Any) -> None:
        super().__init__(argument, expected, value)
        self.argument, self.expected, self.value = argument, expected, value

    def told(self, form: Callable[[Argument], str]) -> str:
        return f"{form(Argument(self.argument))} must {self.expected}, got {shown(self.value)}"


class ArgumentTypeError(ArgumentError, TypeError):
    pass


class ArgumentValueError(ArgumentError, ValueError):
    pass


def shown(value: Any) -> str:
    """A value as it stands in a message: ``float32`` of that dtype."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, torch.dtype | torch.layout | torch.device):
        return str(value).removeprefix("torch.")
    return f"{value!r:.100}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    *others, last = map(shown, dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def tensor(
    name: str,
    value: Any,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Check type, dtype, shape and device; a string in ``shape`` stands for any size and is used in the message."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(name, "be a torch.Tensor", type(value))
    if value.layout is not torch.strided:
        raise ArgumentTypeError(name, "be a dense (strided) tensor", value.layout)
    if value.dtype not in dtypes:
        raise ArgumentTypeError(name, f"be {_names(dtypes)}", value.dtype)
    sizes = value.shape
    fits = len(sizes) == len(shape)
    for size, want in zip(sizes, shape, strict=False):  # a loop: half the time of all() at every call
        fits = fits and (isinstance(want, str) or size == want)
    if not fits:
        raise ArgumentValueError(name, f"have shape [{', '.join(map(str, shape))}]", list(sizes))
    if device is not None and value.device != device:
        raise ArgumentValueError(name, f"be on {device}", value.device)


def integer(name: str, value: Any, minimum: int, *, bits: int = 63) -> Any:
    """Check for a plain integer of at least ``minimum`` and so many bits (a bool is not one).

    By default they are what kernels take.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, torch.SymInt)):
        raise ArgumentTypeError(name, "be an int", type(value))
    value = int(value) if isinstance(value, np.integer) else value
    if value < minimum:
        raise ArgumentValueError(name, f"be at least {minimum}", value)
    if isinstance(value, int) and value >= 2**bits:
        raise ArgumentValueError(name, f"be below 2**{bits}", value)
    return value


def integers(name: str, values: Any, minimum: int) -> list[int]:
    """Check for a sequence of plain integers of at least ``minimum``."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ArgumentTypeError(name, "be a sequence of ints", type(values))
    return [integer(name, value, minimum) for value in values]


def number(name: str, value: Any, minimum: float) -> Any:
    """Check for a plain finite number of at least ``minimum`` (neither a bool nor NaN is one)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number, torch.SymInt, torch.SymFloat)):
        raise ArgumentTypeError(name, "be a number", type(value))
    value = float(value) if isinstance(value, np.number) else value
    if not value >= minimum:
        raise ArgumentValueError(name, f"be at least {minimum}", value)
    if value == math.inf:
        raise ArgumentValueError(name, "be finite", value)
    return value


def flag(name: str, value: Any) -> bool:
    """Check for a bool, numpy's too."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(name, "be a bool", type(value))
    return bool(value)


def operator(value: Any) -> str:
    """Check for the name of a graph operator."""
    if value not in OPERATORS:
        raise ArgumentValueError("operator", f"be one of {', '.join(OPERATORS)}", value)
    return value


def operators(value: str | Sequence[str]) -> str:
    """Check for one graph operator or several, in a sequence or with commas between them; returns the latter."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence):
        raise ArgumentTypeError("operator", "be a str or a sequence of them", type(value))
    if not names or len({*map(operator, names)}) < len(names):
        raise ArgumentValueError("operator", "name at least one, and each once", value)
    return ",".join(names)


def offsets_shape(name: str, value: Any, device: torch.device | None = None) -> None:
    """Check for the metadata of an offset vector: int64, one axis, at least one entry."""
    tensor(name, value, ("entries + 1",), (torch.int64,), device)
    if value.numel() == 0:
        raise ValueError(f"{name} must have at least one entry (the leading 0), got none")
