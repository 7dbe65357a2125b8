"""Turn slots: how the ranks of a node agree by themselves on calls without a name.

The n-th call without a name of a process set uses turn slot n % 64 of the ready table. A rank marks it
together with a digest of n and of its call. If all digests are equal, all ranks have made the same call, and
no negotiation is needed. The coordinator does not know what is marked: it only says which turn slots may be
used.
Pure: the ready table itself is given.

Invariants
  1. While the coordinator has a message about call n, turn slot n % 64 is not delegated. While a call has
     failed that some rank has yet to submit, no turn slot is delegated again.
  2. The marks of a turn slot that is taken back become messages of the ranks that had made them.
  3. While a member has joined, no turn slot is delegated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from pyhvd.negotiation.messages import HOST, UNNAMED, Request, RequestType, iter_bits, member_name

_PREFIX = f"{UNNAMED}."
_KINDS = frozenset(
    (
        RequestType.ALLREDUCE,
        RequestType.ALLGATHER,
        RequestType.BROADCAST,
        RequestType.ALLTOALL,
        RequestType.REDUCESCATTER,
        RequestType.BARRIER,
    )
)
_encoder = msgspec.msgpack.Encoder()


class TurnTable(Protocol):
    """A ready table with turn slots; see :class:`pyhvd.negotiation.delegation.ReadyTable`."""

    @property
    def slots(self) -> int:
        """Cache slots of a process set; its turn slots come after them."""

    @property
    def turns(self) -> int:
        """Turn slots of a process set; 0: unnamed calls go by message."""

    def delegate_turns(self, set_id: int, bits: int, version: int) -> None:
        """Let the ranks of a set, which response list ``version`` made, mark turn slots."""

    def recall_turns(self, set_id: int, bits: int) -> None:
        """Take turn slots back; the ranks that had marked them submit their calls by message."""


def number_of(name: str) -> int:
    """Return the number of a call without a name, or of its group; -1 for other names."""
    digits = name[len(_PREFIX) :] if name.startswith(_PREFIX) else ""
    return int(digits) if digits.isdecimal() else -1


def signature_of(requests: Sequence[Request]) -> tuple[Request, ...] | None:
    """Return what defines a call without a name, except its number; None if it must go by message.

    ``requests`` are all of the call. A grouped one must be one allreduce but for the shapes.
    """
    first = requests[0]
    if first.type not in _KINDS or first.device != HOST or number_of(first.group or first.name) < 0:
        return None
    signature = tuple(msgspec.structs.replace(each, name="", group="", group_size=0) for each in requests)
    if first.group:
        alike = {msgspec.structs.replace(each, shape=(), layout="") for each in signature}
        if first.type != RequestType.ALLREDUCE or len(alike) > 1:
            return None
    return signature


def digest_of(signature: Sequence[Request], *, grouped: bool) -> int:
    """Return 8 bytes by which ranks compare what they submit."""
    return int.from_bytes(blake2b(_encoder.encode((grouped, signature)), digest_size=8).digest())


def named(signature: Sequence[Request], name: str, *, grouped: bool) -> list[Request]:
    """Return the requests of a call with this signature and name."""
    if not grouped:
        return [msgspec.structs.replace(signature[0], name=name)]
    n = len(signature)
    return [
        msgspec.structs.replace(each, name=member_name(name, k, n), group=name, group_size=n)
        for k, each in enumerate(signature)
    ]


class TurnSlots:
    """The turn slots of one process set, as the coordinator sees them.

    Parameters
    ----------
    set_id : int
        Id of the process set.
    version : int
        Number of the response list that made it.
    table : TurnTable
        A table that serves this process set, and was opened for it.

    Attributes
    ----------
    every : int
        Bit vector of all turn slots.
    delegated : int
        Bit vector of the turn slots that ranks may mark, as far as the coordinator has been told: a slot that
        the ranks have marked for different calls is taken back by the table, and then their messages come.
    """

    def __init__(self, set_id: int, version: int, table: TurnTable) -> None:
        self.delegated = 0
        self.every = (1 << table.turns) - 1
        self._set_id = set_id
        self._version = version
        self._table = table
        self._first_seen: dict[int, float] = {}
        self.delegate(())

    def delegate(self, open_names: Iterable[str]) -> None:
        """Delegate all turn slots but those of calls that are open: the names of tensors and groups."""
        bits = self.every & ~self.delegated
        for name in open_names if bits else ():
            bits &= ~self._bit(name)
        if bits:
            self._table.delegate_turns(self._set_id, bits, self._version)
            self.delegated |= bits

    def recall(self, bits: int) -> None:
        """Take turn slots back."""
        if bits := bits & self.delegated:
            self.delegated &= ~bits
            self._table.recall_turns(self._set_id, bits)

    def recall_for(self, name: str) -> None:
        """Take back the turn slot of a call, or of a grouped call, of this name."""
        self.recall(self._bit(name))

    def note(self, marked: int, used: int, now: float) -> None:
        """Note since when (s) turn slots are marked; ``used`` since the last look."""
        before = {turn: since for turn, since in self._first_seen.items() if not used >> turn & 1}
        self._first_seen = {turn: before.get(turn, now) for turn in iter_bits(marked & self.delegated)}

    def overdue(self, now: float) -> int:
        """Return the turn slots whose marks an earlier look has found: by message they get names."""
        return sum(1 << turn for turn, since in self._first_seen.items() if since < now)

    def _bit(self, name: str) -> int:
        number = number_of(name)
        return 1 << number % self.every.bit_length() if number >= 0 and self.every else 0
