"""A rank's process that runs a function, as the agent of its host sees it.

The rank sends what its function returned on its control socket, and the agent passes the parts on at once.
So a result may have any size, and the agent holds little of it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyhvd.job.agent.rank_process import RANK_OF_FUNCTION, Program, RankEvents, RankProcess
from pyhvd.job.messages import Start
from pyhvd.job.process.rank_line import LENGTH
from pyhvd.job.rank.pickles import dump_functions
from pyhvd.job.rank.rank import PATHS


def dump_call(
    call: Any,
    directory: str,
    env: list[tuple[bytes, bytes]],
    paths: Iterable[str],
    module: str = RANK_OF_FUNCTION,
) -> bytes:
    """Return the code of a job whose ranks run a function.

    Parameters
    ----------
    call : tuple
        The function, its args and its kwargs; cloudpickle carries them.
    directory : str
        Where the ranks run.
    env : list of (bytes, bytes)
        Variables that replace those of the hosts.
    paths : iterable of str
        Where the ranks look for modules, before the directories of their Python.
    module : str
        :data:`RANK_OF_CALLS` if the ranks live on, and this is their first call.
    """
    searched = PATHS.encode(), os.fsencode(os.pathsep.join(paths))
    head = Program(module, [], directory, [*env, searched]).dump()
    return b"".join((LENGTH.pack(len(head)), head, dump_functions(call)))


def split_call(code: bytes) -> tuple[Program, memoryview]:
    """Return the parts of what :func:`dump_call` wrote: the program, and the pickled call."""
    (length,) = LENGTH.unpack_from(code)
    begin = LENGTH.size + length
    return Program.load(code[LENGTH.size : begin]), memoryview(code)[begin:]


class FunctionProcess(RankProcess):
    """A rank's process that runs a function; `code` is of :func:`dump_call`. See :class:`RankProcess`.

    In an elastic job `files` are those of the vault, and `popen` may fork the rank from a zygote.
    """

    def __init__(
        self,
        start: Start,
        code: bytes,
        events: RankEvents,
        files: Mapping[str, int] = {},
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        program, call = split_call(code)
        self._result_held = False
        super().__init__(start, call, events, files, program=program, popen=popen)

    def hold_result(self, *, held: bool) -> None:
        """See :meth:`RankProcess.hold_result`."""
        held = held and bool(self._line.left)
        if held == self._result_held:
            return
        self._result_held = held
        if held:
            self._forget(self._control)
        else:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            waits = bool(self._to_rank)  # a call has come meanwhile
            self._selector.register(self._control, both if waits else selectors.EVENT_READ, self._talk)

    def _take_result(self, part: bytes) -> None:
        if part:
            self._events.on_result(part)
        if not self._line.left and not self._line.answers:
            self.result = b""
