"""``python -m tests.elastic.fault_times``: how soon an elastic job goes on after a fault.

Each trial starts 4 ranks, on one host or on two simulated hosts over ssh, makes a fault, and looks for the
first step that is committed after it. The times are saved for the table in docs/elastic.md. They
need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bed import why_not
from tests.elastic.faults import grounds
from tests.elastic.jobs import ROOT
from tests.elastic.running import Ground, RunningJob, kill
from tests.elastic.steps import STEPS
from tests.elastic.striker import strike_host
from tests.elastic.trials import describe
from tests.hosts import sshd
from tests.mpi.launch import mpi_version

RESULTS = ROOT / "benchmarks" / "results" / "faults" / "elastic-mpich.json"
_STEP_S = 0.2
# So long after the first step a zygote has done its imports.
_WARM_S = 3.0
_STRIKES_IN = round(_WARM_S / _STEP_S)
_PATIENCE_S = 30.0
_GONE_S = 1.0
_GONE_FROM_HOSTS_S = 25.0


def _kill_a_rank(job: RunningJob) -> None:
    kill(job.ranks()[2:3])


def _kill_rank_0(job: RunningJob) -> None:
    kill(job.ranks()[:1])


def _kill_all_ranks(job: RunningJob) -> None:
    kill(job.ranks())


def _kill_ranks_of_west(job: RunningJob) -> None:
    kill(job.ranks("west"))


def _kill_a_rank_of_each(job: RunningJob) -> None:
    kill([job.ranks("east")[0], job.ranks("west")[0]])


def _kill_zygote_and_rank(job: RunningJob) -> None:
    kill([*job.zygotes(), job.ranks()[2]])


def _stop_a_rank(job: RunningJob) -> None:
    rank = job.ranks()[2:3]
    kill(rank, signal.SIGSTOP)
    time.sleep(3.0)
    kill(rank, signal.SIGCONT)


def _stop_the_launcher(job: RunningJob) -> None:
    job.launcher.send_signal(signal.SIGSTOP)
    time.sleep(60.0)
    job.launcher.send_signal(signal.SIGCONT)


def _kill_agent(job: RunningJob) -> None:
    kill(job.agents("west"))


def _nothing(job: RunningJob) -> None:
    """Wait until a rank has killed itself."""
    assert job.wait(lambda: any(line.kind in ("killed", "raised") for line in job.lines), _PATIENCE_S)


@dataclass(frozen=True)
class Fault:
    """What happens to a job.

    Attributes
    ----------
    name, happens : str
        What it is, and what follows, as the table says.
    within : float
        The seconds until the next step is committed.
    strike : callable or str
        Makes it; of a host, its kind.
    inner : tuple of str
        Arguments of the program.
    restarts : int
        How often the ranks are started again; of the first step after it counts the generation.
    hosts : bool
        Whether it needs two hosts.
    steps : int
        How many steps the program makes.
    """

    name: str
    happens: str
    within: float
    strike: Callable[[RunningJob], None] | str
    inner: tuple[str, ...] = ()
    restarts: int = 1
    hosts: bool = False
    steps: int = STEPS


_AGAIN = "all ranks start again, from the last commit"
_LEFT_OUT = "the ranks of the other host go on without it; the host is left out for a while"
_COLD = "all ranks start again, by commands, which takes longer"
FAULTS = (
    Fault("a rank is killed", _AGAIN, 1, _kill_a_rank),
    Fault("rank 0 is killed", _AGAIN, 1, _kill_rank_0),
    Fault("all ranks are killed", _AGAIN, 1, _kill_all_ranks),
    Fault("a rank raises an exception", _AGAIN, 1, _nothing, ("func:0:2:raise",)),
    Fault(
        "a rank is killed while it copies a commit",
        "the commit before it counts",
        1,
        _nothing,
        ("copying:0:0",),
    ),
    Fault(
        "a rank is killed after it has sealed a commit",
        "this commit counts",
        1,
        _nothing,
        ("after_seal:0:0",),
    ),
    Fault("a rank is killed, and one more in the restart", "two restarts", 3, _kill_a_rank, ("init:1:3",), 2),
    Fault("a rank is killed, and the zygote", _COLD, 2, _kill_zygote_and_rank),
    Fault("a rank is stopped for 3 s (from its return)", "the others wait", 1, _stop_a_rank, (), 0),
    Fault("on two hosts a rank is killed", _AGAIN, 3, _kill_a_rank, hosts=True),
    Fault("all ranks of a host are killed", _AGAIN, 3, _kill_ranks_of_west, hosts=True),
    Fault("a rank is killed on each of two hosts", "one restart", 3, _kill_a_rank_of_each, hosts=True),
    Fault("the agent of a host is killed", _LEFT_OUT, 3, _kill_agent, hosts=True),
    Fault(
        "the launcher is stopped for 60 s (from its return)",
        "training goes on",
        1,
        _stop_the_launcher,
        (),
        0,
        hosts=True,
        steps=10 * STEPS,
    ),
    Fault("a host crashes", _LEFT_OUT, 3, "crash", hosts=True),
    Fault("a host is frozen", _LEFT_OUT, 5, "freeze", hosts=True),
    Fault("a host is cut off", _LEFT_OUT, 5, "cut off", hosts=True),
    Fault("a host loses its power", _LEFT_OUT, 5, "no power", hosts=True),
)


def measure(ground: Ground, fault: Fault) -> float:
    """Make a fault; return the seconds to the next committed step. The hosts are whole afterwards."""
    with tempfile.TemporaryDirectory(prefix="pyhvd-faults-") as name, ExitStack() as mending:
        job = ground.start(Path(name), fault.inner, _STEP_S, fault.steps, strikes_in=_STRIKES_IN)
        try:
            seconds = _strike(job, fault, mending)
            job.launcher.kill()
            mending.close()
            left = job.left(_GONE_S if ground.site is None else _GONE_FROM_HOSTS_S)
            assert not left, f"left: {left}"
        except (AssertionError, IndexError) as exc:
            raise AssertionError(f"{fault.name}: {exc}\n{describe(job)}") from None
        finally:
            job.kill()
    return seconds


def _strike(job: RunningJob, fault: Fault, mending: ExitStack) -> float:
    assert job.wait(job.steps, _PATIENCE_S), "no first step"
    if fault.strike is not _nothing:
        time.sleep(_WARM_S)
    before = job.generation
    began = time.time()
    if isinstance(fault.strike, str):
        assert job.ground.site is not None
        mending.callback(strike_host(job.ground.site, fault.strike, "west"))
    else:
        fault.strike(job)
    struck = began if fault.restarts else time.time()
    if fault.strike is _nothing:
        before, struck = 0, next(line.time for line in job.lines if line.kind in ("killed", "raised"))
    assert job.wait(lambda: job.steps(struck, before + fault.restarts), _PATIENCE_S), "no step after it"
    first = job.steps(struck, before + fault.restarts)[0]
    assert first.generation == before + fault.restarts, first
    return first.time - struck


def save(seconds: dict[str, list[float]], add: bool) -> None:
    """Write the times; keep those of faults that were not made."""
    saved = json.loads(RESULTS.read_text())["faults"] if RESULTS.exists() else {}
    found = {}
    for fault in FAULTS:
        times = saved.get(fault.name, {}).get("seconds", [])
        if new := seconds.get(fault.name):
            times = [*(times if add else []), *new]
        found[fault.name] = {"happens": fault.happens, "within": fault.within, "seconds": times}
    RESULTS.write_text(json.dumps({"mpi": mpi_version(), "faults": found}, indent=1) + "\n")


def main() -> int:
    """Make all faults many times, one job at a time; print what went wrong, and save the times."""
    parser = argparse.ArgumentParser(description="Make faults in elastic jobs, and save the times.")
    parser.add_argument("--count", type=int, default=20, help="trials of each fault (default: 20)")
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults of such names")
    parser.add_argument("--minutes", type=float, default=60, help="begin no trial later (default: 60)")
    parser.add_argument("--add", action="store_true", help="add to the times that are saved")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if re.search(options.only, fault.name)]
    if any(fault.hosts for fault in faults) and (reason := why_not() or sshd.why_not()):
        raise SystemExit(f"no simulated hosts with ssh on this machine: {reason}")
    until = time.monotonic() + 60 * options.minutes
    trials = [fault for _ in range(options.count) for fault in faults]
    seconds: dict[str, list[float]] = {}
    wrong = _measure_all(trials, until, seconds)
    done = sum(map(len, seconds.values()))
    print(f"{done} of {len(trials)} trials, {wrong} wrong, {mpi_version()}")
    save(seconds, options.add)
    return int(done < len(trials))


def _measure_all(trials: Sequence[Fault], until: float, seconds: dict[str, list[float]]) -> int:
    """Make faults, and note the times; return how many went wrong."""
    wrong = 0
    with ExitStack() as stack:
        places = {
            hosts: stack.enter_context(grounds(hosts))[0] for hosts in {fault.hosts for fault in trials}
        }
        for fault in trials:
            if time.monotonic() > until:
                break
            try:
                took = measure(places[fault.hosts], fault)
            except AssertionError as exc:
                wrong += 1
                print(exc, flush=True)
                continue
            seconds.setdefault(fault.name, []).append(round(took, 3))
            if took > fault.within:
                print(f"{fault.name}: after {took:.2f} s", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
