"""An elastic job that runs: where it runs, its processes, and how far it is.

All processes of a job have a mark in their environment, which they inherit from the launcher, or get from
sshd.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.elastic.jobs import PROGRAM, ROOT, Ended, Line, read_log
from tests.elastic.steps import STEPS, STRIKES_IN
from tests.hosts.sshd import Site, processes, read, words_of
from tests.many_hosts import LOCAL

RANK, ZYGOTE, AGENT = "pyhvd.job.process.guardian", "pyhvd.job.agent.zygote", "pyhvd.job.agent.host_agent"
TWO_HOSTS = "east:2,west:2"
_MARK = "PYHVD_TEST_ELASTIC"
_LOOK_S = 0.02
_ON_TWO = ("--min-np", "2", "--blacklist-cooldown-range", "1", "5")


class HangError(AssertionError):
    """A job makes no progress, or does not end."""


@dataclass(frozen=True)
class Ground:
    """Where jobs run.

    Attributes
    ----------
    hosts : tuple of str
        The hosts' names; empty if there is one host.
    flags : tuple of str
        What the launcher needs to know.
    site : Site or None
        The simulated hosts, if there are any.
    """

    hosts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("-n", "4", "--min-np", "4")
    site: Site | None = None

    def start(
        self,
        folder: Path,
        faults: Sequence[str],
        step_s: float,
        steps: int = STEPS,
        strikes_in: int = STRIKES_IN,
    ) -> RunningJob:
        """Start the program in a folder."""
        variables = {"STEP_S": step_s, "STEPS": steps, "STRIKES_IN": strikes_in, "PYTHONPATH": ROOT}
        given = [f"-x{name}={value}" for name, value in variables.items()]
        command = [sys.executable, "-m", "pyhvd.run", *self.flags, *given, str(PROGRAM), *faults]
        temporary = folder / "tmp"
        temporary.mkdir()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _MARK: str(folder)}
        env["TMPDIR"] = str(temporary)
        if self.site is not None:
            command = self.site.bed.head.command(["env", f"--chdir={folder}", *command])
            env |= self.site.sshd.variables
            temporary = self.site.sshd.temporary
        errors = (folder / "err").open("w")
        with errors:
            job = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
        return RunningJob(self, folder, job, temporary)


ONE_HOST = Ground()
TWO_NAMES = Ground(("east", "west"), ("-H", TWO_HOSTS, "--launch-agent", LOCAL, *_ON_TWO))
"""This host under two names, with an agent each."""


def two_hosts(site: Site) -> Ground:
    """Return two simulated hosts."""
    return Ground(("east", "west"), ("-H", TWO_HOSTS, *_ON_TWO), site)


@dataclass
class RunningJob:
    """One job; see :meth:`Ground.start`."""

    ground: Ground
    folder: Path
    launcher: subprocess.Popen[bytes]
    temporary: Path

    # -- its processes ---------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Return all processes of the job, on all hosts."""
        if self.ground.site is not None:
            return self.ground.site.sshd.marked()
        mark = f"{_MARK}={self.folder}\0".encode()
        return [process for process in processes() if mark in read(process, "environ") + b"\0"]

    def ranks(self, host: str = "") -> list[int]:
        """Return the ranks: each leads a group in the session of its guardian."""
        found = []
        for process in self._running(host, RANK, ZYGOTE):
            *_, group, session = read(process, "stat").rpartition(b")")[2].split()[:4] or (b"0", b"0")
            if int(group) == process != int(session):
                found.append(process)
        return found

    def zygotes(self, host: str = "") -> list[int]:
        """Return the zygotes: children of an agent, while the guardians are those of a zygote."""
        agents = set(self.agents(host))
        return [process for process in self._running(host, ZYGOTE) if _parent(process) in agents]

    def agents(self, host: str = "") -> list[int]:
        """Return the agents."""
        return [
            each for each in self._running(host, AGENT) if "python" in os.path.basename(words_of(each)[0])
        ]

    def _running(self, host: str, *programs: str) -> list[int]:
        mine = set(self.processes())
        if host and self.ground.site is not None:
            mine &= set(self.ground.site.bed.hosts[host].processes())
        elif host:
            mark = f"PYHVD_HOST_SALT={host}\0".encode()
            mine = {process for process in mine if mark in read(process, "environ") + b"\0"}
        return sorted(process for process in mine if set(words_of(process)[:5]) & set(programs))

    # -- how far it is ---------------------------------------------------------------------------------

    @property
    def lines(self) -> list[Line]:
        """What the ranks have logged."""
        return read_log(self.folder)

    @property
    def generation(self) -> int:
        """The newest generation that has begun to train; -1 before."""
        return max((line.generation for line in self.lines), default=-1)

    def steps(self, after: float = 0.0, generation: int = 0) -> list[Line]:
        """Return the steps that were logged after a time, in a generation or a later one."""
        lines = self.lines
        return [
            each
            for each in lines
            if each.kind == "step" and each.time > after and each.generation >= generation
        ]

    def has_ended(self) -> bool:
        """Return whether the launcher has ended."""
        return self.launcher.poll() is not None

    def wait(self, holds: Callable[[], object], seconds: float) -> bool:
        """Wait until a condition holds, or the job ends; return whether it holds."""
        until = time.monotonic() + seconds
        while not (found := holds()) and not self.has_ended() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return bool(found or holds())

    # -- its end ---------------------------------------------------------------------------------------

    def finish(self, seconds: float) -> Ended:
        """Wait for the end; raise HangError if it does not come in time."""
        try:
            code = self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise HangError(f"the job has not ended after {seconds:g} s more") from None
        return Ended(code, "", (self.folder / "err").read_text(), self.lines)

    def left(self, seconds: float) -> list[str]:
        """Return the commands of processes that are left after some seconds."""
        until = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(0.02)
        return [f"{process}: {' '.join(words_of(process))}" for process in found]

    def kill(self) -> None:
        """End what is left of it."""
        self.launcher.kill()
        self.launcher.wait()
        kill(self.processes())


def kill(victims: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes, as far as they are there."""
    for process in victims:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _parent(process: int) -> int:
    return int((read(process, "stat").rpartition(b")")[2].split() or [b"0", b"0"])[1])
