"""Process sets: groups of ranks that run collectives among themselves.

Owns: :class:`ProcessSet` objects and their registration. The engine owns the state of a set (communicators,
negotiation, caches), by id.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pyhvd.api.call import Call, OwnName, checked_name
from pyhvd.api.handles import Handle
from pyhvd.common.text import describe_ranks, list_members, list_some
from pyhvd.engine import context
from pyhvd.engine.context import Ranks, StaticSet
from pyhvd.negotiation.messages import FOUNDING, GLOBAL_SET, UNNAMED, RequestType


def sorted_ranks(ranks: Any, what: str = "a process set") -> list[int]:
    """Return ranks as sorted ints; raise ValueError unless they are distinct ints >= 0."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise ValueError(f"{what} takes ranks (ints) or a communicator, not {ranks!r}")
    try:
        members = sorted(operator.index(rank) for rank in ranks)
    except TypeError as exc:
        raise ValueError(f"{what} takes ranks (ints): {exc}") from None
    if not members:
        raise ValueError(f"{what} needs at least one rank")
    if members[0] < 0 or len(set(members)) < len(members):
        raise ValueError(f"{what} takes distinct ranks >= 0, not [{list_some(members)}]")
    return members


def checked_ranks(ranks: Iterable[int], size: int, what: str = "process set") -> Ranks:
    """Return sorted ranks as a tuple; raise ValueError if one does not exist."""
    members = tuple(ranks)
    if members[-1] >= size:
        raise ValueError(f"{what} of {describe_ranks(members)}: there are only ranks 0-{size - 1}")
    return members


class ProcessSet:
    """A group of ranks that run collectives among themselves.

    Parameters
    ----------
    ranks_or_comm : iterable of int, or mpi4py.MPI.Comm
        Global ranks; or a communicator, if :func:`pyhvd.init` gets a communicator as ``comm`` too.

    Attributes
    ----------
    process_set_id : int or None
        Id, the same on every rank; None until ``init()`` or :func:`add_process_set` registers the set, and
        after its removal.
    ranks : list of int or None
        Members, sorted.
    mpi_comm : mpi4py.MPI.Comm or None
        The communicator that the set was made from; for the global set, what :func:`pyhvd.init` got.

    Raises
    ------
    ValueError
        There is no rank, or a rank is not an int, is negative or occurs twice.
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
        return context.inherited().topology.rank in (self.ranks or ())

    def size(self) -> int | None:
        """Return the number of members, or None while the set is not registered."""
        members = self.ranks
        return None if self.process_set_id is None or members is None else len(members)

    def rank(self) -> int | None:
        """Return this rank's index in the set, or None while the set is not registered.

        Raises
        ------
        ValueError
            This rank is not a member.
        """
        members = self.ranks
        if self.process_set_id is None or members is None:
            return None
        here = context.inherited().topology.rank
        if here not in members:
            raise ValueError(f"rank {here} is not a member of {self}")
        return members.index(here)

    def __repr__(self) -> str:
        state = "not registered" if self.process_set_id is None else f"id {self.process_set_id}"
        members = self.ranks
        what = "all ranks" if members is None else describe_ranks(members)
        return f"ProcessSet({state}, {'communicator' if self.mpi_comm is not None else what})"


class _FoundedSet(ProcessSet):
    """A set that its members alone have made, and remove."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.process_set_id = FOUNDING


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks; ``init()`` determines its ranks."""

    def __init__(self) -> None:
        super().__init__([0])
        self.process_set_id = GLOBAL_SET

    @property
    def ranks(self) -> list[int] | None:
        """All ranks, or None before ``init()``."""
        active = context.current_holder().context
        return None if active is None else list(range(active.topology.size))


global_process_set = _GlobalProcessSet()
"""The set of all ranks, with id 0; the default of every collective."""

_registered: weakref.WeakKeyDictionary[context.Context, dict[int, ProcessSet]] = weakref.WeakKeyDictionary()
"""The sets of a context that this rank has objects of, by id."""


def prepare(process_sets: Iterable[Any], world: Any, *, by_comm_allowed: bool) -> list[StaticSet]:
    """Return the handshake's description of the sets that ``init()`` got.

    Raises ValueError for an invalid set, and NotImplementedError for a set made from a communicator if
    ``init`` got none.
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
    """Give a set its id until the context ends, and allow calls in it."""
    active.admit(set_id, tuple(process_set.ranks or ()))
    process_set.process_set_id = set_id
    _registered.setdefault(active, {})[set_id] = process_set


