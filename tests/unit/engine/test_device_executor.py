"""How the device executor ends work that is under way on a device after a rank has failed."""

from __future__ import annotations

from typing import Any

import pytest

from pyhvd.devices.pending import Queued
from pyhvd.engine import device_executor
from pyhvd.engine.device_executor import DeviceExecutor
from pyhvd.errors import HorovodInternalError, TransportError


class Broken:
    """A backend that raises after an abort, as NCCL's backend does."""

    def __init__(self) -> None:
        self.failure, self.closed = "", False

    def check(self) -> None:
        if self.failure:
            raise TransportError(self.failure)

    def abort(self, why: str) -> None:
        self.failure = why

    def close(self) -> None:
        self.closed = True


class Slow:
    """A device whose events pass after a number of queries."""

    name = "cuda:0"

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def has_passed(self, event: object) -> bool:
        self.looks -= 1
        return self.looks < 0


def executor(looks: float) -> tuple[DeviceExecutor, Broken]:
    """Return an executor with one backend and a busy device."""
    nothing: Any = None
    made = DeviceExecutor(nothing, {}, {}, nothing, nothing, checked=False, patience=10.0)
    backend: Any = Broken()
    device: Any = Slow(looks)
    made._opened[0] = backend
    made.work.add(Queued(device, object(), ["x"], object()))
    return made, backend


def test_work_that_was_aborted_ends_and_all_is_closed() -> None:
    made, backend = executor(looks=3)
    made.abort("rank 1 has been killed")
    made.close()
    assert backend.closed


def test_a_device_that_does_not_end_aborted_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_executor, "ABORT_SECONDS", 0.05)
    made, backend = executor(looks=float("inf"))
    made.abort("rank 1 has been killed")
    with pytest.raises(TransportError, match="cuda:0 has not ended its work on 'x' in time"):
        made.close()
    assert not backend.closed


def test_work_that_fails_by_itself_is_told() -> None:
    made, backend = executor(looks=float("inf"))
    backend.abort("no more NVLink")
    with pytest.raises(TransportError, match="no more NVLink"):
        made.close()


def test_waiting_for_the_device_ends_with_its_work() -> None:
    made, _ = executor(looks=3)
    made.synchronize(10.0)
    made, _ = executor(looks=float("inf"))
    with pytest.raises(TimeoutError, match=r"cuda:0 has not ended its work on 'x' within 0\.05 s"):
        made.synchronize(0.05)


@pytest.mark.parametrize("ends", [0, float("inf")])
@pytest.mark.parametrize("alone", [False, True])
def test_waiting_for_the_device_tells_that_work_was_aborted(ends: float, *, alone: bool) -> None:
    """The backend's own abort is known before the runtime's thread has heard of it."""
    made, backend = executor(ends)
    (backend if alone else made).abort("rank 1 has been killed")
    with pytest.raises(HorovodInternalError, match="results may be wrong: rank 1 has been killed"):
        made.synchronize(10.0)
