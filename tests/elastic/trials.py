"""One elastic job with random faults: it is started, struck, and held against a run without faults."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.elastic.jobs import Ended
from tests.elastic.plans import Plan, draw_plan
from tests.elastic.running import Ground, HangError, RunningJob
from tests.elastic.striker import Strike, Striker

LOST, WRONG, HANG, LEFT, OTHER = (
    "committed steps lost",
    "wrong values",
    "hangs",
    "processes and files left",
    "other errors",
)
_STEP_S = 0.04
_END_S = 90.0
_GONE_S = 3.0
_GONE_FROM_HOSTS_S = 25.0  # a host that was cut off hears only then that its channel is closed
_SHM = "/dev/shm"
_FAILS = ("killed", "raised")


@dataclass
class Trial:
    """One job.

    Attributes
    ----------
    seed : int
        Of its faults.
    steps : int
        How many steps it makes.
    faults : list of str
        The kinds of the faults that were made.
    seconds : list of tuple of (str, float)
        The kinds of the faults after which ranks must start again, and the seconds to the next step, unless
        another fault came before it.
    wrong : list of tuple of (str, str)
        What went wrong, and how.
    log : str
        What happened, if something went wrong.
    """

    seed: int
    steps: int
    faults: list[str] = field(default_factory=list)
    seconds: list[tuple[str, float]] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    log: str = ""


def try_job(ground: Ground, seed: int, steps: int, groups: int = 8) -> Trial:
    """Run a job with faults, and look at its log, its end, and what is left."""
    draw = random.Random(seed)
    plan = draw_plan(draw, len(ground.hosts), ground.site is not None, groups)
    trial = Trial(seed, steps)
    with tempfile.TemporaryDirectory(prefix="pyhvd-faults-") as name:
        job = ground.start(Path(name), plan.inner, _STEP_S, steps)
        striker = Striker(job, plan, draw)
        try:
            striker.run()
            ended = job.finish(_END_S)
            trial.wrong += judge(ended, plan, steps)
            trial.wrong += [(LEFT, text) for text in _left(job)]
            _measure(trial, ended, striker.made)
        except HangError as exc:
            trial.wrong.append((HANG, str(exc)))
        except (AssertionError, OSError, IndexError) as exc:
            trial.wrong.append((OTHER, f"{type(exc).__name__}: {exc}"))
        if trial.wrong:
            trial.log = f"seed {seed}: {plan}\n{striker.made}\n{describe(job)}"
        job.kill()
    return trial


def judge(ended: Ended, plan: Plan, steps: int) -> Iterable[tuple[str, str]]:
    """Return what is wrong with the end of a job, its values, and its samples, each of which counts once."""
    if lost := ended.lost_steps():
        yield LOST, f"{lost} steps"
    for line in ended.wrong_values():
        yield WRONG, str(line)
    if ended.code != 0 or not ended.of("end"):
        yield OTHER, f"exit code {ended.code}"
        return
    last = ended.of("end")[-1]
    if int(last.words[0]) != steps or int(last.words[5]) != _samples(ended):
        yield WRONG, f"{last}, {_samples(ended)} samples"
    if any(line.startswith("Traceback") for line in ended.err.splitlines()) and not plan.raises:
        yield OTHER, "a traceback of the launcher or an agent"


def _samples(ended: Ended) -> int:
    """Return the number of samples of all committed steps: one for each rank."""
    samples = committed = size = 0
    for line in ended.lines:
        if line.kind in ("step", "begin"):
            new = int(line.words[0])
            samples, committed = samples + (new - committed) * size, new
        if line.kind == "begin":
            size = int(line.words[3])
    return samples


def _left(job: RunningJob) -> Iterable[str]:
    """Return the processes and files that a job has left, and its shared memory on simulated hosts.

    The files are removed, so that they count once.
    """
    site = job.ground.site
    yield from job.left(_GONE_S if site is None else _GONE_FROM_HOSTS_S)
    yield from sorted({path.name for path in job.folder.iterdir()} - {"log", "err", "tmp"})
    folders = {"temporary": job.temporary}
    for host in () if site is None else (site.bed.head, *site.bed.hosts.values()):
        folders[host.name] = Path(f"/proc/{host.first}/root{_SHM}")
    for place, folder in folders.items():
        for path in sorted(folder.rglob("*")):
            if path.name != f"pyhvd-{os.getuid()}":  # the user's own folder stays, and is empty
                yield f"{place}: {path.relative_to(folder)}"
                if not path.is_dir():
                    path.unlink()


def shared_memory() -> set[str]:
    """Return the files of shared memory on this machine that no process has mapped."""
    mapped = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                lines = (path / "maps").read_text().splitlines()
            except OSError:
                continue
            mapped |= {line.partition(f"{_SHM}/")[2] for line in lines}
    return set(os.listdir(_SHM)) - mapped


def _measure(trial: Trial, ended: Ended, made: Iterable[Strike]) -> None:
    """Note the faults, and how soon steps went on."""
    failed = [line for line in ended.lines if line.kind in _FAILS]
    by_itself = [Strike(line.words[2], line.time, line.generation) for line in failed]
    faults = sorted([*made, *by_itself], key=lambda fault: fault.time)
    steps = [line for line in ended.lines if line.kind == "step"]
    for number, fault in enumerate(faults):
        trial.faults.append(fault.kind)
        next_fault = faults[number + 1].time if faults[number + 1 :] else math.inf
        later = (line.time for line in steps if line.time > fault.time and line.generation > fault.generation)
        done = next(later, math.inf)
        if not fault.mild and done < next_fault:
            trial.seconds.append((fault.kind, round(done - fault.time, 3)))


def describe(job: RunningJob) -> str:
    """Return the log, of each run of steps only the first and the last, and the launcher's output."""
    lines = [line for line in job.lines if line.kind != "copy"]
    inside = [
        before.kind == line.kind == after.kind == "step"
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False)
    ]
    shown = [line for line, left_out in zip(lines, [False, *inside, False], strict=False) if not left_out]
    texts = [f"{line.time:.3f} {line.generation} {line.kind} {' '.join(line.words)}" for line in shown]
    return "\n".join([*texts, (job.folder / "err").read_text(), *job.left(0.0)])
