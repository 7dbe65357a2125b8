"""``horovod.common.basics``."""

from __future__ import annotations

from typing import Any

import pyhvd


class HorovodBasics:
    """The functions about ranks, sizes and the build, as methods."""

    def __init__(self, *_: Any) -> None:
        """Take and ignore the paths of Horovod's libraries."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pyhvd, name)
