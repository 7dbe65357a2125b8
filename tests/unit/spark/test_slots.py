"""The default number of ranks of run()."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pyhvd.spark.errors import SparkError, StartTimeoutError
from pyhvd.spark.slots import count_slots, require_slots, wait_for_slots


def test_the_first_executors_are_waited_for() -> None:
    counts = iter([0, 0, 6])
    assert wait_for_slots(lambda: next(counts), 30, dynamic=False) == 6
    with pytest.raises(StartTimeoutError, match=r"after 0\.01 s the cluster has no executor"):
        wait_for_slots(lambda: 0, 0.01, dynamic=False)


def test_with_dynamic_allocation_none_would_come() -> None:
    assert wait_for_slots(lambda: 2, 30, dynamic=True) == 2
    with pytest.raises(SparkError, match="set num_proc"):
        wait_for_slots(lambda: 0, 30, dynamic=True)


@pytest.mark.parametrize(
    ("master", "conf", "executors", "refused"),
    [
        ("local[4]", {}, 0, True),
        ("local", {"spark.executor.instances": "9"}, 0, True),
        ("spark://host:7077", {}, 2, True),
        ("spark://host:7077", {"spark.executor.instances": "3"}, 2, True),
        ("spark://host:7077", {"spark.dynamicAllocation.enabled": "true"}, 2, False),
        ("yarn", {"spark.executor.instances": "3"}, 2, False),
        ("yarn", {"spark.executor.instances": "2"}, 2, True),
        ("yarn", {}, 0, False),
        ("yarn", {}, 2, True),
    ],
)
def test_more_ranks_than_slots(
    master: str, conf: dict[str, str], executors: int, *, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyhvd.spark.slots.count_slots", lambda context: 4)
    tracker = SimpleNamespace(getExecutorInfos=lambda: [None] * (executors + 1))
    scala = SimpleNamespace(statusTracker=lambda: tracker)
    context: Any = SimpleNamespace(
        master=master, getConf=lambda: conf, _jsc=SimpleNamespace(sc=lambda: scala)
    )
    require_slots(context, 4, 0.0)
    if refused:
        with pytest.raises(SparkError, match="num_proc=5, and the cluster has 4 slots: set num_proc to 4"):
            require_slots(context, 5, 0.01)
    else:
        require_slots(context, 5, 0.01)


def test_executors_that_come_in_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([2, 2, 6])
    monkeypatch.setattr("pyhvd.spark.slots.count_slots", lambda context: next(counts))
    context: Any = SimpleNamespace(master="spark://host:7077", getConf=dict)
    require_slots(context, 6, 30.0)
    assert next(counts, None) is None


def test_a_spark_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Py4JError(Exception):
        pass

    def refuse() -> Any:
        raise Py4JError("resourceProfileManager does not exist in the JVM")

    protocol: Any = ModuleType("py4j.protocol")
    protocol.Py4JError = Py4JError
    monkeypatch.setitem(sys.modules, "py4j", ModuleType("py4j"))
    monkeypatch.setitem(sys.modules, "py4j.protocol", protocol)
    scala = SimpleNamespace(resourceProfileManager=refuse)
    context: Any = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala))
    with pytest.raises(
        SparkError, match=r"does not tell .*resourceProfileManager does not exist.*: set num_proc"
    ):
        count_slots(context)
