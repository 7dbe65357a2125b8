"""The check of the world's size after the import of ``mpi4py.MPI``, on made-up modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pyhvd.common import launcher_hooks
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER, RankEnv
from pyhvd.job.rank import imports
from pyhvd.job.rank.imports import watch_mpi_import

MODULE = """\
class COMM_WORLD:
    Get_size = staticmethod(lambda: {size})
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
    monkeypatch.setattr(launcher_hooks, "before_mpi_init", bool)
    monkeypatch.setattr(launcher_hooks, "after_mpi_init", bool)
    monkeypatch.setattr(imports, "take_over", bool)
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, package)
    del sys.modules["mpi4py.MPI"]

    def put(name: str, source: str) -> None:
        file = tmp_path / name
        file.write_text(source)
        sys.meta_path.insert(0, Finder(file))

    return put


def import_watched(launcher: str = MPICH, size: int = 2) -> tuple[ModuleType, list[str | bool]]:
    """Import ``mpi4py.MPI`` as a rank of a job; return the module and what the supervisor is told."""
    told: list[str | bool] = []
    rank_env = RankEnv(launcher, 0, size, 0, size)
    moments = (lambda: told.append(True), lambda: told.append(False))
    watch_mpi_import(rank_env, told.append, lambda _: ALONE, *moments)
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
    install("MPI.mpich.py", MODULE.format(size=1))
    with pytest.raises(SystemExit, match=ALONE):
        import_watched()


@pytest.mark.parametrize(("file", "told"), [("MPI.mpich.py", [True]), ("MPI.openmpi.py", [True, ALONE])])
def test_a_world_that_pyhvd_initializes_is_judged_then(
    file: str, told: list[str | bool], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor learns that the rank waits there, and how MPI_Init may end it."""
    monkeypatch.setattr(sys.modules["mpi4py"], "rc", SimpleNamespace(initialize=False), raising=False)
    install(file, MODULE.format(size=1))
    _, heard = import_watched()
    assert heard == []
    launcher_hooks.before_mpi_init()
    assert heard == told
    with pytest.raises(SystemExit, match=ALONE):
        launcher_hooks.after_mpi_init()
    assert heard == [*told, False, ""][: 2 * len(told)]


def test_a_job_of_one_rank_may_be_alone(install: Install) -> None:
    install("MPI.mpich.py", MODULE.format(size=1))
    assert import_watched(size=1)[0].COMM_WORLD.Get_size() == 1


@pytest.mark.parametrize(
    ("launcher", "file", "told"),
    [
        (MPICH, "MPI.openmpi.py", [True, ALONE, False, ""]),
        (OPENMPI, "MPI.mpich.py", [True, ALONE, False, ""]),
        (MPICH, "MPI.mpich.py", [True, False]),
        (MPICH, "MPI.py", [True, False]),
        (OTHER, "MPI.mpich.py", [True, False]),
    ],
)
def test_a_file_of_another_mpi_is_suspected_until_mpi_init_returns(
    launcher: str, file: str, told: list[str | bool], install: Install
) -> None:
    install(file, MODULE.format(size=2))
    module, heard = import_watched(launcher)
    assert heard == told
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    assert isinstance(module.__loader__, SourceFileLoader), "the module shows no trace of the check"


def test_the_suspicion_stays_if_mpi_init_ends_the_import(install: Install) -> None:
    install("MPI.openmpi.py", "raise ImportError('MPI_Init has failed')")
    with pytest.raises(ImportError, match="MPI_Init has failed") as caught:
        import_watched()
    assert caught.value.__notes__ == [f"told: [True, '{ALONE}']"]
