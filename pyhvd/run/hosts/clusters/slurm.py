"""Slurm: ranks that srun started, and the hosts of a job.

A batch script has SLURM_PROCID=0 as well, but is no rank: see :func:`find_rank`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pyhvd.run.hosts.clusters.results import Allocation, Environ, ForeignRank, Surroundings, number, rank_env
from pyhvd.run.hosts.hosts import Host, HostsError

# --unbuffered: else slurmstepd holds output back until a newline comes (its io.c). --cpu-bind=none: ranks may
# use all cores of the job on that node.
AGENT = "srun -N1 -n1 -w {host} --overlap --mpi=none --cpu-bind=none --unbuffered sh -c {command}"

# Other variables that begin with PMI_ or PMIX_ are settings, which users put into batch scripts.
_PMI = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE")
# Larger numbers of steps mean the batch script, an interactive step or an external one (slurm.h).
_LAST_STEP = 0xFFFFFFF0
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def find_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that srun started: it has PMI's variables, or the number of a step.

    A batch script that was submitted in a shell under srun inherits the variables of that step of one task.
    But its SLURM_NTASKS is the job's.
    """
    rank = number(environ, "SLURM_PROCID")
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    pmi = any(name in environ for name in _PMI)
    if rank is None or not (pmi or (step is not None and step < _LAST_STEP)):
        return None
    size = number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if not pmi and size == 1 and (number(environ, "SLURM_NTASKS") or 1) > 1:
        return None
    numbers = rank_env(environ, rank, size, number(environ, "SLURM_LOCALID"), _local_size(environ))
    return ForeignRank("srun", numbers, alone=not pmi and numbers.size == 1)


def _local_size(environ: Environ) -> int | None:
    """Return the number of tasks on this node: SLURM_GTIDS lists them."""
    tasks = environ.get("SLURM_GTIDS", "")
    if re.fullmatch(r"\d+(,\d+)*", tasks):
        return tasks.count(",") + 1
    node = number(environ, "SLURM_NODEID")
    try:
        counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except HostsError:
        return None
    return counts[node] if node is not None and node < len(counts) else None


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the job, with its tasks per node as slots, but no more slots than tasks.

    Inside a step SLURM_TASKS_PER_NODE has the step's numbers. If it has not as many as there are nodes, the
    slots are the job's cores per node, divided by the cores per task.
    """
    environ = around.environ
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job or not nodes:
        return None
    names = expand_hostlist(nodes)
    slots = _trim(expand_counts(environ.get("SLURM_TASKS_PER_NODE", "")), number(environ, "SLURM_NTASKS"))
    if len(slots) != len(names):
        per_task = number(environ, "SLURM_CPUS_PER_TASK") or 1
        cores = expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        slots = [max(1, count // per_task) for count in cores]
    if len(slots) != len(names):
        slots = [around.slots_per_host or 1] * len(names)
    hosts = tuple(Host(name, count) for name, count in zip(names, slots, strict=True))
    return Allocation(f"Slurm's job {job}", hosts, AGENT)


def _trim(slots: list[int], tasks: int | None) -> list[int]:
    """Return slots without those that exceed the job's tasks; the last nodes lose theirs, but for one.

    Of ``--ntasks 5 --ntasks-per-node 2`` Slurm makes ``2(x3)``.
    """
    if tasks is None or tasks < len(slots):  # Slurm gives no job fewer tasks than nodes
        return slots
    excess = sum(slots) - tasks
    trimmed = []
    for count in reversed(slots):
        less = max(0, min(excess, count - 1))
        excess -= less
        trimmed.append(count - less)
    return trimmed[::-1]


def expand_hostlist(text: str) -> list[str]:
    """Return the names of a compressed list: ``n[01-03,7],g1`` means n01, n02, n03, n7 and g1.

    Raises
    ------
    HostsError
        The list is malformed.
    """
    names = [name for item in _split_outside_brackets(text) for name in _expand(item, text)]
    if not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) for name in names):
        raise _malformed(text)
    return names


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _expand(item: str, text: str) -> Iterator[str]:
    """Yield the names of one item, whose brackets may be anywhere, and more than one."""
    found = _BRACKETS.search(item)
    if found is None:
        yield item
        return
    for part in found[1].split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if numbers is None:
            raise _malformed(text)
        first, last = numbers[1], numbers[2] or numbers[1]
        if int(first) > int(last):
            raise _malformed(text)
        for value in range(int(first), int(last) + 1):
            yield from _expand(f"{item[: found.start()]}{value:0{len(first)}}{item[found.end() :]}", text)


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a compressed list: ``4(x2),3`` means 4, 4 and 3; an empty text means none.

    Raises
    ------
    HostsError
        The list is malformed.
    """
    counts: list[int] = []
    for item in text.split(",") if text else []:
        found = _COUNT.fullmatch(item)
        if found is None:
            raise _malformed(text)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _malformed(text: str) -> HostsError:
    return HostsError(f"cannot read Slurm's list {text!r}")
