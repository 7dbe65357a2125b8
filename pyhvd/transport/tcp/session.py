"""An authenticated session between two processes that share a key: bytes in, messages out.

Owns the handshake and the records. Knows nothing of sockets, clocks or the messages' contents. Each message
that comes out was sent by a holder of the key, in this session, in this order, once.

    client -> server   magic, nonce
    server -> client   magic, nonce
    client -> server   HMAC(key, "client" + both nonces)
    server -> client   HMAC(key, "server" + both nonces)      only after a valid proof of the client
    then records       length, HMAC(key of this direction, number + length + payload), payload

1. The handshake has a fixed size; a record's length is checked against :data:`MAX_RECORD` before its payload
   is buffered.
2. Each direction has a key of its own, derived from the shared key and both nonces (as in HKDF, RFC 5869: one
   HMAC per key). So a record is invalid in another session, and in the other direction.
3. The number, which is not sent, counts the records of a direction. So a repeated, missing or moved record is
   detected.
4. Records are not encrypted.
5. After an error the session accepts nothing more.
6. A session over a command's output may skip what a login shell prints before the magic.
"""

from __future__ import annotations

import enum
import hmac
import os
import struct

MAX_RECORD = 1 << 20
"""Most bytes of one message; senders cut longer ones."""

_MAGIC = b"pyhvd/1\n"
_NONCE = 32
_MAC = 32
_HELLO = len(_MAGIC) + _NONCE
_LENGTH = struct.Struct("!I")
_NUMBERED = struct.Struct("!QI")


class ChannelError(Exception):
    """The peer does not hold the key, broke the protocol, was lost, or was too slow; names no secret."""


class Role(enum.Enum):
    """Which end of the connection a process is; the client opened it."""

    CLIENT = b"client"
    SERVER = b"server"

    @property
    def other(self) -> Role:
        """The peer's role."""
        return Role.SERVER if self is Role.CLIENT else Role.CLIENT


