"""How the objects that a state holds are saved and loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None))


class Handler:
    """Saves and loads the objects of one kind, here those that a copy replaces; it has no state."""

    def dump(self, value: Any) -> Any:
        """Return what :meth:`load` needs; it may share the object's memory."""
        return value

    def load(self, value: Any, dumped: Any) -> Any:  # noqa: ARG002
        """Bring an object to what was saved; return it, or the object that takes its place."""
        return dumped

    def settings(self, value: Any) -> Any:
        """Return the small parts that a reset callback may have set; None if there are none."""
        return (value,) if isinstance(value, _SCALARS) else None

    def load_settings(self, value: Any, settings: Any) -> Any:  # noqa: ARG002
        """Give an object the settings of rank 0; return it, or the object that takes its place."""
        return settings[0]


class ByStateDict(Handler):
    """Objects that return their state as a dict, and load it."""

    def dump(self, value: Any) -> Any:
        return value.state_dict()

    def load(self, value: Any, dumped: Any) -> Any:
        value.load_state_dict(dumped)
        return value


def register(kind: type, handler: Handler) -> None:
    """Let objects of a class, and of those that derive from it, have their own handler."""
    _OF_KINDS[kind] = handler


def choose(value: Any) -> Handler:
    """Return the handler of an object."""
    for kind, handler in _OF_KINDS.items():
        if isinstance(value, kind):
            return handler
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return _BY_STATE_DICT if all(map(callable, methods)) else _BY_VALUE


_OF_KINDS: dict[type, Handler] = {}
_BY_STATE_DICT, _BY_VALUE = ByStateDict(), Handler()
