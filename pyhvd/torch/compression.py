"""Compression for torch: that of :mod:`pyhvd.api.compression`, and bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from pyhvd.api import compression


class BF16Compressor(compression.Compressor):
    """Sends floats as bfloat16, which has float32's range and 8 bits of precision."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and its dtype."""
        if tensor.dtype in (torch.float32, torch.float64):
            return tensor.bfloat16(), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression(compression.Compression):
    """The built-in compressions: ``none``, the default, ``fp16`` and ``bf16``."""

    bf16 = BF16Compressor
