"""``horovod.runner.elastic.discovery``: what finds the hosts of an elastic job."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping

from pyhvd.job.driver.discovery import LIMIT_S
from pyhvd.job.machines.found_hosts import parse_hosts


class HostDiscovery(ABC):
    """Finds hosts; a subclass is for ``horovod.run(..., discovery=...)``."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each host."""


class HostDiscoveryScript(HostDiscovery):
    """Runs a script that prints the hosts.

    Parameters
    ----------
    discovery_script : str
        A command for the shell.
    slots : int, optional
        The slots of a host that is printed without them; by default 1.
    """

    def __init__(self, discovery_script: str, slots: int | None = None) -> None:
        self._command = discovery_script
        self._slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts that the script prints.

        Raises
        ------
        RuntimeError
            The script failed, or printed bad lines.
        """
        run = subprocess.run(
            self._command, shell=True, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        if run.returncode:
            raise RuntimeError(f"{self._command} ended with code {run.returncode}: {run.stderr.strip()}")
        hosts, problems = parse_hosts(run.stdout.splitlines(), self._slots or 1)
        if problems:
            raise RuntimeError(f"{self._command} printed a bad line: {problems[0]}")
        return {host.name: host.slots for host in hosts}


class FixedHosts(HostDiscovery):
    """Finds the hosts that it is given."""

    def __init__(self, available_hosts_and_slots: Mapping[str, int]) -> None:
        self.set(available_hosts_and_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts that were given last."""
        return self._hosts

    def set(self, available_hosts_and_slots: Mapping[str, int]) -> None:
        """Give other hosts."""
        self._hosts = dict(available_hosts_and_slots)
