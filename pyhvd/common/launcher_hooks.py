"""What a launcher sets in the process of a rank that it supervises."""

from __future__ import annotations

from collections.abc import Callable

supervised = False
"""Whether a launcher watches this rank; if so, it reports the rank's failure and ends the job."""

before_init: Callable[[], object] = bool
"""Called when the program calls ``init()`` for the first time; :mod:`pyhvd.run.warm_program` replaces it.

There it returns in forked processes alone, which are the ranks.
"""

tell_up: Callable[[bool], object] = bool
"""Called with True after ``init()``, and with False before the shutdown; ``python -m pyhvd.run`` replaces it.

While pyhvd is up, a rank that exits leaves others waiting.
"""
