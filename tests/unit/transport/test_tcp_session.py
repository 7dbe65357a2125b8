"""The authenticated session: valid messages arrive, all other bytes are refused."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
from hypothesis import given, strategies as st

from pyhvd.transport.tcp.session import MAX_RECORD, ChannelError, Role, Session

KEY = bytes(range(32))
_HELLO = 40
_HEAD = 36


def pair(client_key: bytes = KEY, server_key: bytes = KEY) -> tuple[Session, Session]:
    return Session(client_key, Role.CLIENT), Session(server_key, Role.SERVER)


def take(one: Session) -> bytes:
    """Remove and return the bytes to send."""
    out = bytes(one.outgoing)
    one.outgoing.clear()
    return out


def shake_hands(client: Session, server: Session) -> None:
    assert server.receive(take(client)) == []
    assert client.receive(take(server)) == []
    assert server.receive(take(client)) == []
    assert client.receive(take(server)) == []


def connected() -> tuple[Session, Session]:
    client, server = pair()
    shake_hands(client, server)
    return client, server


def test_both_know_each_other_after_the_handshake() -> None:
    client, server = connected()
    assert client.authenticated
    assert server.authenticated


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_messages_arrive_in_order_however_they_are_cut(messages: list[bytes], data: st.DataObject) -> None:
    client, server = connected()
    for message in messages:
        client.send(message)
    stream = take(client)
    got = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += server.receive(stream[:size])
        stream = stream[size:]
    assert got == messages
    server.end()


@given(st.integers(1, 5), st.data())
def test_the_handshake_may_come_in_pieces(size: int, data: st.DataObject) -> None:
    client, server = pair()
    for _ in range(4):
        for one, other in ((client, server), (server, client)):
            out = take(one)
            for start in range(0, len(out), size):
                assert other.receive(out[start : start + size]) == []
    assert client.authenticated
    assert server.authenticated


def test_the_longest_message_and_one_more_byte() -> None:
    client, server = connected()
    client.send(bytes(MAX_RECORD))
    assert server.receive(take(client)) == [bytes(MAX_RECORD)]
    with pytest.raises(ValueError, match="at most 1048576 can be sent"):
        client.send(bytes(MAX_RECORD + 1))


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_one_changed_bit_is_noticed(messages: list[bytes], data: st.DataObject) -> None:
    client, server = connected()
    for message in messages:
        client.send(message)
    stream = bytearray(take(client))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    try:
        got = server.receive(bytes(stream))
        server.end()
    except ChannelError:
        return
    raise AssertionError(f"took {got}")


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=4, unique=True), st.data())
def test_records_repeated_swapped_or_left_out_are_refused(messages: list[bytes], data: st.DataObject) -> None:
    client, server = connected()
    records = []
    for message in messages:
        client.send(message)
        records.append(take(client))
    order = data.draw(st.lists(st.sampled_from(range(len(records))), min_size=1, max_size=6))
    good = 0
    while good < len(order) and order[good] == good:
        good += 1
    for place, number in enumerate(order):
        if place < good:
            assert server.receive(records[number]) == [messages[number]]
        else:
            with pytest.raises(ChannelError, match="repeated, dropped or reordered"):
                server.receive(records[number])
            with pytest.raises(ChannelError):  # the session accepts nothing after it
                server.receive(records[good] if good < len(records) else b"")
            break


def test_a_record_sent_back_to_its_sender_is_refused() -> None:
    client, server = connected()
    client.send(b"kill rank 1")
    with pytest.raises(ChannelError, match="changed"):
        client.receive(take(client))
    assert server.authenticated


def test_a_record_of_another_session_with_the_same_key_is_refused() -> None:
    client, _ = connected()
    _, other = connected()
    client.send(b"again")
    with pytest.raises(ChannelError, match="changed"):
        other.receive(take(client))


@given(st.integers(MAX_RECORD + 1, 2**32 - 1))
def test_too_long_a_message_is_refused_by_its_announcement(length: int) -> None:
    _, server = connected()
    with pytest.raises(ChannelError, match="at most 1048576 are accepted"):
        server.receive(length.to_bytes(4, "big"))


@given(st.data())
def test_a_stream_cut_inside_a_message_is_noticed_at_its_end(data: st.DataObject) -> None:
    client, server = connected()
    client.send(b"the last words")
    stream = take(client)
    assert server.receive(stream[: data.draw(st.integers(1, len(stream) - 1))]) == []
    with pytest.raises(ChannelError, match="cut inside a message"):
        server.end()


def test_a_peer_that_leaves_before_its_proof_is_no_peer() -> None:
    _, server = pair()
    with pytest.raises(ChannelError, match="before it proved"):
        server.end()


def test_a_client_with_another_key_learns_nothing() -> None:
    client, server = pair(client_key=bytes(32))
    server.receive(take(client))
    client.receive(take(server))
    with pytest.raises(ChannelError, match="does not hold this job's key"):
        server.receive(take(client))
    assert take(server) == b""
    assert not server.authenticated


def test_a_server_with_another_key_is_refused() -> None:
    client, server = pair()
    server.receive(take(client))
    client.receive(take(server))
    with pytest.raises(ChannelError, match="does not hold this job's key"):
        client.receive(bytes(32))
    assert take(server) == b""


def test_a_proof_cannot_be_reflected() -> None:
    """A server that echoes the client's nonce and proof is refused."""
    client = Session(KEY, Role.CLIENT)
    hello = take(client)
    client.receive(hello)
    with pytest.raises(ChannelError, match="does not hold this job's key"):
        client.receive(take(client))


