"""``Hosts.start``: ranks that make one call after the other; the agents are local commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_library
from tests.many_hosts import PATIENCE_S
from tests.unit.run.launchers.test_launch import _children, _descriptors, rank
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")


@pytest.fixture(scope="module")
def hosts() -> Iterator[hvd.Hosts]:
    """Hosts whose agents all tests share."""
    try:
        find_library()
    except LaunchError as exc:
        pytest.skip(str(exc))
    with hvd.Hosts(np=2) as hosts:
        yield hosts
    assert _children() == []


def _keep(value: int) -> int:
    before: int = sys.modules.setdefault("_kept", [0])[0]  # type: ignore[index, arg-type]
    sys.modules["_kept"][0] = value
    return before


def _sum() -> tuple[bool, int]:
    """Return whether an earlier call has called init(), and a sum over the ranks."""
    was_up = hvd.is_initialized()
    hvd.init()
    return was_up, int(hvd.allreduce(np.array(hvd.rank() + 1), op=hvd.Sum))


def test_a_call_finds_what_earlier_calls_have_left(hosts: hvd.Hosts) -> None:
    with hosts.start() as ranks:
        assert ranks.size == 2
        pids = ranks.run(os.getpid)
        assert [ranks.run(_sum) for _ in range(3)] == [[(known, 3)] * 2 for known in (False, True, True)]
        assert [ranks.run(_keep, (value,)) for value in (1, 2)] == [[0, 0], [1, 1]]
        assert ranks.run(rank) == [0, 1]
        assert ranks.run(os.getpid) == pids
    with hosts.start(np=1) as ranks:  # on the agents of the first; the ranks are new
        assert ranks.run(_sum) == [(False, 1)]
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_arguments_and_results_may_be_large(hosts: hvd.Hosts) -> None:
    array = np.arange(3_000_000)
    with hosts.start() as ranks:
        for factor in (1, 2):
            for result in ranks.run(lambda a, factor: a * factor, (array,), {"factor": factor}):
                np.testing.assert_array_equal(result, array * factor)


def test_calls_of_several_threads_get_their_own_results(hosts: hvd.Hosts) -> None:
    with hosts.start() as ranks, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: ranks.run(lambda: (i, rank())), range(40))) == [
            [(i, 0), (i, 1)] for i in range(40)
        ]


def test_a_failure_ends_all_ranks_and_is_the_cause_of_later_errors(hosts: hvd.Hosts) -> None:
    def fail() -> None:
        if rank() == 1:
            raise KeyError("lost")
        time.sleep(1000)

    with hosts.start() as ranks:
        pids = ranks.run(os.getpid)
        with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2 .* failed: KeyError") as failed:
            ranks.run(fail)
        assert isinstance(failed.value.__cause__, KeyError)
        assert failed.value.rank == 1
        with pytest.raises(LaunchError, match="ranks have ended, as an earlier call has failed: rank 1"):
            ranks.run(rank)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), PATIENCE_S)
    assert hosts.launch(rank) == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_between_two_calls_is_named(hosts: hvd.Hosts, number: int) -> None:
    with hosts.start() as ranks:
        os.kill(ranks.run(os.getpid)[1], number)
        with pytest.raises((hvd.RankFailedError, LaunchError), match=r"rank 1 of 2 .*SIG(KILL|SEGV)"):
            ranks.run(time.sleep, (1000,))


def test_a_rank_that_exits_is_named(hosts: hvd.Hosts) -> None:
    with hosts.start() as ranks, pytest.raises(hvd.RankFailedError, match=r"called sys\.exit\(3\)"):
        ranks.run(sys.exit, (3,))


def test_what_a_function_forks_answers_nothing(hosts: hvd.Hosts) -> None:
    def fork() -> tuple[str, int]:
        child = os.fork()
        if child == 0:
            return "child", 0
        return "parent", os.waitpid(child, 0)[1]

    with hosts.start() as ranks:
        assert ranks.run(fork) == [("parent", 0)] * 2
        assert ranks.run(rank) == [0, 1]


def test_exit_handlers_run_at_the_end(hosts: hvd.Hosts, tmp_path: Path) -> None:
    def register(folder: Path) -> None:
        import atexit

        atexit.register((folder / os.environ["HOROVOD_RANK"]).touch)

    with hosts.start() as ranks:
        ranks.run(register, (tmp_path,))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]


def test_a_rank_that_does_not_end_its_call_is_killed(
    hosts: hvd.Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyhvd.job.driver.living_ranks.STOP_S", 0.5)
    errors: list[BaseException] = []

    def call(ranks: Any) -> None:
        try:
            ranks.run(time.sleep, (1000,))
        except LaunchError as exc:
            errors.append(exc)

    ranks = hosts.start()
    (pid, _) = ranks.run(os.getpid)
    thread = threading.Thread(target=call, args=(ranks,))
    thread.start()
    time.sleep(0.2)
    ranks.close()
    thread.join(PATIENCE_S)
    assert "ended before they answered" in str(errors[0])
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("hosts")
def test_ctrl_c_ends_the_ranks(tmp_path: Path) -> None:
    program = f"""
        import os, pathlib, signal, sys, time
        import pyhvd as hvd

        # A suite in the background of a shell inherits SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def wait():
            rank = os.environ["HOROVOD_RANK"]
            (pathlib.Path({str(tmp_path)!r}) / rank).write_text(str(os.getpid()))
            time.sleep(1000)

        with hvd.Hosts(np=2) as hosts, hosts.start() as ranks:
            try:
                ranks.run(wait)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
    """
    job = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    files = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(each.exists() and each.read_text() for each in files), PATIENCE_S)
    pids = [each.read_text() for each in files]
    job.send_signal(signal.SIGINT)
    try:
        assert job.communicate(timeout=PATIENCE_S)[0] == "interrupted\n"
    finally:
        job.kill()
    assert job.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_output_of_calls_is_shown(hosts: hvd.Hosts, tmp_path: Path) -> None:
    with hosts.start(output_filename=str(tmp_path)) as ranks:
        ranks.run(print, ("one",))
        ranks.run(print, ("two",))
    for number in range(2):
        assert (tmp_path / f"rank.{number}" / "stdout").read_text() == "one\ntwo\n"


def test_no_descriptor_is_left(hosts: hvd.Hosts) -> None:
    counts = []
    for _ in range(2):
        with hosts.start() as ranks:
            ranks.run(rank)
        counts.append(_descriptors())
    assert counts[0] == counts[1]


def test_arguments_are_checked(hosts: hvd.Hosts) -> None:
    with hosts.start(np=1) as ranks:
        with pytest.raises(ValueError, match="fn=3: expected a function"):
            ranks.run(3)  # type: ignore[arg-type]
        ranks.close()
        with pytest.raises(LaunchError, match="the ranks have ended; start new ones"):
            ranks.run(rank)
    closed = hvd.Hosts(np=1)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.start()
