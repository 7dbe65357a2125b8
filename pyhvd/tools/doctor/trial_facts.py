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
    """Results of the ring test.

    Attributes
    ----------
    sizes : list of int
        Sizes of the payloads (bytes).
    damaged : list of (int, int, int)
        Receiver, its left neighbour, and size (bytes) of each damaged payload.
    """

    sizes: list[int]
    damaged: list[tuple[int, int, int]]


class ClockFacts(msgspec.Struct, frozen=True):
    """Seconds by which a rank's clock is ahead of rank 0's, with the uncertainty of that offset."""

    rank: int
    offset: float
    uncertainty: float


class LaneFacts(msgspec.Struct, frozen=True):
    """Speed of one lane, measured on rank 0.

    Attributes
    ----------
    name : str
        ``"shared memory"`` or ``"MPI"``.
    latency : float
        Median time (s) of a synchronous, cached allreduce of 4 bytes.
    nbytes : int
        Bytes of the large tensor.
    seconds : float
        Median time (s) of its allreduce.
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

    Attributes
    ----------
    ranks : list of RankFacts
        By rank.
    ring, clocks, lanes
        Results of each test.
    copy_rate : float
        Rate (B/s) at which one rank copies memory while all ranks do; the yardstick of the lanes.
    warnings : list of str
        pyhvd's warnings during the trial.
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
        Number of ranks asked for.
    seconds : float
        Duration (s).
    found : TrialFacts or None
        Results; None if the trial failed.
    error : str
        Text of the error, or empty.
    stages : dict of int to str
        Each rank's last stage, if the trial failed.
    """

    ranks: int
    seconds: float
    found: TrialFacts | None = None
    error: str = ""
    stages: dict[int, str] = {}
