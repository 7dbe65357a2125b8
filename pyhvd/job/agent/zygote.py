"""``python -P -m pyhvd.job.agent.zygote CHANNEL``: a process that imports modules, then forks ranks.

In an elastic job each host's agent has a zygote: a forked rank begins its program in milliseconds. CHANNEL is
the descriptor of a socket to the agent. Each request on it holds a rank's variables and descriptors. The
forked child becomes the rank's guardian, as if a command had started it.

Invariants
----------
1. The zygote does not run the user's code. It imports only installed modules: those that every rank imports,
   those that the program imports at its top, and those that the user named.
2. The zygote forks only if its other threads tolerate a fork: OpenBLAS stops its threads before a fork, and
   jemalloc takes its own locks. If a module starts other threads, or initialises MPI or CUDA, the zygote is
   unfit: it names that module to the agent, and commands start the ranks.
3. The zygote ends when the agent's end of the channel closes. Its ranks go on: each has a guardian.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import os
import random
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
from pyhvd.job.process import guardian
from pyhvd.job.process.signals import FORWARDED
from pyhvd.job.rank.living import NEEDED

MAX_REQUEST = 1 << 20
_FIRST_FREE = 512  # the lowest number of a request's descriptors until they get their own numbers
_LENGTH = 4
_MOST_DESCRIPTORS = 64
_TASKS = "/proc/self/task"
# Threads that tolerate a fork, by name. jemalloc, which pyarrow contains, takes its locks before a fork, and
# starts its thread again in the child.
_SAFE_THREADS = ("jemalloc_bg_thd",)
# The imports begin after this time, so that they do not slow the first ranks, which commands start.
_FIRST_RANKS_S = 1.0
_OWN = (*NEEDED, "pyhvd.elastic", "pyhvd.run.entry.user_script")


class Preload(msgspec.Struct, frozen=True, tag=True):
    """The agent's first message to the zygote: what to import.

    Attributes
    ----------
    program : list of str
        The ranks' program and its arguments. The zygote reads the program, and does not run it.
    directory : str
        The ranks' working directory. Modules in it are the user's, and are not imported.
    names : list of str
        Modules besides those that the program imports at its top.
    """

    program: list[str]
    directory: str
    names: list[str] = []


class ZygoteReady(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: its imports are done. `unfit` says why it may not fork; empty if it may."""

    unfit: str = ""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote, with descriptors: start a guardian and its rank.

    Attributes
    ----------
    arguments : list of str
        The guardian's, as a command has them.
    env : dict of str to str
        The guardian's whole environment.
    directory : str
        The guardian's working directory.
    numbers : list of int
        The number that each descriptor gets in the guardian.
    """

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
    """Send a message, and descriptors with it."""
    data = msgspec.msgpack.encode(message)
    socket.send_fds(channel, [len(data).to_bytes(_LENGTH, "big")], descriptors)
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[_Message, list[int]] | None:
    """Return the next message with its descriptors; None at the end of the channel."""
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH, _MOST_DESCRIPTORS)
    if len(head) < _LENGTH:
        return None
    length = int.from_bytes(head, "big")
    if length > MAX_REQUEST:
        raise ValueError(f"a message of {length} bytes: at most {MAX_REQUEST} are allowed")
    body = bytearray()
    while len(body) < length:
        part = channel.recv(length - len(body))
        if not part:
            return None
        body += part
    return _decoder.decode(body), descriptors


def imports_of(program: Sequence[str], directory: str) -> list[str]:
    """Return the installed modules that a program imports at its top, in order, without running the program.

    `mpi4py` is left out: the program may expect that its import initialises MPI. `program` is empty if the
    ranks run a function.
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
    path = os.path.join(directory, program[0])
    if program[0] == "-m":
        # find_spec of a dotted name would import its package, and so run code of the user's.
        top, *inner = program[1].split(".")
        spec = importlib.util.find_spec(top)
        if spec is None:
            return b""
        package = (spec.submodule_search_locations or [""])[0]
        path = os.path.join(package, *inner) + ".py" if inner else spec.origin or ""
    with open(path, "rb") as file:
        return file.read()


