"""Progress bars on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(of: str, total: int | None, show: bool, *, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar, if ``show``; yields ``advance(text, advance=1)``. ``total`` is None where it is unknown.

    The time left is by the speed of the last ten minutes, to which what was ``done`` before adds nothing.
    """
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
    with Progress(*columns, speed_estimate_period=600) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda text, advance=1: bar.update(task, advance=advance, description=text)


class _Download:
    """The interface that pooch's downloaders call, on a bar of rich."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task
        self.total = 0  # set by pooch; 0 if the site does not tell

    def update(self, size: int) -> None:
        self.bar.update(self.task, advance=size, total=self.total or None)

    def reset(self) -> None:
        self.bar.update(self.task, completed=0)

    def close(self) -> None:
        self.bar.refresh()


@contextmanager
def download_bar(of: str, show: bool) -> Iterator[Any]:
    """The ``progressbar`` of a pooch downloader, on stderr; False, which stands for none, unless ``show``."""
    if not show:
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(of), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter)) as bar:
        yield _Download(bar, bar.add_task("", total=None))
