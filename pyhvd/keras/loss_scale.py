"""Loss scaling on which ranks agree.

Keras's LossScaleOptimizer applies gradients if its own are finite. Ranks that decide by themselves would skip
different steps, and the others would wait for them.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

_MARK = "_pyhvd_agrees"


def let_ranks_agree() -> None:
    """Replace ``LossScaleOptimizer.check_finite`` once: around a distributed optimizer it asks all ranks.

    Raises
    ------
    RuntimeError
        This version of Keras has no such method.
    """
    kind = keras.optimizers.LossScaleOptimizer
    own = getattr(kind, "check_finite", None)
    if own is None:
        raise RuntimeError(
            f"Keras {keras.__version__} has no LossScaleOptimizer.check_finite(), which pyhvd replaces so"
            " that ranks skip the same steps: use Keras 3.5 or later"
        )
    if hasattr(own, _MARK):
        return

    @functools.wraps(own)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = own(self, grads)
        reduction = getattr(self.inner_optimizer, "_reduction", None)
        return finite if reduction is None else reduction.agree_on(finite)

    setattr(check_finite, _MARK, True)
    kind.check_finite = check_finite
