"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.is_file(), reason="no README.md beside the tests: this is not a checkout")


def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out.count("[") >= 3


def test_pictures_and_pages_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README.read_text()):
        assert (README.parent / target).is_file(), target
