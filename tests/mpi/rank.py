"""One rank of a test: ``mpiexec -n N python -m tests.mpi.rank DIRECTORY``.

Reads what to run from the directory, runs it, and leaves its result there as JSON: what ranks print may
interleave, a file per rank cannot. Imports neither MPI nor pyhvd itself, so that a test may set either up.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.mpi.launch import RANK_VARIABLES, ROOT

_LONGEST_REPR = 300


def main(directory: Path) -> None:
    # Whole lines, written as they come: a rank that is killed has not lost what it printed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    job = json.loads((directory / "job.json").read_text())
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    _arm_deadline(directory / f"stacks{rank}", job["dump_at"], job["kill_at"])
    result = _run(job, directory)
    _write(directory / f"result{rank}.json", result)
    if result["outcome"] == "failed":
        _abort()
    if job["cleanup"]:
        _finalize()


def _arm_deadline(stacks: Path, dump_at: float, kill_at: float) -> None:
    """Write all threads' stacks at `dump_at`; die soon after `kill_at` even if the launching side is gone."""
    now = time.time()
    # Open until the process ends: the watchdog thread writes to it without the GIL.
    faulthandler.dump_traceback_later(max(0.01, dump_at - now), file=stacks.open("w"))
    # The default action of SIGALRM needs no interpreter, so it also ends a rank stuck in C.
    signal.setitimer(signal.ITIMER_REAL, max(0.01, kill_at - now) + 10.0)


def _run(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    outcome, message = "passed", ""
    try:
        function: Any = importlib.import_module(job["module"])
        for name in job["function"].split("."):
            function = getattr(function, name)
        with (directory / "arguments.pkl").open("rb") as file:
            arguments = pickle.load(file)
        getattr(function, "rank_function", function)(**arguments)
        if job["cleanup"]:
            _shut_down()
    except pytest.skip.Exception as skipped:
        outcome, message = "skipped", str(skipped)
    except BaseException as error:  # SystemExit too: a test that exits has not passed
        outcome, message = "failed", _describe(error)
    return {"outcome": outcome, "message": message, "time": time.time()}


def _describe(error: BaseException) -> str:
    """The traceback with the local variables of the tests' own frames: plain asserts say little else."""
    description = traceback.TracebackException(
        type(error), error, _below_here(error.__traceback__), capture_locals=True
    )
    part: traceback.TracebackException | None = description
    while part is not None:
        for frame in part.stack:
            ours = frame.filename.startswith(str(ROOT / "tests")) and frame.filename != __file__
            shown = (frame.locals or {}).items() if ours else ()
            short = {name: text[:_LONGEST_REPR] for name, text in shown if not text.startswith("<module ")}
            frame.locals = short or None
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(description.format())


def _below_here(frames: TracebackType | None) -> TracebackType | None:
    while (
        frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__
    ):
        frames = frames.tb_next
    return frames


def _write(path: Path, result: dict[str, Any]) -> None:
    # Renamed into place: the launching side looks at the directory all the time.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(path)


def _shut_down() -> None:
    pyhvd = sys.modules.get("pyhvd")
    if pyhvd is not None and pyhvd.is_initialized():
        pyhvd.shutdown()


def _mpi_if_running() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _finalize() -> None:
    """Finalize here, not at exit, where the stack of a rank that hangs would show no Python line."""
    mpi = _mpi_if_running()
    if mpi is not None:
        mpi.Finalize()


def _abort() -> None:
    """End the whole job: MPI_Finalize would wait for the other ranks, which wait for this one."""
    # Ranks that fail at the same point get their reports written before the abort kills them.
    time.sleep(0.1)
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = _mpi_if_running()
    if mpi is not None:
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
