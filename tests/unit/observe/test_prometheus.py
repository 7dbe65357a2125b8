"""The metrics for Prometheus and the endpoint, read back by prometheus-client's parser."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyhvd.errors import ConfigError
from pyhvd.negotiation.message_table import StragglerStats
from pyhvd.observe import endpoint_files
from pyhvd.observe.metrics import Meter
from pyhvd.observe.metrics_server import CONNECTION_S, MOST_CONNECTIONS
from pyhvd.observe.prometheus import FAMILIES, INFO, Endpoint
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
Labels = tuple[tuple[str, str], ...]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pyhvd"


@pytest.fixture
def meter() -> Meter:
    lateness = StragglerStats(2)
    lateness.count(0, 1, since=1.0, now=1.5)
    meter = Meter(0, 2, timed=True, lateness=lateness)
    meter.submitted(hits=1, misses=2)
    now = meter.clock()
    meter.agreed("allreduce", "mpi", [8, 8, 8], [now - 1_000_000] * 3, now)
    meter.carried_out(now)
    meter.waited(now)
    meter.failed("StallError")
    meter.stalled(2, reports=1)
    return meter


@pytest.fixture
def endpoint(meter: Meter) -> Iterator[Endpoint]:
    endpoint = Endpoint(0, "127.0.0.1", 0)
    endpoint.serve(meter.snapshot, "job-1")
    yield endpoint
    endpoint.close()


def scrape(endpoint: Endpoint) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_scrape_says_what_a_snapshot_does(meter: Meter, endpoint: Endpoint) -> None:
    samples: dict[str, dict[Labels, float]] = {}
    kinds = {}
    for family in text_string_to_metric_families(scrape(endpoint)):
        kinds[family.name] = family.type
        for sample in family.samples:
            assert sample.labels.pop("rank") == "0"
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    seen = meter.snapshot()
    assert kinds == {f.name.removesuffix("_total"): f.kind for f in (*FAMILIES, INFO)}
    assert samples["pyhvd_tensors_total"] == {(("lane", "mpi"), ("verb", "allreduce")): 3}
    assert samples["pyhvd_bytes_total"] == {(("lane", "mpi"), ("verb", "allreduce")): 24}
    assert samples["pyhvd_responses_total"] == {(("lane", "mpi"),): 1}
    assert samples["pyhvd_cache_hits_total"] == {(): 1}
    assert samples["pyhvd_cache_misses_total"] == {(): 2}
    assert samples["pyhvd_errors_total"] == {(("kind", "StallError"),): 1}
    assert samples["pyhvd_stall_warnings_total"] == {(): 1}
    assert samples["pyhvd_stalled_tensors"] == {(): 2}
    assert samples["pyhvd_late_tensors_total"] == {(("late_rank", "0"),): 0, (("late_rank", "1"),): 1}
    assert samples["pyhvd_awaited_seconds_total"] == {(("late_rank", "0"),): 0, (("late_rank", "1"),): 0.5}
    for name in ("pyhvd_results_kept_bytes", "pyhvd_results_new_total", "pyhvd_results_reused_total"):
        assert samples[name] == {(): 0}
    assert 0 < samples["pyhvd_uptime_seconds"][()] <= seen.seconds
    (info,) = samples["pyhvd_info"]
    told = {"job_name": "job-1", "size": "2", "pid": str(os.getpid()), "generation": ""}
    assert told.items() <= dict(info).items()
    for name, histogram in (
        ("pyhvd_response_tensors", seen.response_tensors),
        ("pyhvd_response_bytes", seen.response_bytes),
        ("pyhvd_negotiation_seconds", seen.negotiation_seconds),
        ("pyhvd_execution_seconds", seen.execution_seconds),
        ("pyhvd_wait_seconds", seen.wait_seconds),
    ):
        assert samples[f"{name}_count"] == {(): histogram.count}
        assert samples[f"{name}_sum"] == {(): pytest.approx(histogram.sum)}
        below = {float(dict(key)["le"]): n for key, n in samples[f"{name}_bucket"].items()}
        assert list(below)[:-1] == list(histogram.bounds)
        for k, n in enumerate(below.values()):
            assert n == sum(histogram.counts[: k + 1])


def test_an_endpoint_counts_on(meter: Meter, endpoint: Endpoint) -> None:
    meter.agreed("allreduce", "mpi", [8], [], 0)
    assert 'pyhvd_tensors_total{lane="mpi",rank="0",verb="allreduce"} 4.0' in scrape(endpoint)


def test_after_the_end_port_and_file_are_given_up(meter: Meter) -> None:
    first = Endpoint(0, "127.0.0.1", 0)
    first.serve(meter.snapshot, "job-1")
    (file,) = endpoint_files.read_files()
    assert (file.job, file.rank, file.size, file.port) == ("job-1", 0, 2, first.port)
    first.close()
    assert endpoint_files.read_files() == []
    second = Endpoint(first.port, "127.0.0.1", 0)
    assert second.port == first.port
    second.close()


def test_a_fork_leaves_the_endpoint_to_its_parent(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        endpoint.close()
    assert [file.job for file in endpoint_files.read_files()] == ["job-1"]
    assert "pyhvd_info" in scrape(endpoint)


# -- strangers -----------------------------------------------------------------------------------------


def _half_requests(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    """Open connections that each send half of a request."""
    opened = []
    for _ in range(count):
        opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)))
        opened[-1].sendall(b"GET /metrics HT")
    return opened


def _ended(connection: socket.socket) -> bool:
    """Return whether the server has ended a connection, in at most 0.1 s."""
    connection.settimeout(0.1)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_half_requests_are_bounded_and_end(endpoint: Endpoint) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        silent = _half_requests(endpoint.port, 100, stack)
        began = time.monotonic()
        assert "pyhvd_info" in scrape(endpoint)
        assert time.monotonic() - began < CONNECTION_S / 2, "no time of a stranger passes first"
        wait_until(lambda: threading.active_count() <= before + MOST_CONNECTIONS)
        assert _ended(silent[0]), "the oldest is dropped first"
        assert not _ended(silent[-1])
        while not _ended(silent[-1]):
            silent[-1].send(b"T")  # a byte now and then is no reason to wait
        assert CONNECTION_S - 1 < time.monotonic() - began < 2 * CONNECTION_S
        wait_until(lambda: threading.active_count() <= before)


def test_no_connection_outlives_its_endpoint() -> None:
    endpoint = Endpoint(0, "127.0.0.1", 0)
    endpoint.serve(Meter(0, 1, timed=False).snapshot, "job-1")
    before = threading.active_count()
    with ExitStack() as stack:
        silent = _half_requests(endpoint.port, 5, stack)
        wait_until(lambda: threading.active_count() == before + len(silent))
        endpoint.close()
        wait_until(lambda: threading.active_count() < before)
        assert all(_ended(each) for each in silent)


SHORT_OF_DESCRIPTORS = """
    import os, resource, sys, time
    from pyhvd.observe.metrics import Meter
    from pyhvd.observe.prometheus import Endpoint

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    endpoint = Endpoint(0, "127.0.0.1", 0)
    endpoint.serve(Meter(0, 1, timed=False).snapshot, "job-1")
    print(endpoint.port, flush=True)
    for line in sys.stdin:
        taken = []
        if line == "take\\n":
            try:
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                print(len(taken), flush=True)
        sys.stdin.readline()
        used = time.process_time()
        sys.stdin.readline()
        for each in taken:
            os.close(each)
        print(time.process_time() - used, flush=True)
