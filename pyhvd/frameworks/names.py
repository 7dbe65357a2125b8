"""Default names of the calls of compiled graphs."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

from pyhvd.engine import context

_lock = threading.Lock()
_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def default_name(stem: str) -> str:
    """Return ``stem`` with a number that counts the names of this stem since ``init()``.

    Ranks that trace equal programs get equal names, whatever else they trace between calls of this stem.
    """
    active = context.current()
    with _lock:
        counts = _counts.setdefault(active, Counter())
        counts[stem] += 1
        return f"{stem}.{counts[stem] - 1}"
