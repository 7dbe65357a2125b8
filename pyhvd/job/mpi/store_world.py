"""Forms one MPI world of ranks that no MPI launcher has started: they meet in a store of torch.distributed.

Such ranks are those of torchrun, and those that the program has started itself, such as by
``torch.multiprocessing.spawn``. Only MPICH's ranks can meet so; Open MPI's need its own launcher.

1. Rank 0 listens, and starts the world server (:mod:`pyhvd.job.mpi.world_server`). It writes the addresses
   and the key to the store. If all ranks are on one host, it listens on loopback alone.
2. Each rank connects, proves the key, and sends its numbers and its host hash.
3. When all ranks are here, the server sends each rank its numbers on its host. The rank sets the variables of
   Hydra. The connection becomes its PMI_FD.
4. The rank calls MPI_Init, whose lines of PMI-1 the server answers until MPI_Finalize.

The store may still have what earlier ranks have written: torchrun keeps its store over restarts, and the
count of restarts may differ between its nodes. So a rank that does not reach the server, or loses it before
it has a place, reads the store again. In step 1 the ranks of torchrun know from their variables whether they
are on one host. Other ranks tell their network in the store, which must be new.

The store has no authentication: each process that can read it can read the key. The key is worth nothing when
all ranks are here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from pyhvd.common.kernel import host_hash, node_of
from pyhvd.common.text import describe_ranks
from pyhvd.errors import NotInitializedError, TransportError
from pyhvd.job.mpi import world_server
from pyhvd.job.mpi.flavour import judge_library, load_mpi
from pyhvd.job.mpi.rank_env import (
    MPICH,
    OF_RANKS,
    RankEnv,
    claim_rank,
    explain_child,
    leave_no_files,
    let_hangup_end,
    let_yield,
    read_rank_env,
    read_torchrun,
)
from pyhvd.job.mpi.world_server import WorldError
from pyhvd.job.process.segments import sweep
from pyhvd.transport.link_addresses import HostAddress, candidates, host_addresses
from pyhvd.transport.tcp.connection import Connection, connect_once, listen, new_key
from pyhvd.transport.tcp.session import ChannelError, Role, Session

_NOTICE = "pyhvd/server"
_NETWORK = "pyhvd/network/"
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from pyhvd.job.mpi.world_server import main;"
    " sys.exit(main(sys.argv[2:]))"
)
_FOLDER = os.path.abspath(__file__).rsplit(os.sep, 4)[0]
# Time limit of a store without one, as torch has it.
_STORE_S = 300.0
# How long the world server may take to start, and to tell that ranks are missing.
_START_S = 60.0
_GRACE_S = 10.0
# Time limit of one attempt to connect, and the time between two.
_ATTEMPT_S = 5.0
_AGAIN_S = 0.1

_servers: list[
    subprocess.Popen[bytes]
] = []  # a Popen warns when it is forgotten before its process has ended
_stores: list[TorchStore] = []


class TorchStore(Protocol):
    """What this module calls of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> object:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait for it within the store's time limit, or raise RuntimeError."""

    def wait(self, keys: list[str], /) -> object:
        """Wait for values within the store's time limit, or raise RuntimeError."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all these keys have values."""


def join_torchrun(interfaces: str = "") -> None:
    """Start MPI with all ranks of torchrun as its world; do nothing in other processes, and without torch.

    Parameters
    ----------
    interfaces : str
        The knob of link interfaces; see :func:`join_world`.

    Raises
    ------
    TransportError
        See :func:`join_world`; or torch's rendezvous has failed.
    """
    here = read_torchrun()
    mpi = sys.modules.get("mpi4py.MPI")
    if here is None or (mpi is not None and mpi.Is_initialized()):
        return
    if here.size == 1:
        _forget_launcher()
        claim_rank()
        return
    try:
        from torch.distributed import PrefixStore, rendezvous
    except ImportError:
        return
    try:
        store, rank, size = next(rendezvous("env://"))
    except (RuntimeError, ValueError) as exc:
        raise TransportError(f"rank {here.rank} of torchrun did not reach torch's store: {exc}") from exc
    _stores.append(store)  # rank 0 may serve it in this process, for other users too
    join_world(PrefixStore(f"pyhvd/{os.environ['TORCHELASTIC_RUN_ID']}", store), rank, size, interfaces)


