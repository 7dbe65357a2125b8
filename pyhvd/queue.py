"""The tensor queue: the tensors that this rank has submitted and that are not answered.

Owns: the entries by (process set, name), the order of submission, and the signal to the runtime. Any thread
submits; only the runtime's thread takes. Knows nothing of MPI or of arrays' contents.

Invariants, under ``_lock``:

1. A name in ``entries`` is in flight.
2. While join() is in ``entries``, this rank has joined, and no tensor of any process set is let in. Earlier
   tensors are sent before the join. The join's entry is removed before join() returns to its caller.
3. The runtime sets ``_asleep`` under the lock, unless a flush is due. A submitter that finds ``_asleep`` set
   clears it, and wakes the runtime after releasing the lock. So no wake-up is lost, and none is sent twice.
4. The fast path's ``has_messages`` says whether there are entries or refusals. It is set before the queue
   looks for calls in flight, and before the runtime takes what was pushed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import msgspec

from pyhvd.common.text import sendable
from pyhvd.devices.array_libraries import View
from pyhvd.errors import DuplicateNameError, HorovodInternalError, copy_error
from pyhvd.negotiation.messages import GLOBAL_SET, JOIN_NAME, Request, RequestType, verb

if TYPE_CHECKING:
    from pyhvd.native.shared_memory import FastPath

Key = tuple[int, str]

_MAX_SITE = 160
_IN_FLIGHT = "is still in flight on this rank"
_REMEDY = ": use another name, or synchronize the first one before"
_JOIN: Key = (GLOBAL_SET, JOIN_NAME)


@functools.lru_cache(maxsize=256)
def describe_site(code: CodeType, at: int) -> str:
    """Return the line of a call, as ``"train.py:41 in step"``; computed once, not for each tensor.

    The path of a file below the current directory is relative. A text of more than ``_MAX_SITE`` characters
    loses its beginning.
    """
    path = code.co_filename
    with contextlib.suppress(OSError):
        path = path.removeprefix(os.path.join(os.getcwd(), ""))
    line = next((line for first, end, line in code.co_lines() if first <= at < end), None)
    text = f"{path}:{line or 0} in {code.co_qualname.rpartition('<locals>.')[2]}"
    text = text if text.isascii() else sendable(text)
    return text if len(text) <= _MAX_SITE else f"...{text[3 - _MAX_SITE :]}"


class TensorEntry(msgspec.Struct, eq=False):
    """One submitted tensor.

    Attributes
    ----------
    process_set : int
        Id of the process set.
    request : Request
        The request for the other ranks.
    source : TensorView, DeviceView or None
        The input; None for join, barrier and process-set changes.
    target : TensorView, DeviceView or None
        The output, if its shape is known in advance; may be ``source`` itself.
    done : callable
        ``done(result, error)``; called exactly once.
    splits : tuple of int
        Rows for each set rank (alltoall).
    announced_ns : int
        When (ns) this rank announced the tensor to the others; 0 if unknown. For the runtime's thread only.
    site : (code, int), optional
        Where the tensor was submitted: a code object, and the offset of the call in that object.
    """

    process_set: int
    request: Request
    source: View | None
    target: View | None
    done: Callable[[Any, BaseException | None], None]
    splits: tuple[int, ...] = ()
    announced_ns: int = 0
    site: tuple[CodeType, int] | None = None


class TensorQueue:
    """The tensor queue of one rank; see the module's docstring.

    Parameters
    ----------
    wake : callable
        Ends the runtime's sleep; called from any thread.
    cycle_time : float
        Longest time (s) for which submissions gather while no thread waits.
    fast_path : FastPath, optional
        The rank's fast path; its tensors are not in the queue. The queue sets its ``paused`` while this rank
        has joined, so that it accepts no call. No name may be in flight in both. The queue enters a name in
        :attr:`entries` and :attr:`groups`, then looks for it in the fast path. The fast path holds a call,
        then looks for its names in :attr:`entries`, :attr:`groups` and :attr:`refusals`. So of two
        concurrent submissions of one name, at least one sees the other.
    """

    def __init__(
        self, wake: Callable[[], None], cycle_time: float, fast_path: FastPath | None = None
    ) -> None:
        self._wake = wake
        self._fast_path = fast_path
        self._cycle_time = cycle_time
        self._lock = threading.Lock()
        self.entries: dict[Key, TensorEntry] = {}
        self.groups: dict[Key, int] = {}
        self.refusals: dict[Key, int] = {}
        self._fresh: list[tuple[int, Request]] = []
        self._oldest = 0.0
        self._flush = False
        self._asleep = False
        self._closed: BaseException | None = None

    def add(self, entries: Sequence[TensorEntry]) -> None:
        """Submit tensors as one unit: all of them, or none.

        Raises
        ------
        DuplicateNameError
            A name is in flight, or occurs twice.
        HorovodInternalError
            The runtime has ended, for the reason in the error; or this rank has joined.
        """
        with self._lock:
            if self._closed is not None:
                raise copy_error(self._closed)
            self._check_joined(entries[0].request)
            keys: list[Key] = []
            fresh: list[tuple[int, Request]] = []
            for entry in entries:
                set_id, request = entry.process_set, entry.request
                key = (set_id, request.name)
                if key in self.entries:
                    self._raise_duplicate(entries)
                keys.append(key)
                fresh.append((set_id, request))
            if len(keys) > 1 and len(set(keys)) < len(keys):
                self._raise_duplicate(entries)
            if group := entries[0].request.group:
                if (entries[0].process_set, group) in self.groups:
                    raise DuplicateNameError(f"a grouped call named {group!r} {_IN_FLIGHT}{_REMEDY}")
                self.groups[entries[0].process_set, group] = len(entries)
            self.entries.update(zip(keys, entries, strict=True))
            self._mirror()
            if self._fast_path is not None and (clash := self._clash(self._fast_path, entries)):
                for key in keys:
                    self._take_out(key)
                raise DuplicateNameError(clash)
            if self._fast_path is not None and _JOIN in keys:
                self._fast_path.paused = True  # the fast path checks this again after it has held a call
            wake = self._push(fresh)
        if wake:
            self._wake()

    def adopt(self, entries: Sequence[TensorEntry]) -> None:
        """Take over tensors that were in flight on the fast path; the caller announces them."""
        with self._lock:
            error = self._closed
            for entry in entries if error is None else ():
                self.entries[entry.process_set, entry.request.name] = entry
                if group := entry.request.group:
                    key = (entry.process_set, group)
                    self.groups[key] = self.groups.get(key, 0) + 1
            self._mirror()
        for entry in entries if error is not None else ():
            entry.done(None, error)

    def check_joined(self, request: Request) -> None:
        """Raise HorovodInternalError if this rank has joined."""
        with self._lock:
            self._check_joined(request)

    def refusal_sent(self, process_set: int, name: str) -> None:
        """Forget a refusal that has been sent."""
        with self._lock:
            self._forget_refusal((process_set, name))

    def announce(self, process_set: int, refusal: Request) -> None:
        """Announce that this rank refused a call, so that the other ranks do not wait for this rank.

        Announce nothing while this rank has joined: the others do not wait for it then.
        """
        with self._lock:
            if self._closed is not None or _JOIN in self.entries:
                return
            self._flush = True
            key = (process_set, refusal.name)
            self.refusals[key] = self.refusals.get(key, 0) + 1
            self._mirror()
            wake = self._push([(process_set, refusal)])
        if wake:
            self._wake()

    def flush(self) -> None:
        """Make all submissions due at once, because a thread waits."""
        with self._lock:
            if not self._fresh or self._flush:
                return
            self._flush = True
            wake, self._asleep = self._asleep, False
        if wake:
            self._wake()

    def site_of(self, process_set: int, name: str) -> str:
        """Return the line that submitted a tensor, as ``"train.py:41 in step"``; empty if unknown."""
        with self._lock:
            entry = self.entries.get((process_set, name))
        return "" if entry is None or entry.site is None else describe_site(*entry.site)

    def take(self, now: float) -> list[tuple[int, Request]]:
        """Remove and return the new submissions if they are due, else return an empty list."""
        with self._lock:
            if not self._fresh or not (self._flush or now - self._oldest >= self._cycle_time):
                return []
            fresh, self._fresh = self._fresh, []
            self._flush = False
            return fresh

    def gather_for(self, cycle_time: float) -> None:
        """Change the longest time (s) for which submissions gather."""
        with self._lock:
            self._cycle_time = cycle_time

    def sleep_until(self) -> float | None:
        """Mark the runtime as asleep; return when (monotonic s) submissions become due, None for never.

        If a flush is due, return 0.0 and do not mark the runtime. Otherwise the time may be in the past.
        """
        with self._lock:
            if self._flush:
                return 0.0
            self._asleep = True
            return self._oldest + self._cycle_time if self._fresh else None

    def awake(self) -> None:
        """Mark the runtime as awake."""
        with self._lock:
            self._asleep = False

    def stamp(self, keys: Sequence[Key], now: int) -> None:
        """Set the time (ns) at which tensors are announced."""
        for key in keys:
            if (entry := self.entries.get(key)) is not None:
                entry.announced_ns = now

    def names(self) -> tuple[list[str], bool]:
        """Return the names of all tensors in flight here, and whether this rank waits in join()."""
        with self._lock:
            requests = [entry.request for entry in self.entries.values()]
        names = [request.name for request in requests if request.type != RequestType.JOIN]
        return names, len(names) < len(requests)

    def pop(self, process_set: int, name: str) -> TensorEntry | None:
        """Remove and return an entry that has been answered; its name is free again."""
        with self._lock:
            return self._take_out((process_set, name))

    def pop_set(self, process_set: int) -> list[TensorEntry]:
        """Remove and return all entries of a process set, in order of submission."""
        with self._lock:
            for set_id, request in self._fresh:
                if set_id == process_set and request.error:
                    self._forget_refusal((set_id, request.name))
            self._fresh = [each for each in self._fresh if each[0] != process_set]
            self._flush = self._flush and bool(self._fresh)
            keys = [key for key in self.entries if key[0] == process_set]
            return [entry for key in keys if (entry := self._take_out(key)) is not None]

    def close(self, error: BaseException) -> list[TensorEntry]:
        """Refuse all further submissions with ``error``; return the entries in flight."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            entries = list(self.entries.values())
            self.entries.clear()  # in place: the fast path holds these dicts
            self.groups.clear()
            self._fresh = []
            self._flush = False
            return entries

    def _check_joined(self, request: Request) -> None:
        if _JOIN in self.entries:
            what = f"{verb(RequestType(request.type))} {request.group or request.name!r}"
            raise HorovodInternalError(
                f"{what}: this rank has joined, and can submit nothing until join() has returned"
            )

    def _forget_refusal(self, key: Key) -> None:
        self.refusals[key] -= 1
        if not self.refusals[key]:
            del self.refusals[key]
            self._mirror()

    def _take_out(self, key: Key) -> TensorEntry | None:
        entry = self.entries.pop(key, None)
        if key == _JOIN and self._fast_path is not None:
            self._fast_path.paused = False
        if entry is not None and entry.request.group:
            group = (entry.process_set, entry.request.group)
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]
        if not self.entries:
            self._mirror()
        return entry

    def _mirror(self) -> None:
        """Tell the fast path whether there are entries or refusals, for submissions from C."""
        if self._fast_path is not None:
            self._fast_path.has_messages = bool(self.entries or self.refusals)

    def _push(self, items: list[tuple[int, Request]]) -> bool:
        if not self._fresh:
            self._oldest = time.monotonic()
        self._fresh.extend(items)
        wake, self._asleep = self._asleep, False
        return wake

    @staticmethod
    def _clash(fast_path: FastPath, entries: Sequence[TensorEntry]) -> str:
        """Return the error's text if a name is in flight on the fast path, else an empty text."""
        request = entries[0].request
        if request.group and fast_path.find_group(entries[0].process_set, request.group) is not None:
            return f"a grouped call named {request.group!r} {_IN_FLIGHT}{_REMEDY}"
        for entry in entries:
            name = entry.request.name
            if fast_path.find(entry.process_set, name) is not None:
                what = verb(RequestType(entry.request.type))
                return f"{what} {name!r}: a tensor of this name {_IN_FLIGHT}{_REMEDY}"
        return ""

    def _raise_duplicate(self, entries: Sequence[TensorEntry]) -> None:
        seen: set[Key] = set()
        for entry in entries:
            key = (entry.process_set, entry.request.name)
            if key in seen or key in self.entries:
                where = "occurs twice in one grouped call" if key in seen else _IN_FLIGHT
                what = verb(RequestType(entry.request.type))
                raise DuplicateNameError(
                    f"{what} {entry.request.name!r}: a tensor of this name {where}{_REMEDY}"
                )
            seen.add(key)
