"""``python -m benchmarks launch``: how fast jobs on many hosts start, and end when something fails.

The hosts are namespaces of this machine (tests/bed.py) with an sshd each: they share its cores. The launcher
is on a host of its own. A time runs from the start of the launcher's process, or from the fault.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.harness import OURS, Figures, Outcome
from benchmarks.hosts import publish
from benchmarks.machine import Machine, mpi_short
from benchmarks.report import Report, Run, Target, judge
from tests.bed import bed, why_not
from tests.hosts import sshd
from tests.hosts.sshd import Site, Sshd
from tests.many_hosts import Launcher, end_of, start_waiting
from tests.mpi.launch import ROOT

TITLE = "launch: jobs on simulated hosts over ssh"
_PYHVD = "pyhvdrun"
_MOST_HOSTS = 16
_IDLE_S = 10.0
_FIRST = """
    import time
    import numpy as np, pyhvd as hvd
    hvd.init()
    hvd.allreduce(np.ones(1, np.float32), name="first")
    print(time.time(), flush=True)
"""
_AGAIN = """
    import json, time
    import numpy as np, pyhvd as hvd
    def first():
        hvd.init()
        total = hvd.allreduce(np.ones(1, np.float32), op=hvd.Sum)[0]
        hvd.shutdown()
        return float(total)
    def timed(fn):
        begin = time.perf_counter()
        found = hosts.launch(fn)
        return time.perf_counter() - begin, found
    with hvd.Hosts("h0:2,h1:2") as hosts:
        timed(first)
        seconds, found = timed(first)
        assert found == [4.0] * 4, found
        nothing, _ = timed(lambda: None)
    with hvd.Hosts("h1:1") as hosts:
        large, (array,) = timed(lambda: np.ones(1 << 30, np.uint8))
        assert array.nbytes == 1 << 30 and array[-1] == 1
    print(json.dumps([seconds, nothing, large]))
"""
_SILENT = """
    import time
    print("up", flush=True)
    time.sleep(1000)
"""


def _target(label: str, least: float, moonshot: float, mpi: Sequence[str] = ()) -> Target:
    return Target(label, f"launch, {label}", _PYHVD, (), least, moonshot, True, (), tuple(mpi))


TARGETS = [
    _target("2 x 2, first allreduce", 3.0, 1.0, ["mpich"]),
    _target("2 x 2, first allreduce", 5.0, 3.0, ["openmpi"]),
    _target("16 x 1, first allreduce", 4.0, 2.0),
    _target("each host beyond 2", 0.05, 0.05),
    _target("each host beyond 2, CPU of the launcher's host", 0.05, 0.05),
    _target("launch(fn) again, first allreduce", 1.0, 0.3),
    _target("a result of 1 GiB", 5.0, 5.0),
    _target("a rank raises", 1.0, 0.3),
    _target("a host crashes", 2.0, 2.0),
    _target("a host is cut off", 6.0, 6.0),
    _target("a host is frozen", 6.0, 6.0),
    _target("16 silent hosts, CPU of the launcher", 0.5, 0.5),
    _target("16 silent hosts, memory of the launcher", 60.0, 60.0),
]


class Table:
    """The cases on one bed, with the samples of all runs."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site = site
        self._folder = folder
        self.samples: dict[tuple[str, str], list[float]] = {}

    def run(self) -> None:
        """Measure each case once."""
        self._first("2 x 2, first allreduce", "h0:2,h1:2")
        two, little = self._first("2 x 1, first allreduce", "h0,h1")
        eight, _ = self._first("8 x 1, first allreduce", ",".join(f"h{number}" for number in range(8)))
        _, much = self._first(
            "16 x 1, first allreduce", ",".join(f"h{number}" for number in range(_MOST_HOSTS))
        )
        self._note("each host beyond 2", "s", (eight - two) / 6)
        used = (much - little) / (_MOST_HOSTS - 2)
        self._note("each host beyond 2, CPU of the launcher's host", "s", used)
        self._call()
        self._fail("a rank raises", "raise ValueError(time.time())", lambda: None, "ValueError")
        host = self._site.bed.hosts["h1"]
        self._fail("a host is cut off", "pass", lambda: self._site.bed.cut_off(host), "host h1")
        self._site.bed.rejoin(host)
        self._fail("a host is frozen", "pass", host.freeze, "host h1")
        host.thaw()
        self._fail("a host crashes", "pass", host.crash, "host h1")
        self._site.bed.start_host(host)
        self._site.sshd.start(host)
        self._idle()

    def _note(self, label: str, unit: str, value: float) -> None:
        self.samples.setdefault((label, unit), []).append(value)

    def _launcher(self) -> Launcher:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        return self._site.launcher(folder)

    def _first(self, label: str, hosts: str) -> tuple[float, float]:
        """Measure the time to the last rank's first allreduce; return it, and the launcher's CPU."""
        launcher = self._launcher()
        before = _cpu_of_children()
        begin = time.time()
        ended = launcher.run(launcher.script(_FIRST), hosts=hosts)
        if ended.code:
            raise SystemExit(f"{label}: {ended.err}")
        seconds = max(float(line.rpartition(":")[2]) for line in ended.out.splitlines()) - begin
        self._note(label, "s", seconds)
        return seconds, _cpu_of_children() - before

    def _call(self) -> None:
        path = self._site.sshd.path
        inside = ["env", f"PATH={path}", "OMP_NUM_THREADS=1", sys.executable, "-c", textwrap.dedent(_AGAIN)]
        ended = subprocess.run(
            self._site.bed.head.command(inside), stdout=subprocess.PIPE, text=True, check=True
        )
        first, nothing, large = json.loads(ended.stdout)
        self._note("launch(fn) again, first allreduce", "s", first)
        self._note("launch(fn) again, nothing", "s", nothing)
        self._note("a result of 1 GiB", "s", large)

    def _fail(self, label: str, act: str, fault: Callable[[], None], named: str) -> None:
        """Measure the time from a fault to the end of the launcher, which has named the cause last."""
        launcher = self._launcher()
        job = start_waiting(launcher, "h0:2,h1:2", act)
        begin = time.monotonic()
        (launcher.folder / "go").touch()
        fault()
        ended = end_of(job)
        seconds = time.monotonic() - begin
        if named not in ended.last:
            raise SystemExit(f"{label}: the last line does not name {named}: {ended.err}")
        self._note(label, "s", seconds)

    def _idle(self) -> None:
        """Measure the CPU and the memory of a launcher whose ranks are silent."""
        launcher = self._launcher()
        hosts = ",".join(f"h{number}" for number in range(_MOST_HOSTS))
        job = launcher.start(launcher.script(_SILENT), hosts=hosts)
        assert job.stdout is not None
        for _ in range(_MOST_HOSTS):
            job.stdout.readline()
        process = _python_of(job.pid)
        before = _cpu_seconds(process)
        time.sleep(_IDLE_S)
        used = _cpu_seconds(process) - before
        self._note("16 silent hosts, CPU of the launcher", "%", 100 * used / _IDLE_S)
        self._note("16 silent hosts, memory of the launcher", "MB", _memory(process) / 1e6)
        job.terminate()
        end_of(job)

    def outcomes(self) -> list[Outcome]:
        """Return the figures of all runs."""
        return [
            Outcome(f"launch, {label}", 0, unit, [Figures.of(_PYHVD, OURS, samples)])
            for (label, unit), samples in self.samples.items()
        ]


