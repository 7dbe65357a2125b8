"""Reading the metrics of a job's ranks over HTTP, and the rates between two readings.

Owns :class:`MetricsReading`, one rank's metrics at one moment, and the differences of two readings:
:class:`RateRow` of a rank, and :class:`HostRow` of what crosses to and from a host. Knows nothing of screens.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pyhvd.common.text import describe_import_error

MOST_BYTES = 1 << 24
"""Upper bound of the bytes of a rank's metrics; longer answers are rejected."""


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """One rank's metrics at one moment (monotonic s): values by sample name and label values.

    The generation is that of the rank in an elastic job; None in any other job.
    """

    when: float
    rank: int
    size: int
    job: str
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]]
    generation: int | None = None

    @property
    def who(self) -> tuple[str, int, int | None]:
        """The job, the rank and the generation: all counts of another generation begin anew."""
        return self.job, self.rank, self.generation

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self.samples.get(name, {}).items() if wanted <= set(key))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return a metric's samples, summed by one of their labels."""
        sums: defaultdict[str, float] = defaultdict(float)
        for key, value in self.samples.get(name, {}).items():
            sums[dict(key).get(label, "")] += value
        return sums


@dataclass(frozen=True, slots=True)
class Scrape:
    """The readings of a job's endpoints at one time; ``silent`` endpoints exist but did not answer."""

    readings: list[MetricsReading]
    silent: list[str]

    @property
    def over(self) -> bool:
        """Whether no endpoint is left."""
        return not self.readings and not self.silent


def scrape(urls: Sequence[str], timeout: float = 2.0) -> Scrape:
    """Read all endpoints in parallel; an endpoint that is not a rank of pyhvd counts as gone.

    Raises
    ------
    ImportError
        prometheus-client is not installed.
    """
    with ThreadPoolExecutor(max_workers=min(len(urls), 16) or 1) as pool:
        answers = list(pool.map(lambda url: _fetch(url, timeout), urls))
    found = [parse(text, when) for text, when in answers if text]
    readings = sorted((r for r in found if r is not None), key=lambda reading: (reading.job, reading.rank))
    return Scrape(readings, [url for url, (text, _) in zip(urls, answers, strict=True) if text is None])


