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

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("program.py")
PATIENCE_S = 60.0


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
    job = subprocess.run(
        [sys.executable, "-m", "pyhvd.run", *flags, str(PROGRAM), *faults],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Ended(job.returncode, job.stdout, job.stderr, read_log(folder))


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
