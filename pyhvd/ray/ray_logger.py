"""Values that rank 0 hands to the callbacks of :meth:`RayExecutor.run` and :meth:`RayExecutor.execute`."""

from __future__ import annotations

from typing import Any


def log(info_dict: Any) -> None:
    """Hand a value to the callbacks of the running call; without effect on other ranks than 0.

    Parameters
    ----------
    info_dict
        Any value that cloudpickle can carry, 512 KiB at most; usually a dict.
    """
    from pyhvd.job.rank.rank import log as log_in_rank  # of the rank, which has it already

    log_in_rank(info_dict)
