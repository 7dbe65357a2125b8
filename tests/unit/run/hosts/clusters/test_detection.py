"""Which launcher started a process, and which hosts a cluster gave it, from environments of such systems.

Each ``.env`` file beside this module has those variables of a system that matter here. Those of MPICH and
Open MPI were recorded; the others follow the manuals and sources of the systems.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.mpi.rank_env import RankEnv, read_rank_env
from pyhvd.job.spec import argument_of
from pyhvd.run.hosts.agent_template import SSH
from pyhvd.run.hosts.clusters.detection import (
    explain_pod_of_job,
    explain_torchrun,
    find_allocation,
    find_rank,
    has_marks,
)
from pyhvd.run.hosts.clusters.results import Surroundings
from pyhvd.run.hosts.clusters.slurm import expand_counts, expand_hostlist
from pyhvd.run.hosts.hosts import HostsError

HERE = Path(__file__).parent
RECORDED = sorted(path.stem for path in HERE.glob("*.env"))
SRUN = "srun -N1 -n1 -w {host} --overlap --mpi=none --cpu-bind=none --unbuffered sh -c {command}"
BLAUNCH = "blaunch -no-shell {host} sh -c {command}"
KUBEXEC = """\
#!/bin/sh
set -x
POD_NAME=$1
shift
/opt/kube/kubectl exec ${POD_NAME}%s -- /bin/sh -c "$*"
"""
FILES = {
    "/home/u/.lsbatch/1234.hostfile": "h1\nh1\nh1\nh1\nh2\nh2\n",
    "/home/u/.lsbatch/1235.hostfile": "batch5\nc01n02\nc01n02\nc01n03\nc01n03\n",
    "/var/spool/pbs/aux/99.head": "p1\np2\np1\np2\n",
    "/opt/sge/spool/active_jobs/512.1/pe_hostfile": "e1 4 all.q@e1 UNDEFINED\ne2 2 all.q@e2 UNDEFINED\n",
    "/etc/mpi/hostfile": "train-worker-0.train.ns.svc slots=4\ntrain-worker-1.train.ns.svc\n",
    "/etc/mpi/kubexec.sh": KUBEXEC % "",
    "/home/u/hosts": "m1:2\nm2\n",
}


def recorded(name: str) -> dict[str, str]:
    lines = (HERE / f"{name}.env").read_text().splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def around(
    environ: Mapping[str, str], slots: int | None = None, files: Mapping[str, str] | None = None
) -> Surroundings:
    known = {**FILES, **(files or {})}

    def read(path: str) -> str:
        if path not in known:
            raise FileNotFoundError(2, "No such file or directory", path)
        return known[path]

    return Surroundings(environ, read, slots)


RANKS = {
    "mpich": ("mpiexec", 3, 4, 1, 2),
    "mpich_in_slurm": ("mpiexec", 3, 4, 1, 2),
    "openmpi": ("mpiexec", 3, 4, 1, 2),
    "openmpi_in_slurm": ("mpiexec", 3, 4, 1, 2),
    "prun": ("mpiexec", 3, 1, 3, 1),
    "slurm_srun": ("srun", 5, 7, 1, 3),
    "slurm_pmi2": ("srun", 5, 7, 1, 3),
    "slurm_pmix": ("srun", 5, 7, 1, 3),
    "slurm_cray": ("PALS's mpiexec", 5, 7, 1, 3),
    "slurm_shell": ("srun", 0, 1, 0, 1),
    "jsrun": ("jsrun", 3, 4, 1, 2),
    "pals": ("PALS's mpiexec", 3, 4, 1, 2),
    "flux_run": ("flux run", 5, 7, 1, 4),
}


@pytest.mark.parametrize("name", RECORDED)
def test_ranks(name: str) -> None:
    found = find_rank(recorded(name))
    if name not in RANKS:
        assert found is None
        return
    assert found is not None
    numbers = found.numbers
    assert (found.launcher, numbers.rank, numbers.size, numbers.local_rank, numbers.local_size) == RANKS[name]
    assert found.alone == (name == "slurm_shell")


ALLOCATIONS = {
    "slurm_batch": ("Slurm's job 4242", "n01:4 n02:4 n03:4 n7:4 g1:3", SRUN),
    "slurm_interactive": ("Slurm's job 4243", "n1:4 n2:4", SRUN),
    "slurm_shell": ("Slurm's job 4244", "n1:4 n2:4", SRUN),
    "lsf_batch": ("LSF's job 1234", "h1:4 h2:2", BLAUNCH),
    "lsf_csm": ("LSF's job 1235", "c01n02:2 c01n03:2", BLAUNCH),
    "pbs": ("PBS's job 99.head", "p1:2 p2:2", SSH),
    "sge": ("SGE's job 512", "e1:4 e2:2", SSH),
    "flux_batch": (
        "Flux",
        "",
        """sh -c 'exec flux exec -r "$(flux overlay lookup "$0")" sh -c "$1"' {host} {command}""",
    ),
    "mpijob_openmpi": (
        "Kubernetes' MPIJob",
        "train-worker-0.train.ns.svc:4 train-worker-1.train.ns.svc:2",
        SSH,
    ),
    "mpijob_intel": (
        "Kubernetes' MPIJob",
        "train-worker-0.train.ns.svc:4 train-worker-1.train.ns.svc:2",
        SSH,
    ),
    "mpijob_mpich": (
        "Kubernetes' MPIJob",
        "train-worker-0.train.ns.svc:4 train-worker-1.train.ns.svc:1",
        SSH,
    ),
    "mpijob_v1": (
        "Kubernetes' MPIJob",
        "train-worker-0.train.ns.svc:4 train-worker-1.train.ns.svc:1",
        "/opt/kube/kubectl exec -i {host} -- sh -c {command}",
    ),
    "kubernetes_job": ("a pod of Kubernetes", "", "kubectl exec -i {host} -- sh -c {command}"),
    "hydra_host_file": ("HYDRA_HOST_FILE=/home/u/hosts", "m1:2 m2:1", SSH),
    "sagemaker": ("SageMaker", "algo-1:1 algo-2:1", SSH),
}


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in RANKS or name in ALLOCATIONS])
def test_allocations(name: str) -> None:
    found = find_allocation(around(recorded(name)))
    if name not in ALLOCATIONS:
        assert found is None
        return
    assert found is not None
    assert (found.system, " ".join(map(str, found.hosts)), found.agent) == ALLOCATIONS[name]
    assert found.interface == ("eth0" if name == "sagemaker" else "")
    submitted = "PBS starts jobs in the home directory; this job was submitted in /home/u/train"
    assert found.note == (submitted if name == "pbs" else "")


@pytest.mark.parametrize("name", RECORDED)
def test_every_system_is_looked_for(name: str) -> None:
    """Without a mark the detectors are asked only for hosts of ``-H`` or ``--hostfile``."""
    environ = recorded(name)
    rank = find_rank(environ)
    if rank is not None:
        assert has_marks(environ) or rank.numbers == read_rank_env(environ)
    else:
        allocation = find_allocation(around(environ))
        hosts = allocation is not None and allocation.hosts != ()
        assert has_marks(environ) == (hosts or explain_torchrun(environ) is not None)


def test_a_plain_host_has_no_mark() -> None:
    plain = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "2", "OMPI_MCA_btl": "self,sm", "RANK": "1"}
    assert not has_marks(plain)
    assert find_rank(plain) is None
    assert find_allocation(around(plain)) is None


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292", "batch", ""])
def test_a_step_that_is_no_step_of_srun_has_no_ranks(step: str) -> None:
    assert find_rank({**recorded("slurm_srun"), "SLURM_STEP_ID": step, "SLURM_STEPID": step}) is None


def test_the_old_name_of_a_step() -> None:
    environ = recorded("slurm_srun")
    del environ["SLURM_STEP_ID"]
    assert find_rank(environ) == find_rank(recorded("slurm_srun"))


@pytest.mark.parametrize(
    ("setting", "value"), [("PMIX_MCA_gds", "hash"), ("PMI_MMAP_SYNC_WAIT_TIME", "300"), ("PMI_NO_FORK", "1")]
)
def test_settings_of_pmi_make_no_rank(setting: str, value: str) -> None:
    assert find_rank({**recorded("slurm_batch"), setting: value}) is None


def test_a_step_of_one_task_with_pmi_is_a_rank_for_certain() -> None:
    found = find_rank({**recorded("slurm_shell"), "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.4244.0"})
    assert found is not None
    assert not found.alone


def test_a_batch_script_submitted_in_a_step_is_no_rank() -> None:
    environ = {**recorded("slurm_shell"), **recorded("slurm_batch")}
    assert environ["SLURM_STEP_ID"] == "0"
    assert find_rank(environ) is None


@pytest.mark.parametrize(
    ("changes", "local_size"),
    [
        ({"SLURM_GTIDS": ""}, 3),
        ({"SLURM_GTIDS": "", "SLURM_NODEID": "0"}, 4),
        ({"SLURM_GTIDS": "", "SLURM_STEP_TASKS_PER_NODE": "?"}, 7),
        ({"SLURM_GTIDS": "", "SLURM_NODEID": "5"}, 7),
    ],
)
def test_ranks_of_a_slurm_node(changes: dict[str, str], local_size: int) -> None:
    found = find_rank({**recorded("slurm_srun"), **changes})
    assert found is not None
    assert found.numbers == RankEnv("unknown", 5, 7, 1, local_size)


_FIVE = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NTASKS": "5"}


@pytest.mark.parametrize(
    ("changes", "hosts"),
    [
        ({"SLURM_TASKS_PER_NODE": ""}, "n1:4 n2:4"),
        ({"SLURM_TASKS_PER_NODE": "", "SLURM_CPUS_PER_TASK": "16"}, "n1:1 n2:1"),
        ({"SLURM_JOB_CPUS_PER_NODE": ""}, "n1:3 n2:3"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "5", "SLURM_NTASKS": "5"}, "n1:5"),
        (
            {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS": "5"},
            "n1:2 n2:2 n3:1",
        ),
        (
            {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4,1(x2)", "SLURM_NTASKS": "5"},
            "n1:3 n2:1 n3:1",
        ),
        ({"SLURM_TASKS_PER_NODE": "3(x2)", "SLURM_NTASKS": "1"}, "n1:3 n2:3"),  # of no job
    ],
)
def test_slots_of_slurm(changes: dict[str, str], hosts: str) -> None:
    found = find_allocation(around({**recorded("slurm_shell"), **changes}, slots=3))
    assert found is not None
    assert " ".join(map(str, found.hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],g1", ["n01", "n02", "n03", "n7", "g1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1-2]-ib,m3.cluster", ["n1-ib", "n2-ib", "m3.cluster"]),
        ("r[0-1]n[1,3]", ["r0n1", "r0n3", "r1n1", "r1n3"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text", ["n[", "n[1", "n1]", "n[]", "n[a-b]", "n[3-1]", "n[1-]", "n1,,n2", "-n", "n[1 ]"]
)
def test_malformed_host_lists(text: str) -> None:
    with pytest.raises(HostsError) as caught:
        expand_hostlist(text)
    assert str(caught.value) == f"cannot read Slurm's list {text!r}"


@pytest.mark.parametrize(
    ("text", "counts"), [("", []), ("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3)", [1, 2, 2, 2])]
)
def test_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["4(x", "x", "4(2)", "4,,3", "4 "])
def test_malformed_counts(text: str) -> None:
    with pytest.raises(HostsError, match=re.escape(f"cannot read Slurm's list {text!r}")):
        expand_counts(text)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30), st.integers(1, 4)), min_size=1, max_size=5)
)
def test_ranges_of_slurm(ranges: list[tuple[int, int, int]]) -> None:
    text = ",".join(f"{first:0{width}}-{first + more:0{width}}" for first, more, width in ranges)
    numbers = [f"{first + k:0{width}}" for first, more, width in ranges for k in range(more + 1)]
    assert expand_hostlist(f"n[{text}]-ib") == [f"n{number}-ib" for number in numbers]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), max_size=6))
def test_repeated_counts(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


RANKFILE = "/home/u/.lsbatch/1235.hostfile"


@pytest.mark.parametrize(
    ("lines", "csm", "hosts"),
    [
        ("batch5\nc1\nc2\n", True, "c1:1 c2:1"),
        ("batch5\nc1\nc1\nc2\nc2\n", False, "c1:2 c2:2"),
        ("c1\nc2\nc3\n", False, "c1:1 c2:1 c3:1"),
        ("c1\nc1\nc2\nc2\n", True, "c1:2 c2:2"),
        ("c1\n", True, "c1:1"),
    ],
)
def test_the_launch_node_of_lsf_takes_no_ranks(lines: str, csm: bool, hosts: str) -> None:
    environ = recorded("lsf_csm")
    if not csm:
        del environ["CSM_ALLOCATION_ID"]
    found = find_allocation(around(environ, files={RANKFILE: lines}))
    assert found is not None
    assert " ".join(map(str, found.hosts)) == hosts


def test_lsf_without_files() -> None:
    found = find_allocation(around({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4 h2 2 h1 1"}))
    assert found is not None
    assert " ".join(map(str, found.hosts)) == "h1:5 h2:2"


@pytest.mark.parametrize(
    ("script", "agent"),
    [
        (
            KUBEXEC % " --container main",
            "/opt/kube/kubectl exec -i {host} --container main -- sh -c {command}",
        ),
        ("#!/bin/sh\nexec mine $*\n", "/etc/mpi/kubexec.sh {host} {command}"),
    ],
)
def test_the_script_of_an_mpijob(script: str, agent: str) -> None:
    found = find_allocation(around(recorded("mpijob_v1"), files={"/etc/mpi/kubexec.sh": script}))
    assert found is not None
    assert found.agent == agent


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "pbs",
            {"PBS_NODEFILE": "/gone"},
            "PBS_NODEFILE names the hosts of this job, but /gone cannot be read (No such file or directory):"
            " give the hosts with -H or --hostfile",
        ),
        (
            "mpijob_openmpi",
            {"OMPI_MCA_orte_default_hostfile": "/gone"},
            "this pod is the launcher of an MPIJob, but /gone cannot be read (No such file or directory):"
            " give the hosts with -H or --hostfile",
        ),
        ("pbs", {"PBS_NODEFILE": "/empty"}, "/empty names no host: give the hosts with -H or --hostfile"),
        (
            "sge",
            {"PE_HOSTFILE": "/empty", "NSLOTS": "0"},
            "/empty names no host: give the hosts with -H or --hostfile",
        ),
        (
            "sge",
            {"PE_HOSTFILE": "/bad"},
            "/bad, line 2: 'e2 x q': expected a host and its slots: give the hosts with -H or --hostfile",
        ),
        (
            "sge",
            {"NSLOTS": "9"},
            "/opt/sge/spool/active_jobs/512.1/pe_hostfile has 6 slots, but NSLOTS=9:"
            " give the hosts with -H or --hostfile",
        ),
        (
            "lsf_batch",
            {"LSB_DJOB_HOSTFILE": "", "LSB_MCPU_HOSTS": "h1 4 h2"},
            "cannot read LSB_MCPU_HOSTS='h1 4 h2': give the hosts with -H or --hostfile",
        ),
        (
            "sagemaker",
            {"SM_HOSTS": "algo"},
            "cannot read SM_HOSTS='algo': give the hosts with -H or --hostfile",
        ),
        ("sagemaker", {"SM_HOSTS": "[]"}, "cannot read SM_HOSTS='[]': give the hosts with -H or --hostfile"),
        (
            "sagemaker",
            {"SM_CURRENT_HOST": "algo-2"},
            "SageMaker runs this program on every host: start the job on algo-1 only, not on algo-2,"
            " or choose other hosts: give the hosts with -H or --hostfile",
        ),
        (
            "hydra_host_file",
            {"HYDRA_HOST_FILE": "/bad"},
            "/bad, line 1: 'e1 4 q': '4' is unknown: expected h slots=2, h:2 or h:"
            " give the hosts with -H or --hostfile",
        ),
    ],
)
def test_hosts_that_cannot_be_read(name: str, changes: dict[str, str], message: str) -> None:
    files = {"/empty": "\n", "/bad": "e1 4 q\ne2 x q\n"}
    with pytest.raises(HostsError) as caught:
        find_allocation(around({**recorded(name), **changes}, files=files))
    assert str(caught.value) == message


def test_functions_have_arguments_in_place_of_flags() -> None:
    found = replace(around({**recorded("pbs"), "PBS_NODEFILE": "/gone"}), name_of=argument_of)
    with pytest.raises(HostsError, match=r"give the hosts with hosts or hostfile$"):
        find_allocation(found)


def test_slots_of_sagemaker() -> None:
    environ = recorded("sagemaker")
    for changes, slots, expected in (
        ({"SM_NUM_GPUS": "8"}, None, 8),
        ({"SM_NUM_GPUS": "8"}, 2, 2),
        ({"SM_NUM_GPUS": "0"}, None, 1),
    ):
        found = find_allocation(around({**environ, **changes}, slots))
        assert found is not None
        assert {host.slots for host in found.hosts} == {expected}


def test_a_pod_of_an_indexed_job_is_told_what_to_use() -> None:
    assert explain_pod_of_job(recorded("kubernetes_job")) == (
        "this is pod 2 of an indexed Job of Kubernetes, which is no rank: use an MPIJob, give the pods with"
        " -H, or start ranks in this pod alone with -n N"
    )
    assert explain_pod_of_job(recorded("mpijob_v1")) is None


def test_torchrun_is_refused() -> None:
    environ = recorded("torchrun")
    assert explain_torchrun(environ) == (
        "torchrun has started this process (RANK=3), and MPI does not know it: start the script with pyhvdrun"
        " alone, e.g. pyhvdrun -n 4 train.py"
    )
    assert explain_torchrun({"RANK": "3", "WORLD_SIZE": "4"}) is None
