"""Test objects, compression, handles and names on ranks that are threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api import objects as module
from pyhvd.testing import run_ranks
from tests.conformance import objects, promises
from tests.conformance.cases import Case, each, on_threads


@each(objects.CASES)
def test_object(case: Case, size: int) -> None:
    on_threads(case, size)


@each(promises.CASES)
def test_promise(case: Case, size: int) -> None:
    on_threads(case, size)


def test_a_rank_without_room_for_the_object_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(count: int, dtype: Any) -> Any:
        if count and hvd.rank() == 2:
            raise MemoryError("no room")
        return np.empty(count, dtype)

    def body() -> None:
        with pytest.raises(MemoryError if hvd.rank() == 2 else hvd.RankFailedError) as caught:
            hvd.broadcast_object("text" * module.FIRST, 1, "large")
        assert "no room" in str(caught.value)
        hvd.barrier()

    monkeypatch.setattr(module, "np", SimpleNamespace(**{**vars(np), "empty": empty}))
    run_ranks(3, body, timeout=20)
