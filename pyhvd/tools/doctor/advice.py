"""Checks: small pure functions that derive findings from facts; each knows one kind of fault.

A check yields remarks on one subject, with advice in words. To add a check, write a function and call it in
``_checks``.
"""

from __future__ import annotations

import difflib
import enum
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from pyhvd.common.text import describe_ranks
from pyhvd.common.units import size, span
from pyhvd.config import Config, known_variables
from pyhvd.errors import ConfigError
from pyhvd.tools.doctor.facts import DoctorFacts
from pyhvd.tools.doctor.trial_facts import LinkFacts, Trial, TrialFacts

MIB = 1 << 20
GIB = 1 << 30

SMALL_SHM = 256 * MIB
LITTLE_MEMORY = GIB
FEW_FILES = 1024
CLOCK_SKEW_S = 1.0
SLOW_LATENCY_S = {"shared memory": 200e-6, "links": 10e-3, "MPI": 10e-3}
SLOW_SHARE = 0.02
"""An allreduce is slow if its rate is below this share of the rate of a plain copy."""


SLOW_LINK = 2.0
"""A link is slow if its rate is lower by this factor than the median of all, or its latency higher."""
FEW_LINKS = 3
LINK_LATENCY_S = 200e-6
"""A link's latency is never slow below it: it is then a matter of cores."""

_WITHOUT_COUNTERPART = re.compile(
    "ALLOW_MIXED_GPU|BATCH_D2D|BUILD_|CCL_|CROSS_|CUDA_|DISABLE_NVTX|ELASTIC|ENABLE_|GLOO_|GPU|HOSTNAME|LOCAL_"
    "|NCCL_|NUM_NCCL|NVTX_|RANK$|ROCM_|SIZE$|SPARK_|WITH_|WITHOUT_"
)
"""Variables of Horovod that resemble a knob of pyhvd but are not misspellings of it."""


class Level(enum.StrEnum):
    """The severity: with a problem pyhvd, or a part of it, does not work; a note is information."""

    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault and its remedy."""

    level: Level
    about: str
    text: str


Remarks = Iterator[tuple[Level, str]]
"""What a check says of its subject."""


def problem(text: str) -> tuple[Level, str]:
    """Return a remark that makes the doctor's exit code 1."""
    return Level.PROBLEM, text


def note(text: str) -> tuple[Level, str]:
    """Return a remark that does not change the exit code."""
    return Level.NOTE, text


def rate(bytes_per_second: float) -> str:
    """Return a rate with a unit, in powers of ten: ``"5.21 GB/s"``."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def link_rate(bytes_per_second: float) -> str:
    """Return a link's rate with a unit: ``"117 MB/s"``."""
    return f"{bytes_per_second / 1e6:,.4g} MB/s"


def between(found: TrialFacts, link: LinkFacts) -> str:
    """Return the hosts and addresses of a link: ``"h0 (10.0.0.1) <-> h1 (10.0.0.2)"``."""
    ends = zip(link.ranks, link.addresses, strict=True)
    return " <-> ".join(f"{found.ranks[rank].host} ({address})" for rank, address in ends)


# -- one host ---------------------------------------------------------------------------


def _check_extensions(facts: DoctorFacts) -> Remarks:
    for name, error in facts.extensions.items():
        if error:
            yield problem(
                f"extension {name} cannot be imported ({error}): install a wheel for this Python, or, in a"
                " source tree, run python setup.py build_ext --inplace",
            )


def _check_gil(facts: DoctorFacts) -> Remarks:
    if facts.gil and facts.free_threaded:
        yield note(
            "this is a free-threaded Python, but its GIL is on: an extension module that is not ready for it"
            " has been imported, or PYTHON_GIL=1 is set",
        )


def _check_mpi(facts: DoctorFacts) -> Remarks:
    mpi = facts.mpi
    if mpi.error:
        yield problem(f"{mpi.error}. Tried in a process of its own, without mpiexec")
    elif mpi.threads not in ("MPI_THREAD_MULTIPLE", "MPI_THREAD_SERIALIZED"):
        yield problem(
            f"{mpi.library} grants no more than {mpi.threads}, but pyhvd's background thread calls MPI: use"
            ' an MPI that is built with thread support, e.g. pip install "pyhvd[mpich]"',
        )
    elif mpi.threads == "MPI_THREAD_SERIALIZED":
        yield note(
            f"{mpi.library} grants MPI_THREAD_SERIALIZED: pyhvd works, but the program itself must not use"
            " MPI while pyhvd is up",
        )


