"""The instrumented build of the extensions, and the source file of each function in it.

Owns ``build/walk/tree``, a copy of the sources: the build in place of the checkout is left alone. Sources are
whatever setup.py names.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "walk"
TREE = BUILD / "tree"
HOOKS = BUILD / "hooks.so"
_SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".cu", ".typed"}
# Last on the command line, so that they count: with -O1 the walk is that of -O3, and is built sooner.
_FLAGS = "-O1 -g -finstrument-functions -finstrument-functions-exclude-file-list=/usr/,numpy,python3"
_COMMENT = re.compile(r'^\s*/\* "(?:[^"]*/)?(pyhvd/[^"]+|[^"/]+\.p(?:yx|xi|xd))":\d+')
_DEFINITION = re.compile(r"^(?:static|extern)?\b.*?\b(__pyx_(?:f|pf|pw|fuse)[A-Za-z0-9_]*)\(.*\{\s*$")


def build() -> None:
    """Build the extensions and walk_hooks.c for walking, one process at a time."""
    BUILD.parent.mkdir(exist_ok=True)
    with BUILD.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build()


def _build() -> None:
    """Do :func:`build`; nothing is to be done where the sources are the same."""
    files = [ROOT / name for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE")]
    files += sorted(path for path in (ROOT / "pyhvd").rglob("*") if _is_source(path))
    digest = hashlib.sha256(f"{sys.version}{_FLAGS}".encode())
    for path in [*files, *sorted((ROOT / "scripts").glob("walk_hooks.c"))]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    stamp = BUILD / "stamp"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    shutil.rmtree(BUILD, ignore_errors=True)
    for path in files:
        copy = TREE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    compiler = BUILD / "cc"
    compiler.write_text(f'#!/bin/sh\nexec gcc "$@" {_FLAGS}\n')
    compiler.chmod(0o755)
    env = os.environ | {"CC": str(compiler), "LDSHARED": f"{compiler} -shared"}
    _run([sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-j2"], TREE, env)
    hooks = str(ROOT / "scripts" / "walk_hooks.c")
    _run(["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(HOOKS), hooks], BUILD, None)
    stamp.write_text(digest.hexdigest())


def _is_source(path: Path) -> bool:
    generated = path.suffix == ".c" and path.with_suffix(".pyx").exists()
    return path.suffix in _SOURCES and not generated


def _run(command: list[str], folder: Path, env: dict[str, str] | None) -> None:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


class Symbols:
    """The functions of one extension.

    Parameters
    ----------
    library : Path
        Below :data:`TREE`, with the sources and the C that Cython has made.
    """

    def __init__(self, library: Path) -> None:
        self._library = library
        self._names: dict[int, str] = {}
        for line in _output("nm", "--defined-only", str(library)).splitlines():
            address, kind, name = line.split()
            if kind in "tT":
                self._names[int(address, 16)] = name
        self._known: dict[int, tuple[str, str] | None] = {}
        self._generated: dict[str, dict[str, str]] = {}

    def find(self, offsets: set[int]) -> None:
        """Look up functions, many at a time, for :meth:`__getitem__`."""
        new = sorted(offsets - set(self._known))
        for start in range(0, len(new), 500):
            some = new[start : start + 500]
            lines = _output("addr2line", "-e", str(self._library), *map(hex, some)).splitlines()
            for offset, line in zip(some, lines, strict=True):
                self._known[offset] = self._place(offset, line.rpartition(":")[0])

    def __getitem__(self, offset: int) -> tuple[str, str] | None:
        """Return a function's file below pyhvd/ and its name; None for what is not this project's."""
        return self._known[offset]

    def _place(self, offset: int, file: str) -> tuple[str, str] | None:
        name = self._names.get(offset, "").partition(".")[0]
        path = Path(os.path.normpath(TREE / file))
        if not path.is_relative_to(TREE / "pyhvd"):
            return None
        if not path.with_suffix(".pyx").exists() or path.suffix != ".c":
            return str(path.relative_to(TREE / "pyhvd")), name
        if str(path) not in self._generated:
            self._generated[str(path)] = _sources_of(path)
        source = self._generated[str(path)].get(name)
        return None if source is None else (source, _plain(name))


def _sources_of(generated: Path) -> dict[str, str]:
    """Return the .pyx or .pxi, below pyhvd/, of each function that Cython has translated.

    Cython writes the source's file and line into a comment before each function.
    """
    found: dict[str, str] = {}
    source = ""
    for line in generated.read_text(errors="replace").splitlines():
        if comment := _COMMENT.match(line):
            source = comment[1]
        elif (defined := _DEFINITION.match(line)) and source:
            path = TREE / source if source.startswith("pyhvd/") else generated.parent / source
            found[defined[1]] = str(path.relative_to(TREE / "pyhvd"))
    return found


def _plain(name: str) -> str:
    """Return a function's name without what Cython puts before it."""
    rest = name.split("_", 4)[4]
    while found := re.match(r"(\d+)", rest):
        end = found.end() + int(found[1])
        if rest[end : end + 1] != "_":
            break
        rest = rest[end + 1 :]
    return rest.lstrip("0123456789") or name


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
