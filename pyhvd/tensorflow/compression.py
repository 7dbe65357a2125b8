"""Compression for TensorFlow, also in graphs: ``none``, ``fp16``, ``bf16``, or the user's own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pyhvd.api import compression


class _TensorFlowCast(compression.CastingCompressor):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another dtype."""
        return tf.cast(tensor, dtype)


class TensorFlowFP16Compressor(_TensorFlowCast):
    """Sends floats as float16. Values beyond 65,504 become infinite."""

    dtype = tf.float16


class TensorFlowBF16Compressor(_TensorFlowCast):
    """Sends floats as bfloat16, which has float32's range and 8 bits of precision."""

    dtype = tf.bfloat16


class Compression(compression.Compression):
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    fp16: Any = TensorFlowFP16Compressor
    bf16 = TensorFlowBF16Compressor
