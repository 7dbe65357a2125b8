"""Checkpoints of the best model, written by one rank."""

from __future__ import annotations

from typing import Any

from pyhvd.api.topology import rank
from pyhvd.keras.legacy import library

_ModelCheckpoint: Any = library().callbacks.ModelCheckpoint


class BestModelCheckpoint(_ModelCheckpoint):
    """A ModelCheckpoint that keeps the best model, and writes on rank 0 alone.

    Parameters
    ----------
    monitor, verbose, save_weights_only, mode, save_freq
        As in ``keras.callbacks.ModelCheckpoint``. Give it after MetricAverageCallback, which averages what
        is monitored.
    filepath : str or path, optional
        Where to write; it may be set later, as ``callback.filepath``, but before training.

    Raises
    ------
    ValueError
        When training begins, there is no path; or the path's ending does not fit.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,  # noqa: FBT001, FBT002 - Horovod's
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        unset = "unset.weights.h5" if save_weights_only else "unset.keras"  # Keras requires a path
        super().__init__(
            unset if filepath is None else str(filepath),
            monitor,
            verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None if filepath is None else self.filepath

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the path."""
        endings = (".weights.h5",) if self.save_weights_only else (".keras", ".h5")
        if self.filepath is None or not str(self.filepath).endswith(endings):
            raise ValueError(
                f"BestModelCheckpoint: filepath={self.filepath!r}: give a path that ends with"
                f" {' or '.join(endings)}, as BestModelCheckpoint(filepath=...) or callback.filepath"
            )
        self.filepath = str(self.filepath)
        super().on_train_begin(logs)

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        """Write on rank 0 alone; Keras calls this for each epoch or number of batches."""
        if rank() == 0:
            super()._save_model(*args, **kwargs)
