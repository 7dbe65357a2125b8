"""``horovod.runner.util.threads``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a function in a thread, and return the thread; with ``silent`` its errors are not shown."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")

    def quiet(*given: Any) -> None:
        try:
            target(*given)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=quiet, args=args, name=name, daemon=daemon)
    thread.start()
    return thread
