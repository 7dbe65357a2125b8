"""This process's part in an elastic job: which generation it is of, and the vault of its host.

The agent of the host says so by variables, which the ranks of a job that is not elastic do not have.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from pyhvd.api.topology import rank
from pyhvd.errors import HostsUpdatedInterrupt
from pyhvd.job.commits.vault import DESCRIPTORS, Seal, Vault, are_here
from pyhvd.job.mpi.rank_env import read_generation

_log = logging.getLogger("pyhvd")


class RankSession:
    """One rank of one generation.

    Parameters
    ----------
    environ : mapping of str to str
        Variables of the rank.

    Attributes
    ----------
    generation : int
        The number of this generation of ranks, from 0.
    max_size : int
        The most ranks that the job may have; 0 without a limit.
    commit : int
        The number of the newest commit, from which this generation goes on; 0 if there is none.
    source : int
        A rank whose host holds that commit.
    stores : bool
        Whether commits are stored outside of the hosts.
    vault : Vault
        The host's.
    writes : bool
        Whether this rank writes commits: it is the first that has this vault. Known after :attr:`state`.
    state : State or None
        The state of this rank's program, once a function that ``run`` decorates has begun.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        known = read_generation(environ)
        assert known is not None
        self.generation, self.max_size = known.number, known.max_size
        self.commit, self.source, self.stores = known.commit, known.source, known.stores
        self.vault = Vault(_descriptors(environ))
        self.writes = False
        self.state: Any = None
        self._interrupt: HostsUpdatedInterrupt | None = None  # the last one
        self._speaks = self._has_told = False

    def enter(self, state: Any) -> bool:
        """Note that ``run`` was called with a state; return whether this is the first call.

        Raises
        ------
        RuntimeError
            It was called with another state before.
        """
        if self.state is not None and self.state is not state:
            raise RuntimeError(
                "an elastic job has one state, and run() was called with another one before: put all that"
                " must survive into one state"
            )
        is_first, self.state = self.state is None, state
        return is_first

    def interrupt(self) -> NoReturn:
        """Raise HostsUpdatedInterrupt."""
        self.check_interrupt()
        self._speaks = rank() == 0
        self._interrupt = HostsUpdatedInterrupt()
        raise self._interrupt

    def check_interrupt(self) -> None:
        """Say once, on rank 0, where the program has caught HostsUpdatedInterrupt, which is for ``run``."""
        passed = None if self._interrupt is None else self._interrupt.__traceback__
        self._interrupt = None  # it keeps the variables of the functions alive that it has passed
        if passed is None or self._has_told or not self._speaks:
            return
        self._has_told = True
        code = passed.tb_frame.f_code
        _log.warning(
            "%s:%d in %s: the program has caught HostsUpdatedInterrupt, so the job cannot change its hosts:"
            " let it pass, as by `except hvd.HostsUpdatedInterrupt: raise` before `except Exception`",
            code.co_filename,
            passed.tb_lineno,
            code.co_qualname,
        )

    @property
    def held(self) -> Seal | None:
        """The commit from which this generation goes on, if this host holds it."""
        newest = self.vault.newest()
        return newest if newest is not None and newest.number == self.commit else None

    @property
    def shall_leave(self) -> bool:
        """Whether these ranks shall make room for another generation."""
        return self.vault.wished > self.generation


def current() -> RankSession | None:
    """Return this rank's session; None if its job is not elastic."""
    return _of_process()


@functools.cache
def _of_process() -> RankSession | None:
    """Return the session of the process, which has none if it is a child that a rank has started."""
    if read_generation(os.environ) is None or not are_here(_descriptors(os.environ)):
        return None
    return RankSession(os.environ)


def _descriptors(environ: Mapping[str, str]) -> list[int]:
    return [int(environ[name]) for name in DESCRIPTORS]


def enabled() -> bool:
    """Return whether this job is elastic: whether ranks that fail are started again."""
    return current() is not None


def generation() -> int:
    """Return how often the ranks of this job were started again; 0 if it is not elastic."""
    session = current()
    return 0 if session is None else session.generation


def max_size() -> int | None:
    """Return the most ranks that this job may have; None without a limit, and if it is not elastic."""
    session = current()
    return None if session is None else session.max_size or None
