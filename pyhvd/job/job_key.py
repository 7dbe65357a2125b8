"""The key of one job: travels to the tasks inside the closure that Spark sends them, and is shown nowhere."""

from __future__ import annotations

from pyhvd.transport.tcp.connection import new_key


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
