"""Run the program of this package as an elastic job, and hold what it logged against a run without faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.elastic.steps import STEPS, weight
from tests.many_hosts import end_of
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Line:
    """One line of the log."""

    time: float
    generation: int
    kind: str
    words: list[str]


@dataclass
class Ended:
    """How a job ended, and what its ranks logged."""

    code: int
    out: str
    err: str
    lines: list[Line]

    def of(self, kind: str) -> list[Line]:
        """Return the lines of a kind."""
        return [line for line in self.lines if line.kind == kind]

    @property
    def generations(self) -> int:
        """How many generations have begun to train."""
        return len({line.generation for line in self.of("begin")})

    def check_values(self) -> None:
        """Check that no committed step is lost, and that all values are those of a run without faults."""
        assert self.lost_steps() == 0, self.lines
        assert self.wrong_values() == [], self.lines

    def lost_steps(self) -> int:
        """Return how many committed steps were made again, or were left out.

        A step is committed when `commit()` has returned on every host.
        """
        newest = lost = 0
        copies = Counter((line.generation, int(line.words[0])) for line in self.of("copy"))
        begun = Line(0.0, 0, "", ["0"])
        for line in self.lines:
            if line.kind not in ("step", "begin"):
                continue
            number = int(line.words[0])
            if line.kind == "step":
                lost += abs(number - newest - 1)
            else:
                again = range(max(number, int(begun.words[0])) + 1, newest + 1)
                others = int(begun.words[-1]) - 1 if begun.kind else 0
                lost += sum(copies[begun.generation, each] >= others for each in again)
                lost += max(0, int(begun.words[0]) - number)
                begun = line
            newest = number
        return lost

    def wrong_values(self) -> list[Line]:
        """Return the lines whose values are not those of a run without faults."""
        told = [line for line in self.lines if line.kind in ("step", "begin", "end")]
        return [line for line in told if float(line.words[1]) != weight(int(line.words[0]))]


def run(
    folder: Path,
    *faults: str,
    flags: Sequence[str] = ("-n", "4", "--min-np", "4"),
    env: Mapping[str, str] = {},
) -> Ended:
    """Run the program to its end."""
    return finish(start(folder, *faults, flags=flags, env=env), folder)


def start(
    folder: Path, *faults: str, flags: Sequence[str], env: Mapping[str, str] = {}
) -> subprocess.Popen[str]:
    """Start the program."""
    return subprocess.Popen(
        [sys.executable, "-m", "pyhvd.run", *flags, str(PROGRAM), *faults],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen[str], folder: Path) -> Ended:
    """Wait for the end of a job, and kill it if that does not come."""
    ended = end_of(job)
    return Ended(ended.code, ended.out, ended.err, read_log(folder))


def wait_for_step(job: subprocess.Popen[str], folder: Path, step: int, generation: int = 0) -> None:
    """Wait until a generation, or a later one, has committed a step."""

    def is_there() -> bool:
        lines = [line for line in read_log(folder) if line.kind == "step" and line.generation >= generation]
        return any(int(line.words[0]) >= step for line in lines)

    try:
        wait_until(is_there, 30.0)
    except AssertionError:
        job.kill()
        raise AssertionError((job.communicate(), read_log(folder))) from None


def read_log(folder: Path) -> list[Line]:
    """Return what ranks have logged."""
    path = folder / "log"
    texts = path.read_text().splitlines() if path.exists() else []
    return [
        Line(float(time), int(generation), kind, words)
        for time, generation, kind, *words in map(str.split, texts)
    ]


def check_finished(ended: Ended) -> None:
    """Check that a job has trained to its end."""
    assert ended.code == 0, ended
    (end,) = ended.of("end")
    assert int(end.words[0]) == STEPS
    ended.check_values()
