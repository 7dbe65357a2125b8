"""What a job is asked to do, by whichever launcher: the options, without their parsing."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyhvd.job.spec import ELASTIC_TIMEOUT, START_TIMEOUT, NameOf, flag_of


@dataclass(frozen=True)
class ElasticOptions:
    """What a job says of its ranks and hosts that may come and go.

    Attributes
    ----------
    discovery_script : str or None
        The path of the script that prints the hosts.
    min_np, max_np : int or None
        The fewest and the most ranks; None for as many as the job starts with, and for no limit.
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
    preload : tuple of str
        Modules that zygotes import besides those at the program's top.
    """

    discovery_script: str | None = None
    min_np: int | None = None
    max_np: int | None = None
    reset_limit: int | None = None
    timeout: float = ELASTIC_TIMEOUT.default
    cooldown: tuple[float, float] | None = (10.0, 300.0)
    preemption_command: str = ""
    store: str = ""
    store_every: int = 1
    preload: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether the job is elastic."""
        return self.discovery_script is not None or self.min_np is not None


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
    env : list of (str, str)
        Those of them that ``-x`` names; their values are not shown.
    mpi_args, binding_args : list of str
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
    network_interfaces : list of str
        What :func:`pyhvd.job.network.network_plans.parse_wishes` has accepted, or ``any``.
    port_range : range
        The ports on which ranks listen for other hosts; 0 is any.
    elastic : ElasticOptions
        Whether ranks and hosts may come and go.
    name_of : NameOf
        The names of options in errors.
    """

    program: list[str]
    num_proc: int | None = None
    verbose: bool = False
    mpi_args: list[str] = field(default_factory=list)
    binding_args: list[str] = field(default_factory=list)
    launcher: str | None = None
    start_timeout: float = START_TIMEOUT.default
    ends_late: bool = False
    output_filename: str | None = None
    prefix_output: bool = False
    prefix_timestamp: bool = False
    ranks: frozenset[int] | None = None
    dry_run: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    env: list[tuple[str, str]] = field(default_factory=list)
    check_build: bool = False
    directory: str | None = None
    python: str | None = None
    send_environment: bool = True
    hosts: str | None = None
    hostfile: str | None = None
    slots_per_host: int | None = None
    launch_agent: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: list[str] = field(default_factory=list)
    port_range: range = range(1)
    show_config: bool = False
    elastic: ElasticOptions = ElasticOptions()
    name_of: NameOf = flag_of

    @property
    def chooses_hosts(self) -> bool:
        """Whether the command line gives hosts."""
        return self.hosts is not None or self.hostfile is not None

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
