"""Callbacks for ``fit()``: equal weights at the start, averaged metrics, learning rates, checkpoints."""

from pyhvd.keras.callbacks.checkpoint import BestModelCheckpoint as BestModelCheckpoint
from pyhvd.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
)
from pyhvd.keras.callbacks.metrics import (
    MetricAverageCallback as MetricAverageCallback,
    StopTogetherCallback as StopTogetherCallback,
)
from pyhvd.keras.callbacks.variables import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
)
