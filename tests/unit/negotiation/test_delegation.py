"""Delegated slots: what a look at the ready table says of slots that were taken back meanwhile."""

from __future__ import annotations

from pyhvd.negotiation.delegation import Delegation
from pyhvd.negotiation.response_cache import SlotTable
from tests.unit.negotiation.simulation import allreduce, by_request


class LateTable:
    """The ready table of a host that is one of several: it does not know of the recall yet."""

    slots = 64
    turns = 0
    partial = True

    def __init__(self) -> None:
        self.marked: dict[int, int] = {}
        self.used = 0

    def serves(self, set_id: int, ranks: object) -> bool:
        return True

    def open_ready_set(self, set_id: int, ranks: object) -> None:
        pass

    def delegate(self, set_id: int, slot: int, version: int) -> None:
        pass

    def recall(self, set_id: int, bits: int) -> dict[int, int]:
        return {}

    def delegate_turns(self, set_id: int, bits: int, version: int) -> None:
        raise AssertionError

    def recall_turns(self, set_id: int, bits: int) -> None:
        raise AssertionError

    def look(self, set_id: int) -> tuple[dict[int, int], int]:
        return self.marked, self.used


def test_a_look_leaves_out_slots_that_were_recalled() -> None:
    cache, table = SlotTable(2), LateTable()
    for name in "ab":
        cache.assign(by_request([allreduce(name, (1,)), allreduce(name, (1,))]), 0, 1)
    delegation = Delegation(0, (0, 1), cache, table)
    delegation.delegate(0)
    delegation.delegate(1)
    delegation.recall(0b10)
    table.marked, table.used = {0: 0b11, 1: 0b10}, 0b111
    assert delegation.look(5.0) == {0: 0b01}
    assert delegation.since(0, 9.0) == 5.0
    assert delegation.since(1, 9.0) == 9.0
    # Only slot 0 was used as far as the cache is concerned: slot 1 goes first.
    assert cache.assign(by_request([allreduce("c", (1,)), allreduce("c", (1,))]), 0, 2) == 1
