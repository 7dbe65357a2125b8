"""Metrics for Prometheus: the table of what is told, and the endpoint that tells it.

Owns: :data:`FAMILIES`, and :class:`Endpoint`, which serves a rank's metrics while its context lives. The text
is made when it is asked for, by prometheus-client (the extra ``metrics``), in a thread of that library's.
Knows nothing of how things are counted: it reads snapshots.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhvd import __version__
from pyhvd.errors import ConfigError
from pyhvd.observe.endpoint_files import RankFile, write_file
from pyhvd.observe.metrics import Histogram, Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_log = logging.getLogger("pyhvd")

Values = Iterable[tuple[tuple[str, ...], "float | Histogram"]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric; its samples have the label ``rank`` besides its own."""

    name: str
    kind: str
    labels: tuple[str, ...]
    doc: str
    read: Callable[[Metrics], Values]


def _one(read: Callable[[Metrics], float | Histogram]) -> Callable[[Metrics], Values]:
    return lambda metrics: [((), read(metrics))]


def _nested(read: Callable[[Metrics], dict[str, dict[str, int]]]) -> Callable[[Metrics], Values]:
    return lambda metrics: [
        ((verb, lane), n) for verb, lanes in read(metrics).items() for lane, n in lanes.items()
    ]


def _flat(read: Callable[[Metrics], dict[str, int]]) -> Callable[[Metrics], Values]:
    return lambda metrics: [((key,), n) for key, n in read(metrics).items()]


def _by_rank(read: Callable[[Metrics], tuple[float, ...]]) -> Callable[[Metrics], Values]:
    return lambda metrics: [((str(rank),), n) for rank, n in enumerate(read(metrics))]


FAMILIES = (
    Family(
        "pyhvd_tensors_total",
        "counter",
        ("verb", "lane"),
        "Tensors that were carried out",
        _nested(lambda m: m.tensors),
    ),
    Family(
        "pyhvd_bytes_total",
        "counter",
        ("verb", "lane"),
        "Bytes of those tensors, as this rank gave them",
        _nested(lambda m: m.bytes),
    ),
    Family(
        "pyhvd_responses_total",
        "counter",
        ("lane",),
        "Responses: one or several tensors that rode together",
        _flat(lambda m: m.responses),
    ),
    Family(
        "pyhvd_response_tensors",
        "histogram",
        (),
        "Tensors fused into one response",
        _one(lambda m: m.response_tensors),
    ),
    Family(
        "pyhvd_response_bytes",
        "histogram",
        (),
        "Bytes fused into one response",
        _one(lambda m: m.response_bytes),
    ),
    Family(
        "pyhvd_cache_hits_total",
        "counter",
        (),
        "Submitted tensors that the response cache knew",
        _one(lambda m: m.cache_hits),
    ),
    Family(
        "pyhvd_cache_misses_total",
        "counter",
        (),
        "Submitted tensors that the response cache did not know",
        _one(lambda m: m.cache_misses),
    ),
    Family(
        "pyhvd_negotiation_seconds",
        "histogram",
        (),
        "Per tensor: from when this rank told the others until all had submitted it",
        _one(lambda m: m.negotiation_seconds),
    ),
    Family(
        "pyhvd_execution_seconds",
        "histogram",
        (),
        "Per response: from when all had submitted it until the results were there",
        _one(lambda m: m.execution_seconds),
    ),
    Family(
        "pyhvd_wait_seconds",
        "histogram",
        (),
        "Per wait: how long the program waited for a handle that was not ready",
        _one(lambda m: m.wait_seconds),
    ),
    Family(
        "pyhvd_late_tensors_total",
        "counter",
        ("late_rank",),
        "Tensors that a rank was the last to submit (rank 0 tells)",
        _by_rank(lambda m: m.late_tensors),
    ),
    Family(
        "pyhvd_awaited_seconds_total",
        "counter",
        ("late_rank",),
        "How long others waited for a rank, and for nobody else (rank 0 tells)",
        _by_rank(lambda m: m.awaited_seconds),
    ),
    Family(
        "pyhvd_errors_total",
        "counter",
        ("kind",),
        "Tensors that ended in an error, by its class; refused: calls that were wrong on this rank",
        _flat(lambda m: m.errors),
    ),
    Family(
        "pyhvd_stall_warnings_total",
        "counter",
        (),
        "Reports of stalled tensors (rank 0 tells)",
        _one(lambda m: m.stall_warnings),
    ),
    Family(
        "pyhvd_stalled_tensors",
        "gauge",
        (),
        "Tensors that were overdue at the last look (rank 0 tells)",
        _one(lambda m: m.stalled_tensors),
    ),
    Family("pyhvd_uptime_seconds", "gauge", (), "Since init()", _one(lambda m: m.seconds)),
)
INFO = Family(
    "pyhvd_info",
    "gauge",
    ("size", "job", "host", "pid", "version"),
    "1, with what does not change as labels",
    lambda _: (),
)


