"""Where a rank was when a signal killed it: what Python, and its MPI or UCX, wrote as it died."""

from __future__ import annotations

import linecache
import os
import re

from pyhvd.job.process.rank_line import CALLED, CRASH

# The frames of the thread that crashed, if that is one of Python's.
_STACK = re.compile(rb"^(?:Current thread 0x|Stack )[^\n]*\n((?:  [^\n]*\n?)*)", re.MULTILINE)
# They begin with the innermost one.
_FRAME = re.compile(rb'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
# UCX: "[host:4711 :0:4711] Caught signal 11 (Segmentation fault: ...)", with process and thread.
# Open MPI: "[host:04711] Signal: Segmentation fault (11)", and maybe "[host:04711] Failing at address: 0x10".
_CAUGHT = rb"^\[[^\]\s]+:0*%d *(?::\d+ *)*\] ((?:Caught signal %d \(|Signal: [^\n]*\(%d\)$)[^\n]*)"
_ADDRESS = rb"^\[[^\]\s]+:0*%d\] (Failing at address: \w+)$"
# In the stack that follows, a function is "(MPI_Send+0x15a)", or "MPI_Send()" if UCX knows debug symbols.
_FUNCTION = re.compile(rb"[( ]P?(MPI_[A-Z][a-z]\w*?)(?:_c)?(?:\+0x[0-9a-f]+\)|\(\))")
_MOST = 160


def describe_crash(
    number: int, pid: int, stack: bytes, stderr: bytes, directory: str = ""
) -> tuple[str, str]:
    """Return the line of the program at which a process died, and what its MPI said; empty if unknown.

    Parameters
    ----------
    number : int
        The signal.
    pid : int
        The process.
    stack : bytes
        What faulthandler wrote for this process.
    stderr : bytes
        The last that the process wrote there; also by faulthandler, if the program has enabled it.
    directory : str, optional
        Where the process began, if not here: names of files may be relative to it.
    """
    frame = _find_frame(stack, number) or _find_frame(stderr, number)
    return "" if frame is None else _describe_frame(frame, directory), _quote_mpi(number, pid, stderr)


def _find_frame(text: bytes, number: int) -> re.Match[bytes] | None:
    """Return the innermost frame of the last thread that crashed, if it did so by this signal."""
    begin = text.rfind(CRASH)
    if begin < 0 or not text.startswith(CALLED.get(number, CRASH), begin + len(CRASH)):
        return None
    stack = _STACK.search(text, begin)
    return None if stack is None else _FRAME.search(text, stack.start(1), stack.end(1))


def _describe_frame(frame: re.Match[bytes], directory: str) -> str:
    path, line, function = (part.decode(errors="replace") for part in frame.groups())
    file = os.path.join(directory, path)
    linecache.checkcache(file)  # an agent may outlive an edit
    source = linecache.getline(file, int(line)).strip()
    return f"at {path}:{line} in {function}" + (f": {source[:_MOST]}" if source else "")


def _quote_mpi(number: int, pid: int, stderr: bytes) -> str:
    caught = re.search(_CAUGHT % (pid, number, number), stderr, re.MULTILINE)
    if caught is None:
        return ""
    address = re.compile(_ADDRESS % pid, re.MULTILINE).search(stderr, caught.end())
    quoted = b"; ".join(found[1] for found in (caught, address) if found is not None)
    function = _FUNCTION.search(stderr, caught.end())
    inside = "" if function is None else f"in {function[1].decode()}: "
    return inside + quoted.decode(errors="replace")[:_MOST]
