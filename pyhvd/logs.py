"""The ``pyhvd`` logger of the standard library: its level, and the rank in every line."""

from __future__ import annotations

import logging

from pyhvd.config import Config

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def set_up(config: Config, rank: int) -> None:
    """Set the logger's level; write to stderr unless the program has set up logging itself."""
    logger = logging.getLogger("pyhvd")
    logger.setLevel(_LEVELS[config.log_level])
    ours = [h for h in logger.handlers if h.name == "pyhvd"]
    if not ours and logger.hasHandlers():
        return
    for handler in ours:
        logger.removeHandler(handler)
    handler = logging.StreamHandler()
    handler.name = "pyhvd"
    clock = "" if config.log_hide_time else "%(asctime)s "
    handler.setFormatter(logging.Formatter(f"{clock}pyhvd[{rank}] %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False  # a handler of the root that comes later would show each line twice
