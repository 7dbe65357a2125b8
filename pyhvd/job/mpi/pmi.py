"""A server of PMI-1, by which the ranks of MPICH and Intel MPI find each other. Does no I/O.

A rank is a process with one end of a socket as PMI_FD, and with PMI_RANK and PMI_SIZE. It sends one line at a
time ("cmd=put kvsname=w key=a value=b"), and waits for the answer. For the protocol see Balaji et al., "PMI:
A Scalable Parallel Process-Management Interface for Extreme-Scale Systems" (EuroMPI 2010). This server has
the commands that MPI_Init, MPI_Abort and MPI_Finalize use in a world without dynamic processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pyhvd.common.text import list_numbers

MAX_LINE = 1024
"""Most bytes of a line in MPICH."""
_MAX_KEY = 64
_MAX_VALUE = 1024
# A line with a value also has "cmd=get_result rc=0 msg=success value=" and its end.
_MAX_MAPPING = MAX_LINE - 64


class PmiError(Exception):
    """A rank sent an unknown command, or ranks wait for a rank that has ended."""


@dataclass(frozen=True)
class Abort(Exception):
    """A rank has called MPI_Abort, and asked for an exit code."""

    rank: int
    code: int


def process_mapping(hosts: Sequence[int]) -> str:
    """Return the value of PMI_process_mapping: blocks of (first host, hosts, ranks of each host).

    MPI reads the blocks in turn, and begins again with the first one, until each rank has its host.

    Parameters
    ----------
    hosts : sequence of int
        The host of each rank, by rank. Hosts count from 0 in the order of their first ranks.

    Raises
    ------
    PmiError
        The blocks do not fit in a line of PMI-1.

    Examples
    --------
    >>> process_mapping([0, 0, 1, 1, 2])
    '(vector,(0,2,2),(2,1,1))'
    >>> process_mapping([0, 1, 1, 0])
    '(vector,(0,1,1),(1,1,2),(0,1,1))'
    """
    blocks: list[list[int]] = []
    for host, ranks in groupby(hosts):
        count = len(list(ranks))
        if blocks and blocks[-1][2] == count and blocks[-1][0] + blocks[-1][1] == host:
            blocks[-1][1] += 1
        else:
            blocks.append([host, 1, count])
    text = _mapping_of(blocks)
    if len(text) > _MAX_MAPPING:
        shorter = next(_repeated(blocks, hosts), blocks)
        text = _mapping_of(shorter)
    if len(text) > _MAX_MAPPING:
        raise PmiError(
            f"PMI-1 cannot describe which of {len(hosts)} ranks share the {len(set(hosts))} hosts: it takes"
            f" {len(text)} characters, {_MAX_MAPPING} at most are allowed; number the ranks host by host, and"
            " use as many ranks on each host"
        )
    return text


def _mapping_of(blocks: Iterable[Sequence[int]]) -> str:
    return "(vector," + ",".join(f"({first},{hosts},{each})" for first, hosts, each in blocks) + ")"


def _repeated(blocks: list[list[int]], hosts: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield the beginnings of the blocks that give each rank its host if MPI repeats them, shortest first."""
    turn: list[int] = []
    for count, (first, number, each) in enumerate(blocks[:-1], 1):
        turn += [first + host for host in range(number) for _ in range(each)]
        if all(host == turn[rank % len(turn)] for rank, host in enumerate(hosts)):
            yield blocks[:count]


_NAME = "cmd=my_kvsname kvsname="
_GOT = "cmd=get_result rc=0 msg=success value={}"
_NOT_FOUND = "cmd=get_result rc=-1 msg=key_not_found value=unknown"


class PmiServer:
    """The values that the ranks of one world have put, and its barrier; see :func:`process_mapping`."""

    def __init__(self, hosts: Sequence[int]) -> None:
        self.size = len(hosts)
        # MPICH uses the name for its shared memory, so worlds that run at the same time need different names.
        self.name = f"pyhvd-{os.urandom(8).hex()}"
        self._values = {"PMI_process_mapping": process_mapping(hosts)}
        self._inside: set[int] = set()  # the ranks that wait in the barrier
        self._gone: set[int] = set()  # those that will not enter it again
        self._unshared: dict[str, str] = {}  # put since the last call of take_unshared

    def take_unshared(self, limit: int) -> list[dict[str, str]]:
        """Return what was put since the last call, in parts of about `limit` characters.

        A value never changes. So agents may answer their ranks by it, once all ranks have passed the barrier.
        """
        parts: list[dict[str, str]] = []
        size = limit
        for key, value in self._unshared.items():
            if size >= limit:
                parts.append({})
                size = 0
            parts[-1][key] = value
            size += len(key) + len(value)
        self._unshared = {}
        return parts

    def handle(self, rank: int, line: str) -> list[tuple[int, str]]:
        """Return the answers to a rank's line: (rank, line) each, with the lines' ends.

        Raises
        ------
        Abort
            The rank has called MPI_Abort.
        PmiError
            The command is unknown, or the rank entered a barrier that another rank can no longer enter.
        """
        words = _words_of(line)
        command = words.get("cmd", "")
        if command == "barrier_in":
            return self._enter(rank)
        if command == "abort":
            raise Abort(rank, _exit_code(words.get("exitcode", "")))
        if command == "finalize":
            self._gone.add(rank)
        answer = self._answer(command, words)
        if answer is None:
            raise PmiError(f"rank {rank} sent the PMI-1 command {command!r}, which pyhvd does not support")
        return [(rank, answer + "\n")]

    def leave(self, rank: int) -> None:
        """Note that a rank's process has ended; raise PmiError if other ranks wait for it."""
        self._gone.add(rank)
        self._check()

    def _enter(self, rank: int) -> list[tuple[int, str]]:
        """Note that a rank waits in the barrier; once all do, return their answers."""
        self._inside.add(rank)
        if len(self._inside) < self.size:
            self._check()
            return []
        self._inside.clear()
        return [(each, "cmd=barrier_out\n") for each in range(self.size)]

    def _check(self) -> None:
        """Raise PmiError if ranks wait in the barrier for one that will not enter."""
        if self._inside and self._gone:
            waiting, gone = list_numbers(self._inside), list_numbers(self._gone)
            raise PmiError(
                f"rank {gone} has ended without taking part in MPI, but rank {waiting} waits for it in"
                " MPI_Init or MPI_Finalize: every rank must call pyhvd.init(), or none"
            )

    def _answer(self, command: str, words: dict[str, str]) -> str | None:
        if command == "put":
            return self._put(words)
        if command == "get":
            value = self._values.get(words.get("key", ""))
            return _GOT.format(value) if value is not None else _NOT_FOUND
        return {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"cmd=maxes kvsname_max=256 keylen_max={_MAX_KEY} vallen_max={_MAX_VALUE}",
            "get_appnum": "cmd=appnum appnum=0",
            "get_my_kvsname": f"{_NAME}{self.name}",
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
        self._unshared[key] = value
        return "cmd=put_result rc=0 msg=success"


def answer_get(line: str, world: str, values: Mapping[str, str]) -> str | None:
    """Return the answer to a rank's line if it asks for one of these values of a world; else None."""
    words = _words_of(line)
    if words.get("cmd") != "get" or words.get("kvsname") != world:
        return None
    value = values.get(words.get("key", ""))
    return None if value is None else _GOT.format(value) + "\n"


def name_of_world(answer: str) -> str:
    """Return the name of the world if an answer to a rank says it; else an empty text."""
    return answer.removeprefix(_NAME).strip() if answer.startswith(_NAME) else ""


def _words_of(line: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in line.split())}


def _exit_code(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 1
