"""The signals of the driver's process while it serves ranks."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator

from pyhvd.job.driver.console import Terminal
from pyhvd.job.process.signals import to_handle, wake_on_signals


@contextlib.contextmanager
def signals(terminal: Terminal, selector: selectors.BaseSelector) -> Iterator[None]:
    """Note signals in the terminal's list, and wake the selector, while ranks are served."""
    numbers = [*to_handle(), signal.SIGCHLD, signal.SIGTSTP]
    noted = terminal.signals
    before = {number: signal.getsignal(number) for number in numbers}
    wake = wake_on_signals(lambda number, _: noted.append(number))
    if before[signal.SIGTSTP] != signal.SIG_IGN:  # a shell without job control
        signal.signal(signal.SIGTSTP, lambda number, _: noted.append(number))
    selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
    try:
        yield
    finally:
        os.close(signal.set_wakeup_fd(-1))
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
