"""The text and the JSON of simulations. Does no I/O but printing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import Any

from pyhvd.common.tables import align, print_table
from pyhvd.common.units import bit_rate, size, span
from pyhvd.simulation import Failure, Simulation, StepReport
from pyhvd.simulation.command.cases import Answer, Case, efficiency, usual_step
from pyhvd.simulation.command.gradients import Gradients
from pyhvd.simulation.world import LINKED_HOSTS

PARTS = {
    "compute": "computing",
    "late": "waiting for late ranks",
    "agreement": "agreement",
    "link": "network",
    "cpu": "CPU of hosts",
    "latency": "latency",
}
"""The parts of a step's time, by their names in a StepReport."""
_WIDTH = 110
_MODEL = """\
These figures are those of a model. The agreement is pyhvd's own code on virtual time, and its CPU time is
measured on this computer. The times of collectives are computed. See docs/scaling.md."""


def parts_of(step: StepReport) -> dict[str, float]:
    """Return the parts of a step's time (s)."""
    return {name: max(getattr(step, name), 0.0) for name in PARTS}


def show(case: Case, gradients: Gradients, answer: Answer) -> None:
    """Print what simulations have shown."""
    step = usual_step(answer.job)
    rows = [
        [PARTS[name], _ms(seconds), _percent(seconds / step.seconds)]
        for name, seconds in parts_of(step).items()
    ]
    rows.append(["step", _ms(step.seconds), _percent(1.0)])
    print(title(case, gradients))
    print()
    print_table("where the time of a step goes", ["part", "ms", "share"], rows)
    print()
    print(*_lines(answer, step), sep="\n")
    print()
    _show_changes(answer, step)
    if answer.faulty is not None and answer.faulty.failure is not None:
        print()
        _show_fault(answer.faulty, answer.faulty.failure, answer.lost)
    print()
    print(_MODEL)


def title(case: Case, gradients: Gradients, hosts: str = "") -> str:
    """Return what is simulated, in two lines; `hosts` stands for another number of them."""
    network = case.network
    jitter = f" + up to {span(network.jitter)}" if network.jitter else ""
    between = f", {bit_rate(network.rate)} and {span(network.latency)}{jitter} between hosts"
    parts = f" in {len(case.parts)} parts" if len(case.parts) > 1 else ""
    return (
        f"{hosts or _count(case.hosts, 'host')} x {_count(case.local_ranks, 'rank')}"
        f"{between if case.hosts > 1 else ''}\n"
        f"{_count(len(gradients.ready), 'gradient')} of {size(gradients.nbytes)} ({gradients.source}),"
        f" submitted{parts} while a step computes {span(gradients.compute)}"
    )


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _lines(answer: Answer, step: StepReport) -> Iterator[str]:
    job, first = answer.job, answer.job.steps[0]
    yield f"the first step, for which no gradient is cached, takes {_ms(first.seconds)} ms"
    yield f"reductions run for another {_ms(step.hidden)} ms while ranks compute"
    if job.hosts > 1:
        yield (
            f"efficiency: {_percent(efficiency(answer.one_host, job))} of one host's, where a step takes"
            f" {_ms(usual_step(answer.one_host).seconds)} ms"
        )
        yield (
            f"in a step the busiest host sends {size(step.data_bytes)} of gradients, and exchanges"
            f" {_count(step.messages, 'message')} ({size(step.nbytes)}) for the agreement"
        )
    yield (
        f"in a step rank 0's background thread needs {_ms(step.cpu_of_rank_0)} ms of CPU, and the busiest"
        f" process {_ms(step.most_cpu)} ms"
    )
    if job.hosts > LINKED_HOSTS:
        yield (
            f"more than {LINKED_HOSTS} hosts have no links: MPI moves their data, and rank 0 takes part in"
            " each agreement"
        )


def _show_changes(answer: Answer, step: StepReport) -> None:
    helpful = [change for change in answer.changes if change.helps(step)]
    others = [change.label for change in answer.changes if not change.helps(step)]
    if helpful:
        rows = [[change.label, _ms(change.seconds), _percent(change.gain)] for change in helpful]
        rows.append(["as given", _ms(step.seconds), ""])
        print_table("what would help", ["change", "step ms", "gain"], rows)
    if others:
        text = f"{'these help' if helpful else 'what was tried helps'} little or not: {', '.join(others)}"
        print("\n".join(textwrap.wrap(text, _WIDTH, break_long_words=False)))


# -- lost hosts ----------------------------------------------------------------------------------------


def _show_fault(job: Simulation, failure: Failure, lost: int) -> None:
    hosts = "a host" if lost == 1 else f"{lost} hosts, the first"
    print(f"the job loses {hosts} at {span(failure.at)}, in step {len(job.steps) + 1}; after that")
    rows = [
        ["it is noticed", _since(failure.noticed - failure.at)],
        ["all ranks that are left have an error", _since(failure.known - failure.at)],
    ]
    if job.restart is not None:
        rows += [
            ["all of its ranks have ended", _since(job.restart.ended)],
            ["all hosts that are left have been told to start ranks", _since(job.restart.told)],
            ["all ranks are connected, and go on from the last commit", _since(job.restart.wired)],
        ]
    for line in align(rows, left=1):
        print(f"  {line}")
    if failure.cause:
        print("\n".join(textwrap.wrap(f"the launcher says: {failure.cause}", _WIDTH)))


def _since(seconds: float) -> str:
    return span(seconds) if math.isfinite(seconds) else "never"


# -- JSON ----------------------------------------------------------------------------------------------


def as_dict(case: Case, gradients: Gradients, answer: Answer) -> dict[str, Any]:
    """Return all that :func:`show` prints, in seconds and bytes; msgspec encodes the dataclasses in it."""
    faulty = answer.faulty
    return {
        "hosts": case.hosts,
        "local_ranks": case.local_ranks,
        "network": case.network,
        "gradients": {
            "source": gradients.source,
            "count": len(gradients.ready),
            "nbytes": gradients.nbytes,
            "compute": gradients.compute,
            "parts": len(case.parts),
        },
        "first_step": answer.job.steps[0],
        "step": usual_step(answer.job),
        "efficiency": efficiency(answer.one_host, answer.job),
        "changes": answer.changes,
        "by_hosts": [
            {"hosts": job.hosts, "step": usual_step(job), "efficiency": efficiency(answer.by_hosts[0], job)}
            for job in answer.by_hosts
        ],
        "failure": faulty.failure if faulty else None,
        "restart": faulty.restart if faulty else None,
    }
