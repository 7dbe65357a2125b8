"""PYHVD_CHECK: tests that all ranks have the same results, and that reduced values are finite.

Owns the comparison of results by checksum, the search for the first different element, and the warnings about
NaN and infinity. Every method is collective over a process set. The runtime's thread calls it right before or
right after the checked collective. Knows nothing of queues and handles.

With checks on, the ranks negotiate by messages only, because the fast path bypasses this module. They still
use the shared window.

Limit: equal checksums do not reveal a slice that one rank reduced wrongly and then sent to all ranks.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pyhvd.arrays import Array, Bytes, TensorView, flat_bytes
from pyhvd.backends.host import HostBackend
from pyhvd.common.text import describe_ranks, describe_values
from pyhvd.dtypes import BY_CODE, Code
from pyhvd.errors import CorruptionError
from pyhvd.negotiation.fusion import response_bytes
from pyhvd.negotiation.messages import RequestType, Response, verb
from pyhvd.transport.fabric import Fabric

_log = logging.getLogger("pyhvd")

Words = npt.NDArray[np.int64]
Errors = list[CorruptionError | None]

_REDUCTIONS = frozenset((RequestType.ALLREDUCE, RequestType.ADASUM, RequestType.REDUCESCATTER))
_INEXACT = frozenset(
    (Code.FLOAT16, Code.BFLOAT16, Code.FLOAT32, Code.FLOAT64, Code.COMPLEX64, Code.COMPLEX128)
)
_PIECE = 1 << 20
"""Elements tested for NaN at a time, to bound temporary memory."""


class Checker:
    """The checks of one rank.

    Parameters
    ----------
    what : str
        The knob's value: ``"off"``, ``"results"``, ``"finite"``, or ``"results,finite"``.
    """

    def __init__(self, what: str) -> None:
        asked = what.split(",")
        self.results = "results" in asked
        self.finite = "finite" in asked
        self._told: set[tuple[int, str]] = set()

    # -- finite --------------------------------------------------------------------------------------

    def look_at_inputs(
        self,
        batch: Sequence[Response],
        sources: Sequence[TensorView | None],
        fabric: Fabric,
        members: Sequence[int],
    ) -> None:
        """Warn of NaN and infinity in the inputs of a reduction, on the set's first rank, once per tensor."""
        if not _is_inexact(batch[0]):
            return
        found = _exchange(fabric, np.array([_count_not_finite(source) for source in sources], np.int64))
        for i, response in enumerate(batch):
            bad = [rank for rank in range(fabric.size) if found[rank, i, 0] or found[rank, i, 1]]
            if bad and self._is_new(response) and fabric.rank == 0:
                texts = {members[rank]: _describe_counts(*map(int, found[rank, i])) for rank in bad}
                _log.warning("%s: what goes in is not finite: %s", _name(response), describe_values(texts))

    def look_at_results(
        self, batch: Sequence[Response], results: Sequence[TensorView | None], fabric: Fabric
    ) -> None:
        """Warn of an overflow: the result is not finite, the inputs were. Needs no communication."""
        if not _is_inexact(batch[0]):
            return
        everywhere = batch[0].request.type != RequestType.REDUCESCATTER
        if everywhere and fabric.rank != 0:
            return
        for response, result in zip(batch, results, strict=True):
            nans, infinities, first = _count_not_finite(result)
            if (nans or infinities) and self._is_new(response):
                dtype = BY_CODE[response.request.dtype].name
                text = _describe_counts(nans, infinities, first)
                _log.warning(
                    "%s: the result is not finite, though every rank's input is: it overflows %s: %s",
                    _name(response),
                    dtype,
                    text,
                )

    def _is_new(self, response: Response) -> bool:
        key = (response.process_set, response.request.name)
        new = key not in self._told
        self._told.add(key)
        return new

    # -- results -------------------------------------------------------------------------------------

    @staticmethod
    def compare(
        batch: Sequence[Response],
        results: Sequence[Bytes | None],
        fabric: Fabric,
        members: Sequence[int],
    ) -> Errors:
        """Compare results that must be equal on all ranks; return an error or None for each, on every rank.

        Parameters
        ----------
        batch : sequence of Response
            The responses that ran.
        results : sequence of (flat bytes or None)
            This rank's results; None if it has joined.
        fabric : Fabric
            Fabric of the process set.
        members : sequence of int
            The set's global ranks.
        """
        mine = np.array([(result is not None, _checksum(result)) for result in results], np.int64)
        sums = _exchange(fabric, mine)
        errors: Errors = []
        for i, response in enumerate(batch):
            holders = [rank for rank in range(fabric.size) if sums[rank, i, 0]]
            if len({int(sums[rank, i, 1]) for rank in holders}) <= 1:
                errors.append(None)
            else:
                groups: dict[int, list[int]] = {}
                for rank in holders:
                    groups.setdefault(int(sums[rank, i, 1]), []).append(members[rank])
                where = _Bisection(fabric, holders, response, results[i])
                errors.append(_difference(response, where, list(groups.values()), members))
        return errors

    @staticmethod
    def whole(
        batch: Sequence[Response],
        targets: Sequence[TensorView | None],
        first_rows: Sequence[int],
        reduce: Callable[[Sequence[TensorView | None]], None],
    ) -> list[Bytes | None]:
        """Return the result of a reducescatter as an allreduce, with this rank's own rows in place.

        No two ranks have the same rows, so the tensors are reduced once more, to all ranks. If a rank's rows
        differ from the others' result for them, :meth:`compare` finds the difference.

        Parameters
        ----------
        batch : sequence of Response
            The reducescatters that ran.
        targets : sequence of (TensorView or None)
            This rank's rows; None if it has joined.
        first_rows : sequence of int
            This rank's first row of each tensor.
        reduce : callable
            ``reduce(outputs)`` runs the allreduce of the same tensors.
        """
        outputs: list[TensorView | None] = [
            TensorView(np.empty(response_bytes(r), np.uint8), BY_CODE[r.request.dtype]) for r in batch
        ]
        reduce(outputs)
        filled: list[Bytes | None] = []
        for response, target, output, first in zip(batch, targets, outputs, first_rows, strict=True):
            assert output is not None
            rows = response.request.shape[0]
            if target is not None and rows:
                start = first * (output.nbytes // rows)
                output.array[start : start + target.nbytes] = target.bytes
            filled.append(output.array if target is not None else None)
        return filled

    @staticmethod
    def compare_blocks(
        response: Response,
        sent: Sequence[Bytes],
        received: Sequence[Bytes],
        backend: HostBackend,
        members: Sequence[int],
    ) -> CorruptionError | None:
        """Compare the blocks that each rank received in an alltoall with the sent blocks."""
        told = backend.exchange_counts([_checksum(block) for block in sent])
        wrong = [rank for rank, block in enumerate(received) if _checksum(block) != told[rank]]
        firsts = _exchange(backend.fabric, np.array([[wrong[0] if wrong else -1]], np.int64))[:, 0, 0]
        hurt = {members[rank]: members[int(sender)] for rank, sender in enumerate(firsts) if sender >= 0}
        if not hurt:
            return None
        texts = {rank: f"what rank {sender} sent" for rank, sender in hurt.items()}
        return CorruptionError(
            f"{_name(response)}: what arrived is not what was sent: {describe_values(texts)}."
            f" {_meaning(sorted({*hurt, *hurt.values()}), sure=False)}",
            response.request.name,
            sorted(hurt),
            texts,
        )


class _Bisection:
    """Finds the first element in which the ranks' results differ, by bisection; collective."""

    def __init__(
        self, fabric: Fabric, holders: Sequence[int], response: Response, result: Bytes | None
    ) -> None:
        self._fabric = fabric
        self._holders = holders
        self._result = result
        self._dtype = BY_CODE[response.request.dtype]
        item = self._dtype.itemsize
        self.count = response_bytes(response) // item
        low, high = 0, self.count  # invariant: results are equal before low, and differ between low and high
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_alike(low * item, middle * item):
                low = middle
            else:
                high = middle
        self.element = low

    def _is_alike(self, start: int, stop: int) -> bool:
        part = None if self._result is None else self._result[start:stop]
        sums = _exchange(self._fabric, np.array([[_checksum(part)]], np.int64))[:, 0, 0]
        return len({int(sums[rank]) for rank in self._holders}) == 1

    def values(self) -> dict[int, str]:
        """Return each set rank's value there, with its bits."""
        item = self._dtype.itemsize
        mine = np.zeros(item, np.uint8)
        if self._result is not None:
            mine[:] = self._result[self.element * item : (self.element + 1) * item]
        heard = np.empty((self._fabric.size, item), np.uint8)
        self._fabric.allgather(mine, heard.reshape(-1))
        return {rank: self._show(heard[rank]) for rank in self._holders}

    def _show(self, raw: Bytes) -> str:
        bits = raw.tobytes()[:: -1 if sys.byteorder == "little" else 1].hex()
        if self._dtype.code == Code.BFLOAT16:  # the upper half of a float32
            value = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0]
        else:
            value = raw.view(self._dtype.name)[0]
        return f"{value} (0x{bits})"


