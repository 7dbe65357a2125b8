"""A Slurm cluster on simulated hosts: slurmctld on the head, and slurmd on each host, with three GPUs each.

The GPUs are device files like /dev/null. Passwords of munge, cgroups and accounting are left out. The cluster
is up about one second after the bed, and leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bed import Bed, Host, bed, daemon_environment, start_daemon, why_not as why_no_bed

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
_GPUS = 3
_UP_S = 60.0
# The real cores are fewer than the nodes' CPUs: config_overrides lets Slurm believe the file.
_CONFIG = """\
ClusterName=bed
SlurmctldHost=head({head})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Without it slurmd looks for cgroups in the bed's own /sys, which has none.
_CGROUP = "CgroupPlugin=cgroup/v1\n"


def why_not() -> str:
    """Return the reason why this machine cannot have a cluster, or an empty string."""
    missing = [tool for tool in _TOOLS if _find(tool) is None]
    if missing:
        return f"no Slurm: {', '.join(missing)} not installed (Debian: slurm-wlm)"
    return why_no_bed()


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


class Cluster:
    """A cluster whose daemons run until the stack closes.

    Parameters
    ----------
    made : Bed
        The bed, whose hosts are the nodes.
    folder : Path
        The folder of Slurm's files, and of the jobs' scripts and output.
    stack : ExitStack
        Ends the daemons.
    """

    def __init__(self, made: Bed, folder: Path, stack: ExitStack) -> None:
        self.bed = made
        self.folder = folder
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folders}:/usr/sbin"}
        self._env = daemon_environment(without="SLURM") | own
        self._configure()
        self._start(made.head, stack, "slurmctld", "-D", "-c")
        for host in made.hosts.values():
            self._start(host, stack, "slurmd", "-D", "-N", host.name)
        wait_for(lambda: self.states() == ["idle"] * len(made.hosts), self.states, _UP_S)

    def _configure(self) -> None:
        nodes = [
            f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=4000 Gres=gpu:{_GPUS}"
            for host in self.bed.hosts.values()
        ]
        text = _CONFIG.format(head=self.bed.head.address, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text(_CGROUP)
        for number in range(_GPUS):
            os.mknod(self.folder / f"gpu{number}", 0o20666, os.makedev(1, 3))
        gres = [
            f"NodeName={name} Name=gpu File={self.folder}/gpu[0-{_GPUS - 1}]\n" for name in self.bed.hosts
        ]
        (self.folder / "gres.conf").write_text("".join(gres))
        (self.folder / "state").mkdir()
        for name in self.bed.hosts:
            (self.folder / f"spool-{name}").mkdir()
            (self.folder / f"tmp-{name}").mkdir()

    def _start(self, host: Host, stack: ExitStack, tool: str, *arguments: str) -> None:
        path = _find(tool)
        assert path is not None
        command = ["env", f"--chdir={self.folder}", path, *arguments]
        log = self.folder / f"{tool}-{host.name}.out"
        start_daemon(host, command, self._env, log, stack, 10)

    def call(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm on the head, in the cluster's folder; return what it prints."""
        done = subprocess.run(
            self.command(*command), env=self._env, capture_output=True, text=True, timeout=120, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on the head; its environment is :attr:`env`."""
        return self.bed.head.command(["env", f"--chdir={self.folder}", *command])

    @property
    def env(self) -> dict[str, str]:
        """The environment of commands, in which they find the cluster."""
        return self._env

    def states(self) -> list[str]:
        """Return the states of all nodes."""
        return self.call("sinfo", "--noheader", "-N", "-o", "%T", check=False).split()

    def submit(self, script: str, *flags: str) -> int:
        """Submit a batch script; return the job's number. Its output is in ``job-<number>.log``."""
        path = self.folder / "job.sbatch"
        path.write_text(f"#!/bin/bash\n{script}\n")
        options = ["--parsable", "--output=job-%j.log", "--open-mode=append", *flags]
        return int(self.call("sbatch", *options, str(path)))

    def log(self, job: int) -> str:
        """Return what a job has printed."""
        path = self.folder / f"job-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: int) -> str:
        """Return the state of a job, such as ``RUNNING``."""
        found = self.call("scontrol", "--oneliner", "show", "job", str(job)).split("JobState=")[1]
        return found.split()[0]

    def wait(self, job: int, seconds: float = 90.0) -> str:
        """Wait until a job has ended, and its nodes are free; return its state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.state(job) in ends, lambda: (self.state(job), self.log(job)), seconds)
        return self.state(job)

    def wait_for_line(self, job: int, text: str, seconds: float = 90.0) -> None:
        """Wait until a job has printed a text."""
        wait_for(lambda: text in self.log(job), lambda: (self.state(job), self.log(job)), seconds)


def wait_for(holds: Callable[[], bool], describe: Callable[[], object], seconds: float) -> None:
    """Look five times a second until a condition holds; fail at the time limit."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, describe()
        time.sleep(0.2)


@contextmanager
def cluster(names: Sequence[str], folder: Path) -> Iterator[Cluster]:
    """Yield a cluster whose nodes have these names."""
    with bed(names, folder) as made, ExitStack() as stack:
        yield Cluster(made, folder, stack)
