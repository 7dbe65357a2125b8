"""The launcher, ``pyhvdrun -n 4 script.py``: it runs mpiexec on this host.

It chooses mpiexec and its settings, receives reports from each rank's supervisor, and passes signals on to
the ranks. At the end it prints the first failure, below all other output.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import FrameType

from pyhvd.common.standard_files import say
from pyhvd.common.text import list_numbers
from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_library, find_mpiexec
from pyhvd.job.mpi.openmpi.settings import mpiexec_settings, short_temporary_directory
from pyhvd.job.mpi.rank_env import OPENMPI, outside_of_rank
from pyhvd.job.process import segments
from pyhvd.job.process.exit_report import EXIT, INTERRUPT, LOST, ExitReport, root_cause
from pyhvd.job.process.guardian import die_with_parent, signal_group
from pyhvd.job.process.private_folder import PrivateFolder
from pyhvd.job.process.rank_line import ENTERING, GOES_ON, REPORT, Entrance
from pyhvd.job.process.signals import (
    ENDING,
    GRACE_S,
    SAY_WAITING_S,
    describe_waiting,
    shell_code,
    wake_on_signals,
)
from pyhvd.run.entry.control_socket import JOB_DIR, Line, listen
from pyhvd.run.entry.missing_script import describe_missing
from pyhvd.run.options import Options

# A failed rank ends the job itself; if the job still runs after this long, the launcher ends it.
_FAILED_S = 1.5
# The longest wait while ranks start; one that ends this much later was longer as this process was stopped.
_STOOD_STILL_S = 1.0
# After SIGTERM, mpiexec has this long to end.
_MPIEXEC_S = 1.0


def launch(options: Options) -> int:
    """Start the ranks and wait for them; return the exit code of the first failure, or 0."""
    program = options.program[0]
    if program not in ("-m", "-c") and not os.path.exists(program):
        say(describe_missing(program, os.getcwd()))
        return 2
    try:
        library = find_library()
        mpiexec = find_mpiexec(library)
    except LaunchError as exc:
        say(f"pyhvd: {exc}")
        return 1
    with contextlib.closing(PrivateFolder(short_temporary_directory())) as folder:
        job_dir = folder.path
        settings = {JOB_DIR: job_dir, **options.settings}
        if library.family == OPENMPI:
            # This is one host, and the user chooses the number of ranks: never refuse for lack of slots. In
            # the default directory, files of an earlier job or of another user would stop mpiexec.
            settings |= mpiexec_settings(":oversubscribe", os.environ, library.version, job_dir)
        arguments = ["-n", str(options.num_proc), *options.mpi_args, *options.binding_args]
        command = [mpiexec, *arguments, *_rank_command(options)]
        if options.verbose or options.dry_run:
            say(f"pyhvd: mpi4py is built on {library.name}")
            shown = settings | dict.fromkeys(dict(options.env), "(not shown)")
            say("pyhvd: " + shlex.join([*(f"{name}={value}" for name, value in shown.items()), *command]))
        if options.dry_run:
            return 0
        segments.sweep()
        return _LocalJob(command, outside_of_rank(os.environ) | settings, job_dir, options).run()


@dataclass(eq=False)
class _LocalJob:
    """mpiexec, and the lines to the supervisors of its ranks."""

    command: list[str]
    environment: dict[str, str]
    job_dir: str
    options: Options
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _ranks: dict[Line, int] = field(default_factory=dict)  # -1 until the supervisor has sent its hello
    _seen: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)
    _reports: list[ExitReport] = field(default_factory=list)
    _stopped_by: int = 0
    _start_by: float = math.inf  # when ranks that have not started are too late
    _end_at: float = math.inf  # when the launcher ends the job itself
    _kill_at: float = math.inf  # when the launcher kills what is left
    _say_waiting_at: float = math.inf
    _start_failed: bool = False

    def __post_init__(self) -> None:
        assert self.options.num_proc is not None
        self._size = self.options.num_proc
        self._entrance = Entrance(self._size, self.options.start_timeout)
        self._listener = listen(self.job_dir, self._size)

    def run(self) -> int:
        """Run the job to its end, and print its failure; return the exit code."""
        read = wake_on_signals(self._on_signal)
        self._selector.register(read, selectors.EVENT_READ, lambda: os.read(read, 4096))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        mpiexec = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,  # rank 0 gets the launcher's by its line
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
            # Safe, as this process has one thread.
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM, os.getpid()),
        )
        self._start_by = time.monotonic() + self.options.start_timeout
        while mpiexec.poll() is None:
            now = time.monotonic()
            if len(self._seen) == self._size:
                self._start_by = math.inf
            if now > self._start_by and self._end_at == math.inf:
                self._start_failed = True
                self._end_at = now
            self._check_entrance(now)
            if now >= self._say_waiting_at:
                self._say_waiting()
            if self._stopped_by and len(self._ended) == self._size:
                self._end_at = min(self._end_at, now)
            if now >= self._end_at and self._kill_at == math.inf:
                self._end(mpiexec)
            if now >= self._kill_at:
                signal_group(mpiexec.pid, signal.SIGKILL)
            self._wait()
        self._drain()
        return self._conclude(mpiexec.returncode)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in ENDING:
            grace = 0.0 if self._stopped_by else GRACE_S  # the second signal ends them now
            self._stopped_by = self._stopped_by or number
            self._end_by(grace)
            self._say_waiting_at = time.monotonic() + SAY_WAITING_S if grace else math.inf
        for line, rank in self._ranks.items():
            if rank >= 0:  # the answer to a hello tells the others
                line.send("signal", number)

    def _end_by(self, seconds: float) -> None:
        self._end_at = min(self._end_at, time.monotonic() + seconds)

    def _say_waiting(self) -> None:
        self._say_waiting_at = math.inf
        if slow := sorted(self._seen - self._ended):
            say(describe_waiting(slow))

    def _end(self, mpiexec: subprocess.Popen[bytes]) -> None:
        """End the job: supervisors kill their ranks when their lines close; then mpiexec ends too."""
        self._kill_at = time.monotonic() + _MPIEXEC_S
        for line in list(self._ranks):
            self._disconnect(line)
        mpiexec.terminate()

    def _check_entrance(self, now: float) -> None:
        """End the job if ranks wait in MPI_Init for one that has ended; name one that is late there."""
        if self._end_at < math.inf:
            return
        absent, late = self._entrance.absent(), self._entrance.late(now)
        for rank, text in filter(None, (absent, late)):
            title = f"pyhvd: rank {rank} of {self._size} on host {socket.gethostname()} {text}"
            if absent is None and not self.options.ends_late:
                say(title + GOES_ON)
            else:
                self._reports.append(ExitReport(rank, EXIT, 1, title))
                self._end_at = now

    def _wait(self) -> None:
        if self._kill_at < math.inf:
            soonest = self._kill_at
        elif self._end_at < math.inf:
            soonest = min(self._end_at, self._say_waiting_at)
        else:
            soonest = min(self._start_by, self._entrance.late_at)
        begin = time.monotonic()
        timeout = max(0.0, soonest - begin) + 0.001
        if min(self._start_by, self._entrance.late_at) < math.inf:
            timeout = min(timeout, _STOOD_STILL_S)  # so that it is known how long this process was stopped
        events = self._selector.select(None if timeout == math.inf else timeout)
        if (late := time.monotonic() - begin - timeout) > _STOOD_STILL_S:
            # This process was stopped, maybe with the ranks. What they have told meanwhile is read first.
            self._start_by += late + _STOOD_STILL_S
            self._entrance.late_at += late + _STOOD_STILL_S
            events = self._selector.select(0)
        for key, _ in events:
            with contextlib.suppress(BlockingIOError):
                key.data()

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        line = Line(peer)
        self._ranks[line] = -1
        self._selector.register(line, selectors.EVENT_READ, lambda: self._receive(line))

    def _receive(self, line: Line) -> bool:
        """Take the messages of a rank's supervisor; return whether there were some."""
        messages = line.receive()
        for what, value in messages:
            if what == "hello":
                self._ranks[line] = value
                self._seen.add(value)
                if value == 0:
                    line.give_stdin()
                if self._stopped_by:
                    line.send("signal", self._stopped_by)
            elif what == ENTERING and value:
                self._entrance.enter(self._ranks[line], time.monotonic())
            elif what == ENTERING:
                self._entrance.note_return()
            elif what == REPORT:
                self._reports.append(ExitReport(**value))
            elif what == "ended":
                self._ended.add(self._ranks[line])
                if value == 0:
                    self._entrance.end(self._ranks[line])
                elif not self._stopped_by:
                    self._end_by(_FAILED_S)
        if not line.open:
            rank = self._ranks[line]
            self._disconnect(line)
            if rank >= 0 and rank not in self._ended and self._kill_at == math.inf:
                text = f"pyhvd: rank {rank} of {self._size} was lost: the process that watched it was killed"
                if self._ended:
                    before = list_numbers(self._ended)
                    text += f" (ended before it: rank {before}; without exit handlers mpiexec then ends all)"
                self._reports.append(ExitReport(rank, LOST, 1, text))
                self._end_by(_FAILED_S)
        return bool(messages)

    def _disconnect(self, line: Line) -> None:
        self._selector.unregister(line)
        self._ranks.pop(line, None)
        line.close()

    def _drain(self) -> None:
        """Receive what supervisors sent before they ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._accept()
        for line in list(self._ranks):
            while line in self._ranks and self._receive(line):
                pass

    def _conclude(self, returncode: int) -> int:
        """Print the first failure; return the exit code."""
        code = shell_code(returncode)
        cause = root_cause(self._reports)
        if self._stopped_by:
            shown = root_cause(report for report in self._reports if report.kind == INTERRUPT)
            if shown is not None:
                say(shown.text)
            say(f"pyhvd: ended by {signal.Signals(self._stopped_by).name}")
            return 128 + self._stopped_by
        if self._start_failed:
            missing = set(range(self._size)) - self._seen
            say(
                f"pyhvd: only {len(self._seen)} of {self._size} ranks started in"
                f" {self.options.start_timeout:g} s (missing: {list_numbers(missing)});"
                " see --start-timeout and --verbose"
            )
            return 1
        if cause is not None:
            say(cause.text)
            return cause.code
        if code and not self._seen:
            command = shlex.join(self.command)
            say(f"pyhvd: mpiexec failed before any rank started (exit code {code}): {command}")
        elif code:
            say(f"pyhvd: mpiexec exited with code {code}, and no rank reported a failure")
        return code


def _rank_command(options: Options) -> list[str]:
    """Return the command of a rank: this Python with its own flags, and pyhvd.run."""
    flags: list[str] = []
    for word in sys.orig_argv[1:]:
        if word.startswith("-m") or (not word.startswith("-") and flags[-1:] not in (["-X"], ["-W"])):
            break  # -m pyhvd.run, or the pyhvdrun script
        flags.append(word)
    # Without -P, modules of the working directory would shadow those of pyhvd and of the standard library.
    flags = [*(word for word in flags if word != "-P"), "-P"]
    return [options.python or sys.executable, *flags, "-m", "pyhvd.run", *options.rank_arguments()]
