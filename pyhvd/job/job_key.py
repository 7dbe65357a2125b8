"""The key of one job: travels to the tasks inside the closure that Spark sends them, and is shown nowhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

import msgspec

from pyhvd.transport.tcp.connection import Address, Connection, connect, new_key
from pyhvd.transport.tcp.session import ChannelError


class Secret:
    """A key that neither repr, str, nor an error's text shows.

    Parameters
    ----------
    key : bytes, optional
        A fresh one by default.
    """

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


_ADDRESSES = "_PYHVD_SPARK_DRIVER"


_KEY = "_PYHVD_SPARK_KEY"


VARIABLES = frozenset({_ADDRESSES, _KEY})
"""Their names: for whoever passes an environment on."""


def to_environment(addresses: Sequence[Address], secret: Secret) -> Mapping[str, str]:
    """Return the variables by which :func:`call_driver` finds the driver."""
    return {_ADDRESSES: msgspec.json.encode(addresses).decode(), _KEY: secret.reveal().hex()}


def call_driver(environ: MutableMapping[str, str] = os.environ) -> Connection:
    """Connect to the driver; the variables are gone then.

    Raises
    ------
    ChannelError
        It cannot be reached, or there are no such variables.
    """
    try:
        addresses = msgspec.json.decode(environ.pop(_ADDRESSES), type=list[Address])
        key = bytes.fromhex(environ.pop(_KEY))
    except (KeyError, ValueError):
        raise ChannelError("this program is started by pyhvd.spark.run, not by hand") from None
    return connect(addresses, key)
