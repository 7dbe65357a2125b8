"""What a user asks of the reduction of gradients, in the optimizers and tapes of all frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyhvd.api.compression import Compressor
from pyhvd.api.process_sets import ProcessSet
from pyhvd.common.text import list_some
from pyhvd.dtypes import ReduceOp


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """The arguments that optimizers and tapes have in common; docs/from_horovod.md has their names.

    Attributes
    ----------
    groups : int, list of lists of variables, or None
        As :func:`checked_groups` returns them.
    """

    compression: type[Compressor]
    sparse_as_dense: bool
    predivide: float
    op: ReduceOp
    groups: int | list[list[Any]] | None
    process_set: ProcessSet
    scales_local: bool

    @property
    def is_needed(self) -> bool:
        """Whether this rank reduces with others."""
        return self.process_set.included() and (self.process_set.size() or 1) > 1

    def check(self, what: str, ops: Sequence[ReduceOp]) -> None:
        """Raise ValueError unless the operation is one of these, and the factor goes with it."""
        if self.op not in ops:
            names = list_some([op.name.capitalize() for op in ops], between=" or ")
            raise ValueError(f"op={self.op!r}: {what} takes {names}")
        if self.predivide != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ValueError(f"gradient_predivide_factor={self.predivide} needs op=Average, not {self.op!r}")

    def described(self) -> dict[str, str]:
        """Return the options that ranks must share, as texts."""
        groups = [len(each) for each in self.groups] if isinstance(self.groups, list) else self.groups
        return {
            "compression": self.compression.__name__,
            "sparse_as_dense": str(self.sparse_as_dense),
            "gradient_predivide_factor": str(self.predivide),
            "op": self.op.name,
            "groups": str(groups),
        }
