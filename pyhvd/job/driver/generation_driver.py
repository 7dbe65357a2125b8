"""The driver of one set of ranks: agents register and start the ranks; it watches them until the ranks end.

The thread that calls :meth:`GenerationDriver.serve` does all the work; the driver starts no thread. A job has
one set of ranks; an elastic job has one after another, each with its own driver. The driver's parts:

1. An :class:`AgentSource` brings the agents; that of :mod:`pyhvd.job.driver.agent_source` starts them by
   commands. :mod:`pyhvd.job.connections` holds the connections to them.
2. :mod:`pyhvd.job.mpi.rendezvous` makes the ranks one MPI world, and assigns ranks to agents.
3. :mod:`pyhvd.job.machines.machine` decides when ranks start, and what ends the job.
4. :mod:`pyhvd.job.driver.console` shows texts to the user, and takes the user's signals and input.
5. :mod:`pyhvd.job.driver.held_commits` records which commits the hosts of an elastic job hold.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import msgspec

from pyhvd.common.text import list_some
from pyhvd.config import read_timeout
from pyhvd.job.connections import DRIVER_SILENT_S, ELASTIC_SILENT_S, SILENT_S, ConnectionServer, Peer
from pyhvd.job.driver.console import Console
from pyhvd.job.driver.held_commits import RESTORE_S, HeldCommits, Outcome
from pyhvd.job.driver.output import Output
from pyhvd.job.errors import RankError
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.machines.machine import (
    NEWER_ATTEMPT,
    Action,
    Begin,
    Done,
    End,
    JobMachine,
    JobTexts,
    Late,
    PassOn,
    Pause,
    Say,
    StartCommand,
    Tell,
)
from pyhvd.job.messages import (
    Again,
    Answered,
    Beat,
    CodePart,
    DaemonEnded,
    DaemonOutput,
    Dialed,
    Ended,
    EnteringInit,
    Failed,
    FromAgent,
    FromDriver,
    Hello,
    InputAck,
    Leave,
    Listening,
    Logged,
    Member,
    NextCall,
    OutputAck,
    Pmi,
    RankOutput,
    RankProxy,
    Remark,
    Restore,
    Restored,
    ResultAck,
    ResultPart,
    Signal,
    Start,
    Stop,
    parts,
)
from pyhvd.job.mpi.rank_env import horovod_variables
from pyhvd.job.mpi.rendezvous import RankPlacement, Rendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.process.exit_report import EXIT
from pyhvd.job.rank.call import load_result
from pyhvd.job.spec import DRIVER_TIMEOUT, JobSpec
from pyhvd.transport.tcp.connection import Secret

STOP_S = 5.0
"""How long the agents have to end their ranks at the end of the job."""
# At Ctrl-Z the driver stops itself at most this long after it has begun to tell the agents.
_TELL_S = 1.0


class AgentSource:
    """Brings the agents of one set of ranks to its driver; here, agents that connect by themselves.

    Attributes
    ----------
    size : int
        The number of ranks.
    pool : AgentPool
        Which agents are up, and which are to be started.
    texts : JobTexts
        Makes the errors of a job with these agents.
    secret : Secret
        The job key.
    addresses : sequence of str
        The addresses on which the driver listens for agents; empty if commands start them.
    gone : str
        Follows "is lost: " in the error if the connection to an agent closes.
    """

    size: int
    pool: AgentPool
    texts: JobTexts
    secret: Secret
    addresses: Sequence[str]
    gone = "its agent is gone"

    def join(self, connections: ConnectionServer) -> None:
        """Take the driver's connection server; called when the driver is made."""

    def find_rendezvous(self) -> Rendezvous:
        """Return how the ranks find each other; called while the agents start."""
        raise NotImplementedError

    def start(self, index: int) -> None:
        """Begin to start an agent."""

    def name_of(self, peer: Peer) -> str:  # noqa: ARG002
        """Return the name of an agent's host; empty if it is not known."""
        return ""

    def greet(self, peer: Peer, greeting: Hello) -> None:
        """Answer an agent's :class:`Hello`: tell the agent to prepare its host."""

    def admits(self, peer: Peer, member: Member) -> bool:  # noqa: ARG002
        """Return whether an agent that has prepared its host may have ranks."""
        return True

    def lose(self, peer: Peer, why: str, *, waited: bool, began: bool) -> list[str] | None:  # noqa: ARG002
        """Note the loss of an agent: `waited` if by its silence, `began` if all agents had registered.

        Returns
        -------
        list of str or None
            The last line that the agent's command printed, if any. None if the agent was lost between two
            jobs, and another is started in its place.
        """
        return []

    def check(self) -> None:
        """Do what is due after a turn."""

    def close(self) -> None:
        """End the commands that started the agents."""


