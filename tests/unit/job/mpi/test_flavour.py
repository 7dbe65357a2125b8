"""Finding mpi4py's MPI library and its mpiexec, among programs that the tests write."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import INSTALL, find_library, find_mpiexec, how_to_get, judge_library

LIBRARY = judge_library("MPICH Version:      5.0.2\nMPICH ABI:          18:2:6")
HYDRA = "HYDRA build details:\\n    Version:            "
OPEN_MPI = "mpiexec (Open MPI) 5.0.8"

Place = Callable[[str, str], str]


def program(path: Path, script: str) -> str:
    """Write a shell script that needs nothing on PATH; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a function that writes an mpiexec with a name and a version text; only its folder is on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python3"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "scripts"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return lambda name, text: program(tmp_path / "bin" / name, f"printf '{text}\\n'")


def test_the_mpiexec_of_the_librarys_version_is_found_behind_others(place: Place) -> None:
    place("mpiexec", HYDRA + "4.3.0")
    path = place("mpiexec.hydra", HYDRA + "5.0.2")
    assert find_mpiexec(LIBRARY) == path


def test_another_version_of_the_same_mpi_will_do(place: Place) -> None:
    place("mpiexec", OPEN_MPI)
    path = place("mpiexec.mpich", HYDRA + "4.3.0")
    assert find_mpiexec(LIBRARY) == path


def test_the_mpiexec_of_another_mpi_is_refused_by_name(place: Place) -> None:
    paths = place("mpiexec", OPEN_MPI), place("mpirun", "a launcher of this site")
    text = (
        f"no mpiexec of MPICH 5.0.2, on which mpi4py is built: {paths[0]} is Open MPI 5.0.8's;"
        f" {paths[1]} is a launcher of this site's."
    )
    with pytest.raises(LaunchError, match=re.escape(text)):
        find_mpiexec(LIBRARY)


def test_an_mpiexec_that_cannot_be_run_is_of_no_known_mpi(place: Place) -> None:
    path = place("mpiexec", "")
    Path(path).write_bytes(b"\x7fELF of another machine")
    with pytest.raises(LaunchError, match=re.escape(f"{path} is an unknown MPI's")):
        find_mpiexec(LIBRARY)


@pytest.mark.usefixtures("place")
def test_a_host_without_mpiexec() -> None:
    text = f"no mpiexec beside {sys.executable} or on PATH; {INSTALL}"
    with pytest.raises(LaunchError, match=re.escape(text)):
        find_mpiexec(LIBRARY)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo Traceback >&2; echo 'RuntimeError: cannot load MPI library' >&2; exit 1", "RuntimeError: .*"),
        ("exit 3", "exit code 3"),
    ],
)
def test_an_mpi4py_without_a_library(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python3", script))
    with pytest.raises(LaunchError, match=rf"mpi4py finds no MPI library \({why}\); (install|MPICH)"):
        find_library()


def test_an_mpi_that_mpi4py_does_not_find_has_a_remedy(tmp_path: Path) -> None:
    debians = str(tmp_path / "*-linux-gnu" / "libmpich.so.12")
    modules = str(tmp_path / "lib64" / "*" / "lib" / "libmpi.so.*")
    assert how_to_get(debians, modules) == INSTALL
    for name in ("openmpi/lib/libmpi.so.40", "mpich/lib/libmpi.so.12"):
        (tmp_path / "lib64" / name).parent.mkdir(parents=True)
        (tmp_path / "lib64" / name).touch()
    assert how_to_get(debians, modules).endswith(": module load mpi/mpich-$(uname -m)")
    library = tmp_path / "x86_64-linux-gnu" / "libmpich.so.12"
    library.parent.mkdir()
    library.touch()
    assert how_to_get(debians, modules) == (
        f"MPICH is here as {library}, and mpi4py looks for libmpi.so.12: mkdir -p ~/.local/lib/mpich && ln"
        f" -sf {library} ~/.local/lib/mpich/libmpi.so.12 && export LD_LIBRARY_PATH=~/.local/lib/mpich"
    )
