"""The fakes of CUDA's driver and of NCCL report each violation with both calls, and nothing else."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.devices.fake_libraries import (
    FUNCTION,
    Config,
    UniqueId,
    calls,
    checked,
    fake_cuda,
    fake_nccl,
    forget,
    needs_gcc,
    ranges,
    reports,
)

pytestmark = needs_gcc

FLOAT32, FLOAT64, SUM, MAX = 7, 8, 0, 2
IN_PROGRESS = 7
SITE = r"\[\w*\] (\w+), call \d+"


@pytest.fixture
def cuda() -> Iterator[ctypes.CDLL]:
    """Make the first device's context current on this thread."""
    library = fake_cuda()
    enter_device()
    forget()
    yield library
    library.fake_cuda_forbid_blocking(0)
    library.fake_cuda_allow_ordinal(-1)
    checked(library.cuCtxPopCurrent_v2, None)
    forget()


def made(create: Callable[..., int], *arguments: Any) -> int:
    """Return the handle, or the address, that a function writes to its first argument."""
    handle = ctypes.c_void_p()
    checked(create, ctypes.byref(handle), *arguments)
    return handle.value or 0


def enter_device() -> None:
    """Make the first device's context the calling thread's current one."""
    checked(fake_cuda().cuCtxPushCurrent_v2, made(fake_cuda().cuDevicePrimaryCtxRetain, 0))


def stream_of(cuda: ctypes.CDLL) -> int:
    return made(cuda.cuStreamCreateWithPriority, 1, 0)


def only_report() -> tuple[str, str, str]:
    """Return the kind of the only report, and the names of its two calls; "none" where there is none."""
    (line,) = reports()
    kind, rest = line.split(": ", 1)
    first, second = re.findall(rf"(?:first|second): (none|{SITE})", rest)
    return kind, first[1] or first[0], second[1] or second[0]


# -- work in an order ------------------------------------------------------------------------------------


def test_ordered_work_is_not_reported_and_has_its_effect(cuda: ctypes.CDLL) -> None:
    first, second, event = stream_of(cuda), stream_of(cuda), made(cuda.cuEventCreate, 2)
    block, copy = made(cuda.cuMemAlloc_v2, 64), made(cuda.cuMemAllocHost_v2, 64)
    checked(cuda.cuMemsetD8Async, block, 7, 64, first)
    checked(cuda.cuEventRecord, event, first)
    checked(cuda.cuStreamWaitEvent, second, event, 0)
    checked(cuda.cuMemcpyAsync, copy, block, 64, second)
    checked(cuda.cuStreamSynchronize, second)
    assert ctypes.string_at(copy, 64) == b"\x07" * 64
    checked(cuda.cuMemFree_v2, block)
    checked(cuda.cuMemFreeHost, copy)
    assert reports() == []


@pytest.mark.parametrize("what", ["read", "write", "write after a read", "free"])
def test_work_that_no_event_orders_is_reported(cuda: ctypes.CDLL, what: str) -> None:
    first, second = stream_of(cuda), stream_of(cuda)
    block, other = made(cuda.cuMemAlloc_v2, 64), made(cuda.cuMemAlloc_v2, 64)
    if what == "write after a read":
        checked(cuda.cuMemcpyAsync, other, block, 64, first)
    else:
        checked(cuda.cuMemsetD8Async, block, 7, 64, first)
    if what == "free":
        checked(cuda.cuMemFree_v2, block)
        kind, *names = only_report()
        assert kind in ("freed-in-use", "use-after-free")  # by which of both calls comes first
        assert sorted(names) == ["cuMemFree_v2", "cuMemsetD8Async"]
        return
    if what == "read":
        checked(cuda.cuMemcpyAsync, other, block, 64, second)
    else:
        checked(cuda.cuMemsetD8Async, block, 8, 64, second)
    kind, *names = only_report()
    assert kind == "unordered"
    expected = {"read": "cuMemcpyAsync", "write": "cuMemsetD8Async", "write after a read": "cuMemcpyAsync"}
    assert sorted(names) == sorted(["cuMemsetD8Async", expected[what]])


def test_a_function_of_a_test_is_checked_like_a_kernel(cuda: ctypes.CDLL) -> None:
    first, second, block = stream_of(cuda), stream_of(cuda), made(cuda.cuMemAlloc_v2, 64)
    run = FUNCTION(lambda _: seen.append(1))
    seen: list[int] = []
    checked(cuda.fake_cuda_call, first, b"kernel", run, 0, ranges([], [(block, 64)]), 1)
    checked(cuda.fake_cuda_call, second, b"reader", run, 0, ranges([(block + 8, 8)], []), 1)
    assert only_report()[0] == "unordered"
    assert {*only_report()[1:]} == {"kernel", "reader"}
    assert seen == [1, 1]