def join_world(store: TorchStore, rank: int, size: int, interfaces: str = "") -> None:
    """Start MPI, so that COMM_WORLD has this rank and size; do nothing if it has them already. Collective.

    If an MPI launcher has started this process, MPI itself finds the ranks. Otherwise they meet in the store,
    within its time limit. Call it before the program imports ``mpi4py.MPI``: this import calls MPI_Init.

    Parameters
    ----------
    store : TorchStore
        A store that all ranks share.
    rank, size : int
        This rank, and the number of ranks.
    interfaces : str
        Interfaces, addresses or subnets, with commas, on which rank 0 listens if the ranks are on several
        hosts; empty: all.

    Raises
    ------
    TransportError
        Ranks are missing, MPI has another rank or size, or this MPI needs a launcher.
    NotInitializedError
        This process is a child of a rank.
    ImportError
        mpi4py finds no MPI library.
    """
    if process := claim_rank():
        raise NotInitializedError(explain_child(process))
    torchrun = read_torchrun()
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is no rank of a world of {size}")
    launched = read_rank_env() if torchrun is None else None
    if launched is None:  # MPI's libraries read the environment when they are loaded
        let_hangup_end(os.environ)
        leave_no_files(os.environ)
    mpi = _load()
    descriptor = -1
    if not mpi.Is_initialized() and launched is None:
        _forget_launcher()
        if size > 1:
            _check_library(mpi, size)
            descriptor = _meet(store, rank, size, torchrun, interfaces)
        claim_rank()
    from pyhvd.transport.mpi.world import start_mpi

    start_mpi()
    if descriptor >= 0:
        os.write(descriptor, world_server.UP)
    world = mpi.COMM_WORLD
    found = world.Get_rank(), world.Get_size()
    if found != (rank, size):
        raise TransportError(
            f"MPI is up in this process as rank {found[0]} of {found[1]}, but torch.distributed has it as"
            f" rank {rank} of {size}: give the ranks the numbers that MPI's launcher gave them; or start them"
            " without mpiexec, and import mpi4py.MPI only after hvd.init() or init_process_group()"
        )


def _load() -> Any:
    """Return ``mpi4py.MPI``, without a call of MPI_Init."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    return load_mpi()


def _check_library(mpi: Any, size: int) -> None:
    library = judge_library(mpi.Get_library_version())
    if library.family != MPICH:
        raise TransportError(
            f"{size} processes want to form an MPI world without an MPI launcher, such as those of torchrun,"
            f" but {library.name}, on which mpi4py is built, needs its own: start the script with mpiexec or"
            f" pyhvdrun, e.g. pyhvdrun -n {size} train.py; or install MPICH, which needs none:"
            ' pip install "pyhvd[mpich]"'
        )


def _forget_launcher() -> None:
    """Remove the variables of the launcher that has started torchrun itself."""
    for name in [name for name in os.environ if name.startswith(OF_RANKS)]:
        del os.environ[name]


def _meet(store: TorchStore, rank: int, size: int, torchrun: RankEnv | None, interfaces: str) -> int:
    """Meet the other ranks, and set the variables with which MPI_Init joins them; return PMI_FD."""
    limit: timedelta | None = getattr(store, "timeout", None)
    seconds = _STORE_S if limit is None else limit.total_seconds()
    until = time.monotonic() + seconds
    if torchrun is not None and (torchrun.rank, torchrun.size) == (rank, size):
        one_host = torchrun.local_size == size
    else:
        one_host = _tell_network(store, rank, size)
    try:
        if rank == 0:
            connection = _start_server(store, size, seconds, _addresses(interfaces, one_host=one_host))
            place = _register(connection, rank, size, until + _GRACE_S)
        else:
            connection, place = _reach_server(store, rank, size, until)
    except (ChannelError, WorldError) as exc:
        raise TransportError(f"rank {rank} cannot join the MPI world: {exc}") from exc
    return _become_rank(connection, rank, size, *place)


def _tell_network(store: TorchStore, rank: int, size: int) -> bool:
    """Tell the other ranks this one's network; return to rank 0 whether all ranks are in the same."""
    mine = node_of("net")
    store.set(f"{_NETWORK}{rank}", mine)
    if rank:
        return False
    keys = [f"{_NETWORK}{each}" for each in range(size)]
    try:
        store.wait(keys)
    except RuntimeError as exc:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        raise TransportError(
            f"{describe_ranks(missing)} of {size} did not come to torch's store within its time limit: each"
            " rank must call init_process_group()"
        ) from exc
    return bool(mine) and all(store.get(key).decode() == mine for key in keys)


def _addresses(interfaces: str, *, one_host: bool) -> list[HostAddress]:
    """Return the addresses on which rank 0 listens."""
    wanted = [each.strip() for each in interfaces.split(",") if each.strip()]
    found = host_addresses() if one_host else host_addresses(wanted)
    loopback = [address for address in found if address.interface.ip.is_loopback]
    return loopback if one_host and loopback else found


