"""A progress bar on the terminal, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(of: str, total: int | None, show: bool) -> Iterator[Callable[..., None]]:
    """A function to be called with what to show and, if it is not 1, how much is done; ``total`` None is unknown."""
    if not show:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(of),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, advance=1: bar.update(task, advance=advance, description=text)


class _Download:
    """What pooch calls while it downloads, passed on to a bar of rich."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task, self._total = bar, task, 0

    @property
    def total(self) -> int:
        """Bytes in all; 0 where the site does not say."""
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value
        self.bar.update(self.task, total=value or None)

    def update(self, size: int) -> None:
        self.bar.update(self.task, advance=size)

    def reset(self) -> None:
        self.bar.update(self.task, completed=0)

    def close(self) -> None:
        self.bar.refresh()


@contextmanager
def download_bar(of: str, show: bool) -> Iterator[Any]:
    """The ``progressbar`` of a downloader of pooch: bytes on the terminal's error stream; False for none."""
    if not show:
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(of), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter)) as bar:
        yield _Download(bar, bar.add_task("", total=None))