def test_use_after_free_is_reported(cuda: ctypes.CDLL) -> None:
    stream, block = stream_of(cuda), made(cuda.cuMemAlloc_v2, 64)
    checked(cuda.cuMemFree_v2, block)
    checked(cuda.cuMemsetD8Async, block, 7, 64, stream)
    assert only_report() == ("use-after-free", "cuMemFree_v2", "cuMemsetD8Async")


def test_a_free_in_the_order_of_a_stream_is_no_free_for_another_one(cuda: ctypes.CDLL) -> None:
    pool, user = stream_of(cuda), stream_of(cuda)
    block = made(cuda.cuMemAllocAsync, 64, pool)
    checked(cuda.cuStreamSynchronize, pool)
    checked(cuda.cuMemsetD8Async, block, 7, 64, user)
    cuda.fake_cuda_drain(5000)
    checked(cuda.cuMemFreeAsync, block, pool)
    assert only_report() == ("freed-in-use", "cuMemsetD8Async", "cuMemFreeAsync")


def test_work_beyond_its_memory_is_reported(cuda: ctypes.CDLL) -> None:
    stream, block = stream_of(cuda), made(cuda.cuMemAlloc_v2, 64)
    run = FUNCTION(lambda _: None)
    checked(cuda.fake_cuda_call, stream, b"kernel", run, 0, ranges([(block + 32, 64)], []), 1)
    assert only_report() == ("out-of-bounds", "cuMemAlloc_v2", "kernel")


def test_a_destroyed_event_is_reported(cuda: ctypes.CDLL) -> None:
    stream, event = stream_of(cuda), made(cuda.cuEventCreate, 2)
    checked(cuda.cuEventDestroy_v2, event)
    assert cuda.cuEventRecord(event, stream) == 400
    assert only_report() == ("destroyed-handle", "cuEventDestroy_v2", "cuEventRecord")


# -- devices, waits, captures ------------------------------------------------------------------------------


def test_a_context_on_another_device_is_reported(cuda: ctypes.CDLL) -> None:
    cuda.fake_cuda_allow_ordinal(0)
    made(cuda.cuDevicePrimaryCtxRetain, 0)
    assert reports() == []
    made(cuda.cuDevicePrimaryCtxRetain, 1)
    assert only_report() == ("wrong-device", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain")


def test_a_call_that_blocks_is_reported_where_that_is_forbidden(cuda: ctypes.CDLL) -> None:
    stream, block = stream_of(cuda), made(cuda.cuMemAlloc_v2, 64)
    checked(cuda.cuMemsetD8Async, block, 7, 64, stream)
    checked(cuda.cuStreamSynchronize, stream)
    assert reports() == []
    cuda.fake_cuda_forbid_blocking(1)
    checked(cuda.cuMemsetD8Async, block, 7, 64, stream)
    checked(cuda.cuStreamSynchronize, stream)
    assert only_report() == ("blocking", "cuMemsetD8Async", "cuStreamSynchronize")


def test_a_call_that_invalidates_a_capture_is_reported(cuda: ctypes.CDLL) -> None:
    stream, other, event = stream_of(cuda), stream_of(cuda), made(cuda.cuEventCreate, 2)
    checked(cuda.cuEventRecord, event, other)
    checked(cuda.cuStreamBeginCapture_v2, stream, 0)
    mode = ctypes.c_int(2)
    checked(cuda.cuThreadExchangeStreamCaptureMode, ctypes.byref(mode))
    while (status := cuda.cuEventQuery(event)) == 600:  # legal in the relaxed mode
        time.sleep(0.001)
    assert (status, mode.value, reports()) == (0, 0, [])
    checked(cuda.cuThreadExchangeStreamCaptureMode, ctypes.byref(mode))
    assert cuda.cuEventQuery(event) == 900
    assert only_report() == ("illegal-in-capture", "cuStreamBeginCapture_v2", "cuEventQuery")
    graph = ctypes.c_void_p()
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 901


def test_a_wait_of_a_capture_for_work_outside_is_reported(cuda: ctypes.CDLL) -> None:
    stream, other, event = stream_of(cuda), stream_of(cuda), made(cuda.cuEventCreate, 2)
    checked(cuda.cuEventRecord, event, other)
    checked(cuda.cuStreamBeginCapture_v2, stream, 2)
    assert cuda.cuStreamWaitEvent(stream, event, 0) == 905
    assert only_report() == ("illegal-in-capture", "cuEventRecord", "cuStreamWaitEvent")
    graph = ctypes.c_void_p()
    cuda.cuStreamEndCapture(stream, ctypes.byref(graph))


# -- NCCL ----------------------------------------------------------------------------------------------------


def on_two_ranks(cuda: ctypes.CDLL, work: Callable[[int, int, int, int], None]) -> None:
    """Run ``work(rank, communicator, stream, block)`` on two threads; a block has 1024 bytes of zeros."""
    nccl, made_id = fake_nccl(), UniqueId()
    checked(nccl.ncclGetUniqueId, ctypes.byref(made_id))
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            enter_device()
            cuda.fake_cuda_label(b"rank%d" % rank)
            stream, block, comm = stream_of(cuda), made(cuda.cuMemAlloc_v2, 1024), ctypes.c_void_p()
            checked(cuda.cuMemsetD8Async, block, 0, 1024, stream)
            config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
            status = nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, made_id, rank, ctypes.byref(config))
            assert status in (0, IN_PROGRESS)
            until_connected(comm.value or 0)
            work(rank, comm.value or 0, stream, block)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def until_connected(comm: int) -> None:
    assert state_after_progress(comm) == 0


