"""What an elastic program goes on with after ranks were started again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from pyhvd.api.collectives import Max, Sum, allgather, allreduce_async, broadcast_
from pyhvd.api.objects import broadcast_object
from pyhvd.api.topology import local_rank, rank
from pyhvd.elastic import pickles
from pyhvd.elastic.sampler import ElasticSampler
from pyhvd.elastic.session import Session, current
from pyhvd.errors import HostsUpdatedInterrupt, MismatchError
from pyhvd.job.vault import Seal, load

_NAME = "elastic: "


class Handler(Protocol):
    """How an object that a state holds is saved and loaded."""

    def dump(self, value: Any) -> Any:
        """Return what :meth:`load` needs; it may share the object's memory."""

    def load(self, value: Any, dumped: Any) -> Any:
        """Bring an object to what was saved, and return it, or another one in its place."""


class _ByValue:
    """Objects without a method to load a state: a copy takes their place."""

    def dump(self, value: Any) -> Any:
        return value

    def load(self, value: Any, dumped: Any) -> Any:  # noqa: ARG002
        return dumped


class _OfSamplers:
    def dump(self, value: ElasticSampler) -> Any:
        return value.state_dict()

    def load(self, value: ElasticSampler, dumped: Any) -> ElasticSampler:
        value.load_state_dict(dumped)
        return value


class State:
    """What is committed, and comes back after ranks were started again; see :class:`ObjectState`.

    Horovod's arguments `bcast_object` and `get_rank` have no effect.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:  # noqa: ARG002
        self._callbacks: list[Callable[[], None]] = []
        session = current()
        self._number = 0 if session is None else session.commit  # of the last commit
        self._saved: tuple[list[Any], bytes] | None = None
        self._wished = np.zeros(1, np.int64)

    # -- what a subclass knows -------------------------------------------------------------------------

    def dump(self) -> Any:
        """Return all that :meth:`load` needs; arrays in it may be the program's own."""
        raise NotImplementedError

    def load(self, dumped: Any) -> None:
        """Bring the program to what was saved."""
        raise NotImplementedError

    def sync_settings(self) -> None:
        """Give all ranks what a callback on rank 0 may have set."""

    def samplers(self) -> Iterable[ElasticSampler]:
        """Return the samplers of this state."""
        return ()

    # -- what a program calls --------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions called, in order, after ranks were started again and the last commit was loaded."""
        self._callbacks.extend(callbacks)

    def reset(self) -> None:
        """Do what must be done before the callbacks; subclasses may replace this."""

    def on_reset(self) -> None:
        """Call :meth:`reset` and the callbacks."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        """Keep a copy in this process, to which :meth:`restore` goes back."""
        arrays, rest = pickles.dump(self.dump())
        self._saved = [array.copy() for array in arrays], rest

    def restore(self) -> None:
        """Go back to the last :meth:`save` or :meth:`commit`, whichever was later."""
        session = current()
        if self._saved is not None:
            self.load(pickles.load(*self._saved))
        elif session is not None and (newest := session.vault.newest()) is not None:
            self.load(pickles.load(*load(session.vault.read(newest))))

    def sync(self) -> None:
        """Bring all ranks to the state of rank 0."""
        dumped = broadcast_object(pickles.dump(self.dump()) if rank() == 0 else None, 0, f"{_NAME}sync")
        if rank() != 0:
            self.load(pickles.load(*dumped))

    def commit(self) -> None:
        """Keep the state for all ranks to go on from, and make room if hosts have changed.

        Every rank must call it after the same step. The state is the same on all ranks: each host keeps that of
        its first rank, twice, in memory.

        Raises
        ------
        HostsUpdatedInterrupt
            Hosts came or shall go; :func:`run` then starts the ranks again. Nothing is lost.
        MismatchError
            Ranks have called this method a different number of times.
        VaultError
            A host has not enough memory. The last commit stays.
        TypeError
            Something in the state cannot be pickled.
        """
        session = current()
        if session is None:
            self.save()
        elif self._seal(session):
            raise HostsUpdatedInterrupt

    def check_host_updates(self) -> None:
        """Make room if hosts have changed; every rank must call it after the same step.

        Raises
        ------
        HostsUpdatedInterrupt
            See :meth:`commit`; :func:`run` commits first.
        """
        session = current()
        if session is None:
            return
        self._wished[0] = session.shall_leave
        if allreduce_async(self._wished, name=f"{_NAME}hosts", op=Max).result()[0]:
            raise HostsUpdatedInterrupt

    # -- what run() calls ------------------------------------------------------------------------------

    def seal(self) -> None:
        """Commit, and ignore changes of hosts."""
        session = current()
        assert session is not None
        self._seal(session)

    def begin(self) -> None:
        """Bring all ranks to the last commit, or, if there is none, to the state of rank 0."""
        session = current()
        if session is None or not session.commit:
            self.sync()
            return
        data = _bring_to_all(session)
        self.load(pickles.load(*load(data)))
        self.on_reset()
        self.sync_settings()

    def _seal(self, session: Session) -> bool:
        """Commit; return whether the ranks shall make room."""
        samplers = list(self.samplers())
        number = self._number + 1
        greatest = np.array([number, -number, session.shall_leave], np.int64)
        recorded = np.array([0, *(each.take_recorded() for each in samplers)], np.int64)
        handles = [
            allreduce_async(greatest, name=f"{_NAME}commit", op=Max),
            allreduce_async(recorded, name=f"{_NAME}samples", op=Sum),
        ]
        found, samples = (handle.result() for handle in handles)
        if found[0] != -found[1]:
            _raise_mismatch(number)
        for each, count in zip(samplers, samples[1:].tolist(), strict=True):
            each.add_recorded(count)
        if local_rank() == 0:
            session.vault.write(number, session.generation, *pickles.dump(self.dump()))
        self._number = number
        self._saved = None
        return bool(found[2])


class ObjectState(State):
    """A state of attributes, which the keywords name.

    They are committed by value: numpy arrays, tensors, and whatever cloudpickle can pickle. An
    :class:`ElasticSampler` goes on where it was.

    Examples
    --------
    >>> state = ObjectState(epoch=0, weights=np.zeros(10))  # doctest: +SKIP
    >>> state.epoch += 1  # doctest: +SKIP
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **attributes: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = list(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)

    def handler(self, value: Any) -> Handler:
        """Return how an attribute's value is saved and loaded."""
        return _OfSamplers() if isinstance(value, ElasticSampler) else _ByValue()

    def dump(self) -> Any:
        values = ((name, getattr(self, name)) for name in self._names)
        return {name: self.handler(value).dump(value) for name, value in values}

    def load(self, dumped: Any) -> None:
        if dumped.keys() != set(self._names):
            raise ValueError(
                f"the commit has the attributes {_listed(dumped)}, and this state {_listed(self._names)}: a"
                " program must make the same state each time that it begins"
            )
        for name, saved in dumped.items():
            value = getattr(self, name)
            setattr(self, name, self.handler(value).load(value, saved))

    def sync_settings(self) -> None:
        own = {name: value for name in self._names if _is_setting(value := getattr(self, name))}
        for name, value in broadcast_object(own, 0, f"{_NAME}settings").items():
            setattr(self, name, copy.copy(value))

    def samplers(self) -> Iterable[ElasticSampler]:
        return [value for name in self._names if isinstance(value := getattr(self, name), ElasticSampler)]


