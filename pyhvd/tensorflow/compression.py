"""Compression for TensorFlow, also in graphs: ``none``, ``fp16``, ``bf16``, or the user's own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pyhvd.api.compression import Compressor, NoneCompressor

_WIDE = (tf.float32, tf.float64)


class Float16Cast(Compressor):
    """Sends float32 and float64 as float16, others unchanged. Values beyond 65,504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and its dtype; None as dtype if it is sent unchanged."""
        return _narrowed(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        return _widened(tensor, ctx)


class BFloat16Cast(Compressor):
    """Sends float32 and float64 as bfloat16, which has float32's range and 8 bits of precision."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and its dtype; None as dtype if it is sent unchanged."""
        return _narrowed(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        return _widened(tensor, ctx)


class Compression:
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    none = NoneCompressor
    fp16 = Float16Cast
    bf16 = BFloat16Cast


def _narrowed(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    return (tf.cast(tensor, dtype), tensor.dtype) if tensor.dtype in _WIDE else (tensor, None)


def _widened(tensor: Any, ctx: Any) -> Any:
    return tensor if ctx is None else tf.cast(tensor, ctx)
