"""Errors of a rank: as exceptions for its callers, and as messages for the other ranks.

Owns the mapping between exceptions and :class:`~pyhvd.negotiation.messages.ErrorInfo`, and the *note*: an
encoded ErrorInfo for ranks that wait in shared memory (:meth:`pyhvd.backends.host.HostBackend.abort`). A rank
that ends with a note passes the same note on, so that all ranks report the first failure. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from pyhvd.common.processes import ProcessPlace
from pyhvd.common.text import describe_exception, describe_traceback
from pyhvd.errors import (
    HorovodInternalError,
    InternalError,
    MismatchError,
    RankFailedError,
    RankValue,
    RemoteError,
    ShutDownError,
    StallError,
    TransportError,
    WithdrawnError,
)
from pyhvd.native.shared_memory import NOTE
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind, Response, verb
from pyhvd.transport.fabric import Aborted, LinkLost

_FRAME = 64
"""Upper bound of the bytes of an ErrorInfo with only kind, rank and text, without its text."""

# Made here: with ranks as threads, several first uses at once may crash msgspec.
_note_decoder = msgspec.msgpack.Decoder(ErrorInfo)


def exception_of(
    info: ErrorInfo, name: str = "", places: Sequence[ProcessPlace] = ()
) -> HorovodInternalError:
    """Return the exception of an error on the wire; ``places`` are the ranks' locations."""
    if info.kind == ErrorKind.MISMATCH:
        hosts = {rank: places[rank].host for rank in info.per_rank if rank < len(places)}
        per_rank = {
            rank: RankValue(rank, hosts.get(rank, ""), value, info.sites.get(rank, ""))
            for rank, value in info.per_rank.items()
        }
        return MismatchError(info.message, name, per_rank)
    if info.kind in (ErrorKind.RANK_FAILED, ErrorKind.HOST_LOST):
        failed = RankFailedError(info.message, info.rank)
        if info.traceback:
            failed.__cause__ = RemoteError(info.rank, info.traceback)
        return failed
    if info.kind == ErrorKind.STALL:
        return StallError(info.message, info.missing, info.stacks)
    if info.kind == ErrorKind.WITHDRAWN:
        return WithdrawnError(info.message)
    return ShutDownError(f"{name!r}: {info.message}" if name else info.message, info.rank)


def info_of(exc: BaseException, rank: int) -> ErrorInfo:
    """Return the error to announce for the exception that ends a rank's engine.

    For an :class:`~pyhvd.transport.fabric.Aborted` it is the note that this rank received. Its ``rank`` is
    the rank that failed first, or for a lost connection a rank of the other host.
    """
    if isinstance(exc, Aborted):
        return _read(exc.note)
    if isinstance(exc, LinkLost):
        return ErrorInfo(ErrorKind.HOST_LOST, str(exc), exc.rank)
    if isinstance(exc, StallError):
        return ErrorInfo(ErrorKind.STALL, str(exc), rank, missing=exc.missing, stacks=exc.stacks)
    text = f"rank {rank} failed: {describe_exception(exc)}"
    return ErrorInfo(ErrorKind.RANK_FAILED, text, rank, traceback=describe_traceback(exc))


def note_of(info: ErrorInfo) -> bytes:
    """Return an error as a note; if it is too long, cut stacks and traceback first, text last."""
    return next(note for note in map(msgspec.msgpack.encode, _shorter(info)) if len(note) <= NOTE)


def _shorter(info: ErrorInfo) -> Iterator[ErrorInfo]:
    yield info
    yield (bare := msgspec.structs.replace(info, stacks={}, traceback=""))
    yield msgspec.structs.replace(bare, missing={})
    text = info.message.encode()[: NOTE - _FRAME].decode(errors="ignore")  # drop a cut character
    yield ErrorInfo(info.kind, text, info.rank)


def _read(note: bytes) -> ErrorInfo:
    try:
        return _note_decoder.decode(note)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ErrorInfo(
            ErrorKind.RANK_FAILED, "another rank has aborted the collective, and left no word why"
        )


def error_of_thread(exc: BaseException) -> HorovodInternalError:
    """Return the text of an exception that ends the background thread."""
    if isinstance(exc, HorovodInternalError):
        return exc
    if isinstance(exc, Aborted):
        return exception_of(_read(exc.note))
    if isinstance(exc, LinkLost):
        return RankFailedError(str(exc), exc.rank)
    return _wrapped(exc, "", f"pyhvd's background thread failed (please report this): {exc!r}")


def error_of_response(exc: BaseException, response: Response) -> HorovodInternalError:
    """Return the text of an exception that ends an agreed collective."""
    if isinstance(exc, HorovodInternalError | Aborted | LinkLost):
        return error_of_thread(exc)
    what = f"{verb(response.request.type)} {response.request.name!r}"
    return _wrapped(exc, f"{what}: ", f"{what} failed on this rank: {type(exc).__name__}: {exc}")


def _wrapped(exc: BaseException, where: str, ours: str) -> HorovodInternalError:
    """Return the text of an error of a transport library, or of pyhvd itself."""
    root = type(exc).__module__.partition(".")[0]
    library = {"mpi4py": "MPI", "cupy": "CUDA", "cupy_backends": "CUDA"}.get(root)
    error = TransportError(f"{where}{library} reported: {exc}") if library else InternalError(ours)
    error.__cause__ = exc
    return error