"""


@contextmanager
def _short_of_descriptors() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a process with few descriptors that serves metrics, and the port."""
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SHORT_OF_DESCRIPTORS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdout is not None
        try:
            yield program, int(program.stdout.readline())
        finally:
            program.kill()


def _ask(program: subprocess.Popen[str], *lines: str) -> str:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write("".join(f"{line}\n" for line in lines))
    program.stdin.flush()
    return program.stdout.readline()


def test_half_requests_leave_the_rank_its_descriptors() -> None:
    with _short_of_descriptors() as (program, port), ExitStack() as stack:
        _half_requests(port, 275, stack)
        time.sleep(0.5)
        assert int(_ask(program, "take")) > 10, "of 64"


def test_a_server_without_descriptors_rests_and_recovers() -> None:
    with _short_of_descriptors() as (program, port), ExitStack() as stack:
        assert int(_ask(program, "take")) > 10
        waiting = _half_requests(port, 3, stack)
        assert program.stdin is not None
        program.stdin.write("begin\n")
        program.stdin.flush()
        time.sleep(3)
        assert float(_ask(program, "end")) < 0.3, "the server's thread spins"
        waiting[-1].sendall(b"TP/1.0\r\n\r\n")
        assert waiting[-1].recv(100).startswith(b"HTTP/1.0 200 OK")


def test_the_port_is_the_base_and_the_local_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            Endpoint(port - 3, "127.0.0.1", 3)
    assert str(error.value) == (
        f"PYHVD_METRICS_PORT={port - 3}: local rank 3 cannot serve metrics on 127.0.0.1:{port}:"
        " Address already in use; choose another port, or 0 for any free one"
    )
    with pytest.raises(ConfigError, match="PYHVD_METRICS_PORT=65535: plus local rank 1 exceeds 65535"):
        Endpoint(65535, "127.0.0.1", 1)


@pytest.mark.parametrize("address", ["192.0.2.1", "a..b", ""])
def test_an_address_that_is_none_of_this_host(address: str) -> None:
    with pytest.raises(ConfigError) as error:
        Endpoint(0, address, 0)
    assert str(error.value).startswith(f"PYHVD_METRICS_ADDRESS={address!r}: not an address of this host: ")


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=re.escape('pip install "pyhvd[metrics]"')):
        Endpoint(0, "127.0.0.1", 0)


