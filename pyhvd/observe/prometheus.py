"""Metrics for Prometheus: the table of metrics, and the endpoint that serves them.

Owns :data:`FAMILIES`, and :class:`Endpoint`, which serves a rank's metrics while its context lives.
prometheus-client (the extra ``metrics``) makes the text at each scrape, in a thread of its own.
Knows nothing of how the engine counts: it reads snapshots.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhvd._version import __version__
from pyhvd.common.text import describe_import_error
from pyhvd.errors import ConfigError
from pyhvd.observe.endpoint_files import RankFile, make_targets_folder, write_file, write_targets
from pyhvd.observe.metrics import Histogram, Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_log = logging.getLogger("pyhvd")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: a field of Metrics; its samples have the label ``rank`` besides its own."""

    field: str
    doc: str
    labels: tuple[str, ...] = ()
    kind: str = "counter"

    @property
    def name(self) -> str:
        """The name for Prometheus."""
        return f"pyhvd_{self.field}" + "_total" * (self.kind == "counter")


def _flatten(value: Any) -> Iterator[tuple[tuple[str, ...], float | Histogram]]:
    """Yield the keys that lead to each number or histogram in nested dicts and tuples by rank."""
    if not isinstance(value, dict | tuple):
        yield (), value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        for keys, leaf in _flatten(inner):
            yield (str(key), *keys), leaf


FAMILIES = (
    Family("tensors", "Tensors whose collective ran", ("verb", "lane")),
    Family("bytes", "Bytes of those tensors: this rank's input", ("verb", "lane")),
    Family("responses", "Responses: one tensor each, or several that were fused", ("lane",)),
    Family("response_tensors", "Tensors fused into one response", kind="histogram"),
    Family("response_bytes", "Bytes fused into one response", kind="histogram"),
    Family("cache_hits", "Submitted tensors that were in the response cache"),
    Family("cache_misses", "Submitted tensors that were not in the response cache"),
    Family(
        "negotiation_seconds",
        "Per tensor: from this rank's announcement until all ranks had submitted it",
        kind="histogram",
    ),
    Family(
        "execution_seconds", "Per response: from the agreement until the results were ready", kind="histogram"
    ),
    Family("wait_seconds", "Per wait of the program for a handle that was not ready", kind="histogram"),
    Family("late_tensors", "Tensors that a rank was the last to submit (from rank 0)", ("late_rank",)),
    Family(
        "awaited_seconds", "Time for which others waited for one rank alone (from rank 0)", ("late_rank",)
    ),
    Family("errors", "Failed tensors by class of error; refused: calls that this rank rejected", ("kind",)),
    Family("stall_warnings", "Reports of stalled tensors (from rank 0)"),
    Family("stalled_tensors", "Overdue tensors at the last look (from rank 0)", kind="gauge"),
    Family(
        "link_sent_bytes",
        "Bytes sent to another host: over this rank's rails, or its host's agreement connection",
        ("other_host", "connection"),
    ),
    Family("link_received_bytes", "Bytes received from another host, likewise", ("other_host", "connection")),
    Family(
        "link_wait_seconds",
        "Time that this rank waited in an exchange until bytes of another host came",
        ("late_host",),
    ),
    Family(
        "late_exchanges",
        "Operations between hosts in which this rank waited for the bytes of a host last",
        ("late_host",),
    ),
    Family(
        "host_late_tensors",
        "Cached tensors that a host was the last to announce (from the lowest rank of each host)",
        ("late_host",),
    ),
    Family(
        "host_awaited_seconds",
        "Time for which a host waited for another one to announce (from the lowest rank of each host)",
        ("late_host",),
    ),
    Family(
        "results_kept_bytes", "Bytes of freed results that the process keeps for later ones", kind="gauge"
    ),
    Family("results_new", "Large results of the process that got new memory"),
    Family("results_reused", "Large results of the process that got the memory of a freed result"),
    Family("uptime_seconds", "Time since init()", kind="gauge"),
)
INFO = Family(
    "info",
    "1; its labels name what does not change; generation is empty in a job that is not elastic",
    ("size", "job_name", "host", "pid", "version", "generation"),
    kind="gauge",
)


