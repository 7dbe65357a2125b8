"""What the ranks of an elastic job learn from their variables: which generation they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyhvd.job.mpi.rank_env import GENERATION

_PREFIX = "PYHVD_ELASTIC_"
JOB = _PREFIX + "JOB"
"""The variable that has :attr:`RankGeneration.job`; the launcher sets it in all generations."""


class MadeRoom(SystemExit):
    """This rank has committed, and ends, so that another generation can begin."""


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """One generation of ranks.

    Attributes
    ----------
    number : int
        How often ranks were started again before.
    commit : int
        The number of the newest commit, from which this generation goes on; 0 if there is none.
    source : int
        A rank whose host holds that commit.
    max_size : int
        The most ranks that the job may have; 0 without a limit.
    job : str
        Letters that tell jobs apart, the same in all generations of one job.
    stores : bool
        Whether commits are stored outside of the hosts, by the host of rank 0.
    """

    number: int
    commit: int = 0
    source: int = 0
    max_size: int = 0
    job: str = ""
    stores: bool = False

    def variables(self) -> dict[str, str]:
        """Return the variables of a rank, but for :data:`JOB`."""
        values = {
            GENERATION: self.number,
            _PREFIX + "COMMIT": self.commit,
            _PREFIX + "SOURCE": self.source,
            _PREFIX + "MAX_SIZE": self.max_size,
            _PREFIX + "STORES": int(self.stores),
            "HOROVOD_ELASTIC": 1,
        }
        return {name: str(value) for name, value in values.items()}


def read_generation(environ: Mapping[str, str]) -> RankGeneration | None:
    """Return the generation of this rank; None if its job is not elastic."""
    if GENERATION not in environ:
        return None
    names = (GENERATION, *(_PREFIX + name for name in ("COMMIT", "SOURCE", "MAX_SIZE", "STORES")))
    number, commit, source, max_size, stores = (int(environ.get(name, "0")) for name in names)
    return RankGeneration(number, commit, source, max_size, environ.get(JOB, ""), bool(stores))
