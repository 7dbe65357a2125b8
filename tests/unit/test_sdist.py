"""The source distribution has all files that a build without a wheel needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from pyhvd import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".cu", ".typed"}

# The list of packed files does not depend on Cython's output, and Cython would take long.
BUILD = """
import runpy, sys, types
import setuptools

def cythonize(extensions, **options):
    for extension in extensions:
        extension.sources = [name.replace(".pyx", ".c") for name in extension.sources]
        open(extension.sources[0], "w").close()
    return extensions

sys.modules["Cython.Build"] = types.SimpleNamespace(cythonize=cythonize)
sys.argv = ["setup.py", "-q", "sdist", "--formats=tar", "--dist-dir", "dist"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="no source tree here")
def test_it_has_every_source_and_nothing_that_is_made_of_them(tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    generated = {path.with_suffix(".c").name for path in (ROOT / "pyhvd").rglob("*.pyx")}
    assert generated == {"_fusion.c", "shared_memory.c"}
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT / "pyhvd", tree / "pyhvd", ignore=shutil.ignore_patterns("__pycache__", "*.so", *generated)
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    sources = {
        path.relative_to(tree).as_posix() for path in (tree / "pyhvd").rglob("*") if path.suffix in SOURCES
    }
    assert {
        "pyhvd/native/shared_memory.pyx",
        "pyhvd/native/submit.pxi",
        "pyhvd/devices/pack_kernels.cu",
        "pyhvd/py.typed",
    } <= sources

    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tree, capture_output=True, text=True, timeout=100
    )
    assert built.returncode == 0, built.stderr
    (archive,) = (tree / "dist").iterdir()
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {name for name in names if name.startswith("pyhvd/") and Path(name).suffix in SOURCES} == sources
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names


def test_the_wheel_of_the_alias(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    if not (ROOT / "compat").exists():
        pytest.skip("no source tree here")
    shutil.copytree(ROOT / "compat" / "horovod", tmp_path / "tree")
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path / "tree", capture_output=True, text=True, timeout=100
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        names = wheel.namelist()
        metadata, scripts = (
            wheel.read(next(name for name in names if name.endswith(ending))).decode()
            for ending in ("METADATA", "entry_points.txt")
        )
    assert [name for name in names if ".dist-info/" not in name] == ["horovod/__init__.py"]
    assert f"Version: {__version__}\n" in metadata
    assert f"Requires-Dist: pyhvd=={__version__}\n" in metadata
    assert "horovodrun = pyhvd.run.__main__:horovodrun\n" in scripts
