"""``horovod.tensorflow.compression``."""

from pyhvd.api.compression import Compressor as Compressor, NoneCompressor as NoneCompressor
from pyhvd.tensorflow.compression import (
    Compression as Compression,
    TensorFlowFP16Compressor as FP16Compressor,
)

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
