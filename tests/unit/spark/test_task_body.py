"""What ranks use of their Spark task: the part without Spark."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyhvd.spark.errors import SparkError
from pyhvd.spark.task_body import pack

REGISTRY: set[Any] = set()


class Broadcast:
    """Registers itself when it is pickled, as Spark's does."""

    def __init__(self, number: int) -> None:
        self._jbroadcast = SimpleNamespace(id=lambda: number)

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        REGISTRY.add(self)
        return int, (self._jbroadcast.id(),)


def context(**conf: str) -> Any:
    names = {name.replace("_", "."): value for name, value in conf.items()}
    return SimpleNamespace(_pickled_broadcast_vars=REGISTRY, getConf=lambda: names)


def test_a_call_is_packed_with_its_broadcast_variables_alone() -> None:
    other, own = Broadcast(1), Broadcast(2)
    REGISTRY.add(other)  # of another job of this thread
    code, found = pack(context(), (max, [own, 1], {"default": 0}), pickle.dumps)
    assert pickle.loads(code) == (max, (2, 1), {"default": 0})
    assert found == {2: own}
    assert {other} == REGISTRY
    with pytest.raises(ZeroDivisionError):
        pack(context(), (max, [own], {}), lambda call: pickle.dumps(call)[1 // 0 :])
    assert {other} == REGISTRY


def test_encrypted_broadcast_variables_are_refused_before_the_job_starts() -> None:
    encrypts = context(spark_io_encryption_enabled="true")
    with pytest.raises(SparkError, match="the function uses a broadcast variable, whose file Spark encrypts"):
        pack(encrypts, (max, [Broadcast(1)], {}), pickle.dumps)
    assert pack(encrypts, (max, [1], {}), pickle.dumps)[1] == {}


def test_pyspark_is_prepared_when_the_program_imports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyspark").mkdir()
    source = "class Accumulator: add = __iadd__ = None\nclass SparkFiles: pass\n_broadcastRegistry = {}\n"
    source += "class Broadcast:\n    def __init__(self, path): self.path = path\n"
    (tmp_path / "pyspark" / "__init__.py").write_text(source)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("_PYHVD_SPARK_TASK", '{"folder": "/files", "broadcasts": {"3": "/path"}}')
    pickle.loads(pack(context(), (max, [], {}), pickle.dumps)[0])
    assert "pyspark" not in sys.modules
    pyspark = __import__("pyspark")
    assert (pyspark.SparkFiles._root_directory, pyspark._broadcastRegistry[3].path) == ("/files", "/path")
    with pytest.raises(RuntimeError, match="a rank cannot add to an accumulator"):
        pyspark.Accumulator().add(1)
    monkeypatch.delitem(sys.modules, "pyspark")
