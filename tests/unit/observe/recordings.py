"""Made-up recordings for tests: ranks whose clocks differ by known amounts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyhvd.negotiation.messages import Request, RequestType
from pyhvd.observe.trace.files import CLOCK, END, FORMAT, HEADER, Event, TraceWriter, metadata, rank_path
from pyhvd.observe.trace.rows import Rows

MS = 1_000_000
"""ns"""


@dataclass(frozen=True)
class Skew:
    """A clock that is ``ahead`` ns ahead at time 0, and gains ``drift`` s per second."""

    ahead: int = 0
    drift: float = 0.0

    def shows(self, time: float) -> int:
        """Return the clock's time (ns) at a true time (ns)."""
        return round(time + self.ahead + time * self.drift)


def request(name: str, elements: int = 256, kind: RequestType = RequestType.ALLREDUCE) -> Request:
    """Return the request of a float32 tensor."""
    return Request(kind, name, dtype=7, shape=(elements,))


class Recording:
    """One rank's file of a made-up recording, from true time ``begin`` to ``end`` (ns)."""

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        skew: Skew,
        job: str = "job",
        begin: int = 0,
        end: int = 1000 * MS,
        generation: int = 0,
    ) -> None:
        self.path = rank_path(path, rank, generation)
        self.skew = skew
        self._writer = TraceWriter(self.path)
        self._end = end
        origin = skew.shows(begin)
        self.rows = Rows(origin, mark_cycles=False)
        self.rows.head(f"pyhvd rank {rank}", 1_700_000_000_000_000 + begin // 1000)
        args = {"format": FORMAT, "job": job, "rank": rank, "size": size, "host": f"node{rank}"}
        head = metadata(HEADER, args | {"process": 100 + rank, "origin_ns": origin, "generation": generation})
        self._writer.write([head, self.clock("start", begin)])

    def clock(self, when: str, time: int) -> Event:
        """Return an exact measurement of the clock."""
        at = self.skew.shows(time)
        return metadata(CLOCK, {"when": when, "at_ns": at, "offset_ns": at - time, "uncertainty_ns": 1000})

    def flush(self) -> None:
        """Write the events so far, as a rank that is killed directly after it."""
        self._writer.write(self.rows.take())

    def close(self) -> Path:
        """Write the rest and close the file, as at the end of a job; return the path."""
        self.rows.close(self.skew.shows(self._end))
        last = metadata(END, {"dropped": 0, "at_ns": self.skew.shows(self._end)})
        self._writer.write([*self.rows.take(), self.clock("end", self._end), last])
        self._writer.close()
        return self.path

    def turn(self, number: int, name: str, times: tuple[int, int, int, int], elements: int = 256) -> None:
        """Add a turn, in true ns: (submitted, ready, begun, ended); packing takes half of the batch."""
        submitted, ready, begun, ended = map(self.skew.shows, times)
        tensors = [(0, request(name, elements))]
        self.rows.queued(submitted, tensors)
        self.rows.listed(ready, number, [(tensors[0], "")])
        self.rows.started(begun, tensors)
        middle = (begun + ended) // 2
        self.rows.phase("MEMCPY_IN_FUSION_BUFFER", begun, middle)
        self.rows.phase("SHM_ALLREDUCE", middle, ended)
        self.rows.ended(ended, tensors)