def _difference(
    response: Response, where: _Bisection, groups: list[list[int]], members: Sequence[int]
) -> CorruptionError:
    groups.sort(key=len, reverse=True)
    total = sum(map(len, groups))
    sure = 2 * len(groups[0]) > total
    ranks = sorted(rank for group in groups[1 if sure else 0 :] for rank in group)
    values = {members[rank]: text for rank, text in where.values().items()}
    dtype = BY_CODE[response.request.dtype].name
    return CorruptionError(
        f"{_name(response)}: the ranks do not have the same result. They differ first in element"
        f" {where.element} of {where.count} ({dtype}): {describe_values(values)}."
        f" {_meaning(ranks, sure=sure)}",
        response.request.name,
        ranks,
        values,
    )


def _meaning(ranks: Sequence[int], *, sure: bool) -> str:
    """Return the text of likely causes and remedies."""
    who = describe_ranks(ranks)
    lead = f"Most ranks agree against {who}" if sure else f"One of {who} is wrong, and there is no majority"
    return (
        f"{lead}: memory has been corrupted there (by a fault of the hardware, or by native code that writes"
        " where it must not), or another build of pyhvd runs there. Compare what python -m pyhvd doctor says"
        " on these ranks' hosts, and test their memory"
    )


def _name(response: Response) -> str:
    return f"{verb(response.request.type)} {response.request.name!r}"