def reduce(comm: int, stream: int, block: int, count: int = 8, kind: int = FLOAT32, op: int = SUM) -> int:
    return int(fake_nccl().ncclAllReduce(block, block, count, kind, op, comm, stream))


def test_equal_collectives_are_not_reported(cuda: ctypes.CDLL) -> None:
    def work(rank: int, comm: int, stream: int, block: int) -> None:
        run = FUNCTION(lambda _: ctypes.c_float.from_address(block).__setattr__("value", rank + 1.0))
        checked(cuda.fake_cuda_call, stream, b"set", run, 0, ranges([], [(block, 4)]), 1)
        for _ in range(3):
            assert reduce(comm, stream, block) == 0
        checked(cuda.cuStreamSynchronize, stream)
        assert ctypes.c_float.from_address(block).value == 12.0
        checked(fake_nccl().ncclCommDestroy, comm)

    on_two_ranks(cuda, work)
    assert reports() == []
    assert calls("ncclAllReduce") == 6


@pytest.mark.parametrize("what", ["number", "count", "dtype", "op"])
def test_collectives_that_differ_between_ranks_are_reported(cuda: ctypes.CDLL, what: str) -> None:
    def work(rank: int, comm: int, stream: int, block: int) -> None:
        odd = what if rank == 1 else ""
        if odd == "number":  # its first collective is the other rank's second one
            checked(fake_nccl().ncclBroadcast, block, block, 8, FLOAT32, 0, comm, stream)
        else:
            count, kind = 16 if odd == "count" else 8, FLOAT64 if odd == "dtype" else FLOAT32
            assert reduce(comm, stream, block, count, kind, MAX if odd == "op" else SUM) == 0

    on_two_ranks(cuda, work)
    lines = reports()
    assert len(lines) == 2  # each rank sees the other's call
    for line, (here, there) in zip(sorted(lines, key=_second), ((0, 1), (1, 0)), strict=True):
        assert line.startswith(f"mismatch: rank {here}: ")
        assert re.search(rf"first: \[rank{there}\] nccl\w+, call \d+", line)
        assert re.search(rf"second: \[rank{here}\] nccl\w+, call \d+", line)


def _second(line: str) -> str:
    return line.partition("second: ")[2]


def test_a_send_and_a_receive_of_other_sizes_are_reported(cuda: ctypes.CDLL) -> None:
    def work(rank: int, comm: int, stream: int, block: int) -> None:
        call = fake_nccl().ncclRecv if rank else fake_nccl().ncclSend
        checked(call, block, 8 - rank, FLOAT32, 1 - rank, comm, stream)
        if rank:
            cuda.cuStreamSynchronize(stream)

    on_two_ranks(cuda, work)
    assert only_report() == ("mismatch", "ncclSend", "ncclRecv")


@pytest.mark.parametrize("end", ["ncclCommAbort", "ncclCommDestroy", "ncclCommRevoke"])
def test_a_call_after_the_end_is_reported(cuda: ctypes.CDLL, end: str) -> None:
    def work(rank: int, comm: int, stream: int, block: int) -> None:
        checked(getattr(fake_nccl(), end), *((comm, 0) if end == "ncclCommRevoke" else (comm,)))
        assert reduce(comm, stream, block) != 0

    on_two_ranks(cuda, work)
    kinds = {"ncclCommAbort": "call-after-abort", "ncclCommDestroy": "call-after-destroy"}
    assert len(reports()) == 2
    for line in reports():
        assert line.startswith(kinds.get(end, "call-after-revoke"))
        assert f"] {end}, call" in line
        assert "] ncclAllReduce, call" in line


