"""What ranks call in the tests of pyhvd.ray."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import pyhvd as hvd


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def add_up() -> tuple[bool, int]:
    """Return whether an earlier call has called init(), and a sum over the ranks."""
    was_up = hvd.is_initialized()
    hvd.init()
    return was_up, int(hvd.allreduce(np.array(hvd.rank() + 1), op=hvd.Sum))


def fail_on(failing: int) -> None:
    if rank() == failing:
        raise KeyError("lost")
    time.sleep(1000)


def variable(name: str) -> str | None:
    return os.environ.get(name)


class Counter:
    """An executable with state."""

    def __init__(self, first: int, step: int = 1) -> None:
        self.value = first
        self.step = step

    def count(self) -> int:
        self.value += self.step
        return self.value


class Broken:
    """An executable that cannot be made on rank 1."""

    def __init__(self) -> None:
        if rank() == 1:
            raise ValueError("no such file")


def log_values(count: int) -> Any:
    from pyhvd.ray import ray_logger

    for number in range(count):
        ray_logger.log({"rank": rank(), "number": number})
    return rank()


def follow(folder: str) -> int:
    """Take steps until there is a file "end"; rank 0 writes down generation and size of each step."""
    hvd.init()

    @hvd.elastic.run
    def go(state: Any) -> None:
        ended = np.zeros(1)
        while not ended:
            state.step += 1
            ended = hvd.allreduce(np.array([float((Path(folder) / "end").exists())]), op=hvd.Max, name="end")
            if hvd.rank() == 0:
                with (Path(folder) / "steps").open("a") as file:
                    file.write(f"{hvd.elastic.generation()} {hvd.size()}\n")
            time.sleep(0.02)  # a step's work
            state.commit()

    go(hvd.elastic.ObjectState(step=0))
    return hvd.size()
