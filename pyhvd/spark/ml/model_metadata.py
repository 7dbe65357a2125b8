"""What a saved model says of itself, and how that is written."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pyhvd.spark.data.manifest import Column


class Description(msgspec.Struct, frozen=True):
    """What a saved model says of itself.

    Attributes
    ----------
    features : tuple of Column
        What it was trained on.
    outputs : tuple of Column
        What it returns.
    output_cols : tuple of str
        The names of the outputs' columns.
    batch_size : int
        Rows for which it is called at once.
    history : list of dict
        The measures of each epoch.
    run_id : str
        The run that trained it.
    version : int
        Of the format.
    """

    features: tuple[Column, ...]
    outputs: tuple[Column, ...]
    output_cols: tuple[str, ...]
    batch_size: int
    history: list[dict[str, float]]
    run_id: str
    version: int = 1

    def encode(self) -> bytes:
        """Return it as JSON, which has no nan and inf: those are strings there."""
        said = msgspec.to_builtins(self)
        said["history"] = [
            {name: value if math.isfinite(value) else str(value) for name, value in epoch.items()}
            for epoch in self.history
        ]
        return msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """Return what :meth:`encode` has written, now or in its older forms.

        In those a measure that was nan or inf is null; and so may be the whole history.

        Raises
        ------
        msgspec.DecodeError
            It is damaged.
        """
        said = msgspec.json.decode(data)
        if isinstance(said, dict) and "history" in said:
            said["history"] = _without_null(said["history"])
        return msgspec.convert(said, cls, strict=False)  # strings may be numbers: "nan"


def _without_null(history: Any) -> Any:
    """Return a history as it is written now; what is none is left to be refused."""
    if history is None:
        return []
    if not isinstance(history, list) or not all(isinstance(epoch, dict) for epoch in history):
        return history
    return [{name: "nan" if value is None else value for name, value in epoch.items()} for epoch in history]
