"""Detecting that mpiexec belongs to another MPI: then N ranks become N worlds of one rank each.

1. The check runs when the script itself imports ``mpi4py.MPI``, so it costs nothing without MPI.
2. After the import, the size of the world tells for certain.
3. But MPICH 5 under Open MPI's mpiexec gets no world: MPI_Init ends the process. Before the import, only the
   name of the found file tells, and it may be wrong: an MPICH built for PMIx works under Open MPI's mpiexec.
   So the supervisor gets a tentative text, which it shows if the rank ends in MPI_Init.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER, RankEnv

if TYPE_CHECKING:
    from importlib.abc import Loader


def watch_mpi_import(
    rank_env: RankEnv,
    tell: Callable[[str], None],
    describe: Callable[[RankEnv], str] | None = None,
    enter: Callable[[], None] | None = None,
) -> None:
    """Check the size of the world after the script's first ``from mpi4py import MPI``.

    Parameters
    ----------
    rank_env : RankEnv
        This rank's numbers, as its launcher announced them.
    tell : callable
        Called with the text to show if MPI_Init ends the process, and with "" after MPI_Init.
    describe : callable, optional
        Returns the text about ranks that do not find each other; :func:`describe_mismatch` by default.
    enter : callable, optional
        Called before the import, which calls MPI_Init, which waits for the other ranks.
    """
    if rank_env.size > 1:
        watch = _Watch(rank_env, tell, describe or describe_mismatch, enter or (lambda: None))
        sys.meta_path.insert(0, watch)


class _Watch:
    """The finder of one module, which asks the other finders for it; then its loader, which checks the world.

    It does not derive from the classes of importlib.abc: importing them takes 7 ms.
    """

    def __init__(
        self,
        rank_env: RankEnv,
        tell: Callable[[str], None],
        describe: Callable[[RankEnv], str],
        enter: Callable[[], None],
    ) -> None:
        self._rank_env = rank_env
        self._tell = tell
        self._describe = describe
        self._enter = enter

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        self._enter()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._spec, self._loader = spec, spec.loader
            spec.loader = cast("Loader", self)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if this loader did not exist.
        self._spec.loader = module.__loader__ = self._loader
        differs = _differs(self._rank_env, self._spec.origin or "")
        if differs:
            self._tell(self._describe(self._rank_env))
        self._loader.exec_module(module)
        if differs:
            self._tell("")
        if module.Is_initialized() and module.COMM_WORLD.Get_size() == 1:
            raise SystemExit(self._describe(self._rank_env))


def _differs(rank_env: RankEnv, file: str) -> bool:
    """Return whether a file of ``mpi4py.MPI`` is for another MPI: wheels name it, as in MPI.mpich.*.so."""
    families = {"mpich": MPICH, "openmpi": OPENMPI}
    parts = os.path.basename(file).split(".")
    family = families.get(parts[1]) if len(parts) > 1 else None
    return family is not None and rank_env.launcher != OTHER and family != rank_env.launcher


def describe_mismatch(rank_env: RankEnv) -> str:
    """Return the text about ranks that do not find each other."""
    from pyhvd.job.errors import LaunchError
    from pyhvd.job.mpi.flavour import find_library, find_mpiexec

    library = find_library()
    try:
        matching = find_mpiexec(library)
    except LaunchError:
        matching = f"an mpiexec of {library.vendor}"
    size, launcher = rank_env.size, rank_env.launcher
    starter = "an mpiexec of an unknown kind" if launcher == OTHER else f"{launcher}'s mpiexec"
    return (
        f"started by {starter}, but mpi4py is built on {library.name}: the {size} ranks would each be"
        f" alone in a world of size 1; use {matching}, or: pyhvdrun -n {size} ..."
    )
