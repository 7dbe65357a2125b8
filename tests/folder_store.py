"""A store of torch.distributed without torch: a folder with a file for each key."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path


class FolderStore:
    """The part of ``torch.distributed.Store`` that pyhvd calls."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self.timeout = timedelta(seconds=seconds)

    def set(self, key: str, value: str, /) -> None:
        """Set a value, at once for all readers."""
        path = self._path(key)
        new = path.with_suffix(f".{time.monotonic_ns()}")
        new.write_text(value)
        new.rename(path)

    def get(self, key: str, /) -> bytes:
        """Return a value."""
        self.wait([key])
        return self._path(key).read_bytes()

    def wait(self, keys: list[str], /) -> None:
        """Wait for values."""
        until = time.monotonic() + self.timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() >= until:
                raise RuntimeError(f"wait timeout, keys: {', '.join(keys)}")
            time.sleep(0.01)

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "%")
