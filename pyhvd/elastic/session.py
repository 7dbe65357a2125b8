"""This process's part in an elastic job: which generation it is of, and the vault of its host.

The agent of the host says so by variables, which the ranks of a job that is not elastic do not have.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from pyhvd.job.generation_env import read_generation
from pyhvd.job.vault import DESCRIPTORS, Seal, Vault


class Session:
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
    vault : Vault
        The host's.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        known = read_generation(environ)
        assert known is not None
        self.generation, self.max_size = known.number, known.max_size
        self.commit, self.source = known.commit, known.source
        self.vault = Vault([int(environ[name]) for name in DESCRIPTORS])

    @property
    def held(self) -> Seal | None:
        """The commit from which this generation goes on, if this host holds it."""
        newest = self.vault.newest()
        return newest if newest is not None and newest.number == self.commit else None

    @property
    def shall_leave(self) -> bool:
        """Whether these ranks shall make room for another generation."""
        return self.vault.wished > self.generation


@functools.cache
def current() -> Session | None:
    """Return this process's session; None if its job is not elastic."""
    return None if read_generation(os.environ) is None else Session(os.environ)


def enabled() -> bool:
    """Return whether this job is elastic: whether ranks that fail are started again."""
    return current() is not None


def generation() -> int:
    """Return how often the ranks of this job were started again."""
    session = current()
    return 0 if session is None else session.generation


def max_size() -> int | None:
    """Return the most ranks that this job may have; None without a limit, and if it is not elastic."""
    session = current()
    return None if session is None else session.max_size or None
