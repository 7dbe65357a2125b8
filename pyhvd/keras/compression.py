"""Compression for Keras: casts tensors of any backend, in compiled steps too."""

from __future__ import annotations

from typing import Any

import keras

from pyhvd.api import compression

_WIDE = ("float32", "float64")


def _cast(tensor: Any, dtype: str) -> tuple[Any, Any]:
    """Return the tensor in a narrower dtype, and its own dtype; None if the tensor stays as it is."""
    own = keras.backend.standardize_dtype(tensor.dtype)
    return (keras.ops.cast(tensor, dtype), own) if own in _WIDE else (tensor, None)


class CastToFP16(compression.FP16Compressor):
    """Sends float32 and float64 as float16. Values beyond 65,504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and its dtype."""
        return _cast(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class CastToBF16(CastToFP16):
    """Sends float32 and float64 as bfloat16, which has float32's range and 8 bits of precision."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and its dtype."""
        return _cast(tensor, "bfloat16")


class Compression(compression.Compression):
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    fp16 = CastToFP16
    bf16 = CastToBF16
