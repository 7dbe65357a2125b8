"""Print the files of pyhvd that one call or one job enters, in order, on each thread.

The walks on 2 ranks under mpiexec, seen on rank 0: a first allreduce (a name never seen) over MPI, and the
same through shared memory; a remembered one (the fast path); a first and a later step with torch. The walks
of all processes: pyhvd.spark.run on 2 ranks of a local-cluster; pyhvdrun on 2 hosts (this one under two
names); and an elastic pyhvdrun on this host, one of whose 2 ranks dies once.

Terms
  body     a .py, .pyx, .pxi or .c file below pyhvd/; .h and .pxd files are headers, part of what uses them
  entry    a call of a function in a body by a function in another body, or by none of pyhvd; a return is no
           entry, nor is a call within a file, the body of a module that is imported, or a finalizer, which no
           line calls
  visit    consecutive entries into the same body on one thread
  return   a visit to a body that the thread has visited before

Counts
  first_allreduce  over MPI (PYHVD_FAST_LANE=0): bodies visited on rank 0, all threads, from the call until
                   its result is there and the background thread rests again; before_queue: those that the
                   caller's thread visits up to queue.py, which is the last of them
  first_shared     the same where the ranks share memory; no goal
  remembered       bodies visited on rank 0, all threads, from the call to its result; returns: on the
                   caller's thread
  spark            bodies visited on the driver, in one task, its guardian and its rank, taken together, from
                   the call to its result; without C, and without what the user's function calls: init()
                   on the ranks is not counted, its PMI on the driver and in the task is
  hosts            bodies visited on the driver, and in all agents, guardians and ranks, taken together, from
                   the start of pyhvdrun to its end; without C, and without what the program calls
  restart          the same, and in the zygote, for the elastic job: its program commits a step, and rank 1 of
                   the first generation kills itself then
  torch_first      Python bodies visited on rank 0, all threads, without C and Cython, during backward() and
                   step() of a new DistributedOptimizer, through shared memory
  torch_later      the same after 20 steps

What runs under mpiexec is walked several times, and the most frequent counts are shown, as threads may
overtake each other. C is built apart, under build/walk, with -finstrument-functions.

  python scripts/walk.py --only remembered --json build/walk.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import walk_native
import walk_recorder

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
QUEUE = "queue.py"
LIMIT_S = 150.0
MOST_LINES = 48
FINALIZERS = ("__del__", "__dealloc__")
HOST = "env PYHVD_HOST_SALT={host} sh -c {command}"
"""Starts an agent on this host, as if it were another host."""

JOBS = {
    "hosts": (["-H", "h1:1,h2:1", "--launch-agent", HOST], "pyhvdrun on 2 hosts, a rank on each"),
    "restart": (["-n", "2", "--min-np", "2"], "pyhvdrun on 2 ranks, one of which dies once"),
}
ROLES = {
    "run/__main__.py": "driver",
    "job/agent/host_agent.py": "agent",
    "job/agent/zygote.py": "zygote",
    "job/process/guardian.py": "guardian",
    "child of job/process/guardian.py": "rank",
    "child of job/agent/zygote.py": "guardian",
    "child of child of job/agent/zygote.py": "rank",
}
TORCH = {
    "torch_first": "the first step of a DistributedOptimizer, on rank 0 of 2",
    "torch_later": "a later step of a DistributedOptimizer, on rank 0 of 2",
}
KINDS = ["first", "first_shared", "remembered", "spark", *JOBS, *TORCH]
SHOWN = ["first_allreduce", "remembered", "spark", *JOBS, *TORCH]
GOALS = {
    "first_allreduce": 20,
    "before_queue": 9,
    "remembered": 8,
    "remembered_returns": 0,
    "spark": 24,
    "hosts": 45,
    "restart": 95,
    "torch_first": 33,
    "torch_later": 3,
}
"""Most that each count shall be."""

BOUNDS = {
    "first_allreduce": 20,
    "before_queue": 8,
    "remembered": 8,
    "remembered_returns": 0,
    "spark": 24,
    "hosts": 44,
    "restart": 63,
    "torch_first": 33,
    "torch_later": 3,
}
"""Most that each count may be in this tree; tests/test_walk.py holds it. Lower it, never raise it."""


@dataclass
class Visit:
    """One visit to a file, and the functions that were entered there."""

    file: str
    again: bool
    functions: list[str] = field(default_factory=list)


@dataclass
class Thread:
    """What one thread visits, in order."""

    name: str
    visits: list[Visit] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    def follow(self, events: Iterable[Sequence[Any]]) -> None:
        """Take in the thread's calls and returns: (enters, file, function)."""
        stack: list[tuple[str, bool]] = []  # of bodies: the file, and whether it is being imported
        for enters, file, function in events:
            if file.endswith((".h", ".pxd")):
                if enters and file not in self.headers:
                    self.headers.append(file)
                continue
            if not enters:
                if stack:
                    stack.pop()
                continue
            caller, importing = stack[-1] if stack else ("", False)
            importing = importing or function == walk_recorder.IMPORT
            stack.append((file, importing))
            if caller != file and not importing and function not in FINALIZERS:
                self._enter(file, function)

    def _enter(self, file: str, function: str) -> None:
        if not self.visits or self.visits[-1].file != file:
            self.visits.append(Visit(file, file in self.files))
        if function not in self.visits[-1].functions:
            self.visits[-1].functions.append(function)

    @property
    def files(self) -> dict[str, None]:
        """The bodies, each once, in order."""
        return dict.fromkeys(visit.file for visit in self.visits)

    @property
    def returns(self) -> int:
        """How many visits are to a body visited before."""
        return sum(visit.again for visit in self.visits)

    def lines(self) -> Iterator[str]:
        """Describe the visits; where there are many, each file once, with the number of returns to it."""
        if len(self.visits) <= MOST_LINES:
            for visit in self.visits:
                yield f"{'<-' if visit.again else '  '} {visit.file:<28} {', '.join(visit.functions)}"
            return
        for file in self.files:
            visits = [visit for visit in self.visits if visit.file == file]
            functions = dict.fromkeys(name for visit in visits for name in visit.functions)
            back = f"{len(visits) - 1} <-" if len(visits) > 1 else ""
            yield f"{back:>6} {file:<28} {', '.join(functions)}"


