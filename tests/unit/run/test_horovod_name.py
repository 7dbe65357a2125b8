"""Which package ``import horovod`` finds, and how two of them can have damaged each other."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pyhvd.job.mpi.rank_env import AS_HOROVOD
from pyhvd.job.rank.imports import offer_horovod
from pyhvd.run.cli import _REPLACE, without_python
from pyhvd.run.horovod_name import explain_two_owners, find_horovod

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of packages, the first in which this process looks."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, name: str, version: str, code: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("horovod/__init__.py,,\n")
    (site / "horovod").mkdir(exist_ok=True)
    (site / "horovod" / "__init__.py").write_text(code)


def test_nothing_is_installed(site: Path) -> None:
    assert find_horovod().found.startswith("none: pip install pyhvd-horovod")
    assert explain_two_owners() == ""


@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("pyhvd-horovod", "__pyhvd__ = True", "pyhvd, by pyhvd-horovod 1.2, "),
        ("horovod", "", "Horovod 1.2 itself, "),
    ],
)
def test_one_is_installed(name: str, code: str, found: str, site: Path) -> None:
    install(site, name, "1.2", code)
    assert find_horovod().found == f"{found}{site}/horovod/__init__.py"
    assert not find_horovod().remedy


@pytest.mark.parametrize("last", ["__pyhvd__ = True", "import another"])
def test_both_are_installed_in_either_order(last: str, site: Path) -> None:
    install(site, "horovod", "0.28.1", last)
    install(site, "pyhvd-horovod", "1.2", last)
    assert find_horovod().found == "both Horovod 0.28.1 and pyhvd-horovod 1.2"
    assert "To use pyhvd: pip uninstall -y horovod pyhvd-horovod && pip install" in find_horovod().remedy


@pytest.mark.parametrize("name", ["horovod", "pyhvd-horovod"])
@pytest.mark.parametrize("left", [False, True])
def test_an_uninstallation_took_the_files_of_the_other(name: str, left: bool, site: Path) -> None:
    install(site, name, "1.2", "")
    (site / "horovod" / "__init__.py").unlink()
    if not left:
        shutil.rmtree(site / "horovod")
    assert find_horovod().found == f"none: the files of {name} 1.2 are gone"
    assert f"pip install --force-reinstall --no-deps {name}" in find_horovod().remedy


def test_the_flag_offers_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(AS_HOROVOD, "0")
    offer_horovod()
    before = list(sys.path)
    monkeypatch.setenv(AS_HOROVOD, "1")
    offer_horovod()
    offer_horovod()
    assert sys.path[:-1] == before
    assert [path.name for path in Path(sys.path[-1]).glob("[!_]*")] == ["horovod"]
    assert find_horovod().found.startswith("pyhvd, by a path, ")


def test_commands_of_horovodrun(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in (("pytest", "#!/usr/bin/env python3"), ("tool", "#!/bin/sh"), ("python3", "\x7fELF")):
        (site / name).write_text(f"{line}\n")
        (site / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(site))
    for given, taken in {
        "python train.py -v": ["train.py", "-v"],
        "python3 -u train.py": ["train.py"],
        f"{sys.executable} -u -m package": ["-m", "package"],
        f"{site}/python3 train.py": ["-c", _REPLACE, f"{site}/python3", "train.py"],
        "pytest -q": [f"{site}/pytest", "-q"],
        "-c pass": ["-c", "pass"],
        "missing.py": ["missing.py"],
        "tool x": ["-c", _REPLACE, "tool", "x"],
    }.items():
        assert without_python(["-np", "2", *given.split()]) == ["-np", "2", *taken]
    (site / "python").write_bytes(b"\x7fELF")
    (site / "python").chmod(stat.S_IRWXU)
    assert without_python(["python", "-O", "x.py"]) == ["-c", _REPLACE, "python", "-O", "x.py"]


@pytest.mark.parametrize("folder", ["pyhvd/aliases/on_path", "compat/horovod"])
def test_the_name_tells_that_it_is_pyhvd(folder: str) -> None:
    """docs/from_horovod.md promises all three to libraries that look for Horovod."""
    program = "import horovod as h; print(h.__pyhvd__, h.__version__.split('+')[0], h.__file__)"
    path = ROOT / folder
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == f"True 0.28.1 {path}/horovod/__init__.py\n"