@dataclass(frozen=True, slots=True)
class _Collector:
    """The collector that prometheus-client calls at each scrape."""

    snapshot: Callable[[], Metrics]
    job: str

    def collect(self) -> Iterator[Metric]:
        """Yield a snapshot as metrics of prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        make: dict[str, Any] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        metrics = self.snapshot()
        rank = str(metrics.rank)
        for family in FAMILIES:
            made = make[family.kind](family.name, family.doc, labels=("rank", *family.labels))
            field = "seconds" if family.field == "uptime_seconds" else family.field
            for labels, value in _flatten(getattr(metrics, field)):
                if isinstance(value, Histogram):
                    made.add_metric((rank, *labels), _buckets(value), value.sum)
                else:
                    made.add_metric((rank, *labels), value)
            yield made
        info = GaugeMetricFamily(INFO.name, INFO.doc, labels=("rank", *INFO.labels))
        what = (str(metrics.size), self.job, socket.gethostname(), str(os.getpid()), __version__)
        generation = "" if metrics.generation is None else str(metrics.generation)
        info.add_metric((rank, *what, generation), 1)
        yield info


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the upper bound of each bucket, and the number of values up to it."""
    bounds = (*map(repr, histogram.bounds), "+Inf")
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))


_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Endpoint:
    """An HTTP server of one rank's metrics, from construction to :meth:`close`.

    It listens on ``address``, at the port ``port + local_rank``, so that each rank of a host has its own; or
    at any free port if ``port`` is 0. With ``targets`` it publishes its address in this folder, too.

    Raises
    ------
    ImportError
        prometheus-client cannot be imported.
    ConfigError
        The port is not available, the address does not belong to this host, or the folder cannot be written.
    """

    def __init__(self, port: int, address: str, local_rank: int, targets: str = "") -> None:
        try:
            from prometheus_client import CollectorRegistry

            from pyhvd.observe.metrics_server import MetricsServer
        except ImportError as exc:
            needed = describe_import_error(exc, "prometheus-client", "metrics")
            raise ImportError(f"PYHVD_METRICS_PORT needs {needed}") from exc
        self._registry = CollectorRegistry(auto_describe=False)
        self._targets = Path(targets) if targets else None
        self._paths: list[Path] = []
        self._pid = os.getpid()
        if self._targets is not None:
            try:
                make_targets_folder(self._targets)
            except OSError as exc:
                raise ConfigError(
                    f"PYHVD_METRICS_TARGETS={targets!r}: {exc.strerror};"
                    " choose a folder in which each rank can write"
                ) from exc
        wanted = port + local_rank if port else 0
        if wanted >= 1 << 16:
            raise ConfigError(f"PYHVD_METRICS_PORT={port}: plus local rank {local_rank} exceeds 65535")
        try:
            self._server = MetricsServer(address, wanted, self._registry)
        except (OSError, UnicodeError) as exc:
            # UnicodeError: not a valid host name.
            if not isinstance(exc, OSError) or isinstance(exc, socket.gaierror) or exc.errno in _NOT_HERE:
                why = exc.strerror if isinstance(exc, OSError) else exc
                raise ConfigError(
                    f"PYHVD_METRICS_ADDRESS={address!r}: not an address of this host: {why}"
                ) from exc
            raise ConfigError(
                f"PYHVD_METRICS_PORT={port}: local rank {local_rank} cannot serve metrics on"
                f" {address}:{wanted}: {exc.strerror}; choose another port, or 0 for any free one"
            ) from exc
        self.address = address
        self.port = self._server.server_port

    def serve(self, snapshot: Callable[[], Metrics], job: str) -> None:
        """Serve the results of ``snapshot()``; write the files by which others find them."""
        first = snapshot()
        self._registry.register(_Collector(snapshot, job))
        _log.info("metrics of rank %d at http://%s:%d/metrics", first.rank, self.address, self.port)
        file = RankFile(job, first.rank, first.size, os.getpid(), self.address, self.port)
        try:
            self._paths.append(write_file(file))
        except OSError as exc:
            _log.warning("python -m pyhvd top will not find rank %d by itself: %s", first.rank, exc)
        try:
            if self._targets is not None:
                self._paths.append(write_targets(self._targets, file))
        except OSError as exc:
            _log.warning("Prometheus will not find rank %d in %s: %s", first.rank, self._targets, exc)

    def close(self) -> None:
        """Stop serving; takes up to half a second, the period at which the server looks for its end.

        A forked child does nothing: server and files belong to its parent.
        """
        if os.getpid() != self._pid:
            return
        for path in self._paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._server.close()
