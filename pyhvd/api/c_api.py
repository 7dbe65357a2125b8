"""What C code outside of pyhvd needs from Python: the header's folder, the functions, and call ids.

With these, such code submits cached calls, and learns of their end, without Python and the GIL. The header
``pyhvd.h`` documents the functions; docs/internals.md has an example. The names of this module are public.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyhvd.native
from pyhvd.api.collectives import Splits
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.native import shared_memory
from pyhvd.native.shared_memory import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GROUPED,
    REDUCESCATTER,
    c_functions,
    error_of,
)

_VERBS = {
    "allreduce": ALLREDUCE,
    "allgather": ALLGATHER,
    "broadcast": BROADCAST,
    "alltoall": ALLTOALL,
    "reducescatter": REDUCESCATTER,
    "barrier": BARRIER,
}


def include_dir() -> str:
    """Return the folder of ``pyhvd.h``, for a compiler's ``-I``."""
    return str(Path(pyhvd.native.__file__).parent / "include")


def capsule() -> object:
    """Return a capsule named ``pyhvd.c_api`` with the table of C functions.

    C code gets the table by ``PyCapsule_GetPointer(capsule, PYHVD_C_API_CAPSULE)``, and needs neither the
    capsule nor the GIL afterwards.
    """
    return c_functions()


def exception(text: str) -> BaseException | None:
    """Return the exception that a ``done`` function got as this text: a new object; None if it is not known.

    pyhvd keeps the last 64 errors of calls that C code has submitted, of all ranks of this process.
    """
    return error_of(text)


def call_id(
    verb: str,
    tensors: Any,
    name: str,
    *,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    root_rank: int = 0,
    splits: Splits = None,
    process_set: ProcessSet = global_process_set,
) -> int | None:
    """Return the number by which C code submits a call that all ranks remember, or None.

    Ask after a first submission in Python. None means: submit in Python this time, and ask again later. The
    ranks do not remember such a call yet, or they never do (PYHVD_FAST_LANE=0, arrays on a GPU, ranks without
    shared memory); or a tensor of the call is going by message at this moment. The same call has the same id
    until the id becomes stale; ``pyhvd.h`` says when that happens.

    Parameters
    ----------
    verb : str
        A synchronous verb without underscore: "allreduce", "grouped_allreduce", "allgather", "broadcast",
        "alltoall", "reducescatter", "barrier", ....
    tensors : array, list of arrays, or None
        Row-major arrays with the shapes and dtypes of the call; only these count. A list for a grouped verb,
        None for a barrier.
    name : str
        The call's name.
    op, prescale_factor, postscale_factor, root_rank, splits, process_set
        The arguments of the verb, where it has them.

    Raises
    ------
    ValueError
        There is no such verb.
    """
    grouped = verb.startswith("grouped_")
    kind = _VERBS.get(verb.removeprefix("grouped_"))
    if kind is None:
        raise ValueError(f"no verb is named {verb!r}: expected one of {', '.join(_VERBS)}, or grouped_...")
    terms = {BROADCAST: root_rank, ALLTOALL: splits}
    return shared_memory.call_id(
        kind,
        GROUPED if grouped else 0,
        tensors,
        terms.get(kind),
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )
