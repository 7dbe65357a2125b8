"""The ``pyhvd`` logger of the standard library: its level, the rank in every record, and its last resort.

Owns: that logger, and no other: the root logger is never touched. A program that has handlers, on the root or
on ``pyhvd``, sooner or later, gets every record there, once; only while there are none does pyhvd write to
stderr itself. INFO is news of the job, and comes from rank 0 alone; every rank warns, and every rank
debugs.
"""

from __future__ import annotations

import logging
import sys
import threading

from pyhvd.config import Config
from pyhvd.engine.context import current_slot

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_LOGGER = logging.getLogger("pyhvd")
_DEFAULT = Config().log_level
_lock = threading.Lock()
_level_set = logging.NOTSET  # what set_up() has set; guarded by _lock


class RankFilter(logging.Filter):
    """Puts the rank into records, as ``%(pyhvd_rank)s``; lets all of them pass.

    pyhvd's own records have it already. A handler that gets other loggers' records too, and whose format
    shows the rank, needs this filter: ``handler.addFilter(RankFilter())``.

    The rank is that of the thread that logs, where ranks are threads; ``"-"`` before ``init()``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Mark a record."""
        if not hasattr(record, "pyhvd_rank"):
            rank = current_slot().rank
            record.pyhvd_rank = "-" if rank is None else rank
        return True


class _OwnRecords(RankFilter):
    """Marks pyhvd's records, and keeps back INFO where rank 0 says it."""

    def filter(self, record: logging.LogRecord) -> bool:
        super().filter(record)
        news = logging.INFO <= record.levelno < logging.WARNING
        return not news or record.__dict__["pyhvd_rank"] in ("-", 0)


class _LastResort(logging.Handler):
    """Writes to stderr while nobody else takes the records."""

    def emit(self, record: logging.LogRecord) -> None:
        if _is_handled_elsewhere():
            return
        try:
            sys.stderr.write(self.format(record) + "\n")  # one piece: lines of several ranks stay whole
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


_own_records = _OwnRecords()
_last_resort = _LastResort()


def _is_handled_elsewhere() -> bool:
    own = any(handler is not _last_resort for handler in _LOGGER.handlers)
    return own or (_LOGGER.propagate and _LOGGER.parent is not None and _LOGGER.parent.hasHandlers())


def set_up(config: Config) -> None:
    """Set level and format; called by every ``init()``, and by several ranks where they are threads.

    A level that the program has set on the logger itself stays, unless the configuration asks for another
    than the default.
    """
    global _level_set
    with _lock:
        level = _LEVELS[config.log_level]
        if _LOGGER.level in (logging.NOTSET, _level_set) or config.log_level != _DEFAULT:
            _LOGGER.setLevel(level)
            _level_set = level
        clock = "" if config.log_hide_time else "%(asctime)s "
        _last_resort.setFormatter(
            logging.Formatter(f"{clock}pyhvd[%(pyhvd_rank)s] %(levelname)s: %(message)s")
        )
        _LOGGER.addFilter(_own_records)  # adding twice changes nothing
        _LOGGER.addHandler(_last_resort)
