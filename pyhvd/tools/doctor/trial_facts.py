"""The measurements of a trial: :mod:`.ranks` makes them, :mod:`.advice` judges them."""

from __future__ import annotations

import msgspec


class RankFacts(msgspec.Struct, frozen=True):
    """The location of one rank; ``cores`` are the numbers of its permitted cores."""

    rank: int
    host: str
    pid: int
    cores: list[int]


class RingFacts(msgspec.Struct, frozen=True):
    """Results of the ring test: the sizes of the payloads, and receiver, sender and size of damaged ones."""

    sizes: list[int]
    damaged: list[tuple[int, int, int]]


class ClockFacts(msgspec.Struct, frozen=True):
    """Seconds by which a rank's clock is ahead of rank 0's, with the uncertainty of that offset."""

    rank: int
    offset: float
    uncertainty: float


class LinkFacts(msgspec.Struct, frozen=True):
    """Speed of the link between two ranks on different hosts, without negotiation.

    ``latency`` is the median time (s) in which both exchange 4 bytes, ``seconds`` that in which both exchange
    ``nbytes`` bytes; the first of ``ranks`` and ``addresses`` has measured.
    """

    ranks: tuple[int, int]
    addresses: tuple[str, str]
    latency: float
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes by time (B/s), in each direction, both at the same time."""
        return self.nbytes / self.seconds


class LaneFacts(msgspec.Struct, frozen=True):
    """Speed of one lane, "shared memory", "links" or "MPI", measured on rank 0.

    ``latency`` is the median time (s) of a synchronous, cached allreduce of 4 bytes, ``seconds`` that of an
    allreduce of ``nbytes`` bytes.
    """

    name: str
    latency: float
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes of the tensor by time (B/s); nccl-tests call it algbw."""
        return self.nbytes / self.seconds


class TrialFacts(msgspec.Struct, frozen=True):
    """Results of a trial.

    ``copy_rate`` is the rate (B/s) at which one rank copies memory while all ranks do: the yardstick of the
    lanes. ``warnings`` are pyhvd's own, during the trial. ``carrier`` says what carries the bytes of links
    between hosts, and why; empty without links.
    """

    ranks: list[RankFacts]
    ring: RingFacts
    clocks: list[ClockFacts]
    lanes: list[LaneFacts]
    copy_rate: float
    warnings: list[str]
    links: list[LinkFacts] = []
    carrier: str = ""


class Trial(msgspec.Struct, frozen=True):
    """A trial of ``ranks`` ranks, which took ``seconds``.

    If it failed, ``found`` is None, ``error`` says why, and ``stages`` has the last stage of each rank that
    started.
    """

    ranks: int
    seconds: float
    found: TrialFacts | None = None
    error: str = ""
    stages: dict[int, str] = {}
