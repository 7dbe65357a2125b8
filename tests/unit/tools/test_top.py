"""``python -m pyhvd top`` without a job: the rates between two readings, the output, and the errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from wsgiref.simple_server import make_server
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest

from pyhvd.observe.endpoint_files import RankFile, write_file
from pyhvd.observe.metrics import Meter
from pyhvd.observe.prometheus import Endpoint
from pyhvd.tools import scraping, top
from pyhvd.tools.scraping import HostRow, MetricsReading, RateRow, Scrape, host_rates, parse, rates, scrape


@pytest.fixture(autouse=True)
def nobody_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


@pytest.fixture
def meter() -> Meter:
    return Meter(0, 2, timed=True)


@pytest.fixture
def endpoint(meter: Meter) -> Iterator[Endpoint]:
    endpoint = Endpoint(0, "127.0.0.1", 0)
    endpoint.serve(meter.snapshot, "train-1")
    yield endpoint
    endpoint.close()


def url(endpoint: Endpoint) -> str:
    return f"http://127.0.0.1:{endpoint.port}/metrics"


def reading(rank: int, when: float, **samples: float) -> MetricsReading:
    """Return a reading; samples are written name__label__value=number."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, value in samples.items():
        metric, *label = name.split("__")
        found.setdefault(f"pyhvd_{metric}", {})[(tuple(label),) if label else ()] = value  # type: ignore[index]
    return MetricsReading(when, rank, 2, "train-1", found)


def test_rates() -> None:
    before = [
        reading(0, 10.0, tensors_total__lane__fast=100, bytes_total=0, awaited_seconds_total__late_rank__1=1),
        reading(1, 10.0, wait_seconds_sum=1.0, cache_hits_total=10, cache_misses_total=10),
    ]
    after = [
        reading(
            0,
            12.0,
            tensors_total__lane__fast=400,
            tensors_total__lane__mpi=100,
            bytes_total=4e9,
            awaited_seconds_total__late_rank__0=0,
            awaited_seconds_total__late_rank__1=1.5,
            stalled_tensors=3,
        ),
        reading(1, 11.0, wait_seconds_sum=1.25, cache_hits_total=13, cache_misses_total=11, errors_total=2),
    ]
    first, second = rates(before, after)
    assert (first.seconds, first.tensors_per_second, first.bytes_per_second) == (2.0, 200.0, 2e9)
    assert first.lanes == {"fast": 75.0, "mpi": 25.0}
    assert (first.awaited_percent, second.awaited_percent) == (0.0, 25.0)
    assert (first.cache_hit_percent, second.cache_hit_percent) == (None, 75.0)
    assert (second.wait_percent, second.errors, first.stalled) == (25.0, 2, 3)
    assert top.cells(first) == ("0", "200", "2.000", "-", "fast 75% mpi 25%", "0.0%", "0.0%", "0", "3")
    assert top.cells(second) == ("1", "0", "0.000", "75.0%", "-", "25.0%", "25.0%", "2", "-")
    assert top.heading([first, second], "train-1", 2, silent=1) == (
        "train-1: 2 of 2 ranks, over 2.00 s; 1 do not answer (stopped, or holding the GIL);"
        " slowest: rank 1, for which the others waited 25% of the time"
    )


def host_readings() -> tuple[list[MetricsReading], list[MetricsReading]]:
    """Return readings of ranks 0 and 1 on h0, and 2 on h1, 2 s apart."""
    sent, received = "link_sent_bytes_total__other_host__", "link_received_bytes_total__other_host__"
    before, after = [], []
    for rank, other, own in ((0, "h1", "h0"), (1, "h1", "h0"), (2, "h0", "h1")):
        last, awaited = "late_exchanges_total__late_host__", "host_awaited_seconds_total__late_host__"
        reports = {f"{awaited}{other}": 1.0} if rank != 1 else {}
        first = {sent + other: 1e6, received + other: 1e6, last + own: 5.0, last + other: 5.0, **reports}
        wait = f"link_wait_seconds_total__late_host__{other}"
        before.append(reading(rank, 10.0, **first, **{wait: 0.0}))
        more = {sent + other: 3e6, received + other: 2e6, last + own: 6.0, last + other: 8.0}
        grown = {name: value + 0.5 for name, value in reports.items()}
        after.append(reading(rank, 12.0, **more, **grown, **{wait: rank / 2}))
    return before, after


def test_what_crosses_between_hosts() -> None:
    before, after = host_readings()
    zero, one = host_rates(before, after)
    assert zero == HostRow("h0", 1e6, 0.5e6, 50.0, 75.0, 25.0)
    assert one == HostRow("h1", 2e6, 1e6, 12.5, 75.0, 25.0)
    assert top.host_cells(one) == ("h1", "2.0", "1.0", "12.5%", "75.0%", "25.0%")
    assert host_rates(before[1:2], after[1:2]) == [HostRow("h1", 1e6, 0.5e6, 25.0, 75.0, None)]
    assert host_rates(before, []) == host_rates([reading(0, 1.0)], [reading(0, 2.0)]) == []


