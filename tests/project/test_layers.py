"""A module imports only from the layers below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers import ROOT

import spin_fast

PACKAGE = Path(spin_fast.__file__).parent
# Top to bottom; modules of one line may not import each other.
LAYERS = [
    {"cli"},
    {"plots", "sklearn"},
    {"selection"},
    {"training"},
    {"datasets", "nn"},
    {"features", "transforms"},
    {"graphs"},
    {"ops"},
    {"_common"},
]
HEIGHT = {name: len(LAYERS) - depth for depth, layer in enumerate(LAYERS) for name in layer}


def modules() -> list[Path]:
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py" and "benchmarks" not in path.parts
    )


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_layers(path: Path) -> set[str]:
    """Layers of this package that a file imports, at the top or inside a function."""
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("spin_fast") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert not (node.module or "").startswith("spin_fast")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = layer_of(path)
    assert here in HEIGHT, f"{here} has no place in the layers"
    for other in imported_layers(path) - {here}:
        if other in HEIGHT:
            assert HEIGHT[other] < HEIGHT[here], f"{here} imports {other}, which is not below it"


def test_kernels_see_no_torch_header() -> None:
    csrc = ROOT / "csrc"
    if not csrc.is_dir():
        pytest.skip("no csrc/ beside the tests: this is not a checkout")
    below_the_binding_line = [*csrc.rglob("*.inl"), csrc / "kernels.h", csrc / "check.h", *csrc.glob("cpu/isa.*")]
    below_the_binding_line += [csrc / "cpu" / f"{isa}.cpp" for isa in ("baseline", "avx2", "avx512")]
    for path in below_the_binding_line:
        assert "torch" not in "".join(line for line in path.read_text().splitlines() if line.startswith("#include"))
    for path in csrc.rglob("*.*"):
        assert "ATen" not in path.read_text()
