"""Compression for torch: that of :mod:`pyhvd.api.compression`, and bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from pyhvd.api import compression


class BF16Compressor(compression.CastingCompressor):
    """Sends floats as bfloat16, which has float32's range and 8 bits of precision."""

    dtype = torch.bfloat16

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another dtype."""
        return tensor.to(dtype)


class Compression(compression.Compression):
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    bf16 = BF16Compressor