def _start_server(
    store: TorchStore, size: int, seconds: float, addresses: Sequence[HostAddress]
) -> Connection:
    """Start the world server, tell the other ranks in the store, and return this rank's connection to it.

    The server has a session of its own, so that no signal from a terminal or from torchrun reaches it: it
    ends when its connections close.
    """
    key = new_key()
    listeners: list[socket.socket] = []
    places = []
    for address in addresses:
        with contextlib.suppress(OSError):  # an address of IPv6 that is still being tested
            listeners.append(listen(str(address.interface.ip), size))
            places.append((address.nic, address.cidr, listeners[-1].getsockname()[1]))
    if not places:
        raise WorldError("no interface of this host is up, or matches PYHVD_LINK_INTERFACES")
    mine, its = socket.socketpair()
    inherited = [str(sock.fileno()) for sock in (its, *listeners)]
    command = [sys.executable, "-I", "-S", "-c", _BOOT, _FOLDER, str(size), str(seconds), *inherited]
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[int(each) for each in inherited],
            start_new_session=True,
            cwd="/",
        )
    finally:
        for sock in (its, *listeners):
            sock.close()
    _servers.append(server)
    assert server.stdin is not None
    with server.stdin:
        server.stdin.write(key)
    connection = Connection(mine, Session(key, Role.CLIENT))
    store.set(_NOTICE, json.dumps({"key": key.hex(), "places": places, "network": node_of("net")}))
    connection.shake_hands(_START_S)
    return connection


def _reach_server(
    store: TorchStore, rank: int, size: int, until: float
) -> tuple[Connection, tuple[int, int]]:
    """Return a connection to the world server, and this rank's numbers on its host."""
    mine, network = host_addresses(), node_of("net")
    why = ""
    while time.monotonic() < until:
        try:
            notice = json.loads(store.get(_NOTICE))
        except RuntimeError as exc:
            raise WorldError(f"rank 0 has not written to torch's store: {exc}") from exc
        key = bytes.fromhex(notice["key"])
        ports = {HostAddress(nic, cidr): port for nic, cidr, port in notice["places"]}
        hosts = {str(address.interface.ip): port for address, port in ports.items()}
        same = bool(network) and notice["network"] == network
        for host in candidates(mine, list(ports), same_network=same):
            try:
                connection = connect_once((host, hosts[host]), key, _ATTEMPT_S)
            except (OSError, ChannelError) as exc:
                why = f"{host}:{hosts[host]}: {exc}"
                continue
            try:
                return connection, _register(connection, rank, size, until + _GRACE_S)
            except ChannelError as exc:  # rank 0 has ended; a new one may write to the store
                why = str(exc)
        time.sleep(_AGAIN_S)
    raise WorldError(f"it did not reach the server of rank 0 within the time limit of torch's store ({why})")


def _register(connection: Connection, rank: int, size: int, until: float) -> tuple[int, int]:
    """Tell the server this rank's numbers; return those on its host, once all ranks are there."""
    connection.send(world_server.hello(rank, size, os.getpid(), host_hash()))
    try:
        while (left := until - time.monotonic()) > 0:
            connection.wait(left)
            if records := connection.pump_in():
                return world_server.read_place(records[0])
            if not connection.open:
                raise ChannelError("the server of rank 0 has ended")
        raise ChannelError("the server of rank 0 did not answer")
    except BaseException:
        connection.close()
        raise


def _become_rank(connection: Connection, rank: int, size: int, local_rank: int, local_size: int) -> int:
    """Make this process a rank of PMI-1; return the descriptor of its connection."""
    sock = connection.detach()
    sock.setblocking(True)
    world_server.keep_alive(sock)
    number = os.fstat(sock.fileno()).st_ino
    descriptor = sock.detach()  # MPI_Finalize closes it

    def close_in_child() -> None:
        """Close a forked child's copy: otherwise the server would take the rank for alive."""
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == number:
                os.close(descriptor)

    os.register_at_fork(after_in_child=close_in_child)
    os.environ.update(
        PMI_FD=str(descriptor),
        PMI_RANK=str(rank),
        PMI_SIZE=str(size),
        PMI_SPAWNED="0",
        MPI_LOCALRANKID=str(local_rank),
        MPI_LOCALNRANKS=str(local_size),
    )
    let_yield(RankEnv(MPICH, rank, size, local_rank, local_size), os.environ)
    if local_rank == 0:
        sweep()
    return descriptor
