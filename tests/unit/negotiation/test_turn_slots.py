"""Turn slots: which calls may use them, their digests, and what the coordinator delegates."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from pyhvd.negotiation.messages import Request, RequestType
from pyhvd.negotiation.turn_slots import TurnSlots, digest_of, named, number_of, signature_of

CALL = Request(RequestType.ALLREDUCE, "noname.3", 7, (4,), 1)


@dataclasses.dataclass
class Table:
    """Notes what it is told."""

    slots: int = 64
    turns: int = 64
    delegated: int = 0
    told: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def delegate_turns(self, set_id: int, bits: int, version: int) -> None:
        assert (set_id, version) == (5, 9)
        assert not self.delegated & bits
        self.delegated |= bits
        self.told.append(("delegate", bits))

    def recall_turns(self, set_id: int, bits: int) -> None:
        self.delegated &= ~bits
        self.told.append(("recall", bits))


def test_names_have_numbers() -> None:
    numbers = [
        number_of(name) for name in ("noname.0", "noname.17", "x", "noname.", "noname.3.x", "barrier.noname")
    ]
    assert numbers == [0, 17, -1, -1, -1, -1]


def test_only_host_tensors_have_signatures() -> None:
    assert signature_of([CALL]) == (replace(CALL, name=""),)
    others = [
        replace(CALL, name="x"),
        replace(CALL, device="cuda:0"),
        replace(CALL, type=RequestType.ADASUM),
    ]
    assert [signature_of([each]) for each in others] == [None] * 3


def test_a_group_has_a_signature_if_it_is_one_allreduce_of_several_shapes() -> None:
    other = replace(CALL, name="", shape=(2, 3), layout="1,0")
    group = named([replace(CALL, name=""), other], "noname.3", grouped=True)
    assert [(each.name, each.group, each.group_size) for each in group] == [
        ("noname.3_1of2", "noname.3", 2),
        ("noname.3_2of2", "noname.3", 2),
    ]
    assert signature_of(group) == (replace(CALL, name=""), other)
    for field, value in (("dtype", 8), ("op", 2), ("prescale", 0.5), ("window", True)):
        assert signature_of([group[0], replace(group[1], **{field: value})]) is None
    assert signature_of([replace(each, group="g") for each in group]) is None
    assert signature_of([replace(each, type=RequestType.ALLGATHER) for each in group]) is None


def test_a_digest_tells_calls_apart() -> None:
    others = [
        replace(CALL, **{field: value})
        for field, value in (
            ("type", RequestType.BROADCAST), ("dtype", 8), ("shape", (5,)), ("op", 2), ("prescale", 0.5),
            ("postscale", 0.5), ("root", 1), ("window", True), ("layout", "1,0"), ("splits", 4),
        )
    ]  # fmt: skip
    digests = {digest_of([each], grouped=False) for each in (CALL, *others)}
    digests |= {digest_of(each, grouped=True) for each in ([CALL], [CALL, CALL])}
    assert len(digests) == 3 + len(others)
    assert digest_of([replace(CALL)], grouped=False) == digest_of([CALL], grouped=False)
    assert max(digests) < 1 << 64


def test_a_message_takes_a_turn_slot_back_until_it_is_answered() -> None:
    table = Table()
    turns = TurnSlots(5, 9, table)
    assert table.delegated == (1 << 64) - 1
    turns.recall_for("x")
    turns.recall_for("noname.67")
    turns.recall_for("noname.3")
    assert table.told[1:] == [("recall", 0b1000)], "once"
    turns.delegate(["noname.131", "x"])
    assert not table.delegated & 0b1000
    turns.delegate([])
    assert table.delegated == (1 << 64) - 1
    turns.recall(-1)
    assert not table.delegated


def test_marks_that_two_looks_find_are_overdue() -> None:
    turns = TurnSlots(5, 9, Table())
    turns.note(0b11, 0, 1.0)
    assert turns.overdue(1.0) == 0
    turns.note(0b11, 0b10, 2.0)
    assert turns.overdue(2.0) == 0b01, "the other slot was used meanwhile"


def test_a_table_without_turn_slots_is_told_nothing() -> None:
    table = Table(turns=0)
    turns = TurnSlots(5, 9, table)
    turns.recall_for("noname.3")
    turns.delegate([])
    assert not table.told