class CallListener(Protocol):
    """Hears what ranks answer and log; called in the driver's thread. Only living ranks answer."""

    def take_answer(self, rank: int, result: bytearray) -> None:
        """Take the pickled result of a rank's oldest call that has none yet."""

    def take_logged(self, rank: int, data: bytes) -> None:
        """Take a pickled value that a rank logs."""


@dataclass(eq=False)
class GenerationDriver:
    """Serves one set of ranks.

    Attributes
    ----------
    spec : JobSpec
        What the ranks run.
    source : AgentSource
        Brings the agents.
    output : Output
        Shows the ranks' output.
    console : Console
        Shows texts to the user; with a terminal it takes the user's signals and input.
    wanted : Wanted, optional
        The user's choice of networks between the hosts; None if the ranks need no network plan.
    held : HeldCommits, optional
        The commits that the hosts hold; None if the job is not elastic.
    each_step : callable, optional
        Called with the monotonic time in each step, normally at least four times a second.
    listener : CallListener, optional
        Hears what ranks answer and log; None for nobody.
    connections : ConnectionServer
        The connections to the agents.
    machine : JobMachine
        Decides when ranks start, and what ends the job.
    """

    spec: JobSpec
    source: AgentSource
    output: Output
    console: Console
    wanted: Wanted | None = None
    held: HeldCommits | None = None
    each_step: Callable[[float], object] | None = None
    listener: CallListener | None = None
    _rendezvous: Rendezvous = field(default_factory=Rendezvous)
    _by_rank: dict[int, Peer] = field(default_factory=dict)
    _exceptions: dict[int, bytes] = field(default_factory=dict)
    _results: defaultdict[int, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    _asked: Leave | None = None  # what the ranks were asked
    _settling: set[Peer] = field(default_factory=set)  # agents that have not yet said Hello after Again
    _stop_reason: str | None = None  # why the agents are being stopped; None before
    _done: bool = False

    def __post_init__(self) -> None:
        spec, source, epoch = self.spec, self.source, time.time() - time.monotonic()
        self.machine = JobMachine(
            *(source.size, source.pool, source.texts, spec.start_timeout, epoch, self.wanted, spec.ends_late)
        )
        suffix, patience = DRIVER_TIMEOUT.suffix, DRIVER_TIMEOUT.default
        self.connections = ConnectionServer(
            *(source.secret, source.addresses, source.size, self._handle, self._lose, source.gone),
            patience=read_timeout(suffix, patience) if f"PYHVD_{suffix}" in os.environ else patience,
        )
        self.connections.selector.register(self.output, selectors.EVENT_READ, self._acknowledge_output)
        self._terminal = self.console.terminal
        if self.held is not None:
            self.connections.silent_s = ELASTIC_SILENT_S
        source.join(self.connections)

    @property
    def placements(self) -> list[RankPlacement]:
        """The ranks' places; empty before they start."""
        return self.machine.placements

    @property
    def selector(self) -> selectors.BaseSelector:
        """The selector on which each step waits; the step calls a ready key's ``data`` without arguments."""
        return self.connections.selector

    # ---- the life of a generation

    def serve(self) -> None:
        """Start the agents and the ranks, and return when all ranks have ended without error.

        Raises
        ------
        LaunchError
            The job could not start; the text has a line for each host that is the reason.
        RankError
            A rank failed, or a host is lost.
        Interrupted
            A signal in the terminal's list ended the job.
        """
        self.begin()
        try:
            while not self._done:
                now = self.step()
                while self._terminal is not None and self._terminal.signals:
                    self._perform_all(self.machine.signal(self._terminal.signals.pop(0), now))
        except RankError as exc:
            exc.exception = self._exceptions.get(exc.rank, b"")
            raise

    def begin(self) -> None:
        """Begin to start the agents; meanwhile find out how the ranks will form one MPI world."""
        now = time.monotonic()
        self.machine.until = now + self.spec.start_timeout
        self._perform_all(self.machine.tick(now))
        self._rendezvous = self.source.find_rendezvous()

    def step(self) -> float:
        """Handle events for at most one tick, and do what is due; return the time."""
        self.connections.turn()
        if seconds := self.connections.stood_still:
            self.machine.leave_out(seconds)
        if seconds > DRIVER_SILENT_S:
            who = "driver" if self._terminal is None else "launcher"
            self.console.warn(f"pyhvd: the {who} stood still for {seconds:.0f} s, and goes on")
        now = time.monotonic()
        self._rendezvous.check(now)
        self._perform_all(self.machine.tick(now))
        if self.machine.all_registered and not self.placements:
            placements = self._rendezvous.placements()
            if placements and self._may_start(now):
                self._start(placements)
        self.source.check()
        if self._terminal is not None:
            self._terminal.step(self.machine.describe_start, now)
        if self.each_step is not None:
            self.each_step(now)
        return now

    def receive_the_rest(self) -> None:
        """Receive the last messages of agents that have ranks, until these disconnect or fall silent."""
        while any(peer.ranks and self.connections.hears(peer) for peer in self.connections.peers):
            self.connections.turn()
            self._rendezvous.check(time.monotonic())

    def ask_to_leave(self, wish: Leave) -> None:
        """Ask the ranks to end at their next commit or check."""
        self._asked = wish
        for peer in self.connections.peers:
            if peer.connection.authenticated:
                peer.send(wish)

    def settle(self) -> None:
        """End the ranks that are left, show their output, and wait for each host's newest commit.

        After its ranks have ended, an agent answers Again by Hello, which has the commit. Others are dropped.
        """
        assert self.held is not None
        peers = self.connections.peers
        self._settling = {peer for peer in peers if peer.connection.authenticated and peer.connection.open}
        for peer in self._settling:
            peer.send(Again())
        for _ in self.connections.turns(SILENT_S):
            if not self._settling:
                break
        self._stop_reason = "the generation is over"
        for peer in list(self.connections.peers):
            if peer in self._settling or not (peer.connection.authenticated and peer.connection.open):
                why = "did not end its ranks in time"
                self.held.lose(self.source.name_of(peer), why, counts=True)
                self.connections.drop(peer, why)

    def stop(self, reason: str, timeout: float) -> None:
        """Tell all agents to kill their ranks; wait at most `timeout` seconds until they have disconnected.

        The wait skips agents that have fallen silent. An agent that a command started is dropped at once if
        it has not authenticated itself, or if all its ranks have ended: ssh keeps the command running until
        the driver closes the channel.
        """
        self._stop_reason = reason
        if self._terminal is not None:
            self._terminal.status.end()
        for peer in list(self.connections.peers):
            over = bool(peer.ranks) and peer.ranks <= self.machine.ended
            if peer.adopted and (over or not peer.connection.authenticated):
                self.connections.drop(peer, reason)
                continue
            peer.feeds.clear()
            if peer.connection.authenticated:
                peer.send(Stop(reason, quietly=True))
        self._rendezvous.stop()
        for _ in self.connections.turns(timeout):
            if not any(map(self.connections.hears, self.connections.peers)):
                break

    def close(self) -> None:
        """End the agents' commands and the rendezvous, and close all connections."""
        if self._terminal is not None:
            self._terminal.close()
        self.source.close()
        try:
            self._rendezvous.close()
        finally:
            self.connections.close()

    def take_results(self) -> list[Any]:
        """Return what the ranks' functions returned, in rank order; after :meth:`serve`, and only once."""
        return [load_result(rank, self._results.pop(rank)) for rank in range(len(self.placements))]

    def call(self, code: bytes, ranks: Iterable[int]) -> None:
        """Let living ranks make another call; the `listener` gets their answers. Empty code ends them."""
        wanted, code_parts = frozenset(ranks), parts(code)
        for peer in self.connections.peers:
            if owned := sorted(peer.ranks & wanted):
                peer.feeds.append(chain(map(CodePart, code_parts), [NextCall(owned)]))

    def lose_host(self, name: str, why: str) -> None:
        """Disconnect the agent of a host that is known to be lost."""
        for peer in list(self.connections.peers):
            if self.source.name_of(peer) == name:
                self.connections.drop(peer, f"is lost: {why}")

    # ---- carrying out the machine's actions

    def _perform_all(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, StartCommand):
            self.source.start(action.host)
        elif isinstance(action, Begin):
            if self.machine.network is not None:
                self._say_which_are_one_host(action.groups)
            self._rendezvous.begin(self, action.groups)
        elif isinstance(action, Tell):
            self.tell_agent(action.index, action.message)
        elif isinstance(action, PassOn):
            for peer in self.connections.peers:
                if peer.ranks:
                    peer.send(Signal(action.number))
        elif isinstance(action, Pause):
            self._pause()
        elif isinstance(action, Say):
            self.console.warn(action.text)
        elif isinstance(action, Done):
            self._done = True
        elif isinstance(action, Late):
            raise self.machine.texts.late_error(self._rendezvous.waits_for())
        elif isinstance(action, End):
            raise action.error

    def _say_which_are_one_host(self, groups: Iterable[Sequence[Member]]) -> None:
        names = self.machine.pool.names
        for group in groups:
            if len(group) > 1:
                hosts = list_some([names[member.index] for member in group], " and ")
                self.console.say(f"pyhvd: {hosts} are one host")

    def _pause(self) -> None:
        """Send what is left for the agents, then stop this process, as Ctrl-Z does."""
        for _ in self.connections.turns(_TELL_S):
            if not any(peer.connection.wants_write for peer in self.connections.peers):
                break
        if self._terminal is not None:
            self._terminal.status.clear()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.machine.leave_out(self.connections.go_on())

    def _may_start(self, now: float) -> bool:
        """Return whether a host holds the commit for the ranks to go on from; if not, ask the store once."""
        held, elastic = self.held, self.spec.elastic
        if held is None or elastic is None:
            return True
        if held.asks_store(elastic):
            self.machine.until = now + RESTORE_S
            self.tell_agent(0, Restore())
        if held.is_restoring:
            return False
        held.begin(set(self.machine.pool.names), self.console.say)
        return True

    def _start(self, placements: list[RankPlacement]) -> None:
        network = self.machine.network
        if network is not None and network.shows and (line := network.describe()):
            self.console.say(f"pyhvd: {line}")
        self.machine.place(placements)
        code = parts(self.spec.code)
        for peer in self.connections.peers:
            if peer.member is None:
                continue
            peer.ranks = self.machine.ranks_of(peer.member.index)
            owned = [placement for placement in placements if placement.rank in peer.ranks]
            self._by_rank |= dict.fromkeys(peer.ranks, peer)
            peer.feeds.append(chain(map(CodePart, code), map(self._start_message, owned)))
        if self._terminal is not None:
            first = self._by_rank[0]
            first.feeds.append(self._terminal.input_for(first, self.selector))
        if self._asked is not None:  # an agent that had no ranks yet may have ignored the request
            self.ask_to_leave(self._asked)

    def _start_message(self, placement: RankPlacement) -> Start:
        start = Start(
            rank=placement.rank,
            size=self.machine.size,
            local_rank=placement.local_rank,
            local_size=placement.local_size,
            env={**self._variables(placement), **self._rendezvous.variables(placement.rank)},
            executable=self.spec.executable,
            pmi=self._rendezvous.speaks_pmi,
        )
        if (network := self.machine.network) is None:
            return start
        return msgspec.structs.replace(start, defaults=dict(network.variables(placement.index)))

    def _variables(self, placement: RankPlacement) -> Mapping[str, str]:
        """Return the variables of a rank, in addition to those of its agent and of its MPI."""
        across = [other.rank for other in self.placements if other.local_rank == placement.local_rank]
        own = horovod_variables(
            *(self.machine.texts.name(placement), placement.rank, self.machine.size),
            *(placement.local_rank, placement.local_size, across.index(placement.rank), len(across)),
        )
        if self.held is None or self.spec.elastic is None:
            return {**own, **self.spec.env}
        first_ranks: dict[str, int] = {}
        for each in self.placements:
            first_ranks.setdefault(self.machine.texts.name(each), each.rank)
        return {**own, **self.spec.env, **self.held.variables(self.spec.elastic, first_ranks)}

    # ---- handling messages and losses

    def _handle(self, peer: Peer, message: FromAgent) -> None:
        if self.held is not None and isinstance(message, Hello | Beat | Restored):
            self.held.hear(self.source.name_of(peer), message, self.console.say)
        if isinstance(message, Hello | Member | Restored | Listening | Dialed):
            self._handle_of_agent(peer, message)
        elif isinstance(message, InputAck):
            if self._terminal is not None:
                self._terminal.acknowledge_input(message.count)
        elif isinstance(message, RankProxy | DaemonOutput | DaemonEnded):
            if self._stop_reason is None:
                self._rendezvous.hear(peer, message)
        elif isinstance(message, Failed):
            if message.report.rank in peer.ranks:
                self._note_failure(message)
        elif isinstance(message, Remark):
            if host := self.source.name_of(peer):  # of Spark's tasks it is not known
                self.console.say(f"pyhvd: host {host}: {message.text}")
        elif not isinstance(message, Beat) and message.rank in peer.ranks:
            self._handle_of_rank(peer, message)

    def _handle_of_agent(self, peer: Peer, message: Hello | Member | Restored | Listening | Dialed) -> None:
        if isinstance(message, Member):
            self._register(peer, message)
        elif isinstance(message, Restored):
            self.machine.until = time.monotonic() + self.spec.start_timeout
        elif isinstance(message, Listening | Dialed):
            if peer.member is not None:
                self._perform_all(self.machine.hear(peer.member.index, message))
        elif peer in self._settling:
            self._settling.discard(peer)
        else:
            self.source.greet(peer, message)

    def _handle_of_rank(
        self, peer: Peer, message: ResultPart | RankOutput | Pmi | EnteringInit | Answered | Logged | Ended
    ) -> None:
        if isinstance(message, RankOutput):
            self.output.write(message.rank, message.stream, message.data)
        elif isinstance(message, Pmi):
            if message.line.startswith("cmd=init"):  # from the rank, or from a process that it started
                self.machine.enter(message.rank, time.monotonic())
            self._rendezvous.hear(peer, message)
        elif isinstance(message, EnteringInit):
            self.machine.enter(message.rank, time.monotonic())
        elif isinstance(message, ResultPart):
            self._results[message.rank] += message.data
            peer.send(ResultAck(message.rank, len(message.data)))
        elif isinstance(message, Answered | Logged):
            self._hear_living(message)
        else:
            if message.left and self.held is not None:
                self.held.outcome = Outcome.LEFT
            self.machine.end(message.rank, time.monotonic())
            self._rendezvous.leave(message.rank)

    def _hear_living(self, message: Answered | Logged) -> None:
        if self.listener is None:
            return
        if isinstance(message, Logged):
            self.listener.take_logged(message.rank, message.data)
        else:
            self.listener.take_answer(message.rank, self._results.pop(message.rank))

    def _acknowledge_output(self) -> None:
        for rank, count in self.output.take_shown().items():
            self.tell_rank(rank, OutputAck(rank, count))

    def _note_failure(self, failed: Failed) -> None:
        self._exceptions.setdefault(failed.report.rank, failed.exception)
        ended = failed.silent and self._rendezvous.ends_ranks
        self.machine.report(failed.report, time.monotonic(), ended=ended)

    def _register(self, peer: Peer, member: Member) -> None:
        if self._stop_reason is not None:  # Spark has reused a Spark slot that became free as the job ended
            peer.send(Stop(self._stop_reason, quietly=True))
            return
        if not self.source.admits(peer, member):
            return
        if refused := self.machine.register(member):
            peer.send(Stop(refused))
            return
        for other in self.connections.peers:
            if other.member is not None and other.member.index == member.index:
                other.member = None
                other.send(Stop(NEWER_ATTEMPT))
        peer.member = member

    def _lose(self, peer: Peer, why: str, *, waited: bool) -> None:
        """Handle the loss of an agent; before all have registered, another may take its place."""
        host, counts = self.source.name_of(peer), self._stop_reason is None
        self._settling.discard(peer)
        ended = bool(peer.ranks) and peer.ranks <= self.machine.ended
        if counts and not ended:  # otherwise close() ends the agent's command together with the others
            words = self.source.lose(peer, why, waited=waited, began=self.machine.all_registered)
            counts = words is not None
            if words is not None and peer.member is not None:
                why_and_words = "; ".join([why, *words])
                self.machine.lose(peer.member, why_and_words, time.monotonic(), waited=waited)
        if self.held is not None:
            self.held.lose(host, why, counts=counts)

    # ---- called by the rendezvous

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        """Send a message to a rank's agent."""
        if rank in self._by_rank:  # else its agent was lost before the ranks started
            self._by_rank[rank].send(message)

    def tell_agent(self, index: int, message: FromDriver) -> None:
        """Send a message to an agent."""
        for peer in self.connections.peers:
            if peer.member is not None and peer.member.index == index:
                peer.send(message)

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        """Record a failure of a rank; rank -1 for a failure that belongs to no rank."""
        self.machine.blame(rank, text, code, time.monotonic(), kind)


@contextlib.contextmanager
def ending(driver: GenerationDriver) -> Iterator[None]:
    """End the ranks, the agents that are left, and the driver at the end of the context."""
    with contextlib.closing(driver):
        try:
            yield
        finally:
            driver.stop("the job is over", STOP_S)
