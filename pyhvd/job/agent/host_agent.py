"""``python -P -m pyhvd.job.agent.host_agent``: the agent of a host, which owns all of the job's ranks there.

The driver starts the agent by a command such as ssh, whose stdin and stdout are the channel. The first line
of stdin is the channel's key. When the channel ends, the agent kills its ranks and ends. It waits for a
driver that is silent (:class:`~pyhvd.job.agent.agent.DriverSilence`).

1. The agent sends :class:`Hello`. The driver answers with :class:`Prepare`, and the job runs.
2. After a job of functions without error, and after each generation of an elastic job, the agent waits. For
   the next job the driver sends :class:`Again` over the same channel, and step 1 follows.
3. SIGUSR1 and SIGUSR2 have no effect on the agent: Slurm sends them to all processes of a job step.
4. In an elastic job the agent keeps the ranks' commits: :mod:`pyhvd.job.agent.elastic_host`. There SIGTERM is
   a notice that the host will be taken away: :mod:`pyhvd.job.agent.notice`. In any other job SIGTERM ends the
   agent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Callable

import msgspec

from pyhvd.common.kernel import host_hash
from pyhvd.job.agent.agent import Agent, AgentStoppedError, Dismissed, DriverSilence
from pyhvd.job.agent.elastic_host import ElasticHost
from pyhvd.job.agent.function_process import FunctionProcess
from pyhvd.job.agent.host_facts import gather
from pyhvd.job.agent.program_process import ProgramProcess
from pyhvd.job.connections import BEAT_S, ELASTIC_BEAT_S
from pyhvd.job.messages import Again, Beat, Member, Prepare, Stop, decode_from_driver, encode, hello
from pyhvd.job.process.guardian import ignore
from pyhvd.job.process.signals import ENDING, FORWARDED
from pyhvd.transport.tcp.connection import HANDSHAKE_S, Connection
from pyhvd.transport.tcp.pipes import PipePair
from pyhvd.transport.tcp.session import ChannelError, Role, Session

# The most bytes of the key's line, and the fewest of the key.
_LONGEST_LINE = 128
_SHORTEST_KEY = 16


def take_channel() -> socket.socket | PipePair:
    """Return the channel, and replace stdin by /dev/null and stdout by stderr.

    The channel of a local command is one socket. Below sshd it is two pipes.
    """
    one, other = os.fstat(0), os.fstat(1)
    channel: socket.socket | PipePair
    if stat.S_ISSOCK(one.st_mode) and (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino):
        channel = socket.socket(fileno=os.dup(0))
    else:
        channel = PipePair(os.dup(0), os.dup(1))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    return channel


def read_key(channel: socket.socket | PipePair) -> bytes:
    """Read the first line, and no more; return the key, which the line has in hexadecimal digits."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE and (byte := channel.recv(1)):
        line += byte
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(line.decode())
        if len(key) >= _SHORTEST_KEY:
            return key
    raise ChannelError("pyhvdrun starts this program; do not start it by hand")


class _Idle:
    """An agent without ranks: before its first job, and between two jobs. It sends beats."""

    def __init__(self, driver: Connection, task: int) -> None:
        self.host: ElasticHost | None = None
        self.stopped = ""  # why the driver has stopped this agent; empty if it has not
        self.silence = DriverSilence(driver)
        self._driver = driver
        self._task = task
        self._next_beat = time.monotonic() + BEAT_S

    def greet(self) -> None:
        """Send Hello, with which a job begins."""
        commit = 0 if self.host is None else self.host.vault.commit
        self._driver.send(encode(msgspec.structs.replace(hello(), commit=commit, task=self._task)))

    def close(self) -> None:
        """Discard the ranks' commits."""
        if self.host is not None:
            self.host.close()

    def wait(self) -> Prepare | None:
        """Return what the next job needs; None if the driver has stopped this agent, or ended the channel.

        Raises
        ------
        AgentStoppedError
            The driver has been silent for too long.
        ChannelError
            The driver broke the protocol.
        """
        while self._driver.open:
            self._turn()
            wanted = None
            messages = self._driver.pump_in()
            self.silence.check()
            for message in map(decode_from_driver, messages):
                if isinstance(message, Prepare):
                    wanted = message
                elif isinstance(message, Beat):
                    self.silence.hear(message)
                elif isinstance(message, Stop):
                    self.stopped = message.reason
                    return None
                elif isinstance(message, Again):  # it cancels a job that it follows at once
                    wanted = None
                    self.greet()
            if wanted is not None:
                return wanted
        return None

    def _turn(self) -> None:
        beat_s = BEAT_S if self.host is None else ELASTIC_BEAT_S
        self._driver.wait(beat_s / 2)
        self._driver.pump_out()
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + beat_s
            if self.host is not None:
                self.host.notice.check(now)
            self._driver.send(encode(Beat(leaves="" if self.host is None else self.host.notice.why)))


def serve(channel: socket.socket | PipePair, key: bytes) -> None:
    """Serve jobs, one after the other, until the driver ends the channel."""
    with contextlib.closing(Connection(channel, Session(key, Role.CLIENT))) as driver:
        driver.shake_hands(HANDSHAKE_S)
        serve_on(driver)


def serve_on(driver: Connection, task: int = -1) -> str:
    """Do :func:`serve` on a connection whose driver has proved that it holds the key.

    Parameters
    ----------
    driver : Connection
        The connection.
    task : int
        What this agent says as :attr:`Hello.task`.

    Returns
    -------
    str
        Why the driver has stopped this agent between two jobs; empty if it gave no reason.
    """
    idle = _Idle(driver, task)
    idle.greet()
    with contextlib.suppress(Dismissed), contextlib.closing(idle):
        while wanted := idle.wait():
            if wanted.elastic and idle.host is None:
                idle.host = ElasticHost(function=wanted.function)
            if idle.host is not None:
                idle.host.notice.watch(wanted.preemption_command)
                idle.host.store.use(wanted.store)
            if _run(driver, wanted, idle.host, idle.silence):
                idle.greet()
            if not wanted.again:
                driver.finish(idle.silence.patience)  # it may stand still, and there may be much output
    return idle.stopped


def _run(driver: Connection, wanted: Prepare, host: ElasticHost | None, silence: DriverSilence) -> bool:
    """Run one job to its end; return whether the driver has begun the next one."""
    if host is not None:
        agent = Agent(driver, host.make_rank, host, silence)
    else:
        agent = Agent(driver, FunctionProcess if wanted.function else ProgramProcess, silence=silence)
    try:
        with contextlib.closing(agent):
            facts = gather(wanted.directory, wanted.script)
            salt = os.environ.get("PYHVD_HOST_SALT", "")
            agent.run(Member(wanted.index, 0, host_hash(salt), socket.gethostname(), wanted.slots, facts))
    except Dismissed:
        if not agent.again:
            raise
    finally:
        if host is not None:  # no rank writes there any more
            host.vault.wished = host.vault.left = host.vault.ending = host.vault.suspends = 0
            host.vault.has_callbacks = False
    return agent.again


def main() -> int:
    """Run the agent; return its exit code."""

    def run() -> None:
        ignore(set(FORWARDED) - set(ENDING))
        channel = take_channel()
        serve(channel, read_key(channel))

    return exit_code(run)


def exit_code(run: Callable[[], None]) -> int:
    """Run an agent, and return its exit code; an error's text goes to stderr."""
    try:
        run()
    except (AgentStoppedError, ChannelError, OSError) as exc:
        os.write(2, f"pyhvd: agent on host {socket.gethostname()}: {exc}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
