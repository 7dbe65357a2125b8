"""``horovod.tensorflow.sync_batch_norm``."""

import importlib


def __getattr__(name: str) -> object:
    """Return SyncBatchNormalization, a layer of Keras, which is imported when it is asked for."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("pyhvd.keras").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
