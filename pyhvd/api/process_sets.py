"""Process sets: collectives among some of the ranks.

Owns: :class:`ProcessSet` objects and their registration. The sets themselves (communicators, negotiation
state, caches) live in the engine, by id.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from typing import Any

from pyhvd.common.text import describe_ranks
from pyhvd.engine import context
from pyhvd.engine.context import Ranks, StaticSet
from pyhvd.negotiation.messages import GLOBAL_SET


def sorted_ranks(ranks: Any, what: str = "a process set") -> list[int]:
    """Return ranks as sorted ints; ValueError if they are none, negative, repeated or no ints."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise ValueError(f"{what} takes ranks (ints) or a communicator, not {ranks!r}")
    try:
        members = sorted(operator.index(rank) for rank in ranks)
    except TypeError as exc:
        raise ValueError(f"{what} takes ranks, which are ints: {exc}") from None
    if not members:
        raise ValueError(f"{what} needs at least one rank")
    if members[0] < 0 or len(set(members)) < len(members):
        raise ValueError(f"{what} takes distinct ranks >= 0, not {members}")
    return members


def checked_ranks(ranks: Iterable[int], size: int, what: str = "process set") -> Ranks:
    """Return sorted ranks as a tuple; ValueError if one does not exist."""
    members = tuple(ranks)
    if members[-1] >= size:
        raise ValueError(f"{what} of {describe_ranks(members)}: there are only ranks 0-{size - 1}")
    return members


class ProcessSet:
    """Some of the ranks, that run collectives among themselves.

    Parameters
    ----------
    ranks_or_comm : iterable of int, or mpi4py.MPI.Comm
        Global ranks; or a communicator, only for :func:`pyhvd.init` with ``comm`` a communicator too.

    Attributes
    ----------
    process_set_id : int or None
        Id, the same on every rank; None until registered by ``init()`` or :func:`add_process_set`, and
        after removal.
    ranks : list of int or None
        Members, sorted.
    mpi_comm : mpi4py.MPI.Comm or None
        The communicator it was made from.

    Raises
    ------
    ValueError
        A rank is not an int, is negative, or occurs twice, or there is none.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self._ranks: list[int] | None = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            self._ranks = sorted_ranks(ranks_or_comm)

    @property
    def ranks(self) -> list[int] | None:
        """Members as sorted global ranks."""
        return None if self._ranks is None else list(self._ranks)

    def included(self) -> bool:
        """Return whether this rank is a member."""
        return context.current().topology.rank in (self.ranks or ())

    def size(self) -> int | None:
        """Return the number of members, or None while the set is not registered."""
        members = self.ranks
        return None if self.process_set_id is None or members is None else len(members)

    def rank(self) -> int | None:
        """Return this rank's place in the set, or None while the set is not registered.

        Raises
        ------
        ValueError
            This rank is not a member.
        """
        members = self.ranks
        if self.process_set_id is None or members is None:
            return None
        here = context.current().topology.rank
        if here not in members:
            raise ValueError(f"rank {here} is not a member of {self}")
        return members.index(here)

    def __repr__(self) -> str:
        state = "not registered" if self.process_set_id is None else f"id {self.process_set_id}"
        members = self.ranks
        what = "all ranks" if members is None else describe_ranks(members)
        return f"ProcessSet({state}, {'communicator' if self.mpi_comm is not None else what})"


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks; its ranks are filled by ``init()``."""

    def __init__(self) -> None:
        super().__init__([0])
        self.process_set_id = GLOBAL_SET

    @property
    def ranks(self) -> list[int] | None:
        """All ranks, or None before ``init()``."""
        active = context.current_slot().context
        return None if active is None else list(range(active.topology.size))


global_process_set = _GlobalProcessSet()
"""The set of all ranks; id 0; the default of every collective."""

_registered: weakref.WeakKeyDictionary[context.Context, list[ProcessSet]] = weakref.WeakKeyDictionary()


def prepare(process_sets: Iterable[Any], world: Any, by_comm_allowed: bool) -> list[StaticSet]:
    """Return what the handshake needs of the sets given to ``init()``.

    Raises
    ------
    ValueError
        A set is not a ProcessSet, occurs twice, is registered already, or has ranks that do not exist.
    NotImplementedError
        A set is made of a communicator, but ``init`` got none.
    """
    prepared: list[StaticSet] = []
    for each in process_sets:
        if not isinstance(each, ProcessSet) or each is global_process_set:
            raise ValueError(f"init(process_sets=...) takes ProcessSet objects, not {each!r}")
        if each.mpi_comm is not None:
            if not by_comm_allowed:
                raise NotImplementedError("a ProcessSet of a communicator needs init(comm=<communicator>)")
            each._ranks = list(world.members(each.mpi_comm))
        static = StaticSet(checked_ranks(each._ranks or (), world.topology.size), each.mpi_comm is not None)
        if static in prepared:
            raise ValueError(f"process set of {describe_ranks(static.ranks)} is a duplicate of another one")
        prepared.append(static)
    return prepared


def register(active: context.Context, process_set: ProcessSet, set_id: int) -> None:
    """Give a set its id, and let it be used; it loses the id when the context ends."""
    active.admit(set_id, tuple(process_set.ranks or ()))
    process_set.process_set_id = set_id
    _registered.setdefault(active, []).append(process_set)


def forget(active: context.Context) -> None:
    """Take the ids of a context's sets: the context has ended."""
    for process_set in _registered.pop(active, []):
        process_set.process_set_id = None


def members_of(active: context.Context, process_set: Any) -> tuple[int, Ranks]:
    """Return id and members of a process set that this rank may use.

    Raises
    ------
    ValueError
        It is no process set, is not registered, has been removed, or this rank is not a member.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set takes a ProcessSet, not {process_set!r}")
    set_id = process_set.process_set_id
    if set_id is None or set_id not in active.process_sets:
        raise ValueError(
            f"{process_set} does not exist, or has not been registered: pass it to init(process_sets=[...])"
            " or to add_process_set()"
        )
    ranks = active.process_sets[set_id]
    if active.topology.rank not in ranks:
        raise ValueError(f"rank {active.topology.rank} is not a member of {process_set}")
    return set_id, ranks