def _python_of(pid: int) -> int:
    """Return the launcher's process: the process that was started, or a child that it became."""
    while (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) and b"pyhvd.run" not in (
        Path(f"/proc/{pid}/cmdline").read_bytes()
    ):
        pid = int(children[0])
    return pid


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cpu_of_children() -> float:
    """Return the CPU seconds of this process's children that have ended, and of theirs; agents are sshd's."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def main(arguments: Sequence[str]) -> int:
    """Measure, print and save; return 0 also if a target is missed."""
    given = _parse(arguments)
    if reason := why_not() or sshd.why_not():
        raise SystemExit(f"no simulated hosts with ssh on this machine: {reason}")
    compileall.compile_dir(ROOT / "pyhvd", quiet=1)  # as pip does at an installation
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        made = stack.enter_context(bed([f"h{number}" for number in range(_MOST_HOSTS)], folder))
        table = Table(Site(made, Sshd(made, folder, stack)), folder)
        for number in range(given.runs):
            if sys.stderr.isatty():
                print(f"\r\x1b[Krun {number + 1} of {given.runs}", end="", file=sys.stderr)
            table.run()
        path = folder / "machine.json"
        here = [sys.executable, "-m", "pyhvd.run", "-n", "1", "-m", "benchmarks.machine", str(path)]
        subprocess.run(here, check=True, cwd=ROOT)
        machine = msgspec.json.decode(path.read_bytes(), type=Machine)
    run = Run(4, machine, mpi_short(machine.mpi), table.outcomes(), ["sshd and all ranks share the cores"])
    report = Report("launch", TITLE, run.mpi, [run], judge(TARGETS, [run]))
    publish(report, given.results / f"launch-{run.mpi}.json")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks launch",
        description=f"{TITLE}: times to the first allreduce, and from a fault to the end of the launcher."
        " Needs root, iproute2 and openssh-server.",
        epilog="example: python -m benchmarks launch --runs 3",
    )
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="samples of each case (default: 5)")
    parser.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="write launch-<mpi>.json and .png to this folder (default: benchmarks/results)",
    )
    return parser.parse_args(arguments)
