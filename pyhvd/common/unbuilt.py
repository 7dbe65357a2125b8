"""Why an extension of pyhvd is not there: usually a source tree shadows the installed package."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.machinery import PathFinder


def explain_unbuilt(extension: str) -> str:
    """Return what to do about an extension that this package lacks."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    tree = os.path.dirname(here)
    missing = f"pyhvd's extension {extension} has not been built in {here}"
    others = [path for path in sys.path if os.path.abspath(path) != tree]
    installed = PathFinder.find_spec("pyhvd", others)
    if installed is None or installed.origin is None:
        return f"{missing}: run pip install -e {tree}, or python setup.py build_ext --inplace"
    command = shlex.join([os.path.basename(sys.executable), "-P", *sys.orig_argv[1:]])
    return (
        f"{missing}, a source tree that shadows the installed {os.path.dirname(installed.origin)}: run the"
        f" command elsewhere, or without the current directory on Python's path: {command}"
    )
