"""``python -P -m pyhvd.job.agent.zygote CHANNEL``: a process that has done its imports, and forks ranks.

The agent of a host has one in an elastic job: a rank that is forked begins its program in milliseconds. Each
request holds a rank's variables and descriptors; the child becomes the rank's guardian, as if it had been
started by a command.

Invariants
----------
1. The zygote runs none of the user's code, and does not initialise MPI or CUDA. It imports installed modules
   alone: those that the program imports at its top.
2. It forks only while all its other threads are made for it: OpenBLAS stops its own at a fork, and jemalloc
   holds its locks. A module that leaves other threads behind, or initialises MPI or CUDA all the same, is
   named, and makes it unfit: the ranks are then started by commands.
3. It ends when the agent's end of the channel closes. Its ranks do not: they have guardians.
"""

from __future__ import annotations

import array
import ast
import contextlib
import gc
import importlib
import importlib.util
import os
import random
import runpy
import select
import signal
import socket
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from typing import NoReturn

import msgspec

from pyhvd.job.mpi.rank_env import read_rank_env, set_defaults
from pyhvd.job.process.guardian import die_with_parent

MAX_REQUEST = 1 << 20
_FIRST_FREE = 512  # descriptors of a request wait from here on, until their numbers are free
_LENGTH = 4
_TASKS = "/proc/self/task"
# By name: jemalloc's, which pyarrow brings; it takes its locks before a fork, and starts its thread anew.
_SAFE_THREADS = ("jemalloc_bg_thd",)
# The ranks that commands start beside the zygote begin first.
_FIRST_RANKS_S = 1.0
_OWN = (
    "numpy",
    "pyhvd.api.collectives",
    "pyhvd.api.lifecycle",
    "pyhvd.api.objects",
    "pyhvd.elastic",
    "pyhvd.engine.runtime",
    "pyhvd.run.entry.user_script",
    "pyhvd.transport.links",
)
"""What every rank imports, but for MPI."""


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote, first: what to import.

    Attributes
    ----------
    program : list of str
        The ranks' program, which is read but not run.
    directory : str
        Where they run: modules from there are the user's, and are left out.
    names : list of str
        Modules besides those that the program imports at its top.
    """

    program: list[str]
    directory: str
    names: list[str] = []


class ZygoteReady(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: it can fork; or it cannot, because a module does what this text says."""

    unfit: str = ""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote, with descriptors: start a guardian and its rank.

    Attributes
    ----------
    module : str
        The guardian's program.
    arguments : list of str
        Its arguments.
    env : dict of str to str
        Its variables, all of them.
    directory : str
        Where it runs.
    numbers : list of int
        The number that each descriptor shall have.
    """

    module: str
    arguments: list[str]
    env: dict[str, str]
    directory: str
    numbers: list[int]


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: the process id of the guardian."""

    pid: int


_Message = Preload | ZygoteReady | Fork | Forked
_decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)


def send(channel: socket.socket, message: _Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message."""
    data = msgspec.msgpack.encode(message)
    head = len(data).to_bytes(_LENGTH, "big")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([head], rights)
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[_Message, list[int]] | None:
    """Return the next message with its descriptors; None at the end of the channel."""
    room = socket.CMSG_SPACE(64 * array.array("i").itemsize)
    head, rights, _, _ = channel.recvmsg(_LENGTH, room)
    if len(head) < _LENGTH:
        return None
    descriptors = array.array("i")
    for _, kind, data in rights:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    length = int.from_bytes(head, "big")
    if length > MAX_REQUEST:
        raise ValueError("the message is too long")
    body = bytearray()
    while len(body) < length:
        part = channel.recv(length - len(body))
        if not part:
            return None
        body += part
    return _decoder.decode(body), descriptors.tolist()


def imports_of(program: Sequence[str], directory: str) -> list[str]:
    """Return the installed modules that a program imports at its top, in order; it is not run.

    `mpi4py` is left out: the program may expect that its import initialises MPI. Ranks that run a function
    have no program.
    """
    if not program:
        return []
    with contextlib.suppress(OSError, SyntaxError, ValueError, ImportError):
        tree = ast.parse(_source(program, directory))
        names = [name for node in tree.body for name in _names(node)]
        return [name for name in dict.fromkeys(names) if _is_installed(name, directory)]
    return []


def _source(program: Sequence[str], directory: str) -> bytes:
    if program[0] == "-c":
        return program[1].encode()
    path: str | None = os.path.join(directory, program[0])
    if program[0] == "-m":
        spec = importlib.util.find_spec(program[1])
        path = None if spec is None else spec.origin
    with open(path or "", "rb") as file:
        return file.read()


def _names(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _is_installed(name: str, directory: str) -> bool:
    """Return whether a module is neither the user's own, which may do anything, nor mpi4py."""
    top = name.partition(".")[0]
    if top in ("mpi4py", "__future__", "horovod"):
        return False
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    inside = (spec.submodule_search_locations or [spec.origin or ""])[0]
    # The directory may hold a virtual environment.
    installed = (sysconfig.get_path(scheme) for scheme in ("stdlib", "purelib", "platlib"))
    return any(_is_below(folder, inside) for folder in installed) or not _is_below(directory, inside)


def _is_below(folder: str, path: str) -> bool:
    return os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), ""))


