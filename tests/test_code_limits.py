"""Limits that keep the code readable: short functions, a docstring on top, nothing put off."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pyhvd", "tests", "examples", "benchmarks", "scripts")
LONGEST_FUNCTION = 59
MOST_ARGUMENTS = 9


def _sources(*suffixes: str) -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    # Cython leaves its C beside the .pyx.
    return sorted(path for path in found if path.suffix != ".c" or not path.with_suffix(".pyx").exists())


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = _sources(".py")
NATIVE = ("pyhvd", "native", "src")
C = _sources(".c", ".cu", ".h")
CYTHON = _sources(".pyx", ".pxi")
ALL = _sources(".py", ".pyx", ".pxi", ".pxd", ".pyi", ".c", ".cu", ".h")


def _findings(paths: Iterable[Path], find: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """Return by file what is found there; one test for all files, as each test costs more than its file."""
    return {_name(path): found for path in paths if (found := list(find(path)))}


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _put_off(path: Path) -> Iterator[str]:
    word = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    lines = path.read_text().splitlines()
    yield from (f"line {number}: {line}" for number, line in enumerate(lines, 1) if word.search(line))


def _long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{node.name}, line {node.lineno}: {length} lines"


def _wide_functions(path: Path) -> Iterator[str]:
    """Count keyword-only arguments too; not the object or class of a method."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if sum(each.arg not in ("self", "cls") for each in given) > MOST_ARGUMENTS:
                yield node.name