class Session:
    """One end of a session.

    Parameters
    ----------
    key : bytes
        The shared key, at least 16 random bytes.
    role : Role
        Which end this is.
    skip : int
        How many bytes to skip at most before the peer's magic.

    Attributes
    ----------
    authenticated : bool
        Whether the peer has proved that it holds the key.
    skipped : bytes
        What has arrived before the peer's magic.
    outgoing : bytearray
        The bytes to send; who sends them removes them.
    """

    def __init__(self, key: bytes, role: Role, skip: int = 0) -> None:
        if len(key) < 16:
            raise ValueError(f"the key has {len(key)} bytes; expected are at least 16 random bytes")
        self.authenticated = False
        self.skipped = b""
        self._skip = skip
        self._key = key
        self._role = role
        self._nonce = os.urandom(_NONCE)
        self._peer_nonce: bytes | None = None
        self._in = bytearray()
        self.outgoing = bytearray(_MAGIC + self._nonce if role is Role.CLIENT else b"")
        self._send_key = b""
        self._receive_key = b""
        self._sent = 0
        self._received = 0
        self._broken = False

    def send(self, payload: bytes) -> None:
        """Add one message to the bytes to send.

        Raises
        ------
        ChannelError
            The peer has not proved that it holds the key, or the session is broken.
        ValueError
            The message is longer than MAX_RECORD.
        """
        if self._broken or not self.authenticated:
            raise ChannelError("cannot send: the peer has not proved that it holds the key")
        if len(payload) > MAX_RECORD:
            raise ValueError(f"the message has {len(payload)} bytes; at most {MAX_RECORD} can be sent")
        mac = _record_mac(self._send_key, self._sent, payload)
        self._sent += 1
        self.outgoing += _LENGTH.pack(len(payload)) + mac
        self.outgoing += payload

    def receive(self, data: bytes | bytearray) -> list[bytes]:
        """Process received bytes; return the complete messages.

        Raises
        ------
        ChannelError
            The bytes break the protocol, or are not a key holder's. Messages before them are lost.
        """
        if self._broken:
            raise ChannelError("the session is broken")
        self._in += data
        try:
            while not self.authenticated:
                if not self._shake_hands():
                    return []
            return self._take_records()
        except ChannelError:
            self._broken = True
            self._in.clear()
            self.outgoing.clear()
            raise

    def end(self) -> None:
        """Process the peer's end of the stream; raise ChannelError inside a message or the handshake."""
        if not self.authenticated:
            raise ChannelError("the peer closed the connection before it proved that it holds the key")
        if self._in:
            self._broken = True
            raise ChannelError("the connection was cut inside a message")

    def _shake_hands(self) -> bool:
        """Make one step of the handshake; return whether it may go on without further bytes."""
        if self._peer_nonce is None:
            self._skip_to_magic()
            hello = self._take(_HELLO, _MAGIC)
            if hello is None:
                return False
            self._peer_nonce = hello[len(_MAGIC) :]
            self.outgoing += self._prove(self._role) if self._role is Role.CLIENT else _MAGIC + self._nonce
            return True
        proof = self._take(_MAC)
        if proof is None:
            return False
        if not hmac.compare_digest(proof, self._prove(self._role.other)):
            raise ChannelError("the peer does not hold this job's key")
        if self._role is Role.SERVER:
            self.outgoing += self._prove(self._role)
        self._send_key = self._derive(b"records from " + self._role.value)
        self._receive_key = self._derive(b"records from " + self._role.other.value)
        self._key = b""
        self.authenticated = True
        return True

    def _skip_to_magic(self) -> None:
        """Move what precedes the magic, or the bytes that may begin it, to `skipped`."""
        if not self._skip:
            return
        start = self._in.find(_MAGIC)
        if start < 0:
            begun = (size for size in range(len(_MAGIC), 0, -1) if self._in.endswith(_MAGIC[:size]))
            start = len(self._in) - next(begun, 0)
        self.skipped += bytes(self._in[:start])
        del self._in[:start]
        if len(self.skipped) > self._skip:
            raise ChannelError(f"more than {self._skip} bytes arrived, but not the beginning of the protocol")

    def _take(self, size: int, prefix: bytes = b"") -> bytes | None:
        if not prefix.startswith(self._in[: len(prefix)]):
            raise ChannelError("the peer speaks another protocol")
        if len(self._in) < size:
            return None
        taken = bytes(self._in[:size])
        del self._in[:size]
        return taken

    def _prove(self, role: Role) -> bytes:
        return self._derive(b"proof of " + role.value)

    def _derive(self, purpose: bytes) -> bytes:
        assert self._peer_nonce is not None
        nonces = (self._nonce, self._peer_nonce)
        if self._role is Role.SERVER:
            nonces = nonces[::-1]
        return hmac.digest(self._key, purpose + b"".join(nonces), "sha256")

    def _take_records(self) -> list[bytes]:
        messages = []
        head = _LENGTH.size + _MAC
        start = 0
        while len(self._in) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in, start)
            if length > MAX_RECORD:
                raise ChannelError(f"a message of {length} bytes arrives; at most {MAX_RECORD} are accepted")
            if len(self._in) - start < head + length:
                break
            mac = bytes(self._in[start + _LENGTH.size : start + head])
            with memoryview(self._in) as view:
                payload = bytes(view[start + head : start + head + length])
            if not hmac.compare_digest(mac, _record_mac(self._receive_key, self._received, payload)):
                raise ChannelError("a message was changed, repeated, dropped or reordered")
            self._received += 1
            start += head + length
            messages.append(payload)
        del self._in[:start]
        return messages


def _record_mac(key: bytes, number: int, payload: bytes) -> bytes:
    mac = hmac.new(key, _NUMBERED.pack(number, len(payload)), "sha256")
    mac.update(payload)
    return mac.digest()
