"""The taxonomy: what Horovod's users catch catches it, and each error carries what it knows."""

from __future__ import annotations

import pytest

from pyhvd import errors
from pyhvd.executor import exception_of
from pyhvd.messages import ErrorInfo, ErrorKind

BASES: dict[str, tuple[type[BaseException], ...]] = {
    "HorovodInternalError": (RuntimeError,),
    "NotInitializedError": (ValueError, errors.HorovodInternalError),
    "UnsupportedDtypeError": (ValueError,),
    "UnsupportedOpError": (ValueError, errors.HorovodInternalError),
    "DuplicateNameError": (ValueError,),
    "MismatchError": (errors.HorovodInternalError,),
    "RankFailedError": (errors.HorovodInternalError,),
    "ShutDownError": (errors.HorovodInternalError,),
    "StallError": (errors.HorovodInternalError,),
    "TransportError": (errors.HorovodInternalError,),
    "InternalError": (errors.HorovodInternalError,),
    "ConfigError": (ValueError,),
    "TimelineError": (ValueError,),
    "HostsUpdatedInterrupt": (RuntimeError,),
    "HorovodVersionMismatchError": (ImportError,),
}


@pytest.mark.parametrize("name", BASES)
def test_what_catches_it(name: str) -> None:
    for base in BASES[name]:
        assert issubclass(getattr(errors, name), base)


def test_the_list_here_is_complete() -> None:
    found = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, BaseException)}
    assert found == set(BASES)


def test_misuse_is_no_failure_of_the_job() -> None:
    for name in ("DuplicateNameError", "UnsupportedDtypeError", "ConfigError", "TimelineError"):
        assert not issubclass(getattr(errors, name), errors.HorovodInternalError)


def test_what_errors_carry() -> None:
    mismatch = errors.MismatchError("text", "x", {0: "a"})
    assert (str(mismatch), mismatch.name, mismatch.per_rank) == ("text", "x", {0: "a"})
    assert errors.RankFailedError("text", 3).rank == 3
    assert errors.ShutDownError("text", 2).rank == 2
    stall = errors.StallError("text", {"x": [1]}, {1: "stack"})
    assert (stall.missing, stall.stacks) == ({"x": [1]}, {1: "stack"})
    assert errors.HostsUpdatedInterrupt(True).skip_sync
    version = errors.HorovodVersionMismatchError("numpy", "1", "2")
    assert (version.name, version.version, version.installed_version) == ("numpy", "1", "2")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ErrorKind.MISMATCH, errors.MismatchError),
        (ErrorKind.RANK_FAILED, errors.RankFailedError),
        (ErrorKind.SHUT_DOWN, errors.ShutDownError),
        (ErrorKind.STALL, errors.StallError),
    ],
)
def test_errors_on_the_wire_become_exceptions(kind: ErrorKind, expected: type[Exception]) -> None:
    exc = exception_of(ErrorInfo(kind, "text", 2, {1: "a"}), "x")
    assert type(exc) is expected
    assert str(exc).endswith("text")
    if isinstance(exc, errors.MismatchError):
        assert (exc.name, exc.per_rank) == ("x", {1: "a"})
    if isinstance(exc, errors.RankFailedError | errors.ShutDownError):
        assert exc.rank == 2
