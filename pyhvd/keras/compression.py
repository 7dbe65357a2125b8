"""Compression for Keras with any backend, in compiled steps too: ``none``, ``fp16`` and ``bf16``."""

from __future__ import annotations

from typing import Any

import keras

from pyhvd.api import compression


class _KerasCast(compression.CastingCompressor):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another dtype."""
        return keras.ops.cast(tensor, keras.backend.standardize_dtype(dtype))


class KerasFP16Compressor(_KerasCast):
    """Sends floats as float16. Values beyond 65,504 become infinite."""

    dtype = "float16"


class KerasBF16Compressor(_KerasCast):
    """Sends floats as bfloat16, which has float32's range and 8 bits of precision."""

    dtype = "bfloat16"


class Compression(compression.Compression):
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    fp16: Any = KerasFP16Compressor
    bf16 = KerasBF16Compressor
