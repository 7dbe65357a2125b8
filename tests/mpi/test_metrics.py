"""Metrics of real jobs: scraped over HTTP, shown by ``python -m pyhvd top``, and on a port in use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import pyhvd as hvd
from pyhvd.engine.context import current
from tests.mpi.harness import on_ranks
from tests.mpi.run_support import TIMEOUT_S, environment, launcher_command, pyhvdrun, script, started

WORKING = """
    import os, sys, time
    import numpy as np
    import pyhvd as hvd

    hvd.init()
    until = time.monotonic() + 90
    first = True
    while True:
        hvd.allreduce(np.ones(1000, np.float32), name="x")
        time.sleep(0.002)  # leave a core to top
        stop = os.path.exists(sys.argv[1]) or time.monotonic() > until
        if hvd.broadcast(np.array(stop), 0, name="stop"):
            break
        if first:
            os.write(1, b"ready\\n")
        first = False
"""


@contextmanager
def working_job(folder: Path, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """Yield a job that serves metrics, and works until ``folder/stop`` exists."""
    path = script(folder, WORKING, "working.py")
    command = launcher_command("-n", ranks, "--metrics-port", 0, path, folder / "stop")
    with started(command, {"XDG_RUNTIME_DIR": str(folder)}) as job:
        assert job.stdout is not None
        for _ in range(ranks):
            assert job.stdout.readline() == "ready\n"
        yield job


def top(folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyhvd", "top", *map(str, flags)],
        env=environment({"XDG_RUNTIME_DIR": str(folder)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@on_ranks(1, 3, env={"PYHVD_METRICS_PORT": "0"})
@pytest.mark.parametrize("fast_lane", ["1", "0"])
def test_a_scrape_of_every_rank(fast_lane: str) -> None:
    os.environ["PYHVD_FAST_LANE"] = fast_lane
    hvd.init()
    for _ in range(6):
        hvd.allreduce(np.ones(1000, np.float32), name="x")
    hvd.grouped_allreduce([np.ones(4), np.ones(4)], name="g")
    hvd.barrier()
    endpoint = current().endpoint
    assert endpoint is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels["rank"] == str(hvd.rank())
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    assert found["pyhvd_tensors_total"] == 6 + 2 + 1
    assert found["pyhvd_bytes_total"] == 6 * 4000 + 64
    assert found["pyhvd_response_tensors_count"] == 6 + 1 + 1
    assert (found["pyhvd_cache_hits_total"], found["pyhvd_cache_misses_total"]) == (5, 1 + 2)
    if hvd.rank() == 0:
        assert found["pyhvd_late_tensors_total"] == (6 + 2 + 1 if hvd.size() > 1 else 0)
    seen = hvd.metrics()
    expected = {"fast": 5, "window": 3} if fast_lane == "1" else {"mpi": 8}
    assert seen.tensors["allreduce"] == expected
    hvd.barrier()


@pytest.mark.any_mpi
def test_top_shows_a_running_job_and_ends_with_it(tmp_path: Path) -> None:
    with working_job(tmp_path, 2) as job, ExitStack() as stack:
        told = top(tmp_path, "--once", "--json")
        assert told.returncode == 0, told.stderr
        seen = json.loads(told.stdout)
        assert seen["job"].startswith("working-")
        assert [row["rank"] for row in seen["ranks"]] == [0, 1]
        for row in seen["ranks"]:
            assert row["tensors_per_second"] > 0
            assert row["bytes_per_second"] > 0
            assert row["cache_hit_percent"] == 100.0
            assert row["wait_percent"] > 0
            assert 0 <= row["awaited_percent"] <= 100
            assert row["lanes"].keys() <= {"fast", "window", "mpi"}
        table = top(tmp_path, "--once", "--job", "working")
        assert table.returncode == 0, table.stderr
        lines = table.stdout.splitlines()
        assert "2 of 2 ranks" in lines[0]
        assert [line.split()[0] for line in lines[1:4]] == ["rank", "0", "1"]
        live = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "pyhvd", "top", "--interval", "0.1"],
                env=environment({"XDG_RUNTIME_DIR": str(tmp_path)}),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(live.kill)
        assert live.stdout is not None
        assert "2 of 2 ranks" in live.stdout.readline()
        (tmp_path / "stop").touch()
        rest, _ = live.communicate(timeout=TIMEOUT_S)
        assert live.returncode == 0
        assert rest.rstrip().splitlines()[-1] == f"job {seen['job']} has ended"
        assert job.wait(TIMEOUT_S) == 0
    assert list((tmp_path / "pyhvd").iterdir()) == [], "no rank leaves a file behind"
    none = top(tmp_path, "--once")
    assert none.returncode == 1
    assert "no job of yours that serves metrics runs on this host" in none.stderr


@pytest.mark.any_mpi
def test_prometheus_finds_every_rank_of_a_running_job(tmp_path: Path) -> None:
    program = """
        import json, pathlib, sys, urllib.request, pyhvd as hvd

        hvd.init()
        hvd.barrier()  # not before each rank serves
        if hvd.rank() == 0:
            groups = [json.loads(path.read_text())[0] for path in pathlib.Path(sys.argv[1]).glob("*.json")]
            for group in sorted(groups, key=lambda group: group["labels"]["__meta_pyhvd_rank"]):
                text = urllib.request.urlopen(f"http://{group['targets'][0]}/metrics").read().decode()
                print(group["labels"]["__meta_pyhvd_rank"], group["labels"]["job_name"])
                print(next(line for line in text.splitlines() if line.startswith("pyhvd_info{")))
        hvd.barrier()
    """
    folder = tmp_path / "targets"
    path = script(tmp_path, program, "train.py")
    job = pyhvdrun("-n", 2, "--metrics-port", 0, "--metrics-targets", folder, path, folder)
    assert job.code == 0, job.err
    lines = job.out.splitlines()
    for rank in (0, 1):
        number, name = lines[2 * rank].split()
        assert number == str(rank)
        assert name.startswith("train-")
        assert f'job_name="{name}"' in lines[2 * rank + 1]
        assert f'rank="{rank}"' in lines[2 * rank + 1]
    assert list(folder.iterdir()) == [], "no rank leaves a file behind"


@pytest.mark.any_mpi
def test_a_folder_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    path = script(tmp_path, "import pyhvd as hvd; hvd.init()")
    job = pyhvdrun("-n", 2, "--metrics-port", 0, "--metrics-targets", path, path)
    assert job.code == 1
    assert (
        f"PYHVD_METRICS_TARGETS='{path}': File exists; choose a folder in which each rank can write"
        in job.err
    )


@pytest.mark.any_mpi
def test_a_port_that_is_taken_ends_the_job(tmp_path: Path) -> None:
    path = script(tmp_path, "import pyhvd as hvd; hvd.init()")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = pyhvdrun("-n", 1, "--metrics-port", port, path)
        assert job.code == 1
        assert f"PYHVD_METRICS_PORT={port}: local rank 0 cannot serve metrics on 127.0.0.1:{port}" in job.last


@on_ranks(2, env={"PYHVD_METRICS_PORT": "65535"})
def test_a_port_that_cannot_be_had_is_everybodys_error() -> None:
    with pytest.raises(ValueError, match=r"PYHVD_METRICS_PORT=65535: (plus|local) "):
        hvd.init()
