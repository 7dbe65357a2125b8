"""The calls of compiled graphs, by key: what is fixed when a graph is traced."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhvd.api import c_api, collectives
from pyhvd.api.handles import Handle
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.engine.context import current, current_holder, process_holder
from pyhvd.errors import NotInitializedError
from pyhvd.native.shared_memory import find_site
from pyhvd.queue import describe_site

_REDUCING = ("allreduce", "reducescatter")
_IN_PLACE = ("allreduce", "broadcast")


def _current_context() -> weakref.ref[Any]:
    active = current()
    if current_holder() is not process_holder:
        raise NotInitializedError(
            "compiled graphs run in threads of their framework, which belong to no rank that is a thread:"
            " start the ranks as processes, with pyhvdrun or mpiexec"
        )
    return weakref.ref(active)


def _site_of_caller() -> str:
    found = find_site()
    return "an unknown line" if found is None else describe_site(*found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphCall:
    """One call site of a graph.

    Attributes
    ----------
    verb : str
        A verb of :mod:`pyhvd` without underscore, as ``"grouped_allreduce"``.
    name : str
        The call's name, the same on all ranks; empty if it is still to be named.
    dtypes : tuple of numpy.dtype
        The operands' dtypes.
    op, prescale_factor, postscale_factor, root_rank, process_set
        The verb's arguments, where it has them.
    has_splits : bool
        Whether the last operand has the splits of an alltoall.
    site : str
        The program's line that traced it, for errors.
    context : weakref of Context
        The runtime that it was traced for.
    """

    verb: str
    name: str
    dtypes: tuple[np.dtype[Any], ...] = ()
    op: ReduceOp = ReduceOp.AVERAGE
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    root_rank: int = 0
    process_set: ProcessSet = global_process_set
    has_splits: bool = False
    site: str
    context: weakref.ref[Any]

    @classmethod
    def traced(cls, verb: str, name: str, dtypes: Iterable[Any], **terms: Any) -> GraphCall:
        """Return the call that the program's current line traces; for the arguments see the class.

        Raises
        ------
        NotInitializedError
            pyhvd does not run, or the ranks are threads.
        """
        active, site = _current_context(), _site_of_caller()
        return cls(
            verb=verb, name=name, dtypes=tuple(map(np.dtype, dtypes)), site=site, context=active, **terms
        )

    @property
    def is_grouped(self) -> bool:
        """Whether the operands are one list."""
        return self.verb.startswith("grouped_")

    @property
    def kind(self) -> str:
        """The verb without ``grouped_``."""
        return self.verb.removeprefix("grouped_")

    @property
    def is_in_place(self) -> bool:
        """Whether results have the shapes of operands, so that they may share memory."""
        return self.kind in _IN_PLACE

    def check(self) -> None:
        """Raise NotInitializedError unless pyhvd runs as it did when the graph was traced."""
        if current() is not self.context():
            raise NotInitializedError(
                f"{self.verb} {self.name!r} was traced before pyhvd was shut down: size and rank may have"
                " changed, so trace the function anew"
            )

    def start(self, sources: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]] | None) -> Handle:
        """Submit the call; targets are given if it is to run in place, and may be the sources."""
        if targets is not None:
            for source, target in zip(sources, targets, strict=True):
                if source is not target:
                    np.copyto(target, source)
            return self.start_on(targets, in_place=True)
        return self.start_on(sources)

    def start_on(self, tensors: Sequence[Any], *, in_place: bool = False) -> Handle:
        """Submit the call for arrays of any library; without a name pyhvd numbers it."""
        given, terms = self._arguments(tensors)
        handle: Handle = getattr(collectives, f"{self.verb}_async" + "_" * in_place)(given, **terms)
        return handle

    def run_on(self, tensors: Sequence[Any], *, in_place: bool = False) -> list[Any]:
        """Run the call for arrays of any library, and return its results; see :meth:`results_of`."""
        given, terms = self._arguments(tensors)
        result = getattr(collectives, self.verb + "_" * in_place)(given, **terms)
        return list(result) if self.is_grouped or isinstance(result, tuple) else [result]

    def _arguments(self, tensors: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """Return the verb's tensor or tensors, and its other arguments."""
        self.check()
        given, splits = list(tensors), None
        if self.has_splits:
            splits = given.pop()
        terms: dict[str, Any] = {"name": self.name or None, "process_set": self.process_set}
        if self.kind in _REDUCING:
            terms |= self._reduction()
        elif self.kind == "broadcast":
            terms["root_rank"] = self.root_rank
        elif self.kind == "alltoall":
            terms["splits"] = splits
        return given if self.is_grouped else given[0], terms

    def results_of(self, handle: Handle) -> list[NDArray[Any]]:
        """Return the arrays of an ended call; those of an alltoall are the output and the received splits."""
        result = handle.result()
        return list(result) if self.is_grouped or self.kind == "alltoall" else [result]

    def c_id(self, sources: Sequence[NDArray[Any]]) -> int | None:
        """Return the number by which C code submits the call, if the ranks remember it."""
        terms: dict[str, Any] = self._reduction() if self.kind in _REDUCING else {}
        given = sources if self.is_grouped else sources[0]
        return c_api.call_id(
            self.verb, given, self.name, root_rank=self.root_rank, process_set=self.process_set, **terms
        )

    def _reduction(self) -> dict[str, Any]:
        factors = {"prescale_factor": self.prescale_factor, "postscale_factor": self.postscale_factor}
        return {"op": self.op, **factors}


class CallTable:
    """The graph calls of this process, by key; keys are never used again, as compiled graphs keep them."""

    def __init__(self) -> None:
        self._calls: dict[int, GraphCall] = {}
        self._numbers = itertools.count(1)

    def add(self, call: GraphCall) -> int:
        """Keep a call; return its key."""
        key = next(self._numbers)
        self._calls[key] = call
        return key

    def __getitem__(self, key: int) -> GraphCall:
        return self._calls[key]


TABLE = CallTable()
"""The process's calls, of all frameworks."""
