"""What README, CONTRIBUTING and the site show: code runs, commands and options exist, every public name has a place."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer.main
from helpers import ROOT
from markdown_it import MarkdownIt
from markdown_it.token import Token
from torch.utils import cpp_extension
from typer.testing import CliRunner

import spin_fast
from spin_fast.cli import app
from spin_fast.datasets import DatasetError

pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").is_file(), reason="no README.md beside the tests: this is not a checkout"
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
NOT_RUN = {"", "bibtex", "cpp", "text"}  # C++ is compiled all at once
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
DATA = Path(os.environ.get("SPIN_FAST_DATA", ROOT.parent / "shared" / "data")).absolute()  # of real datasets
DOWNLOADED = ("Cora",)
OPTIONAL = {"dgl", "networkx", "ogb", "pyarrow", "rdkit", "torch_geometric"}


def fences(page: Path) -> list[Token]:
    return [token for token in MarkdownIt().parse(page.read_text()) if token.type == "fence"]


def code_spans(page: Path) -> list[str]:
    parts = [part for token in MarkdownIt().parse(page.read_text()) for part in token.children or ()]
    return [part.content for part in parts if part.type == "code_inline"]


def run_python(page: Path, block: Token, namespace: dict[str, Any]) -> str:
    """Run a block with the lines of its page, and compare what it prints with its lines ``# -> ...``, if it has any.

    Returns:
        Why it cannot be run, or nothing.
    """
    assert block.map is not None
    code = "\n" * (block.map[0] + 1) + block.content
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(code, str(page), "exec"), namespace)
        except ImportError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in OPTIONAL:
                raise
            return f"line {block.map[0] + 1}: {missing} is not installed"
        except DatasetError as error:
            if not any(name in str(error) for name in DOWNLOADED):
                raise
            return f"line {block.map[0] + 1}: {error}"
    expected = re.findall(r"^# -> (.*)$", block.content, flags=re.MULTILINE)
    if expected:
        assert printed.getvalue().splitlines() == expected
    return ""


def title_of(block: Token) -> str:
    """The file that a block is part of."""
    found = re.search(r'title="(.*?)"', block.info)
    return found[1] if found else ""


@contextlib.contextmanager
def extended(page: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The namespaces of modules that blocks are part of, there or new; what these add is taken away again."""
    titles = {title_of(block) for block in fences(page) if title_of(block).endswith(".py")}
    names = {title: title.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for title in titles}
    new = [name for title, name in names.items() if not (ROOT / title).is_file()]
    for name in new:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__package__ = name.rpartition(".")[0]
    spaces = {title: vars(importlib.import_module(name)) for title, name in names.items()}
    before = {title: dict(space) for title, space in spaces.items()}
    try:
        yield spaces
    finally:
        for name in new:
            del sys.modules[name]
        for title, space in spaces.items():
            for name in space.keys() - before[title].keys():
                del space[name]


