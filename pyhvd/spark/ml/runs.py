"""What a run keeps in the store: its checkpoint, and at its end the model.

Both hold pickles: who can write to the store can make those who read from it run any code.
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What training needs to go on after an epoch.

    Attributes
    ----------
    history : list of dict
        The measures of each epoch.
    state : object
        The train_fn's.
    """

    history: list[dict[str, float]]
    state: Any


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a store.

    Attributes
    ----------
    store : Store
        Driver and ranks reach it.
    id : str
        Names the run's folder.
    """

    store: Store
    id: str

    def data_path(self, kind: str) -> str:
        """Return the folder of the data that are prepared for this run alone."""
        return f"{self.store.get_run_path(self.id)}/data/{kind}"

    def model_path(self) -> str:
        """Return the folder of the trained model."""
        return f"{self.store.get_run_path(self.id)}/model"

    def remove_data(self) -> None:
        """Remove what was prepared for this run. Raises nothing: there is a model or an error already."""
        path = f"{self.store.get_run_path(self.id)}/data"
        try:
            self.store.remove(path)
        except Exception as exc:
            _log.warning("the prepared data in %s could not be removed: %s", path, exc)

    def checkpoint(self) -> Checkpoint | None:
        """Return what the run has kept last; None for a new one.

        Raises
        ------
        DataError
            It cannot be read.
        """
        path = self._checkpoint_path()
        if not self.store.exists(path):
            return None
        try:
            history, state = cloudpickle.loads(self.store.read(path))
        except Exception as exc:
            raise DataError(
                f"the checkpoint {path} cannot be read ({type(exc).__name__}: {exc}): remove it to begin"
                " anew, or choose another run_id"
            ) from exc
        return Checkpoint(history, state)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Take the place of the last checkpoint; at any time there is a whole one."""
        self.store.write(self._checkpoint_path(), cloudpickle.dumps((checkpoint.history, checkpoint.state)))

    def _checkpoint_path(self) -> str:
        return f"{self.store.get_checkpoint_path(self.id)}/{_CHECKPOINT}"
