"""What the hosts of one generation of an elastic job hold, and which of them are lost. Pure.

A generation goes on from the newest commit that a host holds, or that the store has if every host that had
ranks in the last generation is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Beat, FromAgent, Hello, Restored
from pyhvd.job.mpi.rank_env import RankGeneration
from pyhvd.job.spec import ElasticSpec

RESTORE_S = 600.0
"""Time limit for the store to bring a commit to the first host."""


class StateLostError(LaunchError):
    """No host is left that holds what ranks have committed."""


class Outcome(Enum):
    """How a generation without a failure is over."""

    DONE = auto()  # all ranks have returned
    LEFT = auto()  # they have committed, and made room


@dataclass
class HeldCommits:
    """The commits of one generation's hosts.

    Attributes
    ----------
    number : int
        The generation's, from 0.
    known : int
        The newest commit of which the launcher has heard.
    holders : set of str or None
        The hosts that had ranks in the last generation, and whose agents are not known to be lost; None if no
        generation has had ranks, here or in an earlier run. Once ranks are started, the same for the next
        generation.
    outcome : Outcome
        How this generation is over, if it has not failed.
    began_from : int or None
        The commit from which the ranks went on; None if they were not started.
    commits : dict of str to int
        The newest commit of each host that has said so.
    lost : dict of str to str
        The hosts whose agents were lost, and why.
    leaving : dict of str to str
        The hosts that will be taken away, as their agents know, and why.
    """

    number: int
    known: int
    holders: set[str] | None
    outcome: Outcome = Outcome.DONE
    began_from: int | None = None
    commits: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    _asks_store: bool = False
    _restored: bool = False
    _store_problem: str = ""
    _store_empty: bool = False
    _held: int = 0  # the newest commit on hosts, before the store was asked

    @property
    def newest(self) -> int:
        """The newest commit that a host holds."""
        return max(self.commits.values())

    @property
    def is_restoring(self) -> bool:
        """Whether the first host is taking a commit from the store."""
        return self._asks_store and not self._restored

    def hear(self, host: str, message: FromAgent, say: Callable[[str], None]) -> None:
        """Note what a host's agent says."""
        if isinstance(message, Hello):
            self.commits[host] = message.commit
        elif isinstance(message, Beat):
            self._take(host, message.commit)
            if message.leaves:
                self.leaving[host] = message.leaves
        elif isinstance(message, Restored):
            self._restored, self._store_problem, self._store_empty = True, message.problem, message.empty
            if message.commit > self._held:  # beats may have told of it already
                say(f"pyhvd: commit {message.commit} comes from the store")
            self._take(host, message.commit)

    def _take(self, host: str, commit: int) -> None:
        self.commits[host] = max(self.commits.get(host, 0), commit)

    def asks_store(self, spec: ElasticSpec) -> bool:
        """Return whether the store is to be asked now; only once."""
        held_all = self.holders is None or any(
            self.commits.get(name, -1) >= self.known for name in self.holders
        )
        if spec.store is None or held_all or self._asks_store:
            return False
        self._asks_store, self._held = True, self.newest
        return True

    def begin(self, hosts: set[str], say: Callable[[str], None]) -> None:
        """Go on from the newest commit, on these hosts; raise StateLostError if there is none."""
        newest = self.newest
        if newest < self.known:
            lost = f"every host that held commit {self.known} is gone"
            if not newest:
                other = f", and the store cannot provide it: {self._store_problem}" if self._restored else ""
                raise StateLostError(f"{lost}, and no other host holds the state{other}")
            say(f"pyhvd: {lost}: ranks go on from commit {newest}")
        elif self._store_problem and not (self._store_empty or newest):  # the first ranks of a later run
            raise StateLostError(f"the job cannot be resumed: {self._store_problem}")
        self.began_from = newest
        self.holders = hosts

    def lose(self, host: str, why: str, *, counts: bool) -> None:
        """Note that a host's agent is lost; it does not count between two jobs, or when this one is over."""
        if self.holders is not None:
            self.holders.discard(host)
        if counts:
            self.lost.setdefault(host, why)

    def variables(self, spec: ElasticSpec, first_ranks: Mapping[str, int]) -> Mapping[str, str]:
        """Return the variables by which ranks get the state; the lowest ranks of hosts are in rank order."""
        newest = self.newest
        source = next(rank for host, rank in first_ranks.items() if self.commits.get(host) == newest)
        stores = spec.store is not None
        return RankGeneration(self.number, newest, source, spec.max_size, stores=stores).variables()