def _check_mpiexec(facts: DoctorFacts) -> Remarks:
    if facts.mpiexec_error and not facts.mpi.error:
        yield problem(facts.mpiexec_error)


def _check_shared_memory(facts: DoctorFacts, ranks: int) -> Remarks:
    shared, needed = facts.shared, facts.shared_per_rank * ranks
    if shared.total is None or shared.free is None:
        yield note(
            f"there is no {shared.path}: pyhvd uses the directory for temporary files instead, which should"
            " be in memory (tmpfs)",
        )
    elif not shared.in_memory:
        yield note(
            f"{shared.path} is a folder on disk, to which each allreduce is written: mount a tmpfs there, as"
            " Docker does with --shm-size=1g",
        )
    elif shared.free < needed:
        yield problem(
            f"{shared.path} has {size(shared.free)} free of {size(shared.total)}, and {ranks} ranks"
            f" need {size(needed)}: pyhvd would go through MPI, which is slower. Remove files that crashed"
            " programs have left there; in a container, start it with --shm-size=1g",
        )
    elif shared.total < SMALL_SHM:
        yield note(
            f"{shared.path} is {size(shared.total)}: enough for pyhvd ({size(needed)} for {ranks} ranks"
            f" and each process set; on many hosts {size(facts.shared_across * ranks)}), but MPI and data"
            " loaders use it too, and end with a bus error when it is full. Start the container with"
            " --shm-size=1g",
        )


def _check_cores(facts: DoctorFacts, ranks: int) -> Remarks:
    cores = facts.cores
    if cores.usable < cores.host and cores.usable < ranks:
        yield note(
            f"this process may run on {cores.usable} of the host's {cores.host} cores, which {ranks} ranks"
            " would share: it has been bound (taskset, a cpuset, or mpiexec: try --bind-to none)",
        )
    elif cores.cgroup_quota is not None and cores.cgroup_quota < min(ranks, cores.usable):
        yield note(
            f"the cgroup allows {cores.cgroup_quota:g} cores' worth of time, less than {ranks} ranks use:"
            " they are stopped for a part of every 100 ms, and all wait for the one that is. Raise the"
            " container's CPU limit (docker: --cpus; Kubernetes: limits.cpu)",
        )
    elif ranks > cores.effective:
        yield note(
            f"{ranks} ranks share {cores.effective:g} cores: they take turns, and latencies are those of the"
            " scheduler",
        )


def _check_memory(facts: DoctorFacts) -> Remarks:
    memory = facts.memory
    if memory.available is not None and memory.available < LITTLE_MEMORY:
        yield note(f"only {size(memory.available)} are available: a job may be killed for want of it")
    if memory.cgroup_limit is not None and memory.cgroup_limit < LITTLE_MEMORY:
        limit = size(memory.cgroup_limit)
        yield note(f"the cgroup allows {limit}: raise the container's memory limit")


def _check_gpus(facts: DoctorFacts) -> Remarks:
    there, cuda = len(facts.gpus), facts.cuda
    if there and (error := cuda.errors.get("CuPy")):
        yield note(f"{there} found, but pyhvd cannot use CuPy, by which it takes arrays on them: {error}")
    elif there and not cuda.cupy:
        yield note(
            f"{there} found, but pyhvd takes arrays on GPUs by CuPy, which is not there: pip install"
            ' "pyhvd[cuda13]", or "pyhvd[cuda12]" where the driver is older'
        )


def _check_devices(facts: DoctorFacts) -> Remarks:
    if facts.gpus and facts.cuda.cupy and not facts.cuda.devices:
        yield note(
            f"{len(facts.gpus)} found by nvidia-smi, but CUDA shows this process none: look at"
            " CUDA_VISIBLE_DEVICES, and whether the driver is as new as CuPy's CUDA"
        )


def _check_compiler(facts: DoctorFacts) -> Remarks:
    if facts.cuda.devices and not facts.cuda.compiler:
        yield note(
            "NVRTC is not found, so that pyhvd's kernels cannot be compiled, and arrays on GPUs go through"
            ' the host: pip install "pyhvd[cuda13]", or "pyhvd[cuda12]", brings it'
        )


