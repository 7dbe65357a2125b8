"""Unpickle objects with torch's tensors: those of a GPU come to this process's current one.

Each tensor is pickled with the number of its GPU, which on another rank belongs to someone else.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def load(data: Any) -> Any:
    """Return the object that cloudpickle has made these bytes of."""
    return Unpickler(io.BytesIO(data)).load()


class Unpickler(pickle.Unpickler):
    """Brings tensors of a GPU to this process's current one."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return load_storage
        return super().find_class(module, name)


def load_storage(data: bytes) -> Any:
    """Return the storage that torch has pickled, on this process's current GPU if it was on one."""
    # Not weights only: the bytes are of a peer, whose pickle is being loaded.
    return torch.load(io.BytesIO(data), map_location=_bring_here, weights_only=False)


def _bring_here(storage: Any, location: str) -> Any:
    """Return the storage, which is in host memory, on the device for a tensor of the given location."""
    if location.startswith("cuda") and torch.cuda.is_available():
        return storage.cuda(torch.cuda.current_device())
    return storage
