"""Starting mpiexec for a test, and ending everything it started.

Owns the differences between MPIs (options, environment), and how a job's processes are found and killed.
Knows nothing of pytest, and nothing of what the ranks run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Every process of a job has this variable. Hydra starts each rank in a separate session, so neither
# process group nor session finds them all.
JOB_MARKER = "PYHVD_TEST_JOB"
# The variables with a rank's number before MPI_Init: of Hydra, of Open MPI, of other launchers with PMIx.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# With these variables of an outer mpiexec, the inner mpiexec would start as a rank.
_OUTER_JOB = ("PMI_", "PMIX_", "PRTE_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "HYDI_", "HYDRA_", "MPI_LOCAL")


def horovodrun(folder: str | Path) -> tuple[str, str]:
    """Return the command line of horovodrun, as pip makes it; its script lies in the folder."""
    script = Path(folder, "horovodrun")
    script.write_text("import sys\nfrom pyhvd.run.__main__ import horovodrun\nsys.exit(horovodrun())\n")
    return sys.executable, str(script)


@functools.cache
def mpiexec_path() -> str | None:
    """Return the mpiexec of this interpreter's environment, else the one on PATH, else None."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@functools.cache
def mpi_version() -> str:
    """Return name and version of this mpiexec in one line, such as ``MPICH 5.0.2`` or ``Open MPI 5.0.11``."""
    path = mpiexec_path()
    if path is None:
        return "no MPI"
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    first = (text.splitlines() or ["unknown MPI"])[0]
    if "(Open MPI)" in first:
        return first.replace("mpiexec (Open MPI)", "Open MPI")
    version = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "Version:" in line), "")
    return f"MPICH {version}" if "HYDRA" in first else first


def mpiexec_command(n: int, *argv: str) -> list[str]:
    """Return the command line that runs ``argv`` on `n` ranks of this machine, even if it has fewer cores."""
    path = mpiexec_path()
    if path is None:
        raise FileNotFoundError("no mpiexec beside this interpreter or on PATH")
    options: list[str] = []
    if mpi_version().startswith("Open MPI"):
        # ob1 and these three transports: the default probing of network transports takes seconds per start.
        options += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        options += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
    return [path, *options, "-n", str(n), *argv]


def mpi_environment(directory: Path, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment of a job with a private directory; None in `extra` removes a name."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER_JOB)}
    env |= {
        JOB_MARKER: str(directory),
        # Open MPI keeps its daemon's state there, and a stale one makes the next job fail to start.
        "TMPDIR": str(directory),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # MPICH spins 1000 polls before it yields: ruinous with more ranks than cores. The second pair does
        # the same below THREAD_MULTIPLE.
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    for name, value in (extra or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


@contextlib.contextmanager
def job_directory() -> Iterator[Path]:
    """Yield a new directory with a short name: Open MPI's socket paths in it are limited to 107 bytes."""
    base = "/tmp" if os.access("/tmp", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hvd-", dir=base, ignore_cleanup_errors=True) as name:
        yield Path(name)


class MpiJob:
    """One running mpiexec and everything it started."""

    def __init__(
        self, command: Sequence[str], directory: Path, env: Mapping[str, str | None] | None, cwd: Path
    ) -> None:
        self.directory = directory
        self.stdout, self.stderr = directory / "stdout", directory / "stderr"
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                env=mpi_environment(directory, env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, deadline: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end, for `until`, or for the deadline (``time.time()``); return whether it ended."""
        pause = 0.005
        while self.process.poll() is None and time.time() < deadline and not until():
            # Popen.wait(timeout) also polls; this way `until` is asked as often.
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return self.process.poll() is not None

    def output(self) -> tuple[str, str]:
        """Return the job's stdout and stderr so far."""
        return self.stdout.read_text(errors="replace"), self.stderr.read_text(errors="replace")

    def processes(self) -> dict[int, int | None]:
        """Return the job's live processes, pid to rank; None for mpiexec and its proxies."""
        marker = f"{JOB_MARKER}={self.directory}".encode()
        found: dict[int, int | None] = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                names = path.read_bytes().split(b"\0")
                if marker in names:
                    found[int(path.parent.name)] = _rank_in(names)
        if not found and self.process.poll() is None:
            found[self.process.pid] = None
        return found

    def dump_stacks(self) -> None:
        """Make every rank print the stacks of all its threads to stderr, in rank order, and die of SIGABRT.

        mpiexec is stopped meanwhile: it would kill the other ranks as soon as the first one dies.
        """
        processes = self.processes()
        launchers = [pid for pid, rank in processes.items() if rank is None]
        for pid in launchers:
            _signal(pid, signal.SIGSTOP)
        ranks = [(rank, pid) for pid, rank in processes.items() if rank is not None]
        for _, pid in sorted(ranks):
            _signal(pid, signal.SIGABRT)
            time.sleep(0.1)
        for pid in launchers:
            _signal(pid, signal.SIGCONT)
        self.wait(time.time() + 1.0)

    def kill(self) -> None:
        """End every process of the job: first by a signal to mpiexec, which may clean up, then by SIGKILL."""
        if self.process.poll() is None:
            _signal(self.process.pid, signal.SIGTERM)
            self.wait(time.time() + 1.0)
        give_up = time.time() + 5.0
        while (pids := self.processes()) and time.time() < give_up:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)
            self.process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the only way without /proc
        self.process.wait(timeout=5.0)


def _rank_in(names: Sequence[bytes]) -> int | None:
    for variable in RANK_VARIABLES:
        for entry in names:
            if entry.startswith(variable.encode() + b"="):
                return int(entry.split(b"=", 1)[1])
    return None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


@dataclass(frozen=True)
class MpiRun:
    """The result of a command under mpiexec; `returncode` is None if it was killed at the deadline."""

    returncode: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether the job was still running at its deadline; `stderr` then ends with the ranks' stacks."""
        return self.returncode is None


def run_mpi(
    n: int,
    argv: Sequence[str],
    env: Mapping[str, str | None] | None = None,
    timeout: float = 30.0,
    cwd: Path = ROOT,
) -> MpiRun:
    """Run ``argv`` (program first: usually ``sys.executable``) on `n` ranks and wait for its end.

    At the deadline every Python rank's stacks are printed to stderr and the whole job is killed.
    """
    start = time.time()
    with job_directory() as directory:
        job = MpiJob(mpiexec_command(n, *argv), directory, env, cwd)
        try:
            ended = job.wait(start + timeout)
            if not ended:
                job.dump_stacks()
        finally:
            job.kill()
        stdout, stderr = job.output()
        return MpiRun(job.process.returncode if ended else None, stdout, stderr, time.time() - start)
