"""The check of the world's size after the import of ``mpi4py.MPI``, on made-up modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from pyhvd.job.mpi.import_check import watch_mpi_import
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER, RankEnv

MODULE = """\
class COMM_WORLD:
    Get_size = staticmethod(lambda: {size})

def Is_initialized():
    return {initialized}
"""
ALONE = "the ranks are alone"

Install = Callable[[str, str], None]


class Finder:
    """Finds ``mpi4py.MPI`` in one file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self._file) if fullname == "mpi4py.MPI" else None


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Hide mpi4py; return a function that installs a module in its place, under the file name of a wheel."""
    package = ModuleType("mpi4py")
    package.__path__ = []
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, package)
    del sys.modules["mpi4py.MPI"]

    def put(name: str, source: str) -> None:
        file = tmp_path / name
        file.write_text(source)
        sys.meta_path.insert(0, Finder(file))

    return put


def import_watched(launcher: str = MPICH, size: int = 2) -> tuple[ModuleType, list[str]]:
    """Import ``mpi4py.MPI`` as a rank of a job; return the module and what the supervisor is told."""
    told: list[str] = []
    watch_mpi_import(RankEnv(launcher, 0, size, 0, size), told.append, lambda _: ALONE)
    try:
        return importlib.import_module("mpi4py.MPI"), told
    except ImportError as exc:
        exc.add_note(f"told: {told}")
        raise


@pytest.mark.usefixtures("install")
def test_without_mpi_the_import_fails_as_it_would_without_the_check() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mpi4py\.MPI'") as caught:
        import_watched()
    assert caught.value.__notes__ == ["told: []"]


def test_a_rank_alone_in_its_world_ends_with_the_reason(install: Install) -> None:
    install("MPI.mpich.py", MODULE.format(size=1, initialized=True))
    with pytest.raises(SystemExit, match=ALONE):
        import_watched()


def test_a_world_that_the_script_has_yet_to_initialize_is_not_judged(install: Install) -> None:
    install("MPI.mpich.py", MODULE.format(size=1, initialized=False))
    assert import_watched()[1] == []


def test_a_job_of_one_rank_may_be_alone(install: Install) -> None:
    install("MPI.mpich.py", MODULE.format(size=1, initialized=True))
    assert import_watched(size=1)[0].COMM_WORLD.Get_size() == 1


@pytest.mark.parametrize(
    ("launcher", "file", "told"),
    [
        (MPICH, "MPI.openmpi.py", [ALONE, ""]),
        (OPENMPI, "MPI.mpich.py", [ALONE, ""]),
        (MPICH, "MPI.mpich.py", []),
        (MPICH, "MPI.py", []),
        (OTHER, "MPI.mpich.py", []),
    ],
)
def test_a_file_of_another_mpi_is_suspected_until_mpi_init_returns(
    launcher: str, file: str, told: list[str], install: Install
) -> None:
    install(file, MODULE.format(size=2, initialized=True))
    module, heard = import_watched(launcher)
    assert heard == told
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    assert isinstance(module.__loader__, SourceFileLoader), "the module shows no trace of the check"


def test_the_suspicion_stays_if_mpi_init_ends_the_import(install: Install) -> None:
    install("MPI.openmpi.py", "raise ImportError('MPI_Init has failed')")
    with pytest.raises(ImportError, match="MPI_Init has failed") as caught:
        import_watched()
    assert caught.value.__notes__ == [f"told: ['{ALONE}']"]
