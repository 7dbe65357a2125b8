"""The files of a run in the store: its data, its checkpoint, and its model.

Checkpoint and model contain pickles: writers of the store can make its readers run any code.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import cloudpickle

from pyhvd.spark.data.store import Store
from pyhvd.spark.errors import DataError

_log = logging.getLogger("pyhvd")

_CHECKPOINT = "last.pkl"


History = list[dict[str, float]]
"""The measures of each epoch."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a store; its id names the run's folder."""

    store: Store
    id: str

    def data_path(self, kind: str) -> str:
        """Return the folder of data that were prepared for this run alone."""
        return f"{self.store.get_run_path(self.id)}/data/{kind}"

    def model_path(self) -> str:
        """Return the folder of the trained model."""
        return f"{self.store.get_run_path(self.id)}/model"

    def remove_data(self) -> None:
        """Remove this run's prepared data. Raise nothing: there is a model or an error already."""
        path = f"{self.store.get_run_path(self.id)}/data"
        try:
            self.store.remove(path)
        except Exception as exc:
            _log.warning("the prepared data in %s could not be removed: %s", path, exc)

    def checkpoint(self) -> tuple[History, Any]:
        """Return the run's history, and the train_fn's state from which training continues.

        A new run has an empty history, and None for a state.

        Raises
        ------
        DataError
            The checkpoint cannot be read.
        """
        path = self._checkpoint_path()
        if not self.store.exists(path):
            return [], None
        try:
            history, state = cloudpickle.loads(self.store.read(path))
        except Exception as exc:
            raise DataError(
                f"the checkpoint {path} cannot be read ({type(exc).__name__}: {exc}): remove it to start"
                " again, or choose another run_id"
            ) from exc
        return history, state

    def save(self, history: History, state: Any) -> None:
        """Replace the last checkpoint, atomically."""
        self.store.write(self._checkpoint_path(), cloudpickle.dumps((history, state)))

    def _checkpoint_path(self) -> str:
        return f"{self.store.get_checkpoint_path(self.id)}/{_CHECKPOINT}"