def _check_way(facts: DoctorFacts, ranks: int) -> Remarks:
    devices = len(facts.cuda.devices)
    if facts.cuda.nccl and facts.cuda.compiler and 0 < devices < ranks:
        which = "1 device: arrays on it" if devices == 1 else f"{devices} devices: arrays on them"
        yield note(f"{ranks} ranks share {which} go through the host, as NCCL wants a device for each rank")


def _check_variables(facts: DoctorFacts) -> Remarks:
    known = known_variables()
    suffixes = sorted({name.partition("_")[2] for name in known})
    for name in facts.variables:
        prefix, _, suffix = name.partition("_")
        if name in known:
            continue
        if prefix == "HOROVOD" and _WITHOUT_COUNTERPART.match(suffix):
            yield note(f"pyhvd has nothing that {name} would set, and ignores it")
        else:
            near = difflib.get_close_matches(suffix, suffixes, n=1, cutoff=0.75)
            hint = f": did you mean {prefix}_{near[0]}?" if near else ""
            yield note(f"pyhvd does not know {name}, and ignores it{hint}")
    try:
        _, notices = Config.from_env({n: v for n, v in facts.variables.items() if n in known})
    except ConfigError as exc:
        yield problem(f"{exc}; init() fails with it")
        return
    for notice in notices:
        if not notice.startswith("read "):
            yield note(notice)


def _check_horovod(facts: DoctorFacts) -> Remarks:
    if facts.horovod.remedy:
        yield problem(facts.horovod.remedy)


