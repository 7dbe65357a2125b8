"""What a job runs, and how long its parts may take: every launcher makes such a description.

Errors name the options by which users say so. A launcher passes a :data:`NameOf` down to the code that makes
texts: ``pyhvdrun`` passes :data:`flag_of`, and ``pyhvd.launch`` and ``pyhvd.spark`` pass :data:`argument_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the supervisor of a rank reads options, and must not import msgspec
    from pyhvd.job.messages import StoreOrder


class Option(NamedTuple):
    """An option.

    Attributes
    ----------
    flag : str
        The flag of ``pyhvdrun``; empty if there is none.
    argument : str
        The argument of ``pyhvd.launch``, ``pyhvd.spark`` and the like.
    suffix : str
        The part of its variable after the prefix; empty without a variable.
    default : float
        Its value if it is not given.
    """

    flag: str
    argument: str
    suffix: str = ""
    default: float = 0.0

    @property
    def source(self) -> str:
        """The text about the default in ``--help``."""
        return f"PYHVD_{self.suffix}, or {self.default:g}"


NameOf = Callable[[Option], str]
"""Returns an option's name."""

flag_of: NameOf = attrgetter("flag")
argument_of: NameOf = attrgetter("argument")

NUM_PROC = Option("-n", "np")
HOSTS = Option("-H", "hosts")
HOSTFILE = Option("--hostfile", "hostfile")
START_TIMEOUT = Option("--start-timeout", "start_timeout", "START_TIMEOUT", 30.0)
ELASTIC_TIMEOUT = Option("--elastic-timeout", "elastic_timeout", "ELASTIC_TIMEOUT", 600.0)
SPARK_START_TIMEOUT = Option("", "start_timeout", "SPARK_START_TIMEOUT", 600.0)
DRIVER_TIMEOUT = Option("", "", "DRIVER_TIMEOUT", 300.0)
RESET_LIMIT = Option("--reset-limit", "reset_limit")
SSH_PORT = Option("--ssh-port", "ssh_port")
NETWORK_INTERFACES = Option("--network-interfaces", "network_interfaces")
PYTHON = Option("--python", "executable")
DIRECTORY = Option("--chdir", "directory")
OUTPUT_FILENAME = Option("--output-filename", "output_filename")


@dataclass(frozen=True)
class ElasticSpec:
    """What is kept of a job whose ranks are started again.

    Attributes
    ----------
    max_size : int
        The most ranks that the job may have; 0 without a limit.
    preemption_command : str
        A shell command of each host that succeeds when the host will be taken away; empty without one.
    store : StoreOrder or None
        Where commits are stored.
    """

    max_size: int = 0
    preemption_command: str = ""
    store: StoreOrder | None = None


@dataclass(frozen=True)
class JobSpec:
    """What the ranks of a job run.

    Attributes
    ----------
    code : bytes
        A pickled function with its arguments, or a :class:`~pyhvd.job.agent.rank_process.Program`.
    function : bool
        Whether it is a function that agents on hosts call, which then stay for a next job.
    env : mapping of str to str
        Variables of the ranks, in addition to each agent's own.
    executable : str or None
        The ranks' Python; None for the agents' own.
    start_timeout : float
        Time limit in seconds for all agents to register, and for the ranks to find each other.
    ends_late : bool
        Whether a rank ends the job if it calls ``init()`` later than `start_timeout` after the first rank. If
        not, the late rank is only named.
    name_of : NameOf
        The names of options in errors.
    elastic : ElasticSpec or None
        What is kept when ranks are started again; None if the first failure ends the job.
    """

    code: bytes
    function: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    executable: str | None = None
    start_timeout: float = 600.0
    ends_late: bool = False
    name_of: NameOf = flag_of
    elastic: ElasticSpec | None = None