def collect(metrics: Metrics, job: str) -> Iterator[Metric]:
    """Yield a snapshot as prometheus-client's metrics."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    make: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    rank = str(metrics.rank)
    for family in FAMILIES:
        made = make[family.kind](family.name, family.doc, labels=("rank", *family.labels))
        for labels, value in family.read(metrics):
            if isinstance(value, Histogram):
                made.add_metric((rank, *labels), _buckets(value), value.sum)
            else:
                made.add_metric((rank, *labels), value)
        yield made
    info = GaugeMetricFamily(INFO.name, INFO.doc, labels=("rank", *INFO.labels))
    what = (str(metrics.size), job, socket.gethostname(), str(os.getpid()), __version__)
    info.add_metric((rank, *what), 1)
    yield info


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = (*histogram.bounds, math.inf)
    below = itertools.accumulate(histogram.counts)
    return [("+Inf" if math.isinf(b) else repr(b), n) for b, n in zip(bounds, below, strict=True)]


_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Endpoint:
    """Serves one rank's metrics over HTTP, from now until :meth:`close`.

    Parameters
    ----------
    port : int
        Plus ``local_rank`` the port; 0 for any that is free.
    address : str
        To listen on.
    local_rank : int
        So that the ranks of a host do not get in each other's way.

    Raises
    ------
    ImportError
        prometheus-client is not installed.
    ConfigError
        The port cannot be had, or the address is none of this host's.
    """

    def __init__(self, port: int, address: str, local_rank: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as exc:
            raise ImportError(
                "PYHVD_METRICS_PORT needs prometheus-client, which is not installed:"
                ' pip install "pyhvd[metrics]"'
            ) from exc
        self._registry = CollectorRegistry(auto_describe=False)
        self._path: Path | None = None
        self._pid = os.getpid()
        wanted = port + local_rank if port else 0
        if wanted >= 1 << 16:
            raise ConfigError(f"PYHVD_METRICS_PORT={port}: with local rank {local_rank} that is past 65535")
        try:
            self._server, self._thread = start_http_server(wanted, address, self._registry)
        except (OSError, UnicodeError) as exc:
            # UnicodeError: no name of a host can look like that.
            if not isinstance(exc, OSError) or isinstance(exc, socket.gaierror) or exc.errno in _NOT_HERE:
                why = exc.strerror if isinstance(exc, OSError) else exc
                raise ConfigError(
                    f"PYHVD_METRICS_ADDRESS={address!r}: no address of this host: {why}"
                ) from exc
            raise ConfigError(
                f"PYHVD_METRICS_PORT={port}: local rank {local_rank} cannot serve metrics on"
                f" {address}:{wanted}: {exc.strerror}; choose another port, or 0 for any free one"
            ) from exc
        self.address = address
        self.port = self._server.server_port

    def serve(self, snapshot: Callable[[], Metrics], job: str) -> None:
        """Tell from now on what ``snapshot()`` returns; let ``python -m pyhvd top`` find it."""
        first = snapshot()
        self._registry.register(_Collector(snapshot, job))
        _log.info("metrics of rank %d at http://%s:%d/metrics", first.rank, self.address, self.port)
        try:
            self._path = write_file(
                RankFile(job, first.rank, first.size, os.getpid(), self.address, self.port)
            )
        except OSError as exc:
            _log.warning("python -m pyhvd top will not find rank %d by itself: %s", first.rank, exc)

    def close(self) -> None:
        """Serve no longer; takes up to half a second, as the server looks for its end that often.

        In a fork of the process it does nothing: server and file are the parent's.
        """
        if os.getpid() != self._pid:
            return
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """What prometheus-client asks at each scrape."""

    def __init__(self, snapshot: Callable[[], Metrics], job: str) -> None:
        self._snapshot = snapshot
        self._job = job

    def collect(self) -> Iterator[Metric]:
        return collect(self._snapshot(), self._job)
