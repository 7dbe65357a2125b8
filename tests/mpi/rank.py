"""One rank of a job of tests: ``mpiexec -n N python -m tests.mpi.rank DIRECTORY``.

Runs the cases that pytest sends, one after the other. Each case has a folder, in which this rank writes
its result as JSON: the ranks' output may interleave, a file per rank cannot. Imports neither MPI nor pyhvd
itself, so that a test may set either up.

pytest writes commands into the named pipe ``commandsR`` of rank R, a line each: the name of a case's folder,
or an empty line once all ranks have passed the case, which ends its deadline. The rank ends at the end of
the pipe: when pytest closes it or dies.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pytest

from tests.mpi.isolation import State
from tests.mpi.launch import RANK_VARIABLES, ROOT

_LONGEST_REPR = 300
_FINALIZE_S = 60.0


def main(directory: Path) -> None:
    # Each line is written at once, so that a killed rank loses no output.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    deadline = Deadline()
    before: Mapping[str, Any] = {}
    for name in _commands(directory / f"commands{rank}"):
        deadline.disarm()
        if not name:
            continue
        folder = directory / name
        task = json.loads((folder / "task.json").read_text())
        _write_output_to(folder / "output")
        deadline.arm(folder / f"stacks{rank}", task["dump_at"], task["kill_at"])
        result = _run(task, folder, before)
        before = task
        _write(folder / f"result{rank}.json", result)
        if result["outcome"] == "failed":
            _abort()
        if task["last"]:
            break
    else:
        # Without pytest nothing kills a rank that hangs in MPI_Finalize.
        signal.setitimer(signal.ITIMER_REAL, _FINALIZE_S)
        task = {"cleanup": True}
    if task["cleanup"]:
        _shut_down()
        _finalize()


def _commands(pipe: Path) -> Iterator[str]:
    # Opening a pipe for reading waits for a writer, unless told not to: pytest may have died already.
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    with open(fd, encoding="ascii") as lines:
        for line in lines:
            yield line.strip()


class Deadline:
    """The deadline of a case: this rank's stacks are written, and the process is killed soon after."""

    def __init__(self) -> None:
        self._stacks: IO[str] | None = None

    def arm(self, stacks: Path, dump_at: float, kill_at: float) -> None:
        """Write all threads' stacks at `dump_at`; die at `kill_at`, even if pytest is gone."""
        now = time.time()
        # Open while armed: the watchdog thread writes to it without the GIL.
        self._stacks = stacks.open("w")
        faulthandler.dump_traceback_later(max(0.01, dump_at - now), file=self._stacks)
        # The default action of SIGALRM needs no interpreter, so it also ends a rank stuck in C.
        signal.setitimer(signal.ITIMER_REAL, max(0.01, kill_at - now))

    def disarm(self) -> None:
        """Cancel the deadline."""
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None


def _write_output_to(path: Path) -> None:
    """Send stdout and stderr, also of C code and of children, to the case's file."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)


def _run(task: Mapping[str, Any], folder: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    outcome, message = "passed", ""
    try:
        if not (task["warm"] and before.get("warm") and task["env"] == before["env"]):
            _shut_down()  # pyhvd, which the case before has left running
        function: Any = importlib.import_module(task["module"])
        for name in task["function"].split("."):
            function = getattr(function, name)
        with (folder / "arguments.pkl").open("rb") as file:
            arguments = pickle.load(file)
        state = State()
        _set_environment(task["env"])
        try:
            getattr(function, "rank_function", function)(**arguments)
        except pytest.skip.Exception as skipped:
            outcome, message = "skipped", str(skipped)
        finally:
            for argument in arguments.values():
                if isinstance(argument, pytest.MonkeyPatch):
                    argument.undo()
        if task["cleanup"] and not task["warm"]:
            _shut_down()
        if not task["last"]:
            state.restore()
    except BaseException as error:  # SystemExit too: a test that exits has not passed
        outcome, message = "failed", _describe(error)
    return {"outcome": outcome, "message": message, "time": time.time()}


def _set_environment(env: Mapping[str, str | None]) -> None:
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _describe(error: BaseException) -> str:
    """Return the traceback with local variables of the tests' frames; plain asserts show no values."""
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
    # Renamed into place, because pytest reads the directory at any time.
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
    """Finalize MPI here, because at exit the stack of a hung rank would show no Python line."""
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