def _late_decoders(path: Path) -> Iterator[str]:
    """Yield the calls in functions by which msgspec looks at a class: Decoder(T), decode(data, type=T)."""
    functions = (node for node in ast.walk(_parse(path)) if isinstance(node, ast.FunctionDef))
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Call):
            kind = re.fullmatch(r"msgspec\.\w+\.(decode|Decoder)", ast.unparse(node.func))
            if kind and (kind[1] == "Decoder" or any(given.arg == "type" for given in node.keywords)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


# Public signatures: Horovod has most of them, and docs/api.md has all.
WIDE = {
    "pyhvd/aliases/as_horovod/__init__.py": ["run"],
    "pyhvd/keras/optimizer.py": ["DistributedOptimizer", "PartialDistributedOptimizer"],
    "pyhvd/ray/executor.py": ["__init__"],
    "pyhvd/run/launchers/launch.py": ["launch", "__init__", "launch"],  # two of them are those of Hosts
    "pyhvd/simulation/cluster.py": ["simulate"],
    "pyhvd/spark/api.py": ["run"],
    "pyhvd/spark/data/prepare.py": ["prepare"],
    "pyhvd/spark/data/shard.py": ["shard"],
    "pyhvd/spark/elastic.py": ["run_elastic"],
    "pyhvd/spark/ml/estimator.py": ["__init__"],
    "pyhvd/tensorflow/mpi_ops.py": ["allreduce", "grouped_allreduce"],
    "pyhvd/tensorflow/optimizer.py": ["DistributedOptimizer"],
    "pyhvd/tensorflow/tape.py": ["DistributedGradientTape", "PartialDistributedGradientTape"],
    "pyhvd/torch/optimizer.py": ["DistributedOptimizer"],
}


# Users import both from where they are: docs/glossary.md tells them apart.
DOUBLED = {"Compression", "ElasticSampler", "StartTimeoutError"}


def test_a_class_name_means_one_thing() -> None:
    named: dict[str, set[str]] = {}
    for path in PYTHON:
        if path.is_relative_to(ROOT / "pyhvd"):
            for node in ast.walk(_parse(path)):
                if isinstance(node, ast.ClassDef):
                    named.setdefault(node.name.lstrip("_"), set()).add(_name(path))
    assert {name for name, paths in named.items() if len(paths) > 1} == DOUBLED


# A comment, a string or a character.
# Also what only C++ sees: extern "C" has a brace around a whole header.
C_TEXT = re.compile(
    r'#ifdef __cplusplus\n.*?#endif|/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)
CYTHON_FUNCTION = re.compile(r"( *)(?:def|cpdef|cdef (?!class|extern|struct|enum))[^=]*\(")


def _long_c_functions(path: Path) -> Iterator[str]:
    """Count braces: a function, or a macro with one, goes from the line of its first brace to depth 0."""
    depth = first = 0
    text = C_TEXT.sub(lambda found: "\n" * found.group().count("\n"), path.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        before, depth = depth, depth + line.count("{") - line.count("}")
        if before == 0 and depth > 0:
            first = number
        elif before > 0 and depth == 0 and number - first >= LONGEST_FUNCTION:
            yield f"line {first}: {number - first + 1} lines"


def _long_cython_functions(path: Path) -> Iterator[str]:
    """Count the lines from a def to the last one that is indented further, or closes the signature."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if not (found := CYTHON_FUNCTION.match(line)):
            continue
        last = number
        for k in range(number + 1, len(lines)):
            if lines[k].strip() and not lines[k].startswith((found.group(1) + " ", found.group(1) + ")")):
                break
            last = k if lines[k].strip() else last
        if last - number >= LONGEST_FUNCTION:
            yield f"{line.strip()}, line {number + 1}: {last - number + 1} lines"


def test_files_are_finished() -> None:
    assert len(ALL) > 800
    assert _findings(ALL, _put_off) == {}


def test_functions_are_short() -> None:
    assert _findings(PYTHON, _long_functions) == {}
    assert _findings(C, _long_c_functions) == {}
    assert _findings(CYTHON, _long_cython_functions) == {}


def test_functions_have_few_arguments() -> None:
    assert _findings(PYTHON, _wide_functions) == WIDE


# Their threads may decode the first message of a kind at the same time; other packages have one thread.
OF_RANKS = ("api", "backends", "devices", "elastic", "engine", "negotiation", "torch", "transport")


def test_decoders_are_made_when_a_module_is_imported() -> None:
    """Where several threads are the first to decode a class, msgspec 0.22 may crash the process."""
    paths = [path for path in PYTHON if path.relative_to(ROOT).parts[1] in OF_RANKS]
    assert len(paths) > 50
    assert _findings(paths, _late_decoders) == {}


def test_wide_functions_are_found(tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    path.write_text("def f(a, b, c, d, e, f, g, h, /, *, i, j): ...\n")
    assert list(_wide_functions(path)) == ["f"]


def test_long_functions_are_found(tmp_path: Path) -> None:
    c, cython = tmp_path / "long.c", tmp_path / "long.pyx"
    body = "    x = 1\n" * LONGEST_FUNCTION
    c.write_text("int f(void) { return '{'; } /* { */\nint g(int x) {\n" + body + "}\n")
    cython.write_text("cdef int f(\n    int x\n):\n" + body + "cdef int g():\n    return 1\n")
    assert list(_long_c_functions(c)) == [f"line 2: {LONGEST_FUNCTION + 2} lines"]
    assert [each.split(":")[-1] for each in _long_cython_functions(cython)] == [
        f" {LONGEST_FUNCTION + 3} lines"
    ]


SOURCES = [path for path in C if path.parts[-5:-2] == NATIVE]


def test_c_files_name_their_contracts() -> None:
    """The first comment of a .c file names the header that states its invariants."""
    assert len(SOURCES) > 30
    for path in SOURCES:
        first = path.read_text().split("*/")[0]
        assert first.startswith("/*"), path
        if path.suffix == ".c":
            header = re.search(r"([\w/]+\.h) states", first)
            assert header is not None, path
            folders = (path.parent, ROOT.joinpath(*NATIVE))
            assert any((folder / header[1]).exists() for folder in folders), path


FLOORS = ("common", "kernels", "results", "links", "exchange", "window", "agreement", "fast_path")
"""The folders of native/src: a file includes files of its own folder, and of those before it."""


def _upward_includes(path: Path) -> Iterator[str]:
    floor = FLOORS.index(path.parent.name)
    included = re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE)
    yield from (folder for folder in included if FLOORS.index(folder) > floor)


def test_c_includes_run_downwards() -> None:
    assert _findings(SOURCES, _upward_includes) == {}


def test_modules_say_what_they_own() -> None:
    silent = [
        _name(path) for path in PYTHON if not ast.get_docstring(_parse(path)) and path.read_text().strip()
    ]
    assert silent == []
