"""Simulate hosts by namespaces: the hosts share a network, and can crash, freeze and lose the network.

1. A host has its own network, host name, IPC, process ids, /dev/shm and /etc/hosts. All hosts share files.
2. Tests start jobs on the head, which shares the tests' process ids, so that tests can signal its processes.
3. No packet leaves the bed.
4. TCP runs reno: the kernel's default may be BBR, whose pacing hides what the links do.
5. If the process that made the bed dies, the kernel ends every process in the bed.

A bed needs root, iproute2 and util-linux; links of limited rate also need the kernel's tbf queue.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# The networks of NIC k; the last number is the host's, 1 for the head.
_IPV4 = "10.99.{nic}.{number}/24"
_IPV6 = "fd99:0:0:{nic}::{number:x}/64"
# The same after a restart: other hosts remember it.
_MAC = "02:99:00:00:{nic:02x}:{number:02x}"
# How long a packet may wait for its turn on a link of limited rate; longer queues lose packets.
_QUEUE_MS = 20
_THAW_S = 5.0
# A process dies with its parent: nsenter with the tests, and the host's process with nsenter.
_MORTAL = ("setpriv", "--pdeathsig", "KILL", "--")
_TOOLS = ("bridge", "ip", "nsenter", "setpriv", "unshare", "bash")

# bash reaps orphans, as the first process of a host must.
_FIRST_PROCESS = """
hostname "$1"
[ "$$" != 1 ] || mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
echo ready
[ "$$" = 1 ] || exec sleep infinity
while :; do sleep 3600 & wait $!; done
"""


def why_not(rate: str = "") -> str:
    """Return the reason why this machine cannot have a bed, or an empty string.

    Parameters
    ----------
    rate : str
        Also ask for links of this rate, such as ``1gbit``.
    """
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in (*_TOOLS, *(["tc"] if rate else [])) if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with bed(["probe"]) as made:
            try:
                made.limit(rate)
            except OSError as exc:
                return f"no links of limited rate here: {exc}"
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
        Its address on the bed's first network: IPv4, or IPv6 in a bed without IPv4.
    addresses : tuple of tuple of str
        For each NIC, its addresses with their prefix lengths.
    """

    name: str
    address: str
    addresses: tuple[tuple[str, ...], ...]
    _hosts: Path
    _options: tuple[str, ...]
    _unshare: subprocess.Popen[str] | None = None
    _first: int = 0
    _space: int = 0

    def start(self) -> None:
        """Make the host's namespaces, and start its first process."""
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
        """Return the command line that runs a command on this host."""
        spaces = ["--net", "--uts", "--ipc", "--mount"] + (["--pid"] if "--fork" in self._options else [])
        return [*_MORTAL, "nsenter", f"--target={self._first}", *spaces, "--", *_MORTAL, *arguments]

    def do(self, *arguments: str, check: bool = True) -> None:
        """Run a short command on this host; the error of a failure contains its stderr."""
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
        """The process id of the host's first process."""
        return self._first

    def processes(self) -> list[int]:
        """Return the host's processes, with the processes that only wait for one of them."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with suppress(OSError):
                    if (process / "ns/net").stat().st_ino == self._space:
                        found.append(int(process.name))
        return found

    def freeze(self) -> None:
        """Stop all processes of the host, as if its processors stopped; its network still answers."""
        stopped: set[int] = set()
        while new := set(self.processes()) - stopped:  # a process may have started another meanwhile
            _signal_all(new, signal.SIGSTOP)
            stopped |= new

    def thaw(self) -> None:
        """Undo :meth:`freeze`."""
        until = time.monotonic() + _THAW_S
        # Again, since nsenter stops itself while its child is stopped.
        while stopped := [process for process in self.processes() if _is_stopped(process)]:
            if time.monotonic() > until:
                raise OSError(f"processes {stopped} on {self.name} are still stopped")
            _signal_all(stopped, signal.SIGCONT)
            time.sleep(0.01)

    def crash(self) -> None:
        """Kill all processes of the host; the kernel closes their connections, and the peers notice."""
        if self._unshare is None:
            return
        if self._space:
            self.freeze()  # no process may see another one's end
            _signal_all(self.processes(), signal.SIGKILL)
        self._unshare.kill()  # its child dies with it
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
    """The hosts, and the networks between them.

    Parameters
    ----------
    names : sequence of str
        Names of the hosts, without the head.
    hosts : Path
        The file to write as every host's /etc/hosts.
    nics : int
        The number of networks; NIC k of every host is on network k.
    ipv4 : bool
        Whether hosts have IPv4 addresses beside IPv6.
    """

    def __init__(self, names: Sequence[str], hosts: Path, nics: int = 1, ipv4: bool = True) -> None:
        forms = (_IPV4, _IPV6) if ipv4 else (_IPV6,)

        def host(name: str, number: int, options: tuple[str, ...]) -> Host:
            found = tuple(tuple(form.format(nic=nic, number=number) for form in forms) for nic in range(nics))
            return Host(name, found[0][0].split("/")[0], found, hosts, options)

        self.head = host("head", 1, ())
        self.hosts = {
            name: host(name, number, ("--pid", "--fork", "--kill-child"))
            for number, name in enumerate(names, 2)
        }
        self.ipv4 = ipv4
        self._nics = nics
        lines = [f"{host.address} {host.name}" for host in (self.head, *self.hosts.values())]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(self) -> None:
        """Start all hosts, and connect them."""
        self.head.start()
        for nic in range(self._nics):
            # Without an address of its own, a bridge has one of its ports', and another when ports change.
            address = _MAC.format(nic=nic, number=1)
            self.head.do("ip", "link", "add", _bridge(nic), "address", address, "type", "bridge")
            _bring_up(self.head, _bridge(nic), nic)
        for host in self.hosts.values():
            self.start_host(host)

    def start_host(self, host: Host) -> None:
        """Start a host, or restart a crashed one with the same name and addresses, its links unlimited."""
        host.start()
        number = list(self.hosts).index(host.name) + 2
        for nic in range(self._nics):
            port = _port(host, nic)
            # The kernel removes a crashed host's link too, but later.
            self.head.do("ip", "link", "delete", "dev", port, check=False)
            self.head.do(
                *("ip", "link", "add", "name", port, "type", "veth"),
                *("peer", "name", f"eth{nic}", "address", _MAC.format(nic=nic, number=number)),
                *("netns", str(host.first)),
            )
            self.head.do("ip", "link", "set", "dev", port, "master", _bridge(nic), "up")
            _bring_up(host, f"eth{nic}", nic)

    def limit(self, rate: str, nics: Sequence[int] | None = None) -> None:
        """Limit links, in each direction, to a rate such as ``1gbit``; "" ends the limits.

        Parameters
        ----------
        rate : str
            The rate.
        nics : sequence of int, optional
            The networks whose links are limited; by default all.
        """
        for host in self.hosts.values():
            self.limit_host(host, rate, nics)

    def limit_host(self, host: Host, rate: str, nics: Sequence[int] | None = None) -> None:
        """Limit one host's links, in each direction."""
        for nic in range(self._nics) if nics is None else nics:
            for place, device in ((host, f"eth{nic}"), (self.head, _port(host, nic))):
                if rate:
                    # A burst holds several of the largest packets (64 KiB), and what 10 Gbit/s is in 0.4 ms.
                    queue = ("tbf", "rate", rate, "burst", "512kb", "latency", f"{_QUEUE_MS}ms")
                    place.do("tc", "qdisc", "replace", "dev", device, "root", *queue)
                else:
                    place.do("tc", "qdisc", "delete", "dev", device, "root", check=False)

    def cut_off(self, host: Host) -> None:
        """Drop all packets to and from a host, without notice to either side."""
        # The port stays a member of the bridge: otherwise its incoming packets would still reach the head.
        self._set_ports(host, "0")

    def rejoin(self, host: Host) -> None:
        """Undo :meth:`cut_off`."""
        self._set_ports(host, "3")

    def _set_ports(self, host: Host, state: str) -> None:
        for nic in range(self._nics):
            self.head.do("bridge", "link", "set", "dev", _port(host, nic), "state", state)

    def separate(self, nic: int, separated: bool = True) -> None:
        """Drop all packets between the hosts on network `nic`, but none to or from the head; or undo it."""
        for host in self.hosts.values():
            state = "on" if separated else "off"
            self.head.do("bridge", "link", "set", "dev", _port(host, nic), "isolated", state)

    def power_off(self, host: Host) -> None:
        """End a host without notice to the others."""
        self.cut_off(host)
        host.crash()

    def close(self) -> None:
        """End all hosts, and remove the network."""
        for host in (*self.hosts.values(), self.head):
            host.crash()


