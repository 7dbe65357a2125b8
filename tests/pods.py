"""Hosts of a bed that have the names and files of pods, and run containers' commands.

A pod has /etc, /root and /run of its own, with the Dockerfile's settings and the keys. The first process of a
container has the number 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bed import Bed, bed, why_not
from tests.hosts import sshd
from tests.manifests import steps_of_image
from tests.mpi.launch import ROOT

NAMES = ["train-0", "train-1", "launcher"]
WORKERS = [f"train-worker-{number}.train-worker.default.svc" for number in range(2)]
# The folders of a pod's own; what is written there is lost with the host.
_OWN = """
set -e
mount -t tmpfs tmpfs /run
for folder in etc root; do
    mkdir /run/$folder /run/$folder.work
    mount -t overlay overlay -o lowerdir=/$folder,upperdir=/run/$folder,workdir=/run/$folder.work /$folder
done
mount --bind "$1" /etc/hosts
: > /root/.bashrc
rm -rf /root/.ssh
mkdir -p /root/.ssh /etc/mpi
cp "$2" /root/.ssh/id_ed25519
cp "$2.pub" /root/.ssh/authorized_keys
cp "$2" /etc/ssh/ssh_host_ed25519_key
"""


class Pods:
    """Runs containers on the hosts of a bed; ends with the bed."""

    def __init__(self, made: Bed, folder: Path, stack: ExitStack) -> None:
        self.hosts, self.folder, self._stack = made.hosts, folder, stack
        with open(folder / "hosts", "a") as file:
            for name, worker in zip(NAMES, WORKERS, strict=False):
                print(made.hosts[name].address, worker, f"{name}.train", file=file)
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        (ssh,) = (rest for name, rest in steps_of_image() if name == "RUN" and "sshd_config" in rest)
        for host in made.hosts.values():
            host.do("bash", "-c", _OWN, "bash", str(folder / "hosts"), str(key))
            host.do("bash", "-c", ssh)

    def start(self, host: str, command: list[str], env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        """Start a container's command on a host."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        settings = {"PATH": path, "PYTHONPATH": ROOT, "KUBERNETES_SERVICE_HOST": "10.96.0.1", **env}
        words = [f"{name}={value}" for name, value in settings.items()]
        started = subprocess.Popen(
            self.hosts[host].command(
                [
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("env", f"--chdir={self.folder}", *words, *command),
                ]
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(_reap, started)
        return started

    def program(self, text: str) -> None:
        """Write the program that the manifests start."""
        (self.folder / "train.py").write_text(text)


def _reap(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def first_of(container: subprocess.Popen[str]) -> int:
    """Return the process with the number 1 of a container."""
    found = container.pid
    for _ in range(2):  # nsenter, then unshare, have one child each
        (found,) = map(int, Path(f"/proc/{found}/task/{found}/children").read_text().split())
    return found


def make_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """Yield pods, for a fixture; skip the test where there can be none."""
    if reason := why_not() or sshd.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pods")
    with ExitStack() as stack:
        made = stack.enter_context(bed(NAMES, folder))
        yield Pods(made, folder, stack)