def test_the_table_of_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = host_readings()
    top._show_plain("train", rates(before, after), host_rates(before, after))
    lines = capsys.readouterr().out.splitlines()
    assert lines[5:] == [
        "",
        "host  to it MB/s  from it MB/s  link waits   last  awaited",
        "h0           1.0           0.5       50.0%  75.0%    25.0%",
        "h1           2.0           1.0       12.5%  75.0%    25.0%",
        "",
    ]
    top._show_json("train", rates(before, after), host_rates(before, after))
    told = json.loads(capsys.readouterr().out)
    assert [row["sent_per_second"] for row in told["hosts"]] == [1e6, 2e6]


def test_a_rank_that_is_new_has_no_rate_yet() -> None:
    assert [row.rank for row in rates([reading(0, 1.0)], [reading(0, 2.0), reading(1, 2.0)])] == [0]
    assert rates([], [reading(0, 2.0)]) == []


def test_readings_are_what_endpoints_tell(meter: Meter, endpoint: Endpoint) -> None:
    before = scrape([url(endpoint)])
    meter.agreed("allreduce", "mpi", [1000] * 5, [], 0)
    meter.submitted(3, 1)
    (row,) = rates(before.readings, scrape([url(endpoint)]).readings)
    assert row.tensors_per_second * row.seconds == pytest.approx(5)
    assert row.bytes_per_second * row.seconds == pytest.approx(5000)
    assert (row.cache_hit_percent, row.lanes) == (75.0, {"mpi": 100.0})


def test_a_job_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        write_file(RankFile("train-1", 0, 1, os.getpid(), "127.0.0.1", port))
        assert top.main(["--once"]) == 1
    assert capsys.readouterr().err == (
        "pyhvd top: no rank answers in time (stopped, or holding the GIL)"
        f" at http://127.0.0.1:{port}/metrics\n"
    )


def test_who_does_not_answer_is_not_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/metrics"
        closed.close()
        seen = scrape([where, nobody], timeout=0.1)
    assert (seen.readings, seen.silent, seen.over) == ([], [where], False)
    assert scrape([nobody]).over


