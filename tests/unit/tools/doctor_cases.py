"""Made-up facts for the doctor's tests: a host without faults, and a successful trial on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from pyhvd.run.check_build import MpiFacts
from pyhvd.run.cuda_facts import CudaDevice, CudaFacts
from pyhvd.tools.doctor.advice import Finding, examine
from pyhvd.tools.doctor.facts import Cores, DoctorFacts, HostMemory, Limits, Shared
from pyhvd.tools.doctor.trial_facts import ClockFacts, LaneFacts, RankFacts, RingFacts, Trial, TrialFacts

MIB, GIB = 1 << 20, 1 << 30

CORES = list(range(8))

GOOD = DoctorFacts(
    host="node1",
    system="Linux 6.1 x86_64",
    processor="A fast one",
    python="CPython 3.12.1",
    executable="/usr/bin/python3",
    folder="/site-packages/pyhvd",
    float16="f16c",
    mpi=MpiFacts(
        "4.1.2", "MPICH 5.0.2", "MPICH Version: 5.0.2", "/l/libmpi.so", "system", "MPI_THREAD_MULTIPLE"
    ),
    mpiexec="/usr/bin/mpiexec",
    shared=Shared("/dev/shm", 16 * GIB, 15 * GIB),
    shared_per_rank=820_000,
    shared_across=3_200_000,
    cores=Cores(8, 8),
    memory=HostMemory(32 * GIB, 20 * GIB),
    packages={"rich": "15.0", "torch": ""},
    limits=Limits(4096, None),
)
CUDA = CudaFacts("14.2.0", "13.0", "13.0", "13.0", "2.32.3", [CudaDevice("H200", 140 * GIB, "9.0")] * 2)
FOUND = TrialFacts(
    ranks=[RankFacts(0, "node1", 11, CORES), RankFacts(1, "node1", 12, CORES)],
    ring=RingFacts([1, 65536], []),
    clocks=[ClockFacts(1, 0.0, 1e-6)],
    lanes=[LaneFacts("MPI", 300e-6, 64 * MIB, 0.02), LaneFacts("shared memory", 2e-6, 64 * MIB, 0.01)],
    copy_rate=12e9,
    warnings=[],
)
GOOD_TRIAL = Trial(2, 1.5, FOUND)


def found(ranks: int = 2, trial: Trial | None = GOOD_TRIAL, **changes: Any) -> list[Finding]:
    """Return the findings for the faultless host with some changes."""
    return examine(replace(GOOD, **changes), ranks, trial)


def only(findings: list[Finding]) -> tuple[str, str, str]:
    """Return level, subject and text of the only finding."""
    (finding,) = findings
    return str(finding.level), finding.about, finding.text


def trial_with(**changes: Any) -> Trial:
    """Return the successful trial with other measurements."""
    return Trial(2, 1.5, msgspec.structs.replace(FOUND, **changes))
