"""When commits are stored, and how they come back; the store is a list."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyhvd.job.commits.store import StoreError
from pyhvd.job.commits.store_process import StoreWriter, restore
from pyhvd.job.commits.vault import Seal, Vault, load
from pyhvd.job.messages import Restored

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="vaults need Linux")


class ListedStore:
    """A store that is a list, and may be away."""

    def __init__(self) -> None:
        self.commits: list[tuple[Seal, bytes]] = []
        self.away = False

    def write(self, seal: Seal, data: bytes) -> None:
        if self.away:
            raise StoreError("it is away")
        self.commits.append((seal, data))

    def read(self) -> tuple[Seal, bytes] | None:
        if self.away:
            raise StoreError("it is away")
        return max(self.commits, key=lambda each: each[0].mark, default=None)

    def newest(self) -> Seal | None:
        found = self.read()
        return None if found is None else found[0]

    @property
    def numbers(self) -> list[int]:
        return [seal.number for seal, _ in self.commits]


@pytest.fixture
def vault() -> Iterator[Vault]:
    with closing(Vault.create()) as made:
        yield made


def commit(vault: Vault, number: int, generation: int = 0) -> Seal:
    return vault.write(number, generation, [np.full(100, number, np.uint8)], b"rest")


def make(vault: Vault, store: Any, every: int = 1) -> tuple[StoreWriter, list[str]]:
    said = list[str]()
    writer = StoreWriter(vault, store, every, said.append)
    return writer, said


def turn(writer: StoreWriter, now: float = 0.0) -> None:
    """Let a writer look at the store, if it has not, and act."""
    writer.turn(now)
    writer.turn(now)


def test_each_commit_is_stored_once(vault: Vault) -> None:
    store = ListedStore()
    writer, _ = make(vault, store)
    writer.turn(0.0)
    for number in (1, 2, 3):
        seal = commit(vault, number)
        turn(writer)
        assert vault.stored == seal.mark
    assert store.numbers == [1, 2, 3]
    turn(make(vault, store)[0])
    assert store.numbers == [1, 2, 3]


def test_each_third_commit_and_those_that_ranks_wait_for(vault: Vault) -> None:
    store = ListedStore()
    writer, _ = make(vault, store, every=3)
    for number in range(1, 10):
        seal = commit(vault, number)
        if number == 4:
            vault.urged = seal.mark
        turn(writer)
    assert store.numbers == [3, 4, 7]


def test_a_store_that_is_away_is_told_once_a_minute(vault: Vault) -> None:
    store = ListedStore()
    store.away = True
    writer, said = make(vault, store)
    seal = commit(vault, 1)
    for now in range(100):
        writer.turn(float(now))
    assert vault.store_failure == (seal.mark, "it is away")
    assert said == ["commits are not stored: it is away"] * 2
    vault.urged = commit(vault, 2).mark
    store.away = False
    turn(writer, 100.0)
    assert vault.stored == vault.urged
    assert store.numbers == [2]


def test_the_writer_of_another_host_goes_on(vault: Vault) -> None:
    store = ListedStore()
    commit(vault, 5)
    turn(make(vault, store, every=5)[0])
    with closing(Vault.create()) as other:
        later, _ = make(other, store, every=5)
        for number in range(6, 11):
            commit(other, number, generation=1)
            turn(later)
    assert store.numbers == [5, 10]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12), st.integers(1, 4))
def test_ranks_that_wait_are_answered(turns: list[tuple[bool, bool, bool]], every: int) -> None:
    """Soon a commit is stored, or has failed; each newer commit in the store is stored later."""
    with closing(Vault.create()) as vault:
        store = ListedStore()
        writer, _ = make(vault, store, every)
        number = 0
        for now, (is_away, waits, commits) in enumerate(turns):
            store.away = is_away
            if commits or not number:
                number += 1
                seal = commit(vault, number)
                if waits:
                    vault.urged = seal.mark
            turn(writer, float(now))
            if vault.urged == seal.mark:
                assert seal.mark in (vault.stored, vault.store_failure[0])
            assert store.numbers == sorted(set(store.numbers))


def test_a_copy_of_a_slot_that_a_rank_replaces_does_not_count(vault: Vault) -> None:
    first = commit(vault, 1)
    assert vault.copy(first) == bytes(vault.read(first))
    commit(vault, 2)
    assert vault.copy(first) is not None
    vault._write_record(0, bytes(28))
    assert vault.copy(first) is None
    commit(vault, 3)
    assert vault.copy(first) is None


def test_the_newest_commit_comes_back(vault: Vault) -> None:
    store: Any = ListedStore()
    with closing(Vault.create()) as lost:
        writer, _ = make(lost, store)
        for number in (1, 2):
            commit(lost, number, generation=3)
            turn(writer)
    assert restore(vault, lambda: store, 0.0) == Restored(2)
    newest = vault.newest()
    assert newest is not None
    assert (newest.number, newest.generation) == (2, 3)
    arrays, rest = load(vault.read(newest))
    assert (arrays[0].tolist(), rest) == ([2] * 100, b"rest")
    commit(vault, 3)
    assert restore(vault, lambda: store, 0.0) == Restored(3)


def test_nothing_comes_back(vault: Vault) -> None:
    store: Any = ListedStore()
    assert restore(vault, lambda: store, 0.0) == Restored(
        0, "the store has no commit of this job", empty=True
    )
    store.away = True
    assert restore(vault, lambda: store, 0.0) == Restored(0, "it is away")
