"""What the ranks of a trial have measured; filled in by :mod:`.ranks`, judged by :mod:`.advice`."""

from __future__ import annotations

import msgspec


class RankFacts(msgspec.Struct, frozen=True):
    """Where one rank runs; ``cores`` are the numbers of those that it may run on."""

    rank: int
    host: str
    pid: int
    cores: list[int]


class RingFacts(msgspec.Struct, frozen=True):
    """A payload that went round the ring of ranks, once for each size.

    Attributes
    ----------
    sizes : list of int
        Bytes.
    damaged : list of (int, int, int)
        Receiver, its left neighbour, bytes: what arrived was not what had been sent.
    """

    sizes: list[int]
    damaged: list[tuple[int, int, int]]


class ClockFacts(msgspec.Struct, frozen=True):
    """How far a rank's clock is ahead of rank 0's (s); the true offset lies within ``uncertainty`` of it."""

    rank: int
    offset: float
    uncertainty: float


class LaneFacts(msgspec.Struct, frozen=True):
    """What one way of agreeing and reducing achieves, on rank 0.

    Attributes
    ----------
    name : str
        ``"shared memory"`` or ``"MPI"``.
    latency : float
        Seconds for a synchronous allreduce of 4 bytes that the ranks remember; median.
    nbytes : int
        Bytes of the large tensor.
    seconds : float
        For its allreduce; median.
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
    """What a trial has found.

    Attributes
    ----------
    ranks : list of RankFacts
        By rank.
    ring, clocks, lanes
        See there.
    copy_rate : float
        B/s at which one rank copies memory, while the others do too: what the lanes are measured by.
    warnings : list of str
        What pyhvd has warned of meanwhile.
    """

    ranks: list[RankFacts]
    ring: RingFacts
    clocks: list[ClockFacts]
    lanes: list[LaneFacts]
    copy_rate: float
    warnings: list[str]


class Trial(msgspec.Struct, frozen=True):
    """A trial and how it ended.

    Attributes
    ----------
    ranks : int
        How many were asked for.
    seconds : float
        How long it took.
    found : TrialFacts or None
        None where it did not end well.
    error : str
        What went wrong, if something did.
    stages : dict of int to str
        The last thing that each rank began to do, where it did not end well.
    """

    ranks: int
    seconds: float
    found: TrialFacts | None = None
    error: str = ""
    stages: dict[int, str] = {}
