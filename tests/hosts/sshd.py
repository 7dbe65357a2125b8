"""An sshd in each host of a bed, and an ssh for the launcher: keys and configuration are the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bed import Bed, Host, bed, why_not as bed_why_not
from tests.many_hosts import Launcher

SSHD = "/usr/sbin/sshd"
_MARK = "PYHVD_TEST_MANY_HOSTS"
_START_S = 20.0
# bash runs it before each command of sshd. On a developer's machine it may start many programs.
_LOGIN_SCRIPT = Path("~/.bashrc").expanduser()
# The default key exchange of OpenSSH 9.2, sntrup761, takes the client 54 ms of CPU; this one takes 1 ms.
_SERVER = """\
Port 22
Port 2201
Port 2202
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
KexAlgorithms curve25519-sha256
SetEnv {mark}={folder} TMPDIR={folder}/tmp
MaxStartups 10
Match LocalPort 2201
    AuthorizedKeysFile none
Match LocalPort 2202
    PubkeyAuthentication no
    PasswordAuthentication yes
    PermitRootLogin yes
"""
_CLIENT = """\
Host *
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    User root
"""

# Their names say why a job cannot start on them. They are ports of one host, which nothing happens to.
_BAD_HOSTS = """\
Host refused.test
    Port 23
Host silent.test
    Port 2203
Host stranger.test
    Port 2201
    HostKeyAlias {name}
Host password.test
    Port 2202
    HostKeyAlias {name}
Host changed.test
    HostKeyAlias changed.test
Host unreachable.test
    HostName 10.98.0.1
Host *.test
    HostName {address}
