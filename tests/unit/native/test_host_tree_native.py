"""The tree of hosts in C against its model: equal messages and logs; and the ways between hosts."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Structure, byref, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.transport.link_layout import parents_of
from tests.thinning import examples
from tests.unit.native.host_order import Entry, Message, ResponseList, Slot
from tests.unit.native.host_tree import HostTree, Post
from tests.unit.native.test_host_order import check_one_log
from tests.unit.native.test_host_order_native import (
    CAPACITY,
    INVALID,
    LIST,
    MAX_HOSTS,
    MAX_SETS,
    ROOM,
    LogEntry,
    WireMessage,
    build,
    decode,
    list_of,
    load,
    range_of,
    slots_in,
    words_of,
)
from tests.unit.native.test_host_tree import DEEP, TreeCluster


class Tree(Structure):
    """A pyhvd_host_tree."""

    _fields_ = (
        ("host", c_uint32),
        ("hosts", c_uint32),
        ("tops", c_uint32),
        ("parents", c_int32 * MAX_HOSTS),
        ("n", c_uint32),
        ("above", c_uint32),
        ("neighbours", c_uint32 * MAX_HOSTS),
        ("order", c_void_p),
        ("below", c_void_p * MAX_HOSTS),
    )


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = load(build(tmp_path_factory.mktemp("host_tree")))
    library.pyhvd_host_tree_bytes.restype = c_size_t
    library.pyhvd_host_tree_announce.restype = c_int64
    library.pyhvd_host_tree_pass.restype = c_int64
    library.pyhvd_host_tree_way.restype = c_uint32
    return library


def tree_of(c: ctypes.CDLL, host: int, parents: Sequence[int]) -> Tree | None:
    """Return a host's place in a tree; None: there is no such tree."""
    tree = Tree()
    above = (c_int32 * len(parents))(*parents)
    status = c.pyhvd_host_tree_init(byref(tree), c_uint32(host), c_uint32(len(parents)), above)
    assert status in (0, INVALID)
    return None if status else tree


class Twin(HostTree):
    """The model and the C code, which must agree on every message and entry."""

    def __init__(self, c: ctypes.CDLL, host: int, parents: Sequence[int]) -> None:
        super().__init__(host, parents)
        tree = tree_of(c, host, parents)
        assert tree is not None
        size = c.pyhvd_host_tree_bytes(byref(tree), MAX_SETS, CAPACITY)
        self._c, self._tree, self._memory = c, byref(tree), (c_uint64 * (size // 8))()
        c.pyhvd_host_tree_attach(self._tree, self._memory, MAX_SETS, CAPACITY)
        c.pyhvd_host_tree_clear(self._tree, MAX_SETS, CAPACITY)
        self._order = c_void_p(tree.order)
        self._out = (c_uint64 * (ROOM // 8))()
        assert sorted(tree.neighbours[: tree.above]) == sorted(self.above)
        assert tree.neighbours[tree.above : tree.n] == list(self.below)

    def announce(
        self,
        marked: Iterable[Slot],
        carried: ResponseList | None = None,
        digests: Mapping[Slot, int] | None = None,
    ) -> Post | None:
        slots = sorted(marked)
        post = super().announce(slots, carried, digests)
        slot_range = byref(range_of(0, slots, [], digests)) if slots else None
        made = byref(list_of(carried)) if carried is not None else None
        length = self._c.pyhvd_host_tree_announce(self._tree, slot_range, made, self._out, c_size_t(ROOM))
        assert (length > 0) == bool(post) or not self.above
        return post and self._compare(post, length)

    def owed(self) -> Post:
        post = super().owed()
        length = self._c.pyhvd_host_order_owed(self._order, self._out, c_size_t(ROOM))
        assert (length > 0) == bool(post) or not self.above
        return self._compare(post, length)

    def receive(self, source: int, message: Message) -> None:
        assert isinstance(message, WireMessage)
        super().receive(source, message)
        data = words_of(message.raw)
        size = c_size_t(len(message.raw))
        assert self._c.pyhvd_host_tree_receive(self._tree, c_uint32(source), data, size) == 0

    def take(self) -> tuple[Entry, ResponseList | None, Post] | None:
        expected, entry = super().take(), LogEntry()
        assert self._c.pyhvd_host_tree_take(self._tree, byref(entry)) == (expected is not None)
        if expected is None:
            return None
        made, carried, post = expected
        assert (entry.kind == LIST, entry.time) == (carried is not None, made.time)
        if carried is None:
            assert (
                tuple(slots_in(entry.set, entry.first, entry.words[: entry.end - entry.first])) == made.slots
            )
            assert tuple(slots_in(entry.set, CAPACITY // 64 - 1, [entry.unlike])) == made.unlike
        passed = []
        for child, message in post:
            arguments = c_uint32(child), byref(entry), self._out, c_size_t(ROOM)
            passed += self._compare([(child, message)], self._c.pyhvd_host_tree_pass(self._tree, *arguments))
        return made, carried, passed

    def _compare(self, post: Post, length: int) -> Post:
        """Return the messages with their bytes, which are those in C."""
        raw = ctypes.string_at(self._out, max(length, 0))
        assert all(decode(raw, message.carried) == message for _, message in post)
        return [(target, WireMessage(**vars(message), raw=raw)) for target, message in post]


@pytest.mark.timeout(600)
@settings(max_examples=examples(500, longest=True))
@given(parents=st.sampled_from([*DEEP.values(), parents_of(9), parents_of(16)]), seed=st.integers(0, 2**32))
def test_c_does_what_the_model_does(c: ctypes.CDLL, parents: list[int], seed: int) -> None:
    check_one_log(TreeCluster(parents, functools.partial(Twin, c)), seed)


@pytest.mark.parametrize("parents", [*DEEP.values(), *map(parents_of, (3, 8, 9, 17, 64))], ids=str)
def test_the_ways_between_hosts(c: ctypes.CDLL, parents: list[int]) -> None:
    """Each way leads over neighbours, and to the end."""
    trees = [tree_of(c, host, parents) for host in range(len(parents))]
    most = 0
    for a in range(len(parents)):
        for b in set(range(len(parents))) - {a}:
            at, steps = a, 0
            while at != b and steps < len(parents):
                tree = trees[at]
                assert tree is not None
                at, steps = c.pyhvd_host_tree_way(byref(tree), c_uint32(b)), steps + 1
                assert at in tree.neighbours[: tree.n]
            assert at == b
            most = max(most, steps)
    assert most <= 3 or parents in DEEP.values()


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-1, -2], [-1, 0, -1], [-1] * 65], ids=str)
def test_what_is_no_tree_is_refused(c: ctypes.CDLL, parents: list[int]) -> None:
    assert tree_of(c, 0, parents) is None
