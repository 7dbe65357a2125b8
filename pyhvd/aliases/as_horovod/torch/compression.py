"""``horovod.torch.compression``."""

from pyhvd.api.compression import (
    Compressor as Compressor,
    FP16Compressor as FP16Compressor,
    NoneCompressor as NoneCompressor,
)
from pyhvd.torch.compression import Compression as Compression
