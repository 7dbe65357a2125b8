"""Learning rates that follow the epoch: schedules, and the warm-up of large batches.

Source: P. Goyal et al., "Accurate, Large Minibatch SGD", 2017, https://arxiv.org/abs/1706.02677.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from pyhvd.api.topology import size
from pyhvd.keras.legacy import has_settable_rate, library

_Callback: Any = library().callbacks.Callback


class LearningRateScheduleCallback(_Callback):
    """Multiplies an initial learning rate by a factor that follows the epoch.

    Parameters
    ----------
    initial_lr : float or None
        None takes the optimizer's learning rate when training begins.
    multiplier : callable or float
        A function of the epoch; or a number, whose power with the exponent ``epoch - start_epoch`` is taken.
    start_epoch : int
        The first epoch in which the learning rate is set.
    end_epoch : int, optional
        The first epoch in which it is no longer set.
    staircase : bool
        Whether it is set once in an epoch; else at every batch, with a fractional epoch.
    momentum_correction : bool
        No effect: the momentum is a constant of the compiled step. An optimizer with momentum
        causes one warning.
    steps_per_epoch : int, optional
        Batches of an epoch, if Keras does not know them.

    Raises
    ------
    TypeError
        When training begins, the optimizer has a LearningRateSchedule, so that its rate cannot be set.
    ValueError
        When training begins, neither Keras nor `steps_per_epoch` tells the batches of an epoch.
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,  # noqa: FBT001, FBT002 - Horovod's
        momentum_correction: bool = True,  # noqa: FBT001, FBT002 - Horovod's
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = momentum_correction
        self.current_epoch = 0
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.staircase, self.multiplier = staircase, multiplier
        else:
            base = float(multiplier)
            self.staircase, self.multiplier = True, lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Check the optimizer, and take what the parameters leave open."""
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not has_settable_rate(inner):
            raise TypeError(
                f"{type(self).__name__}: the learning rate of {type(inner).__name__} cannot be set: give the"
                " optimizer a number as learning_rate, or leave out this callback"
            )
        if self.momentum_correction and getattr(inner, "momentum", None):
            warnings.warn(
                f"{type(self).__name__}: momentum_correction has no effect, as the momentum is a"
                " constant of the compiled step: pass momentum_correction=False",
                stacklevel=2,
            )
            self.momentum_correction = False
        if self.initial_lr is None:
            self.initial_lr = self._rate()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: Keras does not know the number of batches of an epoch: give"
                    " steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Set the learning rate of the batch."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Put the learning rate into ``logs`` as ``lr``."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _set(self, epoch: float) -> None:
        # On JAX the property `model` brings the state of the steps back into the variables first.
        assert self.initial_lr is not None
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` over the first epochs.

    Parameters
    ----------
    initial_lr : float or None
        The rate after the warm-up, usually that of one rank times ``size()``.
    warmup_epochs : int
        How many epochs it takes.
    momentum_correction, steps_per_epoch
        See :class:`LearningRateScheduleCallback`.
    verbose : int
        With 1, print the rate when the warm-up ends.
    """

    def __init__(
        self,
        initial_lr: float | None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,  # noqa: FBT001, FBT002 - Horovod's
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # So that the rate is round at the end of an epoch.
            reached = epoch + 1.0 / self.steps_per_epoch
            return 1.0 / size() * (reached * (size() - 1) / warmup_epochs + 1)

        ends = {"end_epoch": warmup_epochs, "staircase": False, "steps_per_epoch": steps_per_epoch}
        super().__init__(initial_lr, multiplier, momentum_correction=momentum_correction, **ends)  # type: ignore[arg-type]
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the learning rate into ``logs``; at the end of the warm-up print it if asked."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")
