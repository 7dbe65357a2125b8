"""The wire form: every message decodes to itself, and other bytes raise an error."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, strategies as st

from pyhvd.common.stacks import Frame, ThreadStack
from pyhvd.errors import InternalError
from pyhvd.negotiation.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    MergedList,
    MergedPart,
    RelayedList,
    Request,
    RequestList,
    Response,
    ResponseList,
    StackReport,
    StackRequest,
    Tuning,
    bits_of,
    bits_to_bytes,
    bytes_to_bits,
    decode_merged,
    decode_out_of_band,
    decode_relayed,
    decode_requests,
    decode_responses,
    encode,
    is_out_of_band,
    iter_bits,
    pack_ranks,
    unpack_ranks,
)

small = st.integers(-1, 2**40)
texts = st.text(max_size=8)
shapes = st.lists(st.integers(0, 2**50), max_size=4).map(tuple)
factors = st.floats(allow_nan=False)
requests = st.builds(
    Request,
    type=st.integers(0, 10),
    name=texts,
    dtype=small,
    shape=shapes,
    op=st.integers(-1, 5),
    prescale=factors,
    postscale=factors,
    root=small,
    device=texts,
    group=texts,
    group_size=small,
    ranks=shapes,
    error=texts,
    traceback=texts,
)
errors = st.builds(
    ErrorInfo,
    kind=st.integers(0, 3),
    message=texts,
    rank=small,
    per_rank=st.dictionaries(small, texts, max_size=3),
    missing=st.dictionaries(texts, st.lists(small, max_size=3), max_size=3),
    stacks=st.dictionaries(small, texts, max_size=3),
    sites=st.dictionaries(small, texts, max_size=3),
    traceback=texts,
)
vectors = st.dictionaries(st.integers(0, 9), st.binary(max_size=4), max_size=3)
responses = st.builds(
    Response,
    request=requests,
    process_set=small,
    slot=small,
    dims=shapes,
    joined=shapes,
    error=st.none() | errors,
    only=shapes,
    value=small,
)
request_lists = st.builds(
    RequestList,
    version=st.just(PROTOCOL_VERSION),
    seen=small,
    bits=vectors,
    requests=st.lists(st.tuples(small, requests), max_size=3),
    stop=st.none() | errors,
    sites=st.lists(texts, max_size=3),
)
tunings = st.builds(
    Tuning,
    fusion_threshold=small,
    cycle_time_ms=st.floats(0, 1e3),
    chunk_size=small,
    staging_size=small,
)
response_lists = st.builds(
    ResponseList,
    version=st.just(PROTOCOL_VERSION),
    seq=small,
    cached=vectors,
    responses=st.lists(responses, max_size=3),
    stop=st.none() | errors,
    tuning=st.none() | tunings,
)


@given(message=request_lists)
def test_request_lists_come_back(message: RequestList) -> None:
    data = encode(message)
    assert (
        decode_requests(data, 7)
        == decode_requests(bytearray(data), 7)
        == decode_requests(memoryview(data), 7)
        == message
    )


@given(message=response_lists)
def test_response_lists_come_back(message: ResponseList) -> None:
    assert decode_responses(encode(message), 7) == message


some_ranks = st.sets(st.integers(0, 9999), min_size=1, max_size=20)


@given(said=st.lists(st.tuples(some_ranks, small, request_lists), max_size=3))
def test_merged_lists_come_back(said: list[tuple[set[int], int, RequestList]]) -> None:
    parts = [MergedPart(pack_ranks(bits_of(ranks)), last, message) for ranks, last, message in said]
    merged = MergedList(PROTOCOL_VERSION, parts)
    assert decode_merged(bytearray(encode(merged)), 7) == merged
    assert [set(iter_bits(unpack_ranks(part.ranks))) for part in parts] == [ranks for ranks, _, _ in said]


@given(ranks=some_ranks, message=response_lists)
def test_relayed_lists_come_back(ranks: set[int], message: ResponseList) -> None:
    relayed = RelayedList(PROTOCOL_VERSION, pack_ranks(bits_of(ranks)), encode(message))
    found = decode_relayed(bytearray(encode(relayed)), 7)
    assert found == relayed
    assert decode_responses(found.payload, 7) == message


stack_reports = st.builds(
    StackReport,
    version=st.just(PROTOCOL_VERSION),
    number=small,
    threads=st.lists(
        st.builds(
            ThreadStack,
            name=texts,
            frames=st.lists(st.builds(Frame, file=texts, line=small, function=texts, text=texts), max_size=3),
            inside=texts,
            left_out=small,
        ),
        max_size=3,
    ),
)


@given(message=stack_reports | st.builds(StackRequest, version=st.just(PROTOCOL_VERSION), number=small))
def test_asides_come_back_and_are_told_from_lists(message: StackReport | StackRequest) -> None:
    data = encode(message)
    assert is_out_of_band(data)
    assert decode_out_of_band(data, 7) == decode_out_of_band(bytearray(data), 7) == message


@given(message=request_lists | response_lists)
def test_lists_are_no_asides(message: RequestList | ResponseList) -> None:
    assert not is_out_of_band(encode(message))


@given(bits=st.integers(0, 2**300))
def test_bit_vectors_come_back(bits: int) -> None:
    data = bits_to_bytes(bits)
    assert bytes_to_bits(data) == bits
    assert not data.endswith(b"\0")


def test_a_step_out_of_the_cache_is_small() -> None:
    message = RequestList(PROTOCOL_VERSION, 1000, {0: bits_to_bytes(2**200 - 1)})
    assert len(encode(message)) < 40
    assert bits_to_bytes(0) == b""
    assert bits_to_bytes(1 << 8) == b"\x00\x01"


@given(data=st.binary(max_size=40))
def test_noise_is_no_message(data: bytes) -> None:
    for decode in (decode_requests, decode_merged, decode_responses, decode_relayed, decode_out_of_band):
        with pytest.raises(InternalError):
            decode(data, 7)


@pytest.mark.parametrize(
    ("decode", "what"),
    [
        (decode_requests, "request list"),
        (decode_merged, "merged request list"),
        (decode_responses, "response list"),
        (decode_relayed, "relayed response list"),
    ],
)
def test_a_message_that_was_cut_says_its_length_and_its_sender(
    decode: Callable[[bytes, int], object], what: str
) -> None:
    data = encode(RequestList(PROTOCOL_VERSION, 0, {}, [(0, Request(0, "x"))]))[:-1]
    text = rf"rank 7 sent a {what} of {len(data)} bytes that cannot be read "
    with pytest.raises(InternalError, match=text) as caught:
        decode(data, 7)
    assert caught.value.__suppress_context__, "no error of msgpack in the traceback"


@pytest.mark.parametrize(
    ("decode", "rest"),
    [
        (decode_requests, [0]),
        (decode_merged, [[]]),
        (decode_responses, [0]),
        (decode_relayed, [(0, b""), b""]),
    ],
)
def test_another_protocol_version_is_named(
    decode: Callable[[bytes, int], object], rest: list[object]
) -> None:
    data = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, *rest])
    text = f"rank 7 uses protocol version {PROTOCOL_VERSION + 1}, this rank {PROTOCOL_VERSION}: install"
    with pytest.raises(InternalError, match=text):
        decode(data, 7)


def test_a_float_stays_the_float_it_was() -> None:
    for factor in (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0):
        message = decode_requests(
            encode(RequestList(PROTOCOL_VERSION, 0, {}, [(0, Request(0, "x", prescale=factor))])), 7
        )
        assert repr(message.requests[0][1].prescale) == repr(factor)
