"""The doctor command: its options, its two modes (outside an mpiexec, or as its ranks), its exit code."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pyhvd.common.command_line import CommandParser, show_progress
from pyhvd.common.text import describe_exception
from pyhvd.job.mpi.rank_env import RankEnv, read_rank_env
from pyhvd.run.options import positive_float, positive_int
from pyhvd.tools.doctor.advice import examine
from pyhvd.tools.doctor.facts import DoctorFacts, gather
from pyhvd.tools.doctor.screen import Report, show
from pyhvd.tools.doctor.trial import run_job, try_out
from pyhvd.tools.doctor.trial_facts import Trial

_PROBE_S = 20.0
_FLAGS_OF_HOSTS = (
    *("num_proc", "hosts", "hostfile", "ssh_port", "ssh_identity_file", "launch_agent", "python", "chdir"),
)
_EXAMPLES = """\
examples:
  python -m pyhvd doctor                         this host, and a trial of 2 ranks on it
  python -m pyhvd doctor -np 8                   ... of as many as you mean to run
  python -m pyhvd doctor -H h1,h2                these hosts, over ssh, and the network between them
  python -m pyhvd doctor --no-run                facts only, no ranks
  python -m pyhvd doctor --json > report.json    for a bug report
  mpiexec -n 16 -ppn 8 python -m pyhvd doctor    the very ranks and hosts of a job

exit code: 0 all is well, or there are notes only; 1 problems; 2 bad usage
"""


def main(argv: list[str]) -> int:
    """Run the doctor; return its exit code."""
    place = read_rank_env()
    options = _parse(argv, under_mpiexec=place is not None)
    if place is not None and not options.no_run:
        report = _as_rank(place, options.timeout)
        if report is None:  # rank 0 reports
            return 0
    elif place is not None and place.rank != 0:
        return 0
    else:
        report = _from_outside(options)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        show(report)
    return report.code


def _parse(argv: list[str], *, under_mpiexec: bool) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m pyhvd doctor",
        description="Look at this host and its MPI, try ranks out, and say what to do about what is wrong.",
        examples=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "-np", "--num-proc", type=positive_int, metavar="N", help="ranks of the trial (default: 2)"
    )
    parser.add_argument("--no-run", action="store_true", help="facts only: start no ranks")
    parser.add_argument(
        "--json", action="store_true", help="print JSON; times in s, sizes in bytes, rates in B/s"
    )
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=60.0,
        metavar="S",
        help="give MPI, and then the trial, up after S seconds (default: 60; MPI by itself: 20 at most)",
    )
    parser.add_argument(
        "-H", "--hosts", metavar="HOSTS", help="look at these hosts, with a rank each, or as h1:4,h2:4 says"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="look at the hosts of a file")
    parser.add_argument("-p", "--ssh-port", metavar="PORT", help="the port of the hosts' sshd")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")
    parser.add_argument("--launch-agent", metavar="COMMAND", help="as pyhvdrun's: reach hosts by COMMAND")
    parser.add_argument("--python", metavar="PATH", help="the hosts' Python (default: this one)")
    parser.add_argument("--chdir", metavar="DIR", help="a directory that all hosts must have (default: this)")
    options = parser.parse_args(argv)
    if under_mpiexec and options.num_proc is not None:
        parser.error("mpiexec has started these ranks already: leave out -np")
    options.on_hosts = options.hosts is not None or options.hostfile is not None
    if options.on_hosts and (options.no_run or under_mpiexec):
        parser.error("-H and --hostfile start ranks: leave out --no-run and mpiexec")
    if options.num_proc is None and not options.on_hosts:
        options.num_proc = 2
    return options


# -- outside an mpiexec ---------------------------------------------------------------------------


def _from_outside(options: argparse.Namespace) -> Report:
    try:
        show_progress("looking around")
        facts = gather(min(options.timeout, _PROBE_S))
        trial = None
        if options.on_hosts:
            return _on_hosts(options, facts)
        sound = facts.mpiexec and not facts.mpi.error and not any(facts.extensions.values())
        if sound and not options.no_run:
            trial = try_out(options.num_proc, options.timeout, show_progress)
    finally:
        show_progress("")
    return Report([facts], {facts.host: examine(facts, options.num_proc, trial)}, trial)


def _on_hosts(options: argparse.Namespace, facts: DoctorFacts) -> Report:
    """Run the doctor as the ranks of a job on hosts; return its report, or why there is none."""
    flags = [
        word
        for name in _FLAGS_OF_HOSTS
        if (value := getattr(options, name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    program = ["-m", "pyhvd", "doctor", "--json", "--timeout", str(options.timeout)]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pyhvd-doctor-") as name:
        folder = Path(name)
        wanted = [*flags, "--start-timeout", f"{options.timeout / 2:g}", "--output-filename", name, *program]
        error = run_job(
            wanted, "the ranks", options.timeout, folder, lambda: show_progress("trying the hosts out")
        )
        said = next(folder.glob("rank.*0/stdout"), None)
        with contextlib.suppress(msgspec.DecodeError):
            if said is not None:  # a report of problems ends the job with code 1
                return msgspec.json.decode(said.read_bytes(), type=Report)
    trial = Trial(0, time.monotonic() - begun, error=error or "rank 0 has sent no report")
    return Report([facts], {facts.host: examine(facts, 0, trial)}, trial)


# -- as a rank ---------------------------------------------------------------------------


def _as_rank(place: RankEnv, timeout: float) -> Report | None:
    """Run the trial with the ranks of this mpiexec; return the report on rank 0."""
    facts = gather(min(timeout, _PROBE_S)) if place.local_rank == 0 else None
    with _watchdog(place, timeout) as stages:
        from pyhvd.tools.doctor.ranks import measure

        begun = time.monotonic()
        found, error = None, ""
        try:
            found = measure(stages.append)
        except Exception as exc:  # an init() that fails is one of the faults that the doctor reports
            error = describe_exception(exc)
        seconds = time.monotonic() - begun
        stage = stages[-1]
        stages.append("gathering facts")
        from mpi4py import MPI

        gathered = MPI.COMM_WORLD.gather((socket.gethostname(), facts, error, stage))
    if gathered is None:
        return None
    hosts: list[DoctorFacts] = [facts for _, facts, _, _ in gathered if facts is not None]
    trial = Trial(len(gathered), seconds, found)
    if errors := [error for _, _, error, _ in gathered if error]:
        reached = {rank: stage for rank, (_, _, _, stage) in enumerate(gathered)}
        trial = Trial(len(gathered), seconds, error=errors[0], stages=reached)
    findings = {}
    for each in hosts:
        ranks = sum(host == each.host for host, _, _, _ in gathered)
        findings[each.host] = examine(each, ranks, trial if each is hosts[0] else None)
    return Report(hosts, findings, trial)


@contextlib.contextmanager
def _watchdog(place: RankEnv, timeout: float) -> Iterator[list[str]]:
    """End this rank if the block hangs, and name its stage: the last one in the list that this yields."""
    stages = ["starting"]

    def bite() -> None:
        text = f"pyhvd doctor: {place.title} has hung for {timeout:g} s at {stages[-1]!r}\n"
        os.write(2, text.encode())
        os._exit(1)

    timer = threading.Timer(timeout, bite)
    timer.daemon = True
    timer.start()
    # A Python thread needs the GIL, which a hung MPI_Init may hold; this timer does not. It stays armed:
    # MPI_Finalize at the interpreter's exit may hang too.
    faulthandler.dump_traceback_later(timeout + 5, exit=True)
    try:
        yield stages
    finally:
        timer.cancel()
