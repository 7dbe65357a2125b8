from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# One-dimensional and C-contiguous.
_Int64s: TypeAlias = NDArray[np.int64]

HUGE: int
MAX_LOCAL: int
FLAT: int
NOTE: int
CHUNK_UNIT: int
SUBMITTED: int
PUT_UP: int
READY: int
CARRIED: int
PACKING: int
REDUCING: int
UNPACKING: int
AWAITING: int

def area_bytes(capacity: int) -> int: ...

class Mapping:
    def __init__(self, fd: int, nbytes: int) -> None: ...
    @property
    def start(self) -> int: ...
    def enlarge(self, offset: int, nbytes: int) -> bool: ...
    def drop(self, offset: int, nbytes: int) -> bool: ...

class Trace:
    def start(self, cells: int) -> None: ...
    def stop(self) -> None: ...
    def take(self, limit: int) -> list[tuple[int, int, int, int, int, int, int]]: ...
    @property
    def dropped(self) -> int: ...

class Window:
    def __init__(self, rank: int, areas: Sequence[int], chunk: int, capacity: int | None = None) -> None: ...
    def resize(self, chunk: int) -> None: ...
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
    def swap(self, partner: int, send: int, send_count: int, recv: int, recv_count: int) -> bool: ...
    def barrier(self) -> bool: ...
    def abort(self, note: bytes) -> None: ...
    def note(self) -> bytes | None: ...
