"""The key of one job, and how the driver's address and the key reach a process in its environment.

The key travels to the tasks inside the closure that Spark sends them. Nothing prints it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

import msgspec

from pyhvd.transport.tcp.connection import Address, Connection, connect, new_key
from pyhvd.transport.tcp.session import ChannelError

_ADDRESSES = "_PYHVD_JOB_DRIVER"
_KEY = "_PYHVD_JOB_KEY"
VARIABLES = frozenset({_ADDRESSES, _KEY})
"""The names of the variables of :func:`to_environment`."""


class Secret:
    """A key, a new one by default, that neither repr, nor str, nor an error's text shows."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None = None) -> None:
        self._key = new_key() if key is None else key

    def reveal(self) -> bytes:
        """Return the key."""
        return self._key

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> tuple[type[Secret], tuple[bytes]]:
        return Secret, (self._key,)


def to_environment(addresses: Sequence[Address], secret: Secret) -> Mapping[str, str]:
    """Return the variables with which :func:`call_driver` finds the driver."""
    return {_ADDRESSES: msgspec.json.encode(addresses).decode(), _KEY: secret.reveal().hex()}


def call_driver(environ: MutableMapping[str, str] = os.environ) -> Connection:
    """Connect to the driver, and remove its variables from the environment.

    Raises
    ------
    ChannelError
        The driver cannot be reached, or the variables are not set.
    """
    try:
        addresses = msgspec.json.decode(environ.pop(_ADDRESSES), type=list[Address])
        key = bytes.fromhex(environ.pop(_KEY))
    except (KeyError, ValueError):
        raise ChannelError("pyhvd.spark.run starts this program; do not start it by hand") from None
    return connect(addresses, key)
