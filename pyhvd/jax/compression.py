"""Compression for JAX, in compiled functions too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pyhvd.api import compression


class _CastingCompressor(compression.Compressor):
    """Sends float32 and float64 as another dtype, other arrays unchanged."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the array to send, and its dtype."""
        if tensor.dtype in (jnp.float32, jnp.float64):
            return tensor.astype(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the array in its own dtype again."""
        return tensor if ctx is None else tensor.astype(ctx)


class JaxFP16Compressor(_CastingCompressor):
    """Sends floats as float16. Values beyond 65,504 become infinite."""

    dtype = jnp.float16


class JaxBF16Compressor(_CastingCompressor):
    """Sends floats as bfloat16, which has float32's range and 8 bits of precision."""

    dtype = jnp.bfloat16


class Compression(compression.Compression):
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    fp16: Any = JaxFP16Compressor
    bf16 = JaxBF16Compressor
