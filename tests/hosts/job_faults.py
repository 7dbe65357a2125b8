"""What may fail in a job on many hosts: how to cause it, what the user reads, and within which time.

A trial starts 4 ranks on two hosts over ssh, makes a fault, and looks at the launcher's last output, its
exit code, and what is left on the hosts. tests/hosts/test_job_faults.py makes each fault once. As a program
(``make test-hosts-ends``) this module makes each of them 20 times, and saves the times for the table in
docs/many_hosts.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyhvd.run.hosts.agent_template import SSH
from tests.bed import Host, bed, why_not
from tests.hosts import sshd
from tests.hosts.sshd import Site, Sshd, state_of, words_of
from tests.many_hosts import PATIENCE_S, end_of, start_waiting
from tests.mpi.launch import ROOT, mpi_version

RESULTS = ROOT / "benchmarks" / "results" / "faults"
_HOSTS = "east:2,west:2"
_START_TIMEOUT_S = 3
# On a reachable host the last process ends within the fault's limit, or so long after the launcher.
_GONE_S = 1.0
# A host that is cut off ends its own ranks after the driver timeout, which is set to so many seconds.
_PATIENCE_S = 20
_ALONE_S = 22.0
_AGENT = "pyhvd.job.agent.host_agent"
_SHOWN = {"{pid}": r"\d+", "{rank}": r"\d", "...": ".*"}


def on_open_mpi() -> bool:
    return mpi_version().startswith("Open MPI")


@dataclass
class Trial:
    """One job, to which a fault happens.

    Attributes
    ----------
    number : int
        How many trials of this fault there were before.
    begin : float
        When the fault happened.
    """

    site: Site
    folder: Path
    number: int
    job: subprocess.Popen[str]
    begin: float

    @property
    def west(self) -> Host:
        return self.site.west

    def go(self) -> None:
        """Let the ranks that the fault names act."""
        self.begin = time.monotonic()
        (self.folder / "go").touch()

    def kill(self, processes: Iterable[int]) -> None:
        victims = list(processes)
        assert victims, "there is no process to kill"
        for process in victims:
            os.kill(process, signal.SIGKILL)

    def kill_ranks_of_west(self) -> None:
        ranks = self.site.running(self.west, "pyhvd.job.process.guardian")
        parents = {state_of(rank)[1] for rank in ranks}
        self.kill(rank for rank in ranks if rank not in parents)

    def kill_agent(self) -> None:
        self.kill(self.site.running(self.west, _AGENT))

    def kill_sshd(self) -> None:
        self.kill(self.site.sshd.children(self.west))

    def kill_ssh(self) -> None:
        clients = self.site.running(self.site.bed.head, "ssh")
        self.kill(client for client in clients if "west" in words_of(client))

    def send(self, *numbers: signal.Signals) -> None:
        """Send signals to the launcher."""
        for number in numbers:
            self.job.send_signal(number)

    def kill_launcher(self) -> None:
        self.send(signal.SIGKILL)

    def stop_launcher(self, seconds: float) -> None:
        self.send(signal.SIGSTOP)
        time.sleep(seconds)
        self.send(signal.SIGCONT)
        self._go_on()

    def press_ctrl_z(self) -> None:
        self.send(signal.SIGTSTP)
        _wait_until(lambda: state_of(self.job.pid)[0] == "T")
        time.sleep(0.5)
        self.send(signal.SIGCONT)
        self._go_on()

    def press_ctrl_c_twice(self) -> None:
        """Press it again as soon as the first has arrived, which ranks ignore."""
        self.go()
        _wait_until(lambda: len(list(self.folder.glob("deaf.*"))) == 4)
        self.begin = time.monotonic()
        self.send(signal.SIGINT)
        time.sleep(0.2)
        self.send(signal.SIGINT)

    def press_ctrl_c_in_the_start(self) -> None:
        """Do so at another moment in each trial, of the first second from the start of ssh on."""
        _wait_until(lambda: bool(self.site.running(self.site.bed.head, "ssh")))
        time.sleep(0.05 * (self.number % 20))
        self.begin = time.monotonic()
        self.send(signal.SIGINT)

    def cut_off_west(self) -> None:
        self.site.bed.cut_off(self.west)

    def cut_off_west_for_three_seconds(self) -> None:
        self.cut_off_west()
        time.sleep(3)
        self.site.bed.rejoin(self.west)
        self._go_on()

    def freeze_west(self) -> None:
        self.west.freeze()

    def freeze_west_for_three_seconds(self) -> None:
        self.freeze_west()
        time.sleep(3)
        self.west.thaw()
        self._go_on()

    def crash_west(self) -> None:
        self.west.crash()

    def power_off_west(self) -> None:
        self.site.bed.power_off(self.west)

    def power_off_the_launchers_host(self) -> None:
        self.site.bed.power_off(self.site.bed.hosts["lead"])

    def wait(self) -> None:
        """Do nothing: the job fails by itself."""

    def _go_on(self) -> None:
        time.sleep(0.5)
        assert self.job.poll() is None, end_of(self.job)
        self.go()


@dataclass(frozen=True)
class JobFault:
    """A fault.

    Attributes
    ----------
    name : str
        Its name in the table.
    reads : tuple of str
        Lines of the launcher's stderr, of which the last is the last on the screen. ``{pid}`` and ``{rank}``
        are numbers, ``...`` is anything. Without any, the launcher cannot say a word.
    within : float or None
        The most seconds from the fault to the launcher's end, or, if the launcher itself is the victim, to
        the end of all processes. None: the job goes on, until a rank ends it.
    strike : callable
        Makes the fault.
    code : int
        The launcher's exit code.
    act, ranks
        See :func:`start_waiting`.
    heal : callable, optional
        Makes the site whole again.
    alone : bool
        West cannot be reached any more: its processes end after the driver timeout, or when the fault is
        healed.
    hosts : str
        The hosts of a job that cannot start.
    patience : int
        The driver timeout (s), after which agents end that hear nothing; 0 for the default.
    any_mpi : bool
        Whether MPI plays no part, so that one MPI is enough.
    alike : bool
        Whether another fault takes the same path under another MPI, so that a single trial tells little.
    """

    name: str
    reads: tuple[str, ...]
    within: float | None
    strike: Callable[[Trial], None] = Trial.go
    code: int = 1
    act: str = "pass"
    ranks: tuple[int, ...] = (2,)
    heal: Callable[[Site], None] | None = None
    alone: bool = False
    hosts: str = ""
    patience: int = 0
    any_mpi: bool = False
    alike: bool = False

    @property
    def is_slow(self) -> bool:
        """Whether most of a trial is waiting."""
        return self.within is None or self.within > 2 or self.alone

    def lines(self) -> list[str]:
        """Return the lines that must be on the screen, as regular expressions."""
        return ["".join(_SHOWN.get(word, re.escape(word)) for word in _words(line)) for line in self.reads]


def _words(line: str) -> list[str]:
    return re.split("(" + "|".join(map(re.escape, _SHOWN)) + ")", line)


def _wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


_WHO = "pyhvd: rank 2 of 4 on host west"
_DIES = "os.kill(os.getpid(), 9)"
# The rank on the first host follows, as if the first failure had caused its own.
_TWO_DIE = "time.sleep(0.1 * (hvd.rank() == 0)); os.kill(os.getpid(), 11)"
_GONE = (f"{_WHO} is lost: its agent is gone...",)
_SILENT = (f"{_WHO} has been silent for 5 s...",)
_GOES_ON = (f"{_WHO} (pid {{pid}}) called sys.exit(7)",)
_ENDS = "sys.exit(7)"
_AHEAD = "one host's clock is 1 h ahead"
_LATER = {
    "refused.test": "ssh: connect to host ... port 23: Connection refused...",
    "unreachable.test": "ssh: connect to host ... port 22: No route to host...",
    "unknown.invalid": "ssh: Could not resolve hostname unknown.invalid...",
    "silent.test": f"its agent has not started within {_START_TIMEOUT_S} s (--start-timeout)",
}
_AT_ONCE = {
    "stranger.test": "...Permission denied (publickey)...ssh-copy-id",
    "changed.test": "Host key verification failed. Run 'ssh changed.test' once...",
    "password.test": "...Permission denied (password)...ssh-copy-id",
}


def _cannot_start(name: str, hosts: dict[str, str], within: float) -> JobFault:
    lines = tuple(f"pyhvd: host {host}: {text}" for host, text in hosts.items())
    return JobFault(name, lines, within, Trial.wait, hosts=",".join(["east:2", *hosts]), any_mpi=True)


FAULTS = (
    JobFault(
        "a rank raises",
        (f"{_WHO} (pid {{pid}}) failed:", "LookupError: not here"),
        2,
        act="raise LookupError('not here')",
    ),
    JobFault(
        "a rank exits with 3", (f"{_WHO} (pid {{pid}}) called sys.exit(3)",), 2, code=3, act="sys.exit(3)"
    ),
    JobFault("a rank is killed", (f"{_WHO} (pid {{pid}}) was killed by SIGKILL...",), 2, code=137, act=_DIES),
    JobFault(
        "a rank crashes",
        (f"{_WHO} (pid {{pid}}) was killed by SIGSEGV...",),
        2,
        code=139,
        act="os.kill(os.getpid(), 11)",
    ),
    JobFault(
        "a rank calls MPI_Abort",
        (f"{_WHO} called MPI_Abort with code 9...",),
        2,
        code=9,
        act="__import__('mpi4py.MPI').MPI.COMM_WORLD.Abort(9)",
    ),
    JobFault(
        "a rank calls os._exit(0)",
        (f"{_WHO} (pid {{pid}}) exited with code 0 while pyhvd...",),
        2,
        act="os._exit(0)",
    ),
    JobFault(
        "all ranks of a host are killed",
        ("pyhvd: rank {rank} of 4 on host west (pid {pid}) was killed by SIGKILL...",),
        2,
        Trial.kill_ranks_of_west,
        code=137,
    ),
    JobFault(
        "two ranks crash, on two hosts",
        (f"{_WHO} (pid {{pid}}) was killed by SIGSEGV...",),
        2,
        code=139,
        act=_TWO_DIE,
        ranks=(0, 2),
        alike=True,
    ),
    JobFault(
        f"the same, and {_AHEAD}",
        (f"{_WHO} (pid {{pid}}) was killed by SIGSEGV...",),
        2,
        code=139,
        act=f"assert (time.time() > time.clock_gettime(0) + 3000) == (hvd.rank() == 2); {_TWO_DIE}",
        ranks=(0, 2),
    ),
    JobFault("an agent is killed", _GONE, 2, Trial.kill_agent),
    JobFault("an sshd's child is killed", _GONE, 2, Trial.kill_sshd, alike=True),
    JobFault("an ssh client is killed", _GONE, 2, Trial.kill_ssh, alike=True),
    JobFault(
        "a host crashes",
        ("pyhvd: rank {rank} of 4 on host west ...",),
        2,
        Trial.crash_west,
        heal=lambda site: _restart(site, "west"),
    ),
    JobFault(
        "a host is frozen", _SILENT, 6, Trial.freeze_west, heal=lambda site: site.west.thaw(), alone=True
    ),
    JobFault(
        "a host is cut off",
        _SILENT,
        6,
        Trial.cut_off_west,
        heal=lambda site: site.bed.rejoin(site.west),
        alone=True,
        patience=_PATIENCE_S,
    ),
    JobFault(
        "a host has no power", _SILENT, 6, Trial.power_off_west, heal=lambda site: _restart(site, "west")
    ),
    JobFault(
        "a host is cut off for 3 s",
        _GOES_ON,
        None,
        Trial.cut_off_west_for_three_seconds,
        7,
        _ENDS,
        any_mpi=True,
    ),
    JobFault(
        "a host is frozen for 3 s",
        _GOES_ON,
        None,
        Trial.freeze_west_for_three_seconds,
        7,
        _ENDS,
        any_mpi=True,
    ),
    JobFault("the launcher is killed", (), 1, Trial.kill_launcher, -9),
    JobFault(
        "the launcher's host has no power",
        (),
        _ALONE_S,
        Trial.power_off_the_launchers_host,
        heal=lambda site: _restart(site, "lead"),
        patience=_PATIENCE_S,
    ),
    JobFault(
        "the launcher is stopped for 10 s",
        _GOES_ON,
        None,
        lambda trial: trial.stop_launcher(10),
        7,
        _ENDS,
        alike=True,
    ),
    JobFault(
        "the launcher is stopped for 60 s",
        (
            "pyhvd: host west: its agent has heard nothing from the launcher for 20 s, and its ranks go on",
            "pyhvd: the launcher stood still for 6{rank} s, and goes on",
            *_GOES_ON,
        ),
        None,
        lambda trial: trial.stop_launcher(60),
        7,
        _ENDS,
        alike=True,
    ),
    JobFault("Ctrl-Z, and fg", _GOES_ON, None, Trial.press_ctrl_z, 7, _ENDS, alike=True),
    JobFault(
        "Ctrl-C",
        ("KeyboardInterrupt", "pyhvd: ended by SIGINT"),
        5,
        lambda trial: trial.send(signal.SIGINT),
        130,
    ),
    JobFault(
        "Ctrl-C twice, and ranks that ignore it",
        ("pyhvd: ended by SIGINT",),
        5,
        Trial.press_ctrl_c_twice,
        130,
        "__import__('signal').signal(2, 1); open(f'deaf.{hvd.rank()}', 'w').close()",
        (0, 1, 2, 3),
    ),
    JobFault(
        "SIGTERM", ("pyhvd: ended by SIGTERM",), 5, lambda trial: trial.send(signal.SIGTERM), 143, alike=True
    ),
    JobFault(
        "SIGHUP", ("pyhvd: ended by SIGHUP",), 5, lambda trial: trial.send(signal.SIGHUP), 129, alike=True
    ),
    JobFault(
        "Ctrl-C in the start",
        ("pyhvd: ended by SIGINT",),
        5,
        Trial.press_ctrl_c_in_the_start,
        130,
        hosts=_HOSTS,
    ),
    _cannot_start(
        f"hosts that may come up: refused, no route, unknown name, silent; after {_START_TIMEOUT_S} s",
        _LATER,
        _START_TIMEOUT_S + 3,
    ),
    _cannot_start("hosts that refuse: wrong key, changed host key, password", _AT_ONCE, 4),
)


def _restart(site: Site, name: str) -> None:
    host = site.bed.hosts[name]
    host.crash()  # what is left of it
    site.restart(host)
    for folder in site.sshd.temporary.iterdir():
        shutil.rmtree(folder)  # a crash leaves them


@contextmanager
def make_site() -> Iterator[Site]:
    """Yield hosts with all that the faults need; the name of a bad host says what is wrong with it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        made = stack.enter_context(bed(["east", "west", "lead"], folder))
        site = Site(made, Sshd(made, folder, stack))
        site.sshd.add_bad_hosts()
        yield site


