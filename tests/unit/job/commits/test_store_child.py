"""The process that stores commits, as its agent sees it."""

from __future__ import annotations

import sys
import time
from contextlib import closing

import pytest

from pyhvd.job.commits.store_child import StoreChild
from pyhvd.job.commits.vault import Vault
from pyhvd.job.messages import Restored, StoreOrder
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="vaults need Linux")

# Also where fsspec is not installed, a store that cannot be opened.
ORDER = StoreOrder("nosuch://folder", "job1", b"secret")


def test_a_process_that_cannot_store_is_told_once_and_started_again() -> None:
    with closing(Vault.create()) as vault, closing(StoreChild(vault)) as child:
        child.use(ORDER)
        for _ in range(2):
            child._next = 0.0
            wait_until(lambda: child.check(time.monotonic()) is None and child._writer is None)
        assert len(child.remarks) == 1
        assert child.remarks[0].startswith("commits are not stored: ")
        mark, why = vault.store_failure
        assert mark > 1 << 62
        assert why == child.remarks[0]


def test_a_restore_that_is_given_up() -> None:
    """The next generation may ask again; another host may store commits then."""
    with closing(Vault.create()) as vault, closing(StoreChild(vault)) as child:
        child.use(ORDER)
        child.restore()
        reader = child._reader
        assert reader is not None
        child.use(None)
        assert reader._process.poll() is not None
        assert child.check(time.monotonic()) is None
        child.use(ORDER)
        child.restore()
        assert child._reader is not None
        child._reader._process.kill()
        found: list[Restored | None] = []

        def is_over() -> bool:
            found.append(child.check(time.monotonic()))
            return found[-1] is not None

        wait_until(is_over)
        assert found[-1] == Restored(0, "the process that reads the store has ended")
