"""The collectives of a state: agree on a commit, and bring a state to all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyhvd.api.call import refusing
from pyhvd.api.collectives import Max, Sum, allgather, allreduce_async, alltoall, barrier
from pyhvd.api.objects import Bytes, allgather_object, broadcast_bytes, broadcast_object
from pyhvd.api.process_sets import global_process_set
from pyhvd.api.topology import rank, size
from pyhvd.common.text import describe_values
from pyhvd.elastic.session import RankSession
from pyhvd.engine import context
from pyhvd.errors import MismatchError, RankFailedError
from pyhvd.job.commits.vault import Seal, pack, packed_size
from pyhvd.negotiation.messages import RequestType

NAME = "elastic: "
"""Begins the names of these collectives."""
_STORED_LOOK_S = 0.005
# All hosts are told to leave within this time.
_TOLD_S = 2.0
# A commit that hosts lack is sent in pieces of so many bytes in all.
_PIECE = 1 << 26


def agree(
    number: int, recorded: Sequence[int], trouble: Exception | None, *, shall_leave: bool
) -> tuple[bool, list[int]]:
    """Agree that every rank can make the commit of this number.

    Parameters
    ----------
    number : int
        The commit's number on this rank.
    shall_leave : bool
        Whether this rank's agent wants another generation.
    recorded : sequence of int
        What this rank has recorded since the last commit, by sampler.
    trouble : Exception, optional
        Why this rank cannot commit.

    Returns
    -------
    bool
        Whether the ranks shall make room for another generation.
    list of int
        The number of samples that all ranks have recorded, by sampler.

    Raises
    ------
    MismatchError
        The numbers differ.
    RankFailedError
        Another rank cannot commit. The rank itself raises `trouble`.
    """
    greatest = np.array([number, -number, shall_leave, trouble is not None], np.int64)
    handles = [allreduce_async(greatest, name=f"{NAME}commit", op=Max)]
    if recorded:  # in flight together: one wait for both
        handles.append(allreduce_async(np.array(recorded, np.int64), name=f"{NAME}samples", op=Sum))
    found, *sums = (handle.result().tolist() for handle in handles)
    if found[3]:
        _raise_trouble(trouble)
    if found[0] != -found[1]:
        _raise_mismatch(number)
    return bool(found[2]), sums[0] if sums else []


def any_rank(*, flag: bool) -> bool:
    """Return whether the flag is set on any rank."""
    found = allreduce_async(np.array([flag], np.int64), name=f"{NAME}hosts", op=Max).result()
    return bool(found[0])


def wait_until_stored(session: RankSession) -> str:
    """Wait until the newest commit is stored; return why it cannot be, empty if it is."""
    why = _wait_for_store(session) if rank() == 0 else ""
    return str(broadcast_object(why, 0, f"{NAME}stored"))


def store_before_suspension(session: RankSession) -> str:
    """Wait until the newest commit is stored if the job is suspended; return why it cannot be. On rank 0.

    The agent of another host may have told its ranks sooner to leave: then it is not known here yet why.
    """
    until = time.monotonic() + _TOLD_S
    while not session.shall_leave and time.monotonic() < until:
        time.sleep(_STORED_LOOK_S)
    return _wait_for_store(session) if session.vault.suspends else ""


def _wait_for_store(session: RankSession) -> str:
    """Wait on rank 0, whose host stores commits; return why the newest cannot be stored."""
    newest = session.vault.newest()
    assert newest is not None
    session.vault.urged = newest.mark
    while session.vault.stored < newest.mark:
        mark, why = session.vault.store_failure
        if mark >= newest.mark and why:
            return why
        time.sleep(_STORED_LOOK_S)
    return ""


def bring_from_rank_0(make: Callable[[], tuple[list[Any], bytes]]) -> Any:
    """Return what `make` returns on rank 0, on every rank; see :func:`~pyhvd.job.commits.vault.pack`."""

    def packed() -> Bytes:
        arrays, rest = make()
        data = np.empty(packed_size(arrays, rest), np.uint8)
        pack(arrays, rest, data)
        return data

    return broadcast_bytes(packed, 0, f"{NAME}sync", global_process_set)


def divide_writing(session: RankSession) -> None:
    """Let the first of the ranks that share a vault write commits.

    The ranks of one node may have several agents, each with a vault.
    """
    numbers = allgather(np.array([session.vault.number], np.int64), f"{NAME}vaults").tolist()
    vaults = list(zip(context.current().topology.hosts, numbers, strict=True))
    session.writes = vaults.index(vaults[rank()]) == rank()


def bring_commit(session: RankSession) -> memoryview:
    """Return the bytes of the commit from which this generation goes on, on every rank.

    A host that holds the commit reads its own vault. A host that lacks it gets it from the source, and keeps
    it.

    Raises
    ------
    RuntimeError
        The source lacks the commit.
    """
    seal = session.held
    lacks = seal is None and session.writes
    mine = [lacks, seal.size if seal else 0, seal.generation if seal else 0]
    found = allgather(np.array([mine], np.int64), f"{NAME}who").tolist()
    _, length, generation = found[session.source]
    if not length:
        raise RuntimeError(f"rank {session.source} lacks commit {session.commit}, of which it is the source")
    takers = [each for each, (takes, *_) in enumerate(found) if takes]
    if takers:
        _hand_over(session, Seal(session.commit, generation, length), takers)
    held = session.held
    assert held is not None
    return session.vault.read(held)


def _hand_over(session: RankSession, seal: Seal, takers: Sequence[int]) -> None:
    """Bring the source's commit into the vaults of these ranks, of which each has another one."""
    name = f"{NAME}state"
    sends, takes = rank() == session.source, rank() in takers
    with refusing(RequestType.ALLTOALL, name, global_process_set):
        if sends:
            data = np.frombuffer(session.vault.read(seal), np.uint8)
        else:
            data = np.empty(seal.size if takes else 0, np.uint8)
        if takes:
            session.vault.reserve(seal.size)
    piece = max(1, _PIECE // len(takers))
    for begin in range(0, seal.size, piece):
        part = data[begin : begin + piece]
        splits = [len(part) if sends and each in takers else 0 for each in range(size())]
        received, _ = alltoall(np.tile(part, len(takers)) if sends else part[:0], splits, name)
        if takes:
            part[:] = received
    if takes:
        session.vault.take(seal, data)
    barrier()  # before the other ranks of these hosts look into their vaults


def _raise_trouble(trouble: Exception | None) -> None:
    """Raise this rank's own error, or one that names the first rank that has one."""
    text = None if trouble is None else f"{type(trouble).__name__}: {trouble}"
    everyone = allgather_object(text, f"{NAME}trouble")
    if trouble is not None:
        raise trouble
    first, text = next((number, each) for number, each in enumerate(everyone) if each is not None)
    raise RankFailedError(f"commit: rank {first} cannot commit its state: {text}", first)


def _raise_mismatch(number: int) -> None:
    numbers = allgather(np.array([number], np.int64), f"{NAME}numbers").tolist()
    found = describe_values({each: f"commit {made}" for each, made in enumerate(numbers)})
    raise MismatchError(
        f"commit: the ranks differ ({found}): every rank must call commit() after the same steps", "commit"
    )
