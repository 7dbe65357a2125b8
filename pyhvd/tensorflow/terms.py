"""The terms of one collective, as its forward and its backward pass share them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp

LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)
"""The ops that commute with factors, and are their own gradients."""


@dataclass(frozen=True)
class CollectiveTerms:
    """What is done with the tensors of one call.

    Attributes
    ----------
    verb : str
        "allreduce", "allgather", "broadcast", "alltoall" or "reducescatter".
    name : str or None
        The call's name on every rank; None: pyhvd numbers the call, in eager mode only.
    process_set : ProcessSet
        The ranks that take part.
    op, prescale, postscale
        Of a reduction.
    root_rank : int
        Of a broadcast.
    grouped : bool
        Whether the tensors are one unit; else there is one tensor.
    """

    verb: str
    name: str | None = None
    process_set: ProcessSet = global_process_set
    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    root_rank: int = 0
    grouped: bool = False

    def renamed(self, name: str) -> CollectiveTerms:
        """Return the same terms with another name."""
        return replace(self, name=name)