def _check_limits(facts: DoctorFacts) -> Remarks:
    limits = facts.limits
    if limits.open_files is not None and limits.open_files < FEW_FILES:
        yield note(
            f"at most {limits.open_files} open files per process: MPI opens some for every peer, and data"
            f" loaders more; raise it (ulimit -n {8 * FEW_FILES})",
        )
    if limits.rdma and limits.locked_bytes is not None:
        yield problem(
            f"there is an RDMA network card, but only {size(limits.locked_bytes)} of memory may be locked,"
            " and MPI then falls back to TCP or fails: ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )


# -- the trial ---------------------------------------------------------------------------


def _check_end(trial: Trial) -> Remarks:
    if not trial.error:
        return
    where: dict[str, list[int]] = {}
    for rank, stage in sorted(trial.stages.items()):
        where.setdefault(stage, []).append(rank)
    parts = [f"{describe_ranks(ranks)} at {stage!r}" for stage, ranks in where.items()]
    if silent := sorted(set(range(trial.ranks)) - set(trial.stages)):
        parts.append(f"{describe_ranks(silent)} had not started")
    ended = f". When it ended: {'; '.join(parts)}" if parts else ""
    yield problem(f"{trial.error}{ended}")


def _check_binding(facts: DoctorFacts, found: TrialFacts) -> Remarks:
    here = [each for each in found.ranks if each.host == facts.host]
    cores = {core for each in here for core in each.cores}
    if len(cores) < min(len(here), facts.cores.host):
        yield note(
            f"{len(here)} ranks on {facts.host} are bound to {len(cores)} of its"
            f" {facts.cores.host} cores between them: leave the binding to the system (--bind-to none),"
            " or give each rank cores of its own (--bind-to core)",
        )


def _check_ring(found: TrialFacts) -> Remarks:
    for receiver, sender, nbytes in found.ring.damaged:
        yield problem(
            f"{size(nbytes)} from rank {sender} ({found.ranks[sender].host}) arrived damaged on rank"
            f" {receiver} ({found.ranks[receiver].host}): a fault of memory, of the network, or of MPI's"
            " transport. Try another transport (MPICH: FI_PROVIDER=tcp; Open MPI: --mca btl self,tcp), and"
            " test the memory",
        )


def _check_clocks(found: TrialFacts) -> Remarks:
    for clock in found.clocks:
        if abs(clock.offset) - clock.uncertainty > CLOCK_SKEW_S:
            ahead = "ahead of" if clock.offset > 0 else "behind"
            yield note(
                f"the clock of {found.ranks[clock.rank].host} (rank {clock.rank}) is"
                f" {span(abs(clock.offset))} {ahead} rank 0's: times in logs cannot be compared. Keep both"
                " by NTP (chronyd)",
            )


def _check_links(found: TrialFacts) -> Remarks:
    if len(found.links) < FEW_LINKS:
        return
    usual = statistics.median(link.rate for link in found.links)
    delay = statistics.median(link.latency for link in found.links)
    for link in found.links:
        slow = link.rate * SLOW_LINK < usual
        far = link.latency > max(delay * SLOW_LINK, LINK_LATENCY_S)
        if slow or far:
            wrong = f"moves {link_rate(link.rate)}" if slow else f"needs {span(link.latency)} for 4 bytes"
            median = link_rate(usual) if slow else span(delay)
            yield note(
                f"the link {between(found, link)} {wrong}, while {median} is the median of {len(found.links)}"
                " links: look for a slow port (ethtool), for errors (ip -s link), and for another network"
                " that PYHVD_LINK_INTERFACES should name",
            )


def _check_fast_path(found: TrialFacts) -> Remarks:
    if len({each.host for each in found.ranks}) > 1:
        return
    if not any(lane.name == "shared memory" for lane in found.lanes):
        yield note(
            "the ranks of this host do not agree in shared memory, but by messages: there is too little of"
            " it, or PYHVD_CHECK is on, or PYHVD_CACHE_CAPACITY is 0",
        )


def _check_latency(found: TrialFacts, crowded: float) -> Remarks:
    for lane in found.lanes:
        limit = SLOW_LATENCY_S[lane.name] * (1 if crowded == 1 else 20 * crowded)
        if lane.latency > limit:
            cause = (
                "look for other programs on these cores (top), for power saving, and for a CPU limit"
                if crowded == 1
                else "ranks share cores, which explains a part of it"
            )
            yield note(
                f"over {lane.name} an allreduce of 4 bytes takes {span(lane.latency)}, more than the"
                f" {span(limit)} that are to be expected: {cause}",
            )


def _check_bandwidth(found: TrialFacts, crowded: float) -> Remarks:
    if len({each.host for each in found.ranks}) > 1:
        return  # the network is the limit
    for lane in found.lanes:
        floor = SLOW_SHARE * found.copy_rate / crowded
        if lane.rate < floor:
            yield note(
                f"over {lane.name} an allreduce of {size(lane.nbytes)} moves {rate(lane.rate)}, while memory"
                f" is copied at {rate(found.copy_rate)}; at least {rate(floor)} is to be expected. Look for"
                " other programs on these cores (top), for a CPU limit, and for ranks bound to one core",
            )


def _check_warnings(found: TrialFacts) -> Remarks:
    for text in found.warnings:
        yield note(text)


def examine(facts: DoctorFacts, ranks: int, trial: Trial | None = None) -> list[Finding]:
    """Return all findings of one host, problems first.

    Parameters
    ----------
    facts : DoctorFacts
        Facts of the host.
    ranks : int
        Ranks that the host is to run.
    trial : Trial or None
        The trial's result; None if there was no trial, or if another host reports it.
    """
    findings = [
        Finding(level, about, text)
        for about, remarks in _checks(facts, ranks, trial)
        for level, text in remarks
    ]
    return sorted(findings, key=lambda finding: finding.level != Level.PROBLEM)


def _checks(facts: DoctorFacts, ranks: int, trial: Trial | None) -> Iterator[tuple[str, Remarks]]:
    """Yield the subject of each check, and what it says."""
    yield "pyhvd", _check_extensions(facts)
    yield "Python", _check_gil(facts)
    yield "MPI", _check_mpi(facts)
    yield "mpiexec", _check_mpiexec(facts)
    yield "shared memory", _check_shared_memory(facts, ranks)
    yield "cores", _check_cores(facts, ranks)
    yield "memory", _check_memory(facts)
    yield "GPUs", _check_gpus(facts)
    yield "devices", _check_devices(facts)
    yield "CuPy", _check_compiler(facts)
    yield "GPU arrays", _check_way(facts, ranks)
    yield "environment", _check_variables(facts)
    yield "horovod", _check_horovod(facts)
    yield "limits", _check_limits(facts)
    if trial is None:
        return
    yield "trial", _check_end(trial)
    if trial.found is None:
        return
    crowded = max(ranks / facts.cores.effective, 1.0)  # ranks per core
    yield "binding", _check_binding(facts, trial.found)
    yield "ring", _check_ring(trial.found)
    yield "clocks", _check_clocks(trial.found)
    yield "link", _check_links(trial.found)
    yield "latency", _check_fast_path(trial.found)
    yield "latency", _check_latency(trial.found, crowded)
    yield "bandwidth", _check_bandwidth(trial.found, crowded)
    yield "pyhvd", _check_warnings(trial.found)
