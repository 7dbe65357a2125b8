"""Start mpiexec on the head of a bed, with ranks on its hosts.

mpiexec calls a launch agent instead of ssh: a script that enters the host's namespaces. Knows nothing of
what the ranks run; tests.mpi.launch finds and ends a job's processes, also those on hosts.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.bed import Bed, Host
from tests.mpi.launch import ROOT, mpi_version, mpiexec_path

_AGENT = """#!/bin/sh
# AGENT [-x] HOST COMMAND...: hydra passes ssh's -x; the command is for a shell.
[ "$1" != -x ] || shift
host=$1
shift
# Hosts share files. Open MPI's daemons name a folder by their process id, which two hosts may both have.
TMPDIR=${TMPDIR:-/tmp}/$host
export TMPDIR
mkdir -p "$TMPDIR"
case $host in
{cases}
*) echo "no host $host on this bed" >&2; exit 1;;
esac
"""
# For a bed without IPv4, which hydra's own connections need: its proxies stay on the head, and the ranks
# enter their hosts.
_STAY = """#!/bin/sh
[ "$1" != -x ] || shift
BED_HOST=$1
export BED_HOST
shift
exec sh -c "$*"
"""
_ENTER = """#!/bin/sh
case $BED_HOST in
{cases}
*) echo "no host $BED_HOST on this bed" >&2; exit 1;;
esac
"""


class Site:
    """Starts jobs on a bed.

    Parameters
    ----------
    made : Bed
        The bed.
    folder : Path
        The folder for the launch agents.
    """

    def __init__(self, made: Bed, folder: Path) -> None:
        self.bed = made
        self._folder = folder

    def command(self, ranks: Sequence[int], *argv: str) -> list[str]:
        """Return the command line that runs `argv` on the first hosts, with ``ranks[i]`` ranks on host i."""
        path = mpiexec_path()
        assert path is not None
        hosts = list(self.bed.hosts.values())[: len(ranks)]
        slots = ",".join(f"{host.name}:{count}" for host, count in zip(hosts, ranks, strict=True))
        start = self._openmpi if mpi_version().startswith("Open MPI") else self._hydra
        command = start(hosts, slots, ["-n", str(sum(ranks)), *argv])
        # The ranks start Python by name, too.
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return self.bed.head.command(["env", f"--chdir={ROOT}", f"PATH={folders}", path, *command])

    def _hydra(self, hosts: Sequence[Host], slots: str, program: list[str]) -> list[str]:
        options = ["-launcher", "rsh", "-hosts", slots, "-wdir", str(ROOT)]
        if self.bed.ipv4:
            return [*options, "-launcher-exec", self._agent(hosts), *program]
        enter = _script(self._folder / "enter", _ENTER, _cases(hosts, [], '"$@"'))
        options += ["-launcher-exec", _script(self._folder / "stay", _STAY), "-localhost", "127.0.0.1"]
        return [*options, "-env", "UCX_TCP_AF_PRIO", "inet6,inet", *program[:2], enter, *program[2:]]

    def _openmpi(self, hosts: Sequence[Host], slots: str, program: list[str]) -> list[str]:
        # Daemons do not detach, so that they end with mpiexec; it starts all of them at the same time.
        options = ["--leave-session-attached", "--prtemca", "plm", "ssh"]
        options += ["--prtemca", "plm_ssh_agent", self._agent(hosts)]
        options += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
        options += ["--prtemca", "plm_ssh_num_concurrent", str(len(hosts) + 1)]
        options += ["--host", slots, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--wdir", str(ROOT)]
        options += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "mpi_yield_when_idle", "1"]
        return [*options, *program]

    def _agent(self, hosts: Sequence[Host]) -> str:
        return _script(self._folder / "agent", _AGENT, _cases(hosts, ["sh", "-c"], '"$*"'))


def _cases(hosts: Iterable[Host], shell: list[str], arguments: str) -> str:
    """Return a line of ``case`` for each host: it runs the arguments there."""
    lines = []
    for host in hosts:
        inside = shlex.join(host.command(["env", f"--chdir={ROOT}", *shell]))
        lines.append(f"{host.name}) exec {inside} {arguments};;")
    return "\n".join(lines)


def _script(path: Path, text: str, cases: str = "") -> str:
    path.write_text(text.replace("{cases}", cases))
    path.chmod(0o755)
    return str(path)
