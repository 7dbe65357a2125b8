"""The code in README.md and docs/ works: Python blocks run on two ranks, commands and options exist.

A fenced block marked ``python`` is run as a script; ``python no-run`` is only compiled. In ``bash``,
``console`` and ``sh`` blocks the commands of this project are looked up, not run; so are command lines that
are only indented. The launcher must accept the options of every command that starts a job. Shell scripts must
parse.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

from pyhvd.__main__ import COMMANDS as SUBCOMMANDS
from pyhvd.run import cli
from tests.mpi.harness import on_ranks
from tests.mpi.launch import ROOT

pytestmark = pytest.mark.any_mpi

FENCE = re.compile(r"^```(?P<tags>[^\n`]*)\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: where its first line of code stands, its tags, its text."""

    path: Path
    line: int
    tags: tuple[str, ...]
    code: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
COMMAND = re.compile(
    r"^(?: {4}|\$ |)(?:"
    r"pyhvdrun (?P<launched>.+)|mpiexec .*python -m pyhvd\.run (?P<under_mpiexec>.+)"
    r"|(?:mpiexec .*)?python -m pyhvd (?P<tool>\w+).*)$",
    re.MULTILINE,
)


def _blocks() -> list[Block]:
    blocks = []
    for path in PAGES:
        text = path.read_text() if path.exists() else ""
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            blocks.append(Block(path, line, tuple(match["tags"].split()), match["code"]))
    return blocks


BLOCKS = _blocks()
PYTHON = [block for block in BLOCKS if block.tags[:1] == ("python",)]
COMMANDS = [block for block in BLOCKS if block.tags[:1] in {("bash",), ("console",), ("sh",)}]


def _compiled(block: Block) -> CodeType:
    # Tracebacks then show the document's line numbers.
    return compile("\n" * (block.line - 1) + block.code, str(block), "exec")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_block_compiles(block: Block) -> None:
    _compiled(block)


@pytest.mark.parametrize("block", [block for block in PYTHON if "no-run" not in block.tags], ids=str)
@on_ranks(2)
def test_python_block(block: Block) -> None:
    exec(_compiled(block), {"__name__": "__main__"})


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_exist(block: Block) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    prompt = r"\$ " if block.tags[0] == "console" else ""  # without it, a line of a console is output
    for module in re.findall(r"python3? -m (pyhvd[\w.]*)", block.code):
        assert importlib.util.find_spec(module), module
    assert set(re.findall(rf"^{prompt}(pyhvd\w*)", block.code, re.MULTILINE)) <= set(scripts)
    assert set(re.findall(rf"^{prompt}make ([a-z0-9-]+)", block.code, re.MULTILINE)) <= targets


@pytest.mark.parametrize("block", [block for block in COMMANDS if block.tags == ("bash",)], ids=str)
def test_script_parses(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_exist(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'"(?:pyhvd|\.)\[([\w,]+)\]"', page.read_text())
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_are_understood(page: Path) -> None:
    for match in COMMAND.finditer(page.read_text()):
        if match["tool"]:
            assert match["tool"] in SUBCOMMANDS
        else:
            arguments = shlex.split(match["launched"] or match["under_mpiexec"], comments=True)
            cli.parse(arguments, under_mpiexec=match["launched"] is None)


def test_command_lines_are_found() -> None:
    found = [match for page in PAGES for match in COMMAND.finditer(page.read_text())]
    for kind in ("launched", "under_mpiexec", "tool"):
        assert sum(match[kind] is not None for match in found) > 1, kind
