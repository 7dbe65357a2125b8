"""Pure planner: which responses ride together.

Every rank plans for itself, from the same list of responses and the same threshold, and so comes to the
same plan. What rides together never changes a tensor's bits: the data path reduces each element in rank
order, wherever in the buffer it lies.

Source of the rules: Horovod's FuseResponses (equal type, dtype, device, scales and op; look-ahead over
responses that do not match, bounded by the threshold).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyhvd.dtypes import BY_CODE
from pyhvd.messages import RequestType, Response

FUSABLE = frozenset(
    (RequestType.ALLREDUCE, RequestType.ADASUM, RequestType.ALLGATHER, RequestType.REDUCESCATTER)
)
_TENSORS = FUSABLE | {RequestType.BROADCAST, RequestType.ALLTOALL}


def response_bytes(response: Response) -> int:
    """Return the size (bytes) that a response takes in a fusion buffer; an allgather counts its output."""
    request = response.request
    if request.dtype not in BY_CODE:
        return 0
    count = math.prod(request.shape[1:])
    if request.type == RequestType.ALLGATHER:
        count *= sum(response.dims)
    elif request.shape:
        count *= request.shape[0]
    return count * BY_CODE[request.dtype].itemsize


def plan(responses: Sequence[Response], threshold: int, groups_alone: bool = False) -> list[list[Response]]:
    """Return the responses in batches, in the order in which every rank runs them.

    Parameters
    ----------
    responses : sequence of Response
        In the coordinator's order.
    threshold : int
        Most bytes in a batch of several; 0 turns fusion off.
    groups_alone : bool
        Whether a grouped call's tensors ride only with each other.
    """
    batches: list[list[Response]] = []
    stretch: list[Response] = []
    for response in responses:
        if response.error is None and response.request.type in _TENSORS:
            stretch.append(response)
            continue
        # Errors, join, barrier and process-set changes stay where they are: nothing moves across them.
        batches += _plan_stretch(stretch, threshold, groups_alone)
        stretch = []
        batches.append([response])
    return batches + _plan_stretch(stretch, threshold, groups_alone)


def _plan_stretch(stretch: list[Response], threshold: int, groups_alone: bool) -> list[list[Response]]:
    batches: list[list[Response]] = []
    sizes = [response_bytes(response) for response in stretch]
    kinds = [_kind(response, groups_alone) for response in stretch]
    taken = [False] * len(stretch)
    for first, response in enumerate(stretch):
        if taken[first]:
            continue
        batch = [response]
        batches.append(batch)
        if response.request.type not in FUSABLE or sizes[first] > threshold or not threshold:
            continue
        fused, skipped = sizes[first], 0
        for other in range(first + 1, len(stretch)):
            if taken[other]:
                continue
            if kinds[other] == kinds[first] and fused + sizes[other] <= threshold:
                batch.append(stretch[other])
                taken[other] = True
                fused += sizes[other]
            else:
                skipped += sizes[other]
                if fused + skipped > threshold:
                    break
    return batches


def _kind(response: Response, groups_alone: bool) -> tuple[object, ...]:
    r = response.request
    alone = r.group if groups_alone else ""
    scales = (r.prescale, r.postscale)
    return (r.type, response.process_set, r.device, r.dtype, scales, r.op, response.joined, alone)
