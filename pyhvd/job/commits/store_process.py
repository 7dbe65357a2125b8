"""``python -P -m pyhvd.job.commits.store_process write|restore INDEX SLOT_0 SLOT_1``: the store of a host.

The agent of one host starts it beside the ranks. The arguments are descriptors of the vault; stdin has a
:class:`~pyhvd.job.messages.StoreOrder`. File systems may block and have threads, so the agent has none
of them.

- ``write`` stores commits until it is killed. Each line that it prints is for the user.
- ``restore`` brings the newest stored commit into the vault, which has no other writer then. It prints
  :class:`Restored` as its last line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec

from pyhvd.job.commits.store import CommitStore, StoreError
from pyhvd.job.commits.vault import Seal, Vault, VaultError
from pyhvd.job.messages import Restored, StoreOrder
from pyhvd.job.process.guardian import ignore
from pyhvd.job.process.signals import FORWARDED

WRITE, RESTORE = "write", "restore"
# Time between two looks at the vault.
_LOOK_S = 0.02
# The first retry after a failed write waits 1 s, each next one twice as long, but at most one minute.
_AGAIN_S = 1.0
_LATEST_S = 60.0
# A restore gives up after the store has failed for this time.
_AWAY_S = 60.0


class StoreWriter:
    """Stores the commits of a vault; see :meth:`turn`.

    Parameters
    ----------
    vault : Vault
        Whose commits.
    store : CommitStore
        Where to.
    every : int
        See :class:`~pyhvd.job.messages.StoreOrder`.
    say : callable
        Tells the user a line.
    """

    def __init__(self, vault: Vault, store: CommitStore, every: int, say: Callable[[str], None]) -> None:
        self._vault = vault
        self._store = store
        self._every = every
        self._say = say
        self._last: Seal | None = None  # the newest that is stored
        self._looked = False
        self._pause = _AGAIN_S
        self._next = self._next_line = 0.0

    def turn(self, now: float) -> None:
        """Store the newest commit, if that is due: see :meth:`_is_due`."""
        seal = self._vault.newest()
        if seal is None or not self._is_due(seal, now):
            return
        try:
            if not self._looked:  # a process before this one may have stored some
                self._note(self._store.newest())
                self._looked = True
                return
            data = self._vault.copy(seal)
            if data is None:
                return  # a newer one is there soon
            self._store.write(seal, data)
        except StoreError as exc:
            self._vault.store_failure = seal.mark, str(exc)
            self._next, self._pause = now + self._pause, min(2 * self._pause, _LATEST_S)
            if now >= self._next_line:
                self._next_line = now + _LATEST_S
                self._say(f"commits are not stored: {exc}")
        else:
            self._note(seal)
            self._pause, self._next_line = _AGAIN_S, 0.0

    def _note(self, stored: Seal | None) -> None:
        if stored is not None and (self._last is None or self._last.mark < stored.mark):
            self._last = stored
            self._vault.stored = stored.mark

    def _is_due(self, seal: Seal, now: float) -> bool:
        """Return whether ranks wait for a commit, or enough were made since the last that is stored."""
        if self._vault.stored >= seal.mark:
            return False
        urged = self._vault.urged
        if urged > max(self._vault.stored, self._vault.store_failure[0]):
            return True
        stored = self._last.number if self._last is not None else 0
        return now >= self._next and (seal.number >= stored + self._every or seal.number < stored)


def restore(vault: Vault, store: Callable[[], CommitStore], away_s: float = _AWAY_S) -> Restored:
    """Bring the newest stored commit into a vault, unless it holds a newer one."""
    until = time.monotonic() + away_s
    while True:
        try:
            found = store().read()
            break
        except StoreError as exc:
            if time.monotonic() >= until:
                return Restored(0, str(exc))
        time.sleep(min(_AGAIN_S, away_s))
    if found is None:
        return Restored(0, "the store has no commit of this job", empty=True)
    seal, data = found
    newest = vault.newest()
    if newest is None or newest.number < seal.number:
        try:
            vault.take(seal, data)
        except VaultError as exc:
            return Restored(0, str(exc))
    return Restored(vault.commit)


def main(mode: str, *descriptors: str) -> int:
    """Run; return the exit code."""
    ignore(FORWARDED)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=StoreOrder)
    vault = Vault([int(each) for each in descriptors])
    if mode == RESTORE:
        print(msgspec.json.encode(restore(vault, lambda: CommitStore(order))).decode(), flush=True)
        return 0
    try:
        store = CommitStore(order)
    except StoreError as exc:
        print(f"commits are not stored: {exc}", flush=True)
        return 1
    vault.store_failure = 0, ""
    writer = StoreWriter(vault, store, order.every, lambda text: print(text, flush=True))
    while True:
        writer.turn(time.monotonic())
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