@given(st.binary(min_size=1, max_size=200))
def test_whatever_a_stranger_says_it_gets_no_message_through(noise: bytes) -> None:
    _, server = pair()
    with contextlib.suppress(ChannelError):
        assert server.receive(noise) == []
    assert not server.authenticated


def test_another_protocol_is_refused_by_its_first_bytes() -> None:
    _, server = pair()
    with pytest.raises(ChannelError, match="another protocol"):
        server.receive(b"GET ")


def test_nothing_is_sent_before_the_peer_is_known() -> None:
    client, _ = pair()
    with pytest.raises(ChannelError):
        client.send(b"the function")


def test_what_is_shown_has_no_secret() -> None:
    client, server = connected()
    client.send(b"x")
    stream = bytearray(take(client))
    stream[-1] ^= 1
    with pytest.raises(ChannelError) as caught:
        server.receive(bytes(stream))
    shown = f"{caught.value!r} {client!r} {server!r}"
    assert KEY.hex() not in shown
    assert repr(KEY)[2:20] not in shown


def test_keys_that_are_short_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 random bytes"):
        Session(b"password", Role.CLIENT)


@given(st.binary(max_size=2000).filter(lambda printed: b"pyhvd/1\n" not in printed), st.data())
def test_what_a_login_shell_prints_is_skipped(printed: bytes, data: st.DataObject) -> None:
    client, server = Session(KEY, Role.CLIENT), Session(KEY, Role.SERVER, skip=2000)
    stream = printed + take(client)
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        server.receive(stream[:size])
        stream = stream[size:]
    client.receive(take(server))
    server.receive(take(client))
    assert server.authenticated
    assert server.skipped == printed


def feed_forever(server: Session) -> None:
    while True:
        server.receive(b"Welcome to pyhvd! ")


def test_a_login_shell_that_prints_forever_is_no_peer() -> None:
    server = Session(KEY, Role.SERVER, skip=1 << 16)
    with pytest.raises(ChannelError, match="more than 65536 bytes arrived"):
        feed_forever(server)
    assert server.skipped.startswith(b"Welcome to pyhvd!")
    assert len(server.skipped) < (1 << 16) + 100


def _mutated(stream: bytearray, chance: random.Random) -> bytearray:
    """Change a stream at random: bits, pieces that are repeated, left out, moved, put in, or a cut."""
    at, end = sorted(chance.randrange(len(stream) + 1) for _ in range(2))
    how = chance.randrange(6)
    if how == 0 and at < len(stream):
        stream[at] ^= 1 << chance.randrange(8)
    elif how == 1:
        stream[at:at] = stream[at:end]
    elif how == 2:
        del stream[at:end]
    elif how == 3:
        stream[:] = stream[:at] + stream[end:] + stream[at:end]
    elif how == 4:
        stream[at:at] = chance.randbytes(chance.choice([1, 4, 36, 300]))
    else:
        stream[at : at + 4] = chance.randbytes(4)
    return stream


def test_a_hundred_thousand_changed_streams() -> None:
    """Only whole messages before the change get through, in order; no text has a secret."""
    chance = random.Random(1)
    client, server = connected()
    secrets = {KEY, *(value for value in vars(server).values() if isinstance(value, bytes) and value)}
    messages = [chance.randbytes(size) for size in (0, 1, 40, 200)]
    for message in messages:
        client.send(message)
    stream = take(client)
    said: list[str] = []
    for _ in range(100_000):
        peer = copy.deepcopy(server)
        data = _mutated(bytearray(stream), chance)
        got = []
        try:
            for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                got += peer.receive(piece)
            peer.end()
        except ChannelError as exc:
            said.append(str(exc))
            with pytest.raises(ChannelError):  # hung up: it takes no more
                peer.receive(stream)
        assert got == messages[: len(got)]
    assert len(said) > 50_000
    assert len(secrets) > 1
    for secret in secrets:
        assert not any(secret.hex() in text or repr(secret)[2:-1] in text for text in said)