def parse(text: str, when: float) -> MetricsReading | None:
    """Return the reading of an endpoint; None if the endpoint is not a rank of pyhvd."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as exc:
        why = describe_import_error(exc, "prometheus-client", "metrics")
        raise ImportError(f"python -m pyhvd top needs {why}") from exc
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        if not samples.get("pyhvd_info"):
            return None
        info = dict(next(iter(samples["pyhvd_info"])))
        generation = int(info["generation"]) if info.get("generation") else None
        return MetricsReading(
            when, int(info["rank"]), int(info["size"]), info["job_name"], samples, generation
        )
    except (ValueError, LookupError):  # the parser raises one of these for text of another format
        return None


def _fetch(url: str, timeout: float) -> tuple[str | None, float]:
    """Return the text and its time (monotonic s): empty if nothing listens, None if nothing answers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout) as answer:
            return _read(answer).decode(), time.monotonic()
    except TimeoutError:
        return None, 0.0
    except urllib.error.URLError as exc:
        return (None if isinstance(exc.reason, TimeoutError) else ""), 0.0
    except (OSError, ValueError, http.client.HTTPException):
        return "", 0.0


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Return the whole answer; raise ValueError if it is too long, IncompleteRead if it is cut."""
    data = answer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes cannot be metrics of a rank")
    if answer.length:
        raise http.client.IncompleteRead(data, answer.length)
    return data


@dataclass(frozen=True, slots=True)
class RateRow:
    """Rates of one rank between two readings, ``seconds`` apart; None for shares without data.

    Attributes
    ----------
    cache_hit_percent : float or None
        Share of submitted tensors.
    wait_percent : float
        Share of the time for which threads of the program waited for a handle, summed over threads.
    errors, stalled : int
        Failed tensors since the job's start; overdue tensors (from rank 0).
    awaited_percent : float or None
        Share of the time for which the others waited for this rank alone; from rank 0.
    lanes : dict of str to float
        Share of the tensors by lane (percent).
    generation : int or None
        The rank's, in an elastic job.
    """

    job: str
    rank: int
    seconds: float
    tensors_per_second: float
    bytes_per_second: float
    cache_hit_percent: float | None
    wait_percent: float
    errors: int
    stalled: int
    awaited_percent: float | None = None
    lanes: dict[str, float] = field(default_factory=dict)
    generation: int | None = None


@dataclass(slots=True)
class HostRow:
    """What the ranks of other hosts, as far as they were read, had to do with one host.

    Attributes
    ----------
    sent_per_second, received_per_second : float
        Bytes to and from the host, of all those ranks.
    wait_percent : float
        Share of the time for which a rank waited until the host's bytes came; the mean of those ranks.
    last_percent : float or None
        Share of their operations between hosts in which they waited for this host's bytes last.
    awaited_percent : float or None
        Share of the time for which a host waited for this one to announce tensors; the largest of all hosts.
    """

    host: str
    sent_per_second: float
    received_per_second: float
    wait_percent: float
    last_percent: float | None = None
    awaited_percent: float | None = None


def host_rates(before: Sequence[MetricsReading], after: Sequence[MetricsReading]) -> list[HostRow]:
    """Return a row for each host that is another host to some rank; empty without links."""
    pairs = _pairs(before, after)
    hosts = {host for _, now in pairs for host in now.by("pyhvd_link_sent_bytes_total", "other_host")}
    return [_host_row(host, pairs) for host in sorted(hosts)]


def _host_row(host: str, pairs: Sequence[tuple[MetricsReading, MetricsReading]]) -> HostRow:
    row = HostRow(host, 0.0, 0.0, 0.0)
    slept = passed = last = exchanges = 0.0
    for then, now in pairs:
        sent = _grown_by(then, now, "pyhvd_link_sent_bytes_total", "other_host")
        if host not in sent:  # a rank of this host
            continue
        seconds = _passed(then, now)
        received = _grown_by(then, now, "pyhvd_link_received_bytes_total", "other_host")
        row.sent_per_second += sent[host] / seconds
        row.received_per_second += received.get(host, 0.0) / seconds
        slept += _grown_by(then, now, "pyhvd_link_wait_seconds_total", "late_host").get(host, 0.0)
        passed += seconds
        ends = _grown_by(then, now, "pyhvd_late_exchanges_total", "late_host")
        last += ends.get(host, 0.0)
        exchanges += sum(ends.values())
        awaited = _grown_by(then, now, "pyhvd_host_awaited_seconds_total", "late_host")
        if host in awaited:
            row.awaited_percent = max(row.awaited_percent or 0.0, 100 * awaited[host] / seconds)
    row.wait_percent = 100 * slept / passed
    row.last_percent = 100 * last / exchanges if exchanges else None
    return row


def rates(before: Sequence[MetricsReading], after: Sequence[MetricsReading]) -> list[RateRow]:
    """Return a row for each rank that both readings have."""
    pairs = _pairs(before, after)
    awaited: dict[str, float] = {}
    for then, now in pairs:
        grown = _grown_by(then, now, "pyhvd_awaited_seconds_total", "late_rank")  # by rank 0 alone
        awaited |= {rank: 100 * seconds / _passed(then, now) for rank, seconds in grown.items()}
    return [_row(then, now, awaited.get(str(now.rank))) for then, now in pairs]


def _pairs(
    before: Sequence[MetricsReading], after: Sequence[MetricsReading]
) -> list[tuple[MetricsReading, MetricsReading]]:
    earlier = {reading.who: reading for reading in before}
    return [(earlier[reading.who], reading) for reading in after if reading.who in earlier]


def _row(then: MetricsReading, now: MetricsReading, awaited_percent: float | None) -> RateRow:
    seconds = _passed(then, now)

    def grown(name: str) -> float:
        return max(now.total(name) - then.total(name), 0.0)

    hits, misses = grown("pyhvd_cache_hits_total"), grown("pyhvd_cache_misses_total")
    lanes = _grown_by(then, now, "pyhvd_tensors_total", "lane")
    everything = sum(lanes.values())
    return RateRow(
        job=now.job,
        rank=now.rank,
        seconds=seconds,
        tensors_per_second=grown("pyhvd_tensors_total") / seconds,
        bytes_per_second=grown("pyhvd_bytes_total") / seconds,
        cache_hit_percent=100 * hits / (hits + misses) if hits + misses else None,
        wait_percent=100 * grown("pyhvd_wait_seconds_sum") / seconds,
        errors=int(now.total("pyhvd_errors_total")),
        stalled=int(now.total("pyhvd_stalled_tensors")),
        awaited_percent=awaited_percent,
        lanes={lane: 100 * n / everything for lane, n in lanes.items() if n},
        generation=now.generation,
    )


def _grown_by(then: MetricsReading, now: MetricsReading, name: str, label: str) -> dict[str, float]:
    """Return the growth of a metric, by one of its labels; 0 for a count that began anew."""
    before = then.by(name, label)
    return {key: max(n - before.get(key, 0.0), 0.0) for key, n in now.by(name, label).items()}


def _passed(then: MetricsReading, now: MetricsReading) -> float:
    """Return the seconds between two readings, never 0."""
    return max(now.when - then.when, 1e-9)
