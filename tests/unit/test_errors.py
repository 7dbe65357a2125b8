"""The error classes: handlers written for Horovod catch them, and each error has its attributes."""

from __future__ import annotations

import pytest

from pyhvd import errors
from pyhvd.common.processes import ProcessPlace
from pyhvd.common.text import MAX_TEXT, describe_exception, describe_traceback
from pyhvd.engine.error_mapping import exception_of
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind

BASES: dict[str, tuple[type[BaseException], ...]] = {
    "HorovodInternalError": (RuntimeError,),
    "NotInitializedError": (ValueError, errors.HorovodInternalError),
    "UnsupportedDtypeError": (ValueError,),
    "UnsupportedOpError": (ValueError, errors.HorovodInternalError),
    "UnsupportedShapeError": (ValueError, errors.HorovodInternalError),
    "DuplicateNameError": (ValueError,),
    "MismatchError": (errors.HorovodInternalError,),
    "RankFailedError": (errors.HorovodInternalError,),
    "ShutDownError": (errors.HorovodInternalError,),
    "CorruptionError": (errors.HorovodInternalError,),
    "RemoteError": (Exception,),
    "StallError": (errors.HorovodInternalError,),
    "WithdrawnError": (errors.HorovodInternalError,),
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
    value = errors.RankValue(0, "host", "(3,)", "train.py:4 in step")
    assert str(value) == "(3,)"
    mismatch = errors.MismatchError("text", "x", {0: value})
    assert (str(mismatch), mismatch.name, mismatch.per_rank) == ("text", "x", {0: value})
    remote = errors.RemoteError(3, "Traceback:\n  line\nKeyError: 'x'\n")
    assert str(remote) == "on rank 3:\n  | Traceback:\n  |   line\n  | KeyError: 'x'"
    corrupt = errors.CorruptionError("text", "x", [2], {2: "b"})
    assert (str(corrupt), corrupt.name, corrupt.ranks, corrupt.per_rank) == ("text", "x", [2], {2: "b"})
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
        (ErrorKind.WITHDRAWN, errors.WithdrawnError),
        (ErrorKind.HOST_LOST, errors.RankFailedError),
    ],
)
def test_errors_on_the_wire_become_exceptions(kind: ErrorKind, expected: type[Exception]) -> None:
    places = [ProcessPlace("alpha", 1), ProcessPlace("beta", 2)]
    info = ErrorInfo(kind, "text", 2, {1: "a"}, {"x": [1]}, {1: "there"}, {1: "t.py:4 in f"}, "Traceback")
    exc = exception_of(info, "x", places)
    assert type(exc) is expected
    assert str(exc).endswith("text")
    if isinstance(exc, errors.MismatchError):
        assert (exc.name, exc.per_rank) == ("x", {1: errors.RankValue(1, "beta", "a", "t.py:4 in f")})
    if isinstance(exc, errors.RankFailedError | errors.ShutDownError):
        assert exc.rank == 2
    if isinstance(exc, errors.RankFailedError):
        assert isinstance(exc.__cause__, errors.RemoteError)
        assert str(exc.__cause__) == "on rank 2:\n  | Traceback"
    if isinstance(exc, errors.StallError):
        assert (exc.missing, exc.stacks) == ({"x": [1]}, {1: "there"})


def test_long_tracebacks_are_cut_in_the_middle() -> None:
    try:
        raise ValueError("a" * 50_000)
    except ValueError as exc:
        text = describe_traceback(exc)
    assert text.startswith("Traceback (most recent call last):")
    assert "characters left out" in text
    assert len(text) < MAX_TEXT + 100
    assert len(describe_exception(ValueError("a" * 50_000))) < MAX_TEXT + 100


def test_an_exception_that_cannot_say_its_text_is_told_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    assert describe_exception(Mute()) == "Mute: <its str() raised KeyError>"
    assert "Mute" in describe_traceback(Mute())


def test_what_travels_is_text_though_a_files_name_is_none() -> None:
    exc = ValueError("bad\udcff.py")
    assert describe_exception(exc) == "ValueError: bad\\udcff.py"
    assert describe_traceback(exc) == "ValueError: bad\\udcff.py\n"
