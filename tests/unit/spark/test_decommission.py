"""Which executors Spark decommissions, as its scheduler tells; and a scheduler that does not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pyhvd.spark.decommission import DecommissionWatch
from pyhvd.spark.task_body import is_on
from tests.waiting import wait_until


@dataclass
class Option:
    value: str | None

    def isDefined(self) -> bool:  # noqa: N802 - Scala's names
        return self.value is not None

    def get(self) -> str | None:
        return self.value


class Scheduler:
    """Has two executors, of two tasks each."""

    def __init__(self) -> None:
        self.executors = {4: "0", 5: "0", 6: "1"}
        self.leaving = {"0"}
        self.questions = 0
        self.fails = False

    def taskIdToExecutorId(self) -> Scheduler:  # noqa: N802
        return self

    def get(self, task: int) -> Option:
        return Option(self.executors.get(task))

    def isExecutorDecommissioned(self, executor: str) -> bool:  # noqa: N802
        self.questions += 1
        if self.fails:
            raise RuntimeError("Spark is gone")
        return executor in self.leaving


@pytest.fixture
def made() -> Iterator[tuple[DecommissionWatch, Scheduler]]:
    scheduler = Scheduler()
    with contextlib.closing(DecommissionWatch(lambda: scheduler, 0.01)) as watch:
        yield watch, scheduler


def test_tasks_of_decommissioned_executors_are_found(made: tuple[DecommissionWatch, Scheduler]) -> None:
    watch, scheduler = made
    watch.tasks = {"one": 4, "two": 5, "other": 6, "unknown": 7}
    wait_until(lambda: watch.leaving == {"one", "two"})
    scheduler.executors[7] = "1"
    scheduler.leaving.add("1")
    wait_until(lambda: watch.leaving == {"one", "two", "other", "unknown"})
    watch.tasks = {"two": 5}
    wait_until(lambda: watch.leaving == {"two"})


def test_a_scheduler_that_does_not_tell_is_said_once(
    made: tuple[DecommissionWatch, Scheduler], caplog: pytest.LogCaptureFixture
) -> None:
    watch, scheduler = made
    scheduler.fails = True
    with caplog.at_level(logging.DEBUG, "pyhvd"):
        watch.tasks = {"one": 4}
        wait_until(lambda: scheduler.questions > 2)
    assert caplog.messages == ["Spark does not tell which executors it decommissions: Spark is gone"]
    assert watch.leaving == frozenset()
    scheduler.fails = False
    wait_until(lambda: watch.leaving == {"one"})


@pytest.mark.parametrize(
    ("conf", "may"),
    [
        ({}, False),
        ({"spark.decommission.enabled": "True"}, True),
        ({"spark.decommission.enabled": "0"}, False),
    ],
)
def test_spark_decommissions_only_if_its_settings_say_so(conf: dict[str, str], may: bool) -> None:
    assert is_on(conf, "spark.decommission.enabled") is may