@dataclass
class Walk:
    """What one call does."""

    title: str
    counts: dict[str, int]
    threads: list[Thread]

    def show(self) -> None:
        """Print it."""
        print(f"\n=== {self.title}")
        for thread in self.threads:
            print(f"\n{thread.name}: {len(thread.files)} files, {thread.returns} returns")
            for line in thread.lines():
                print(f"     {line}")
            if thread.headers:
                print(f"     {len(thread.headers)} headers: {', '.join(thread.headers)}")
        print()
        for name, count in self.counts.items():
            goal = f"goal: at most {GOALS[name]}" if name in GOALS else "no goal"
            print(f"{name:<20} {count:>4}   {goal}")


def bodies(threads: Iterable[Thread]) -> set[str]:
    """Return the bodies that any of some threads visits."""
    return {file for thread in threads for file in thread.files}


# ---- calls on ranks under mpiexec


def walk_call(kind: str) -> Walk:
    """Walk through a ``first``, a ``first_shared`` or a ``remembered`` allreduce, or a step with torch."""
    rounds = [_round(kind, *each) for each in _run_ranks(kind)]
    usual = Counter(tuple(walk.counts.values()) for walk in rounds).most_common(1)[0][0]
    return next(walk for walk in rounds if tuple(walk.counts.values()) == usual)


