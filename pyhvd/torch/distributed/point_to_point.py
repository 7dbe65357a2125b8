"""Sends and receives of torch.distributed, by MPI, on a communicator of their own.

The tag of a message has the id of the group's process set in its upper bits, and the user's tag below, or one
of pyhvd's own. So groups never take each other's messages, and one communicator serves all.

MPI makes progress only inside its functions, and a blocking one would keep a core busy and would not see that
another rank has ended. So a thread that waits tests its request, and sleeps ever longer between two tests. A
long message moves only if both ranks test it, so a thread tests the requests for which no other thread waits.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from pyhvd.engine.context import Context
from pyhvd.torch.distributed.errors import CollectiveError
from pyhvd.torch.distributed.work import Work

_GROUP_BITS = 12
_OWN_TAGS = 64  # of pyhvd, which repeat after so many
_SPIN_SECONDS = 200e-6
_LONGEST_NAP = 1e-3
_LONGEST_TEST_NAP = 10e-3  # of the thread that tests what no other thread waits for
_IDLE_SECONDS = 0.1
_LOOK_SECONDS = 0.5
_LAST_SECONDS = 1.0  # in which a message may yet come from a rank that has ended the job

_log = logging.getLogger("pyhvd")


class PointToPoint:
    """The communicator of all sends and receives; made by all ranks together.

    Parameters
    ----------
    context : Context
        Of this rank: tells that the job has failed.
    """

    def __init__(self, context: Context) -> None:
        from mpi4py import MPI

        self.mpi, self.context = MPI, context
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        tags = cast(int, self._comm.Get_attr(MPI.TAG_UB)) + 1
        self._tag_bits = (tags >> _GROUP_BITS).bit_length() - 1
        self._user_tags = (1 << self._tag_bits) - _OWN_TAGS
        self._open = OpenTransfers(context)

    def send(self, memory: Any, rank: int, set_id: int, tag: int, *, own: bool = False) -> Transfer:
        """Start to send contiguous memory to a rank of the job; ``own``: the tag is not a user's."""
        made = self._comm.Isend(self._buffer(memory), rank, self._tag(set_id, tag, own=own))
        return self._started(Transfer(self, made, memory, "send to", [rank], tag))

    def receive(
        self, memory: Any, rank: int | None, others: list[int], set_id: int, tag: int, *, own: bool = False
    ) -> Transfer:
        """Start to receive into contiguous memory; None is any of the ``others``."""
        source = self.mpi.ANY_SOURCE if rank is None else rank
        made = self._comm.Irecv(self._buffer(memory), source, self._tag(set_id, tag, own=own))
        waits_for = others if rank is None else [rank]
        return self._started(Transfer(self, made, memory, "receive from", waits_for, tag, any_=rank is None))

    def _started(self, transfer: Transfer) -> Transfer:
        if not transfer.done():
            self._open.add(transfer)
        return transfer

    def _tag(self, set_id: int, tag: int, *, own: bool) -> int:
        if own:
            tag = self._user_tags + tag % _OWN_TAGS
        elif not 0 <= tag < self._user_tags:
            raise ValueError(f"tag {tag}: this MPI has room for tags from 0 to {self._user_tags - 1}")
        if set_id >= 1 << _GROUP_BITS:
            raise ValueError(
                f"a group with id {set_id}: ids of groups that send are below {1 << _GROUP_BITS}"
            )
        return set_id << self._tag_bits | tag

    def _buffer(self, memory: Any) -> Any:
        nbytes = memory.numel() * memory.element_size()
        return [self.mpi.memory.fromaddress(memory.data_ptr(), nbytes), self.mpi.BYTE]


