"""Compression of tensors in transit: ``Compression.none``, ``Compression.fp16``, or the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyhvd.arrays import TensorView
from pyhvd.devices.array_libraries import adopt
from pyhvd.dtypes import Code

_PROTOCOLS = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")


class Compressor:
    """Interface of compressions; subclass it for your own. Both methods are static."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context for :meth:`decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the result in the caller's form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:  # noqa: ARG004 - the interface's
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating tensors as float16, others unchanged. Values beyond 65,504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16 in its own memory space, and its dtype.

        Raises
        ------
        TypeError
            The tensor is on a GPU, and pyhvd cannot cast arrays of its library.
        """
        dtype = getattr(tensor, "dtype", None)
        if isinstance(dtype, np.dtype) and hasattr(tensor, "astype"):  # numpy, CuPy, JAX
            if dtype.kind != "f" or dtype == np.float16:
                return tensor, None
            with np.errstate(over="ignore"):
                return tensor.astype(np.float16), dtype
        if str(dtype) in ("torch.float32", "torch.float64"):
            return tensor.half(), dtype
        if not any(hasattr(tensor, name) for name in _PROTOCOLS):
            return tensor, None
        seen = adopt(tensor)
        if seen.info.code not in (Code.FLOAT32, Code.FLOAT64):
            return tensor, None
        if isinstance(seen, TensorView):
            return FP16Compressor.compress(seen.array)
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise TypeError(
            f"Compression.fp16 cannot cast a {kind} on {seen.device}: pass cupy.asarray(array),"
            " or leave out the compression"
        )

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        if ctx is None:
            return tensor
        return tensor.astype(ctx) if hasattr(tensor, "astype") else tensor.to(ctx)


class CastingCompressor(Compressor):
    """Sends float32 and float64 as a narrower dtype, others unchanged; a framework says how to cast.

    Attributes
    ----------
    dtype : object
        What is sent.
    """

    dtype: Any

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another dtype."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and its dtype; None as dtype if it is sent unchanged."""
        own = tensor.dtype
        # numpy's and TensorFlow's dtypes have a name; that of torch's is "torch.float32".
        name = str(getattr(own, "name", own)).rpartition(".")[2]
        return (cls.cast(tensor, cls.dtype), own) if name in ("float32", "float64") else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        return tensor if ctx is None else cls.cast(tensor, ctx)


class Compression:
    """The built-in compressions.

    ``Compression.none``, the default, sends tensors unchanged. ``Compression.fp16`` sends floating tensors as
    float16, in which values beyond 65,504 become infinite, and other tensors unchanged.
    """

    none = NoneCompressor
    fp16 = FP16Compressor


def compress_one(compression: type[Compressor], tensor: Any) -> tuple[Any, Any]:
    """Compress a tensor; raise ValueError if ``compression`` is not a compression."""
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression is Compression.none, .fp16 or a Compressor, not {compression!r}")
    return compression.compress(tensor)


def compress_all(compression: type[Compressor], tensors: Any) -> tuple[Any, list[Any]]:
    """Compress the list of a grouped call; pass anything else on to the call, which rejects it."""
    if not isinstance(tensors, (list, tuple)):
        return tensors, []
    pairs = [compress_one(compression, tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]


def decompress_all(compression: type[Compressor], outputs: list[Any], contexts: list[Any]) -> list[Any]:
    """Undo :func:`compress_all` on the results."""
    return [compression.decompress(out, ctx) for out, ctx in zip(outputs, contexts, strict=True)]
