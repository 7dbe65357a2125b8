"""The launcher of an elastic job: it starts ranks again when ranks or hosts fail, come or go.

1. :mod:`pyhvd.job.membership` decides which hosts have ranks, and when a generation of ranks begins and ends.
2. :mod:`pyhvd.job.generation_driver` serves one generation. The agents, which hold what ranks commit, stay
   from one to the next; so do those of hosts without ranks.
3. This module acts, in one thread, and tells the machine what happens.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from pyhvd.job.agent_command import AgentCommand
from pyhvd.job.discovery import Discovery, Failed
from pyhvd.job.driver import JobSpec
from pyhvd.job.errors import LaunchError
from pyhvd.job.generation_driver import ElasticSpec, GenerationDriver, Outcome, StateLostError
from pyhvd.job.generation_env import JOB
from pyhvd.job.hosts_driver import Checked, Seat
from pyhvd.job.hosts_machine import RankError
from pyhvd.job.kept_agents import KeptAgents
from pyhvd.job.membership import (
    AskToLeave,
    EndAgent,
    EndGeneration,
    Finish,
    FoundHost,
    GiveUp,
    Limits,
    Membership,
    Place,
    Say,
    StartAgent,
    StartGeneration,
)
from pyhvd.job.mpi.rank_env import MPICH
from pyhvd.job.output import Output, is_terminal
from pyhvd.job.process.output import OutputFile
from pyhvd.job.program_process import Program
from pyhvd.job.status_line import StatusLine, say
from pyhvd.job.store import Store, StoreError, StoreOrder, open_folder
from pyhvd.run.cli import Options
from pyhvd.run.drain_socket import DrainError, DrainSocket
from pyhvd.run.environment import of_stores, to_send
from pyhvd.run.hosts import Host, HostSeats, Seats
from pyhvd.run.launch_agent import explain, ssh_command
from pyhvd.run.many_hosts import agent_commands, check_hosts, exit_code, make_files, signals, wanted_network
from pyhvd.run.own_host import find_own, is_own
from pyhvd.run.selection import Selection
from pyhvd.transport.tcp.connection import Secret
from pyhvd.transport.tcp.session import ChannelError

_STOP_S = 5.0
# A store that does not answer holds up the end of the job so long.
_CLEAR_S = 10.0
# Between two looks at agents that start, while no rank runs.
_LOOK_S = 0.05


class _EndNow(Exception):
    """The ranks of the running generation shall end."""


class _GaveUp(Exception):
    """The job is over, with this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Starting:
    """An agent that is being started."""

    def __init__(self, words: Sequence[str], until: float) -> None:
        self.words = words
        self.command = AgentCommand(words, Secret().reveal())
        self.until = until

    def is_up(self) -> bool:
        """Return whether the agent has authenticated itself; its greeting stays unread."""
        connection = self.command.connection
        try:
            connection.pump_out()
            if not connection.authenticated:
                connection.pump_in()
        except ChannelError:
            connection.close()
            return False
        return connection.authenticated

    def has_failed(self, now: float) -> bool:
        """Return whether it will not come up."""
        self.command.listen()
        return now > self.until or not self.command.connection.open

    def end(self) -> tuple[int, str]:
        """End it; return its exit code, and what it said."""
        ended = self.command.end()
        self.command.close()
        return ended


class RankFiles:
    """The files of the ranks' output, which stay open from one generation to the next.

    Parameters
    ----------
    directory : str or None
        Where the ranks' folders are; None without files.
    size : int
        The number of ranks by which the folders' names are padded.

    Attributes
    ----------
    by_rank : dict of int to dict of int to OutputFile
        The files of each rank that has some; the output reads it in another thread.
    """

    def __init__(self, directory: str | None, size: int) -> None:
        self.by_rank: dict[int, dict[int, OutputFile]] = {}
        self._directory = directory
        self._size = size

    def make(self, number: int) -> None:
        """Make the files of the first `number` ranks that have none yet; may raise LaunchError."""
        new = [rank for rank in range(number) if rank not in self.by_rank]
        self.by_rank |= make_files(self._directory, self._size, new)