def _is_inexact(response: Response) -> bool:
    return response.request.type in _REDUCTIONS and response.request.dtype in _INEXACT


def _checksum(data: Bytes | None) -> int:
    """Return 64 bits of BLAKE2b (RFC 7693) as a signed word; 0 for no data."""
    if data is None:
        return 0
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=8).digest(), "little", signed=True)


def _exchange(fabric: Fabric, mine: Words) -> Words:
    """Return every rank's words, which have one shape, by rank."""
    heard = np.empty((fabric.size, *mine.shape), np.int64)
    if mine.size:
        fabric.allgather(flat_bytes(np.ascontiguousarray(mine)), flat_bytes(heard))
    return heard


def _pieces(view: TensorView | None) -> Iterator[tuple[int, Array]]:
    """Yield a tensor's elements in pieces; bfloat16, which numpy lacks, as float32."""
    if view is None:
        return
    flat = view.bytes.view(np.uint16 if view.info.code == Code.BFLOAT16 else BY_CODE[view.info.code].name)
    for first in range(0, len(flat), _PIECE):
        piece = flat[first : first + _PIECE]
        if view.info.code == Code.BFLOAT16:
            piece = (piece.astype(np.uint32) << 16).view(np.float32)
        yield first, piece


def _count_not_finite(view: TensorView | None) -> tuple[int, int, int]:
    """Return the numbers of NaNs and infinities, and the index of the first of both."""
    nans = infinities = 0
    earliest = -1
    for first, piece in _pieces(view):
        good = np.isfinite(piece)
        if good.all():
            continue
        if earliest < 0:
            earliest = first + int(np.argmin(good))
        here = int(np.isnan(piece).sum())
        nans += here
        infinities += len(piece) - int(good.sum()) - here
    return nans, infinities, earliest


def _describe_counts(nans: int, infinities: int, first: int) -> str:
    return f"{nans} NaN, {infinities} infinite, the first in element {first}"
