"""What the detectors return, and helpers that they share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyhvd.job.mpi.rank_env import RankEnv
from pyhvd.job.spec import NameOf, flag_of
from pyhvd.run.hosts.agent_template import SSH
from pyhvd.run.hosts.hosts import Host, HostsError

Environ = Mapping[str, str]
HYDRA_HOST_FILES = ("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE")
"""The variables that name a hostfile for Hydra, the mpiexec of MPICH and Intel MPI."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a detector looks.

    Attributes
    ----------
    environ : mapping of str to str
        The environment of this process.
    read : callable
        Returns the text of a file; raises OSError or UnicodeDecodeError.
    slots_per_host : int or None
        The slots of hosts for which the system gives none; None if the user has not said it.
    name_of : NameOf
        The names of options in errors.
    """

    environ: Environ
    read: Callable[[str], str]
    slots_per_host: int | None = None
    name_of: NameOf = flag_of


@dataclass(frozen=True, slots=True)
class ForeignRank:
    """This process is a rank of another launcher.

    Attributes
    ----------
    launcher : str
        The program that started it, for messages.
    numbers : RankEnv
        Rank and size.
    alone : bool
        Whether it may as well be a shell: the only process of its step, without a process manager for MPI.
        Then ``-n``, ``-H`` and ``--hostfile`` start a job from it.
    """

    launcher: str
    numbers: RankEnv
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """A cluster gave hosts to the job in which this process runs.

    Attributes
    ----------
    system : str
        The system and its job, for messages.
    hosts : tuple of Host
        The hosts; empty if the environment does not name them. Then only the agent counts, with ``-H`` or
        ``--hostfile``.
    agent : str
        The agent's command.
    interface : str
        The network interface that the system names; empty if it names none.
    note : str
        A sentence about the system for ``--show-config``; empty if there is none.
    """

    system: str
    hosts: tuple[Host, ...]
    agent: str = SSH
    interface: str = ""
    note: str = ""


def number(environ: Environ, *names: str) -> int | None:
    """Return the first of the variables that is a whole number; None if none is."""
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdecimal():
            return int(text)
    return None


def rank_env(
    environ: Environ, rank: int, size: int | None, local_rank: int | None, local_size: int | None
) -> RankEnv:
    """Return a rank's numbers. Unknown ones of the host are those of the job; an unknown size is PMI's."""
    size = size or number(environ, "PMI_SIZE") or 1
    local_rank = rank if local_rank is None else local_rank
    return RankEnv("unknown", rank, size, local_rank, local_size or size)


def read_named(variable: str, around: Surroundings) -> str:
    """Return the text of the file that a variable names; raise HostsError with the reason."""
    return read_file(around.environ[variable], f"{variable} names the hosts of this job", around)


def read_file(path: str, why: str, around: Surroundings) -> str:
    """Return the text of a file of hosts; raise HostsError with the reason."""
    try:
        return around.read(path)
    except (OSError, UnicodeDecodeError) as exc:
        reason = (exc.strerror or str(exc)) if isinstance(exc, OSError) else "it is no text"
        raise HostsError(f"{why}, but {path} cannot be read ({reason})") from None