class ElasticJob:
    """One elastic job, in the thread that calls :meth:`serve`.

    Parameters
    ----------
    options : Options
        The command line.
    agent : str
        The agent's command: a template.
    known : sequence of HostSeats
        The hosts of the user; none if a script finds them.
    membership : Membership
        Decides.
    discovery : Discovery or None
        Finds hosts.
    output : Output
        Shows the ranks' output.
    status : StatusLine
        Shows how far the first start has come.
    files : RankFiles
        The files of the output.
    store : StoreOrder or None
        Where commits are stored.
    """

    def __init__(
        self,
        options: Options,
        agent: str,
        known: Sequence[HostSeats],
        membership: Membership,
        discovery: Discovery | None,
        output: Output,
        status: StatusLine,
        files: RankFiles,
        store: StoreOrder | None,
    ) -> None:
        self._options = options
        self._agent = agent
        self._membership = membership
        self._discovery = discovery
        self._output = output
        self._status: StatusLine | None = status
        self._files = files
        self._store = store
        self._elastic = ElasticSpec(options.elastic.max_np or 0, options.elastic.preemption_command, store)
        self._letters = secrets.token_hex(3)
        self._kept = KeptAgents()
        self._starting: dict[str, _Starting] = {}
        self._up: dict[str, Sequence[str]] = {}  # the commands of agents that are up, by host
        self._holders: set[str] | None = None  # see GenerationDriver
        self._known = {each.host.name: each for each in known}
        self._next: StartGeneration | None = None
        self._driver: GenerationDriver | None = None
        self._finished = False
        self._commit = 0  # the newest of which an agent has told
        self._checked: Checked | None = None
        self._requests: DrainSocket | None = None
        with contextlib.suppress(OSError):  # without a private folder: hosts are drained by signals only
            self._requests = DrainSocket()

    def serve(self) -> None:
        """Run generations until the ranks of one have all returned.

        Raises
        ------
        LaunchError
            There are not enough hosts.
        RankError
            Ranks fail again and again.
        Interrupted
            A signal ended the job.
        """
        try:
            while not self._finished:
                self._step(time.monotonic())
                begins, self._next = self._next, None
                if begins is not None:
                    self._run(begins)
                elif not self._finished:
                    time.sleep(_LOOK_S)
        except _GaveUp as exc:
            raise exc.error from None

    def close(self) -> None:
        """End all agents."""
        if self._requests is not None:
            self._requests.close()
        for starting in self._starting.values():
            starting.end()
        self._kept.close()
        if self._store is not None:
            _clear(self._store)

    # -- what happens ----------------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        """Tell the machine what has happened, and do what it decides."""
        self._look_at_discovery(now)
        self._look_at_agents(now)
        self._look_at_notices(now)
        for action in self._membership.tick(now):
            if isinstance(action, StartGeneration):
                self._next = action
            elif isinstance(action, StartAgent):
                self._start_agent(action.host, now)
            elif isinstance(action, EndAgent):
                self._end_agent(action.host)
            elif isinstance(action, AskToLeave) and self._driver is not None:
                self._driver.ask_to_leave(action.number)
            elif isinstance(action, EndGeneration):
                raise _EndNow
            elif isinstance(action, GiveUp):
                raise _GaveUp(action.error)
            elif isinstance(action, Finish):
                self._finished = True
            elif isinstance(action, Say):
                self._say(action.text)

    def _look_at_discovery(self, now: float) -> None:
        if self._discovery is None:
            return
        for found in self._discovery.take():
            if isinstance(found, Failed):
                self._membership.discovery_failed(found.why, now)
            else:
                self._membership.discover(found.hosts, now, found.problems)

    def _look_at_agents(self, now: float) -> None:
        for host, starting in list(self._starting.items()):
            if starting.is_up():
                del self._starting[host]
                self._up[host] = starting.words
                self._kept.keep(starting.words, starting.command)
                self._membership.agent_up(host, now)
            elif starting.has_failed(now):
                del self._starting[host]
                self._fail_agent(host, *starting.end(), now)
        for host, words in list(self._up.items()):
            if not self._has_ranks(host) and not self._kept.has(words):
                self._lose_agent(host, "its agent is gone", now)

    def _look_at_notices(self, now: float) -> None:
        """Drain the hosts that will be taken away, as their agents or the user say."""
        if self._driver is not None:
            for host, why in self._driver.leaving.items():
                self._membership.drain(host, now, why)
            self._driver.leaving.clear()
        if self._requests is not None:
            self._requests.serve(lambda host: self._drain(host, now))
        for words, why in self._kept.take_leaving():
            for host in [host for host, known in self._up.items() if known == words]:
                self._membership.drain(host, now, why)

    def _drain(self, host: str, now: float) -> str:
        """Drain a host for the user; return what to answer."""
        if not self._membership.drain(host, now, "the user has asked for it"):
            known = ", ".join(self._membership.hosts)
            raise DrainError(f"host {host} is none of the job's hosts: {known}")
        return f"host {host} is drained: its ranks leave at their next commit or check"

    def _has_ranks(self, host: str) -> bool:
        return self._driver is not None and self._driver.serves(host)

    def _fail_agent(self, host: str, code: int, said: str, now: float) -> None:
        why, _ = self._explain(host, code, said)
        self._membership.agent_failed(host, why, now, random.random())

    def _explain(self, host: str, code: int, said: str) -> tuple[str, bool]:
        known = self._known.get(host)
        return explain(host if known is None else known.host.destination, code, said)

    def _lose_agent(self, host: str, why: str, now: float) -> None:
        self._forget(host)
        self._membership.agent_lost(host, why, now, random.random())

    def _forget(self, host: str) -> None:
        """Note that a host's agent is gone, and what it has held."""
        self._up.pop(host, None)
        if self._holders is not None:
            self._holders.discard(host)

    # -- what is decided -------------------------------------------------------------------------------

    def _start_agent(self, host: str, now: float) -> None:
        words = self._words([Place(host, 1)])[host]
        try:
            self._starting[host] = _Starting(words, now + self._options.start_timeout)
        except OSError as exc:
            self._membership.agent_failed(host, f"{words[0]} cannot be started: {exc}", now, 1.0)

    def _end_agent(self, host: str) -> None:
        self._forget(host)
        starting = self._starting.pop(host, None)
        command = self._kept.take(self._words([Place(host, 1)])[host]) if starting is None else None
        if starting is not None:
            starting.end()
        elif command is not None:
            command.end()
            command.close()

    def _words(self, places: Sequence[Place]) -> dict[str, list[str]]:
        return agent_commands(self._options, self._seats(places))

    def _seats(self, places: Sequence[Place]) -> Seats:
        seats, first = [], 0
        for place in places:
            known = self._known.get(place.host)
            own = known.own if known is not None else is_own(place.host)
            host = Host(place.host, place.slots, known.host.user if known is not None else "")
            seats.append(HostSeats(host, range(first, first + place.slots), own))
            first += place.slots
        return Seats(tuple(seats), self._agent)

    def _run(self, begins: StartGeneration) -> None:
        """Run one generation to its end, and tell the machine how it ended."""
        driver = self._driver = self._make_driver(begins)
        failure: RankError | LaunchError | None = None
        try:
            with signals(driver):
                try:
                    driver.serve()
                except StateLostError as exc:
                    raise _GaveUp(exc) from None
                except (RankError, LaunchError) as exc:
                    failure = exc
                except _EndNow:
                    driver.outcome = Outcome.LEFT
                driver.settle()
            driver.keep_agents()
        finally:
            self._driver = None
            driver.stop("the job is over", _STOP_S)
            driver.close()
            self._status = None
        self._report(driver, failure, time.monotonic())

    def _report(self, driver: GenerationDriver, failure: Exception | None, now: float) -> None:
        """Tell the machine how a generation ended."""
        if driver.began_from is not None and driver.began_from < self._commit:
            self._commit = driver.began_from
            self._membership.rolled_back(self._commit)
        self._commit = max([self._commit, *driver.commits.values()])
        self._membership.committed(self._commit, now)
        for host, why in driver.refused.items():
            self._membership.agent_failed(host, why, now, random.random())
        lost = dict(driver.lost)
        self._holders = None if driver.holders is None else driver.holders - set(lost)
        host = getattr(failure, "host", "")
        if failure is None:
            done = driver.outcome is Outcome.DONE
            (self._membership.generation_done if done else self._membership.generation_left)(now)
        elif host in lost:
            self._up.pop(host, None)
            self._membership.host_failed(failure, host, lost.pop(host), now, random.random())
        else:
            self._membership.rank_failed(failure, host, now, random.random())
        for host, why in lost.items():
            self._lose_agent(host, why, now)

    def _make_driver(self, begins: StartGeneration) -> GenerationDriver:
        options = self._options
        directory = options.directory or os.getcwd()
        seats = self._seats(begins.places)
        try:
            self._files.make(seats.size)
        except LaunchError as exc:  # of ranks by which the job has grown
            self._say(f"pyhvd: {exc}")
        given = dict(os.environb) if options.send_environment else {}
        sent, preload = to_send(given, options.settings), list(options.elastic.preload)
        program = Program("pyhvd.run.program_rank", options.program, directory, sent, preload)
        commands = agent_commands(options, seats)
        return GenerationDriver(
            begins.number,
            self._elastic,
            self._commit,
            self._holders,
            self._step,
            self._kept,
            JobSpec(seats.size, program.dump(), {JOB: self._letters}, start_timeout=options.start_timeout),
            [Seat(each.host.name, len(each.ranks), commands[each.host.name]) for each in seats.hosts],
            lambda: self._check(directory),
            self._explain,
            self._output,
            self._say,
            0 if begins.number == 0 else None,
            wanted_network(options, seats),
            self._status,
        )

    def _check(self, directory: str) -> Checked:
        """Return what all hosts must have; the ranks of each generation meet anew."""
        if self._checked is None:
            self._checked = check_hosts(self._options, directory)
            if self._checked.facts.mpi != MPICH:
                raise LaunchError(
                    f"an elastic job needs MPICH or Intel MPI, but mpi4py is built on"
                    f" {self._checked.facts.mpi_name}, whose launcher does not survive the loss of a host:"
                    ' pip install "pyhvd[mpich]"'
                )
        return replace(self._checked, rendezvous=type(self._checked.rendezvous)())

    def _say(self, text: str) -> None:
        if self._status is not None:
            self._status.say(text)
        else:
            say(text)


