"""The variables that are set for a rank."""

from __future__ import annotations

import os
import socket

import pytest

from pyhvd.job.mpi import rank_env
from pyhvd.job.mpi.rank_env import (
    HOROVOD_NUMBERS,
    MPICH,
    OPENMPI,
    OTHER,
    RankEnv,
    RankGeneration,
    child_environment,
    claim_rank,
    find_rank_process,
    set_defaults,
    set_horovods,
)

_ELASTIC = RankGeneration(3).variables()


@pytest.mark.parametrize(
    ("launcher", "given", "found"),
    [
        (MPICH, _ELASTIC, "^sm"),
        (MPICH, _ELASTIC | {"UCX_TLS": "tcp,self"}, "tcp,self"),
        (MPICH, {}, None),
        (OPENMPI, _ELASTIC, None),
    ],
)
def test_ranks_of_elastic_jobs_get_no_shared_memory_of_ucx(
    launcher: str, given: dict[str, str], found: str | None
) -> None:
    environ = dict(given)
    set_defaults(RankEnv(launcher, 0, 4, 0, 4), environ)
    assert environ.get("UCX_TLS") == found


@pytest.mark.parametrize(
    ("quota", "mine", "ranks", "threads", "why"),
    [
        (None, 64, 4, "16", "64 cores, 4 local ranks"),
        (None, 4, 4, "4", "64 cores, 4 local ranks, bound to 4 each"),
        (100.0, 64, 4, "16", "64 cores, 4 local ranks"),
        (2.0, 64, 2, "1", "the cgroup's limit of 2 of 64 cores, 2 local ranks"),
        (2.0, 64, 4, "1", "the cgroup's limit of 2 of 64 cores, 4 local ranks"),
        (8.5, 64, 2, "4", "the cgroup's limit of 8.5 of 64 cores, 2 local ranks"),
        (0.5, 64, 1, "1", "the cgroup's limit of 0.5 of 64 cores, 1 local ranks"),
        (8.0, 2, 4, "2", "the cgroup's limit of 8 of 64 cores, 4 local ranks, bound to 2 each"),
        (2.0, 4, 1, "2", "the cgroup's limit of 2 of 64 cores, 1 local ranks"),
    ],
)
def test_threads_and_yielding_follow_affinity_and_quota(
    quota: float | None, mine: int, ranks: int, threads: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_env, "cgroup_limits", lambda: (quota, None))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64 if pid else mine), raising=False)
    environ: dict[str, str] = {}
    said = set_defaults(RankEnv(OPENMPI, 0, ranks, 0, ranks), environ)
    assert said == f"pyhvd: OMP_NUM_THREADS={threads} on each rank ({why}); set it yourself to change this"
    assert environ["OMP_NUM_THREADS"] == threads
    assert ("OMPI_MCA_mpi_yield_when_idle" in environ) == (ranks > max(1, min(quota or 64, 64)))


def _in_a_child(environ: dict[str, str]) -> str:
    """Return what a forked child finds."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, f"{find_rank_process(environ)}\n".encode())
        os._exit(0)
    os.wait()
    os.close(write)
    with open(read, encoding="utf-8") as found:
        return found.read().strip()


def test_the_first_process_that_claims_a_rank_is_it() -> None:
    with socket.socket() as own, socket.socket() as other:
        hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "PMI_FD": str(own.fileno())}
        prterun = {"OMPI_COMM_WORLD_RANK": "3", "PMIX_NAMESPACE": "prterun-h-1@1", "PMIX_RANK": "3"}
        for environ in (hydra, prterun):
            assert _in_a_child(environ) == ""
            assert (claim_rank(environ), claim_rank(environ)) == ("", "")
            assert _in_a_child(environ) == f"rank 3 (process {os.getpid()})"
        # The same rank of a job that the rank has started.
        assert _in_a_child(hydra | {"PMI_FD": str(other.fileno())}) == ""
        assert _in_a_child(prterun | {"PMIX_NAMESPACE": "prterun-h-2@1"}) == ""
    assert find_rank_process(hydra) == "rank 3"  # without the descriptor


def test_a_process_that_no_launcher_has_started_may_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("PYHVD_ELASTIC_GENERATION", "1")
    monkeypatch.setenv("PMIX_RANK", "1")
    assert claim_rank(os.environ) == ""
    left = child_environment()
    assert left == {name: value for name, value in os.environ.items() if name in left}
    assert set(os.environ) - set(left) >= {"HOROVOD_RANK", "PYHVD_ELASTIC_GENERATION", "PMIX_RANK"}
    assert left["OMP_NUM_THREADS"] == "2"
    assert _in_a_child(left) == ""
    monkeypatch.delenv("_PYHVD_RANK_PROCESS")


@pytest.mark.parametrize(
    ("rank_env", "known"),
    [
        (RankEnv(OPENMPI, 1, 2, 1, 2), ("1", "2", "1", "2", "0", "1")),
        (RankEnv(MPICH, 5, 8, 1, 4), ("5", "8", "1", "4")),  # which of the hosts this is, is not announced
        (RankEnv(OTHER, 5, 8, 1, 4), ("5", "8", "1", "4")),
        (RankEnv(OTHER, 5, 8, 5, 8), ("5", "8")),  # numbers of the job stand for those of the host
    ],
)
def test_variables_of_horovod_are_those_that_are_known(rank_env: RankEnv, known: tuple[str, ...]) -> None:
    environ = dict.fromkeys(HOROVOD_NUMBERS, "outer") | {"HOROVOD_CYCLE_TIME": "2"}
    set_horovods(rank_env, environ)
    assert environ.pop("HOROVOD_CYCLE_TIME") == "2"
    assert environ.pop("HOROVOD_HOSTNAME") == os.uname().nodename
    assert tuple(environ.values()) == known
