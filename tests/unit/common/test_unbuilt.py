"""The error of a package whose extensions are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyhvd

HERE = Path(pyhvd.__file__).parent


def _run(folder: Path, *arguments: str, installed: str) -> str:
    """Run Python in a folder with a source tree that has not been built; return the last line of stderr."""
    shutil.copytree(HERE, folder / "pyhvd", ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
    # Without the site's packages: a checkout may be installed there by its path.
    code = ["-S", *arguments]
    environment = {**os.environ, "PYTHONPATH": installed}
    done = subprocess.run(
        [sys.executable, *code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_checkout_that_shadows_the_installed_package(tmp_path: Path) -> None:
    installed = tmp_path / "site"
    (installed / "pyhvd").mkdir(parents=True)
    (installed / "pyhvd" / "__init__.py").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    python = os.path.basename(sys.executable)
    assert _run(tree, "-m", "pyhvd", "doctor", installed=str(installed)) == (
        f"ImportError: pyhvd's extension pyhvd._fusion has not been built in {tree}/pyhvd, a source tree that"
        f" shadows the installed {installed}/pyhvd: run the command elsewhere, or without the current"
        f" directory on Python's path: {python} -P -S -m pyhvd doctor"
    )


def test_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    assert _run(tmp_path, "-c", "import pyhvd", installed="") == (
        f"ImportError: pyhvd's extension pyhvd._fusion has not been built in {tmp_path}/pyhvd: run pip"
        f" install -e {tmp_path}, or python setup.py build_ext --inplace"
    )
