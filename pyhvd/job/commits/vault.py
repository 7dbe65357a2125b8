"""The committed state of an elastic job on one host, in memory that the host's agent holds.

Ranks may die at any moment, also while they write here. Two slots take turns; an index says which is newest.

Invariants
----------
1. One process at a time writes slots and records: the first of the ranks that share the vault. The agent
   starts the ranks of the next generation after it has reaped that process. A reader of a record sees all
   that the writer has written before: it is its successor, or a collective has finished between the two.
2. The slot of the newest record is never written. A record is written after its slot, and has a checksum: one
   that was torn, or not written, leaves the older one the newest.
3. `wished`, `suspends` and `ending` are written by the agent alone. `left` and `has_callbacks` are written by
   any rank of the host; all ranks of one generation write the same value. The agent clears these five between
   two generations. `urged` is written by the first rank, `stored` by the process that stores commits
   (:mod:`pyhvd.job.commits.store_process`). Each is one aligned word, which no reader sees half written.
4. The memory of a commit exists before its record is cleared. A full machine is an error, and no SIGBUS.
5. The process that stores commits reads a slot while ranks may write. A copy counts only if the slot's record
   is still the same 20 us after the copy: a writer clears it first, and all cores see that much sooner.

The agent reads the index alone: what is in the slots, ranks unpickle.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

DESCRIPTORS = ("PYHVD_ELASTIC_INDEX", "PYHVD_ELASTIC_SLOT_0", "PYHVD_ELASTIC_SLOT_1")
"""Variables of the ranks, which hold the descriptors' numbers."""
LOST_OTHERS = signal.SIGUSR2
"""What a rank with failure callbacks gets when other ranks are lost, before it is killed."""
_INDEX_BYTES = 4096
_WORD = struct.Struct("<Q")
_TEXT = struct.Struct("<H1022s")  # its length in bytes, and UTF-8
_TEXT_AT = 256
_SEEN_S = 2e-5  # every core sees a write sooner
_RECORD = struct.Struct("<QQQI")  # of Seal, and a checksum
_RECORDS = (64, 128)
_ALIGNMENT = 64
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux has it
_NAMES = ("pyhvd-vault-index", "pyhvd-vault-0", "pyhvd-vault-1")


class VaultError(RuntimeError):
    """There is not enough memory for a commit, or what was committed is not whole."""


class Seal(msgspec.Struct, frozen=True, order=True):
    """What a host holds.

    Attributes
    ----------
    number : int
        The commit's number, from 1.
    generation : int
        The generation of the ranks that committed.
    size : int
        Bytes of the slot.
    """

    number: int
    generation: int
    size: int

    @property
    def mark(self) -> int:
        """A number that grows from one commit of a job to the next, also when a generation goes back."""
        return self.generation << 40 | self.number


