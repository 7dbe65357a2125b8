"""What ranks run in the Ray benchmark. Functions import on use: imports are part of the start."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

_STEPS = 20


def add_up() -> float:
    """Return the sum of ones over the ranks."""
    import numpy as np

    import pyhvd as hvd

    hvd.init()
    return float(hvd.allreduce(np.ones(1), name="ones", op=hvd.Sum)[0])


def lose_a_rank() -> float:
    """Kill the last rank between two steps; return the seconds from then to the end of the next step."""
    import numpy as np

    import pyhvd as hvd

    hvd.init()

    @hvd.elastic.run
    def go(state: Any) -> float:
        while state.step < 2 * _STEPS:
            if state.step == _STEPS and not hvd.elastic.generation() and hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(np.ones(1), name="ones")
            if hvd.elastic.generation() and not state.restart_s:
                state.restart_s = time.time() - state.lost_at
            state.step += 1
            state.lost_at = time.time()
            state.commit()
        return float(state.restart_s)

    result: float = go(hvd.elastic.ObjectState(step=0, lost_at=0.0, restart_s=0.0))
    return result
