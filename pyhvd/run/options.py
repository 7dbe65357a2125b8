"""What a job is asked to do, by whichever launcher: the options, with the flags of pyhvdrun that set them."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyhvd.common.urls import local_path
from pyhvd.config import port_range
from pyhvd.job.spec import ELASTIC_TIMEOUT, START_TIMEOUT, NameOf, flag_of
from pyhvd.run.flags import checked

if TYPE_CHECKING:
    from pyhvd.job.driver.discovery import HostFinder

GROUPS = (
    "",
    "hosts",
    "elastic jobs, in which ranks and hosts come and go",
    "MPI",
    "the ranks' Python, directory and environment",
)
"""The titles of the groups of flags, as ``--help`` shows them; the first group has none."""


def positive_int(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positive_float(text: str) -> float:
    """Return a number of seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, not {text!r}") from None
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be positive, and less than 1e9, not {text}")
    return value


def _interfaces(text: str) -> list[str]:
    from pyhvd.job.network.network_plans import ANY, parse_wishes

    if text == ANY:
        return [ANY]
    try:
        parse_wishes([text])
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    return text.split(",")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{exc}: {text!r}") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE, not {text!r}")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set here: give {name}=VALUE")
    return name, value if equals else os.environ[name]


def _port(text: str) -> int:
    value = positive_int(text)
    if value >= 1 << 16:
        raise argparse.ArgumentTypeError(f"must be less than 65536, not {value}")
    return value


def _ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise argparse.ArgumentTypeError(f"expected ranks such as 0,4-7, not {text!r}")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def _flag(
    usage: str, parse: Callable[[str], Any] = str, default: Any = None, *, group: str, **how: Any
) -> Any:
    """Return a field that a flag of pyhvdrun sets.

    Parameters
    ----------
    usage : str
        The flag's names, its arguments, and after a colon what it means, for ``--help``. A flag without
        arguments turns the default over.
    parse : callable
        Returns the value of an argument; it may raise ArgumentTypeError.
    default : object
        The value without the flag.
    group : str
        One of GROUPS.
    how : dict
        More arguments of ``add_argument``.
    """
    flag, _, doc = usage.partition(": ")
    words = flag.split()
    names = [word for word in words if word.startswith("-")]
    takes = words[len(names) :]
    if takes:
        how |= {"type": parse, "metavar": takes[0]}
    else:
        default = bool(default)
        how["action"] = "store_false" if default else "store_true"
    if len(takes) > 1:
        how |= {"metavar": tuple(takes), "nargs": len(takes)}
    return field(default=default, metadata={"names": names, "group": group, "how": how | {"help": doc}})


_job, _host, _elastic, _mpi, _place = (functools.partial(_flag, group=title) for title in GROUPS)


@dataclass(frozen=True)
class ElasticOptions:
    """What a job says of its ranks and hosts that may come and go.

    Attributes
    ----------
    discovery_script : str or None
        The path of the script that prints the hosts.
    min_np, max_np : int or None
        The fewest and the most ranks; None for as many as the job starts with, and for no limit.
    finder : HostFinder or None
        Finds the hosts in place of the script.
    reset_limit : int or None
        How often ranks may be started again.
    timeout : float
        Seconds to wait for enough hosts.
    cooldown : tuple of float or None
        Seconds for which a host that failed is put aside, at first and at most; None for ever.
    preemption_command : str
        A shell command that succeeds on a host that will be taken away; empty without one.
    store : str
        The folder, as fsspec names it, in which commits are stored; empty without one.
    store_every : int
        Each `store_every`-th commit is stored.
    resume : str
        The absolute path of the resume file; empty without one.
    preload : tuple of str
        Modules that zygotes import besides those at the program's top.
    """

    min_np: int | None = _elastic(
        "--min-np --min-num-proc N: go on with as few as N ranks; ranks that fail are started again",
        positive_int,
    )
    max_np: int | None = _elastic("--max-np --max-num-proc N: use N ranks at most", positive_int)
    discovery_script: str | None = _elastic(
        "--host-discovery-script PATH: a program that prints the hosts there are, each as h or h:slots on a"
        " line; run every second",
        os.path.abspath,
    )
    finder: HostFinder | None = None
    preload: tuple[str, ...] = _elastic(
        "--preload NAMES: modules that ranks import anyway, e.g. torch,pandas: ranks are forked from a"
        " process that has imported them, and what the program imports at its top",
        _names,
        (),
    )
    reset_limit: int | None = _elastic(
        "--reset-limit N: give up when ranks were started again N times", positive_int
    )
    timeout: float = _elastic(
        "--elastic-timeout S: give up when there are too few hosts for S seconds (default:"
        f" {ELASTIC_TIMEOUT.source})",
        positive_float,
        ELASTIC_TIMEOUT.default,
    )
    cooldown: tuple[float, float] | None = _elastic(
        "--blacklist-cooldown-range MIN MAX: put a host that failed aside for MIN seconds, later longer, at"
        " most MAX (default: 10 300)",
        positive_float,
        (10.0, 300.0),
    )
    preemption_command: str = _elastic(
        "--preemption-command COMMAND: a shell command that runs on each host, again 1 s after it failed;"
        " when it succeeds, the ranks leave the host, and no step is lost",
        default="",
    )
    store: str = _elastic(
        "--elastic-store URL: store commits in a folder too, which fsspec reaches and all hosts share, e.g."
        " s3://bucket/job: the job then survives the loss of all hosts at once",
        default="",
    )
    store_every: int = _elastic(
        "--elastic-store-every N: store each N-th commit (default: 1); commits that come faster than the"
        " store are left out",
        positive_int,
        1,
    )
    resume: str = _elastic(
        "--elastic-resume FILE: at SIGTERM, and when all hosts are drained, store a last commit and exit with"
        " code 75; the next run with the same FILE goes on from the store",
        os.path.abspath,
        "",
    )

    @property
    def wanted(self) -> bool:
        """Whether the job is elastic."""
        return self.finds_hosts or self.min_np is not None

    @property
    def finds_hosts(self) -> bool:
        """Whether the hosts are found while the job runs."""
        return self.discovery_script is not None or self.finder is not None