def daemon_environment(without: str) -> dict[str, str]:
    """Return this process's variables but those with a prefix; what daemons start finds pyhvd."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    root = str(Path(__file__).resolve().parents[1])
    return kept | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start_daemon(
    host: Host, command: Sequence[str], env: Mapping[str, str], log: Path, stack: ExitStack, seconds: float
) -> subprocess.Popen[bytes]:
    """Start a daemon on a host, with its output in a file; the stack ends it, and waits for some seconds."""
    file = stack.enter_context(log.open("wb"))
    daemon = subprocess.Popen(
        host.command(command), env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
    )
    stack.callback(daemon.wait, seconds)
    stack.callback(daemon.terminate)
    return daemon


def _bridge(nic: int) -> str:
    return f"bed{nic}"


def _port(host: Host, nic: int) -> str:
    """Return the head's end of a host's link."""
    return f"{host.name}.{nic}"


def _bring_up(host: Host, device: str, nic: int) -> None:
    for address in host.addresses[nic]:
        # Without duplicate detection, an IPv6 address is usable at once.
        options = ("nodad",) if ":" in address else ()
        host.do("ip", "address", "add", address, "dev", device, *options)
    host.do("ip", "link", "set", device, "up")


@contextmanager
def bed(names: Sequence[str], folder: Path | None = None, nics: int = 1, ipv4: bool = True) -> Iterator[Bed]:
    """Yield a bed with hosts of these names; afterwards, end the hosts and all their processes."""
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = Bed(names, place / "hosts", nics, ipv4)
        stack.callback(made.close)
        made.start()
        yield made