@dataclass
class Outcome:
    """How a trial ended: after how many seconds, and what went wrong."""

    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def try_fault(site: Site, fault: JobFault, number: int = 0, slack: float = 0.0) -> Outcome:
    """Make a fault, and look at the end of the job; the site is whole afterwards.

    Parameters
    ----------
    site : Site
        The hosts.
    fault : JobFault
        The fault.
    number : int
        See :class:`Trial`.
    slack : float
        By how much the fault's limit may be exceeded, because other trials run at the same time.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcome = Outcome()
        trial = _start(site, fault, Path(folder), number)
        try:
            fault.strike(trial)
            _look_at_end(trial, fault, outcome, slack)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as exc:
            outcome.wrong.append(f"{type(exc).__name__}: {exc}")
        finally:
            trial.job.kill()
            trial.job.communicate()
            if fault.heal is not None:
                fault.heal(site)
        if left := site.wait_until_gone(_GONE_S + slack):
            outcome.wrong.append(f"left on the hosts: {[words_of(process) for process in left]}")
            trial.kill(left)
        if files := list(site.sshd.temporary.iterdir()):
            outcome.wrong.append(f"left in the hosts' temporary directory: {files}")
    return outcome


def _start(site: Site, fault: JobFault, folder: Path, number: int) -> Trial:
    lead = site.bed.hosts["lead"] if fault.strike is Trial.power_off_the_launchers_host else None
    launcher = site.launcher(
        folder, lead, {"PYHVD_DRIVER_TIMEOUT": str(fault.patience)} if fault.patience else {}
    )
    begin = time.monotonic()
    if fault.hosts:
        arguments = ("--start-timeout", str(_START_TIMEOUT_S), "-c", "pass")
        return Trial(site, folder, number, launcher.start(*arguments, hosts=fault.hosts), begin)
    job = start_waiting(launcher, _HOSTS, fault.act, fault.ranks, _agent(folder, _AHEAD in fault.name))
    return Trial(site, folder, number, job, time.monotonic())


def _agent(folder: Path, ahead: bool) -> str | None:
    """Return the command of an agent whose host is an hour ahead, if it is west."""
    if not ahead:
        return None
    text = "import time\nreal = time.time\ntime.time = lambda: real() + 3600\n"
    (folder / "sitecustomize.py").write_text(text)
    before = f"if [ $(hostname) = west ]; then export PYTHONPATH={folder}; fi"
    return SSH.replace("{command}", f"'{before}; {{command}}'")


def _look_at_end(trial: Trial, fault: JobFault, outcome: Outcome, slack: float) -> None:
    within = PATIENCE_S if fault.within is None else fault.within
    ended = end_of(trial.job)
    outcome.seconds = time.monotonic() - trial.begin
    if fault.reads:
        if ended.code != fault.code:
            outcome.wrong.append(f"exit code {ended.code}")
        lines = ended.err.splitlines()
        *before, last = fault.lines()
        if not re.fullmatch(last, ended.last) or not all(_has(lines, line) for line in before):
            outcome.wrong.append(f"wrong words: {ended.err}")
    if outcome.seconds > within + slack:
        outcome.wrong.append(f"the launcher ended after {outcome.seconds:.2f} s")
    alone = trial.west if fault.alone else None
    patience = max(within - outcome.seconds, _GONE_S) if fault.within else _GONE_S
    if left := trial.site.wait_until_gone(patience + slack, besides=alone):
        outcome.wrong.append(f"left: {[words_of(process) for process in left]}")
    if not fault.reads:
        outcome.seconds = time.monotonic() - trial.begin
    if fault.strike is Trial.cut_off_west and (left := trial.site.wait_until_gone(_ALONE_S)):
        outcome.wrong.append(f"left on a host that is cut off: {[words_of(process) for process in left]}")


def _has(lines: Iterable[str], wanted: str) -> bool:
    return any(re.fullmatch(wanted, line) for line in lines)


class Workers:
    """Threads with a site each, which make faults side by side.

    Parameters
    ----------
    trials : sequence of (JobFault, int)
        The faults, each with the number of its trial.
    count : int
        The number of threads. The first begins with faults whose trials are busy, the others with the slow.
    slack : float
        See :func:`try_fault`.
    on_end : callable
        Called with each fault and its outcome, in any thread.
    """

    def __init__(
        self,
        trials: Sequence[tuple[JobFault, int]],
        count: int,
        slack: float,
        on_end: Callable[[JobFault, Outcome], None],
    ) -> None:
        self._busy = [trial for trial in trials if not trial[0].is_slow][::-1]
        self._slow = [trial for trial in trials if trial[0].is_slow][::-1]
        self._lock = threading.Lock()
        self._slack = slack
        self._on_end = on_end
        self._threads = [threading.Thread(target=self._work, args=(number == 0,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all trials have ended."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Begin no further trial."""
        with self._lock:
            self._busy.clear()
            self._slow.clear()

    def _next(self, busy: bool) -> tuple[JobFault, int] | None:
        with self._lock:
            for trials in (self._busy, self._slow) if busy else (self._slow, self._busy):
                if trials:
                    return trials.pop()
        return None

    def _work(self, busy: bool) -> None:
        with make_site() as site:
            while trial := self._next(busy):
                fault, number = trial
                try:
                    outcome = try_fault(site, fault, number, self._slack)
                except BaseException as exc:
                    self._on_end(fault, Outcome(wrong=[repr(exc)]))
                    raise
                self._on_end(fault, outcome)