def run_found(options: Options) -> int:
    """Run an elastic job on the hosts that a script finds; return the exit code."""
    agent = options.launch_agent or ssh_command(options.ssh_port, options.ssh_identity_file)
    size = options.num_proc or options.elastic.min_np or 1
    script, slots = options.elastic.discovery_script, options.slots_per_host or 1
    assert script is not None
    with contextlib.closing(Discovery([script], slots)) as discovery:
        return _run(options, agent, size, (), None, discovery)


def run_on(options: Options, selection: Selection) -> int:
    """Run an elastic job on the hosts of the user or of a cluster; return the exit code."""
    seats = selection.seats
    assert seats is not None
    own = find_own(selection.hosts)
    known = [HostSeats(host, range(host.slots), host in own) for host in selection.hosts]
    fixed = [FoundHost(host.name, host.slots) for host in selection.hosts]
    return _run(options, seats.agent, seats.size, known, fixed, None)


def _run(
    options: Options,
    agent: str,
    size: int,
    known: Sequence[HostSeats],
    fixed: Sequence[FoundHost] | None,
    discovery: Discovery | None,
) -> int:
    elastic = options.elastic
    limits = Limits(
        min_np=elastic.min_np or size,
        max_np=elastic.max_np,
        start_np=size,
        reset_limit=elastic.reset_limit,
        elastic_timeout=elastic.timeout,
        cooldown=elastic.cooldown,
    )
    status = StatusLine(sys.stderr, is_terminal(sys.stderr))

    def serve() -> None:
        store = _make_store(options)
        files = RankFiles(options.output_filename, elastic.max_np or size)
        files.make(limits.min_np)  # before anything is started
        shown = Output(None, None, options.prefix_timestamp, False, files.by_rank, options.ranks, status.end)
        with shown as output:
            membership = Membership(limits, time.monotonic(), fixed)
            job = ElasticJob(options, agent, known, membership, discovery, output, status, files, store)
            with contextlib.closing(job):
                job.serve()

    return exit_code(serve)


def _make_store(options: Options) -> StoreOrder | None:
    """Return where commits are stored; raise LaunchError if fsspec cannot open such a folder here."""
    url = options.elastic.store
    if not url:
        return None
    try:
        files, folder = open_folder(url)
    except StoreError as exc:
        raise LaunchError(str(exc)) from exc
    given = dict(os.environb) if options.send_environment else {}
    return StoreOrder(
        files.unstrip_protocol(folder),  # a relative folder is one of this directory
        secrets.token_hex(6),
        secrets.token_bytes(32),
        options.elastic.store_every,
        of_stores(to_send(given, options.settings)),
    )


def _clear(store: StoreOrder) -> None:
    """Remove the files of a job that is over: they are signed with its key, and of use to no other job."""

    def clear() -> None:
        with contextlib.suppress(StoreError):
            Store(store).clear()

    thread = threading.Thread(target=clear, name="pyhvd.run.clear", daemon=True)
    thread.start()
    thread.join(_CLEAR_S)
