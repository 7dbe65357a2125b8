"""The fusion plan: which responses run in one batch. Pure.

Every rank plans for itself, and sees only the responses of its own process sets and its own errors. So the
batches of a set depend only on that set's responses without errors, and all its members make the same plan.
The batches of all sets run in the order of their first responses.

In host memory fusion never changes a tensor's bits: the data path reduces each element in rank order,
wherever it lies, and Adasum combines each tensor alone. On devices NCCL sums in an order that depends on an
element's place in the batch. A grouped call's tensors on devices are therefore fused only with each other, so
that their bits do not depend on what else is ready at the same time.

Source of the rules: Horovod's FuseResponses (equal type, dtype, device, scales and op; look-ahead over
responses that do not match, bounded by the threshold).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pyhvd.dtypes import BY_CODE
from pyhvd.negotiation.messages import HOST, RequestType, Response

FUSABLE = frozenset(
    (RequestType.ALLREDUCE, RequestType.ADASUM, RequestType.ALLGATHER, RequestType.REDUCESCATTER)
)
_TENSORS = FUSABLE | {RequestType.BROADCAST, RequestType.ALLTOALL}


def response_bytes(response: Response) -> int:
    """Return the bytes of a response in a fusion buffer; an allgather counts its output."""
    request = response.request
    if request.dtype not in BY_CODE:
        return 0
    count = math.prod(request.shape[1:])
    if request.type == RequestType.ALLGATHER:
        count *= sum(response.dims)
    elif request.shape:
        count *= request.shape[0]
    return count * BY_CODE[request.dtype].itemsize


def plan(
    responses: Sequence[Response],
    threshold: int,
    *,
    groups_alone: bool = False,
    device_calls_alone: bool = False,
) -> list[list[Response]]:
    """Return the batches of responses, in the order in which every rank runs them.

    Parameters
    ----------
    responses : sequence of Response
        In the coordinator's order. Within a set no tensor moves across a join, a barrier or a change of the
        process sets. Errors do not affect the plan, as only some ranks get them.
    threshold : int
        Most bytes in a batch of several; 0 turns fusion off.
    groups_alone : bool
        Whether a grouped call's tensors are fused only with each other, in host memory too.
    device_calls_alone : bool
        Whether every call's tensors on devices are fused only with each other: a single tensor with none.
    """

    def owner(response: Response) -> str:
        """Return the call with whose tensors a response is fused; empty for any."""
        request = response.request
        if request.device == HOST:
            return request.group if groups_alone else ""
        return request.group or (request.name if device_calls_alone else "")

    batches: list[tuple[int, list[Response]]] = []
    stretches: dict[int, list[tuple[int, Response]]] = {}
    for place, response in enumerate(responses):
        if response.error is not None:
            batches.append((place, [response]))
        elif response.request.type in _TENSORS:
            stretches.setdefault(response.process_set, []).append((place, response))
        else:
            batches += _plan_stretch(stretches.pop(response.process_set, []), threshold, owner)
            batches.append((place, [response]))
    for stretch in stretches.values():
        batches += _plan_stretch(stretch, threshold, owner)
    return [batch for _, batch in sorted(batches, key=lambda each: each[0])]


def _plan_stretch(
    numbered: list[tuple[int, Response]], threshold: int, owner: Callable[[Response], str]
) -> list[tuple[int, list[Response]]]:
    batches: list[tuple[int, list[Response]]] = []
    stretch = [response for _, response in numbered]
    sizes = [response_bytes(response) for response in stretch]
    kinds = [_kind(response, owner(response)) for response in stretch]
    taken = [False] * len(stretch)
    for first, response in enumerate(stretch):
        if taken[first]:
            continue
        batch = [response]
        batches.append((numbered[first][0], batch))
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


def _kind(response: Response, owner: str) -> tuple[object, ...]:
    r = response.request
    scales = (r.prescale, r.postscale)
    return (r.type, response.process_set, r.device, r.dtype, scales, r.op, response.joined, owner)
