"""Hosts made of namespaces: they have a network of their own, and can crash, freeze and be cut off.

A host has network, host name, IPC, process ids, /dev/shm and /etc/hosts of its own; files it shares with
everybody. The head, where a job is started from, has them too, but for the process ids, so that who starts
something there can signal it. Needs root, iproute2 and util-linux. No packet leaves the bed, and when the
process that made it dies, the kernel ends all that runs on it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.99.0"
_LENGTH = 24
_THAW_S = 5.0
# Dies with who has started it: nsenter with the tests, and what runs on the host with nsenter.
_MORTAL = ("setpriv", "--pdeathsig", "KILL", "--")
_TOOLS = ("bridge", "ip", "nsenter", "setpriv", "unshare", "bash")

# bash collects what is orphaned, as the first process of a host has to.
_FIRST_PROCESS = """
hostname "$1"
[ "$$" != 1 ] || mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
echo ready
[ "$$" = 1 ] || exec sleep infinity
while :; do sleep 3600 & wait $!; done
"""


def why_not() -> str:
    """Return why there can be no bed here; nothing if there can."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with bed(["probe"]):
            return ""
    except (OSError, subprocess.SubprocessError) as exc:
        return f"no namespaces here: {exc}"


@dataclass
class Host:
    """One host of a bed.

    Attributes
    ----------
    name : str
        Its host name.
    address : str
        On the bed's network.
    """

    name: str
    address: str
    _hosts: Path
    _options: tuple[str, ...]
    _unshare: subprocess.Popen[str] | None = None
    _first: int = 0
    _space: int = 0

    def start(self) -> None:
        """Make its namespaces."""
        spaces = ["--net", "--uts", "--ipc", "--mount", *self._options]
        first = ["bash", "-c", _FIRST_PROCESS, "bash", self.name, str(self._hosts)]
        self._unshare = subprocess.Popen(
            [*_MORTAL, "unshare", *spaces, "--", *first],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            self.crash()
            raise OSError(f"host {self.name} did not start")
        self._first = self._unshare.pid
        if "--fork" in self._options:
            children = Path(f"/proc/{self._first}/task/{self._first}/children").read_text()
            self._first = int(children.split()[0])
        self._space = os.stat(f"/proc/{self._first}/ns/net").st_ino

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs another one on this host."""
        spaces = ["--net", "--uts", "--ipc", "--mount"] + (["--pid"] if "--fork" in self._options else [])
        return [*_MORTAL, "nsenter", f"--target={self._first}", *spaces, "--", *_MORTAL, *arguments]

    def do(self, *arguments: str, check: bool = True) -> None:
        """Run a command there that takes no time; what it says is in the error if it fails."""
        done = subprocess.run(
            self.command(arguments),
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if check and done.returncode:
            raise OSError(f"{' '.join(arguments)} on {self.name}: {done.stderr.strip()}")

    @property
    def first(self) -> int:
        """Its first process."""
        return self._first

    def processes(self) -> list[int]:
        """Return the processes that run there, those too that only wait for one there."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with suppress(OSError):
                    if (process / "ns/net").stat().st_ino == self._space:
                        found.append(int(process.name))
        return found

    def freeze(self) -> None:
        """Stop all that runs there, as if the host's processors stood still; its network still answers."""
        stopped: set[int] = set()
        while new := set(self.processes()) - stopped:  # again, for what one of them has started meanwhile
            _signal_all(new, signal.SIGSTOP)
            stopped |= new

    def thaw(self) -> None:
        """Take back :meth:`freeze`."""
        until = time.monotonic() + _THAW_S
        # Again, as nsenter stops itself for as long as it sees what it has started stand still.
        while stopped := [process for process in self.processes() if _is_stopped(process)]:
            if time.monotonic() > until:
                raise OSError(f"processes {stopped} on {self.name} stand still")
            _signal_all(stopped, signal.SIGCONT)
            time.sleep(0.01)

    def crash(self) -> None:
        """End all that runs there; the kernel closes its connections, so that the others hear of it."""
        if self._unshare is None:
            return
        if self._space:
            _signal_all(self.processes(), signal.SIGKILL)
        self._unshare.kill()  # its child goes with it
        self._unshare.wait()
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()
        self._unshare, self._space = None, 0


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _signal_all(processes: set[int] | list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


class Bed:
    """The hosts, and the network that joins them.

    Parameters
    ----------
    names : sequence of str
        Of the hosts beside the head.
    hosts : Path
        Where to write the /etc/hosts of all.
    """

    def __init__(self, names: Sequence[str], hosts: Path) -> None:
        self.head = Host("head", f"{_NETWORK}.1", hosts, ())
        self.hosts = {
            name: Host(name, f"{_NETWORK}.{number}", hosts, ("--pid", "--fork", "--kill-child"))
            for number, name in enumerate(names, 2)
        }
        lines = [f"{host.address} {host.name}" for host in (self.head, *self.hosts.values())]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(self) -> None:
        """Start all hosts, and join them."""
        self.head.start()
        self.head.do("ip", "link", "add", "bed", "type", "bridge")
        self.head.do("ip", "address", "add", f"{self.head.address}/{_LENGTH}", "dev", "bed")
        self.head.do("ip", "link", "set", "bed", "up")
        for host in self.hosts.values():
            self.start_host(host)

    def start_host(self, host: Host) -> None:
        """Start a host, again if it has crashed; it has the same name and address then."""
        host.start()
        # What joined it before it crashed goes by itself, but later.
        self.head.do("ip", "link", "delete", "dev", host.name, check=False)
        self.head.do(
            *("ip", "link", "add", "name", host.name, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(host.first)),
        )
        self.head.do("ip", "link", "set", "dev", host.name, "master", "bed", "up")
        host.do("ip", "address", "add", f"{host.address}/{_LENGTH}", "dev", "eth0")
        host.do("ip", "link", "set", "eth0", "up")

    def cut_off(self, host: Host) -> None:
        """Have all packets to and from a host vanish, unnoticed by either side."""
        # Its port still belongs to the bridge: else what comes in there would reach the head all the same.
        self.head.do("bridge", "link", "set", "dev", host.name, "state", "0")

    def rejoin(self, host: Host) -> None:
        """Take back :meth:`cut_off`."""
        self.head.do("bridge", "link", "set", "dev", host.name, "state", "3")

    def power_off(self, host: Host) -> None:
        """End a host without a word to the others."""
        self.cut_off(host)
        host.crash()

    def close(self) -> None:
        """End all."""
        for host in (*self.hosts.values(), self.head):
            host.crash()


@contextmanager
def bed(names: Sequence[str], folder: Path | None = None) -> Iterator[Bed]:
    """Yield hosts of these names; none is left afterwards, nor anything that ran on them."""
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = Bed(names, place / "hosts")
        stack.callback(made.close)
        made.start()
        yield made
