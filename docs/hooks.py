"""What the site adds to its pages: cross references of docstrings, and the options of every command."""

from __future__ import annotations

import re
from typing import Any

import griffe
import typer.cli
import typer.main

COMMANDS = "<!-- commands -->"


class Docstrings(griffe.Extension):
    """Make of docstrings what mkdocstrings reads right.

    Roles, such as ``:meth:`load```, become references. A colon in what is returned does not end its type. Errors in one
    line become items of their own, and so do arguments that are described together.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r":(?:class|func|meth):`([\w.]+)`", r"[`\1`][]", obj.docstring.value)
        text = re.sub(r":\w+:(`[\w.]+`)", r"\1", text)
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # before a block of code
        if obj.is_function and obj.returns is not None:
            text = text.replace("\nReturns:\n    ", f"\nReturns:\n    {obj.returns}: ")
        text = re.sub(r"\. (?=[A-Z]\w*Error(, \w+)*: )", ".\n    ", text)
        text = re.sub(r"^    (\w+Error), (?=\w+Error: )", r"    \1 | ", text, flags=re.MULTILINE)
        several = r"^    (\w+(?:, \w+)+): (.*(?:\n {5,}.*)*)"
        obj.docstring.value = re.sub(several, self._one_by_one, text, flags=re.MULTILINE)

    @staticmethod
    def _one_by_one(item: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {item[2]}" for name in item[1].split(", "))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what ``spin-fast COMMAND --help`` says in the place that a page keeps for it."""
    if COMMANDS not in markdown:
        return markdown
    from spin_fast.cli import app

    group = typer.main.get_group(app)
    context = group.make_context("spin-fast", [], resilient_parsing=True)
    commands = [
        typer.cli.get_docs_for_click(obj=command, ctx=context, call_prefix="spin-fast", indent=1)
        for command in group.commands.values()
    ]
    return markdown.replace(COMMANDS, "".join(commands))
