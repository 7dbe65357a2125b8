"""The text of each of the doctor's findings, on made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyhvd.run.cuda_facts import CudaFacts
from pyhvd.tools.doctor.advice import Level
from pyhvd.tools.doctor.facts import Cores, HostMemory, Limits, Shared
from pyhvd.tools.doctor.trial_facts import ClockFacts, LaneFacts, LinkFacts, RankFacts, RingFacts, Trial
from tests.unit.tools.doctor_cases import CUDA, FOUND, GIB, GOOD, MIB, found, only, trial_with


def test_a_sound_host_has_no_findings() -> None:
    assert found() == []
    assert found(trial=None) == []
    assert found(cuda=CUDA) == []


MPI = GOOD.mpi
HOSTS: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
    (
        {"shared": Shared("/dev/shm", 64 * MIB, 63 * MIB)},
        (
            "note",
            "shared memory",
            "/dev/shm is 64 MiB: enough for pyhvd (1.56 MiB for 2 ranks and each process set; on many hosts"
            " 6.1 MiB), but MPI and data loaders use it too, and end with a bus error when it is full. Start"
            " the container with --shm-size=1g",
        ),
    ),
    (
        {"shared": Shared("/dev/shm", 64 * MIB, MIB)},
        (
            "problem",
            "shared memory",
            "/dev/shm has 1 MiB free of 64 MiB, and 2 ranks need 1.56 MiB: pyhvd would go through MPI, which"
            " is slower. Remove files that crashed programs have left there; in a container, start it with"
            " --shm-size=1g",
        ),
    ),
    (
        {"shared": Shared("/dev/shm")},
        (
            "note",
            "shared memory",
            "there is no /dev/shm: pyhvd uses the directory for temporary files instead, which should be in"
            " memory (tmpfs)",
        ),
    ),
    (
        {"shared": Shared("/dev/shm", 16 * GIB, 15 * GIB, in_memory=False)},
        (
            "note",
            "shared memory",
            "/dev/shm is a folder on disk, to which each allreduce is written: mount a tmpfs there, as Docker"
            " does with --shm-size=1g",
        ),
    ),
    (
        {"mpi": replace(MPI, error="MPI_Init_thread has not ended within 20 s")},
        (
            "problem",
            "MPI",
            "MPI_Init_thread has not ended within 20 s. Tried in a process of its own, without mpiexec",
        ),
    ),
    (
        {"mpi": replace(MPI, threads="MPI_THREAD_FUNNELED")},
        (
            "problem",
            "MPI",
            "MPICH 5.0.2 grants no more than MPI_THREAD_FUNNELED, but pyhvd's background thread calls MPI:"
            ' use an MPI that is built with thread support, e.g. pip install "pyhvd[mpich]"',
        ),
    ),
    (
        {"mpi": replace(MPI, threads="MPI_THREAD_SERIALIZED")},
        (
            "note",
            "MPI",
            "MPICH 5.0.2 grants MPI_THREAD_SERIALIZED: pyhvd works, but the program itself must not use MPI"
            " while pyhvd is up",
        ),
    ),
    ({"mpiexec_error": "no mpiexec of MPICH"}, ("problem", "mpiexec", "no mpiexec of MPICH")),
    (
        {"extensions": {"_fusion": "", "native.shared_memory": "ImportError: undefined symbol"}},
        (
            "problem",
            "pyhvd",
            "extension native.shared_memory cannot be imported (ImportError: undefined symbol): install a"
            " wheel for this Python, or, in a source tree, run python setup.py build_ext --inplace",
        ),
    ),
    (
        {"free_threaded": True, "gil": True},
        (
            "note",
            "Python",
            "this is a free-threaded Python, but its GIL is on: an extension module that is not ready for it"
            " has been imported, or PYTHON_GIL=1 is set",
        ),
    ),
    (
        {"cores": Cores(64, 1)},
        (
            "note",
            "cores",
            "this process may run on 1 of the host's 64 cores, which 2 ranks would share: it has been bound"
            " (taskset, a cpuset, or mpiexec: try --bind-to none)",
        ),
    ),
    (
        {"cores": Cores(8, 8, 1.5)},
        (
            "note",
            "cores",
            "the cgroup allows 1.5 cores' worth of time, less than 2 ranks use: they are stopped for a part"
            " of every 100 ms, and all wait for the one that is. Raise the container's CPU limit (docker:"
            " --cpus; Kubernetes: limits.cpu)",
        ),
    ),
    (
        {"cores": Cores(1, 1)},
        (
            "note",
            "cores",
            "2 ranks share 1 cores: they take turns, and latencies are those of the scheduler",
        ),
    ),
    (
        {"memory": HostMemory(32 * GIB, 100 * MIB)},
        ("note", "memory", "only 100 MiB are available: a job may be killed for want of it"),
    ),
    (
        {"memory": HostMemory(32 * GIB, 20 * GIB, 512 * MIB)},
        ("note", "memory", "the cgroup allows 512 MiB: raise the container's memory limit"),
    ),
    (
        {"gpus": ["H200, 143771 MiB, 570.1"]},
        (
            "note",
            "GPUs",
            "1 found, but pyhvd takes arrays on GPUs by CuPy, which is not there: pip install"
            ' "pyhvd[cuda13]", or "pyhvd[cuda12]" where the driver is older',
        ),
    ),
    (
        {"gpus": ["H200, 143771 MiB, 570.1"], "cuda": CudaFacts(errors={"CuPy": "cannot be imported: x"})},
        (
            "note",
            "GPUs",
            "1 found, but pyhvd cannot use CuPy, by which it takes arrays on them: cannot be imported: x",
        ),
    ),
    (
        {"gpus": ["H200, 143771 MiB, 570.1"], "cuda": replace(CUDA, devices=[])},
        (
            "note",
            "devices",
            "1 found by nvidia-smi, but CUDA shows this process none: look at CUDA_VISIBLE_DEVICES,"
            " and whether the driver is as new as CuPy's CUDA",
        ),
    ),
    (
        {"cuda": replace(CUDA, compiler="")},
        (
            "note",
            "CuPy",
            "NVRTC is not found, so that pyhvd's kernels cannot be compiled, and arrays on GPUs go through"
            ' the host: pip install "pyhvd[cuda13]", or "pyhvd[cuda12]", brings it',
        ),
    ),
    (
        {"cuda": replace(CUDA, devices=CUDA.devices[:1])},
        (
            "note",
            "GPU arrays",
            "2 ranks share 1 device: arrays on it go through the host, as NCCL wants a device for each rank",
        ),
    ),
    (
        {"variables": {"PYHVD_FUSION_TRESHOLD": "1"}},
        (
            "note",
            "environment",
            "pyhvd does not know PYHVD_FUSION_TRESHOLD, and ignores it: did you mean PYHVD_FUSION_THRESHOLD?",
        ),
    ),
    (
        {"variables": {"HOROVOD_GPU_OPERATIONS": "NCCL"}},
        ("note", "environment", "pyhvd has nothing that HOROVOD_GPU_OPERATIONS would set, and ignores it"),
    ),
    (
        {"variables": {"HOROVOD_CYCLE_TIME": "fast", "PYHVD_CHECK": "1"}},
        (
            "problem",
            "environment",
            "HOROVOD_CYCLE_TIME='fast': expected a number; init() fails with it",
        ),
    ),
    (
        {"variables": {"PYHVD_TORUS_ALLREDUCE": "1"}},
        ("note", "environment", "this version of pyhvd does not act on PYHVD_TORUS_ALLREDUCE"),
    ),
    (
        {"limits": Limits(256, None)},
        (
            "note",
            "limits",
            "at most 256 open files per process: MPI opens some for every peer, and data loaders more; raise"
            " it (ulimit -n 8192)",
        ),
    ),
    (
        {"limits": Limits(4096, 64 << 10, rdma=True)},
        (
            "problem",
            "limits",
            "there is an RDMA network card, but only 64 KiB of memory may be locked, and MPI then falls back"
            " to TCP or fails: ulimit -l unlimited (docker: --ulimit memlock=-1)",
        ),
    ),
]


@pytest.mark.parametrize(
    ("changes", "expected"), HOSTS, ids=[f"{e[1]}-{i}" for i, (_, e) in enumerate(HOSTS)]
)
def test_each_fault_of_a_host_has_its_words(changes: dict[str, Any], expected: tuple[str, str, str]) -> None:
    assert only(found(trial=None, **changes)) == expected


TRIALS: list[tuple[Trial, tuple[str, str, str]]] = [
    (
        Trial(4, 60.0, error="4 ranks have not ended within 60 s", stages={0: "ring test", 2: "ring test"}),
        (
            "problem",
            "trial",
            "4 ranks have not ended within 60 s. When it ended: ranks 0, 2 at 'ring test'; ranks 1, 3 had not"
            " started",
        ),
    ),
    (
        trial_with(ring=RingFacts([1, 65536], [(1, 0, 65536)])),
        (
            "problem",
            "ring",
            "64 KiB from rank 0 (node1) arrived damaged on rank 1 (node1): a fault of memory, of the network,"
            " or of MPI's transport. Try another transport (MPICH: FI_PROVIDER=tcp; Open MPI: --mca btl"
            " self,tcp), and test the memory",
        ),
    ),
    (
        trial_with(ranks=[RankFacts(0, "node1", 11, [3]), RankFacts(1, "node1", 12, [3])]),
        (
            "note",
            "binding",
            "2 ranks on node1 are bound to 1 of its 8 cores between them: leave the binding to the system"
            " (--bind-to none), or give each rank cores of its own (--bind-to core)",
        ),
    ),
    (
        trial_with(clocks=[ClockFacts(1, -3.5, 0.001)]),
        (
            "note",
            "clocks",
            "the clock of node1 (rank 1) is 3.5 s behind rank 0's: times in logs cannot be compared. Keep"
            " both by NTP (chronyd)",
        ),
    ),
    (
        trial_with(lanes=[LaneFacts("MPI", 50e-3, 64 * MIB, 0.02), FOUND.lanes[1]]),
        (
            "note",
            "latency",
            "over MPI an allreduce of 4 bytes takes 50 ms, more than the 10 ms that are to be expected: look"
            " for other programs on these cores (top), for power saving, and for a CPU limit",
        ),
    ),
    (
        trial_with(lanes=[FOUND.lanes[0], LaneFacts("shared memory", 2e-6, 64 * MIB, 1.0)]),
        (
            "note",
            "bandwidth",
            "over shared memory an allreduce of 64 MiB moves 0.0671 GB/s, while memory is copied at 12 GB/s;"
            " at least 0.24 GB/s is to be expected. Look for other programs on these cores (top), for a CPU"
            " limit, and for ranks bound to one core",
        ),
    ),
    (
        trial_with(lanes=[FOUND.lanes[0]]),
        (
            "note",
            "latency",
            "the ranks of this host do not agree in shared memory, but by messages: there is too little of"
            " it, or PYHVD_CHECK is on, or PYHVD_CACHE_CAPACITY is 0",
        ),
    ),
    (trial_with(warnings=["look out"]), ("note", "pyhvd", "look out")),
]


@pytest.mark.parametrize(
    ("trial", "expected"), TRIALS, ids=[f"{e[1]}-{i}" for i, (_, e) in enumerate(TRIALS)]
)
def test_each_fault_of_a_trial_has_its_words(trial: Trial, expected: tuple[str, str, str]) -> None:
    assert only(found(trial=trial)) == expected


def test_ranks_that_share_cores_are_given_more_time() -> None:
    slow = trial_with(lanes=[FOUND.lanes[0], LaneFacts("shared memory", 5e-3, 64 * MIB, 0.02)])
    assert [f.about for f in found(trial=slow)] == ["latency"]
    assert [f.about for f in found(trial=slow, cores=Cores(1, 1))] == ["cores"]


def test_a_clock_is_not_blamed_for_what_may_be_the_network() -> None:
    assert found(trial=trial_with(clocks=[ClockFacts(1, 3.5, 3.0)])) == []


def test_several_hosts_have_no_fast_lane_to_miss() -> None:
    ranks = [FOUND.ranks[0], RankFacts(1, "node2", 12, [0])]
    assert found(trial=trial_with(ranks=ranks, lanes=[FOUND.lanes[0]])) == []


def links(*speeds: tuple[float, float]) -> Trial:
    """Return a trial on 4 hosts with links of these latencies and rates."""
    ranks = [RankFacts(r, f"node{r + 1}", 11, [0]) for r in range(4)]
    pairs = [(0, 1), (0, 2), (1, 2), (0, 3)]
    facts = [
        LinkFacts(pair, (f"10.0.0.{pair[0]}", f"10.0.0.{pair[1]}"), latency, MIB, MIB / rate)
        for pair, (latency, rate) in zip(pairs, speeds, strict=False)
    ]
    return trial_with(ranks=ranks, lanes=[FOUND.lanes[0]], links=facts)


def test_a_link_much_slower_than_the_others_is_named() -> None:
    good = (30e-6, 118e6)
    assert found(trial=links(good, good, good, good)) == []
    assert found(trial=links(good, good, good, (190e-6, 60e6))) == []
    assert found(trial=links(good, (30e-6, 11e6))) == [], "two links have no median"
    advice = (
        "look for a slow port (ethtool), for errors (ip -s link), and for another network that"
        " PYHVD_LINK_INTERFACES should name"
    )
    assert only(found(trial=links(good, good, (30e-6, 11.8e6), good))) == (
        "note",
        "link",
        "the link node2 (10.0.0.1) <-> node3 (10.0.0.2) moves 11.8 MB/s, while 118 MB/s is the median of 4"
        f" links: {advice}",
    )
    assert only(found(trial=links(good, good, good, (2e-3, 118e6)))) == (
        "note",
        "link",
        "the link node1 (10.0.0.0) <-> node4 (10.0.0.3) needs 2 ms for 4 bytes, while 30 us is the median"
        f" of 4 links: {advice}",
    )


def test_between_hosts_the_network_is_the_limit() -> None:
    ranks = [FOUND.ranks[0], RankFacts(1, "node2", 12, [0])]
    lanes = [LaneFacts("MPI", 300e-6, 64 * MIB, 5.0), LaneFacts("links", 30e-6, 64 * MIB, 5.0)]
    assert found(trial=trial_with(ranks=ranks, lanes=lanes)) == []
    lanes[1] = LaneFacts("links", 30e-3, 64 * MIB, 5.0)
    slow = trial_with(ranks=ranks, lanes=lanes)
    assert "over links an allreduce of 4 bytes takes 30 ms" in only(found(trial=slow))[2]


def test_problems_come_first() -> None:
    both = found(memory=HostMemory(GIB, MIB), mpiexec_error="none")
    assert [finding.level for finding in both] == [Level.PROBLEM, Level.NOTE]
