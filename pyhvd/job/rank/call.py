"""A call that runs a function on ranks: what is wrong with its arguments, its results, and its errors."""

from __future__ import annotations

import contextlib
import io
import math
import numbers
import os
import pickle
import reprlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from pyhvd.common.text import describe_exception, sendable
from pyhvd.config import read_timeout
from pyhvd.errors import RankFailedError, RemoteError
from pyhvd.job.errors import LaunchError, RankError
from pyhvd.job.rank.pickles import load
from pyhvd.job.spec import Option
from pyhvd.transport.link_addresses import host_addresses
from pyhvd.transport.tcp.session import MAX_RECORD

# Most bytes of the ranks' variables: they travel in one message.
_MOST_ENV = MAX_RECORD // 2


def expect(right: object, name: str, value: object, expected: str) -> None:
    """Raise ValueError with an argument's name and value, unless it is right."""
    if not right:
        raise ValueError(f"{name}={reprlib.repr(value)}: expected {expected}")


def check_call(call: tuple[Any, Any, Any], env: Any, executable: Any) -> None:
    """Raise ValueError if the function with its args and kwargs, `env` or `executable` is of a wrong type."""
    fn, args, kwargs = call
    expect(callable(fn), "fn", fn, "a function")
    many = isinstance(args, Iterable) and not isinstance(args, (str, bytes, Mapping))
    expect(many, "args", args, "a sequence of arguments")
    named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    expect(named, "kwargs", kwargs, "a mapping of names to arguments")
    expect(env is None or isinstance(env, Mapping), "env", env, "a mapping of names to values")
    path = isinstance(executable, str) and executable
    expect(executable is None or path, "executable", executable, "the path of a Python, as str")


def check_text_files(stdout: TextIO | None, stderr: TextIO | None) -> tuple[TextIO | None, TextIO | None]:
    """Return the two files; raise ValueError if one is not open for text."""
    given: dict[str, Any] = {"stdout": stdout, "stderr": stderr}
    for name, file in given.items():
        text = hasattr(file, "write") and not isinstance(file, (io.RawIOBase, io.BufferedIOBase))
        expect(file is None or text, name, file, "a file that is open for text")
    return stdout, stderr


def check_size(size: int, name: str = "num_proc") -> int:
    """Return a number of ranks; raise ValueError if it is none."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}={size!r}: expected a number of ranks, 1 at least")
    return size


def read_duration(option: Option, given: Any) -> float:
    """Return an argument of seconds, else the environment's value, else the default."""
    if given is None:
        return read_timeout(option.suffix, option.default)
    number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    right = number and 0 < float(given) < math.inf
    expect(right, option.argument, given, "a number of seconds above 0")
    return float(given)


def interface_names(given: Iterable[str] | None, name: str = "nics") -> list[str] | None:
    """Return each interface once, in the given order; sorted if they are a set."""
    if given is None:
        return None
    if isinstance(given, str):
        return [given]
    expect(isinstance(given, Iterable), name, given, "names of network interfaces")
    names = list(dict.fromkeys(given))
    expect(all(isinstance(each, str) for each in names), name, names, "names of network interfaces")
    return sorted(names) if isinstance(given, (set, frozenset)) else names


def interface_addresses(nics: Iterable[str]) -> list[str]:
    """Return an address of each of some network interfaces, IPv4 if it has one; at least one address.

    Raises
    ------
    ValueError
        An interface does not exist, is down, or has no address; the text lists the interfaces.
    """
    known = host_addresses()
    addresses = []
    for nic in nics:
        found = [each.interface.ip for each in known if each.nic == nic]
        if not found:
            names = ", ".join(dict.fromkeys(each.nic for each in known))
            raise ValueError(
                f"nics: interface {nic!r} has no address or is down; this host's interfaces are {names}"
            )
        addresses.append(str(min(found, key=lambda ip: ip.version)))
    if not addresses:
        raise ValueError("nics is empty: name an interface, or leave nics out")
    return addresses


def rank_variables(env: Mapping[str, str] | None, nics: Sequence[str] | None) -> dict[str, str]:
    """Return the variables that the user gives the ranks, with those for MPI's network interface.

    Raises
    ------
    ValueError
        A name or a value is invalid, or there are too many bytes.
    """
    chosen = dict(env or {})
    for name, value in chosen.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"env: {name!r}={value!r}: names and values are strings")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env: {name!r}: invalid name or value: a name is not empty and has no '='; neither has NUL"
            )
        if sendable(name + value) != name + value:
            raise ValueError(f"env: {name!r}: it is not UTF-8, and cannot be sent to the executors")
    size = sum(len(f"{name}={value}".encode()) for name, value in chosen.items())
    if size > _MOST_ENV:
        raise ValueError(f"env: {size} bytes in all; {_MOST_ENV} are the most: give the ranks more by args")
    for nic in (nics or [])[:1]:
        # MPICH uses one of these between hosts, depending on how it was built.
        chosen.setdefault("UCX_NET_DEVICES", nic)
        chosen.setdefault("FI_TCP_IFACE", nic)
        # Open MPI uses this.
        chosen.setdefault("OMPI_MCA_btl_tcp_if_include", nic)
    return chosen


def module_paths() -> list[str]:
    """Return where this process finds modules, but for the directories of its Python."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths = [os.path.abspath(path) for path in sys.path]
    return [
        path
        for path in paths
        if os.path.exists(path) and not any(f"{path}/".startswith(f"{each}/") for each in installed)
    ]


def load_result(rank: int, result: bytearray) -> Any:
    """Return what a rank returned; raise LaunchError if its pickle cannot be read here."""
    try:
        return load(result)
    except Exception as exc:
        why = describe_exception(exc)
        raise LaunchError(f"what rank {rank} returned cannot be unpickled on the driver: {why}") from exc


@contextlib.contextmanager
def as_function_errors() -> Iterator[None]:
    """Raise the failure of a job as the error of its functions, with its cause."""
    try:
        yield
    except RankError as exc:
        error = _error_of(exc)
        raise error from error.__cause__


def _error_of(failure: RankError) -> Exception:
    text = str(failure).removeprefix("pyhvd: ")
    if failure.rank < 0:
        return LaunchError(text)
    error = RankFailedError(text, failure.rank, failure.host)
    error.__cause__ = RemoteError(failure.rank, failure.traceback) if failure.traceback else None
    if failure.exception:
        with contextlib.suppress(Exception):  # what is imported here may be another than there
            cause = pickle.loads(failure.exception)
            cause.__cause__ = error.__cause__
            error.__cause__ = cause
    return error