def build(parts: dict[str, str], folder: Path) -> None:
    """Compile and load the C++ of a page, an operation by the parts of the files it is spread over."""
    for name, code in parts.items():
        (folder / Path(name).name).write_text(code)
    (binding,) = (Path(name).name for name in parts if name.startswith("csrc/cpu/") and name.endswith(".cpp"))
    table = (ROOT / "csrc/cpu/dispatch.inl").read_text()
    macro = table[table.index("#define SPIN_FAST_TABLE") : table.index("SPIN_FAST_TABLE((")]
    lines = [f'#include "{ROOT}/csrc/kernels.h"', "namespace spin_fast {", '#include "kernels.h"', "}", macro]
    for isa in ("baseline", "avx2", "avx512"):
        lines += [f"namespace spin_fast::{isa} {{", '#include "dispatch.inl"', "}"]
    lines += ['#include "cpu/isa.cpp"', f'#include "{binding}"']
    lines += ["STABLE_TORCH_LIBRARY_FRAGMENT(spin_fast, m) {", '#include "library.cpp"', "}", ""]
    (folder / "operation.cpp").write_text("\n".join(lines))
    folders = [folder, ROOT / "csrc", ROOT / "csrc/cpu", *cpp_extension.include_paths()]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command = [*COMPILER, *flags, *(f"-I{path}" for path in folders), "operation.cpp", "-o", "operation.so"]
    command += [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    torch.ops.load_library(str(folder / "operation.so"))


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, as words."""
    found: list[list[str]] = [[]]
    for line in text.replace("\\\n", " ").splitlines():
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word == "&&":
                found.append([])
            else:
                found[-1].append(word)
    return [words for words in found if words]


def known_options() -> set[str]:
    """Those of our commands, and of what is run in a checkout."""
    group = typer.main.get_group(app)
    params = [param for command in (group, *group.commands.values()) for param in command.params]
    known = {"--help"} | {option for param in params for option in (*param.opts, *param.secondary_opts)}
    for path in ("benchmarks/studies/accuracy.py", "benchmarks/harness/plugin.py", "scripts/gpu_check.sh"):
        known |= set(re.findall(r"--[a-z][a-z-]*", (ROOT / path).read_text()))
    return known


def check_command(words: list[str]) -> None:
    """Parse a command of ours as it would be; of others check that what they name is there."""
    if words[0] == "spin-fast":
        group = typer.main.get_group(app)
        assert words[1] in {*group.commands, "--help", "--version", "--install-completion"}, words
        if words[2:] and "--help" not in words:  # a command alone is just named
            group.commands[words[1]].make_context(words[1], words[2:])  # raises for what it does not know
        return
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE), words
    if words[:2] == ["python", "-m"] and words[2].startswith("spin_fast."):
        knows = ROOT / (words[2].removeprefix("spin_fast.").replace(".", "/") + ".py")
    elif words[0].startswith("scripts/"):
        knows = ROOT / words[0]
    elif words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if "/" in word), words
        knows = ROOT / "benchmarks" / "harness" / "plugin.py"
    else:
        return
    for word in words[1:]:
        assert not word.startswith("--") or word in knows.read_text(), f"{knows} does not know {word}"


def run_commands(block: Token) -> None:
    """Run what trains, reads or writes ``digits``, which is there and small; check the rest."""
    for words in commands(block.content):
        check_command(words)
        if words[0] == "spin-fast" and "digits" in words:
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_a_page(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: None,
) -> None:
    """The blocks of a page are run in order, in one namespace and one empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPIN_FAST_DATA", str(DATA))
    parts = {title_of(block): block.content for block in fences(page) if block.info.startswith("cpp")}
    if parts:
        request.getfixturevalue("native")
        if shutil.which(COMPILER[0]) is None:
            pytest.skip("no C++ compiler")
        build(parts, tmp_path)
    with extended(page) as modules:
        namespace: dict[str, Any] = {}
        skipped: list[str] = []
        for block in fences(page):
            language = block.info.split(" ")[0]
            if language == "python":
                skipped += filter(None, [run_python(page, block, modules.get(title_of(block), namespace))])
            elif language == "sh":
                run_commands(block)
            else:
                assert language in NOT_RUN, f"nothing runs {language!r}"
    for span in code_spans(page):
        if re.match(r"(spin-fast|pytest|python -m) \S", span):
            for words in commands(span):
                check_command(words)
        elif span.startswith("--"):
            assert span.split()[0] in known_options(), f"nothing knows {span}"
    if skipped:
        pytest.skip(f"all but {', '.join(skipped)}")


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_pictures_and_pages_exist(page: Path) -> None:
    """For those that are no pages of the site, whose own links are checked when it is built."""
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (ROOT / target).exists(), target


def test_every_public_name_is_on_the_site() -> None:
    shown = "\n".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
    for name in spin_fast.__all__:
        assert re.search(rf"^::: spin_fast\.{name}$", shown, flags=re.MULTILINE), f"docs/api/ has no spin_fast.{name}"
    for module in ("datasets", "nn", "selection", "training"):
        for name in importlib.import_module(f"spin_fast.{module}").__all__:
            there = rf"^(::: spin_fast\.({module}\.)?|\s+- ){name}$"
            assert re.search(there, shown, flags=re.MULTILINE), f"docs/api/ has no spin_fast.{module}.{name}"
