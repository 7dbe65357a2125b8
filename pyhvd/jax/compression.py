"""Compression for JAX, in compiled functions too: ``none``, ``fp16``, ``bf16``, or the user's own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pyhvd.api import compression


class _JaxCast(compression.CastingCompressor):
    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another dtype."""
        return tensor.astype(dtype)


class JaxFP16Compressor(_JaxCast):
    """Sends floats as float16. Values beyond 65,504 become infinite."""

    dtype = jnp.float16


class JaxBF16Compressor(_JaxCast):
    """Sends floats as bfloat16, which has float32's range and 8 bits of precision."""

    dtype = jnp.bfloat16


class Compression(compression.Compression):
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    fp16: Any = JaxFP16Compressor
    bf16 = JaxBF16Compressor