def _is_setting(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes, type(None)))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"


def _raise_mismatch(number: int) -> None:
    numbers = allgather(np.array([number], np.int64), f"{_NAME}numbers").tolist()
    first = numbers[0]
    other = next(each for each, found in enumerate(numbers) if found != first)
    raise MismatchError(
        f"commit: rank 0 is at its commit {first}, but rank {other} at its commit {numbers[other]}: every rank"
        " must call commit() after the same steps",
        "commit",
    )


def _bring_to_all(session: Session) -> Any:
    """Return the bytes of the commit from which this generation goes on, on every rank."""
    seal = session.held
    here = seal is not None
    mine = np.array([0 if here else 1, seal.size if seal else 0, seal.generation if seal else 0], np.int64)
    lacking, length, made_by = allreduce_async(mine, name=f"{_NAME}who", op=Max).result().tolist()
    if not lacking:
        assert seal is not None
        return session.vault.read(seal)
    if rank() == session.source:
        assert seal is not None
        data = np.frombuffer(session.vault.read(seal), np.uint8)
    else:  # not into the vault: other ranks of this host may be reading there
        data = np.empty(length, np.uint8)
    broadcast_(data, session.source, f"{_NAME}state")
    if not here and local_rank() == 0:
        session.vault.take(Seal(session.commit, made_by, length), data)
    return data.data
