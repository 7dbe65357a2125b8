"""Noticing that mpiexec is another MPI's: then N ranks come up as N worlds of one rank each.

Nothing is looked at until the script itself imports ``mpi4py.MPI``: a script that does not ask for MPI pays
nothing, and one that does learns it from the world it got, which cannot be wrong about it. But MPICH 5 under
Open MPI's mpiexec gets no world at all: MPI_Init ends the process. Beforehand, only the name of the file that
the import found tells, and it may be wrong (an MPICH built for PMIx gets on well with Open MPI's mpiexec); so
that doubt is left with the supervisor, to be said should the rank end there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER, Place

if TYPE_CHECKING:
    from importlib.abc import Loader


def watch_mpi_import(
    place: Place,
    doubt: Callable[[str], None],
    describe: Callable[[Place], str] | None = None,
    enter: Callable[[], None] | None = None,
) -> None:
    """Check the size of the world right after the script's first ``from mpi4py import MPI``.

    Parameters
    ----------
    place : Place
        What the launcher announced.
    doubt : callable
        Called with what to say should MPI_Init end the process, and with nothing when it has not.
    describe : callable, optional
        What to say of ranks that do not find each other; :func:`describe_foreign` by default.
    enter : callable, optional
        Called when the import begins, which calls MPI_Init, which waits for the other ranks.
    """
    if place.size > 1:
        sys.meta_path.insert(0, _Watch(place, doubt, describe or describe_foreign, enter or (lambda: None)))


class _Watch:
    """A finder for one module, which it has the other finders find. (importlib.abc costs 7 ms to import.)"""

    def __init__(
        self,
        place: Place,
        doubt: Callable[[str], None],
        describe: Callable[[Place], str],
        enter: Callable[[], None],
    ) -> None:
        self._place = place
        self._doubt = doubt
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
            spec.loader = cast(
                "Loader", _CheckingLoader(spec.loader, self._place, self._doubt, self._describe)
            )
        return spec


class _CheckingLoader:
    """Loads ``mpi4py.MPI`` as its own loader does, then looks at the world."""

    def __init__(
        self, loader: Loader, place: Place, doubt: Callable[[str], None], describe: Callable[[Place], str]
    ) -> None:
        self._loader = loader
        self._place = place
        self._doubt = doubt
        self._describe = describe

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # leave the module as it would be without us
        module.__loader__ = self._loader
        doubtful = spec is not None and _differs(self._place, spec.origin or "")
        if doubtful:
            self._doubt(self._describe(self._place))
        self._loader.exec_module(module)
        if doubtful:
            self._doubt("")
        if module.Is_initialized() and module.COMM_WORLD.Get_size() == 1:
            raise SystemExit(self._describe(self._place))


def _differs(place: Place, file: str) -> bool:
    """Whether ``mpi4py.MPI`` comes from a file for another MPI: the wheels have one each, MPI.mpich.*.so."""
    families = {"mpich": MPICH, "openmpi": OPENMPI}
    parts = os.path.basename(file).split(".")
    family = families.get(parts[1]) if len(parts) > 1 else None
    return family is not None and place.launcher != OTHER and family != place.launcher


def describe_foreign(place: Place) -> str:
    """The message for ranks that do not find each other."""
    from pyhvd.job.errors import LaunchError
    from pyhvd.job.mpi.flavour import find_library, find_mpiexec

    library = find_library()
    try:
        matching = find_mpiexec(library)
    except LaunchError:
        matching = f"an mpiexec of {library.vendor}"
    starter = "an mpiexec of an unknown kind" if place.launcher == OTHER else f"{place.launcher}'s mpiexec"
    return (
        f"started by {starter}, but mpi4py is built on {library.name}: the {place.size} ranks would each be"
        f" alone in a world of size 1; use {matching}, or: pyhvdrun -n {place.size} ..."
    )
