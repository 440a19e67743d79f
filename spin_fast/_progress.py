"""A progress bar on the terminal, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(of: str, total: int, show: bool) -> Iterator[Callable[..., None]]:
    """A function to be called with what to show and, if it is not 1, how much is done."""
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
