"""Running ``python -m pyhvd.run`` from the tests: outside mpiexec, and under that of this Python's MPI."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyhvd.job.mpi.flavour import find_library, find_mpiexec

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = find_library()
MPIEXEC = find_mpiexec(LIBRARY)
TIMEOUT_S = 60
# Waiting ranks yield their core: two tests at a time have more ranks than there are cores.
YIELDING = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_OURS = ("PMI", "MPI_LOCAL", "HYDI_", "OMPI_", "PRTE_", "PYHVD_", "OMP_")


@dataclass(frozen=True)
class Ended:
    """The result of a job: `out`, `err`, `code`, its duration, and its end, `at` (``time.time()``)."""

    code: int
    out: str
    err: str
    seconds: float
    at: float = field(default_factory=time.time)

    @property
    def last(self) -> str:
        """Return the last line of stderr."""
        return self.err.rstrip().splitlines()[-1]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a user's environment: no MPI job's variables, this pyhvd importable, ranks that yield."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    clean["PYTHONPATH"] = str(ROOT)
    return {**clean, **YIELDING, **(extra or {})}


def bare_environment() -> dict[str, str]:
    """Return the environment that Open MPI's mpiexec needs on a small machine, or as root."""
    # Each job has a new directory: a directory left by a killed job with the same process id is fatal.
    folder = tempfile.mkdtemp(prefix="hvd-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {
        "PRTE_MCA_prte_tmpdir_base": folder,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_btl": "self,sm,tcp",
    }


def script(folder: Path, code: str, name: str = "script.py") -> str:
    """Write a script; return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


def launcher_command(*arguments: object) -> list[str]:
    """Return the command ``python -m pyhvd.run ...``."""
    return [sys.executable, "-m", "pyhvd.run", *map(str, arguments)]


def bare_command(ranks: int, *arguments: object) -> list[str]:
    """Return the command ``mpiexec -n ranks python -m pyhvd.run ...``."""
    return [MPIEXEC, "-n", str(ranks), *launcher_command(*arguments)]


def run(
    command: list[str], env: Mapping[str, str] | None = None, stdin: str = "", cwd: Path | None = None
) -> Ended:
    """Run a command to its end."""
    begun = time.monotonic()
    job = subprocess.run(
        command,
        env=environment(env),
        input=stdin,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Ended(job.returncode, job.stdout, job.stderr, time.monotonic() - begun)


def pyhvdrun(
    *arguments: object, env: Mapping[str, str] | None = None, stdin: str = "", cwd: Path | None = None
) -> Ended:
    """Run the launcher to its end."""
    return run(launcher_command(*arguments), env, stdin, cwd)


def bare(ranks: int, *arguments: object, env: Mapping[str, str] | None = None) -> Ended:
    """Run under mpiexec, without the launcher."""
    return run(bare_command(ranks, *arguments), {**bare_environment(), **(env or {})})


@contextlib.contextmanager
def started(command: list[str], env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Yield a running command with its output on pipes; kill it at the end if it still runs."""
    job = subprocess.Popen(
        command,
        env=environment({**bare_environment(), **(env or {})}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.kill()
        job.communicate(timeout=TIMEOUT_S)


def read_pids(job: subprocess.Popen[str], ranks: int) -> list[int]:
    """Return the ranks' process ids, sorted, from a line ``pid 123`` that each prints when it is ready."""
    assert job.stdout is not None
    pids: list[int] = []
    while len(pids) < ranks:
        line = job.stdout.readline()
        assert line, f"the job ended before all ranks were ready:\n{job.stderr and job.stderr.read()}"
        if line.startswith("pid "):
            pids.append(int(line.split()[1]))
    return sorted(pids)


def parent_of(pid: int) -> int:
    """Return the parent of a process; a rank's parent is its supervisor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def interrupt(job: subprocess.Popen[str], number: signal.Signals) -> tuple[Ended, float]:
    """Send a signal; return the job's result, and the seconds from the signal to the end."""
    sent = time.monotonic()
    job.send_signal(number)
    out, err = job.communicate(timeout=TIMEOUT_S)
    seconds = time.monotonic() - sent
    return Ended(job.returncode, out, err, seconds), seconds
