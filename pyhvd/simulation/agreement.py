"""Agreement on cached tensors: the ready table of each simulated host, and the real order across hosts.

The order is that of :class:`pyhvd.native.shared_memory.HostTree`, whose messages travel on virtual time. The
ready table's marks are bit vectors here, as the real one is memory that threads of several processes share.
Only the set of all ranks agrees here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyhvd.native.shared_memory import MAX_SLOTS, HostTree
from pyhvd.negotiation.messages import GLOBAL_SET, iter_bits
from pyhvd.simulation.clock import SimulatedProcess
from pyhvd.simulation.network import Wires

if TYPE_CHECKING:
    from pyhvd.simulation.ranks import SimulatedRank

SETS = 1
"""Process sets that agree here."""
MARK_S = 0.15e-6
"""CPU time (s) of marking a tensor, or of carrying one out: half a cached call's, by docs/performance.md."""


@dataclass(frozen=True)
class SimulatedEntry:
    """An entry of a host's ready log: a batch of slots, or the place of a response list."""

    number: int
    """Of the list; 0: a batch, or recalls and delegations alone."""
    bits: int = 0


class HostTable:
    """One host's ready table.

    Parameters
    ----------
    process : SimulatedProcess
        Whoever makes progress on this host; it calls :meth:`settle` at the end of each turn.
    wires : Wires
        The network.
    ranks : sequence of int
        The host's ranks.
    tree : HostTree or None
        The host's place in the order; None: there is one host.
    host : int
        The host's number.

    Attributes
    ----------
    log : list of SimulatedEntry
        The ready log.
    delegated : dict of int to int
        The versions of delegated slots.
    used : int
        Slots of batches since the coordinator last looked.
    neighbours : list of int
        The hosts to which this one has a connection.
    """

    def __init__(
        self, process: Callable[[Callable[[], object]], SimulatedProcess], wires: Wires, ranks: Sequence[int],
        tree: HostTree | None, host: int,
    ) -> None:  # fmt: skip
        self.log: list[SimulatedEntry] = []
        self.delegated: dict[int, int] = {}
        self.used = 0
        self.marks = dict.fromkeys(ranks, 0)
        self.members: list[SimulatedRank] = []
        self.peers: Sequence[HostTable] = ()
        self.host = host
        self.process = process(self.settle)
        self.neighbours = [] if tree is None else [*tree.above, *tree.below]
        self._wires = wires
        self._tree = tree

    def mark(self, rank: int, bits: int) -> None:
        """Mark slots ready for a rank."""
        self.process.spend(MARK_S * bits.bit_count())
        self.marks[rank] |= bits

    def announce(self, number: int, audience: int, recalled: int, delegated: dict[int, int]) -> bool:
        """Give a response list its place in the log, on host 0; return False if there is no room now."""
        if self._tree is None:
            self._carry_out_list(number, recalled, delegated)
            return True
        sets = ({GLOBAL_SET: recalled} if recalled else {}), ({GLOBAL_SET: delegated} if delegated else {})
        messages = self._tree.announce_list(number, audience, *sets)
        if messages is None:
            return False
        self._post(messages)
        self.process.wake()
        return True

    def receive(self, source: int, message: bytes) -> None:
        """Take a message of another host."""
        assert self._tree is not None
        self.process.spend(self._wires.network.message_cpu)
        self._tree.receive(source, message)

    def settle(self) -> None:
        """Announce what all ranks here have marked; append to the log what is decided."""
        complete = -1
        for bits in self.marks.values():
            complete &= bits
        if self._tree is None:
            if complete:
                self._carry_out_batch(complete)
            return
        if complete:
            self._post(self._tree.announce(GLOBAL_SET, complete))
        self._take_entries(self._tree)
        self._post(self._tree.owed())
        self._take_entries(self._tree)

    def _take_entries(self, tree: HostTree) -> None:
        while (entry := tree.take()) is not None:
            is_list, number, slots, delegated, messages = entry
            self._post(messages)
            if is_list:
                self._carry_out_list(number, slots.get(GLOBAL_SET, 0), delegated.get(GLOBAL_SET, {}))
            else:
                self._carry_out_batch(slots[GLOBAL_SET])

    def _carry_out_batch(self, bits: int) -> None:
        for rank in self.marks:
            self.marks[rank] &= ~bits
        self.used |= bits
        self._append(SimulatedEntry(0, bits))

    def _carry_out_list(self, number: int, recalled: int, delegated: dict[int, int]) -> None:
        if recalled:
            for slot in iter_bits(recalled):
                self.delegated.pop(slot, None)
            for member, rank in zip(self.members, self.marks, strict=True):
                if void := self.marks[rank] & recalled:
                    self.marks[rank] &= ~recalled
                    member.take_back(void)
        self.delegated.update(delegated)
        if number:
            self._append(SimulatedEntry(number))

    def _append(self, entry: SimulatedEntry) -> None:
        self.log.append(entry)
        for member in self.members:
            member.look_at_log()

    def _post(self, messages: Iterable[tuple[int, bytes]]) -> None:
        for target, message in messages:
            self.process.spend(self._wires.network.message_cpu)
            table = self.peers[target]
            self._wires.send(
                ("table", self.host, target), (self.host, target), len(message), self.process.now,
                table.process.call, table.receive, self.host, message,
            )  # fmt: skip


