"""Jobs on a Slurm cluster of three simulated nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI
from tests.elastic.jobs import PROGRAM, read_log
from tests.elastic.steps import STEPS, weight
from tests.slurm.cluster import ROOT, Cluster, wait_for

pytestmark = pytest.mark.timeout(300)

_REPORT = Path(__file__).with_name("report.py")
_UNEVEN = ("--nodes=3", "--ntasks=5", "--ntasks-per-node=2")
_NEEDS_MPICH = pytest.mark.skipif(find_library().family != MPICH, reason="needs MPICH or Intel MPI")


def ranks_of(text: str) -> list[list[str]]:
    """Return the lines of ranks, in rank order: their numbers, their host, and what Slurm has set."""
    return sorted(line.split("rank ")[1].split() for line in text.splitlines() if "rank " in line)


def check_uneven(text: str) -> None:
    """Check that five ranks on three nodes are one world."""
    ranks = ranks_of(text)
    assert [each[:6] for each in ranks] == [
        ["0", "5", "0", "2", "5", "n1"],
        ["1", "5", "1", "2", "5", "n1"],
        ["2", "5", "0", "2", "5", "n2"],
        ["3", "5", "1", "2", "5", "n2"],
        ["4", "5", "0", "1", "5", "n3"],
    ], text


def test_a_batch_job_has_as_many_ranks_as_tasks_and_the_gpus_of_each_node(slurm: Cluster) -> None:
    """One GPU of the batch host is taken, so that its numbers differ from those of the others."""
    other = slurm.submit("sleep 100", "--nodelist=n1", "--gpus=1")
    try:
        job = slurm.submit(f"exec pyhvdrun {_REPORT}", *_UNEVEN, "--gpus-per-node=2")
        assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    finally:
        slurm.call("scancel", str(other))
    check_uneven(slurm.log(job))
    for each in ranks_of(slurm.log(job)):
        host, name, devices, ordinals = each[5:]
        assert (name, devices) == (host, "1,2" if host == "n1" else "0,1"), slurm.log(job)
        assert ordinals in (devices, "-"), slurm.log(job)


@pytest.mark.parametrize(
    "manager",
    [
        pytest.param("pmi2", marks=_NEEDS_MPICH),
        pytest.param(
            "pmix", marks=pytest.mark.skipif(find_library().family != OPENMPI, reason="needs Open MPI")
        ),
    ],
)
def test_srun_starts_the_ranks(manager: str, slurm: Cluster) -> None:
    """Slurm chooses the nodes of the fifth task."""
    text = slurm.call("srun", *_UNEVEN, f"--mpi={manager}", "python", str(_REPORT))
    ranks = ranks_of(text)
    assert [[rank, size, total] for rank, size, _, _, total, *_ in ranks] == [
        [str(rank), "5", "5"] for rank in range(5)
    ], text
    for host in ("n1", "n2", "n3"):
        local = [(int(each[2]), int(each[3])) for each in ranks if each[5] == host]
        assert local == [(number, len(local)) for number in range(len(local))], text


def train(folder: str, least: int = 2) -> str:
    """Return the lines that train elastically in a folder of their own."""
    resume = '--elastic-store "$PWD/commits" --elastic-resume "$PWD/resume"'
    return f"mkdir {folder}; cd {folder}; exec pyhvdrun --min-np {least} {resume} {PROGRAM}"


def wait_for_step(slurm: Cluster, job: int, folder: str, step: int, generation: int = 0) -> None:
    """Wait until a generation has taken a step."""

    def is_there() -> bool:
        lines = [line for line in read_log(slurm.folder / folder) if line.kind == "step"]
        return any(line.generation >= generation and int(line.words[0]) >= step for line in lines)

    wait_for(is_there, lambda: (slurm.state(job), slurm.log(job)), 90.0)


def check_trained(slurm: Cluster, folder: str) -> None:
    """Check that the last generation has trained to the end, with the right values."""
    lines = read_log(slurm.folder / folder)
    (end,) = [line for line in lines if line.kind == "end"]
    assert (int(end.words[0]), float(end.words[1])) == (STEPS, weight(STEPS)), lines


@_NEEDS_MPICH
def test_a_users_signal_to_all_steps_and_scancel(slurm: Cluster) -> None:
    """The agents outlive the signal, and nothing outlives scancel."""
    job = slurm.submit(train("signals"), "--nodes=2", "--ntasks-per-node=1", "--export=ALL,STEP_S=1")
    wait_for_step(slurm, job, "signals", 2)
    slurm.call("scancel", "-s", "USR1", str(job))
    newest = max(int(line.words[0]) for line in read_log(slurm.folder / "signals") if line.kind == "step")
    wait_for_step(slurm, job, "signals", newest + 3)
    assert "agent" not in slurm.log(job)
    slurm.call("scancel", str(job))
    assert slurm.wait(job) == "CANCELLED"
    wait_for(lambda: not processes_of(slurm, PROGRAM.name), lambda: processes_of(slurm, PROGRAM.name), 20.0)


def processes_of(slurm: Cluster, word: str) -> list[str]:
    """Return the command lines of the cluster's processes that have a word."""
    found = []
    for host in slurm.bed.hosts.values():
        for pid in host.processes():
            try:
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return [words for words in found if word in words]