def preload(names: Iterable[str]) -> str:
    """Import modules; return the first after which this process may not fork, and why; else an empty text."""
    for name in names:
        with contextlib.suppress(Exception):  # the program itself will say why
            importlib.import_module(name)
        if does := _what_forbids_forks():
            return f"{name} {does} when it is imported"
    return ""


def _what_forbids_forks() -> str:
    """Return what this process has done after which it may not fork, or an empty text."""
    torch = sys.modules.get("torch")
    if "mpi4py.MPI" in sys.modules:
        return "initialises MPI"
    if torch is not None and torch.cuda.is_initialized():
        return "initialises CUDA"
    return "starts threads" if _has_threads() else ""


def _has_threads() -> bool:
    """Return whether there is a thread that a fork would leave out while it may hold a lock.

    A first fork stops the threads of pools that are made for that; the next ones start at their next use.
    """
    if len(os.listdir(_TASKS)) == 1:
        return False
    pid = _fork()
    if pid == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # a handler has reaped it
        os.waitpid(pid, 0)
    own = str(os.getpid())
    return any(_thread_name(task) not in _SAFE_THREADS for task in os.listdir(_TASKS) if task != own)


def _fork() -> int:
    """Fork, though there may be threads: :func:`_what_forbids_forks` has looked at them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _thread_name(task: str) -> str:
    try:
        with open(f"{_TASKS}/{task}/comm", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # it has ended
        return _SAFE_THREADS[0]


def serve(channel: socket.socket) -> None:
    """Import what the agent says, and fork ranks until the channel ends."""
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    first = receive(channel)
    if first is None or not isinstance(first[0], Preload):
        return
    wanted = first[0]
    select.select([channel], [], [], _FIRST_RANKS_S)
    rank_env = read_rank_env()
    if rank_env is not None:
        set_defaults(rank_env, os.environ)
    unfit = preload([*_OWN, *wanted.names, *imports_of(wanted.program, wanted.directory)])
    gc.collect()
    gc.freeze()  # a collection in a rank does not touch, and so copy, the pages of what was imported
    send(channel, ZygoteReady(unfit))
    while (request := receive(channel)) is not None:
        message, descriptors = request
        if not isinstance(message, Fork):
            return
        pid = _fork()
        if pid == 0:
            channel.close()
            become(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        send(channel, Forked(pid))


def reseed() -> None:
    """Give this process random numbers of its own."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def become(wanted: Fork, descriptors: Sequence[int]) -> NoReturn:
    """Run a guardian in this process, as if a command had started it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _place(descriptors, wanted.numbers)
    os.environ.clear()
    os.environ.update(wanted.env)
    os.chdir(wanted.directory)
    reseed()
    sys.argv = [wanted.module, *wanted.arguments]
    # What ends the guardian, or the rank that it forks, ends the process as in a new one: with exit handlers.
    runpy.run_module(wanted.module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number, which may be that of another one now."""
    import fcntl

    free = max(_FIRST_FREE, *numbers) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, free) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, os.getppid())
    serve(socket.socket(fileno=int(sys.argv[1])))
