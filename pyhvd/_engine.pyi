from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# One-dimensional and C-contiguous.
_Int64s: TypeAlias = NDArray[np.int64]

MAX_LOCAL: int
FLAT: int
SUBMITTED: int
PUT_UP: int
READY: int
CARRIED: int
PACKING: int
REDUCING: int
UNPACKING: int
AWAITING: int

def area_bytes(chunk: int) -> int: ...

class Trace:
    def start(self, cells: int) -> None: ...
    def stop(self) -> None: ...
    def take(self, limit: int) -> list[tuple[int, int, int, int, int, int, int]]: ...
    @property
    def dropped(self) -> int: ...

class Window:
    def __init__(self, rank: int, areas: Sequence[int], chunk: int) -> None: ...
    def attach(self, trace: Trace) -> None: ...
    def clear(self) -> None: ...
    def allreduce(
        self,
        srcs: _Int64s,
        dsts: _Int64s,
        starts: _Int64s,
        dtype: int,
        op: int,
        prescale: float,
        postscale: float,
    ) -> bool: ...
    def gather(self, send: int, recv: int, counts: _Int64s, starts: _Int64s) -> bool: ...
    def alltoall(
        self,
        send: int,
        send_counts: _Int64s,
        send_starts: _Int64s,
        recv: int,
        recv_counts: _Int64s,
        recv_starts: _Int64s,
    ) -> bool: ...
    def barrier(self) -> bool: ...
    def abort(self) -> None: ...
