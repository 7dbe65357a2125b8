"""Starting a trial on this host with pyhvdrun, and waiting for it with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pyhvd.job.mpi.rank_env import without
from pyhvd.run.check_build import outside_job
from pyhvd.tools.doctor.trial_facts import Trial, TrialFacts

_GRACE_S = 8.0
_POLL_S = 0.1
_TAIL_LINES = 6
_NOT_FOR_A_TRIAL = (
    *("PYHVD_TIMELINE", "PYHVD_METRICS_PORT", "PYHVD_AUTOTUNE"),
    *("HOROVOD_TIMELINE", "HOROVOD_METRICS_PORT", "HOROVOD_AUTOTUNE"),
)
"""How the names of variables begin that write files or open ports."""


def try_out(ranks: int, timeout: float, progress: Callable[[str], None]) -> Trial:
    """Run a trial on this host; call ``progress`` with rank 0's stage, repeatedly.

    After ``timeout`` seconds the job is ended, by SIGTERM and then by SIGKILL.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pyhvd-doctor-") as name:
        folder = Path(name)
        # The start gets half of the time, so that the launcher can still name the missing ranks.
        flags = ["-n", str(ranks), "--start-timeout", f"{timeout / 2:g}"]
        error = run_job(
            [*flags, "-m", "pyhvd.tools.doctor.ranks", name],
            f"{ranks} ranks",
            timeout,
            folder,
            lambda: progress(read_stages(folder).get(0, "starting ranks")),
        )
        seconds = time.monotonic() - begun
        if error:
            return Trial(ranks, seconds, error=error, stages=read_stages(folder))
        found = msgspec.json.decode((folder / "found.json").read_bytes(), type=TrialFacts)
        return Trial(ranks, seconds, found)


def run_job(
    arguments: Sequence[str], who: str, timeout: float, folder: Path, progress: Callable[[], None]
) -> str:
    """Run a job of pyhvdrun to its end; return why it failed, or an empty string.

    Parameters
    ----------
    arguments : sequence of str
        pyhvdrun's.
    who : str
        The job's ranks, for messages.
    timeout : float
        Seconds after which the job is ended, by SIGTERM and then by SIGKILL.
    folder : Path
        A folder of the caller's, for the job's output.
    progress : callable
        Called repeatedly while the job runs.
    """
    with open(folder / "output", "w+b") as output:
        job = subprocess.Popen(
            [sys.executable, "-P", "-m", "pyhvd.run", *arguments],
            env=without(outside_job(os.environ), *_NOT_FOR_A_TRIAL),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            hung = not _wait(job, time.monotonic() + timeout, progress)
        finally:
            _end(job)
    if hung:
        return f"{who} have not ended within {timeout:g} s"
    if job.returncode == 0:
        return ""
    said = (folder / "output").read_text(errors="replace").strip().splitlines()
    tail = " / ".join(line.strip() for line in said[-_TAIL_LINES:]) or "without a word"
    return f"{who} ended with code {job.returncode}: {tail}"


def read_stages(folder: Path) -> dict[int, str]:
    """Return each rank's last stage; ranks that did not start are absent."""
    return {int(path.suffix[1:]): path.read_text() for path in folder.glob("stage.*")}


def _wait(job: subprocess.Popen[bytes], until: float, progress: Callable[[], None]) -> bool:
    """Wait for the job's end; return whether it ended in time."""
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_POLL_S)
            return True
        progress()
    return False


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a running job: the launcher ends its ranks, even if the launcher is killed.

    Processes that the launcher started before the ranks are in its process group.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            job.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
