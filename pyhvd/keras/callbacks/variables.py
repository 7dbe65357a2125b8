"""Equal weights at the start of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyhvd.keras.backend import door
from pyhvd.keras.functions import broadcast_variables
from pyhvd.keras.legacy import build_optimizer, library, optimizer_variables

_Callback: Any = library().callbacks.Callback

_SEEDS = "seed_generator_state"


class BroadcastGlobalVariablesCallback(_Callback):
    """Assigns the root's variables of model and optimizer to all ranks, before the first step.

    A model that is built only by its first batch gets them after that batch. The learning rate and the states
    of seed generators stay each rank's own. It also ends ``fit()`` after a step whose collective has failed.

    Parameters
    ----------
    root_rank : int
        A global rank.
    device : str
        No effect.
    local_variables : iterable of keras.Variable, optional
        Variables that stay each rank's own.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",  # noqa: ARG002 - Horovod's
        local_variables: Iterable[Any] | None = None,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = {id(each) for each in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Let a variable stay each rank's own."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Broadcast the variables if the model has them."""
        model = self.model
        if self.broadcast_done or not model.built:
            return
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            build_optimizer(optimizer, model.trainable_variables)
        self._broadcast(model, optimizer)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Broadcast the variables of a model that the first batch has built."""
        door().check_logs(logs)
        if not self.broadcast_done:
            model = self.model
            self._broadcast(model, getattr(model, "optimizer", None))

    def _broadcast(self, model: Any, optimizer: Any) -> None:
        variables = [each for each in model.weights if not getattr(each, "path", each.name).endswith(_SEEDS)]
        variables += [] if optimizer is None else optimizer_variables(optimizer)
        rates = {id(getattr(each, "_learning_rate", None)) for each in _with_inner(optimizer)}
        chosen = [each for each in variables if id(each) not in self._local | rates]
        broadcast_variables(chosen, self.root_rank)
        self.broadcast_done = True


def _with_inner(optimizer: Any) -> list[Any]:
    """Return an optimizer, and those inside of it."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]
    return [optimizer, *(deeper for each in inner if each is not None for deeper in _with_inner(each))]
