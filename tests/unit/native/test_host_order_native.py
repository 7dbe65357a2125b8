"""The order across hosts in C against its model: equal messages and logs, and no harm from any bytes."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.thinning import examples
from tests.unit.native.host_order import Entry, HostOrder, Message, ResponseList, Round, Slot
from tests.unit.native.test_host_order import SLOTS, Cluster, check_one_log

ROOT = Path(__file__).resolve().parents[3]
SRC = ROOT / "pyhvd" / "native" / "src"
SOURCES = [SRC / "agreement" / name for name in ("host_order.c", "host_tree.c")]

MAX_HOSTS, MAX_SETS, RANGE_WORDS = 64, 32, 64
RING, LIST_MAX = 131072, 32768
UNIT = RING // 16
"""Bytes of a list of size 1 in the model, whose ring has room for 16."""
BATCH, LIST = 1, 2
ANNOUNCED, RECALLED, DELEGATED, COMPARED = 1, 2, 3, 4
LATER, INVALID = -3, -4
CAPACITY = 128
ROOM = 65536
GUARD, FILL = 64, 0xA5  # words around the memory of an order, and their bytes


class Header(Structure):
    _fields_ = (
        ("bytes", c_uint32),
        ("list", c_uint32),
        ("before", c_uint64),
        ("stamp", c_uint64),
        ("upto", c_uint64),
        ("taken", c_uint64),
        ("entries", c_uint64),
    )


class ListHead(Structure):
    _fields_ = (
        ("time", c_uint64),
        ("number", c_uint64),
        ("bytes", c_uint32),
        ("audience_bytes", c_uint32),
    )


class Section(Structure):
    _fields_ = (
        ("kind", c_uint16),
        ("set", c_uint16),
        ("first", c_uint16),
        ("end", c_uint16),
        ("n", c_uint64),
    )


class SlotRange(Structure):
    _fields_ = (
        ("kind", c_uint32),
        ("set", c_uint32),
        ("first", c_uint32),
        ("end", c_uint32),
        ("words", POINTER(c_uint64)),
        ("values", POINTER(c_uint64)),
        ("n", c_uint64),
        ("digests", POINTER(c_uint64)),
    )


class List(Structure):
    _fields_ = (
        ("number", c_uint64),
        ("audience", POINTER(c_uint8)),
        ("audience_bytes", c_uint32),
        ("n", c_uint32),
        ("ranges", POINTER(SlotRange)),
    )


class LogEntry(Structure):
    _fields_ = (
        ("kind", c_uint32),
        ("set", c_uint32),
        ("first", c_uint32),
        ("end", c_uint32),
        ("time", c_uint64),
        ("words", c_uint64 * RANGE_WORDS),
        ("unlike", c_uint64),
        ("number", c_uint64),
        ("audience", POINTER(c_uint8)),
        ("audience_bytes", c_uint32),
        ("sections", POINTER(c_uint64)),
        ("sections_end", POINTER(c_uint64)),
    )


class Counts(Structure):
    """The first fields of pyhvd_host_order."""

    _fields_ = (
        ("numbers", c_uint32 * 4),
        ("counts", c_uint64 * MAX_HOSTS),
        ("taken", c_uint64 * MAX_HOSTS),
        ("entries", c_uint64 * MAX_HOSTS),
    )


COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
"""The compiler that setup.py uses."""


def build(folder: Path, *flags: str) -> Path:
    """Compile the order and the tree into a shared library, or skip the test."""
    if not SOURCES[0].exists():
        pytest.skip("the C sources are not here")
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no C compiler: {COMPILER[0]}")
    library = folder / "host_order.so"
    command = [*COMPILER, "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-shared", "-fPIC", f"-I{SRC}", *flags]
    done = subprocess.run([*command, *map(str, SOURCES), "-o", str(library)], capture_output=True, text=True)
    if done.returncode and flags:
        pytest.skip(f"cannot compile with {flags}: {done.stderr[-300:]}")
    assert not done.returncode, done.stderr
    return library


def load(library: Path) -> ctypes.CDLL:
    """Load the library, and state its functions' types."""
    c = ctypes.CDLL(str(library))
    c.pyhvd_host_order_bytes.restype = c_size_t
    c.pyhvd_host_order_announce.restype = c_int64
    c.pyhvd_host_order_owed.restype = c_int64
    for function in (c.pyhvd_host_order_receive, c.pyhvd_host_order_take):
        function.restype = c_int
    return c


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load(build(tmp_path_factory.mktemp("host_order")))


