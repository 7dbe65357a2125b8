"""The server of PMI-1, by which MPICH and Intel MPI ranks find each other: lines in, lines out, no I/O.

A rank is a plain process with one end of a socket as PMI_FD, and PMI_RANK and PMI_SIZE. It speaks first, a
line at a time ("cmd=put kvsname=w key=a value=b"), and waits for the answer. The protocol is described in
Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems" (EuroMPI
2010); what is here is what MPI_Init, MPI_Abort and MPI_Finalize of a world without dynamic processes ask.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_LINE = 1024
"""Most bytes of a line, as MPICH has it."""
_MAX_KEY = 64
_MAX_VALUE = 1024
# "cmd=get_result rc=0 msg=success value=" and the end of the line go with a value.
_MAX_MAPPING = MAX_LINE - 64


class PmiError(Exception):
    """A rank has asked for what is not PMI-1, or ranks wait for one that is gone."""


@dataclass(frozen=True)
class Abort(Exception):
    """A rank has called MPI_Abort.

    Attributes
    ----------
    rank : int
        Which one.
    code : int
        The exit code it asked for.
    """

    rank: int
    code: int


def process_mapping(ranks_per_host: Sequence[int]) -> str:
    """Return the value of PMI_process_mapping: blocks of (first host, hosts, ranks on each of them).

    Parameters
    ----------
    ranks_per_host : sequence of int
        Ranks are numbered host by host; the hosts need not have as many each.

    Raises
    ------
    PmiError
        There are so many blocks that they do not fit in a line of PMI-1.

    Examples
    --------
    >>> process_mapping([2, 2, 1])
    '(vector,(0,2,2),(2,1,1))'
    """
    blocks: list[list[int]] = []
    for host, count in enumerate(ranks_per_host):
        if blocks and blocks[-1][2] == count:
            blocks[-1][1] += 1
        else:
            blocks.append([host, 1, count])
    text = "(vector," + ",".join(f"({first},{hosts},{each})" for first, hosts, each in blocks) + ")"
    if len(text) > _MAX_MAPPING:
        raise PmiError(
            f"{len(ranks_per_host)} hosts with so uneven numbers of ranks cannot be described to MPI by PMI-1"
            f" ({len(text)} characters; {_MAX_MAPPING} are the most): use as many ranks on each host"
        )
    return text


class Barrier:
    """Who waits in PMI's barrier, and who can no longer enter it.

    Parameters
    ----------
    size : int
        How many ranks must enter.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._inside: set[int] = set()
        self._gone: set[int] = set()

    def enter(self, rank: int) -> bool:
        """Note that a rank waits; return whether all do. PmiError if some never will."""
        self._inside.add(rank)
        if len(self._inside) == self._size:
            return True
        self._check()
        return False

    def release(self, rank: int) -> None:
        """Note that a rank waits no longer."""
        self._inside.discard(rank)

    def note_end(self, rank: int) -> None:
        """Note that a rank will not enter any more."""
        self._gone.add(rank)

    def leave(self, rank: int) -> None:
        """Note that a rank's process has ended; PmiError if others wait for it."""
        self._gone.add(rank)
        self._check()

    def _check(self) -> None:
        if self._inside and self._gone:
            waiting, gone = (", ".join(map(str, sorted(group))) for group in (self._inside, self._gone))
            raise PmiError(
                f"rank {gone} has ended without taking part in MPI, but rank {waiting} waits for it in"
                " MPI_Init or MPI_Finalize: every rank must call pyhvd.init(), or none"
            )


class PmiServer:
    """What the ranks of one world have put, and who waits in the barrier.

    Parameters
    ----------
    ranks_per_host : sequence of int
        See :func:`process_mapping`.

    Attributes
    ----------
    size : int
        How many ranks.
    name : str
        The world's, as its ranks know it.
    """

    def __init__(self, ranks_per_host: Sequence[int]) -> None:
        self.size = sum(ranks_per_host)
        # MPICH names its shared memory after it: worlds that run at the same time need names of their own.
        self.name = f"pyhvd-{secrets.token_hex(8)}"
        self._values = {"PMI_process_mapping": process_mapping(ranks_per_host)}
        self._barrier = Barrier(self.size)

    def handle(self, rank: int, line: str) -> list[tuple[int, str]]:
        """Return the answers to a rank's line: (rank, line) each, lines with their ends.

        Raises
        ------
        Abort
            The rank has called MPI_Abort.
        PmiError
            The line is none of PMI-1's, or the rank entered a barrier that another rank can no longer enter.
        """
        words = parse(line)
        command = words.get("cmd", "")
        if command == "barrier_in":
            return self._enter(rank)
        check_abort(rank, words)
        if command == "finalize":
            self._barrier.note_end(rank)
        answer = self._answer(command, words)
        if answer is None:
            raise PmiError(f"rank {rank} asked its launcher for {command!r}, which PMI-1 here does not have")
        return [(rank, answer + "\n")]

    def leave(self, rank: int) -> None:
        """Note that a rank's process has ended.

        Raises
        ------
        PmiError
            Other ranks wait for it.
        """
        self._barrier.leave(rank)

    def _enter(self, rank: int) -> list[tuple[int, str]]:
        if not self._barrier.enter(rank):
            return []
        for each in range(self.size):
            self._barrier.release(each)
        return [(each, "cmd=barrier_out\n") for each in range(self.size)]

    def _answer(self, command: str, words: dict[str, str]) -> str | None:
        if command == "put":
            return self._put(words)
        if command == "get":
            value = self._values.get(words.get("key", ""))
            if value is None:
                return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            return f"cmd=get_result rc=0 msg=success value={value}"
        return {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"cmd=maxes kvsname_max=256 keylen_max={_MAX_KEY} vallen_max={_MAX_VALUE}",
            "get_appnum": "cmd=appnum appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname kvsname={self.name}",
            "get_universe_size": f"cmd=universe_size size={self.size}",
            "publish_name": "cmd=publish_result rc=-1 msg=not_supported",
            "unpublish_name": "cmd=unpublish_result rc=-1 msg=not_supported",
            "lookup_name": "cmd=lookup_result rc=-1 msg=not_supported",
            "finalize": "cmd=finalize_ack",
        }.get(command)

    def _put(self, words: dict[str, str]) -> str:
        key, value = words.get("key", ""), words.get("value", "")
        if not key or len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            return "cmd=put_result rc=-1 msg=too_long"
        if self._values.setdefault(key, value) != value:
            return f"cmd=put_result rc=-1 msg=duplicate_key_{key}"
        return "cmd=put_result rc=0 msg=success"


def parse(line: str) -> dict[str, str]:
    """Return the words of a line; what it asks for is that of "cmd"."""
    return dict(_word(word) for word in line.split())


def check_abort(rank: int, words: Mapping[str, str]) -> None:
    """Raise Abort if the rank has called MPI_Abort."""
    if words.get("cmd") == "abort":
        raise Abort(rank, _number(words.get("exitcode", "1")))


def _word(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 1
