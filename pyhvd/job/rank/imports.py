"""What a rank does when its program imports mpi4py.MPI, pyspark or horovod.

mpi4py.MPI: detecting that mpiexec belongs to another MPI: then N ranks become N worlds of one rank each.

1. The check runs when the script itself imports ``mpi4py.MPI``, so it costs nothing without MPI.
2. After MPI_Init, the size of the world tells for certain. The import calls MPI_Init, or, if
   ``mpi4py.rc.initialize`` is False, ``pyhvd.init()`` does.
3. But MPICH 5 under Open MPI's mpiexec gets no world: MPI_Init ends the process. Before MPI_Init, only the
   name of the found file tells, and it may be wrong: an MPICH built for PMIx works under Open MPI's mpiexec.
   So the supervisor gets a tentative text, which it shows if the rank ends in MPI_Init.

pyspark: a rank that belongs to a Spark task finds there what the task has.

horovod: it is pyhvd's under ``pyhvdrun --as-horovod``, unless Horovod is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, cast

from pyhvd.common import launcher_hooks
from pyhvd.job.mpi.rank_env import AS_HOROVOD, MPICH, OPENMPI, OTHER, RankEnv
from pyhvd.transport.mpi.ending import take_over, watch_abort

if TYPE_CHECKING:
    from importlib.abc import Loader

SPARK_TASK = "_PYHVD_SPARK_TASK"
"""The variable with the files of a rank's Spark task, as JSON; see :mod:`pyhvd.spark.task_body`."""


_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_HOROVOD = os.path.join(_PACKAGE, "aliases", "on_path")


class ImportWatch:
    """The finder of one module, which asks the other finders for it; then its loader. A subclass acts.

    It does not derive from the classes of importlib.abc: importing them takes 7 ms.

    Parameters
    ----------
    name : str
        The module.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        sys.meta_path.insert(0, self)

    def begin(self) -> None:
        """Act before the module is looked for."""

    def found(self, origin: str) -> None:
        """Act before the module runs; ``origin`` is its file, or empty."""

    def end(self, module: ModuleType) -> None:
        """Act after the module has run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        self.begin()
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
        self.found(self._spec.origin or "")
        self._loader.exec_module(module)
        self.end(module)


def watch_mpi_import(
    rank_env: RankEnv,
    tell: Callable[[str], None],
    describe: Callable[[RankEnv], str] | None = None,
    enter: Callable[[], object] = bool,
    entered: Callable[[], object] = bool,
) -> None:
    """Check the size of the world after the script's first ``from mpi4py import MPI``; watch MPI's end.

    Parameters
    ----------
    rank_env : RankEnv
        This rank's numbers, as its launcher announced them.
    tell : callable
        Called with the text to show if MPI_Init ends the process, and with "" after MPI_Init.
    describe : callable, optional
        Returns the text about ranks that do not find each other; :func:`describe_mismatch` by default.
    enter : callable, optional
        Called before the import or ``pyhvd.init()`` calls MPI_Init, which waits for the other ranks.
    entered : callable, optional
        Called when MPI_Init has returned.
    """
    _MpiWatch(rank_env, tell, describe or describe_mismatch, enter, entered)


@dataclass(eq=False)
class _MpiWatch(ImportWatch):
    """Checks the world after the import of mpi4py.MPI, or after pyhvd has called MPI_Init."""

    rank_env: RankEnv
    tell: Callable[[str], None]
    describe: Callable[[RankEnv], str]
    enter: Callable[[], object]
    entered: Callable[[], object]

    def __post_init__(self) -> None:
        super().__init__("mpi4py.MPI")

    def begin(self) -> None:
        take_over()

    def found(self, origin: str) -> None:
        self._differs = self.rank_env.size > 1 and _differs(self.rank_env, origin)
        rc = getattr(sys.modules["mpi4py"], "rc", None)
        self._initializes = getattr(rc, "initialize", True) is not False
        if self._initializes:
            self._before_mpi_init()

    def end(self, module: ModuleType) -> None:
        watch_abort()
        if self._initializes:
            self._after_mpi_init(module)
            return
        launcher_hooks.before_mpi_init = self._before_mpi_init
        launcher_hooks.after_mpi_init = partial(self._after_mpi_init, module)

    def _before_mpi_init(self) -> None:
        self.enter()
        if self._differs:
            self.tell(self.describe(self.rank_env))

    def _after_mpi_init(self, module: ModuleType) -> None:
        self.entered()
        if self._differs:
            self.tell("")
        if self.rank_env.size > module.COMM_WORLD.Get_size() == 1:
            raise SystemExit(self.describe(self.rank_env))


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


def prepare_pyspark() -> None:
    """Let pyspark use what this rank's task has: at once, or when the program imports pyspark."""
    if SPARK_TASK not in os.environ:
        return
    if "pyspark" in sys.modules:
        _prepare_pyspark()
    else:
        _PysparkWatch("pyspark")


def _prepare_pyspark() -> None:
    from pyspark import Accumulator, Broadcast, SparkFiles

    known = sys.modules[Broadcast.__module__]._broadcastRegistry  # the module's name differs between versions
    task = json.loads(os.environ[SPARK_TASK])
    SparkFiles._root_directory = task["folder"]
    SparkFiles._is_running_on_worker = True
    for number, path in task["broadcasts"].items():
        known[int(number)] = Broadcast(path=path)
    for name in ("add", "__iadd__"):
        setattr(Accumulator, name, _refuse_to_add)


def _refuse_to_add(_self: object, _term: object) -> NoReturn:
    raise RuntimeError(
        "a rank cannot add to an accumulator: it is a process beside its Spark task, which would not learn of"
        " it; return the value, or sum it over the ranks by hvd.allreduce(value, op=hvd.Sum)"
    )


class _PysparkWatch(ImportWatch):
    """Prepares pyspark after its import."""

    def end(self, module: ModuleType) -> None:  # noqa: ARG002
        _prepare_pyspark()


def offer_horovod() -> None:
    """Let this process import ``horovod`` if its launcher was told so; an installed Horovod comes first.

    The folder is the last of sys.path, which multiprocessing passes on to the processes that it starts.
    """
    if os.environ.get(AS_HOROVOD) == "1" and _HOROVOD not in sys.path:
        sys.path.append(_HOROVOD)
