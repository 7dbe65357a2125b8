"""Calls without a name on the fast path: what a rank remembers of them.

A rank remembers a call when it submits it by message. Later calls like it need no negotiation: see
:mod:`pyhvd.negotiation.turn_slots`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyhvd.engine.plans import HostPlaces, Plan, make_plan
from pyhvd.native.shared_memory import FastPath
from pyhvd.negotiation.messages import Request, RequestType
from pyhvd.negotiation.turn_slots import digest_of, signature_of


def plan_alike(
    request: Request, splits: Sequence[int], rank: int, members: Sequence[int], across: HostPlaces | None
) -> Plan | None:
    """Return the plan of a call that all set ranks make alike; the arguments are as for :func:`make_plan`.

    ``splits`` are those of each rank (alltoall).
    """
    rows = request.shape[0] if request.type == RequestType.ALLGATHER else 0
    every = np.array([splits] * len(members), np.int64) if splits else None
    return make_plan(request, rank, members, [rows] * len(members), every, across)


def learn(
    path: FastPath,
    set_id: int,
    requests: Sequence[Request],
    splits: Sequence[int],
    rank: int,
    members: Sequence[int],
) -> None:
    """Remember a call without a name, so that the next one like it can use a turn slot. From any thread.

    Parameters
    ----------
    path : FastPath
        This rank's fast path.
    set_id : int
        The process set.
    requests : sequence of Request
        This rank's own: one, or those of a grouped call.
    splits : sequence of int
        Those of the first one (alltoall).
    rank : int
        This set rank.
    members : sequence of int
        The set's global ranks.
    """
    signature = signature_of(requests) if path.turns else None
    if signature is None:
        return
    op, postscale = requests[0].kernel_terms(len(members))
    across = path.places_of(set_id)
    plans = [plan_alike(each, splits, rank, members, across) for each in requests]
    if None not in plans:
        grouped = bool(requests[0].group)
        digest = digest_of(signature, grouped=grouped)
        path.learn(set_id, signature, grouped, digest, op, postscale, plans)
