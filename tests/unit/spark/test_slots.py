"""The default number of ranks of run()."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pyhvd.spark.errors import SparkError, StartTimeoutError
from pyhvd.spark.slots import count_slots, wait_for_slots


def test_the_first_executors_are_waited_for() -> None:
    counts = iter([0, 0, 6])
    assert wait_for_slots(lambda: next(counts), 30, dynamic=False) == 6
    with pytest.raises(StartTimeoutError, match=r"after 0\.01 s the cluster has no executor"):
        wait_for_slots(lambda: 0, 0.01, dynamic=False)


def test_with_dynamic_allocation_none_would_come() -> None:
    assert wait_for_slots(lambda: 2, 30, dynamic=True) == 2
    with pytest.raises(SparkError, match="set num_proc"):
        wait_for_slots(lambda: 0, 30, dynamic=True)


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
