"""The job spec: what a job runs, and how long its parts may take. Every launcher makes one.

Errors name options as the user gives them. A launcher passes a :data:`NameOf` to the code that makes texts:
``pyhvdrun`` passes :data:`flag_of`, and ``pyhvd.launch`` and ``pyhvd.spark`` pass :data:`argument_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # supervisors import this module, and must not import msgspec
    from pyhvd.job.messages import StoreOrder


class Option(NamedTuple):
    """An option that errors may name.

    Attributes
    ----------
    flag : str
        The flag of ``pyhvdrun``; empty if there is none.
    argument : str
        The argument of ``pyhvd.launch``, ``pyhvd.spark`` and the like.
    suffix : str
        The option's variable without the prefix ``PYHVD_``; empty if it has no variable.
    default : float
        The option's value if neither the option nor the variable is given.
    """

    flag: str
    argument: str
    suffix: str = ""
    default: float = 0.0

    @property
    def source(self) -> str:
        """The text in ``--help`` that says where the default comes from."""
        return f"PYHVD_{self.suffix}, or {self.default:g}"


NameOf = Callable[[Option], str]
"""Returns the name under which the user knows an option."""

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
    """The settings that only an elastic job has.

    Attributes
    ----------
    max_size : int
        The most ranks that the job may have; 0 without a limit.
    preemption_command : str
        A shell command that each agent runs; exit code 0: its host will be taken away. Empty for none.
    store : StoreOrder or None
        The elastic store for commits; None without one.
    resumable : bool
        Whether stored commits stay for a later run of the job, unless the job finishes.
    """

    max_size: int = 0
    preemption_command: str = ""
    store: StoreOrder | None = None
    resumable: bool = False


@dataclass(frozen=True)
class JobSpec:
    """What a job runs, and its time limits.

    Attributes
    ----------
    code : bytes
        A pickled function with its arguments, or a :class:`~pyhvd.job.agent.rank_process.Program`.
    function : bool
        Whether `code` is a function for agents of hosts, which may then stay for the next job. The agents of
        ``pyhvd.spark.run`` call a function in any case.
    env : mapping of str to str
        Variables of the ranks, in addition to those of each rank's agent.
    executable : str or None
        The ranks' Python; None for the agents' own.
    start_timeout : float
        Time limit in seconds for all agents to register, and for the ranks to find each other.
    ends_late : bool
        Whether the job ends if a rank calls ``init()`` more than `start_timeout` after the first rank. If
        not, a warning names the late rank.
    name_of : NameOf
        Returns the names of options for errors.
    elastic : ElasticSpec or None
        The settings of an elastic job; None if the job is not elastic, so that its first failure ends it.
    """

    code: bytes
    function: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    executable: str | None = None
    start_timeout: float = 600.0
    ends_late: bool = False
    name_of: NameOf = flag_of
    elastic: ElasticSpec | None = None
