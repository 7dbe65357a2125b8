"""The logger ``pyhvd``: its level, the rank in every record, and its handler of last resort.

Owns this logger only; it never changes the root logger. If the program has handlers, on the root or on
``pyhvd``, they get every record once. While there are none, pyhvd writes to stderr. Only rank 0 logs INFO;
every rank logs warnings and DEBUG.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TextIO

from pyhvd.config import Config
from pyhvd.engine.context import current_holder

_LOGGER = logging.getLogger("pyhvd")
_DEFAULT = Config().log_level
_lock = threading.Lock()
_level_set = logging.NOTSET  # set by set_up(); guarded by _lock


class RankFilter(logging.Filter):
    """A filter that adds the rank to records, as ``%(pyhvd_rank)s``, and drops none.

    pyhvd's own records have the rank already. A handler of other loggers' records needs this filter if its
    format shows the rank: ``handler.addFilter(RankFilter())``.

    The rank is ``"-"`` before ``init()``. If ranks are threads, it is the rank of the logging thread.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the rank to a record."""
        if not hasattr(record, "pyhvd_rank"):
            rank = current_holder().rank
            record.pyhvd_rank = "-" if rank is None else rank
        return True


class _OwnRecords(RankFilter):
    """Adds the rank to pyhvd's records, and drops INFO on all ranks but rank 0."""

    def filter(self, record: logging.LogRecord) -> bool:
        super().filter(record)
        news = logging.INFO <= record.levelno < logging.WARNING
        return not news or record.__dict__["pyhvd_rank"] in ("-", 0)


class _LastResort(logging.StreamHandler[TextIO]):
    """Writes to stderr, as it is then, while no other handler takes the records.

    Each record is one write, so that lines of several ranks stay whole.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_handled_elsewhere():
            self.stream = sys.stderr
            super().emit(record)


_own_records = _OwnRecords()
_last_resort = _LastResort()


def _is_handled_elsewhere() -> bool:
    own = any(handler is not _last_resort for handler in _LOGGER.handlers)
    return own or (_LOGGER.propagate and _LOGGER.parent is not None and _LOGGER.parent.hasHandlers())


def set_up(config: Config) -> None:
    """Set level and format; every ``init()`` calls it, on several threads if ranks are threads.

    A level that the program has set on the logger stays, unless the configuration has a non-default level.
    """
    global _level_set
    with _lock:
        level = (logging.getLevelNamesMapping() | {"TRACE": logging.DEBUG})[config.log_level.upper()]
        if _LOGGER.level in (logging.NOTSET, _level_set) or config.log_level != _DEFAULT:
            _LOGGER.setLevel(level)
            _level_set = level
        clock = "" if config.log_hide_time else "%(asctime)s "
        _last_resort.setFormatter(
            logging.Formatter(f"{clock}pyhvd[%(pyhvd_rank)s] %(levelname)s: %(message)s")
        )
        _LOGGER.addFilter(_own_records)  # adding it twice has no effect
        _LOGGER.addHandler(_last_resort)