@dataclass(frozen=True)
class Options:
    """What ``pyhvdrun`` or ``pyhvd.launch`` is asked to do.

    Attributes
    ----------
    program : list of str
        A script, ``-m module`` or ``-c code``, with its arguments.
    ranks : frozenset of int or None
        The ranks whose output is shown; None for all.
    settings : dict of str to str
        Variables of the ranks, which override the environment.
    env : sequence of (str, str)
        Those of them that ``-x`` names; their values are not shown.
    mpi_args, binding_args : sequence of str
        The user's arguments for mpiexec; the latter bind ranks to cores.
    launcher : str or None
        The ranks find each other by ``pmi`` or by ``mpiexec``; None to choose by the MPI and the hosts.
    ends_late : bool
        Whether a rank that has not called ``init()`` within the start timeout ends the job.
    directory : str or None
        The absolute path of the directory in which the ranks run; None for the launcher's own.
    python : str or None
        The ranks' Python; None for the launcher's.
    send_environment : bool
        Whether ranks on other hosts get the launcher's environment.
    hosts, hostfile : str or None
        The hosts of ``-H``, and the path of ``--hostfile``.
    launch_agent : str or None
        The agent's command, which :func:`pyhvd.run.hosts.agent_template.check_agent` has accepted.
    network_interfaces : sequence of str
        What :func:`pyhvd.job.network.network_plans.parse_wishes` has accepted, or ``any``.
    port_range : range
        The ports on which ranks listen for other hosts; 0 is any.
    elastic : ElasticOptions
        Whether ranks and hosts may come and go.
    name_of : NameOf
        The names of options in errors.
    """

    program: list[str]
    settings: dict[str, str] = field(default_factory=dict)
    ends_late: bool = False
    elastic: ElasticOptions = ElasticOptions()
    name_of: NameOf = flag_of
    check_build: bool = _job(
        "-cb --check-build: show the available frameworks, controllers and operations, and exit; --verbose:"
        " why"
    )
    num_proc: int | None = _job("-n -np --num-proc N: number of ranks", positive_int)
    verbose: bool = _job("--verbose: show the commands that start the ranks, and the settings")
    start_timeout: float = _job(
        "--start-timeout S: fail if not all ranks have started after S seconds (default:"
        f" {START_TIMEOUT.source}), or if a rank calls init() S seconds later than another (default:"
        " PYHVD_START_TIMEOUT, or only say so)",
        positive_float,
        START_TIMEOUT.default,
    )
    output_filename: str | None = _job(
        "--output-filename DIR: also write each rank's output to DIR/rank.<rank>/stdout and stderr",
        checked(lambda text: os.path.abspath(local_path(text))),
    )
    prefix_output: bool = _job("--prefix-output: begin each line with its rank: [1]<stdout>:")
    prefix_timestamp: bool = _job(
        "--prefix-timestamp -prefix-timestamp --prefix-output-with-timestamp: as --prefix-output, with the"
        " time of day first"
    )
    ranks: frozenset[int] | None = _job(
        "--ranks RANKS: show the output of these ranks only, e.g. 0,4-7", _ranks
    )
    dry_run: bool = _job("--dry-run: show the commands that would start the ranks, and exit")
    hosts: str | None = _host(
        "-H --hosts HOSTS: run on these hosts, e.g. h1:4,h2:4 (4 ranks each at most), user@h:2 or [fe80::1]:2"
    )
    hostfile: str | None = _host(
        "-hostfile --hostfile FILE: run on the hosts of FILE; each line is h slots=4, h:4 or h"
    )
    slots_per_host: int | None = _host(
        "--slots-per-host --slots N: the ranks of a host for which none are given (default: 1)", positive_int
    )
    launch_agent: str | None = _host(
        "--launch-agent COMMAND: start a host's agent by COMMAND, with {host} and {command} in it (default:"
        " by ssh)"
    )
    ssh_port: int | None = _host("-p --ssh-port PORT: the port of the hosts' sshd (default: as ssh)", _port)
    ssh_identity_file: str | None = _host(
        "-i --ssh-identity-file FILE: the private key for ssh (default: as ssh)"
    )
    network_interfaces: Sequence[str] = _host(
        "--network-interfaces --network-interface NAMES: connect hosts by these interfaces or subnets, e.g."
        " eth0,10.0.0.0/24 or h1=ib0,h2=ib1; may be given again; any: leave the choice to MPI (default: one"
        " by which all hosts reach each other)",
        _interfaces,
        (),
        action="extend",
    )
    port_range: range = _host(
        "--port-range A-B: ports on which ranks listen for other hosts, at least 3 for each rank of a host"
        " (default: any)",
        checked(port_range),
        range(1),
    )
    show_config: bool = _host(
        "--show-config: show which ranks sit on which host, and which rule chose the hosts, and exit"
    )
    launcher: str | None = _mpi(
        "--launcher {pmi,mpiexec}: how ranks find each other: pmi (MPICH, Intel MPI) or mpiexec (default:"
        " mpiexec on one host; on many pmi, but for Open MPI)",
        choices=("pmi", "mpiexec"),
    )
    mpi_args: Sequence[str] = _mpi('--mpi-args "ARGS": more arguments for mpiexec, as in a shell', _words, ())
    binding_args: Sequence[str] = _mpi(
        '--binding-args "ARGS": arguments that bind ranks for mpiexec, as in a shell', _words, ()
    )
    python: str | None = _place("--python PATH: the ranks' Python (default: the launcher's)")
    directory: str | None = _place(
        "--chdir DIR: where the ranks run (default: the launcher's working directory)", os.path.abspath
    )
    env: Sequence[tuple[str, str]] = _place(
        "-x --env NAME[=VALUE]: a variable of the ranks, with the launcher's value if none is given; may be"
        " given again",
        _variable,
        (),
        action="append",
    )
    send_environment: bool = _place(
        "--no-env: do not send the launcher's environment to other hosts, but for what -x names", default=True
    )

    @property
    def chooses_hosts(self) -> bool:
        """Whether the command line gives hosts."""
        return self.hosts is not None or self.hostfile is not None

    @property
    def rank_directory(self) -> str:
        """The directory in which the ranks run."""
        return self.directory or os.getcwd()

    @property
    def script(self) -> str:
        """The path of the script; empty for a module or code."""
        return "" if self.program[:1] in ([], ["-m"], ["-c"]) else self.program[0]

    @property
    def starts_ranks(self) -> bool:
        """Whether the command line says how many ranks to start, or where."""
        return self.num_proc is not None or self.chooses_hosts

    def rank_arguments(self) -> list[str]:
        """Return the arguments of each rank's own command line."""
        arguments = []
        if self.output_filename is not None:
            arguments += ["--output-filename", self.output_filename]
        if self.prefix_output:
            arguments.append("--prefix-output")
        if self.prefix_timestamp:
            arguments.append("--prefix-timestamp")
        if self.ranks is not None:
            arguments += ["--ranks", ",".join(map(str, sorted(self.ranks)))]
        if self.program[0].startswith("-") and self.program[0] not in ("-m", "-c"):
            arguments.append("--")
        return [*arguments, *self.program]
