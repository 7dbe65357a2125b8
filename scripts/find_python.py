"""Print the path of an interpreter of the version asked for (``3.13``, ``3.14t``), or nothing.

A name on PATH proves little (version managers leave shims that only fail), so each candidate is run. It must
be able to make a venv and to compile an extension.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROBE = """
import ensurepip, os, sys, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print("%d.%d" % sys.version_info[:2] + "t" * free_threaded, sys.executable)
"""


def candidates(version: str) -> Iterator[str]:
    """Where such an interpreter may be: this one, PATH, then the usual version managers' folders."""
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    uv = Path.home() / ".local/share/uv/python"
    for folder in (*pyenv.glob(f"versions/{version[:4]}*"), *uv.glob(f"cpython-{version[:4]}*")):
        yield str(folder / "bin" / f"python{version}")


def find(version: str) -> str | None:
    """The first candidate that runs and says that it is this version."""
    for path in candidates(version):
        try:
            run = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        said, _, executable = run.stdout.strip().partition(" ")
        if run.returncode == 0 and said == version:
            return executable
    return None


if __name__ == "__main__":
    print(find(sys.argv[1]) or "")
