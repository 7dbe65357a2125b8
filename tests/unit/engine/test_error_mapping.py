"""The notes that a failing rank leaves in the window: they keep what fits, and decode to the same error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

import pyhvd as hvd
from pyhvd.engine.error_mapping import error_of_response, error_of_thread, info_of, note_of
from pyhvd.native.shared_memory import NOTE
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind, Request, RequestType, Response
from pyhvd.transport.fabric import Aborted, LinkLost

texts = st.text(max_size=40).flatmap(lambda part: st.integers(0, 400).map(lambda n: part * n))
infos = st.builds(
    ErrorInfo,
    st.sampled_from([ErrorKind.RANK_FAILED, ErrorKind.STALL, ErrorKind.HOST_LOST]),
    texts,
    st.integers(0, 500),
    missing=st.dictionaries(texts, st.lists(st.integers(0, 500)), max_size=3),
    stacks=st.dictionaries(st.integers(0, 500), texts, max_size=3),
    traceback=texts,
)


@given(infos)
def test_a_note_fits_and_names_the_rank(info: ErrorInfo) -> None:
    note = note_of(info)
    assert len(note) <= NOTE
    read = msgspec.msgpack.decode(note, type=ErrorInfo)
    assert (read.kind, read.rank) == (info.kind, info.rank)
    assert info.message.startswith(read.message)
    assert read.message == info.message or len(read.message.encode()) > NOTE - 80
    if len(msgspec.msgpack.encode(info)) <= NOTE:
        assert read == info


def failure(text: str) -> Exception:
    try:
        raise MemoryError(text)
    except MemoryError as exc:
        return exc


def test_what_was_read_is_handed_on_unchanged() -> None:
    first = info_of(failure("no room"), 3)
    assert first.message == "rank 3 failed: MemoryError: no room"
    for _ in range(2):  # from rank to rank
        following = Aborted(note_of(first))
        assert info_of(following, 0) == first
        error = error_of_thread(following)
        assert isinstance(error, hvd.RankFailedError)
        assert (str(error), error.rank) == (first.message, 3)
        assert "in failure" in str(error.__cause__)


def test_a_lost_host_stays_one_on_its_way_through_other_ranks() -> None:
    """Each rank that hears of it ends the job, because the lost ranks cannot."""
    first = info_of(LinkLost("the connection to host h1 (ranks 2-3) has failed", 2), 0)
    assert (first.kind, first.rank) == (ErrorKind.HOST_LOST, 2)
    assert info_of(Aborted(note_of(first)), 1) == first
    error = error_of_thread(Aborted(note_of(first)))
    assert (type(error), str(error)) == (hvd.RankFailedError, first.message)


def test_a_rank_that_gives_up_leaves_what_it_knows() -> None:
    info = info_of(hvd.StallError("rank 2 has given up", {"x": [1]}, {1: "its process is stopped"}), 2)
    error = error_of_response(Aborted(note_of(info)), Response(Request(RequestType.ALLREDUCE, "x")))
    assert isinstance(error, hvd.StallError)
    assert (str(error), error.missing, error.stacks) == (
        "rank 2 has given up",
        {"x": [1]},
        {1: "its process is stopped"},
    )


@pytest.mark.parametrize("note", [b"", b"\xc1", b"half of \x93", b"\x93\x01\xa1\xff\x00"])
def test_a_note_that_cannot_be_read(note: bytes) -> None:
    error = error_of_thread(Aborted(note))
    assert isinstance(error, hvd.RankFailedError)
    assert error.rank == -1
    assert "left no word why" in str(error)