class CoordinatorTable:
    """The ready tables as the coordinator sees them; see :class:`pyhvd.negotiation.delegation.ReadyTable`.

    Parameters
    ----------
    table : HostTable
        Host 0's.
    slots : int
        How many slots may be delegated.
    partial : bool
        Whether there are several hosts.
    """

    def __init__(self, table: HostTable, slots: int, *, partial: bool) -> None:
        self.slots, self.turns = slots, 0
        self.partial = partial
        self._table = table
        self._recalled = 0
        self._delegated: dict[int, int] = {}

    def open_ready_set(self, set_id: int, ranks: Iterable[int]) -> None:
        """Do nothing: the set of all ranks is there."""

    def serves(self, set_id: int, ranks: Iterable[int]) -> bool:  # noqa: ARG002
        """Return whether the members of a set can agree here."""
        return set_id == GLOBAL_SET

    def delegate(self, set_id: int, slot: int, version: int) -> None:  # noqa: ARG002
        """Let ranks mark a slot; with the next announcement."""
        self._delegated[slot] = version

    def recall(self, set_id: int, bits: int) -> dict[int, int]:  # noqa: ARG002
        """Take slots back; with the next announcement. With one host return, by rank, what was marked."""
        for slot in [slot for slot in self._delegated if bits >> slot & 1]:
            del self._delegated[slot]
        if self.partial:
            self._recalled |= bits
            return {}
        marked = {rank: marks & bits for rank, marks in self._table.marks.items() if marks & bits}
        for rank in marked:
            self._table.marks[rank] &= ~bits
        for slot in iter_bits(bits):
            self._table.delegated.pop(slot, None)
        return marked

    def delegate_turns(self, set_id: int, bits: int, version: int) -> None:
        """Do nothing: simulated calls have names."""

    def recall_turns(self, set_id: int, bits: int) -> None:
        """Do nothing, likewise."""

    def look(self, set_id: int) -> tuple[dict[int, int], int]:  # noqa: ARG002
        """Return the marks of host 0 by rank, and the slots that were used since the last look."""
        used, self._table.used = self._table.used, 0
        return {rank: bits for rank, bits in self._table.marks.items() if bits}, used

    def announce(self, number: int, audience: int) -> bool:
        """Announce a list, with what was recalled and delegated; return False if there is no room now."""
        if not (number or self._recalled or self._delegated):
            return True
        announced = self._table.announce(number, audience, self._recalled, self._delegated)
        if announced:
            self._recalled, self._delegated = 0, {}
        return announced


def slots_for(tensors: int) -> int:
    """Return the number of slots of tables for so many tensors, as :func:`open_fast_path` chooses it."""
    return max(min(-(-tensors // 64) * 64, MAX_SLOTS), 64)
