"""What is private to torch is used in one module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import spin_fast

PACKAGE = Path(spin_fast.__file__).parent
COMPAT = PACKAGE / "_common" / "torch_compat.py"


def private_uses(path: Path) -> set[str]:
    """Names with a leading underscore that are taken from torch, by attribute or by import."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")}
            name = node.module or ""
        else:
            continue
        if re.fullmatch(r"torch(\.\w+)*\._[^_]\w*(\.\w+)*", name):
            found.add(name)
    return {name for name in found if name.startswith("torch")}


MODULES = sorted({*PACKAGE.rglob("*.py")} - {COMPAT, *PACKAGE.glob("benchmarks/**/*.py")})  # rivals use what they can


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_private_is_used_elsewhere(path: Path) -> None:
    assert private_uses(path) == set()


def test_the_module_is_where_it_is_used() -> None:
    assert len(private_uses(COMPAT)) > 5
