"""Limits that keep the code readable: short functions, a docstring on top, nothing put off."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pyhvd", "tests", "examples", "benchmarks", "scripts")
LONGEST_FUNCTION = 59


def _sources(*suffixes: str) -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    # Cython leaves its C beside the .pyx.
    return sorted(path for path in found if path.suffix != ".c" or not path.with_suffix(".pyx").exists())


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = _sources(".py")
ALL = _sources(".py", ".pyx", ".pxi", ".pxd", ".pyi", ".c", ".cu", ".h")


def _long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{node.name}, line {node.lineno}: {length} lines"


@pytest.mark.parametrize("path", ALL, ids=_name)
def test_file_is_finished(path: Path) -> None:
    lines = path.read_text().splitlines()
    put_off = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    assert [f"line {i}: {line}" for i, line in enumerate(lines, 1) if put_off.search(line)] == []


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_functions_are_short(path: Path) -> None:
    assert list(_long_functions(path)) == []


@pytest.mark.parametrize("path", [path for path in PYTHON if path.read_text().strip()], ids=_name)
def test_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"
