"""The NCCL library, by the names of ``cupy.cuda.nccl``, and the reductions that it has.

No other module knows those names, so all others run without a GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

from pyhvd.dtypes import Code, ReduceOp

# NCCL has our names of element types, and no 16-bit integers.
_NUMBERS = frozenset(Code) - {Code.UINT16, Code.INT16, Code.BOOL, Code.COMPLEX64, Code.COMPLEX128}
_OPS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.PRODUCT: "NCCL_PROD",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
}
# Ops on bytes that are 0 or 1.
_BOOL_OPS = {ReduceOp.PRODUCT: "NCCL_MIN", ReduceOp.MIN: "NCCL_MIN", ReduceOp.MAX: "NCCL_MAX"}
# A sum of complex numbers is the sum of their parts.
_PAIRS = {Code.COMPLEX64: "NCCL_FLOAT32", Code.COMPLEX128: "NCCL_FLOAT64"}


Terms = tuple[int, int, int]
"""NCCL's type and op of a reduction, and its numbers per element."""


class Library(Protocol):
    """The part of ``cupy.cuda.nccl`` that pyhvd uses, besides its constants."""

    NCCL_UINT8: int
    NcclCommunicator: Any

    def get_version(self) -> int:
        """Return the loaded library's version."""

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        """Return a new communicator's id: bytes, or numbers before CuPy 14."""

    def groupStart(self) -> None:  # noqa: N802 - the library's name
        """Begin a group of calls, which run as one."""

    def groupEnd(self) -> None:  # noqa: N802
        """End the group."""


def reduction(library: object, code: Code, op: ReduceOp) -> Terms | None:
    """Return the terms of a reduction; None if NCCL lacks it."""
    if code in _PAIRS:
        names = (_PAIRS[code], "NCCL_SUM", 2) if op == ReduceOp.SUM else None
    elif code == Code.BOOL:
        names = ("NCCL_UINT8", _BOOL_OPS[op], 1) if op in _BOOL_OPS else None
    elif code in _NUMBERS and op in _OPS:
        names = (f"NCCL_{code.name}", _OPS[op], 1)
    else:
        names = None
    if names is None or not hasattr(library, names[0]):
        return None
    return getattr(library, names[0]), getattr(library, names[1]), names[2]


def load_library() -> Library:
    """Return CuPy's NCCL.

    Raises
    ------
    ImportError
        CuPy is not installed, or finds no NCCL.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as exc:
        raise ImportError(f"CuPy cannot be imported ({exc})") from exc
    if not getattr(nccl, "available", False):
        raise ImportError('CuPy finds no NCCL: pip install "pyhvd[cuda13]", or "pyhvd[cuda12]", brings it')
    library: Library = nccl
    return library


def describe_failure(exc: Exception) -> str:
    """Return an error of a call of NCCL as text.

    CuPy names NCCL's codes up to 6. For a later one, as of a call that is in progress (7), its error class
    raises a KeyError of the code.
    """
    if isinstance(exc, KeyError) and exc.args and isinstance(exc.args[0], int):
        return f"NCCL's code {exc.args[0]}"
    return f"{type(exc).__name__}: {exc}"


def version_text(version: int) -> str:
    """Return NCCL's version number, 22304 or (before 2.9) 2708, as text: ``"2.23.4"``, ``"2.7.8"``."""
    major, rest = divmod(version, 10_000) if version >= 10_000 else divmod(version, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