@_NEEDS_MPICH
def test_the_script_of_the_documentation_goes_on_beyond_its_time(slurm: Cluster) -> None:
    """SIGTERM comes by scancel, as Slurm's time limits are minutes."""
    pytest.importorskip("fsspec")
    text = (ROOT / "docs/slurm.md").read_text()
    script = re.search(r"<!-- requeue -->\n```bash\n#!/bin/bash\n(.*?)```", text, re.DOTALL)
    assert script is not None
    (slurm.folder / "requeue").mkdir()
    body = script[1].replace("train.py", str(PROGRAM)).replace("\ntrap", "\ncd requeue\ntrap")
    job = slurm.submit(body, "--export=ALL,STEP_S=0.3")
    wait_for_step(slurm, job, "requeue", 2)
    slurm.call("scancel", "-s", "TERM", "--batch", str(job))
    slurm.wait_for_line(job, "the job is suspended: the next run with")
    wait_for(lambda: slurm.state(job) == "PENDING", lambda: slurm.log(job), 30.0)
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert slurm.wait(job, 150.0) == "COMPLETED", slurm.log(job)
    check_trained(slurm, "requeue")
    assert list((slurm.folder / "requeue/commits").iterdir()) == []


@_NEEDS_MPICH
def test_a_signal_to_all_steps_drains_their_nodes(slurm: Cluster) -> None:
    """As `--signal=TERM@90` sends it: the job goes on with the batch host, and no step is lost."""
    job = slurm.submit(train("steps", least=1), "--nodes=2", "--ntasks-per-node=1", "--export=ALL,STEP_S=0.3")
    wait_for_step(slurm, job, "steps", 2)
    slurm.call("scancel", "-s", "TERM", str(job))
    assert slurm.wait(job) == "COMPLETED", slurm.log(job)
    assert "is drained: its agent got SIGTERM" in slurm.log(job)
    assert "was killed by" not in slurm.log(job)
    check_trained(slurm, "steps")


@_NEEDS_MPICH
def test_an_elastic_job_goes_on_without_a_node_that_is_lost(slurm: Cluster) -> None:
    """The last test: the node does not come back."""
    flags = ("--nodes=2", "--ntasks-per-node=1", "--nodelist=n2,n3", "--no-kill")
    job = slurm.submit(train("lost", least=1), *flags, "--export=ALL,STEP_S=0.3")
    wait_for_step(slurm, job, "lost", 3)
    slurm.bed.power_off(slurm.bed.hosts["n3"])
    wait_for(lambda: is_trained(slurm, "lost"), lambda: (slurm.state(job), slurm.log(job)), 90.0)
    assert "1 rank on 1 host" in slurm.log(job)
    check_trained(slurm, "lost")


def is_trained(slurm: Cluster, folder: str) -> bool:
    """Return whether the program has logged its end."""
    return any(line.kind == "end" for line in read_log(slurm.folder / folder))