def test_the_table_in_the_docs_is_this_one() -> None:
    rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\| `pyhvd_.*\|$", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    ]
    assert rows == [[f.name, f.kind, ", ".join(f.labels), f.doc] for f in (*FAMILIES, INFO)]


# -- where ranks say how to find them ------------------------------------------------------------------


def _file(rank: int, pid: int) -> endpoint_files.RankFile:
    return endpoint_files.RankFile("job-1", rank, 2, pid, "127.0.0.1", 1234)


def test_files_of_ranks_that_have_gone_are_removed(own_directory: Path) -> None:
    gone = _ended_process()
    endpoint_files.write_file(_file(1, os.getpid()))
    stale = endpoint_files.write_file(_file(0, gone))
    assert [file.rank for file in endpoint_files.read_files()] == [1]
    assert not stale.exists()


def _ended_process() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_the_directory_is_closed_to_others(own_directory: Path) -> None:
    path = endpoint_files.write_file(_file(0, os.getpid()))
    assert path.parent == own_directory
    assert own_directory.stat().st_mode & 0o777 == 0o700


# -- where Prometheus finds ranks ----------------------------------------------------------------------


def _targets(folder: Path) -> list[dict[str, Any]]:
    return [group for path in sorted(folder.glob("*.json")) for group in json.loads(path.read_text())]


def test_a_file_for_prometheus_while_the_rank_serves(meter: Meter, tmp_path: Path) -> None:
    folder = tmp_path / "to be made" / "targets"
    endpoint = Endpoint(0, "127.0.0.1", 0, str(folder))
    assert _targets(folder) == [], "nothing is served yet"
    endpoint.serve(meter.snapshot, "job-1")
    (group,) = _targets(folder)
    assert group.keys() == {"targets", "labels"}
    assert group["targets"] == [f"127.0.0.1:{endpoint.port}"]
    own = {name: text for name, text in group["labels"].items() if not name.startswith("__meta_pyhvd_")}
    assert own == {"job_name": "job-1"}, "no label that the samples have"
    endpoint.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "target"),
    [("0.0.0.0", "HOST:12"), ("::", "HOST:12"), ("fd00::1", "[fd00::1]:12"), ("h", "h:12")],
)
def test_the_target_is_where_others_reach_the_rank(tmp_path: Path, address: str, target: str) -> None:
    endpoint_files.write_targets(tmp_path, endpoint_files.RankFile("j", 3, 4, os.getpid(), address, 12))
    (group,) = _targets(tmp_path)
    assert group["targets"] == [target.replace("HOST", socket.gethostname())]


def test_the_next_rank_removes_what_killed_ranks_of_its_host_have_left(tmp_path: Path) -> None:
    gone, alive = _ended_process(), os.getpid()
    kept = [endpoint_files.write_targets(tmp_path, _file(1, alive))]
    stale = endpoint_files.write_targets(tmp_path, _file(0, gone))
    elsewhere = tmp_path / stale.name.replace(".json", ".copy.json")
    elsewhere.write_text(stale.read_text().replace('"__meta_pyhvd_node":"', '"__meta_pyhvd_node":"other/'))
    foreign = tmp_path / f"a.{socket.gethostname()}.b.json"
    foreign.write_text("[]")
    os.mkfifo(tmp_path / f"c.{socket.gethostname()}.d.json")
    kept += [elsewhere, foreign, endpoint_files.write_targets(tmp_path, _file(2, alive))]
    assert {path for path in tmp_path.glob("*.json") if path.is_file()} == {*kept}


@pytest.mark.parametrize("kind", ["a file", "closed"])
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    if kind == "a file":
        folder.touch()
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    with pytest.raises(
        ConfigError, match=r"^PYHVD_METRICS_TARGETS='.*/x': (File exists|Permission denied); choose"
    ):
        Endpoint(0, "127.0.0.1", 0, str(folder))


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    file = _file(0, os.getpid())
    victim = tmp_path / "victim"
    victim.write_text("mine")
    name = endpoint_files.write_targets(tmp_path, file).name
    (tmp_path / f".{name}.{os.getpid()}").symlink_to(victim)
    endpoint_files.write_targets(tmp_path, file)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("how", ["open to all", "a link"])
def test_a_directory_that_others_may_have_made_is_not_used(
    own_directory: Path,
    how: str,
    tmp_path: Path,
    meter: Meter,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own_directory.symlink_to(tmp_path / "elsewhere")
    else:
        own_directory.mkdir()
        own_directory.chmod(0o777)
    (own_directory / "job-1.0.json").write_text(
        f'{{"job":"job-1","rank":0,"size":1,"pid":{os.getpid()},"address":"x","port":1}}'
    )
    assert endpoint_files.read_files() == []
    endpoint = Endpoint(0, "127.0.0.1", 0)
    try:
        endpoint.serve(meter.snapshot, "job-2")
        assert "pyhvd_info" in scrape(endpoint), "only top suffers"
    finally:
        endpoint.close()
    why = "is no directory" if how == "a link" else f"is open to other users: chmod 700 {own_directory}"
    assert f"will not find rank 0 by itself: {own_directory} {why}" in caplog.text