def faults_of_this_mpi() -> list[JobFault]:
    """Return the faults; under Open MPI without those in which MPI plays no part."""
    return [fault for fault in FAULTS if not (fault.any_mpi and on_open_mpi())]


def main() -> int:
    """Make all faults many times, print what went wrong, and save the times."""
    parser = argparse.ArgumentParser(description="Make faults in jobs on many hosts, and save the times.")
    parser.add_argument("--count", type=int, default=20, help="trials of each fault (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial (default: 0)")
    parser.add_argument("--beds", type=int, default=3, help="trials side by side (default: 3)")
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults of such names")
    parser.add_argument("--minutes", type=float, default=40, help="the most time (default: 40)")
    parser.add_argument("--add", action="store_true", help="add to the times that are saved")
    options = parser.parse_args()
    if reason := why_not() or sshd.why_not():
        raise SystemExit(f"no simulated hosts with ssh on this machine: {reason}")
    faults = [fault for fault in faults_of_this_mpi() if re.search(options.only, fault.name)]
    seconds: dict[str, list[float]] = {fault.name: [] for fault in faults}
    wrong = 0

    def note(fault: JobFault, outcome: Outcome) -> None:
        nonlocal wrong
        for text in outcome.wrong:
            print(f"{fault.name}: {text}", flush=True)
        wrong += bool(outcome.wrong)
        seconds[fault.name].append(round(outcome.seconds, 3))

    trials = [
        (fault, number) for number in range(options.first, options.first + options.count) for fault in faults
    ]
    workers = Workers(trials, options.beds, 0.0, note)
    timer = threading.Timer(60 * options.minutes, workers.stop)
    timer.start()
    workers.join()
    timer.cancel()
    done = sum(map(len, seconds.values()))
    print(f"{done} of {len(trials)} trials, {wrong} of them wrong, {mpi_version()}")
    save(faults, seconds, options.add)
    return int(wrong or done < len(trials))


def save(faults: Sequence[JobFault], seconds: dict[str, list[float]], add: bool) -> None:
    """Write the times of each fault to the file of this MPI; keep those of other faults."""
    path = RESULTS / f"{'openmpi' if on_open_mpi() else 'mpich'}.json"
    path.parent.mkdir(exist_ok=True)
    saved = json.loads(path.read_text())["faults"] if path.exists() else {}
    for fault in faults:
        times = saved.get(fault.name, {}).get("seconds", []) if add else []
        times += seconds[fault.name]
        saved[fault.name] = {"reads": fault.reads, "within": fault.within, "seconds": times}
    path.write_text(json.dumps({"mpi": mpi_version(), "faults": saved}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
