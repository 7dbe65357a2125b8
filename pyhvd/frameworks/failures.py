"""Errors of pyhvd that reach a program as an error of its framework."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

from pyhvd.api import c_api
from pyhvd.errors import HorovodInternalError, copy_error

_kept: collections.deque[tuple[str, BaseException]] = collections.deque(maxlen=64)
_sources: list[Callable[[], list[str]]] = []


def keep(error: BaseException) -> str:
    """Keep an error for :func:`cause_of`, and return its text."""
    text = str(error).replace("\0", "") or type(error).__name__
    _kept.append((text, copy_error(error)))
    return text


def read_from(texts: Callable[[], list[str]]) -> None:
    """Let :func:`cause_of` know the texts that a function returns, those of errors which only C code saw."""
    _sources.append(texts)


def cause_of(error: BaseException) -> BaseException | None:
    """Return the pyhvd exception whose text a framework's error carries: a new object; None if it has none.

    pyhvd keeps the last 64 errors of each door.

    Parameters
    ----------
    error : BaseException
        As a framework raises it, such as ``jax.errors.JaxRuntimeError`` or ``tf.errors.InternalError``.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     step(weights).block_until_ready()
    ... except jax.errors.JaxRuntimeError as exc:
    ...     raise (cause_of(exc) or exc) from exc
    """
    words = str(error)
    for text, known in reversed(_kept):
        if text in words:
            return copy_error(known)
    for texts in _sources:
        for text in reversed(texts()):
            if text in words:
                return c_api.exception(text) or HorovodInternalError(text)
    return None


@contextlib.contextmanager
def raising_causes(*kinds: type[BaseException]) -> Iterator[None]:
    """Raise pyhvd's exception ``from`` a framework's error of these classes that carries one.

    It is a context manager, and a decorator of functions.
    """
    try:
        yield
    except kinds as exc:
        cause = cause_of(exc)
        if cause is None:
            raise
        raise cause from exc