"""
_SILENT = "import socket, time; server = socket.create_server(('', 2203)); time.sleep(1e6)"


def why_not() -> str:
    """Return why no sshd can run here, or an empty string."""
    if not Path(SSHD).exists():
        return f"no {SSHD}: install openssh-server"
    missing = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Sshd:
    """The sshds of a bed's hosts; ends with the bed.

    Parameters
    ----------
    made : Bed
        The bed.
    folder : Path
        For keys, configuration, logs, and the directory `bin` with the ssh of the launcher.

    Attributes
    ----------
    temporary : Path
        The hosts' directory for temporary files.
    variables : dict of str to str
        The variables of a launcher. One of them marks all processes of its jobs, as sshd marks the agents.
    """

    def __init__(self, made: Bed, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._made = made
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        (folder / "sshd_config").write_text(_SERVER.format(folder=folder, mark=_MARK))
        (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
        self.trust(list(made.hosts))
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.variables = {"PATH": self.path, "TMPDIR": str(self.temporary), _MARK: str(folder)}
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        for host in made.hosts.values():
            self.start(host)

    @property
    def path(self) -> str:
        """The launcher's PATH."""
        return os.pathsep.join([str(self._folder / "bin"), os.environ.get("PATH", os.defpath)])

    def marked(self) -> list[int]:
        """Return the processes of jobs, on all hosts: also agents, and what they start."""
        mark = f"{_MARK}={self._folder}\0".encode()
        return [process for process in processes() if mark in read(process, "environ") + b"\0"]

    def trust(self, names: Sequence[str]) -> None:
        """Make the launcher know the keys of these hosts alone."""
        key = (self._folder / "host_key.pub").read_text()
        (self._folder / "known_hosts").write_text("".join(f"{name} {key}" for name in names))

    def add_bad_hosts(self) -> None:
        """Let ssh know hosts whose names, such as ``refused.test``, say why no job can start on them."""
        host = next(iter(self._made.hosts.values()))
        with open(self._folder / "ssh_config", "a") as config:
            config.write(_BAD_HOSTS.format(name=host.name, address=host.address))
        with open(self._folder / "known_hosts", "a") as known:
            known.write(f"changed.test {(self._folder / 'user_key.pub').read_text()}")
        self._made.head.do("ip", "route", "add", "unreachable", "10.98.0.0/24")
        self._stack.callback(_reap, subprocess.Popen(host.command([sys.executable, "-c", _SILENT])))

    def add_names(self, pattern: str, host: Host) -> None:
        """Let ssh know further names of a host."""
        with open(self._folder / "ssh_config", "a") as config:
            config.write(f"Host {pattern}\n    HostName {host.address}\n    HostKeyAlias {host.name}\n")

    def log(self, host: Host) -> bytes:
        """Return what the sshd of a host has logged."""
        return (self._folder / f"sshd.{host.name}.log").read_bytes()

    def start(self, host: Host) -> None:
        """Start the sshd of a host, and wait until it listens."""
        host.do("mount", "-t", "tmpfs", "tmpfs", "/run")
        host.do("mkdir", "/run/sshd")
        if _LOGIN_SCRIPT.exists():
            host.do("mount", "--bind", "/dev/null", str(_LOGIN_SCRIPT))
        with open(self._folder / f"sshd.{host.name}.log", "ab") as log:
            daemon = subprocess.Popen(
                host.command([SSHD, "-D", "-e", "-f", str(self._folder / "sshd_config")]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(_reap, daemon)
        self._daemons[host.name] = daemon
        until = time.monotonic() + _START_S
        probe = ["bash", "-c", f"exec 3<>/dev/tcp/{host.address}/22"]
        while subprocess.run(
            self._made.head.command(probe), stderr=subprocess.DEVNULL, check=False
        ).returncode:
            assert time.monotonic() < until, f"no sshd on {host.name}"
            time.sleep(0.05)

    def children(self, host: Host) -> list[int]:
        """Return the processes of sshd that serve connections of a host."""
        daemons = {process for process in host.processes() if read(process, "comm").startswith(b"sshd")}
        return [process for process in daemons if state_of(process)[1] in daemons]


def _reap(daemon: subprocess.Popen[bytes]) -> None:
    daemon.kill()
    daemon.wait()


def processes() -> list[int]:
    """Return all processes of this machine."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def read(process: int, name: str) -> bytes:
    """Return a file of /proc about a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:
        return b""


def state_of(process: int) -> tuple[str, int]:
    """Return the state of a process, and its parent; Z and 0 if it has ended."""
    state, parent, *_ = read(process, "stat").rpartition(b")")[2].split() or (b"Z", b"0")
    return state.decode(), int(parent)


@dataclass
class Site:
    """Hosts with an sshd each; the launcher is on the head. Tests of two hosts call them east and west."""

    bed: Bed
    sshd: Sshd

    @property
    def west(self) -> Host:
        return self.bed.hosts["west"]

    def launcher(self, folder: Path, host: Host | None = None, variables: Mapping[str, str] = {}) -> Launcher:
        """Return a launcher with a folder and variables, on the head or on a host."""
        inside = ["env", f"--chdir={folder}"]
        place = host or self.bed.head
        given = {**self.sshd.variables, **variables}
        return Launcher(folder, None, given, lambda command: place.command([*inside, *command]))

    def restart(self, host: Host) -> None:
        """Start a crashed host again."""
        self.bed.start_host(host)
        self.sshd.start(host)

    def running(self, host: Host, *programs: str) -> list[int]:
        """Return the processes of a host that run one of these programs, or modules of Python."""
        return [
            process
            for process in host.processes()
            if any(os.path.basename(word) in programs for word in words_of(process)[:4])
        ]

    def wait_until_gone(self, timeout: float, besides: Host | None = None) -> list[int]:
        """Return the processes of jobs that are left after at most so many seconds, but on one host."""
        until = time.monotonic() + timeout
        while left := set(self.sshd.marked()) - set(besides.processes() if besides else ()):
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return sorted(left)


def words_of(process: int) -> list[str]:
    """Return the command line of a process."""
    return read(process, "cmdline").decode(errors="replace").split("\0")


def east_and_west(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield two hosts, for a fixture; skip the test where there can be none."""
    if reason := bed_why_not() or why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        made = stack.enter_context(bed(["east", "west"], folder))
        yield Site(made, Sshd(made, folder, stack))