def words_of(data: bytes) -> ctypes.Array[c_uint64]:
    """Return a copy of these bytes that ends where they end."""
    return (c_uint64 * ((len(data) + 7) // 8)).from_buffer_copy(data + bytes(-len(data) % 8))


def range_of(
    kind: int, slots: list[Slot], values: list[int], digests: Mapping[Slot, int] | None = None
) -> SlotRange:
    """Return the range of some slots of one set, with digests of slots from 64 on."""
    first, end = min(slots).number // 64, max(slots).number // 64 + 1
    words = (c_uint64 * (end - first))()
    for slot in slots:
        words[slot.number // 64 - first] |= 1 << slot.number % 64
    compared = (c_uint64 * 64)()
    for slot, digest in (digests or {}).items():
        if slot in slots and slot.number >= 64:
            compared[slot.number % 64] = digest
    packed = (c_uint64 * len(values))(*values)
    return SlotRange(kind, slots[0].set, first, end, words, packed, len(values), compared)


def by_set(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Return the slots of each set, in ascending order."""
    found: dict[int, list[Slot]] = {}
    for slot in sorted(slots):
        found.setdefault(slot.set, []).append(slot)
    return list(found.values())


def slots_in(set_id: int, first: int, words: Iterable[int]) -> list[Slot]:
    """Return the slots of some words of a set."""
    return [
        Slot(set_id, (first + index) * 64 + bit)
        for index, word in enumerate(words)
        for bit in range(64)
        if word >> bit & 1
    ]


def version_of(carried: ResponseList, slot: Slot) -> int:
    """Return under which version a list delegates a slot: one for all, or one for each."""
    return carried.number * 1000 + slot.number * (carried.number % 2)


def list_of(carried: ResponseList) -> List:
    """Return a list for C, filled up to its size by its audience."""
    ranges = [range_of(RECALLED, slots, []) for slots in by_set(carried.recalled)]
    for slots in by_set(carried.delegated):
        versions = [version_of(carried, slot) for slot in slots]
        ranges.append(range_of(DELEGATED, slots, versions if carried.number % 2 else versions[:1]))
    used = ctypes.sizeof(ListHead) + sum(16 + 8 * (each.end - each.first + each.n) for each in ranges)
    audience = audience_of(carried, carried.size * UNIT - used)
    array = (SlotRange * len(ranges))(*ranges)
    opaque = (c_uint8 * len(audience)).from_buffer_copy(audience)
    return List(carried.number, opaque, len(audience), len(ranges), array)


def audience_of(carried: ResponseList, size: int) -> bytes:
    """Return the audience as bytes, with others behind it that differ from list to list."""
    hosts = sorted(carried.audience)
    return bytes([len(hosts), *hosts]).ljust(size, bytes([carried.number % 256]))


def decode_sections(data: bytes) -> list[tuple[int, list[Slot], list[int], list[int]]]:
    """Return kind, slots, values and digests of each section."""
    found, at = [], 0
    while at < len(data):
        head = Section.from_buffer_copy(data, at)
        count = head.end - head.first
        words = (c_uint64 * (count + head.n)).from_buffer_copy(data, at + ctypes.sizeof(Section))
        slots = slots_in(head.set, head.first, words[:count])
        last = words[count - 1].bit_count() if head.kind == COMPARED else 0
        values, digests = words[count : count + head.n - last], words[count + head.n - last :]
        every = [0] * (len(slots) - last) + digests
        found.append((head.kind, slots, values * (len(slots) if len(values) == 1 else 1), every))
        at += ctypes.sizeof(Section) + ctypes.sizeof(words)
    return found


def decode_list(data: bytes, sent: ResponseList) -> ResponseList:
    """Return the list in these bytes; only its name in the model is taken from the list that was sent."""
    head = ListHead.from_buffer_copy(data)
    audience = data[ctypes.sizeof(ListHead) :][: head.audience_bytes]
    sections = data[ctypes.sizeof(ListHead) + (head.audience_bytes + 7) // 8 * 8 :]
    assert audience == audience_of(sent, len(audience))
    slots: dict[int, set[Slot]] = {RECALLED: set(), DELEGATED: set()}
    for kind, some, values, _ in decode_sections(sections):
        slots[kind] |= set(some)
        assert values == [version_of(sent, slot) for slot in some if kind == DELEGATED]
    hosts = frozenset(audience[1 : 1 + audience[0]])
    return ResponseList(
        head.number, frozenset(slots[RECALLED]), frozenset(slots[DELEGATED]), hosts, head.bytes // UNIT
    )


def decode(data: bytes, sent: ResponseList | None) -> Message:
    """Return the message in these bytes."""
    head = Header.from_buffer_copy(data)
    end = head.list or len(data)
    sections = decode_sections(data[ctypes.sizeof(Header) : end])
    slots = [
        (slot, Round(value >> 1, value & 1))
        for _, some, values, _ in sections
        for slot, value in zip(some, values, strict=True)
    ]
    digests = tuple(digest for *_, some in sections for digest in some)
    assert (sent is None) == (head.list == 0)
    carried = decode_list(data[end:], sent) if sent is not None else None
    return Message(
        head.before, head.stamp, head.upto, head.taken // UNIT, head.entries, tuple(slots), carried, digests
    )


@dataclass(frozen=True)
class WireMessage(Message):
    """A message, and its bytes."""

    raw: bytes = b""


class Native:
    """One host's order in C."""

    def __init__(self, c: ctypes.CDLL, host: int, hosts: int, capacity: int = CAPACITY) -> None:
        self.c = c
        self._size = c.pyhvd_host_order_bytes(MAX_SETS, capacity)
        self._all = (c_uint64 * (2 * GUARD + self._size // 8))()
        ctypes.memset(self._all, FILL, ctypes.sizeof(self._all))
        self.address = ctypes.c_void_p(ctypes.addressof(self._all) + 8 * GUARD)
        self._out = (c_uint64 * (ROOM // 8))()
        c.pyhvd_host_order_init(self.address, host, hosts, MAX_SETS, capacity)

    @property
    def known(self) -> Counts:
        return Counts.from_buffer(self._all, 8 * GUARD)

    @property
    def rest(self) -> bytes:
        """All behind the counts."""
        return bytes(self._all)[8 * GUARD + ctypes.sizeof(Counts) :]

    def check_guard(self) -> None:
        """Check that the bytes around the order are untouched."""
        memory, guard = bytes(self._all), bytes([FILL]) * 8 * GUARD
        assert memory.startswith(guard)
        assert memory.endswith(guard)

    def announce(
        self,
        slots: Iterable[Slot],
        carried: ResponseList | None,
        room: int = ROOM,
        digests: Mapping[Slot, int] | None = None,
    ) -> bytes | int:
        """Return the message, or the error."""
        ranges = [range_of(0, some, [], digests) for some in by_set(slots)]
        array = (SlotRange * len(ranges))(*ranges)
        made = byref(list_of(carried)) if carried is not None else None
        done = self.c.pyhvd_host_order_announce(
            self.address, array, c_uint32(len(ranges)), made, self._out, c_size_t(room)
        )
        return ctypes.string_at(self._out, done) if done > 0 else int(done)

    def owed(self) -> bytes:
        done = self.c.pyhvd_host_order_owed(self.address, self._out, c_size_t(ROOM))
        return ctypes.string_at(self._out, done)

    def receive(self, source: int, data: bytes) -> int:
        copy = words_of(data)
        return int(self.c.pyhvd_host_order_receive(self.address, c_uint32(source), copy, c_size_t(len(data))))

    def take(self) -> LogEntry | None:
        entry = LogEntry()
        return entry if self.c.pyhvd_host_order_take(self.address, byref(entry)) else None

    def contents(self, entry: LogEntry, sent: ResponseList) -> ResponseList:
        """Return the list of an entry, read range by range."""
        audience = ctypes.string_at(entry.audience, entry.audience_bytes)
        assert audience == audience_of(sent, len(audience))
        slots: dict[int, set[Slot]] = {RECALLED: set(), DELEGATED: set()}
        found = SlotRange()
        while self.c.pyhvd_host_order_next_range(self.address, byref(entry), byref(found)):
            some = slots_in(found.set, found.first, found.words[: found.end - found.first])
            slots[found.kind] |= set(some)
            values = found.values[: found.n] * (len(some) if found.n == 1 else 1)
            assert values == [version_of(sent, slot) for slot in some if found.kind == DELEGATED]
        hosts = frozenset(audience[1 : 1 + audience[0]])
        return ResponseList(
            entry.number, frozenset(slots[RECALLED]), frozenset(slots[DELEGATED]), hosts, sent.size
        )


class Twin(HostOrder):
    """The model and the C code, which must agree on every message, entry and count."""

    def __init__(self, c: ctypes.CDLL, host: int, hosts: int) -> None:
        super().__init__(host, hosts)
        self.native = Native(c, host, hosts)

    def announce(
        self,
        slots: Iterable[Slot],
        carried: ResponseList | None = None,
        digests: Mapping[Slot, int] | None = None,
    ) -> Message | None:
        slots = list(slots)
        expected = super().announce(slots, carried, digests)
        raw = self.native.announce(slots, carried, digests=digests)
        return self._compare(expected, b"" if raw == LATER else raw)

    def owed(self) -> Message | None:
        return self._compare(super().owed(), self.native.owed())

    def receive(self, source: int, message: Message) -> None:
        assert isinstance(message, WireMessage)
        super().receive(source, message)
        assert self.native.receive(source, message.raw) == 0
        self._check_counts()

    def take(self) -> tuple[Entry, ResponseList | None] | None:
        expected, entry = super().take(), self.native.take()
        if expected is None or entry is None:
            assert expected is None
            assert entry is None
            return None
        assert entry.time == expected[0].time
        if expected[1] is None:
            assert (entry.kind, entry.set) == (BATCH, expected[0].set)
            words = entry.words[: entry.end - entry.first]
            assert tuple(slots_in(entry.set, entry.first, words)) == expected[0].slots
            assert tuple(slots_in(entry.set, CAPACITY // 64 - 1, [entry.unlike])) == expected[0].unlike
        else:
            assert entry.kind == LIST
            assert self.native.contents(entry, expected[1]) == expected[1]
        self._check_counts()
        return expected

    def _compare(self, expected: Message | None, raw: bytes | int) -> Message | None:
        self._check_counts()
        if expected is None:
            assert raw == b""
            return None
        assert isinstance(raw, bytes)
        assert decode(raw, expected.carried) == expected
        return WireMessage(**vars(expected), raw=raw)

    def _check_counts(self) -> None:
        assert self.native.known.counts[: self.hosts] == self.counts
        assert self.native.known.taken[: self.hosts] == [position * UNIT for position in self.taken]
        assert self.native.known.entries[: self.hosts] == self.entries


@pytest.mark.timeout(600)
@settings(max_examples=examples(1000, longest=True))
@given(hosts=st.integers(2, 8), seed=st.integers(0, 2**32))
def test_c_does_what_the_model_does(c: ctypes.CDLL, hosts: int, seed: int) -> None:
    check_one_log(Cluster(hosts, functools.partial(Twin, c)), seed)


def pair(c: ctypes.CDLL) -> tuple[Native, Native]:
    """Return hosts 0 and 1 of two."""
    return Native(c, 0, 2), Native(c, 1, 2)


def raw(message: bytes | int) -> bytes:
    assert isinstance(message, bytes), message
    return message


def tell(source: Native, target: Native, number: int, slots: Iterable[Slot]) -> None:
    """Host `number` announces slots to the other one."""
    assert target.receive(number, raw(source.announce(slots, None))) == 0


def test_slots_in_different_rounds_travel_in_one_section(c: ctypes.CDLL) -> None:
    zero, one = pair(c)
    tell(zero, one, 0, [Slot(3, 5)])
    tell(one, zero, 1, [Slot(3, 5)])
    for order in (zero, one):
        assert (entry := order.take()) is not None
        assert (entry.set, entry.first, entry.end, entry.words[0]) == (3, 0, 1, 1 << 5)
    both = [Slot(3, 5), Slot(3, 70)]
    message = raw(zero.announce(both, None))
    assert decode(message, None).slots == ((both[0], Round(0, 1)), (both[1], Round(0, 0)))
    assert len(message) == ctypes.sizeof(Header) + ctypes.sizeof(Section) + 8 * (2 + 2)


def test_a_range_has_at_most_4096_slots(c: ctypes.CDLL) -> None:
    """So a message, a list and a log entry have one largest size, whatever the caches' capacity is."""
    zero, one = (Native(c, host, 2, 65536) for host in (0, 1))
    near, far = Slot(0, 100), Slot(0, 64 * RANGE_WORDS + 100)
    assert zero.announce([near, far], None) == INVALID
    wide = section((1, *[0] * (RANGE_WORDS - 1), 1))
    assert one.receive(0, packet(wide)) == INVALID
    assert one.receive(0, packet(section((1, *[0] * (RANGE_WORDS - 1))))) == 0


def test_slots_that_are_decided_at_one_time_but_lie_far_apart_are_several_batches(c: ctypes.CDLL) -> None:
    orders = [Native(c, host, 3, 65536) for host in range(3)]
    first, near, far = Slot(2, 70), Slot(2, 4000), Slot(2, 65535)

    def post(source: int, slots: list[Slot]) -> None:
        message = raw(orders[source].announce(slots, None))
        for target, order in enumerate(orders):
            assert target == source or order.receive(source, message) == 0

    post(0, [first, near])
    post(0, [far])
    both = [raw(orders[1].announce([first, near], None)), raw(orders[2].announce([far], None))]
    last = [raw(orders[1].announce([far], None)), raw(orders[2].announce([first, near], None))]
    for index, source in enumerate((1, 2)):
        for message in (both[index], last[index]):
            for target, order in enumerate(orders):
                assert target == source or order.receive(source, message) == 0
    logs = []
    for order in orders:
        owed = order.owed()
        assert not owed or all(o.receive(orders.index(order), owed) == 0 for o in orders if o is not order)
    for order in orders:
        log = []
        while (entry := order.take()) is not None:
            assert entry.end - entry.first <= RANGE_WORDS
            log.append(slots_in(entry.set, entry.first, entry.words[: entry.end - entry.first]))
        logs.append(log)
    assert logs[0] == logs[1] == logs[2] == [[first, near], [far]]


def test_announcing_again_needs_no_message(c: ctypes.CDLL) -> None:
    zero, _ = pair(c)
    raw(zero.announce([Slot(0, 1)], None))
    assert zero.announce([Slot(0, 1)], None) == 0
    assert len(decode(raw(zero.announce([Slot(0, 1), Slot(0, 2)], None)), None).slots) == 1


def test_too_little_room_changes_nothing(c: ctypes.CDLL) -> None:
    zero, one = pair(c)
    made = ResponseList(1, frozenset({Slot(0, 0)}), frozenset({Slot(1, 1)}))
    length = len(raw(Native(c, 0, 2).announce(SLOTS, made)))
    before = bytes(zero.known)
    for room in range(0, length, 8):
        assert zero.announce(SLOTS, made, room) == LATER
    assert bytes(zero.known) == before
    message = raw(zero.announce(SLOTS, made, length))
    assert decode(message, made).carried == made
    assert one.receive(0, message) == 0


def test_a_list_may_take_a_quarter_of_the_ring(c: ctypes.CDLL) -> None:
    zero, one = pair(c)
    assert zero.announce((), ResponseList(0, size=4)) != INVALID
    assert zero.announce((), ResponseList(1, size=5)) == INVALID
    assert one.announce((), ResponseList(1)) == INVALID, "only host 0 announces lists"


def test_an_announcement_behind_a_recall_leaves_no_trace(c: ctypes.CDLL) -> None:
    """Host 1, whose count is high, announces a slot before it has heard of the recall."""
    zero, one = pair(c)
    tell(one, zero, 1, [Slot(0, 1)])
    tell(one, zero, 1, [Slot(0, 2)])
    raw(zero.announce((), ResponseList(0, frozenset({Slot(0, 0)}))))
    assert zero.take() is not None
    before = zero.rest
    tell(one, zero, 1, [Slot(0, 0)])
    assert zero.rest == before


def packet(sections: bytes = b"", listed: bytes = b"", **changes: int) -> bytes:
    """Return a first message; `changes` are fields of its header."""
    length = ctypes.sizeof(Header) + len(sections)
    fields = {"bytes": length + len(listed), "list": length if listed else 0, "stamp": 1, "upto": 1}
    return bytes(Header(**{**fields, **changes})) + sections + listed


def section(words: Iterable[int] = (1,), values: Iterable[int] = (0,), **changes: int) -> bytes:
    """Return a section of slot 0 of set 0."""
    words, values = tuple(words), tuple(values)
    head = {"kind": ANNOUNCED, "end": len(words), "n": len(values), **changes}
    return bytes(Section(**head)) + b"".join(word.to_bytes(8, "little") for word in words + values)


def listed(sections: bytes = b"", audience: bytes = b"", **changes: int) -> bytes:
    """Return a list of a message with stamp 1."""
    fields = {"time": 1, "number": 7, "audience_bytes": len(audience)}
    length = ctypes.sizeof(ListHead) + len(audience) + len(sections)
    return bytes(ListHead(**{**fields, "bytes": length, **changes})) + audience + sections


RIGHT = {
    "empty": packet(),
    "slots": packet(section((0, 3)) + section(set=15, end=2, first=1) + section((3,), (0, 2), set=1)),
    "digests": packet(section((1, 3), (0, 5, 6), kind=COMPARED)),
    "digests and rounds": packet(section((3,), (0, 2, 5, 6), kind=COMPARED)),
    "list": packet(b"", listed(section((1,), (), kind=RECALLED) + section(kind=DELEGATED), bytes(24))),
    "both": packet(section(), listed()),
    "largest list": packet(b"", listed(b"", bytes(LIST_MAX - ctypes.sizeof(ListHead)))),
}
WRONG = {
    "no header": packet()[:40],
    "half words": packet(bytes=52) + bytes(4),
    "too many bytes": packet(bytes=56),
    "too few bytes": packet(section(), bytes=48),
    "a message is missing": packet(before=1, stamp=2, upto=2),
    "no stamp": packet(stamp=0),
    "upto below stamp": packet(stamp=2),
    "upto too high": packet(upto=2**62 + 1),
    "set": packet(section(set=MAX_SETS)),
    "no words": packet(section((), ())),
    "words backwards": packet(section(first=2)),
    "words beyond the set": packet(section((1, 1, 1))),
    "words beyond the set, of another start": packet(section(first=2, end=3)),
    "words beyond the message": packet(section((1, 1))[:24]),
    "values beyond the message": packet(section((1, 1), (0, 0))[:-8]),
    "values without end": packet(section(n=2**61)),
    "half a section": packet(section()[:8]),
    "too many values": packet(section((1,), (0, 0))),
    "too few values": packet(section((7,), (0, 0))),
    "no values": packet(section((1,), ())),
    "kind": packet(section(kind=DELEGATED)),
    "too few digests": packet(section((3,), (0, 0), kind=COMPARED)),
    "too many digests": packet(section((3,), (0, 0, 1, 1, 1), kind=COMPARED)),
    "no digests": packet(section((3,), (), kind=COMPARED)),
    "digests in a list": packet(b"", listed(section((1,), (0, 0), kind=COMPARED))),
    "twice": packet(section() + section()),
    "list in the header": packet(section(), listed(), list=8),
    "list made of the header": packet(list=16, taken=24),
    "list between words": packet(section(), listed(), list=84),
    "list at the end": packet(section(), list=80),
    "list beyond the end": packet(section(), list=88),
    "half a list": packet(b"", listed()[:16]),
    "list of another time": packet(b"", listed(time=2)),
    "bytes of a list": packet(b"", listed(bytes=32)),
    "audience": packet(b"", listed(b"", bytes(8), audience_bytes=9)),
    "audience without end": packet(b"", listed(b"", bytes(8), audience_bytes=2**32 - 1)),
    "announced in a list": packet(b"", listed(section())),
    "recalled with values": packet(b"", listed(section(kind=RECALLED))),
    "bad section in a list": packet(b"", listed(section(kind=DELEGATED, set=MAX_SETS))),
    "too large a list": packet(b"", listed(b"", bytes(LIST_MAX - ctypes.sizeof(ListHead) + 8))),
}


@pytest.mark.parametrize("message", RIGHT.values(), ids=RIGHT)
def test_a_right_message_is_taken(c: ctypes.CDLL, message: bytes) -> None:
    assert Native(c, 1, 3).receive(0, message) == 0


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG)
def test_a_wrong_message_is_refused(c: ctypes.CDLL, message: bytes) -> None:
    assert Native(c, 1, 3).receive(0, message) == INVALID


def test_a_message_is_refused_from_the_wrong_host(c: ctypes.CDLL) -> None:
    assert [Native(c, 1, 3).receive(source, packet()) for source in (1, 3, 2**32 - 1)] == [INVALID] * 3
    assert Native(c, 1, 3).receive(2, RIGHT["list"]) == INVALID, "only host 0 announces lists"


def test_later_rounds_with_as_many_recalls_have_one_parity(c: ctypes.CDLL) -> None:
    one = Native(c, 1, 3)
    assert one.receive(0, packet(section(values=(2,)))) == 0
    assert one.receive(2, packet(section(values=(3,)))) == INVALID


def test_positions_in_the_ring_are_checked(c: ctypes.CDLL) -> None:
    assert Native(c, 0, 3).receive(1, packet(taken=8)) == INVALID, "beyond what host 0 has announced"
    one = Native(c, 1, 3)
    assert one.receive(2, packet(taken=8)) == 0
    assert one.receive(2, packet(before=1, stamp=2, upto=2)) == INVALID, "it goes back"


def test_the_number_of_taken_entries_never_goes_back(c: ctypes.CDLL) -> None:
    one = Native(c, 1, 3)
    assert one.receive(2, packet(entries=5)) == 0
    assert one.receive(2, packet(before=1, stamp=2, upto=2, entries=4)) == INVALID


def fill(order: Native, sizes: Iterable[int], before: int = 0) -> list[int]:
    """Send lists of these bytes from host 0, whose count is `before`."""
    done = []
    for count, size in enumerate(sizes, before):
        made = listed(b"", bytes(size - ctypes.sizeof(ListHead)), time=count + 1)
        done.append(order.receive(0, packet(b"", made, before=count, stamp=count + 1, upto=count + 1)))
    return done


def test_a_ring_does_not_overflow(c: ctypes.CDLL) -> None:
    assert fill(Native(c, 1, 3), [LIST_MAX] * 5) == [0] * 4 + [INVALID]


def test_a_full_ring_refuses_lists_only(c: ctypes.CDLL) -> None:
    """There is no room behind the last list before the end of the ring, and none at its start."""
    one = Native(c, 1, 3)
    assert fill(one, [3 * UNIT] * 5) == [0] * 5
    assert one.receive(2, packet(upto=5)) == 0
    assert one.owed()
    assert [one.take() is not None for _ in range(6)] == [True] * 5 + [False]
    assert fill(one, [3 * UNIT] * 4 + [UNIT], before=5) == [0] * 5
    assert one.receive(2, packet(section(), before=5, stamp=6, upto=6)) == 0
    raw(one.announce([Slot(0, 0)], None))
    assert fill(one, [UNIT], before=10) == [INVALID]


def mutate(chance: random.Random, message: bytes, boundaries: Iterable[int]) -> bytes:
    """Change some words, or the length; the header's length may follow."""
    data = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(0, len(data), chance.choice((2, 8)))
        value = chance.choice(
            (0, 1, 2, 63, 64, 65, 255, chance.getrandbits(64), 2**16 - 1, 2**32 - 1, 2**64 - 1)
        )
        width = chance.choice((2, 4, 8))
        data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")[: len(data) - at]
    if chance.random() < 0.3:
        del data[chance.choice([*boundaries, chance.randrange(len(data))]) :]
        data[:4] = (len(data) if chance.random() < 0.8 else 2**31).to_bytes(4, "little")[: len(data)]
    return bytes(data)


def attack(c: ctypes.CDLL, seed: int, rounds: int) -> int:
    """Send wrong messages, then three a round, most of them changed; return how many were refused."""
    chance = random.Random(seed)
    refused = sum(Native(c, 1, 3).receive(0, message) == INVALID for message in WRONG.values())
    for _ in range(rounds):
        peer, victim = Native(c, 0, 3), Native(c, chance.randrange(1, 3), 3)
        for number in range(3):
            slots = {Slot(chance.randrange(MAX_SETS), chance.randrange(CAPACITY)) for _ in range(5)}
            made = ResponseList(number, frozenset(SLOTS), frozenset(slots), size=chance.choice((1, 4)))
            message = raw(peer.announce(slots, chance.choice((None, made))))
            if chance.random() < 0.7:
                listed = Header.from_buffer_copy(message).list
                message = mutate(chance, message, (8, 48, 64, 72, max(listed, 8), listed + 24))
            elif chance.random() < 0.1:
                message = chance.randbytes(chance.randrange(400))
            refused += victim.receive(chance.choice((0, 0, 0, 1, 2, 3, 2**32 - 1)), message) == INVALID
            victim.announce(slots, None)
            victim.owed()
            found = SlotRange()
            while (entry := victim.take()) is not None:
                while entry.kind == LIST and c.pyhvd_host_order_next_range(
                    victim.address, byref(entry), byref(found)
                ):
                    assert found.set < MAX_SETS
                    assert found.first < found.end <= CAPACITY // 64
                assert entry.kind == LIST or entry.first < entry.end <= CAPACITY // 64
            victim.check_guard()
    return refused


def test_no_message_does_harm(c: ctypes.CDLL) -> None:
    assert 100 < attack(c, seed=1, rounds=examples(2000)) < examples(2000) * 3


def test_no_message_does_harm_under_the_address_sanitizer(tmp_path: Path) -> None:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    library = build(tmp_path, *flags)
    where = subprocess.run([*COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True)
    asan = where.stdout.strip()
    if not Path(asan).is_absolute():
        pytest.skip("no libasan.so")
    environment = {
        **os.environ,
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(ROOT),
    }
    code = f"from {__name__} import attack, load; print(attack(load({str(library)!r}), 2, {examples(2000)}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 100
