"""Elastic training: it goes on when ranks and hosts come and go. See docs/elastic.md."""

from pyhvd.elastic.loop import run as run
from pyhvd.elastic.sampler import ElasticSampler as ElasticSampler
from pyhvd.elastic.session import enabled as enabled, generation as generation, max_size as max_size
from pyhvd.elastic.state import ObjectState as ObjectState, State as State
from pyhvd.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from pyhvd.job.commits.store import StoreError as StoreError
from pyhvd.job.commits.vault import VaultError as VaultError

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StoreError",
    "VaultError",
    "enabled",
    "generation",
    "max_size",
    "run",
]
