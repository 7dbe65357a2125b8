"""An elastic job without its launcher: generations of ranks that are threads, on simulated hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import pyhvd as hvd
from pyhvd.elastic import session
from pyhvd.job.commits.vault import DESCRIPTORS, Vault
from pyhvd.job.mpi.rank_env import RankGeneration
from pyhvd.testing import run_ranks

played: ContextVar[session.RankSession | None] = ContextVar("tests.elastic_hosts.played", default=None)
"""The session of the rank that the current thread is."""

_of_process = session._of_process
session._of_process = lambda: played.get() or _of_process()  # type: ignore[assignment]


class Hosts:
    """Does the launcher's part: keeps the vaults, and chooses the commit and its source.

    Attributes
    ----------
    vaults : dict of int to Vault
        By the host's number; a host gets its vault when it first has a rank.
    """

    def __init__(self) -> None:
        self.vaults: dict[int, Vault] = {}
        self._generation = -1

    def run(
        self, hosts: Sequence[int], function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        """Run one generation; `hosts` has the number of each rank's host. A host without ranks is lost.

        `nodes` in the options has the numbers of the ranks' nodes, if agents share memory.
        """
        nodes = options.pop("nodes", hosts)
        self.vaults = {host: self.vaults.get(host) or Vault.create() for host in sorted(set(hosts))}
        self._generation += 1
        environ = self._environ(hosts)

        def play() -> Any:
            vault = self.vaults[hosts[hvd.rank()]]
            numbers = dict(zip(DESCRIPTORS, map(str, vault.descriptors), strict=True))
            token = played.set(session.RankSession(environ | numbers))
            try:
                return function(*args)
            finally:
                played.reset(token)

        return run_ranks(len(hosts), play, hosts=nodes, **{"timeout": 60, **options})

    def ask_for_room(self) -> None:
        """Wish for the next generation, as agents do when hosts change."""
        for vault in self.vaults.values():
            vault.wished = self._generation + 1

    def _environ(self, hosts: Sequence[int]) -> dict[str, str]:
        held = {host: seal.number for host, vault in self.vaults.items() if (seal := vault.newest())}
        commit = max(held.values(), default=0)
        source = next((rank for rank, host in enumerate(hosts) if commit and held.get(host) == commit), 0)
        return RankGeneration(self._generation, commit, source).variables()