def _run_ranks(kind: str) -> list[tuple[dict[int, str], list[list[Any]]]]:
    """Return each round's names of threads, the caller's first, and events with files and functions."""
    walk_native.build()
    with tempfile.TemporaryDirectory(prefix="pyhvd-walk-") as folder:
        file = Path(folder) / "rounds.json"
        env = {
            "LD_PRELOAD": str(walk_native.HOOKS),
            "PYTHONPATH": str(walk_native.TREE),
            "PYHVD_FAST_LANE": "0" if kind == "first" else "1",
            walk_recorder.PACKAGE: str(walk_native.TREE / "pyhvd"),
        }
        python = str(spark_python()) if kind in TORCH else sys.executable
        rank = [python, str(SCRIPTS / "walk_ranks.py"), kind, str(walk_native.HOOKS), str(file)]
        mpiexec = str(Path(python).parent / "mpiexec")
        command = [mpiexec, "-n", "2", "env", *(f"{name}={value}" for name, value in env.items()), *rank]
        _run(command, os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        said = json.loads(file.read_text())
    threads = {int(number): name for number, name in said["threads"].items()}
    return [(threads, events) for events in _resolved(said["rounds"])]


def _resolved(rounds: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """Put files and functions in place of libraries and offsets; leave out what is not pyhvd's."""
    offsets: dict[str, set[int]] = {}
    for _, _, _, library, function in (event for events in rounds for event in events):
        if isinstance(function, int):
            offsets.setdefault(library, set()).add(function)
    symbols = {}
    for library, some in offsets.items():
        if Path(library).is_relative_to(walk_native.TREE):
            symbols[library] = walk_native.Symbols(Path(library))
            symbols[library].find(some)
    found: list[list[list[Any]]] = [[] for _ in rounds]
    for events, resolved in zip(rounds, found, strict=True):
        for ns, thread, enters, file, function in events:
            place: tuple[str, str] | None = (file, function)
            if isinstance(function, int):
                place = symbols[file][function] if file in symbols else None
            if place is not None:
                resolved.append([ns, thread, enters, *place])
    return found


def _round(kind: str, names: dict[int, str], events: list[list[Any]]) -> Walk:
    threads = []
    for number in names:
        thread = Thread(f"rank 0, {names[number]}")
        thread.follow(event[2:] for event in events if event[1] == number)
        if thread.visits:
            threads.append(thread)
    count = len(bodies(threads))
    if kind == "remembered":
        counts = {"remembered": count, "remembered_returns": threads[0].returns}
        return Walk("a remembered allreduce, on rank 0 of 2", counts, threads)
    if kind in TORCH:
        count = sum(file.endswith(".py") for file in bodies(threads))
        return Walk(TORCH[kind], {kind: count}, threads)
    if kind == "first_shared":
        return Walk("a first allreduce through shared memory, on rank 0 of 2", {kind: count}, threads)
    before = list(threads[0].files)
    counts = {"first_allreduce": count, "before_queue": before.index(QUEUE) + 1}
    return Walk("a first allreduce over MPI, on rank 0 of 2", counts, threads)


# ---- jobs of several processes


@dataclass
class Process:
    """What one process of a job visits.

    Attributes
    ----------
    began : int
        When its first call of pyhvd began, in monotonic ns.
    program : str
        The file that it runs; empty if it was forked and runs on where its parent was.
    """

    number: int
    parent: int
    began: int
    program: str
    threads: list[Thread]

    def named(self, role: str) -> list[Thread]:
        """Return the threads, with the process's role in their names."""
        for thread in self.threads:
            thread.name = f"{role}, {thread.name}"
        return self.threads


def walk_spark() -> Walk:
    """Walk through a ``pyhvd.spark.run``."""
    processes = _record(str(spark_python()), str(SCRIPTS / "walk_spark.py"))
    threads = _one_of_each(processes)
    return Walk("pyhvd.spark.run on 2 ranks", {"spark": len(bodies(threads))}, threads)


def walk_job(kind: str) -> Walk:
    """Walk through a ``pyhvdrun`` on two ``hosts``, or one whose ranks ``restart``."""
    flags, title = JOBS[kind]
    command = [sys.executable, "-m", "pyhvd.run", *flags, str(SCRIPTS / "walk_program.py")]
    processes = _record(*command, *(["restart"] if kind == "restart" else []))
    by_number = {process.number: process for process in processes}
    roles: dict[str, list[Process]] = {}
    for process in processes:
        parent = by_number.get(process.parent)
        if not process.program and parent is not None:
            process.program = f"child of {parent.program}"
        roles.setdefault(ROLES.get(process.program, process.program), []).append(process)
    shown = []
    for role, those in roles.items():
        shown += max(those, key=lambda process: len(bodies(process.threads))).named(role)
    count = len(bodies(thread for process in processes for thread in process.threads))
    return Walk(title, {kind: count}, shown)


def spark_python() -> Path:
    """Return the Python of the venv with Spark, and with torch if it is installed."""
    python = ROOT / ".venv-spark" / "bin" / "python"
    if not python.exists():
        raise RuntimeError("no .venv-spark: `make spark` makes it")
    return python


def has_torch() -> bool:
    """Return whether torch is installed beside Spark; `make test-torch` installs it."""
    return any(ROOT.glob(".venv-spark/lib/python*/site-packages/torch/__init__.py"))


def _record(*command: str) -> list[Process]:
    """Return the processes that a command starts, in the order of their first calls of pyhvd."""
    with tempfile.TemporaryDirectory(prefix="pyhvd-walk-") as folder:
        site, events = Path(folder) / "site", Path(folder) / "events"
        site.mkdir()
        events.mkdir()
        # Every Python that finds it begins with it.
        text = "import walk_recorder\n\nwalk_recorder.install_from_environment()\n"
        (site / "sitecustomize.py").write_text(text)
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(site), str(SCRIPTS), str(ROOT))),
            walk_recorder.PACKAGE: str(ROOT / "pyhvd"),
            walk_recorder.FOLDER: str(events),
        }
        _run(list(command), env)
        found = [_read_process(path) for path in sorted(events.glob("*.events"))]
    return sorted(found, key=lambda process: process.began)