def forget(active: context.Context) -> None:
    """Remove the ids of a context's sets when the context has ended."""
    for process_set in _registered.pop(active, {}).values():
        process_set.process_set_id = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks, which must call it in the same order.

    Parameters
    ----------
    process_set : ProcessSet or sequence of int
        The set, or its global ranks; the same on every rank.

    Returns
    -------
    ProcessSet
        The set, with its id.

    Raises
    ------
    ValueError
        Dynamic process sets are off, a rank does not exist, or a set of the same ranks is registered.
    NotImplementedError
        The set was made from a communicator.
    """
    active = context.current()
    _check_dynamic(active, "add_process_set")
    with Call(
        RequestType.ADD_PROCESS_SET, None, global_process_set, prefix=f"process_set.add.{UNNAMED}"
    ) as call:
        new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        if new.mpi_comm is not None:
            raise NotImplementedError("a ProcessSet made from a communicator can only be passed to init()")
        if new.process_set_id is not None:
            raise ValueError(f"{new} is registered already")
        ranks = checked_ranks(new.ranks or (), call.size)
        if _is_added(active, ranks):
            raise ValueError(f"a process set of the ranks {list_members(ranks)} is registered already")
        call.add(None, None, ranks=ranks)
        handle = call.submit()
    return _await_id(active, new, handle)


def _is_added(active: context.Context, ranks: Ranks) -> bool:
    """Return whether all ranks have made a set of these ranks; members may have founded others."""
    own = _registered.get(active, {})
    return any(
        members == ranks and not isinstance(own.get(set_id), _FoundedSet)
        for set_id, members in list(active.process_sets.items())
    )


def found_process_set(ranks: Sequence[int], key: str) -> ProcessSet:
    """Register a process set by its members alone: no other rank takes part, or knows of it.

    Collective over the members. There may be several sets of the same ranks.

    Parameters
    ----------
    ranks : sequence of int
        Global ranks, of which this one is one. They may be all ranks.
    key : str
        The same on all members, and another one than that of each set that is made at the same time. Hang
        reports name the set by it.

    Returns
    -------
    ProcessSet
        The set, with its id.

    Raises
    ------
    ValueError
        A rank does not exist, this rank is no member, or the key is not a str or is empty.
    MismatchError
        The members that have come do not agree on the ranks, or one of them has joined.
    """
    active = context.current()
    new = _FoundedSet(ranks)
    key = checked_name(key, RequestType.ADD_PROCESS_SET)
    if not key:
        raise ValueError("a process set needs a key")
    members = checked_ranks(new.ranks or (), active.topology.size)
    if active.topology.rank not in members:
        raise ValueError(f"rank {active.topology.rank} is not a member of {new}, so it cannot make it")
    with Call(RequestType.ADD_PROCESS_SET, OwnName(f"process_set.{UNNAMED}.{key}"), new) as call:
        call.add(None, None, ranks=members)
        handle = call.submit()
    return _await_id(active, new, handle)


def _await_id(active: context.Context, new: ProcessSet, handle: Handle) -> ProcessSet:
    """Wait until the ranks have agreed on a new set, and register it, also if the caller is interrupted."""
    try:
        set_id = handle.result()
    except BaseException:
        handle.add_done_callback(partial(_register_late, active, new))
        raise
    register(active, new, set_id)
    return new


def _register_late(active: context.Context, new: ProcessSet, handle: Handle) -> None:
    """Register a set that the ranks agreed on after the caller was interrupted."""
    if handle.exception() is None:
        register(active, new, handle.result())


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective over all ranks, or over the members if they alone have made the set.

    Pending calls in the set fail.

    Returns
    -------
    bool
        False for the global set and for sets that are not registered.

    Raises
    ------
    ValueError
        Dynamic process sets are off.
    """
    removal = _submit_removal(process_set, unattended=False)
    if removal is None:
        return False
    handle, restore = removal
    try:
        handle.result()
    except BaseException:  # an interrupted caller does not stop the removal
        handle.add_done_callback(restore)
        raise
    return True


def start_removal(process_set: ProcessSet, *, unattended: bool = True) -> Handle | None:
    """Begin to remove a process set, as :func:`remove_process_set` does, and do not wait for the other ranks.

    From now on this rank cannot use the set. Its pending calls fail when all ranks have removed the set. If
    one of them never does, that costs memory only.

    Parameters
    ----------
    process_set : ProcessSet
        The set.
    unattended : bool
        Whether nobody waits for the removal, so that hang reports leave it out.

    Returns
    -------
    Handle or None
        Ends when the set is removed; None for the global set and for sets that are not registered.
    """
    removal = _submit_removal(process_set, unattended=unattended)
    if removal is None:
        return None
    handle, restore = removal
    handle.add_done_callback(restore)
    return handle


def _submit_removal(
    process_set: ProcessSet, *, unattended: bool
) -> tuple[Handle, Callable[[Handle], None]] | None:
    """Submit the removal of a set; return its handle, and what registers the set again if it fails."""
    active = context.current()
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"remove_process_set takes a ProcessSet, not {process_set!r}")
    set_id = process_set.process_set_id
    if process_set is global_process_set or set_id is None:
        return None
    by_members = isinstance(process_set, _FoundedSet)
    if not by_members:
        _check_dynamic(active, "remove_process_set")
    # First of all, because another thread may get this id for a new set.
    process_set.process_set_id = None
    ranks = active.process_sets[set_id]
    where: ProcessSet = global_process_set
    if by_members:
        where = _FoundedSet(ranks)
        where.process_set_id = set_id

    def restore(ended: Handle | None = None) -> None:
        failed = ended is None or ended.exception() is not None
        if failed and active.runtime.ended is None:
            active.process_sets[set_id] = ranks
            process_set.process_set_id = set_id
            _registered.setdefault(active, {})[set_id] = process_set

    try:
        with Call(
            RequestType.REMOVE_PROCESS_SET, None, where, prefix=f"process_set.remove.{UNNAMED}"
        ) as call:
            call.add(None, None, ranks=(set_id,), unattended=unattended)
            active.process_sets.pop(set_id)
            _registered.get(active, {}).pop(set_id, None)
            return call.submit(), restore
    except BaseException:
        restore()
        raise


def _check_dynamic(active: context.Context, verb: str) -> None:
    if not active.config.dynamic_process_sets:
        raise ValueError(
            f"{verb} needs PYHVD_DYNAMIC_PROCESS_SETS=1 in the environment, or init(process_sets='dynamic')"
        )