def test_a_call_inside_an_abort_is_reported(cuda: ctypes.CDLL) -> None:
    def work(rank: int, comm: int, stream: int, block: int) -> None:
        if rank == 1:
            checked(fake_nccl().ncclCommAbort, comm)
            return
        fake_nccl().fake_nccl_fault(b"rank=0,slow=300")
        calling = threading.Thread(target=_reduce_on, args=(comm, stream, block))
        calling.start()
        time.sleep(0.1)
        fake_nccl().ncclCommAbort(comm)
        calling.join()

    on_two_ranks(cuda, work)
    assert only_report() == ("call-inside-abort", "ncclAllReduce", "ncclCommAbort")


def _reduce_on(comm: int, stream: int, block: int) -> None:
    enter_device()
    reduce(comm, stream, block)


def test_a_collective_without_its_input_is_reported(cuda: ctypes.CDLL) -> None:
    def work(rank: int, comm: int, stream: int, block: int) -> None:
        late = stream_of(cuda)
        checked(cuda.cuStreamSynchronize, stream)
        checked(cuda.cuMemsetD8Async, block, 1, 32, late if rank else stream)
        assert reduce(comm, stream, block) == 0

    on_two_ranks(cuda, work)
    assert {line.partition(":")[0] for line in reports()} == {"unordered"}


# -- the faults that tests ask for ---------------------------------------------------------------------------

FAULTS = {
    "error@2=2": "0 2 0",
    "rank=0,error@1=3": "3 0 0",
    "rank=1,error@1=3": "0 0 0",
    "async@1=6": "0 0 6",
    "hang@1": "0 0 0 busy",
    "init=5": "init 5",
    "id=2": "id 2",
    "connect": "connecting",
    "progress=2": "7 7 0",
    "slow=150": "0 0 0 slow",
}


def reduce_alone(patience: float = 20.0) -> str:
    """Return the statuses of two allreduces of one rank, and its asynchronous error; or where it ended."""
    cuda, nccl = fake_cuda(), fake_nccl()
    given, comm = UniqueId(), ctypes.c_void_p()
    if status := nccl.ncclGetUniqueId(ctypes.byref(given)):
        return f"id {status}"
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
    status = nccl.ncclCommInitRankConfig(ctypes.byref(comm), 1, given, 0, ctypes.byref(config))
    if status not in (0, IN_PROGRESS):
        return f"init {status}"
    try:
        if state_after_progress(comm, patience) == IN_PROGRESS:
            return "connecting"
        stream, block = stream_of(cuda), made(cuda.cuMemAlloc_v2, 64)
        begun, statuses = time.monotonic(), []
        for _ in range(2):
            statuses.append(nccl.ncclAllReduce(block, block, 1, FLOAT32, SUM, comm, stream))
            state = state_after_progress(comm, patience)
        slow = " slow" if time.monotonic() - begun > 0.3 else ""
        busy = "" if cuda.fake_cuda_drain(int(patience * 1000)) else " busy"
        return f"{statuses[0]} {statuses[1]} {state}{busy}{slow}"
    finally:
        checked(nccl.ncclCommAbort, comm)


def state_after_progress(comm: Any, patience: float = 20.0) -> int:
    """Return the asynchronous error when no call is in progress any more, or the time is over."""
    state, until = ctypes.c_int(IN_PROGRESS), time.monotonic() + patience
    while state.value == IN_PROGRESS and time.monotonic() < until:
        checked(fake_nccl().ncclCommGetAsyncError, comm, ctypes.byref(state))
        time.sleep(0.0005)
    return state.value


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(fault: str) -> None:
    fake_nccl().fake_nccl_fault(fault.encode())
    found = reduce_alone(0.5 if fault in ("connect", "hang@1") else 20.0)
    assert found.removesuffix("" if "slow" in fault else " slow") == FAULTS[fault]
    assert reports() == []


def test_the_environment_asks_for_a_fault() -> None:
    program = "from tests.devices import test_fakes as t; t.enter_device(); print(t.reduce_alone())"
    variables = {"FAKE_NCCL_FAULTS": "error@2=2", "PYTHONPATH": str(Path(__file__).parents[2])}
    command, environment = [sys.executable, "-c", program], os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.stdout.split()[:3] == ["0", "2", "0"], done.stderr


def test_an_abort_may_wait_for_the_device(cuda: ctypes.CDLL) -> None:
    took: list[float] = []

    def work(rank: int, comm: int, stream: int, block: int) -> None:
        if rank == 0:
            fake_nccl().fake_nccl_fault(b"rank=0,hang@1,abort")
            assert reduce(comm, stream, block) == 0
            threading.Timer(0.3, fake_nccl().fake_nccl_fault, (b"rank=0,abort",)).start()
            begun = time.monotonic()
            checked(fake_nccl().ncclCommAbort, comm)
            took.append(time.monotonic() - begun)
        else:
            assert reduce(comm, stream, block) == 0

    on_two_ranks(cuda, work)
    assert took[0] > 0.2
    assert reports() == []
