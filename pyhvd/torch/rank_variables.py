"""The variables by which torch.distributed knows a rank, for ranks that an MPI launcher has started.

torchrun sets them; mpiexec, pyhvdrun, Spark and Slurm do not. ``init_process_group()`` reads them, in the
rendezvous ``env://``, before it calls any backend. :func:`set_up` therefore does two things, once:

1. It sets the numbers of the rank that the launcher has announced: scripts read LOCAL_RANK long before
   they make a group. This needs no MPI.
2. It puts a handler before torch's own for ``env://``. That handler sets the rest if any is missing. The
   ranks must agree on MASTER_PORT, which takes MPI. MPI_Init at the import would be simpler, but it waits for
   the ranks that do not import pyhvd, and it comes before the program can choose how MPI starts.

torch has a public function for new handlers, but not for a second handler of one scheme. So the handler is
put into a private table of torch. If a torch has no such table, the import sets all variables after all.

The handler also makes it safe to call ``init_process_group()`` again. torch's store ends with the group on
rank 0, and a rank that comes back earlier than rank 0 would meet the store that is about to end. So rank 0
keeps its store, and each rendezvous has keys of its own in it.

Variables that the user or torchrun has set stay as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from pyhvd.common.kernel import node_of
from pyhvd.errors import NotInitializedError, TransportError
from pyhvd.job.mpi.alone import explain_alone
from pyhvd.job.mpi.flavour import judge_library, load_mpi
from pyhvd.job.mpi.rank_env import (
    OTHER,
    claim_rank,
    explain_child,
    find_rank_process,
    read_rank_env,
    read_torchrun,
)
from pyhvd.transport.link_addresses import HostAddress, candidates, host_addresses

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SCHEME = "env"
# Time limit of one attempt to connect to rank 0's store.
_ATTEMPT_S = 2.0

_stores: list[Store] = []  # keep the server of rank 0, and so its port


def set_up() -> None:
    """Set what is known of this rank without MPI, and let the first ``env://`` rendezvous set the rest."""
    if not _is_launched():
        return
    set_numbers(os.environ)
    module = sys.modules["torch.distributed.rendezvous"]  # torch.distributed has a function of this name
    handlers: dict[str, Any] | None = getattr(module, "_rendezvous_handlers", None)
    if handlers is None or _SCHEME not in handlers:
        _describe_if_needed()
        return
    of_torch = handlers[_SCHEME]
    if getattr(of_torch, "__module__", "") == __name__:
        return

    meetings = itertools.count()

    def meet(url: str, **options: Any) -> Iterator[Any]:
        _describe_if_needed()
        prefix = f"pyhvd/{next(meetings)}"
        for store, rank, size in of_torch(url, **options):
            _stores[:] = [store]  # shares the server of a store that was there
            yield PrefixStore(prefix, store), rank, size

    handlers[_SCHEME] = meet


def set_numbers(environ: MutableMapping[str, str]) -> None:
    """Set the numbers of this rank that its launcher has announced, as far as torch has no others."""
    here = read_rank_env(environ)
    if here is None:
        return
    values = {"RANK": here.rank, "WORLD_SIZE": here.size}
    one_host = here.local_size == here.size
    if here.launcher != OTHER or not one_host:
        values |= {"LOCAL_RANK": here.local_rank, "LOCAL_WORLD_SIZE": here.local_size}
    for name, value in values.items():
        environ.setdefault(name, str(value))


def describe_rank_for_torch(comm: Any) -> None:
    """Set all variables by which torch.distributed knows this rank, unless they are set. Collective.

    Rank 0 listens on a free port for torch's store, so that no other process gets this port.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks.
    """
    from pyhvd.transport.mpi.world import mpi_topology

    place = mpi_topology(comm)
    hosts = list(dict.fromkeys(place.hosts))
    offer = None
    if place.rank == 0:
        offer = os.environ.get("MASTER_ADDR", ""), _master_port(place.size), _own_addresses()
    host, port, addresses = comm.bcast(offer)
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": hosts.index(place.hosts[place.rank]),
        "MASTER_ADDR": host or _reach(addresses, port),
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def _is_launched() -> bool:
    """Return whether an MPI launcher has started this process as a rank."""
    return read_rank_env() is not None and read_torchrun() is None and not find_rank_process()


def _describe_if_needed() -> None:
    if not _is_launched() or all(os.environ.get(name) for name in _NEEDED):
        return
    if process := claim_rank():
        raise NotInitializedError(explain_child(process))
    mpi = load_mpi()
    from pyhvd.transport.mpi.world import start_mpi

    start_mpi()
    if mpi.COMM_WORLD.Get_size() == 1:
        library = judge_library(mpi.Get_library_version())
        if alone := explain_alone(os.environ, library.name):
            raise TransportError(alone)
    describe_rank_for_torch(mpi.COMM_WORLD)


def _master_port(size: int) -> int:
    """Return the port of the user, or a free one on which torch's store listens from now on."""
    if given := os.environ.get("MASTER_PORT"):
        return int(given)
    store = TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False, multi_tenant=True)
    _stores.append(store)
    return int(store.port)


def _own_addresses() -> tuple[list[tuple[str, str]], str]:
    """Return the addresses of this host, by interface, and an id of its network."""
    return [(each.nic, each.cidr) for each in host_addresses()], node_of("net")


def _reach(addresses: tuple[list[tuple[str, str]], str], port: int) -> str:
    """Return an address of rank 0's host at which its store answers from here."""
    theirs, network = [HostAddress(*each) for each in addresses[0]], addresses[1]
    same = bool(network) and network == node_of("net")
    hosts = candidates(host_addresses(), theirs, same_network=same)
    for host in hosts if len(hosts) > 1 and not same else ():
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), _ATTEMPT_S).close()
            return host
    if not hosts:
        raise TransportError("this host knows no address of rank 0's host: set MASTER_ADDR and MASTER_PORT")
    return hosts[0]
