"""The variables of a rank: reading what its launcher set, sending or removing a launcher's, setting defaults.

Decides which process is the rank: its children inherit its variables. Does not touch MPI.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from pyhvd.common.kernel import cgroup_limits
from pyhvd.job.mpi.openmpi.settings import PARAMETERS

_ELASTIC = "PYHVD_ELASTIC_"
GENERATION = _ELASTIC + "GENERATION"
"""The variable with the number of a rank's generation; ranks of jobs that are not elastic have none."""
JOB = _ELASTIC + "JOB"
"""The variable that has :attr:`RankGeneration.job`; the launcher sets it in all generations."""
AS_HOROVOD = "PYHVD_AS_HOROVOD"
"""The variable of ranks whose program may import horovod."""
# Variables of the job that the executor itself belongs to.
_OF_THE_EXECUTOR = ("HYDRA_", "OMPI_", "PRTE_")
# Users set Open MPI's parameters by spark.executorEnv. orte_ and ess_ are Open MPI 4's for its own job.
_OF_A_JOB = ("OMPI_MCA_orte_", "OMPI_MCA_ess_")

OPENMPI = "Open MPI"
MPICH = "MPICH"
OTHER = "unknown"
TORCHRUN = "torchrun"

# (launcher, rank, size, local rank, local size). Open MPI first: its ranks may inherit PMI_* from Slurm.
_VARIABLES = (
    (
        OPENMPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (OTHER, "PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)

_RANK_PROCESS = "_PYHVD_RANK_PROCESS"
"""The variable by which ``init()`` tells children of a rank which process is the rank, and of which job."""

OF_RANKS = (
    _RANK_PROCESS,
    *("PMI_", "PMIX_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_CTX"),
    *("OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_FILE_LOCATION", "PRTE_LAUNCHED"),
)
"""How names of variables begin that make a process a rank: with mpiexec's, MPI_Init joins that job."""

OF_CLUSTERS = ("SLURM_", "SLURMD_", "PBS_", "LSB_", "FLUX_")
"""How names of variables begin by which a cluster describes the job of this process."""

_RUN_ID = "TORCHELASTIC_RUN_ID"  # of torchrun's processes
OF_TORCH = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
"""The variables by which torch.distributed knows a rank; other programs may use these names, too."""

HOROVOD_NUMBERS = tuple(
    f"HOROVOD_{name}"
    for name in ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
)
"""The variables of a rank that scripts and libraries read; whichever way a rank is started, it has them."""

OF_ONE_RANK = (
    *OF_RANKS,
    *HOROVOD_NUMBERS[1:],  # all ranks here have the same host
    *("HOROVOD_ELASTIC", _ELASTIC),
)
"""How the names of variables begin that belong to one rank, or to one generation."""

# Of the launcher's own login, terminal and devices.
_NEVER = {
    *("PWD", "OLDPWD", "SHLVL", "_", "HOME", "USER", "LOGNAME", "MAIL", "SHELL", "HOSTNAME", "DISPLAY"),
    *("LS_COLORS", "TMPDIR"),
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),  # Slurm sets them beside *_VISIBLE_DEVICES
}
_NEVER_PREFIXES = (
    *("TERM", "SSH_", "XDG_", "DBUS_", "BASH_FUNC_"),
    # Of a job that the launcher itself may be part of.
    *(*OF_RANKS, *OF_CLUSTERS, "PRTE", "HYDRA"),
)
# Credentials and settings of file systems.
_OF_STORES = ("AWS_", "AZURE_", "FSSPEC_", "GCE_", "GCLOUD_", "GOOGLE_", "HF_", "HTTP_PROXY", "HTTPS_PROXY")
_NEVER_SUFFIX = "_VISIBLE_DEVICES"
_SENT_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")

# Without these settings a waiting rank keeps its core, also when ranks share cores. The first variable of
# MPICH works at THREAD_MULTIPLE, the others below. With Open MPI, 4 ranks on 2 cores took seconds instead of
# milliseconds.
_YIELD = {
    MPICH: {
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
    },
    OPENMPI: {"OMPI_MCA_mpi_yield_when_idle": "1"},
}


@dataclass(frozen=True)
class RankEnv:
    """A rank's numbers, as its launcher announced them.

    Attributes
    ----------
    launcher : str
        ``"Open MPI"``, ``"MPICH"`` (Hydra, also Intel MPI's), ``"torchrun"`` or ``"unknown"``.
    rank, size, local_rank, local_size : int
        Rank and number of ranks, in the job and on this host. If the launcher does not announce those of the
        host, they are those of the job.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def title(self) -> str:
        """The words that begin every message: ``rank 3 of 8 on host h``."""
        return f"rank {self.rank} of {self.size} on host {socket.gethostname()}"


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Return this rank's numbers; None in a process that is not a rank."""
    for launcher, rank_name, size_name, local_rank_name, local_size_name in _VARIABLES:
        rank = _number(environ.get(rank_name))
        if rank is None:
            continue
        size = _number(environ.get(size_name)) or 1
        local_rank = _number(environ.get(local_rank_name))
        if launcher == MPICH and "MPI_LOCALNRANKS" not in environ:
            launcher = OTHER  # srun or another resource manager sets PMI_RANK too, without Hydra's PMI-1
        return RankEnv(
            launcher=launcher,
            rank=rank,
            size=size,
            local_rank=rank if local_rank is None else local_rank,
            local_size=_number(environ.get(local_size_name)) or size,
        )
    return None


def read_torchrun(environ: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Return the numbers that torchrun gave this process; None if it is no process of torchrun.

    srun and mpiexec may have started torchrun: then their variables are not about this process. If torchrun's
    process has started mpiexec, the variables of torchrun are not.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (_number(environ.get(name)) for name in names)
    if _RUN_ID not in environ or rank is None or size is None:
        return None
    if _is_of_another_process(environ.get("PMI_FD", "")):
        return None
    return RankEnv(TORCHRUN, rank, size, local_rank or 0, local_size or 1)


def _is_of_another_process(descriptor: str) -> bool:
    """Return whether a descriptor is one end of a socket pair that another process has made, such as mpiexec.

    A descriptor that this process has not inherited may be the number of a socket that it has made itself.
    """
    if not _socket_number(descriptor) or not hasattr(socket, "SO_PEERCRED"):
        return False
    with socket.socket(fileno=os.dup(int(descriptor))) as sock:
        if sock.family != socket.AF_UNIX:
            return False
        maker, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(maker != os.getpid())


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """One generation of ranks.

    Attributes
    ----------
    number : int
        How often ranks were started again before.
    commit : int
        The number of the newest commit, from which this generation goes on; 0 if there is none.
    source : int
        A rank whose host holds that commit.
    max_size : int
        The most ranks that the job may have; 0 without a limit.
    job : str
        Letters that tell jobs apart, the same in all generations of one job.
    stores : bool
        Whether commits are stored outside of the hosts, by the host of rank 0.
    """

    number: int
    commit: int = 0
    source: int = 0
    max_size: int = 0
    job: str = ""
    stores: bool = False

    def variables(self) -> dict[str, str]:
        """Return the variables of a rank, but for :data:`JOB`."""
        values = {
            GENERATION: self.number,
            _ELASTIC + "COMMIT": self.commit,
            _ELASTIC + "SOURCE": self.source,
            _ELASTIC + "MAX_SIZE": self.max_size,
            _ELASTIC + "STORES": int(self.stores),
            "HOROVOD_ELASTIC": 1,
        }
        return {name: str(value) for name, value in values.items()}


def read_generation(environ: Mapping[str, str]) -> RankGeneration | None:
    """Return the generation of this rank; None if its job is not elastic."""
    if GENERATION not in environ:
        return None
    names = (GENERATION, *(_ELASTIC + name for name in ("COMMIT", "SOURCE", "MAX_SIZE", "STORES")))
    number, commit, source, max_size, stores = (int(environ.get(name, "0")) for name in names)
    return RankGeneration(number, commit, source, max_size, environ.get(JOB, ""), bool(stores))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def without(environ: Mapping[str, str], *prefixes: str) -> dict[str, str]:
    """Return an environment without the variables whose names begin with one of the prefixes."""
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def child_environment() -> dict[str, str]:
    """Return this process's environment without the variables that make it a rank.

    A child of a rank that gets it is no part of the job: it can be a rank of a job of its own, or call
    ``init()`` alone, as the only rank.

    Examples
    --------
    >>> import subprocess, sys
    >>> import pyhvd as hvd
    >>> program = "import pyhvd as hvd; hvd.init(); print(hvd.size())"
    >>> subprocess.check_output([sys.executable, "-c", program], env=hvd.child_environment(), text=True)
    '1\\n'
    """
    return outside_of_rank(os.environ)


def outside_of_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what makes its process a rank, for MPI and for torch."""
    is_rank = _RUN_ID in environ or read_rank_env(environ) is not None
    own = without(environ, *OF_ONE_RANK, "TORCHELASTIC_")
    return {name: value for name, value in own.items() if not (is_rank and name in OF_TORCH)}


def claim_rank(environ: MutableMapping[str, str] = os.environ) -> str:
    """Make this process the rank, for its children; return why it is none, or an empty text.

    A program that a rank's first process starts may be the rank, if it is the first that calls ``init()``.
    """
    refusal = find_rank_process(environ)
    if not refusal:
        environ[_RANK_PROCESS] = f"{os.getpid()} {_name_of_rank(environ)}"
    return refusal


def find_rank_process(environ: Mapping[str, str] = os.environ) -> str:
    """Return which process is the rank whose variables this process has inherited; empty if it is none."""
    pid, _, name = environ.get(_RANK_PROCESS, "").partition(" ")
    torchrun = read_torchrun(environ)
    rank_env = torchrun or read_rank_env(environ)
    who = "a rank" if rank_env is None else f"rank {rank_env.rank}"
    if pid and pid != str(os.getpid()) and name == _name_of_rank(environ):
        return f"{who} (process {pid})"
    if torchrun is not None:
        return ""
    descriptor = environ.get("PMI_FD", "")
    return who if descriptor.isdecimal() and not _socket_number(descriptor) else ""


def explain_child(process: str) -> str:
    """Return the error's text for a child of a rank that calls ``init()``; see :func:`find_rank_process`."""
    return (
        f"init() was called in process {os.getpid()}, a child of {process}: it has inherited the rank's"
        " variables, but only the rank itself can call init(). If multiprocessing has started it, guard"
        " init() with 'if __name__ == \"__main__\":', as such a child imports the program again. A child"
        " that is no part of this job needs another environment: env=pyhvd.child_environment()"
    )


def _name_of_rank(environ: Mapping[str, str]) -> str:
    """Return what tells a rank from ranks of other jobs: a job that a rank starts inherits its variables."""
    if read_torchrun(environ) is not None:
        of_torchrun = (_RUN_ID, "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "RANK")
        return ",".join(environ.get(name, "") for name in of_torchrun)
    names = (
        *("PMI_RANK", "PMI_ID", "PMIX_NAMESPACE", "PMIX_RANK"),
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    )
    return ",".join([_socket_number(environ.get("PMI_FD", "")), *(environ.get(name, "") for name in names)])


def _socket_number(descriptor: str) -> str:
    """Return the number of the socket that is open as a descriptor; empty without one."""
    try:
        found = os.fstat(int(descriptor))
    except (OSError, ValueError, OverflowError):
        return ""
    return str(found.st_ino) if stat.S_ISSOCK(found.st_mode) else ""


def set_defaults(rank_env: RankEnv, environ: MutableMapping[str, str]) -> str | None:
    """Set OMP_NUM_THREADS, let SIGHUP end a rank, and make waiting ranks yield if there are too few cores.

    Ranks of elastic jobs get no shared memory of UCX: MPICH has its own inside a host, and UCX's files would
    stay in /dev/shm when ranks are killed.

    Variables that the user has set stay. Call it in the process that mpiexec started: its parent must be
    mpiexec's process.

    Returns
    -------
    str or None
        The chosen OMP_NUM_THREADS, as a message to print once; None if the user had set it.
    """
    mine, cores, counted = _count_cores()
    let_yield(rank_env, environ, cores)
    if rank_env.launcher == MPICH:  # mpiexec of Open MPI does not pass on that nohup ignores SIGHUP
        let_hangup_end(environ)
        if GENERATION in environ:
            leave_no_files(environ)
    if "OMP_NUM_THREADS" in environ:
        return None
    threads = mine if mine < cores else max(1, cores // rank_env.local_size)
    environ["OMP_NUM_THREADS"] = str(threads)
    bound = f", bound to {mine} each" if mine < cores else ""
    why = f"{counted}, {rank_env.local_size} local ranks{bound}"
    return f"pyhvd: OMP_NUM_THREADS={threads} on each rank ({why}); set it yourself to change this"


def let_yield(rank_env: RankEnv, environ: MutableMapping[str, str], cores: int = 0) -> None:
    """Make waiting ranks yield if this host has fewer cores for the job than ranks; 0: count the cores."""
    if rank_env.local_size > (cores or _count_cores()[1]):
        for name, value in _YIELD.get(rank_env.launcher, {}).items():
            environ.setdefault(name, value)


def horovod_variables(host: str, *numbers: int) -> dict[str, str]:
    """Return the variables of :data:`HOROVOD_NUMBERS`, but for the last ones if numbers are left out."""
    return dict(zip(HOROVOD_NUMBERS, [host, *map(str, numbers)], strict=False))


def set_horovods(rank_env: RankEnv, environ: MutableMapping[str, str]) -> None:
    """Set the variables of :data:`HOROVOD_NUMBERS` that a rank of mpiexec knows before MPI_Init.

    Other launchers than Open MPI's and Hydra may not announce the numbers of the host. The number of the host
    itself is known on one host only.
    """
    for name in HOROVOD_NUMBERS:
        environ.pop(name, None)  # of a job that this one is part of
    numbers = [rank_env.rank, rank_env.size]
    here = rank_env.local_size == rank_env.size
    if rank_env.launcher != OTHER or not here:
        numbers += [rank_env.local_rank, rank_env.local_size, *((0, 1) if here else ())]
    environ.update(horovod_variables(socket.gethostname(), *numbers))


def let_hangup_end(environ: MutableMapping[str, str]) -> None:
    """Let SIGHUP end this rank: else UCX takes it, and stops the rank for a debugger."""
    environ.setdefault("UCX_DEBUG_SIGNO", "0")


def leave_no_files(environ: MutableMapping[str, str]) -> None:
    """Let UCX make no shared memory: its files would stay in /dev/shm when this rank is killed."""
    environ.setdefault("UCX_TLS", "^sm")


def _count_cores() -> tuple[int, int, str]:
    """Return how many cores this process may use, how many the job may use on this host, and that as text.

    They differ if mpiexec bound this rank to cores of its own: then the job has the cores of mpiexec. A quota
    of time, such as a container's CPU limit, is worth as many cores, rounded down.
    """
    mine = parents = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        mine = parents = len(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):
            parents = len(os.sched_getaffinity(os.getppid()))
    cores, quota = max(mine, parents), cgroup_limits()[0]
    if quota is None or quota >= cores:
        return mine, cores, f"{cores} cores"
    allowed = max(1, int(quota))
    return min(mine, allowed), allowed, f"the cgroup's limit of {quota:g} of {cores} cores"


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds this task's modules, without another launcher's variables.

    Its PYTHONPATH includes files that Spark has distributed. It lacks the directories of this Python itself,
    as another Python may be started.
    """
    wanted = set(environ.get("PYTHONPATH", "").split(os.pathsep))
    installed = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    paths = [path for path in sys.path if path and (path in wanted or not path.startswith(installed))]
    parameters = {name: value for name, value in environ.items() if name.startswith(PARAMETERS)}
    own = without(environ, *OF_RANKS, *OF_CLUSTERS, *_OF_THE_EXECUTOR) | without(parameters, *_OF_A_JOB)
    return own | {"PYTHONPATH": os.pathsep.join(paths)}


def to_send(environ: Mapping[bytes, bytes], settings: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return the variables to send: the launcher's, but for those of its own host and job, and the settings.

    Parameters
    ----------
    environ : mapping of bytes to bytes
        The launcher's environment.
    settings : mapping of str to str
        The user's; they are sent in any case.
    """
    sent = {name: value for name, value in environ.items() if _is_sent(name)}
    sent |= {os.fsencode(name): os.fsencode(value) for name, value in settings.items()}
    return list(sent.items())


def of_stores(sent: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return those variables of :func:`to_send` that file systems of stores read."""
    return [pair for pair in sent if os.fsdecode(pair[0]).upper().startswith(_OF_STORES)]


def _is_sent(name: bytes) -> bool:
    text = os.fsdecode(name)
    if text in _NEVER or text.startswith(_NEVER_PREFIXES) or text.endswith(_NEVER_SUFFIX):
        return False
    return _SENT_NAME.fullmatch(name) is not None
