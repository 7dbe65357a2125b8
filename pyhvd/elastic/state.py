"""States: the objects with which an elastic program goes on after its ranks were started again."""

from __future__ import annotations

import contextlib
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pyhvd.api.collectives import barrier
from pyhvd.api.devices import device_synchronize
from pyhvd.api.objects import broadcast_object
from pyhvd.api.topology import is_initialized, rank
from pyhvd.elastic import exchange, pickles
from pyhvd.elastic.handlers import Handler, choose
from pyhvd.elastic.sampler import ElasticSampler
from pyhvd.elastic.session import RankSession, current
from pyhvd.job.commits.store import StoreError
from pyhvd.job.commits.vault import LOST_OTHERS, load, packed_size

Callback = Callable[[], object]


class State:
    """The base of states, with which a program goes on after its ranks were started again.

    :class:`ObjectState` suits most programs. A subclass of this class defines :meth:`dump` and :meth:`load`;
    its constructor may end with :meth:`save`, so that :meth:`restore` works before the first :meth:`sync`.
    Horovod's arguments `bcast_object` and `get_rank` have no effect.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:  # noqa: ARG002
        self._reset_callbacks: list[Callback] = []
        self._failure_callbacks: list[Callback] = []
        self._number = 0  # of the last commit
        self._saved: tuple[list[Any], bytes] | Exception | None = None  # or why there is no copy

    # -- what a subclass defines -----------------------------------------------------------------------

    def dump(self) -> Any:
        """Return all that :meth:`load` needs; it may share the memory of the program's arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define dump()")

    def load(self, dumped: Any) -> None:
        """Bring the program to what :meth:`dump` has returned."""
        raise NotImplementedError(f"{type(self).__name__} must define load()")

    def sync_settings(self) -> None:
        """Give all ranks the small values that a reset callback on rank 0 may have set."""

    def samplers(self) -> list[ElasticSampler]:
        """Return the samplers of this state, in the same order on every rank."""
        return []

    def reset(self) -> None:
        """Do what must be done before the reset callbacks."""

    # -- what a program calls --------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callback]) -> None:
        """Have functions called, in order, after ranks were started again and the last commit was loaded.

        Afterwards all ranks get rank 0's numbers, strings and optimizer settings such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def register_failure_callbacks(self, callbacks: Iterable[Callback]) -> None:
        """Have functions called, in order, on a rank that lives when others are lost, in an elastic job.

        They are called in the main thread, by a handler of SIGUSR2 unless the program has its own, or by
        :func:`run` after an error. The rank is killed about 0.25 s later. It can send no tensors any more.
        """
        self._failure_callbacks.extend(callbacks)
        session = current()
        if session is None or not self._failure_callbacks:
            return
        session.vault.has_callbacks = True
        if signal.getsignal(LOST_OTHERS) == signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(LOST_OTHERS, lambda _number, _frame: self.on_failure())

    def save(self) -> None:
        """Keep a copy in this process, to which :meth:`restore` goes back until the next commit."""
        arrays, rest = self._pickled(self._counts())
        self._saved = [array.copy() for array in arrays], rest

    def _keep(self) -> None:
        """Keep a copy as :meth:`save` does; if that fails, :meth:`restore` says why."""
        try:
            State.save(self)
        except Exception as exc:
            self._saved = exc

    def restore(self) -> None:
        """Go back to the last :meth:`save`, :meth:`sync` or :meth:`commit`, whichever was latest.

        Before these, an :class:`ObjectState` goes back to what its constructor was given. After a commit in
        an elastic job every rank must call it.

        Raises
        ------
        RuntimeError
            Nothing was saved or committed; or the first copy failed, which is the ``__cause__``.
        """
        session = current()
        if isinstance(self._saved, Exception):
            raise RuntimeError(f"restore: there is no copy: {self._saved}") from self._saved
        if self._saved is not None:
            self._load(*self._saved)
            return
        if session is None or not self._number:
            raise RuntimeError("restore: nothing was saved or committed before")
        barrier()  # the first rank of this host may still be writing the commit
        newest = session.vault.newest()
        assert newest is not None
        self._load(*load(session.vault.read(newest)))

    def sync(self) -> None:
        """Bring all ranks to the state of rank 0, and keep a copy for :meth:`restore`."""
        data = exchange.bring_from_rank_0(lambda: self._pickled(self._counts()))
        if rank() != 0:
            self._load(*load(data))
        else:
            for sampler in self.samplers():  # as on the other ranks: what was recorded counts for all
                sampler.load_state_dict(sampler.state_dict())
        self._keep()

    def commit(self, durable: bool = False) -> None:  # noqa: FBT001, FBT002 - public
        """Keep the state for all ranks to go on from, and make room if hosts have changed.

        Every rank must call it after the same step, and all ranks have the same state then. Each host keeps
        the state of its first rank, and the commit before it, in memory. In a job that is not elastic this is
        :meth:`save`.

        Parameters
        ----------
        durable : bool
            In an elastic job, wait until the commit is in the store, which ``--elastic-store`` names. All
            ranks must give the same value.

        Raises
        ------
        HostsUpdatedInterrupt
            Hosts came or shall go. Nothing is lost: the state is committed, and :func:`run` ends this rank.
        StoreError
            The store cannot be written to. All ranks raise it; the hosts hold the commit all the same.
        MismatchError
            Ranks have called this method a different number of times.
        VaultError
            A host has not enough memory. The last commit stays; other ranks raise RankFailedError.
        TypeError
            Something in the state cannot be pickled. Other ranks raise RankFailedError.
        RuntimeError
            The job is elastic, and the function that :func:`run` decorates has not begun; or it has no store,
            and `durable` is True.
        """
        session = self._session("commit")
        if session is None:
            self.save()
            return
        if durable and not session.stores:
            raise RuntimeError(
                "commit(durable=True): this job has no store: give pyhvdrun --elastic-store URL, or"
                " run_elastic store=URL"
            )
        shall_leave = self._commit(session)
        if durable and (why := exchange.wait_until_stored(session)):
            raise StoreError(why)
        if shall_leave:
            session.interrupt()

    def check_host_updates(self) -> None:
        """Commit and make room if hosts have changed; every rank must call it after the same step.

        Raises
        ------
        HostsUpdatedInterrupt
            See :meth:`commit`, whose other errors may come too.
        """
        session = self._session("check_host_updates")
        if session is not None and exchange.any_rank(flag=session.shall_leave):
            self._commit(session)
            session.interrupt()

    # -- what run() calls ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Bring all ranks to the last commit, or, if there is none, to the state of rank 0."""
        session = current()
        if session is None or not session.enter(self):
            self.sync()
            return
        self._number = session.commit
        exchange.divide_writing(session)
        if not session.commit:
            self.sync()
            return
        self._load(*load(exchange.bring_commit(session)))
        self._saved = None  # restore() shall go back to the commit
        self.on_reset()
        self.sync_settings()

    def on_reset(self) -> None:
        """Call :meth:`reset` and the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_failure(self) -> None:
        """Call the failure callbacks once; an error in one is printed, and the others are called."""
        callbacks, self._failure_callbacks = self._failure_callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                traceback.print_exc()

    def _session(self, verb: str) -> RankSession | None:
        session = current()
        if session is not None and session.state is not self:
            raise RuntimeError(
                f"{verb}() of a state with which no function that hvd.elastic.run decorates was called: in an"
                " elastic job call it in that function"
            )
        return session

    def _commit(self, session: RankSession) -> bool:
        """Commit; return whether the ranks shall make room."""
        samplers, number = self.samplers(), self._number + 1
        trouble: Exception | None = None
        counts = self._counts()
        if session.writes:
            try:
                arrays, rest = self._pickled(counts)
                session.vault.reserve(packed_size(arrays, rest))
            except Exception as exc:
                trouble = exc
        recorded = [each.take_recorded() for each in samplers]
        shall_leave, samples = exchange.agree(number, recorded, trouble, shall_leave=session.shall_leave)
        for sampler, count in zip(samplers, samples, strict=True):
            sampler.add_recorded(count)
        counts[:] = self._counts()  # `arrays` has its memory
        if session.writes:
            session.vault.write(number, session.generation, arrays, rest)
        self._number = number
        self._saved = None
        return shall_leave

    def _counts(self) -> Any:
        return np.array([each.processed_num for each in self.samplers()], np.int64)

    def _pickled(self, counts: Any) -> tuple[list[Any], bytes]:
        """Return the state for :func:`~pyhvd.job.commits.vault.pack`.

        `counts` are the samplers' processed samples. Arrays on devices may be results of collectives that the
        device has not ended: if one was aborted, this raises HorovodInternalError.
        """
        if is_initialized():
            device_synchronize()
        dumped = self.dump()
        try:
            return pickles.dump((counts, dumped))
        except TypeError as exc:
            text = f"{type(self).__name__} cannot be pickled: {_unpicklable(dumped) or exc}"
            raise TypeError(text) from exc

    def _load(self, arrays: list[Any], rest: bytes) -> None:
        counts, dumped = pickles.load(arrays, rest)
        self.load(dumped)
        for sampler, count in zip(self.samplers(), counts.tolist(), strict=True):
            if count != sampler.processed_num:
                sampler.load_state_dict({"epoch": sampler.epoch, "processed_num": count})


class ObjectState(State):
    """A state of attributes, which the keywords name.

    Attributes are committed by value: numpy arrays, tensors, and all that cloudpickle can pickle. An object
    with the methods ``state_dict`` and ``load_state_dict``, such as an :class:`ElasticSampler`, stays the
    same object and loads its state. An attribute that was not given as a keyword is not committed.

    Examples
    --------
    >>> state = ObjectState(epoch=0, weights=np.zeros(10))  # doctest: +SKIP
    >>> state.epoch += 1  # doctest: +SKIP
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **attributes: Any) -> None:
        super().__init__(bcast_object, get_rank)
        if taken := [name for name in attributes if hasattr(ObjectState, name) or name.startswith("_")]:
            raise ValueError(
                f"a state cannot have the attribute {taken[0]!r}: choose a name that is no method of the"
                " state, and does not begin with '_'"
            )
        self._names = list(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._keep()

    if TYPE_CHECKING:  # its attributes are those that the program gives

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        names = self.__dict__.get("_names")
        if names is not None and name not in names and name[0] != "_" and not hasattr(self, name):
            warnings.warn(
                f"state.{name} is not committed, and lost when ranks are started again: give {name!r} to"
                f" {type(self).__name__}() as a keyword",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def handler(self, value: Any) -> Handler:
        """Return how an attribute's value is saved and loaded; a subclass may add kinds of objects."""
        return choose(value)

    def dump(self) -> Any:
        return {name: self.handler(value).dump(value) for name, value in self._items()}

    def load(self, dumped: Any) -> None:
        own = set(self._names)
        if dumped.keys() != own:
            missing, unknown = sorted(own - dumped.keys()), sorted(dumped.keys() - own)
            raise ValueError(
                "the state differs from that of the commit:"
                + (f" not in the commit: {', '.join(missing)};" if missing else "")
                + (f" in the commit alone: {', '.join(unknown)};" if unknown else "")
                + " a program must make the same state each time that it begins"
            )
        for name, value in list(self._items()):
            try:
                loaded = self.handler(value).load(value, dumped[name])
            except Exception as exc:
                raise ValueError(
                    f"state.{name} does not fit what was committed: {type(exc).__name__}: {exc}"
                ) from exc
            setattr(self, name, loaded)

    def sync_settings(self) -> None:
        own = {name: self.handler(value).settings(value) for name, value in self._items()}
        for name, settings in broadcast_object(own, 0, f"{exchange.NAME}settings").items():
            if settings is not None:
                value = getattr(self, name)
                setattr(self, name, self.handler(value).load_settings(value, settings))

    def samplers(self) -> list[ElasticSampler]:
        return [value for _, value in self._items() if isinstance(value, ElasticSampler)]

    def _items(self) -> Iterable[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in self._names)


def _unpicklable(dumped: Any) -> str:
    """Return the first attribute that cannot be pickled, and why; empty if it is unknown."""
    if isinstance(dumped, Mapping):
        for name, value in dumped.items():
            try:
                pickles.dump(value)
            except TypeError as exc:
                return f"attribute {name!r}: {exc}"
    return ""
