"""The vault: which commit counts, whatever happens to its writer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyhvd.job.commits import vault as module
from pyhvd.job.commits.vault import Seal, Vault, VaultError, are_here, load, pack, packed_size
from tests.waiting import wait_until


def arrays_of(number: int, size: int = 1000) -> list[Any]:
    return [np.full(size, number % 256, np.uint8), np.arange(number, dtype=np.uint8)]


def write(vault: Vault, number: int, size: int = 1000) -> Seal:
    return vault.write(number, 0, arrays_of(number, size), b"rest of %d" % number)


def check(vault: Vault, number: int, size: int = 1000) -> None:
    seal = vault.newest()
    assert seal is not None
    assert seal.number == number
    arrays, rest = load(vault.read(seal))
    assert rest == b"rest of %d" % number
    for found, expected in zip(arrays, arrays_of(number, size), strict=True):
        np.testing.assert_array_equal(found, expected)


def copied(vault: Vault) -> Vault:
    """Return a vault with the same bytes."""
    other = Vault.create()
    for source, target in zip(vault.descriptors, other.descriptors, strict=True):
        os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
    return Vault(other.descriptors)


@given(st.lists(st.binary(max_size=200), max_size=9), st.binary(max_size=200))
def test_what_is_packed_is_loaded(parts: list[bytes], rest: bytes) -> None:
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    memory = np.full(packed_size(arrays, rest), 77, np.uint8)
    pack(arrays, rest, memory)
    found, found_rest = load(memory)
    assert [each.tobytes() for each in found] == parts
    assert found_rest == rest


def test_the_newest_commit_counts() -> None:
    vault = Vault.create()
    assert vault.newest() is None
    for number in range(1, 6):
        seal = write(vault, number)
        assert vault.newest() == seal
        check(vault, number)
        check(Vault(vault.descriptors), number)


def test_slots_grow_and_a_reader_with_an_older_mapping_sees_it() -> None:
    vault = Vault.create()
    reader = Vault(vault.descriptors)
    for number, size in enumerate((10, 5000, 3, 1_000_000, 20_000), 1):
        write(vault, number, size)
        check(reader, number, size)


def test_a_commit_of_another_host_is_taken() -> None:
    source, target = Vault.create(), Vault.create()
    write(target, 3)
    seal = write(source, 8)
    target.take(seal, source.read(seal))
    check(target, 8)
    write(target, 9)
    check(target, 9)


def test_a_record_that_is_torn_at_any_byte_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots before each write of a record, and with each number of its bytes written."""
    vault, snapshots = Vault.create(), []
    write(vault, 1)
    write(vault, 2)
    own = Vault._write_record

    def write_record(self: Vault, slot: int, record: bytes) -> None:
        at = module._RECORDS[slot]
        for count in range(len(record)):
            other = copied(self)
            other._index[at : at + count] = record[:count]
            snapshots.append(other)
        own(self, slot, record)

    monkeypatch.setattr(Vault, "_write_record", write_record)
    write(vault, 3)
    assert len(snapshots) == 2 * module._RECORD.size
    for each in snapshots:
        check(each, 2)
    check(vault, 3)


def test_a_slot_that_is_torn_at_any_part_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class TornError(Exception):
        pass

    vault = Vault.create()
    write(vault, 1)
    for count in (0, 1, 64, 500, 1100):

        def tear(arrays: Any, rest: bytes, memory: Any, count: int = count) -> None:
            whole = np.empty(len(memory), np.uint8)
            pack(arrays, rest, whole)
            memory[:count] = whole[:count]
            raise TornError

        with monkeypatch.context() as patch:
            patch.setattr(module, "pack", tear)
            with pytest.raises(TornError):
                write(vault, 2)
        check(vault, 1)
        check(Vault(vault.descriptors), 1)
    write(vault, 2)
    check(vault, 2)


KILLED = """
    import os, signal, sys
    import numpy as np
    from pyhvd.job.commits import vault as module

    pack = module.pack
    def half(arrays, rest, memory):
        memory[: len(memory) // 2] = 99
        os.kill(os.getpid(), signal.SIGKILL)

    module.pack = half
    vault = module.Vault([int(each) for each in sys.argv[1:]])
    vault.write(2, 0, [np.zeros(5000, np.uint8)], b"rest")
"""


def test_a_writer_that_is_killed_leaves_the_older_commit() -> None:
    vault = Vault.create()
    write(vault, 1)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), *map(str, vault.descriptors)]
    done = subprocess.run(command, pass_fds=vault.descriptors, check=False)
    assert done.returncode == -signal.SIGKILL
    check(vault, 1)
    write(vault, 2)
    check(vault, 2)


WRITES_ON = """
    import random, sys, time
    import numpy as np
    from pyhvd.job.commits.vault import Vault

    vault = Vault([int(each) for each in sys.argv[1:]])
    number = 1
    while True:
        number += 1
        time.sleep(random.random() / 1000)
        vault.write(number, 0, [np.full(2_000_000, number % 256, np.uint8)], b"rest")
"""


def test_a_copy_beside_a_writer_is_whole() -> None:
    vault = Vault.create()
    write(vault, 1, 2_000_000)
    command = [sys.executable, "-c", textwrap.dedent(WRITES_ON), *map(str, vault.descriptors)]
    copies = failures = 0
    with subprocess.Popen(command, pass_fds=vault.descriptors) as writer:
        try:
            wait_until(lambda: vault.commit > 1)
            until = time.monotonic() + 20
            while min(copies, failures) < 20 and time.monotonic() < until:
                seal = vault.newest()
                assert seal is not None
                data = vault.copy(seal)
                failures += data is None
                if data is not None:
                    (array,), rest = load(data)
                    assert (set(np.unique(array).tolist()), rest) == ({seal.number % 256}, b"rest")
                    copies += 1
        finally:
            writer.kill()
    assert copies >= 20


def test_without_memory_the_older_commits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    vault = Vault.create()
    write(vault, 1)
    write(vault, 2)
    records = [vault._read_record(slot) for slot in (0, 1)]
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for call in (lambda: write(vault, 3, 5000), lambda: vault.reserve(5000)):
        with pytest.raises(VaultError) as caught:
            call()
        assert "of which each host holds two: No space left on device" in str(caught.value)
    check(vault, 2)
    assert [vault._read_record(slot) for slot in (0, 1)] == records
    write(vault, 3, 900)  # not larger than the one that it replaces
    check(vault, 3, 900)


def test_what_is_reserved_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault.create()
    write(vault, 1)
    vault.reserve(packed_size(arrays_of(2, 100_000), b"rest of 2"))
    check(vault, 1)
    monkeypatch.delattr(os, "posix_fallocate")
    write(vault, 2, 100_000)
    check(vault, 2, 100_000)


def test_words_are_seen_by_all() -> None:
    vault = Vault.create()
    other = Vault(vault.descriptors)
    assert (vault.wished, vault.left) == (0, 0)
    vault.wished, other.left = 3, 4
    assert (other.wished, other.left) == (3, 4)
    assert vault.left == 4


def test_a_child_without_the_descriptors_has_no_vault() -> None:
    vault = Vault.create()
    assert are_here(vault.descriptors)
    assert not are_here(vault.descriptors[::-1])
    assert not are_here((0, 1, 2))
    numbers = vault.descriptors
    vault.close()
    assert not are_here(numbers)