def _read_process(path: Path) -> Process:
    parent, number = map(int, path.stem.split("-"))
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    programs = [line[3] for line in lines if line[2] == "1" and line[4] == walk_recorder.PROGRAM]
    program = programs[-1] if programs else ""
    return Process(number, parent, int(lines[0][0]), program, _threads_of(lines, number))


def _one_of_each(processes: list[Process]) -> list[Thread]:
    """Return the threads of the driver, and of the task, guardian and rank that visit the most."""
    driver = processes[0]
    numbers = {process.number for process in processes}
    families = []
    for process in processes[1:]:
        if process.parent in numbers:
            continue
        family = [*process.named("task")]
        for role in ("guardian", "rank"):
            child = next((each for each in processes if each.parent == process.number), None)
            if child is None:
                break
            family += child.named(role)
            process = child
        families.append(family)
    return driver.named("driver") + max(families, key=lambda family: len(bodies(family)))


def _threads_of(lines: list[list[str]], process: int) -> list[Thread]:
    events: dict[int, list[tuple[int, str, str]]] = {}
    for _, thread, enters, file, function in lines:
        events.setdefault(int(thread), []).append((int(enters), file, function))
    found = []
    for number, native in enumerate(sorted(events, key=lambda each: each != process)):
        found.append(Thread("main thread" if native == process else f"thread {number}"))
        found[-1].follow(events[native])
    return [thread for thread in found if thread.visits]


# ---- all


def _run(command: list[str], env: dict[str, str]) -> None:
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        said, _ = process.communicate()
        raise RuntimeError(f"{command[0]} did not end within {LIMIT_S:g} s:\n{said[-4000:]}") from None
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed with {process.returncode}:\n{said[-4000:]}")


def _walk(kind: str) -> Walk:
    if kind in JOBS:
        return walk_job(kind)
    return walk_spark() if kind == "spark" else walk_call(kind)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=KINDS, help="one walk; default: all")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the walks into FILE")
    options = parser.parse_args()
    kinds = [options.only] if options.only else [kind for kind in KINDS if kind not in TORCH or has_torch()]
    try:
        walks = [_walk(kind) for kind in kinds]
    except (RuntimeError, OSError, subprocess.SubprocessError) as exc:
        print(f"walk: {exc}", file=sys.stderr)
        return 1
    counts: dict[str, int] = {}
    for walk in walks:
        walk.show()
        counts |= walk.counts
    if options.json:
        options.json.write_text(json.dumps({"counts": counts, "walks": [asdict(each) for each in walks]}))
    missed = [f"{name} is {count}" for name, count in counts.items() if count > GOALS.get(name, count)]
    if missed:
        print(f"\ngoals missed: {', '.join(missed)}")
    shown = {name: counts.get(name, "-") for name in SHOWN}
    print("walk: " + " ".join(f"{name}={count}" for name, count in shown.items()))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
