"""``python -m pyhvd.job.mpi.openmpi.rank_proxy``: what mpiexec's daemon starts as a rank; by pyhvd.spark.run alone.

The rank itself is a child of its own Spark task, with that executor's environment, limits and lifetime. What
mpiexec has given to its stand-in for it, the variables by which it finds MPI's daemon, goes by the driver to
that task; a rank with PMI-1 speaks to the daemon through the task, the driver and the stand-in. The stand-in
ends when the driver says so, with the rank's exit code.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from pyhvd.job.job_key import VARIABLES, call_driver
from pyhvd.job.messages import Exit, Pmi, RankProxy, decode_from_driver, encode
from pyhvd.job.mpi.pmi import MAX_LINE
from pyhvd.job.mpi.rank_env import OTHER, find_place
from pyhvd.transport.tcp.connection import Connection
from pyhvd.transport.tcp.session import ChannelError

HOST = "_PYHVD_SPARK_HOST"
"""The variable with this host's name as mpiexec knows it."""
PYTHON = "_PYHVD_SPARK_PYTHON"
"""The variable with the Python of the stand-ins of this host."""

_CHUNK = 1 << 16
# Of a shell's or a directory's making; where programs and libraries are is each executor's business; and no
# rank is told the key.
_NOT_PASSED = VARIABLES | {
    "PWD", "OLDPWD", "SHLVL", "_", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PMI_FD",
}  # fmt: skip


def added_variables(environ: Mapping[str, str], of_daemon: Mapping[str, str]) -> dict[str, str]:
    """Return what mpiexec has added to, or changed in, the environment that its daemon was started with."""
    return {
        name: value
        for name, value in environ.items()
        if of_daemon.get(name) != value and name not in _NOT_PASSED
    }


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if b"=" in entry)


def introduce(environ: Mapping[str, str], of_daemon: Mapping[str, str]) -> RankProxy:
    """Return what to tell the driver.

    Raises
    ------
    ChannelError
        No mpiexec has started this process.
    """
    place = find_place(environ)
    if place is None or place.launcher == OTHER:
        raise ChannelError("this program is started by an mpiexec of Open MPI or MPICH, not by hand")
    added = added_variables(environ, of_daemon)
    return RankProxy(environ.get(HOST, ""), place.rank, place.local_rank, added, "PMI_FD" in environ)


class Relay:
    """Lines of PMI-1 between the driver and mpiexec's daemon, until the driver gives an exit code.

    Parameters
    ----------
    driver : Connection
        To the driver.
    daemon : socket.socket or None
        The line to the daemon; None where MPI does not use PMI-1.
    """

    def __init__(self, driver: Connection, daemon: socket.socket | None) -> None:
        self._driver = driver
        self._daemon = daemon
        self._begun = b""

    def run(self) -> int:
        """Return the exit code; 1 when the driver is gone."""
        while self._driver.open:
            sources: list[Connection | socket.socket] = [self._driver]
            if self._daemon is not None:
                sources.append(self._daemon)
            ready, _, _ = select.select(sources, [self._driver] if self._driver.wants_write else [], [])
            self._driver.pump_out()
            if self._daemon in ready:
                self._hear_daemon()
            for record in self._driver.pump_in():
                message = decode_from_driver(record)
                if isinstance(message, Exit):
                    return message.code
                if isinstance(message, Pmi) and self._daemon is not None:
                    self._daemon.sendall(message.line.encode())
        return 1

    def _hear_daemon(self) -> None:
        assert self._daemon is not None
        data = self._daemon.recv(_CHUNK)
        if not data:  # the rank is told by its MPI, the driver by mpiexec
            self._daemon = None
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > 2 * MAX_LINE:
            raise ChannelError("mpiexec's daemon does not speak PMI-1")
        for line in lines:
            self._driver.send(encode(Pmi(line.decode(errors="replace") + "\n")))


def main() -> int:
    """Stand for one rank."""
    descriptor = os.environ.get("PMI_FD")
    try:
        said = introduce(os.environ, read_environment(os.getppid()))
        driver = call_driver()
        driver.send(encode(said))
        return Relay(driver, None if descriptor is None else socket.socket(fileno=int(descriptor))).run()
    except (ChannelError, OSError) as exc:
        print(f"pyhvd: stand-in: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