def _names(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _is_installed(name: str, directory: str) -> bool:
    """Return whether a module is installed, and is not the user's own, mpi4py or horovod."""
    top = name.partition(".")[0]
    if top in ("mpi4py", "__future__", "horovod"):
        return False
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    inside = (spec.submodule_search_locations or [spec.origin or ""])[0]
    # The user's directory may contain the virtual environment with the installed modules.
    installed = (sysconfig.get_path(scheme) for scheme in ("stdlib", "purelib", "platlib"))
    return any(_is_below(folder, inside) for folder in installed) or not _is_below(directory, inside)


def _is_below(folder: str, path: str) -> bool:
    return os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), ""))


def preload(names: Iterable[str]) -> str:
    """Import modules until one makes forks unsafe; return its name with the reason, or an empty text."""
    for name in names:
        with contextlib.suppress(Exception):  # the program raises the same error when it imports the module
            importlib.import_module(name)
        if does := _what_forbids_forks():
            return f"{name} {does} when it is imported"
    return ""


def _what_forbids_forks() -> str:
    """Return why this process may not fork, as the predicate of a sentence; empty if it may."""
    torch = sys.modules.get("torch")
    if "mpi4py.MPI" in sys.modules:
        return "initialises MPI"
    if torch is not None and torch.cuda.is_initialized():
        return "initialises CUDA"
    return "starts threads" if _has_threads() else ""


def _has_threads() -> bool:
    """Return whether this process has threads that do not tolerate a fork.

    A child lacks these threads, and may wait without end for a lock that one held. A trial fork comes first:
    it stops the threads of pools such as OpenBLAS's, which start again at their next use.
    """
    if len(os.listdir(_TASKS)) == 1:
        return False
    pid = _fork()
    if pid == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # the handler of SIGCHLD has reaped the child
        os.waitpid(pid, 0)
    own = str(os.getpid())
    return any(_thread_name(task) not in _SAFE_THREADS for task in os.listdir(_TASKS) if task != own)


def _fork() -> int:
    """Fork without Python's warning about threads: :func:`_has_threads` checks them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _thread_name(task: str) -> str:
    try:
        with open(f"{_TASKS}/{task}/comm", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # the thread has ended
        return _SAFE_THREADS[0]


def serve(channel: socket.socket) -> None:
    """Import the modules of the agent's first message, then fork ranks until the channel closes."""
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    before = {number: signal.getsignal(number) for number in FORWARDED}
    guardian.ignore(FORWARDED)
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
    gc.freeze()  # collections in ranks then do not write to, and so copy, the pages of imported objects
    send(channel, ZygoteReady(unfit))
    while (request := receive(channel)) is not None:
        message, descriptors = request
        if not isinstance(message, Fork):
            return
        pid = _fork()
        if pid == 0:
            channel.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            become(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        send(channel, Forked(pid))


def reseed() -> None:
    """Seed the global random generators anew: ranks from one zygote would draw the same numbers."""
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
    """Make this forked process the guardian, as if a command had started it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _place(descriptors, wanted.numbers)
    os.environ.clear()
    os.environ.update(wanted.env)
    os.chdir(wanted.directory)
    reseed()
    sys.argv = [guardian.__file__, *wanted.arguments]
    # SystemExit of the forked rank passes through here: exit handlers run as usual.
    guardian.guard_rank(*wanted.arguments)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number; another of the descriptors may have that number now."""
    import fcntl

    free = max(_FIRST_FREE, *numbers) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, free) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)


if __name__ == "__main__":
    guardian.die_with_parent(signal.SIGKILL, os.getppid())
    serve(socket.socket(fileno=int(sys.argv[1])))