class _Word:
    """An attribute of a vault that is one word of its index; see invariant 3 of the module."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def __get__(self, vault: Vault, _: object = None) -> int:
        return int(_WORD.unpack_from(vault._index, self._offset)[0])

    def __set__(self, vault: Vault, value: int) -> None:
        _WORD.pack_into(vault._index, self._offset, value)


class Vault:
    """Two slots and their index; every process of a host that has the descriptors sees the same.

    Parameters
    ----------
    descriptors : sequence of int
        Of the index and the slots; they stay open until :meth:`close`.
    """

    wished = _Word(0)
    """The generation that the ranks shall make room for; an older one if they need not."""
    left = _Word(8)
    """The generation, plus one, whose ranks here have made room; 0 if none has."""
    has_callbacks = _Word(16)
    """Whether a rank here has failure callbacks, for which it needs time before it is killed."""
    urged = _Word(24)
    """The mark of the newest commit of which ranks wait until it is stored."""
    stored = _Word(32)
    """The mark of the newest commit that is stored; 0 if none is."""
    _failed = _Word(40)
    ending = _Word(48)
    """Whether the launcher has sent the ranks a signal that ends them."""
    suspends = _Word(56)
    """Whether the job ends once the ranks have made room; written before `wished`."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self.files = dict(zip(DESCRIPTORS, self.descriptors, strict=True))
        self._index = mmap.mmap(self.descriptors[0], _INDEX_BYTES)
        self._slots: list[mmap.mmap | None] = [None, None]

    @classmethod
    def create(cls) -> Vault:
        """Return an empty vault."""
        descriptors = [os.memfd_create(name, os.MFD_CLOEXEC) for name in _NAMES]
        os.ftruncate(descriptors[0], _INDEX_BYTES)
        return cls(descriptors)

    def close(self) -> None:
        """Forget the state, unless another process holds it too."""
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._index.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    @property
    def number(self) -> int:
        """A number that tells the vaults of one machine apart."""
        return os.fstat(self.descriptors[0]).st_ino

    @property
    def store_failure(self) -> tuple[int, str]:
        """The mark up to which commits could not be stored, 0 if there is no problem; and the reason."""
        mark = self._failed
        length, text = _TEXT.unpack_from(self._index, _TEXT_AT)
        return mark, text[:length].decode(errors="replace")

    @store_failure.setter
    def store_failure(self, failure: tuple[int, str]) -> None:
        mark, text = failure
        data = text.encode()[: _TEXT.size - 2]
        _TEXT.pack_into(self._index, _TEXT_AT, len(data), data)
        self._failed = mark  # last: a reader of the mark has the text

    def newest(self) -> Seal | None:
        """Return what was committed last, if anything."""
        return max(filter(None, map(self._read_record, (0, 1))), default=None)

    @property
    def commit(self) -> int:
        """The number of the newest commit; 0 if there is none."""
        newest = self.newest()
        return 0 if newest is None else newest.number

    def reserve(self, size: int) -> None:
        """Get memory for the next commit, so that :meth:`write` finds it; what was committed before stays.

        Raises
        ------
        VaultError
            There is not enough memory.
        """
        self._grow(self._spare_slot(), size)

    def write(self, number: int, generation: int, arrays: Sequence[Any], rest: bytes) -> Seal:
        """Commit a state, by value.

        Parameters
        ----------
        number, generation : int
            See :class:`Seal`.
        arrays, rest
            See :func:`pack`.

        Raises
        ------
        VaultError
            There is not enough memory. What was committed before stays.
        """
        size = packed_size(arrays, rest)
        slot = self._spare_slot()
        memory = self._grow(slot, size)
        self._write_record(slot, bytes(_RECORD.size))
        pack(arrays, rest, np.frombuffer(memory, np.uint8))
        seal = Seal(number, generation, size)
        self._write_record(slot, _encode(seal))
        return seal

    def read(self, seal: Seal) -> memoryview:
        """Return the bytes of a commit, which must be one of the two that are here."""
        slot = 0 if self._read_record(0) == seal else 1
        return memoryview(self._map(slot, seal.size))[: seal.size]

    def copy(self, seal: Seal) -> bytes | None:
        """Return the bytes of a commit, though ranks may write; None if one has begun to replace it."""
        slot = next((number for number in (0, 1) if self._read_record(number) == seal), None)
        if slot is None:
            return None
        data = bytes(memoryview(self._map(slot, seal.size))[: seal.size])
        time.sleep(_SEEN_S)
        return data if self._read_record(slot) == seal else None

    def take(self, seal: Seal, data: Any) -> None:
        """Keep the bytes of a commit of another host, or of the store."""
        slot = self._spare_slot()
        memory = self._grow(slot, seal.size)
        self._write_record(slot, bytes(_RECORD.size))
        memory[: seal.size] = memoryview(data).cast("B")
        self._write_record(slot, _encode(seal))

    def _spare_slot(self) -> int:
        newest = self.newest()
        return 0 if newest is None or self._read_record(1) == newest else 1

    def _read_record(self, slot: int) -> Seal | None:
        record = self._index[_RECORDS[slot] : _RECORDS[slot] + _RECORD.size]
        seal = Seal(*_RECORD.unpack(record)[:-1])
        return seal if seal.number and _encode(seal) == record else None

    def _write_record(self, slot: int, record: bytes) -> None:
        self._index[_RECORDS[slot] : _RECORDS[slot] + _RECORD.size] = record

    def _grow(self, slot: int, size: int) -> mmap.mmap:
        """Return a slot's memory, which exists: a full machine is an error here, and not a SIGBUS later."""
        if os.fstat(self.descriptors[1 + slot]).st_size < size:
            # Up to 1/16 more: most commits differ a little in size, and would need a new mapping each time.
            unit = max(mmap.PAGESIZE, 1 << size.bit_length() - 5)
            try:
                os.posix_fallocate(self.descriptors[1 + slot], 0, -(-size // unit) * unit)
            except OSError as exc:
                raise VaultError(
                    f"no memory for a commit of {size} bytes, of which each host holds two: {exc.strerror}"
                ) from exc
        return self._map(slot, size)

    def _map(self, slot: int, size: int) -> mmap.mmap:
        mapped = self._slots[slot]
        if mapped is None or len(mapped) < size:
            # Mapped at once: a page fault for each page would cost more than the copy of a commit.
            self._slots[slot] = mapped = mmap.mmap(self.descriptors[1 + slot], 0, mmap.MAP_SHARED | _POPULATE)
        return mapped


def are_here(descriptors: Sequence[int]) -> bool:
    """Return whether this process has a vault's descriptors.

    A child process that a rank starts inherits the variables, but not the descriptors: their numbers may
    belong to other files there.
    """
    try:
        found = [os.readlink(f"/proc/self/fd/{each}") for each in descriptors]
    except OSError:
        return False
    return found == [f"/memfd:{name} (deleted)" for name in _NAMES]


def packed_size(arrays: Sequence[Any], rest: bytes) -> int:
    """Return how many bytes :func:`pack` writes."""
    return _offsets([len(rest), *map(len, arrays)])[-1]


def pack(arrays: Sequence[Any], rest: bytes, memory: Any) -> None:
    """Copy a state into memory, from which :func:`load` reads it.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray of uint8, each of shape (n,)
        Arrays as bytes.
    rest : bytes
        All else, pickled.
    memory : numpy.ndarray of uint8, shape (m,)
        At least :func:`packed_size` bytes.
    """
    sizes = [len(rest), *map(len, arrays)]
    offsets = _offsets(sizes)
    memory[: 8 * (1 + len(sizes))] = np.array([len(sizes), *sizes], "<u8").view(np.uint8)
    for part, offset in zip([np.frombuffer(rest, np.uint8), *arrays], offsets, strict=False):
        memory[offset : offset + len(part)] = part


def load(data: Any) -> tuple[list[Any], bytes]:
    """Return what :func:`pack` has written: arrays that lie in `data`, and the rest."""
    words = np.frombuffer(data, "<u8", len(data) // 8)
    sizes = words[1 : 1 + int(words[0])].tolist()
    rest, *arrays = (
        np.frombuffer(data, np.uint8, size, offset)
        for size, offset in zip(sizes, _offsets(sizes), strict=False)
    )
    return arrays, rest.tobytes()


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return where parts of these sizes begin, after their number and their sizes; then where they end."""
    offsets, end = [], 8 * (1 + len(sizes))
    for size in sizes:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(end)
        end += size
    return [*offsets, end]


def _encode(seal: Seal) -> bytes:
    fields = seal.number, seal.generation, seal.size
    return _RECORD.pack(*fields, zlib.crc32(_RECORD.pack(*fields, 0)))
