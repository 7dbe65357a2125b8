"""Adasum over a fabric: sum vectors of different directions, average parallel ones.

Two vectors a and b become ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``, and p vectors a binary tree of
such pairs: ranks 0 and 1, 2 and 3, ..., then ranks 0-1 and 2-3, and so on. p must be a power of two.

Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. The algorithm is
its vector halving with distance doubling. On level k = 0, 1, ...:

1. A rank and its partner, 2^k ranks away, exchange halves of their vectors.
2. Each computes the dot products of the half that it keeps.
3. The 2^(k+1) ranks that share this pair of vectors sum the dot products.
4. Each combines the two vectors in its half.

After log2 p levels a rank has 1/p of the result; the halves are exchanged back in reverse order. Small
tensors take one step: all ranks gather all vectors, and reduce them.

Bits. Each tensor is cut into p pieces by its own length, and ranks exchange whole pieces. A tensor's dot
product is the sum over its pieces, added in a binary tree. So the bits depend neither on other tensors in the
buffer, nor on the number of steps, nor on the fabric. Pieces of one number are contiguous in a buffer, so a
half of the buffer is a range.

Dot products and factors are float64. float16 and bfloat16 are float32 from the prescale factor to the
postscale factor, and are rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pyhvd import _fusion
from pyhvd.arrays import Bytes, TensorView, address
from pyhvd.backends.base import Views
from pyhvd.dtypes import BY_CODE, Code, ReduceOp, ReduceSpec
from pyhvd.transport.fabric import Fabric

BATCH = 4 * 1024 * 1024
"""Bytes of a batch of tensors; a tensor of half a batch or more has its own, without packing."""

FLAT = 64 * 1024
"""Up to this number of bytes, over all ranks, all ranks gather and reduce all vectors in one step."""

KEPT = 64 * 1024 * 1024
"""Bytes; larger buffers are freed after use."""

TINY = 2.0**-511
"""A vector with a smaller squared norm has no direction and is summed. The value is the root of the smallest
normal float64: above it, squares and quotients of squares keep their digits."""

Terms = NDArray[np.float64]
Span = tuple[int, int]


def factors_of(terms: Terms) -> Terms:
    """Return the factors of a and of b, for rows of a.b, a.a and b.b.

    Both are 1 if either vector is tiny. Both are NaN if a vector contains a NaN or an infinity, or if a
    square overflows.
    """
    squares = terms[:, 1:]
    tiny = (squares < TINY).any(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        factors: Terms = np.where(tiny, 1.0, 1.0 - terms[:, :1] / squares / 2)
    return factors


class AdasumBatch:
    """One reduction of a batch of tensors, in one buffer.

    Parameters
    ----------
    fabric : Fabric
        Reaches the ranks; a power of two of them.
    buffer : callable
        ``buffer(use, nbytes)`` returns memory, valid until the next call for the same use.
    counts : sequence of int
        Elements of each tensor.
    spec : ReduceSpec
        Of float16, bfloat16, float32 or float64.
    """

    def __init__(
        self, fabric: Fabric, buffer: Callable[[str, int], Bytes], counts: Sequence[int], spec: ReduceSpec
    ) -> None:
        self._fabric = fabric
        self._buffer = buffer
        self._spec = spec
        self._info = spec.info
        self._half = spec.info.itemsize == 2
        self._wide = BY_CODE[Code.FLOAT32] if self._half else spec.info
        base, more = np.divmod(np.array(counts, np.int64), fabric.size)
        number = np.arange(fabric.size)[:, None]
        # By piece and tensor: elements, and their first element in the tensor.
        self._sizes = base + (number < more)
        self._firsts = base * number + np.minimum(number, more)
        # First element of each piece in the buffer.
        self._starts = [0, *itertools.accumulate(self._sizes.sum(axis=1).tolist())]

    def run(self, sources: Views, targets: Views) -> None:
        """Reduce; a rank that has joined contributes zeros."""
        size = self._fabric.size
        alone = targets[0] if len(targets) == 1 else None
        nbytes = self._starts[-1] * self._wide.itemsize
        work = self._space("work", nbytes) if self._half or alone is None else alone.bytes
        held = self._load(sources, work)
        if nbytes * size <= FLAT:
            held = self._reduce_flat(held)
            out = self._finish(held, work, alone, (0, size))
        else:
            held, way = self._reduce_halves(held, work)
            own = way[-1][1] if way else (0, size)
            out = self._finish(held, work, alone, own)
            self._gather_halves(out, way)
        if alone is None:
            _fusion.unpack(address(out), self._addresses(targets), self._sizes.reshape(-1), self._info.code)

    # -- in and out ----------------------------------------------------------------------------------

    def _load(self, sources: Views, work: Bytes) -> Bytes:
        """Return this rank's scaled vector, ordered by piece: the caller's memory, or ``work``."""
        wide, info, total = self._wide.code, self._info.code, self._starts[-1]
        alone = sources[0] if len(sources) == 1 else None
        prescale = self._spec.prescale
        if self._half:
            narrow = self._space("narrow", total * 2) if alone is None else alone.bytes
            if alone is None:
                self._pack(narrow, sources, 1.0)
            _fusion.cast(address(work), wide, address(narrow), info, total)
            _fusion.scale(address(work), address(work), total, wide, prescale)
        elif alone is None:
            self._pack(work, sources, prescale)
        elif prescale == 1.0:
            return alone.bytes
        else:
            _fusion.scale(address(work), alone.ptr, total, wide, prescale)
        return work

    def _pack(self, into: Bytes, sources: Views, factor: float) -> None:
        # The identity element of a sum, -0.0, is Adasum's too: its norm is zero.
        ptrs, sizes = self._addresses(sources), self._sizes.reshape(-1)
        _fusion.pack(address(into), ptrs, sizes, self._info.code, ReduceOp.SUM, factor)

    def _finish(self, held: Bytes, work: Bytes, alone: TensorView | None, own: Span) -> Bytes:
        """Scale and round this rank's pieces; return the result's buffer, in the tensors' dtype."""
        elements = self._starts[own[1]] - self._starts[own[0]]
        mine = address(self._part(work, own))
        _fusion.scale(mine, address(self._part(held, own)), elements, self._wide.code, self._spec.postscale)
        if not self._half:
            return work
        out = self._space("narrow", self._starts[-1] * 2) if alone is None else alone.bytes
        _fusion.cast(address(self._part(out, own)), self._info.code, mine, self._wide.code, elements)
        return out

    def _addresses(self, tensors: Views) -> NDArray[np.int64]:
        """Return the address of every piece; 0 if this rank has joined."""
        bases = np.array([0 if view is None else view.ptr for view in tensors], np.int64)
        return np.where(bases, bases + self._firsts * self._info.itemsize, 0).reshape(-1)

    def _space(self, use: str, nbytes: int) -> Bytes:
        return self._buffer(use, nbytes) if nbytes <= KEPT else np.empty(nbytes, np.uint8)

    # -- the two algorithms --------------------------------------------------------------------------------

    def _reduce_flat(self, held: Bytes) -> Bytes:
        """Gather all ranks' vectors; return the whole result."""
        size, nbytes = self._fabric.size, len(held)
        box = self._space("box", nbytes * size)
        self._fabric.allgather(held, box)
        vectors = [box[r * nbytes : (r + 1) * nbytes] for r in range(size)]
        while len(vectors) > 1:
            for a, b in zip(vectors[::2], vectors[1::2], strict=True):
                self._combine(a, a, b, (0, size), self._terms(a, b, (0, size)))
            vectors = vectors[::2]
        return vectors[0]

    def _reduce_halves(self, held: Bytes, work: Bytes) -> tuple[Bytes, list[tuple[int, Span, Span]]]:
        """Reduce one piece; return its buffer, and each level's partner, pieces kept, pieces sent."""
        rank, size = self._fabric.rank, self._fabric.size
        way: list[tuple[int, Span, Span]] = []
        low, high = 0, size
        for level in range(size.bit_length() - 1):
            distance = 1 << level
            upper = bool(rank & distance)
            middle = (low + high) // 2
            keep, give = (low, middle), (middle, high)
            if upper:
                keep, give = give, keep
            way.append((rank ^ distance, keep, give))
            mine = self._part(held, keep)
            theirs = self._space("box", len(mine))
            self._fabric.pairwise_exchange(rank ^ distance, self._part(held, give), theirs)
            a, b = (theirs, mine) if upper else (mine, theirs)
            terms = self._sum_over_group(self._terms(a, b, keep), 2 * distance)
            self._combine(self._part(work, keep), a, b, keep, terms)
            held = work
            low, high = keep
        return held, way

    def _gather_halves(self, out: Bytes, way: list[tuple[int, Span, Span]]) -> None:
        """Exchange the halves of the result, from the last level to the first."""
        for partner, keep, give in reversed(way):
            self._fabric.pairwise_exchange(partner, self._part(out, keep), self._part(out, give))

    # -- parts ---------------------------------------------------------------------------------------

    def _part(self, buffer: Bytes, span: Span) -> Bytes:
        """Return the bytes of a range of pieces, in a buffer of any dtype."""
        item = len(buffer) // self._starts[-1]
        return buffer[self._starts[span[0]] * item : self._starts[span[1]] * item]

    def _terms(self, a: Bytes, b: Bytes, span: Span) -> Terms:
        """Return a.b, a.a and b.b of each tensor over a range of pieces."""
        sizes = self._sizes[span[0] : span[1]]
        terms = np.empty((sizes.size, 3))
        _fusion.adasum_terms(terms, address(a), address(b), sizes.reshape(-1), self._wide.code)
        parts: Terms = terms.reshape(*sizes.shape, 3)
        while len(parts) > 1:
            parts = parts[::2] + parts[1::2]
        total: Terms = parts[0]
        return total

    def _sum_over_group(self, terms: Terms, members: int) -> Terms:
        """Sum over the ranks that share a pair, in the order of their pieces.

        The ranks of neighbouring pieces were partners on the last level, so they are furthest apart.
        """
        size = self._fabric.size
        box = np.empty((size, *terms.shape))
        self._fabric.allgather(_as_bytes(terms), _as_bytes(box))
        first = self._fabric.rank // members * members
        parts: Terms = box[first : first + members]
        while len(parts) > 1:
            parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
        total: Terms = parts[0]
        return total

    def _combine(self, into: Bytes, a: Bytes, b: Bytes, span: Span, terms: Terms) -> None:
        pieces = span[1] - span[0]
        sizes = self._sizes[span[0] : span[1]].reshape(-1)
        factors = np.tile(factors_of(terms), (pieces, 1))
        _fusion.adasum_combine(address(into), address(a), address(b), sizes, factors, self._wide.code)


def _as_bytes(array: NDArray[np.float64]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
