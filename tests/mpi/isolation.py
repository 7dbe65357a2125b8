"""Undo what one case of a shared job changes in its process, before the next case runs.

The environment, the working directory, signal handlers, loggers and warning filters are put back. Product
code that is still patched is an error, which names it: such a test needs the ``monkeypatch`` fixture, which
is undone on the ranks, or a separate job, ``on_ranks(..., alone=True)``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

_LOGGERS = ("", "pyhvd")
_CODE = (types.FunctionType, types.ModuleType, type, property, classmethod, staticmethod)
_CONSTANTS = (bool, int, float, str, bytes, tuple, frozenset)


class State:
    """The state of this process before a case."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._folder = os.getcwd()
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._filters = warnings.filters[:]
        self._loggers = {name: _settings_of(logging.getLogger(name)) for name in _LOGGERS}
        self._product = list(_product())

    def restore(self) -> None:
        """Put everything back.

        Raises
        ------
        RuntimeError
            The case has patched pyhvd and left it so.
        """
        os.environ.clear()
        os.environ.update(self._environ)
        os.chdir(self._folder)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        warnings.filters[:] = self._filters  # type: ignore[index]
        for name, (level, handlers, disabled) in self._loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.handlers[:] = handlers
            logger.disabled = disabled
        changed = [
            f"{owner.__name__}.{name}"
            for owner, name, value in self._product
            if vars(owner).get(name) is not value
        ]
        if changed:
            raise RuntimeError(
                f"the test has left {', '.join(changed)} patched: "
                "use monkeypatch, or on_ranks(..., alone=True)"
            )


def _settings_of(logger: logging.Logger) -> tuple[int, list[logging.Handler], bool]:
    return logger.level, list(logger.handlers), logger.disabled


def _product() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of pyhvd's functions, classes, methods, constants and imported modules.

    A value whose name is in lower case is pyhvd's state, and not yielded.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "pyhvd" or module is None:
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, _CODE) or (name.isupper() and isinstance(value, _CONSTANTS)):
                yield module, name, value
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, inside in list(vars(value).items()):
                    if isinstance(inside, _CODE + _CONSTANTS):
                        yield value, attribute, inside
