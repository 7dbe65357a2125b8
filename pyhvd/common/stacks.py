"""Where a program stands: the Python stacks of this process's threads, cut down to what its author wrote.

Owns: which frames are the user's, and how much of a stack is told. The frames of pyhvd, of the standard
library and of installed packages are folded into the name of the function that the user's code is in. Only
looks; a thread that runs goes on running meanwhile.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Collection
from types import CodeType, FrameType

import msgspec

from pyhvd.common.text import sendable

MAX_THREADS = 8
MAX_FRAMES = 10
MAX_TEXT = 160
"""Most characters of a path, a name or a line of code."""

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = tuple(
    {
        *(
            os.path.join(sysconfig.get_path(kind), "")
            for kind in ("stdlib", "platstdlib", "purelib", "platlib")
        ),
        *(os.path.join(each, "") for each in (*site.getsitepackages(), site.getusersitepackages())),
    }
)
# What starts programs and threads is of no interest even where there is nothing else.
_SCAFFOLD = ("threading", "importlib", "runpy", "_bootstrap", "mpi4py.run", "concurrent.futures.thread")


def user_stacks(only: Collection[int] | None = None) -> list[ThreadStack]:
    """Return the stacks of the threads that run the user's program, the main thread's first.

    Parameters
    ----------
    only : collection of int, optional
        Idents of the threads that count; None: all threads of the process.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    idents = sorted((i for i in frames if only is None or i in only), key=lambda i: (i != main, i))
    stacks = (_stack(names.get(ident, f"thread {ident}"), frames[ident]) for ident in idents)
    return [stack for stack in stacks if stack is not None][:MAX_THREADS]


def describe_site(code: CodeType, at: int) -> str:
    """Return ``"train.py:41 in step"``."""
    line = next((line for first, end, line in code.co_lines() if first <= at < end), None)
    return f"{shorten_path(code.co_filename)}:{line or 0} in {_name(code)}"


def shorten_path(path: str) -> str:
    """Return a path as one would name it in the current directory, if that is still there."""
    with contextlib.suppress(OSError):
        path = path.removeprefix(os.path.join(os.getcwd(), ""))
    return _cut(path, keep_end=True)


def _stack(name: str, frame: FrameType) -> ThreadStack | None:
    """Return a thread's stack; None for a thread in which there is nothing of the user's."""
    chain = []
    walk: FrameType | None = frame
    while walk is not None:
        chain.append((walk, _belongs(walk)))
        walk = walk.f_back
    wanted = "user" if any(kind == "user" for _, kind in chain) else "library"
    shown = [each for each, kind in chain if kind == wanted]
    if not shown:
        return None
    deeper = chain[: next(i for i, (each, _) in enumerate(chain) if each is shown[0])]
    frames = [_frame(each) for each in shown[:MAX_FRAMES]]
    return ThreadStack(_cut(name), frames, _inside([each for each, _ in deeper]), len(shown) - len(frames))


def _belongs(frame: FrameType) -> str:
    """Return whose a frame is: "pyhvd", "scaffold", "library" or "user"."""
    path = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", ""))
    if path.startswith(_OWN):
        return "pyhvd"
    if path.startswith("<frozen ") or any(module == s or module.startswith(f"{s}.") for s in _SCAFFOLD):
        return "scaffold"
    if path.startswith(_LIBRARY):
        return "library"
    # mpi4py runs a script under the name __main__, and is itself started so.
    return "scaffold" if path.endswith(("mpi4py/run.py", "mpi4py/__main__.py")) else "user"


def _inside(deeper: list[FrameType]) -> str:
    """Return what the user's innermost frame has called: the function of a library, not that one's own."""
    if not deeper:
        return ""
    code = deeper[-1].f_code
    module = str(deeper[-1].f_globals.get("__name__", ""))
    if code.co_filename.startswith(_OWN):
        return _cut(f"pyhvd.{code.co_name}")
    return _cut(f"{module}.{_name(code)}")


def _frame(frame: FrameType) -> Frame:
    code, line = frame.f_code, frame.f_lineno or 0
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return Frame(shorten_path(code.co_filename), line, _name(code), _cut(text))


def _name(code: CodeType) -> str:
    return _cut(code.co_qualname.rpartition("<locals>.")[2])


def _cut(text: str, keep_end: bool = False) -> str:
    text = sendable(text)
    if len(text) <= MAX_TEXT:
        return text
    return f"...{text[3 - MAX_TEXT :]}" if keep_end else f"{text[: MAX_TEXT - 3]}..."


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One call on a Python stack: file, line number, function, and the line's text where it is at hand."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """Where a thread stands in the user's program.

    Attributes
    ----------
    name : str
        Of the thread.
    frames : list of Frame
        The user's frames, the innermost first; bounded in number.
    inside : str
        Which library function the innermost of them is in, or empty.
    left_out : int
        User's frames beyond the bound.
    """

    name: str
    frames: list[Frame]
    inside: str = ""
    left_out: int = 0
