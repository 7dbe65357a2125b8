"""A Ray cluster on simulated hosts: the head has no CPUs for ranks, and each other host is a node.

The hosts share files, so each gets a folder of its own for Ray's sockets, mounted on /tmp/ray.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bed import Bed, Host, bed, daemon_environment, start_daemon
from tests.ray.conftest import ROOT, STORE
from tests.waiting import wait_until

_PORT = 6379
_UP_S = 120.0
_CPUS = 2
_RAY = Path("/tmp/ray")


class BedCluster:
    """A cluster whose nodes run until the stack closes.

    Parameters
    ----------
    made : Bed
        The bed, whose hosts are the nodes.
    folder : Path
        The folder of Ray's files and logs.
    stack : ExitStack
        Ends the nodes.
    """

    def __init__(self, made: Bed, folder: Path, stack: ExitStack) -> None:
        self._bed = made
        self._folder = folder
        self._env = daemon_environment(without="RAY_") | {"RAY_AUTH_MODE": "disabled"}
        self.address = f"{made.head.address}:{_PORT}"
        self._start(
            made.head, stack, "--head", f"--port={_PORT}", "--num-cpus=0", "--include-dashboard=false"
        )
        for host in made.hosts.values():
            self._start(host, stack, f"--address={self.address}", f"--num-cpus={_CPUS}")

    def _start(self, host: Host, stack: ExitStack, *arguments: str) -> None:
        own = self._folder / host.name
        own.mkdir()
        host.do("mkdir", "-p", str(_RAY))
        host.do("mount", "--bind", str(own), str(_RAY))
        ray = str(Path(sys.executable).parent / "ray")
        options = [f"--node-ip-address={host.address}", f"--object-store-memory={STORE}"]
        command = [ray, "start", "--block", "--disable-usage-stats", *options, *arguments]
        node = start_daemon(host, command, self._env, self._folder / f"{host.name}.log", stack, 30)
        if "--head" in arguments:
            wait_until(lambda: node.poll() is not None or b"runtime started" in self.log(host), _UP_S)
            assert node.poll() is None, self.log(host).decode()

    def log(self, host: Host) -> bytes:
        """Return what a host's node has said."""
        return (self._folder / f"{host.name}.log").read_bytes()

    def run(self, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run this Python on the head, with output and errors in one text."""
        return subprocess.run(
            self._bed.head.command(["env", f"--chdir={ROOT}", sys.executable, *arguments]),
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )


@contextmanager
def bed_cluster(names: Sequence[str], folder: Path) -> Iterator[BedCluster]:
    """Yield a cluster on hosts of these names; afterwards, end it and the hosts."""
    (folder / "bed").mkdir()
    with bed(names, folder / "bed") as made, ExitStack() as stack:
        yield BedCluster(made, folder, stack)
