"""What ranks decide together at an epoch's end: averaged metrics, and whether training stops."""

from __future__ import annotations

import numbers
from typing import Any

import keras
import numpy as np

from pyhvd.api import collectives
from pyhvd.api.collectives import Max
from pyhvd.api.objects import allgather_object
from pyhvd.api.process_sets import global_process_set
from pyhvd.api.topology import rank
from pyhvd.common.text import describe_values
from pyhvd.errors import MismatchError
from pyhvd.keras.legacy import library

_Callback: Any = library().callbacks.Callback
_NAME = "keras.metrics"


class MetricAverageCallback(_Callback):
    """Averages the metrics of all ranks at the end of each epoch, in place.

    So give it before the callbacks that read metrics. Values of ``logs`` that are no numbers stay.

    Parameters
    ----------
    device : str
        No effect.
    weights : bool
        Whether a rank counts by its number of samples, as Keras's loss has counted them: those of training,
        and for ``val_`` metrics those of validation.

    Raises
    ------
    MismatchError
        At an epoch's end: a rank lacks a metric, such as ``val_loss``; the text names rank and metric.
    """

    def __init__(self, device: str = "", *, weights: bool = False) -> None:  # noqa: ARG002 - Horovod's
        super().__init__()
        self._is_weighted = weights
        self._trained: float | None = None  # samples of the epoch, kept before a validation counts anew

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Forget the samples of the epoch before."""
        self._trained = None

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Keep the number of samples that were trained."""
        if self._is_weighted and self._trained is None:
            self._trained = self._samples()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Replace the numbers in ``logs`` by the averages of all ranks."""
        if logs is None or (global_process_set.size() or 1) == 1:
            return
        own = {name: float(value) for name, value in sorted(logs.items()) if _is_number(value)}
        gathered = allgather_object((rank(), own, self._own_weights()), name=f"{_NAME}: average")
        _check_names({number: metrics for number, metrics, _ in gathered})
        for name in own:
            values = [metrics[name] for _, metrics, _ in gathered]
            weights = [each[name.startswith("val_")] for _, _, each in gathered]
            logs[name] = float(np.average(values, weights=weights))

    def _own_weights(self) -> tuple[float, float]:
        if not self._is_weighted:
            return 1.0, 1.0
        now = self._samples()
        return (now if self._trained is None else self._trained), now

    def _samples(self) -> float:
        count = getattr(getattr(self.model, "_loss_tracker", None), "count", None)
        samples = 0.0 if count is None else float(keras.ops.convert_to_numpy(count))
        if not samples:
            raise ValueError(
                "MetricAverageCallback(weights=True): the model counts no samples by Keras's loss, as with a"
                " train_step of its own: leave out weights"
            )
        return samples


class StopTogetherCallback(_Callback):
    """Stops training on all ranks at the end of the epoch in which one rank has set ``stop_training``.

    Give it after the callbacks that may stop training.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Let ranks agree whether to stop."""
        own = np.array([self.model.stop_training], np.int32)
        self.model.stop_training = bool(collectives.allreduce(own, name=f"{_NAME}: stop", op=Max)[0])


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return is_number and not isinstance(value, bool)


def _check_names(by_rank: dict[int, dict[str, float]]) -> None:
    """Raise MismatchError if a rank lacks metrics that another has."""
    texts = {number: ", ".join(metrics) or "none" for number, metrics in by_rank.items()}
    if len(set(texts.values())) > 1:
        raise MismatchError(
            f"MetricAverageCallback: the ranks have different metrics: {describe_values(texts)}: give fit()"
            " validation data on every rank or on none, and the same metrics",
            _NAME,
        )