def _answer(*pieces: bytes, length: int | None = None) -> Scrape:
    """Return the scrape of a server that sends these pieces."""

    def speak(_: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        start("200 OK", [] if length is None else [("Content-Length", str(length))])
        return list(pieces)

    with make_server("127.0.0.1", 0, speak) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        seen = scrape([f"http://127.0.0.1:{server.server_port}/"])
        thread.join()
    return seen


_INFO = 'pyhvd_info{rank="0",size="2",job_name="j"} 1.0\n'


def test_what_is_no_rank_counts_as_gone() -> None:
    assert _answer(b"hello").over
    assert parse("some_metric 1\n", 0.0) is None


@pytest.mark.parametrize(
    "wrong",
    [
        _INFO.replace('rank="0"', 'rank="zero"'),
        _INFO.replace('size="2",', ""),
        _INFO.replace('job_name="j"', ""),
        _INFO.replace("job_name=", " =ob=") + "some_metric\\{",
    ],
)
def test_what_only_looks_like_a_rank_counts_as_gone(wrong: str) -> None:
    assert parse(_INFO, 0.0) == MetricsReading(0.0, 0, 2, "j", {"pyhvd_info": {_LABELS: 1.0}})
    assert parse(wrong, 0.0) is None


def test_counts_of_another_generation_begin_anew() -> None:
    first, second, third = (
        parse(_INFO.replace("} ", f',generation="{number}"}} ') + f"pyhvd_errors_total {count}\n", when)
        for number, count, when in ((0, 5, 0.0), (1, 1, 1.0), (1, 3, 2.0))
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert rates([first], [second]) == []
    (row,) = rates([second], [third])
    assert (row.generation, row.errors) == (1, 3)
    assert top.heading([row], "j", 2) == "j: 1 of 2 ranks of generation 1, over 1.00 s"


def test_an_elastic_job_is_followed_to_its_next_generation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first generation ends when it has been seen; the next one has another port."""
    shown: list[str] = []
    monkeypatch.setattr(top, "_RESTART_S", 1.0)
    running = Endpoint(0, "127.0.0.1", 0)
    running.serve(Meter(0, 1, timed=True, generation=0).snapshot, "train-1")

    def show(title: str, *_: object) -> None:
        nonlocal running
        shown.append(title)
        running.close()
        if len(shown) == 1:
            running = Endpoint(0, "127.0.0.1", 0)
            running.serve(Meter(0, 1, timed=True, generation=1).snapshot, "train-1")

    monkeypatch.setattr(top, "_screen", lambda _: contextlib.nullcontext(show))
    assert top.main(["--interval", "0.05"]) == 0
    assert ["generation 0" in shown[0], "generation 1" in shown[1], len(shown)] == [True, True, 2]
    assert capsys.readouterr().out == "job train-1 has ended\n"


_LABELS = (("job_name", "j"), ("rank", "0"), ("size", "2"))


def test_an_answer_that_breaks_off_or_has_no_end_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    info = _INFO.encode()
    assert len(_answer(info).readings) == 1
    assert _answer(info, length=len(info) + 1).over
    monkeypatch.setattr(scraping, "MOST_BYTES", len(info) - 1)
    assert _answer(info).over
    monkeypatch.setattr(scraping, "MOST_BYTES", len(info))
    assert len(_answer(info).readings) == 1


def test_once(meter: Meter, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once", "--interval", "0.05"]) == 0
    title, columns, row = capsys.readouterr().out.splitlines()[:3]
    assert re.match(r"train-1: 1 of 2 ranks, over \d+\.\d\d s", title)
    assert columns.split()[:3] == ["rank", "tensors/s", "GB/s"]
    assert row.split() == ["0", "0", "0.000", "-", "-", "0.0%", "-", "0", "0"]


@pytest.mark.parametrize("where", ["--url", "--port", "--ports", "--job"])
def test_ways_to_say_which(endpoint: Endpoint, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--url": url(endpoint), "--job": "train"}.get(where, str(endpoint.port))
    assert top.main([where, given, "--once", "--json", "--interval", "0.05"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], [row["rank"] for row in told["ranks"]]) == ("train-1", [0])
    assert told["ranks"][0].keys() == {*RateRow.__dataclass_fields__}


def test_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once"]) == 1
    assert capsys.readouterr().err == (
        "pyhvd top: no job of yours that serves metrics runs on this host:"
        " start one with pyhvdrun --metrics-port 0, or with PYHVD_METRICS_PORT=0\n"
    )
    assert top.main(["--once", "--url", "http://127.0.0.1:1/metrics"]) == 1
    assert capsys.readouterr().err == "pyhvd top: no rank answers at http://127.0.0.1:1/metrics\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--interval soon", "argument --interval: expected a number, not 'soon'"),
        ("--interval 0", "argument --interval: must be positive, and less than 1e9, not 0"),
        ("--interval nan", "argument --interval: must be positive, and less than 1e9, not nan"),
        ("--interval 0.001", "argument --interval: must be at least 0.01 s, not 0.001"),
        ("--port 70000", "argument --port: a port is at most 65535, not 70000"),
        ("--port 65535 --ranks 2", "argument --ranks: the last one's port would be 65536"),
        ("--port 9400 --ranks 0", "argument --ranks: must be at least 1, not 0"),
        ("--ports 9400,x", "argument --ports: expected ports such as 9400,9401, not '9400,x'"),
        ("--ports 9400,70000", "not '9400,70000': a port is at most 65535"),
        (
            "--url localhost:9400",
            "argument --url: expected an address such as http://node2:9400/metrics, not",
        ),
        ("--url file:///etc/hosts", "argument --url: expected an address such as http"),
        ("--url http://[::1", "argument --url: expected an address such as http"),
        ("--url http://node2:70000/", "argument --url: expected an address such as http"),
    ],
)
def test_bad_flags(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        top.main(arguments.split())
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_what_a_rank_tells_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    row = RateRow("train", 0, 1.0, 2.0, 3.0, None, 0.0, 0, 0, lanes={"[/b]": 100.0})
    with top._rich_screen() as show:
        show("[/i]: 1 of 1 ranks", [row], [HostRow("[/u]", 1e6, 2e6, 0.0)])
    shown = capsys.readouterr().out
    assert "[/i]: 1 of 1 ranks" in shown
    assert "[/b]" in shown
    assert "[/u]" in shown


def test_several_jobs(meter: Meter, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    other = Endpoint(0, "127.0.0.1", 0)
    try:
        other.serve(meter.snapshot, "other-2")
        assert top.main(["--once"]) == 1
        assert "several jobs run here; choose one with --job: other-2, train-1" in capsys.readouterr().err
        assert top.main(["--once", "--interval", "0.05", "--job", "other-2"]) == 0
    finally:
        other.close()


def test_without_prometheus_client_the_error_names_the_extra(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    assert top.main(["--once"]) == 1
    assert 'pip install "pyhvd[metrics]"' in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        top.main(["--help"])
    assert end.value.code == 0
    assert "examples:\n  pyhvdrun -n 4 --metrics-port 0" in capsys.readouterr().out
