"""The metadata of a saved model, and its JSON."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pyhvd.spark.data.manifest import Column


class ModelDescription(msgspec.Struct, frozen=True):
    """The metadata of a saved model; its features are the columns that it was trained on."""

    features: tuple[Column, ...]
    outputs: tuple[Column, ...]
    output_cols: tuple[str, ...]
    batch_size: int
    history: list[dict[str, float]]
    run_id: str
    version: int = 1
    uid: str = ""

    def encode(self) -> bytes:
        """Return the metadata as JSON; nan and inf, which JSON lacks, become strings."""
        fields = msgspec.to_builtins(self)
        fields["history"] = [
            {name: value if math.isfinite(value) else str(value) for name, value in epoch.items()}
            for epoch in self.history
        ]
        return msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> ModelDescription:
        """Return the metadata that :meth:`encode` wrote, in this form or an older one.

        In older forms, a measure that was nan or inf is null, and the whole history may be null.

        Raises
        ------
        msgspec.DecodeError
            The data are damaged.
        """
        fields = msgspec.json.decode(data)
        if isinstance(fields, dict) and "history" in fields:
            fields["history"] = _without_null(fields["history"])
        return msgspec.convert(fields, cls, strict=False)  # strings may be numbers: "nan"


def _without_null(history: Any) -> Any:
    """Return a history in the present form; leave an invalid one for the caller to refuse."""
    if history is None:
        return []
    if not isinstance(history, list) or not all(isinstance(epoch, dict) for epoch in history):
        return history
    return [{name: "nan" if value is None else value for name, value in epoch.items()} for epoch in history]