class Transfer:
    """One send or receive, as a :class:`Work` takes it.

    Parameters
    ----------
    messages : PointToPoint
        Has the communicator, and tells that the job has failed.
    request : MPI.Request
        MPI's.
    memory : torch.Tensor
        What MPI reads or writes; kept as long as the transfer.
    verb : str
        ``"send to"`` or ``"receive from"``.
    waits_for : list of int
        The other rank, or all that may be it.
    tag : int
        The message's.
    any_ : bool
        Whether it is a receive from any of them.
    """

    def __init__(
        self,
        messages: PointToPoint,
        request: Any,
        memory: Any,
        verb: str,
        waits_for: list[int],
        tag: int,
        *,
        any_: bool = False,
    ) -> None:
        self._verb, self.waits_for, self._tag = verb, waits_for, tag
        self._memory = memory
        self._request, self._messages = request, messages
        self._status = messages.mpi.Status() if any_ else None
        self._lock = threading.Lock()  # MPI allows one thread at a time to test a request
        self._ended = self.is_lost = False
        self._error: BaseException | None = None
        self._gives_up = math.inf

    @property
    def name(self) -> str:
        """What it does, for errors."""
        who = "any rank" if self._status is not None else f"rank {self.waits_for[0]}"
        return f"{self._verb} {who} with tag {self._tag}"

    def source(self) -> int:
        """Return the rank of the job that has sent it, when it has been received."""
        return self.waits_for[0] if self._status is None else cast(int, self._status.Get_source())

    def done(self) -> bool:
        """Return whether it has ended; makes progress."""
        if self._ended:
            return True
        with self._lock:
            if not self._ended:
                self._test()
        return self._ended

    def wait(self, timeout: float | None = None) -> bool:
        """Wait; return False after ``timeout`` s."""
        if self.done():
            return True
        began = now = time.monotonic()
        watch = _PeerWatch(self, self._messages.context)
        nap = 0.0
        while not self.done():
            now = time.monotonic()
            waited = now - began
            if timeout is not None and waited >= timeout:
                return False
            if waited > _SPIN_SECONDS:
                nap = min(nap + 20e-6, _LONGEST_NAP)
            if waited >= watch.due and (error := watch.look(waited)) is not None:
                self._end(error)
            if nap:
                time.sleep(nap)
            else:
                os.sched_yield()
        return True

    def result(self) -> None:
        """Wait; raise the error that it ended with."""
        self.wait()
        if self._error is not None:
            raise self._error

    def exception(self) -> BaseException | None:
        """Wait; return the error that it ended with."""
        self.wait()
        return self._error

    def cancel(self) -> None:
        """Give up a receive that has not ended."""
        with self._lock:
            if not self._ended:
                self._request.Cancel()
        self.done()

    def flush(self) -> None:
        """Do nothing: it has been started."""

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(request)`` at the end, on a thread of its own."""

        def wait() -> None:
            self.wait()
            callback(self)

        threading.Thread(target=wait, name="pyhvd-receive", daemon=True).start()

    def _end(self, error: BaseException) -> None:
        with self._lock:
            if not self._ended:
                self._error, self.is_lost, self._ended = error, True, True

    def _test(self) -> None:
        try:
            self._ended = self._request.Test(self._status)
        except self._messages.mpi.Exception as exc:
            self._error = CollectiveError(f"{self.name}: {exc}")
            self._ended = True
            return
        if not self._ended and (failure := self._messages.context.runtime.ended) is not None:
            now = time.monotonic()
            self._gives_up = min(self._gives_up, now + _LAST_SECONDS)
            if now >= self._gives_up:
                self._error, self.is_lost = CollectiveError.of(failure), True
                self._ended = True


class OpenTransfers:
    """Keeps the transfers that have not ended, with their memory; a thread tests them.

    The program may have dropped a transfer, or do something else meanwhile, such as a collective with the
    same rank. The thread ends some time after the last transfer, and when the job has ended: MPI may be
    finalized then.

    Parameters
    ----------
    context : Context
        Tells that the job has ended.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._open: list[Transfer] = []
        self._lost: list[Transfer] = []  # MPI may still use their memory
        self._changed = 0.0  # when a transfer came or ended
        self._has_thread = False

    def add(self, transfer: Transfer) -> None:
        """Keep a transfer until it ends."""
        with self._lock:
            self._open.append(transfer)
            self._changed = time.monotonic()
            if self._has_thread:
                return
            self._has_thread = True
        threading.Thread(target=self._main, name="pyhvd-transfers", daemon=True).start()

    def _main(self) -> None:
        while True:
            passed = time.monotonic() - self._changed
            time.sleep(min(max(passed / 50, _LONGEST_NAP), _LONGEST_TEST_NAP))
            with self._lock:
                if self._context.runtime.ended is not None:
                    self._lost, self._open, self._has_thread = self._lost + self._open, [], False
                    return
                chosen = self._open.copy()
            ended = [transfer for transfer in chosen if transfer.done()]
            with self._lock:
                if ended:
                    self._open = [transfer for transfer in self._open if transfer not in ended]
                    self._lost += [transfer for transfer in ended if transfer.is_lost]
                    self._changed = time.monotonic()
                if not self._open and passed > _IDLE_SECONDS:
                    self._has_thread = False
                    return


class _PeerWatch:
    """Ends a wait for a peer that is lost; warns of a long one, or ends it, as the stall check does."""

    def __init__(self, request: Transfer, context: Context) -> None:
        config = context.config
        self._request, self._context = request, context
        off = config.stall_check_disable or not config.stall_check_time_seconds
        self._warn_after = math.inf if off else config.stall_check_time_seconds
        self._end_after = math.inf if off else config.stall_shutdown_time_seconds or math.inf
        self.due = _LOOK_SECONDS

    def look(self, waited: float) -> CollectiveError | None:
        """Return the error that ends a wait of so many seconds, if one does; ``due`` is the next look."""
        self.due = waited + _LOOK_SECONDS
        request, runtime = self._request, self._context.runtime
        if len(request.waits_for) == 1 and (lost := runtime.where.describe_ended(request.waits_for[0])):
            return CollectiveError(f"{request.name}: {lost}")
        if waited < min(self._warn_after, self._end_after):
            return None
        began = time.monotonic()
        report = runtime.explain_wait(waited, request.name, request.waits_for)
        waited += time.monotonic() - began  # some seconds if rank 0 does not answer
        if waited >= self._end_after:
            return CollectiveError(f"{request.name} has been given up after {waited:.0f} s\n{report}")
        self._warn_after = math.inf
        _log.warning("%s", report)
        return None


class ReceiveWork(Work):
    """The promise of a received tensor, which knows its sender."""

    request: Transfer
    ranks: list[int]

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        self.wait()
        return self.ranks.index(self.request.source())
