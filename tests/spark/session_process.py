"""``python -m tests.spark.session_process DESCRIPTOR``: a Spark session that runs what a test asks for."""

from __future__ import annotations

import faulthandler
import io
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.spark.session import START_S, Answer


def _answer(function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Answer:
    import pyhvd.spark

    answer, out = Answer(), io.StringIO()
    try:
        run = pyhvd.spark.run_elastic if options.pop("elastic", False) else pyhvd.spark.run
        answer.results = run(function, args, stdout=out, **options)
    except BaseException as exc:
        answer.error, answer.text = type(exc).__name__, str(exc)
        answer.cause = str(exc.__cause__)
        answer.missing = getattr(exc, "missing", [])
    answer.when = time.monotonic()
    answer.output = out.getvalue()
    return answer


def main(descriptor: int) -> None:
    """Make the requested session, and run the requested functions until the socket closes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    from pyspark.sql import SparkSession

    connection: Connection[Any, Any] = Connection(descriptor)
    master, slots, conf = connection.recv()
    builder = SparkSession.builder.master(master).appName("pyhvd tests")
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    until = time.monotonic() + START_S
    while session.sparkContext.defaultParallelism < slots and time.monotonic() < until:
        time.sleep(0.1)
    connection.send(session.sparkContext.defaultParallelism)
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            break
        connection.send(_answer(*asked))
    session.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]))
